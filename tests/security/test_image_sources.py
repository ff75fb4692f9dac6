"""Registries and archives of an attacker gain nothing, and neither does a compromised `serve` or skopeo.

The tests judge at the far end: the request logs of the demo's internet and of the registries, Docker, and what a
program reports that runs in skopeo's place. They test `runtimes/images/jail.py`, `runtimes/images/fetcher.py` and
their callers.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.internet import API, ATTACKER, METADATA_ADDRESS, REGISTRY, REGISTRY_ADDRESS, UP_ADDRESS
from testbed.with_parent import with_parent
from tests import image_files
from tests.conftest import representatives
from tests.image_files import ImageFile
from tests.images import PASSWORD, PORT, SECRET, Fetching, Place, fetching, small
from wire.api.hostd import IMAGE_REQUESTS

pytestmark = [pytest.mark.system, pytest.mark.images]

EVIL = f"{REGISTRY}:{PORT}/evil"

PROBE = f"""#!/usr/bin/python3 -IS
import ctypes, os, socket, sys
libc, found = ctypes.CDLL(None), []
def attempt(name, work):
    try:
        if work() is not False:
            found.append(name)
    except Exception:
        pass
def dial(address, port):
    socket.create_connection((address, port), 2).close()
def capable():
    data = (ctypes.c_uint32 * 6)()
    libc.syscall(125, (ctypes.c_uint32 * 2)(0x20080522, 0), data)
    return any(data)
attempt("public", lambda: dial("93.184.216.12", 443))
attempt("METADATA", lambda: dial("{METADATA_ADDRESS}", 80))
attempt("LOCAL", lambda: dial("{UP_ADDRESS}", 22))
attempt("LOOPBACK", lambda: dial("127.0.0.1", 22))
attempt("ROOT", lambda: os.setuid(0))
attempt("CAPABLE", capable)
attempt("NAMESPACE", lambda: os.setns(os.open("/run/netns", 0), 0))
attempt("USERS", lambda: libc.unshare(0x10000000) == 0 and capable())
attempt("DEVICE", lambda: os.mknod("/work/disk", 0o60600, os.makedev(8, 0)))
attempt("WRITE", lambda: open("/usr/x", "w"))
attempt("ETC", lambda: open("/etc/x", "w"))
attempt("HOME", lambda: os.listdir("/root"))
attempt("STATE", lambda: os.listdir("/var"))
attempt("PROC", lambda: os.listdir("/proc"))
attempt("SOCKET", lambda: os.listdir("/run/sallyport"))
attempt("KEY", lambda: open("/etc/shadow"))
attempt("own", lambda: open("/work/own", "w"))
attempt("FULL", lambda: os.posix_fallocate(os.open("/work/own", os.O_RDWR), 0, 1 << 42))
print("uid", os.getuid(), sorted(os.listdir("/")), *found, file=sys.stderr)
if os.fork() == 0:  # a process that would outlive skopeo
    os.setsid()
    os.closerange(0, 64)
    import time
    time.sleep(600)
sys.exit(1)
"""


class Bounded(Fetching):
    """A server that takes small images only."""

    largest = "32Mi"


class Probing(Fetching):
    """A server with another program in skopeo's place."""

    @property
    def settings(self) -> str:
        program = self.directory / "probe"
        program.write_text(PROBE)
        program.chmod(0o755)
        self.skopeo = str(program)
        return super().settings


@pytest.fixture(scope="module", name="place")
def _place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with fetching("ims", tmp_path_factory.mktemp("images"), Bounded) as place:
        yield place


@pytest.fixture(scope="module", name="evil")
def _evil(place: Place) -> Iterator[Path]:
    """Run the attacker's registry; return its notes."""
    internet, notes = place.registry.internet, place.directory / "evil.jsonl"
    arguments = (str(internet.directory / f"{REGISTRY}.pem"), REGISTRY_ADDRESS, str(PORT), str(notes))
    command = ("nsenter", f"--net={internet.path(internet.net)}", sys.executable, "-m", "tests.hostile_registry")
    process = subprocess.Popen(with_parent(*command, *arguments), stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert b"ready" == process.stdout.readline().strip()
    yield notes
    process.kill()
    process.wait()
    process.stdout.close()


def _requests(place: Place, host: str) -> list[dict[str, Any]]:
    return [note for note in place.registry.internet.notes() if note["host"] == host and "target" in note]


def test_a_redirect_of_a_registry_does_not_lead_to_an_address_that_no_worker_may_dial(place: Place, evil: Path) -> None:
    """The guard refuses the packet. The control is a redirect to a public address, which skopeo follows."""
    before = len(_requests(place, "metadata"))
    said = place.refused("add", f"{EVIL}/metadata:1")
    assert "layer" not in place.listed()
    assert before == len(_requests(place, "metadata")), said
    assert METADATA_ADDRESS in said
    followed = len(_requests(place, ATTACKER))
    place.refused("add", f"{EVIL}/attacker:1")
    assert followed < len(_requests(place, ATTACKER)), "the control must follow its redirect"
    notes = [json.loads(line) for line in evil.read_text().splitlines()]
    assert {None} == {note["login"] for note in notes}, "no login is for this registry"
    assert [] == place.leftovers()


def test_a_name_that_is_not_allowed_is_refused_before_a_packet(place: Place) -> None:
    requests, heard = len(place.registry.requests), len(place.registry.internet.notes())
    audited = len(place.stack.audit_records())
    others = (f"{REGISTRY}/other/tool:1", f"{ATTACKER}/team/tool:1", f"{METADATA_ADDRESS}/x", "localhost:5000/x")
    for name in (*others, "ubuntu", f"{REGISTRY}:5000/team/tool:1"):
        assert "(forbidden)" in place.refused("add", name)
    for name in ("-v /:/host", "host:2375/../x", f"{REGISTRY}/team/tool:1 --debug", "--help", "docker://x"):
        assert "(invalid)" in place.refused("add", "--", name)
    assert (requests, heard) == (len(place.registry.requests), len(place.registry.internet.notes()))
    kinds = {one["kind"] for one in place.stack.audit_records()[audited:]}
    assert not kinds & {"image.fetch", "secret.release", "image.add"}


class _Processes:
    """Reads the command line and the environment of each process, again and again."""

    def __enter__(self) -> "_Processes":
        self.seen: set[str] = set()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        return self

    def _read(self) -> None:
        while not self._ends.is_set():
            for path in Path("/proc").glob("[0-9]*"):
                for name in ("cmdline", "environ"):
                    try:
                        self.seen.add((path / name).read_text(errors="replace"))
                    except OSError:
                        continue

    def jailed(self) -> list[str]:
        """Return what was read of the image jail and of its programs."""
        return [text for text in self.seen.copy() if "runtimes.images.jail" in text or "--insecure-policy" in text]

    def fetches(self) -> bool:
        """Return whether a program with a login was read. It can end between two readings."""
        return any("--src-authfile" in text or "--authfile" in text for text in self.jailed())

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()


MOST_FETCHES = 20
"""The number of fetches in which one must be seen. A reading of all processes can take longer than a fetch."""


def test_a_login_is_seen_by_its_registry_only(place: Place) -> None:
    """On no command line, in no environment, log, record or file of the server, except sealed in the vault."""
    image = small()
    place.registry.push(f"docker-archive:{place.write('a.tar', image.saved('a:1'))}", "team/login:1")
    with _Processes() as processes:
        place.image("add", f"{REGISTRY}/team/login:1")
        for _ in range(MOST_FETCHES):
            if processes.fetches():
                break
            place.image("remove", f"{REGISTRY}/team/login:1")
            place.image("add", f"{REGISTRY}/team/login:1")
    canaries = (PASSWORD, place.registry.encoded_login)
    try:
        assert processes.fetches()
        assert [] == [text for text in processes.jailed() for canary in canaries if canary in text]
        files = [path for root in (place.stack.run, place.stack.state) for path in root.rglob("*") if path.is_file()]
        texts = {path: _bytes(path) for path in (*files, place.stack.log)}
        assert [] == [path for path, text in texts.items() for canary in canaries if canary.encode() in text]
        releases = [one for one in place.stack.audit_records() if one["kind"] == "secret.release"]
        assert [("allow", SECRET, REGISTRY, "login")] == [
            (one["decision"], one["secret"], one["host"], one["action"]) for one in releases[-1:]
        ]
    finally:
        place.image("remove", f"{REGISTRY}/team/login:1")
    place.stack.sallyport("vault", "rotate", SECRET, stdin="builder:wrong-password")
    try:
        assert "unauthorized" in place.refused("add", f"{REGISTRY}/team/login:1")
        place.stack.sallyport("vault", "delete", SECRET)
        assert "unknown_secret" in place.refused("add", f"{REGISTRY}/team/login:1")
        place.stack.sallyport("vault", "put", SECRET, "--host", API, stdin=place.registry.login)
        assert "not_bound" in place.refused("add", f"{REGISTRY}/team/login:1")
        place.stack.sallyport("vault", "delete", SECRET)
    finally:
        place.stack.sallyport("vault", "put", SECRET, "--host", REGISTRY, stdin=place.registry.login)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # a namespace is no file, and a file can go
        return b""


ASK = """
import json, os, socket, sys
import wire
os.setgroups([])
os.setresgid(*[int(sys.argv[3])] * 3)
os.setresuid(*[int(sys.argv[3])] * 3)
with socket.socket(socket.AF_UNIX) as sock:
    sock.settimeout(60)
    sock.connect(sys.argv[1])
    for request in json.loads(sys.argv[2]):
        wire.send(sock, {"id": 1, **request})
        print(wire.receive(sock)[0].get("error", {}).get("code", "answered"))
"""


def test_serve_cannot_change_the_images(place: Place) -> None:
    """hostd refuses each of these requests from its user, and answers root."""
    path = place.write("serve.tar", small().saved("serve:1"))
    add = {"origin": "file", "source": path, "names": ["serve:1"], "selected": "", "replace": True}
    requests = [
        {"op": "add_image", **add},
        {"op": "alias_image", "name": "sallyport/empty", "alias": "serve:2", "replace": True},
        {"op": "list_images"},
        {"op": "show_image", "name": "sallyport/empty"},
        {"op": "remove_image", "name": "sallyport/empty"},
    ]
    assert len(IMAGE_REQUESTS) == len(requests)
    before = place.listed()
    arguments = (str(place.stack.run / "hostd.sock"), json.dumps([*requests, {"op": "images"}]))
    assert ["forbidden"] * 5 + ["answered"] == _asked(*arguments, "700000001")
    assert before == place.listed()
    assert ["answered"] == _asked(arguments[0], json.dumps([{"op": "list_images"}]), "0")


def _asked(*arguments: str) -> list[str]:
    """Ask hostd as another user, after the imports: that user cannot read the interpreter's files."""
    done = subprocess.run([sys.executable, "-c", ASK, *arguments], capture_output=True, text=True, check=False)
    assert "" == done.stderr
    return done.stdout.split()


def test_a_program_in_skopeo_s_place_is_confined(tmp_path: Path) -> None:
    """It reaches public addresses and its own directory, and nothing else; and ends with the fetch."""
    with fetching("imp", tmp_path, Probing) as place:
        said = place.refused("add", f"{REGISTRY}/team/tool:1")
        assert "skopeo: uid 700005094" in said
        assert "public own (image)" in said, said
        assert all(f"'{name}'" in said for name in ("usr", "work", "run"))
        assert not any(f"'{name}'" in said for name in ("proc", "sys", "var", "root", "home", "tmp"))
        assert [] == place.leftovers()
        owners = [path for path in Path("/proc").glob("[0-9]*") if _owner(path) == 700005094]
        assert [] == owners


def _owner(path: Path) -> int:
    try:
        return path.stat().st_uid
    except OSError:
        return -1


_ZEROS = image_files.tar_of({"zeros": bytes(40 << 20)})
_OUTSIDE = image_files.tar([image_files.entry("../../../../x", b"x")])
_LINKED = image_files.tar([image_files.entry("x", type=b"1", linkname="/etc/shadow")])
HOSTILE = {
    "a layer that leaves the root": ImageFile([_OUTSIDE]).saved("h:1"),
    "a hard link out of the root": ImageFile([_LINKED]).saved("h:1"),
    "a device": ImageFile([image_files.tar([image_files.entry("sda", type=b"4", devmajor=8, devminor=0)])]).saved(
        "h:1"
    ),
    "another content than its digest": ImageFile(
        changes={"rootfs": {"type": "layers", "diff_ids": [image_files.digest(b"x")]}}
    ).saved("h:1"),
    "40 MiB of zeros in 40 KiB": image_files.tar_of(ImageFile([_ZEROS]).layout()),
    "schema 1": image_files.tar_of({"oci-layout": b"{}", "index.json": b'{"schemaVersion": 1, "fsLayers": []}'}),
}


@pytest.mark.parametrize(
    "what",
    representatives(
        HOSTILE, "a hard link out of the root", "another content than its digest", "40 MiB of zeros in 40 KiB"
    ),
)
def test_an_archive_of_an_attacker_is_refused_and_leaves_nothing(place: Place, what: str) -> None:
    before, images = place.listed(), place.docker_images()
    assert "(image)" in place.refused("add", place.write("hostile.tar", HOSTILE[what]), "--name", "h:1")
    assert (before, images, []) == (place.listed(), place.docker_images(), place.leftovers())


def test_an_archive_does_not_take_the_name_of_another_image(place: Place) -> None:
    """Neither in the list nor in Docker: Docker never reads the names of an archive."""
    first, second = small(), small()
    second.changes = {"author": "second"}
    place.image("add", place.write("first.tar", first.saved("mine:1")))
    try:
        tags = place.stack.docker("images", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()
        assert "(exists)" in place.refused("add", place.write("second.tar", second.saved("mine:1")))
        place.image("add", place.write("second.tar", second.saved("mine:1", "sallyport/empty:latest")), "--name", "o:1")
        now = place.stack.docker("images", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()
        assert [True] == [tag.startswith("sallyport-image-") for tag in set(now) - set(tags)]
        assert first.id == place.listed()["mine:1"]["digest"]
        place.image("remove", "o:1")
    finally:
        place.image("remove", "mine:1")
