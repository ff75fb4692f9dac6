"""`sallyport image` asks hostd, and says in words what it answers."""

import argparse
import asyncio
import io
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import wire
from lifecycle import images
from wire import serving
from wire.api import hostd
from wire.api.hostd import AddImage, ImageOrigin, ListedImage, RemovedImage, ShownImage

DIGEST = f"sha256:{'a' * 64}"
LISTED = ListedImage("team/tool:1", ("tool",), DIGEST, (DIGEST,), "r.example.com/tool", False, "2026", 5_000_000, True)
SHOWN = ShownImage(LISTED, ("/bin/tool",), ("run",), ("PATH", "TOKEN"), "1000", "/work", (DIGEST,), ("sbx-1",))


class HostOfImages:
    """A stand-in of hostd that stores requests."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.answer: Any = LISTED

    async def handle(self, _client: wire.Client, request: Any, _fds: list[int]) -> Any:
        self.asked.append(request)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture(name="host")
async def _host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HostOfImages]:
    monkeypatch.setattr(images, "ROOT", os.geteuid())
    host = HostOfImages()
    listener = wire.bind_unix(tmp_path / "s")
    handler = serving.handler(hostd.OPERATIONS, host.handle)
    server = await wire.serve_unix(listener, handler, allowed_uids=frozenset({os.geteuid()}))
    yield host
    server.cancel()
    await asyncio.gather(server, return_exceptions=True)


async def said(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    """Return the exit status of a command, and what it prints."""
    top = argparse.ArgumentParser()
    images.add_commands(top)
    out = io.StringIO()
    options = top.parse_args(arguments)
    status = await asyncio.to_thread(images.run, options, tmp_path / "s", stdout=out, stderr=out)
    return status, out.getvalue()


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (("/a.tar",), AddImage(ImageOrigin.FILE, "/a.tar", (), "", False)),
        (("/d/../a.tar", "--name", "a", "--name", "b"), AddImage(ImageOrigin.FILE, "/a.tar", ("a", "b"), "", False)),
        (("r.example.com/a:1", "--replace"), AddImage(ImageOrigin.REGISTRY, "r.example.com/a:1", (), "", True)),
        (("docker:a:1",), AddImage(ImageOrigin.DOCKER, "a:1", (), "", False)),
        (("/a.tar", "--select", "x"), AddImage(ImageOrigin.FILE, "/a.tar", (), "x", False)),
    ],
)
async def test_a_source_is_a_file_a_name_in_a_registry_or_an_image_of_docker(
    tmp_path: Path, host: HostOfImages, arguments: tuple[str, ...], asked: AddImage
) -> None:
    assert (0, f"added team/tool:1: {DIGEST}\n") == await said(tmp_path, "add", *arguments)
    assert [asked] == host.asked


async def test_a_file_is_named_from_the_working_directory(
    tmp_path: Path, host: HostOfImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    await said(tmp_path, "add", "./a.tar")
    assert [str(tmp_path / "a.tar")] == [one.source for one in host.asked]


async def test_the_list_shows_name_digest_size_source_time_and_aliases(tmp_path: Path, host: HostOfImages) -> None:
    host.answer = hostd.ListedImages((LISTED,))
    status, text = await said(tmp_path, "list")
    assert (0, True) == (
        status,
        all(part in text for part in ("team/tool:1", DIGEST, "5.0 MB", "r.example.com", "tool")),
    )
    status, text = await said(tmp_path, "list", "--json")
    assert [DIGEST] == [one["digest"] for one in json.loads(text)]


async def test_an_image_is_shown_without_values_of_variables(tmp_path: Path, host: HostOfImages) -> None:
    host.answer = SHOWN
    _, text = await said(tmp_path, "show", "tool")
    assert all(part in text for part in ("PATH TOKEN", '["/bin/tool"]', '["run"]', "1000", "/work", "sbx-1"))
    _, text = await said(tmp_path, "show", "tool", "--json")
    assert ["PATH", "TOKEN"] == json.loads(text)["env_names"]


async def test_a_removal_says_what_still_runs(tmp_path: Path, host: HostOfImages) -> None:
    host.answer = RemovedImage(("a", "b"), tuple(f"sbx-{number}" for number in range(7)), False)
    _, text = await said(tmp_path, "remove", "a")
    assert "removed a b\nsbx-0, sbx-1, sbx-2, sbx-3, sbx-4 and 2 more still run from it" in text
    host.answer = RemovedImage(("a",), (), True)
    assert (0, "removed a\n") == await said(tmp_path, "remove", "a")


async def test_an_alias_and_a_refusal(tmp_path: Path, host: HostOfImages) -> None:
    assert (0, f"b is team/tool:1: {DIGEST}\n") == await said(tmp_path, "alias", "a", "b")
    host.answer = wire.RequestError(wire.Code.EXISTS, "there is an image b")
    assert (1, "sallyport image: there is an image b (exists)\n") == await said(tmp_path, "alias", "a", "b")


async def test_without_a_server_the_message_says_so(tmp_path: Path) -> None:
    status, text = await said(tmp_path, "list")
    assert (1, True) == (status, "the server is not running" in text)
