"""Images come into the list at run time, are started on both runtimes, and leave it, on a real Docker and registry.

They test `runtimes/images/store.py`, `runtimes/images/workshop.py` and `lifecycle/images.py`.
"""

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from opensandbox.exceptions import SandboxApiException
from opensandbox.sync.sandbox import SandboxSync

from testbed.internet import REGISTRY
from testbed.stack import EMPTY_IMAGE, StackError
from tests.conftest import ON_RUNC, representatives
from tests.image_files import ImageFile, entry, tar, tar_of, write
from tests.images import Place, fetching, small

pytestmark = [pytest.mark.system, pytest.mark.images]

RUNTIMES = ("runc", "runsc")
TOOL = f"{REGISTRY}/team/tool"


@pytest.fixture(scope="module", name="place")
def _place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with fetching("img", tmp_path_factory.mktemp("images")) as place:
        yield place


def until(ask: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Call `ask` until its answer is true or the time is over. Return the last answer."""
    deadline = time.monotonic() + seconds
    while not (answer := ask()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return answer


def _started(place: Place, runtime: str, image: str) -> SandboxSync:
    return place.stack.create(runtime, image=image, policy=None, resource={"memory": "64Mi"})


def _end(sandbox: SandboxSync) -> None:
    sandbox.kill()
    sandbox.close()


def _runs(place: Place, runtime: str, image: str) -> str:
    """Start a sandbox from an image, and return what a program prints in it."""
    sandbox = _started(place, runtime, image)
    try:
        return str(sandbox.commands.run("echo in $0").text).strip()
    finally:
        _end(sandbox)


def _refusal(place: Place, image: str) -> SandboxApiException:
    with pytest.raises(SandboxApiException) as refused:
        _end(_started(place, "runc", image))
    return refused.value


def _source(place: Place, form: str) -> tuple[str, ...]:
    """Make an image in a form; return the arguments of `image add`."""
    image = small()
    image.changes = {"author": form}  # its own id
    saved = place.write(f"{form}.tar", image.saved(f"{form}/saved:1"))
    match form:
        case "saved":
            return (saved,)
        case "oci-archive":
            files = image.layout("from/oci", others=[ImageFile(architecture="arm64")])
            return (place.write("oci.tar", tar_of(files)), "--name", "from/oci")
        case "layout":
            return (str(write(place.directory / "layout", image.layout())), "--name", "from/layout")
        case _:
            place.registry.push(f"docker-archive:{saved}", "team/tool:1.2")
            return (f"{TOOL}:1.2",)


@pytest.mark.parametrize(
    "form", representatives(("saved", "oci-archive", "layout", "registry"), "oci-archive", "registry")
)
def test_an_image_of_each_form_is_started_on_both_runtimes(place: Place, form: str) -> None:
    said = place.image("add", *_source(place, form))
    name = said.split()[1].rstrip(":")
    try:
        shown = json.loads(place.image("show", name, "--json"))
        assert ["PATH", "TOKEN"] == shown["env_names"]
        assert "s3cret" not in json.dumps(shown)
        assert [] == shown["sandboxes"]
        assert ["in sh"] * 2 == [_runs(place, runtime, name).replace("/bin/", "") for runtime in RUNTIMES]
    finally:
        place.image("remove", name)
    assert name not in place.listed()
    assert shown["listed"]["digest"] not in place.docker_images()
    assert [] == place.leftovers()


def test_a_tag_is_resolved_once_and_a_pinned_digest_is_verified(place: Place) -> None:
    first, second = small(), small()
    second.changes = {"author": "second"}
    digest = place.registry.push(f"docker-archive:{place.write('a.tar', first.saved('a:1'))}", "team/pin:1")
    place.image("add", f"{TOOL[:-4]}pin:1")
    moved = place.registry.push(f"docker-archive:{place.write('b.tar', second.saved('a:1'))}", "team/pin:1")
    name = f"{REGISTRY}/team/pin"
    try:
        assert (first.id, [digest]) == tuple(place.listed()[f"{name}:1"][key] for key in ("digest", "digests"))
        assert "in" in _runs(place, "runc", f"{name}@{digest}")
        assert "400" in str(_refusal(place, f"{name}@{moved}").status_code)
        place.image("add", f"{name}@{moved}", "--name", "pinned")
        assert second.id == place.listed()["pinned"]["digest"]
        unknown = f"sha256:{'0' * 64}"
        assert "manifest unknown" in place.refused("add", f"{name}@{unknown}", "--name", "other")
        assert "exists" in place.refused("add", f"{name}:1")
        place.image("add", f"{name}:1", "--replace")
        assert second.id == place.listed()[f"{name}:1"]["digest"]
        assert until(lambda: first.id not in place.docker_images())
    finally:
        for one in ("pinned", f"{name}:1"):
            place.image("remove", one)
    assert not {first.id, second.id} & place.docker_images()


def test_of_an_index_the_host_s_platform_is_fetched(place: Place) -> None:
    """And the digest of the index is one of the image's digests, as other tools show it."""
    image, other = small(), ImageFile(architecture="arm64")
    image.changes = {"author": "index"}
    layout = write(place.directory / "index", image.layout("x", others=[other]))
    digest = place.registry.push(f"oci:{layout}:x", "team/multi:1", "--all")
    place.image("add", f"{REGISTRY}/team/multi:1")
    try:
        found = place.listed()[f"{REGISTRY}/team/multi:1"]
        assert (image.id, digest, 2) == (found["digest"], found["digests"][0], len(found["digests"]))
    finally:
        place.image("remove", f"{REGISTRY}/team/multi:1")


CODE = "opensandbox/code-interpreter:v1.1.0"
DOCUMENTED = ("ubuntu", "ubuntu:22.04", "python:3.11", "my-registry.com/python:3.11", CODE)
"""The names in the documents of the published SDKs."""


@pytest.mark.extended
def test_the_names_of_the_sdk_s_documents_work_after_an_alias(place: Place) -> None:
    place.image("add", place.write("sdk.tar", small().saved()), "--name", "own/image:1")
    try:
        for name in DOCUMENTED:
            assert "400" in str(_refusal(place, name).status_code)
            place.image("alias", "own/image:1", name)
            connection = place.stack.connection
            sandbox = SandboxSync.create(name, connection_config=connection, timeout=timedelta(minutes=5))
            try:
                info = sandbox.get_info()
                assert info.image is not None
                assert name == info.image.image
            finally:
                _end(sandbox)
        assert set(DOCUMENTED) == set(place.listed()["own/image:1"]["aliases"])
        place.image("remove", "ubuntu")
        assert "400" in str(_refusal(place, "ubuntu:latest").status_code)
        assert "in" in _runs(place, "runc", "python:3.11")
    finally:
        place.image("remove", "own/image:1")


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_removed_image_starts_no_sandbox_and_those_that_run_continue(place: Place, runtime: str) -> None:
    image = small()
    image.changes = {"author": runtime}
    place.image("add", place.write("gone.tar", image.saved("gone:1")))
    sandbox = _started(place, runtime, "gone:1")
    try:
        assert sandbox.id in place.image("remove", "gone:1")
        refused = _refusal(place, "gone:1")
        assert 400 == refused.status_code
        assert "DOCKER::SANDBOX_IMAGE_PULL_FAILED" in str(refused)
        assert EMPTY_IMAGE in str(refused), "the message lists what is available"
        assert "still" == str(sandbox.commands.run("echo still").text).strip()
        assert image.id in place.docker_images()
    finally:
        _end(sandbox)
    assert until(lambda: image.id not in place.docker_images())


def test_an_image_of_docker_is_no_image_of_the_list(place: Place) -> None:
    """Whatever is in Docker under some name: it can be started when the operator has added it."""
    made = place.stack.docker("import", "-c", "ENV PATH=/bin", os.environ["SALLYPORT_SMALL_IMAGE"], "stranger:1")
    assert 0 == made.returncode, made.stderr
    ident = made.stdout.strip()
    assert 400 == _refusal(place, "stranger:1").status_code
    assert 400 == _refusal(place, ident).status_code
    place.image("add", "docker:stranger:1")
    assert "in" in _runs(place, "runc", "stranger:1")
    place.image("remove", "stranger:1")
    assert ident in place.docker_images(), "another user's tag keeps it"
    assert 0 == place.stack.docker("rmi", "stranger:1").returncode


def test_the_list_is_the_same_after_each_restart(place: Place) -> None:
    """Of serve, dockerd, and the whole server, which is killed with a sandbox that runs."""
    place.image("add", place.write("kept.tar", small().saved("kept:1")), "--name", "kept:1", "--name", "kept:alias")
    removed = small()
    removed.changes = {"author": "removed before a kill"}
    place.image("add", place.write("removed.tar", removed.saved("removed:1")))
    sandbox, other = _started(place, "runc", "kept:alias"), _started(place, "runc", "removed:1")
    place.image("remove", "removed:1")
    before = place.listed()
    try:
        for name in ("serve", "dockerd"):
            pid = int((place.stack.run / "config" / f"{name}.pid").read_text().split()[0].strip('{",:pid '))
            subprocess.run(["kill", "-9", str(pid)], check=True)
            assert until(place.stack.healthy)
            assert before == until(lambda: _quiet(place))
        place.stack.kill()
        place.stack.start()
        assert before == until(lambda: _quiet(place))
        assert "still" == str(sandbox.commands.run("echo still").text).strip()
        assert "in" in _runs(place, "runc", "kept:1")
        assert 400 == _refusal(place, "removed:1").status_code
        assert removed.id in place.docker_images()
    finally:
        _end(sandbox)
        _end(other)
        place.image("remove", "kept:1")
    assert until(lambda: removed.id not in place.docker_images()), "its removal is completed after the kill"


def _quiet(place: Place) -> dict[str, dict[str, Any]] | None:
    try:
        found = place.listed()
    except StackError:  # it restarts
        return None
    return found if all(one["present"] for one in found.values()) else None


def test_a_server_that_is_killed_during_an_addition_leaves_nothing(place: Place) -> None:
    """Killed when it unpacks, and when Docker has the image and the list does not."""
    before, images = place.listed(), place.docker_images()
    noise = ImageFile([tar(entry(f"noise-{number}", os.urandom(1 << 20)) for number in range(60))])
    path = place.write("noise.tar", noise.saved("noise:1"))
    work = place.stack.state / "hostd" / "image-work"
    for at in (
        lambda: place.processes(),
        lambda: noise.id in (place.stack.state / "hostd" / "images.json").read_text(),
    ):
        adding = threading.Thread(target=lambda: _ignored(place, path))
        adding.start()
        assert until(at), "the addition was not seen"
        place.stack.kill()
        adding.join()
        place.stack.start()
        assert until(lambda: not place.leftovers()), place.leftovers()
        assert [] == list(work.iterdir())
        assert before == place.listed()
        assert until(lambda: images == place.docker_images()), place.docker_images() - images
    place.image("add", path)
    assert noise.id == place.listed()["noise:1"]["digest"]
    place.image("remove", "noise:1")


def _ignored(place: Place, path: str) -> None:
    with contextlib.suppress(StackError):  # the server is killed
        place.image("add", path)


def test_additions_of_one_name_are_made_one_after_the_other(place: Place) -> None:
    images = [small() for _ in range(4)]
    for number, image in enumerate(images):
        image.changes = {"author": str(number)}
    paths = [place.write(f"{number}.tar", image.saved()) for number, image in enumerate(images)]
    said: list[str] = []

    def add(path: str) -> None:
        try:
            said.append(place.image("add", path, "--name", "race:1"))
        except StackError as error:
            said.append(str(error))

    threads = [threading.Thread(target=add, args=(path,)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert [3, 1] == [sum(word in text for text in said) for word in ("(exists)", "added race:1")], said
        ident = place.listed()["race:1"]["digest"]
        assert {ident} == {image.id for image in images} & place.docker_images()
    finally:
        place.image("remove", "race:1")


def test_an_image_of_the_settings_stays(place: Place) -> None:
    path = place.write("mine.tar", small().saved(f"{EMPTY_IMAGE}:latest"))
    before = place.listed()[EMPTY_IMAGE]
    assert "an image of the settings" in place.refused("add", path)
    assert "an image of the settings" in place.refused("add", path, "--replace")
    assert "sallyport.images" in place.refused("remove", EMPTY_IMAGE)
    assert "unknown_image" in place.refused("remove", "no/such:1")
    assert before == place.listed()[EMPTY_IMAGE]


def test_each_change_of_the_list_is_in_the_audit_log(place: Place) -> None:
    image = small()
    place.image("add", place.write("logged.tar", image.saved("logged:1")))
    place.image("alias", "logged:1", "logged:2")
    place.image("remove", "logged:1")
    found = [
        one
        for one in place.stack.audit_records()
        if one["kind"].startswith("image.") and one.get("image") == "logged:1"
    ]
    assert ["image.add", "image.alias", "image.remove"] == [one["kind"] for one in found]
    assert {(image.id, "uid:0", "root")} == {(one["digest"], one["actor"], one["producer"]) for one in found}
    assert "logged.tar" in found[0]["source"]


def test_the_doctor_finds_the_fetching_program(place: Place) -> None:
    done = subprocess.run(
        [*place.stack.command[:-1], "doctor"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert "ok    registries" in done.stdout
