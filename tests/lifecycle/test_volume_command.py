"""`sallyport volume`, against a hostd that answers from a table. It tests `lifecycle/volumes.py`."""

import argparse
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import wire
from lifecycle import volumes
from wire.api.hostd import OPERATIONS, ListVolumes, RemoveVolume, VolumesListed, VolumeState
from wire.operations import parameters
from wire.sockets import bind_unix

KEPT = VolumeState("cache", 64 << 20, 2, "sbx-1", 0, True)


@pytest.fixture(name="hostd")
def _hostd(tmp_path: Path) -> Iterator[Path]:
    """A hostd with one volume, which is in use."""
    path = tmp_path / "hostd.sock"
    listener = bind_unix(path, 0o600, (os.geteuid(), os.getegid()))
    listener.listen(8)

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                received = wire.receive(sock)
                assert received is not None
                message = received[0]
                ident, op = message.pop("id"), message.pop("op")
                request = OPERATIONS.read(op, message)
                if isinstance(request, ListVolumes):
                    wire.send(sock, {"id": ident, "ok": parameters(VolumesListed((KEPT,)))})
                else:
                    assert isinstance(request, RemoveVolume)
                    error = {"code": "busy", "message": f"volume {request.name} is in use by sandboxes: 2"}
                    answer = {"ok": {}} if request.name == "unused" else {"error": error}
                    wire.send(sock, {"id": ident, **answer})

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield path
    listener.shutdown(2)
    listener.close()
    thread.join()


def command(socket: Path, *words: str) -> int:
    top = argparse.ArgumentParser()
    volumes.add_commands(top)
    return volumes.run(top.parse_args(words), socket, os.geteuid())


def test_the_volumes_are_listed(hostd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == command(hostd, "list")
    assert (
        "cache 64Mi used by 2 sandboxes, made 1970-01-01T00:00:00Z by sbx-1 removed with it\n"
        == capsys.readouterr().out
    )
    assert 0 == command(hostd, "list", "--json")
    assert "cache" == json.loads(capsys.readouterr().out)[0]["name"]


def test_a_removal_says_what_was_done_or_why_not(hostd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == command(hostd, "remove", "unused")
    assert "volume unused is removed\n" == capsys.readouterr().out
    assert 1 == command(hostd, "remove", "cache")
    assert "sallyport volume: volume cache is in use by sandboxes: 2 (busy)\n" == capsys.readouterr().err
    assert 2 == command(hostd, "remove", "../cache")
    assert "not a name of a volume" in capsys.readouterr().err


def test_without_a_server_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 1 == command(tmp_path / "none.sock", "list")
    assert "the server is not running" in capsys.readouterr().err
