"""What hostd mounts for a sandbox, with real mounts, links, races and deaths.

The tests judge by the kernel's table of mounts, by inodes and by loop devices. They test `runtimes/volumes.py`,
`runtimes/engine/trees.py`, `runtimes/engine/host_paths.py` and `runtimes/engine/named_volumes.py`.
"""

import asyncio
import ctypes
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import wire
from runtimes.engine import disk, named_volumes, trees
from runtimes.engine.host_paths import HostPaths
from runtimes.engine.named_volumes import NamedVolumes, VolumeLimits
from runtimes.volumes import Staged, Volumes
from wire.api.hostd import HostPath, NamedVolume, VolumeMount, VolumeState

pytestmark = [pytest.mark.system, pytest.mark.images]

SIZE = disk.SMALLEST
ATTEMPTS, MOUNTS = 5000, 40
_RENAME_EXCHANGE, _RENAMEAT2 = 2, 316
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Place:
    """The directories of a host: `srv` is allowed, `own` and everything else is not."""

    root: Path
    sequence: int = 0
    known: list[Volumes] = field(default_factory=list)

    @property
    def srv(self) -> Path:
        return self.root / "srv"

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def volumes(self) -> Volumes:
        """The volumes of a hostd that has just started."""
        limits = VolumeLimits(SIZE, 2 * SIZE, 3)
        run = self.root / "run"
        named = NamedVolumes(self.store, run / "named", run / "stages", limits)
        own = (str(self.root / "own"), str(self.srv / "own"))
        self.known.append(Volumes(run, HostPaths([str(self.srv), str(self.root / "one")], own), named))
        return self.known[-1]

    def mounts(self) -> list[list[str]]:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        return [line.split(" ") for line in lines if f" {self.root}/" in line]

    def devices(self) -> list[Path]:
        return [device.file for device in disk.loop_devices() if self.root in device.file.parents]

    def left(self) -> list[str]:
        """Return every mount, loop device, stage and half-made volume."""
        files = [*(self.root / "run").rglob("*"), *self.store.glob(".*")]
        extra = [str(path) for path in files if path.name not in ("stages", "named")]
        return [*(fields[4] for fields in self.mounts()), *map(str, self.devices()), *extra]


@pytest.fixture(name="place")
def _place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="sallyport-volumes-") as name:
        place = Place(Path(name).resolve())
        for directory in ("srv/data", "srv/own", "own", "run/stages", "run/named", "store", "outside"):
            (place.root / directory).mkdir(parents=True)
        (place.root / "one").write_text("one file\n")
        (place.srv / "data" / "seen").write_text("seen\n")
        (place.root / "outside" / "secret").write_text("canary\n")
        try:
            yield place
        finally:
            do(place.volumes.sweep(frozenset()))
            for volumes in place.known:
                volumes.close()
            assert [] == place.left()


def do[T](work: Any) -> Any:
    async def run() -> Any:
        return await work

    return asyncio.run(run())


def host(path: object, target: str = "/v", sub_path: str = "", *, read_only: bool = False) -> VolumeMount:
    return VolumeMount(target, sub_path, read_only, HostPath(str(path)), None)


def named(name: str, target: str = "/v", sub_path: str = "", **options: Any) -> VolumeMount:
    plain: dict[str, Any] = {"create": True, "delete": False, "size_bytes": None}
    return VolumeMount(target, sub_path, False, None, NamedVolume(name, **(plain | options)))


def stage(volumes: Volumes, *mounts: VolumeMount, sandbox: str = "sbx-1") -> tuple[Staged, ...]:
    found: tuple[Staged, ...] = do(volumes.stage(sandbox, mounts))
    return found


def refused(volumes: Volumes, *mounts: VolumeMount) -> wire.Code:
    with pytest.raises(wire.RequestError) as caught:
        stage(volumes, *mounts, sandbox="sbx-refused")
    assert () == do(volumes.release("sbx-refused"))
    return caught.value.code


def states(volumes: Volumes) -> dict[str, VolumeState]:
    return {state.name: state for state in do(volumes.states())}


def test_an_allowed_directory_or_file_is_mounted_and_a_missing_directory_is_made(place: Place) -> None:
    volumes = place.volumes
    staged = stage(
        volumes,
        host(place.srv / "data"),
        host(place.srv / "data", "/ro", read_only=True),
        host(place.srv / "new" / "deep", "/new"),
        host(place.srv / "data", "/sub", "made/here"),
        host(place.root / "one", "/file"),
        host(place.srv / "data", "/seen", "seen"),
    )
    for mount in staged:
        status = os.stat(mount.source)
        assert (mount.device, mount.inode) == (status.st_dev, status.st_ino)
    options = {fields[4]: set(fields[5].split(",")) for fields in place.mounts()}
    for index, mount in enumerate(staged):
        assert {"nosuid", "nodev"} <= options[mount.source], index
        assert (index == 1) is ("ro" in options[mount.source])
    assert "seen\n" == Path(staged[0].source, "seen").read_text()
    with pytest.raises(OSError, match="Read-only"):
        Path(staged[1].source, "x").touch()
    for made in (place.srv / "new" / "deep", place.srv / "data" / "made" / "here"):
        assert (0o755, 0) == (stat.S_IMODE(made.stat().st_mode), made.stat().st_uid)
    assert ["one file\n", "seen\n"] == [Path(mount.source).read_text() for mount in staged[4:]]
    assert () == do(volumes.release("sbx-1"))
    assert "seen\n" == (place.srv / "data" / "seen").read_text()


def test_a_mount_that_comes_later_is_not_seen_through_a_volume(place: Place) -> None:
    """Neither one that was there before: a volume is one file system."""
    volumes, point = place.volumes, place.srv / "data" / "below"
    point.mkdir()
    for order in ("before", "after"):
        if order == "before":
            subprocess.run(["mount", "-t", "tmpfs", "none", str(point)], check=True)
            (point / "hidden").touch()
        (mount,) = stage(volumes, host(place.srv / "data"))
        if order == "after":
            subprocess.run(["mount", "-t", "tmpfs", "none", str(point)], check=True)
            (point / "hidden").touch()
        assert [] == os.listdir(f"{mount.source}/below"), order
        assert () == do(volumes.release("sbx-1"))
        subprocess.run(["umount", str(point)], check=True)


def test_a_path_that_is_not_allowed_is_refused(place: Place) -> None:
    """By a name, by `..` in disguise of a link, by what it contains, and by a file system of the kernel."""
    volumes = place.volumes
    (place.srv / "out").symlink_to(place.root / "outside")
    (place.srv / "up").symlink_to("..")
    (place.srv / "proc").mkdir()
    subprocess.run(["mount", "-t", "proc", "none", str(place.srv / "proc")], check=True)
    wrong = {
        *(place.root / "outside", place.root / "own", place.root, Path("/"), Path("/etc"), Path("/srvx")),
        *(place.root / "srvx", place.srv / "out", place.srv / "out" / "secret", place.srv / "up" / "outside"),
        *(place.srv / "own", place.srv / "own" / "below", place.srv, place.srv / "proc", Path("/proc/1"), Path("/dev")),
    }
    try:
        assert {wire.Code.PATH_FORBIDDEN} == {refused(volumes, host(path)) for path in wrong}
    finally:
        subprocess.run(["umount", str(place.srv / "proc")], check=True)
    assert not (place.root / "srvx").exists()
    assert not (place.srv / "own" / "below").exists()
    run = place.root / "run"
    store = NamedVolumes(place.store, run / "named", run / "stages", VolumeLimits(1, 1, 0))
    nothing = Volumes(run, HostPaths([], []), store)
    assert wire.Code.PATH_FORBIDDEN == refused(nothing, host(place.srv / "data"))
    nothing.close()


def test_an_entry_of_the_root_allows_what_is_below(place: Place) -> None:
    run = place.root / "run"
    store = NamedVolumes(place.store, run / "named", run / "stages", VolumeLimits(1, 1, 0))
    volumes = Volumes(run, HostPaths(["/"], [str(place.root / "own")]), store)
    (mount,) = stage(volumes, host(place.root / "outside"))
    assert "canary\n" == Path(mount.source, "secret").read_text()
    assert () == do(volumes.release("sbx-1"))
    assert {wire.Code.PATH_FORBIDDEN} == {
        refused(volumes, host(path)) for path in ("/", place.root, "/proc", "/sys/fs")
    }
    volumes.close()


def test_an_entry_that_does_not_exist_is_not_made(place: Place) -> None:
    (place.root / "one").unlink()
    assert wire.Code.PATH_MISSING == refused(place.volumes, host(place.root / "one"))
    assert wire.Code.PATH_MISSING == refused(place.volumes, host(place.root / "one" / "below"))
    assert not (place.root / "one").exists()


def test_a_link_in_the_operators_list_is_resolved(place: Place) -> None:
    """So is one in the path, if it leads to what is allowed."""
    run = place.root / "run"
    (place.root / "alias").symlink_to(place.srv)
    store = NamedVolumes(place.store, run / "named", run / "stages", VolumeLimits(1, 1, 0))
    volumes = Volumes(run, HostPaths([str(place.root / "alias")], []), store)
    for path in (place.srv / "data", place.root / "alias" / "data"):
        (mount,) = stage(volumes, host(path))
        assert "seen\n" == Path(mount.source, "seen").read_text()
        assert () == do(volumes.release("sbx-1"))
    volumes.close()


def test_sockets_devices_and_pipes_are_no_volumes(place: Place) -> None:
    volumes, data = place.volumes, place.srv / "data"
    os.mkfifo(data / "pipe")
    os.mknod(data / "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    os.mknod(data / "block", stat.S_IFBLK | 0o600, os.makedev(7, 0))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(data / "socket"))
        for name in ("pipe", "device", "block", "socket", "seen/below"):
            assert wire.Code.PATH_KIND == refused(volumes, host(data / name)), name
            assert wire.Code.SUB_PATH == refused(volumes, host(data, sub_path=name)), name


def test_a_sub_path_never_leads_over_a_link(place: Place) -> None:
    volumes, data = place.volumes, place.srv / "data"
    (data / "deep").mkdir()
    for name, target in (("absolute", place.root / "outside"), ("relative", "../../outside"), ("inner", "deep")):
        (data / name).symlink_to(target)
        for sub_path in (name, f"{name}/secret", f"{name}/new"):
            assert wire.Code.SUB_PATH == refused(volumes, host(data, sub_path=sub_path))
    assert ["secret"] == os.listdir(place.root / "outside")


def exchange(directory: int, one: str, other: str) -> None:
    """Exchange two names of an open directory, as a sandbox can."""
    _libc.syscall(_RENAMEAT2, directory, one.encode(), directory, other.encode(), _RENAME_EXCHANGE)


@contextmanager
def exchanging(place: Place) -> Iterator[set[int]]:
    """Exchange a directory and a link to the outside all the time, at two depths. Return the inodes of the outside."""
    data, outside = place.srv / "data", place.root / "outside"
    (data / "a" / "b").mkdir(parents=True)
    (outside / "b").mkdir()
    (data / "link").symlink_to(outside)
    (data / "a" / "link").symlink_to(outside / "b")
    directories = [os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (data, data / "a")]
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            exchange(directories[0], "a", "link")
            exchange(directories[1], "b", "link")

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield {os.stat(outside).st_ino, os.stat(outside / "b").st_ino}
    finally:
        stop.set()
        thread.join()
        for directory in directories:
            os.close(directory)


def test_no_race_opens_what_is_outside(place: Place) -> None:
    """Some attempts meet the directories and some a link: otherwise there was no race."""
    found: list[int] = []
    with exchanging(place) as outside:
        top = os.open(place.srv / "data", os.O_PATH)
        until = time.monotonic() + 60
        while len(found) < ATTEMPTS or (len(set(found)) < 2 and time.monotonic() < until):
            try:
                opened = trees.descend(top, ("a", "b"), 0)
            except (trees.NoFile, trees.NotPlain):
                found.append(0)
            else:
                found.append(trees.identity(opened)[1])
                os.close(opened)
        os.close(top)
    assert 2 == len(set(found))
    assert set() == set(found) & outside


@pytest.mark.parametrize("by", ["sub_path", "path"])
def test_no_race_mounts_what_is_outside(place: Place, by: str) -> None:
    volumes, data = place.volumes, place.srv / "data"
    found: set[int] = set()
    refusals = 0
    with exchanging(place) as outside:
        for _ in range(MOUNTS):
            mount = host(data, sub_path="a/b") if by == "sub_path" else host(data / "a" / "b")
            try:
                (staged,) = stage(volumes, mount)
            except wire.RequestError:
                refusals += 1
            else:
                found.add(os.stat(staged.source).st_ino)
            assert () == do(volumes.release("sbx-1"))
    assert found
    assert refusals
    assert set() == found & outside


def test_a_named_volume_keeps_its_files_and_is_shared_by_name(place: Place) -> None:
    volumes = place.volumes
    (first,) = stage(volumes, named("cache"))
    Path(first.source, "file").write_text("kept\n")
    do(volumes.settle("sbx-1"))
    (second,) = stage(volumes, named("cache", sub_path="below", create=False), sandbox="sbx-2")
    Path(second.source, "inner").touch()
    assert ["below", "file"] == sorted(os.listdir(first.source))
    assert ["inner"] == os.listdir(second.source)
    assert 2 == states(volumes)["cache"].sandboxes
    with pytest.raises(wire.RequestError) as busy:
        do(volumes.remove("cache"))
    assert wire.Code.BUSY == busy.value.code
    for sandbox in ("sbx-1", "sbx-2"):
        assert () == do(volumes.release(sandbox))
    assert ([], []) == (place.devices(), place.mounts())
    (third,) = stage(place.volumes, named("cache", create=False), sandbox="sbx-3")
    assert "kept\n" == Path(third.source, "file").read_text()
    assert () == do(volumes.release("sbx-3"))
    do(volumes.remove("cache"))
    assert {} == states(volumes)
    with pytest.raises(wire.RequestError) as unknown:
        do(volumes.remove("cache"))
    assert wire.Code.UNKNOWN_VOLUME == unknown.value.code
    assert [] == list(place.store.iterdir())


def test_a_named_volume_is_bounded_and_so_is_their_number(place: Place) -> None:
    volumes = place.volumes
    assert wire.Code.UNKNOWN_VOLUME == refused(volumes, named("none", create=False))
    assert wire.Code.VOLUME_SIZE == refused(volumes, named("big", size_bytes=2 * SIZE + 1))
    (mount,) = stage(volumes, named("full", size_bytes=2 * SIZE))
    taken = (place.store / "full" / "disk").stat().st_blocks
    with pytest.raises(OSError, match="No space left"), open(f"{mount.source}/fill", "wb", buffering=0) as file:
        while file.write(bytes(1 << 20)):
            continue
    assert 2 * SIZE <= taken * 512
    assert taken == (place.store / "full" / "disk").stat().st_blocks, "it takes space beyond what was allocated"
    do(volumes.settle("sbx-1"))
    stage(volumes, named("two"), named("three", "/w"), sandbox="sbx-2")
    assert wire.Code.FULL == refused(volumes, named("four"))
    assert () == do(volumes.release("sbx-1"))
    assert () == do(volumes.release("sbx-2"))
    assert ["full"] == list(states(volumes))
    do(volumes.remove("full"))


def test_a_volume_ends_with_the_sandbox_that_made_it_if_that_was_requested(place: Place) -> None:
    """One that was there before stays, whatever a later call requests. One in use ends with its last sandbox."""
    volumes = place.volumes
    stage(volumes, named("own", delete=True), named("kept", "/w"))
    do(volumes.settle("sbx-1"))
    stage(volumes, named("own", delete=True), named("kept", "/w", delete=True), sandbox="sbx-2")
    do(volumes.settle("sbx-2"))
    assert () == do(volumes.release("sbx-1"))
    assert ["kept", "own"] == list(states(volumes))
    assert () == do(volumes.release("sbx-2"))
    assert ["kept"] == list(states(volumes))
    do(volumes.remove("kept"))


def test_a_failed_launch_keeps_only_volumes_that_another_sandbox_has_seen(place: Place) -> None:
    volumes = place.volumes
    stage(volumes, named("alone"), named("seen", "/w"))
    stage(volumes, named("seen"), sandbox="sbx-2")
    assert () == do(volumes.release("sbx-1"))
    assert () == do(volumes.release("sbx-2"))
    assert ["seen"] == list(states(volumes))
    do(volumes.remove("seen"))


def test_a_volume_without_a_readable_record_is_kept_for_the_operator(place: Place) -> None:
    volumes = place.volumes
    stage(volumes, named("own", delete=True))
    (place.store / "own" / "volume.json").write_text("{")
    assert () == do(volumes.release("sbx-1"))
    assert "" == states(volumes)["own"].made_by
    do(volumes.remove("own"))


def test_a_damaged_volume_stops_no_start_and_can_be_removed(place: Place) -> None:
    volumes = place.volumes
    stage(volumes, named("own"), named("broken", "/w"))
    do(volumes.settle("sbx-1"))
    assert () == do(volumes.release("sbx-1"))
    (place.store / "broken" / "disk").write_bytes(bytes(SIZE))
    assert wire.Code.VOLUME == refused(volumes, named("broken"))
    (place.store / "broken" / "disk").unlink()
    assert {"broken": 0, "own": SIZE} == {name: state.size_bytes for name, state in states(volumes).items()}
    assert wire.Code.VOLUME == refused(volumes, named("broken"))
    assert () == do(place.volumes.sweep(frozenset()))
    for name in ("broken", "own"):
        do(volumes.remove(name))
    (place.store / ".old-x").mkdir()
    (place.store / ".old-x" / "fixed").touch()
    subprocess.run(["chattr", "+i", str(place.store / ".old-x")], check=True)
    try:
        assert 1 == len(do(place.volumes.sweep(frozenset())))
    finally:
        subprocess.run(["chattr", "-i", str(place.store / ".old-x")], check=True)


def test_a_start_unmounts_a_volume_that_is_no_longer_in_the_store(place: Place) -> None:
    """The operator removed the state of a host daemon that was killed."""
    stage(place.volumes, named("own"))
    trees.unmount(place.root / "run" / "stages" / "sbx-1" / "0")
    (place.root / "run" / "stages" / "sbx-1").rmdir()
    shutil.rmtree(place.store / "own")
    assert 1 == len(place.mounts())
    foreign = place.root / "run" / "named" / "foreign" / "directory"
    foreign.mkdir(parents=True)
    (said,) = do(place.volumes.sweep(frozenset()))
    assert f"not empty: {foreign.parent}" in said
    assert [] == place.mounts()
    foreign.rmdir()
    assert () == do(place.volumes.sweep(frozenset()))
    assert [] == place.left()


def test_a_file_never_has_two_loop_devices(place: Place) -> None:
    """A process in another mount namespace still has the volume, when it is mounted again."""
    volumes = place.volumes
    (first,) = stage(volumes, named("cache"))
    do(volumes.settle("sbx-1"))
    command = ["unshare", "-m", "sh", "-c", f"exec 3<{first.source}; echo ready; exec sleep 1000"]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert b"ready\n" == holder.stdout.readline()
        assert 1 == len(do(volumes.release("sbx-1")))
        assert 1 == len(place.devices())
        stage(volumes, named("cache"), sandbox="sbx-2")
        assert 1 == len(place.devices())
    finally:
        holder.kill()
        holder.communicate()
    assert () == do(volumes.release("sbx-2"))
    assert () == do(volumes.release("sbx-1"))
    do(volumes.remove("cache"))


STEPS: dict[str, tuple[Any, str]] = {
    "allocated": (named_volumes, "allocate"),
    "formatted": (named_volumes, "run"),
    "recorded": (NamedVolumes, "_write"),
    "made": (NamedVolumes, "_make"),
    "attached": (named_volumes, "attach_loop"),
    "mounted": (named_volumes, "mount_device"),
    "opened": (NamedVolumes, "open"),
    "staged": (trees, "mount"),
    "complete": (Volumes, "_stage"),
    "settled": (NamedVolumes, "settle"),
    "unmounted": (trees, "unmount"),
    "released": (NamedVolumes, "_unmount"),
    "removed": (named_volumes.shutil, "rmtree"),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_after_any_step_leaves_nothing_half_made(place: Place, step: str) -> None:
    """The next hostd finds the mounts of a sandbox that it does not adopt, and removes them and the new volumes."""
    owner, name = STEPS[step]
    original: Callable[..., Any] = getattr(owner, name)

    def then_die(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)
        return result

    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            setattr(owner, name, then_die)
            volumes = place.volumes
            stage(volumes, named("own", delete=True, sub_path="a"), host(place.srv / "data", "/w"))
            do(volumes.settle("sbx-1"))
            do(volumes.release("sbx-1"))
        os._exit(0)
    assert signal.SIGKILL == os.WTERMSIG(os.waitpid(child, 0)[1]), "the step is not reached"
    volumes = place.volumes
    assert () == do(volumes.sweep(frozenset()))
    assert [] == place.left()
    assert {} == states(volumes)
    assert "seen\n" == (place.srv / "data" / "seen").read_text()


def test_an_adopted_sandbox_keeps_its_volumes(place: Place) -> None:
    volumes = place.volumes
    (own,) = stage(volumes, named("own", delete=True))
    stage(volumes, named("other", delete=True), sandbox="sbx-2")
    following = place.volumes
    assert () == do(following.sweep(frozenset({"sbx-1"})))
    assert {"own": 1} == {name: state.sandboxes for name, state in states(following).items()}
    Path(own.source, "file").touch()
    assert () == do(following.release("sbx-1"))
    assert {} == states(following)


def test_work_on_volumes_is_serial(place: Place) -> None:
    """Many sandboxes make and release one volume at once."""
    volumes = place.volumes

    def turn(number: int) -> None:
        for _ in range(3):
            stage(volumes, named("shared", delete=True), host(place.srv / "data", "/w"), sandbox=f"sbx-{number}")
            assert () == do(volumes.release(f"sbx-{number}"))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(turn, range(8)))
    assert {} == states(volumes)
