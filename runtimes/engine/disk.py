"""A separate disk for each sandbox: the size of a file system, not a quota, limits what the sandbox writes.

- A file of the full size is allocated on the host, so the host cannot run out of space later. It is formatted as ext4
  while the container is created, then mounted over the container's overlay2 directory, before its start. Upper and
  work directory of the root file system then are on this disk; so is the file in which runsc keeps its overlay. So
  one limit covers both runtimes.
- The file is unlinked when its loop device holds it. So the last unmount frees device and space, whichever process
  was killed.
- A device is identified by the name of its backing file, which contains the sandbox's id. No state is kept here:
  `detach` and `sweep` find the devices that a killed hostd attached.
- `detach` succeeds when the loop device is free again. A process that makes a mount namespace copies the mounts of
  that moment, and so keeps the device. The removal of the directory first removes all copies of the mount.

Project quotas would share one file system, but need CONFIG_QFMT_V2 for ext4 or CONFIG_XFS_QUOTA, and root inside runc
could leave its project by FS_IOC_FSSETXATTR. There is no journal, because nothing of a sandbox is used after a crash
of its host.

All functions block: call them in a worker thread.
"""

import ctypes
import errno
import fcntl
import os
import shutil
import stat
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SMALLEST: Final = 64 * 1024 * 1024
_SECONDS: Final = 60.0
_FREE_SECONDS: Final = 5.0
_ATTEMPTS: Final = 64
_BYTES_PER_INODE: Final = 8192  # a package tree has many small files
_FLAGS: Final = ("-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "nodiscard,lazy_itable_init=1")
_OPTIONS: Final = "errors=remount-ro,noinit_itable"
_MS_NOSUID, _MS_NODEV, _MS_NOATIME, _MNT_DETACH = 2, 4, 1024, 2
_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A
_AUTOCLEAR, _DIRECT_IO = 4, 16
_LOOP_CONFIG: Final = struct.Struct("=II 5Q 4I 64s 64s 32s 2Q 8Q")
_LOOP_MAJOR: Final = 7

_libc = ctypes.CDLL(None, use_errno=True)


class DiskError(Exception):
    """A disk cannot be made; the message says why. Nothing is left."""


@dataclass(frozen=True, slots=True)
class LoopDevice:
    """A loop device: its name below /sys/block, its number as in mountinfo, and the file that it holds."""

    name: str
    number: str
    file: Path

    @property
    def path(self) -> str:
        """The device node."""
        return f"/dev/{self.name}"


class Disks:
    """The disks of one hostd, made in `directory`, which nothing else uses."""

    def __init__(self, directory: Path, *, sparse: bool = False) -> None:
        """Store the parameters; `sparse`: the host's space is used as the disk is written, not at once."""
        self._directory = directory
        self._sparse = sparse

    def prepare(self, sandbox: str, size: int) -> Path:
        """Make a disk of `size` bytes, which `attach` will mount at its final place; return where it is mounted now.

        Raises:
            DiskError: the host has no space, or cannot do it.
        """
        self._directory.mkdir(mode=0o700, exist_ok=True)
        file, stage = self._directory / f"{sandbox}.img", self._stage(sandbox)
        with self._undone(sandbox), ExitStack() as temporary:  # the mount then holds device and file
            temporary.callback(file.unlink, missing_ok=True)
            allocate(file, size, sparse=self._sparse)
            run("mkfs.ext4", *_FLAGS, "-i", str(_BYTES_PER_INODE), str(file))
            fd, device = attach_loop(file)
            temporary.callback(os.close, fd)
            stage.mkdir(mode=0o700)
            mount_device(device, stage)
        return stage

    def attach(self, sandbox: str, layer: Path) -> int:
        """Mount the prepared disk at `layer`, a created container's overlay2 directory; return how many bytes fit.

        Raises:
            DiskError: the host cannot do it; the prepared disk was removed.
        """
        stage = self._stage(sandbox)
        with self._undone(sandbox):
            (device,) = (device.path for device in self._devices() if device.file.stem == sandbox)
            run("cp", "-a", "--", f"{layer}/.", str(stage))
            os.chmod(stage, stat.S_IMODE(layer.stat().st_mode))
            mount_device(device, layer)
            unmount(stage)
            stage.rmdir()
            found = os.statvfs(layer)
            return found.f_bavail * found.f_frsize

    def _stage(self, sandbox: str) -> Path:
        """Return the directory at which a disk is mounted until it is at its final place."""
        return self._directory / f"{sandbox}.stage"

    @contextmanager
    def _undone(self, sandbox: str) -> Iterator[None]:
        """Remove all of the disk if the work on it fails."""
        try:
            yield
        except OSError as error:
            self.detach(sandbox)
            if error.errno == errno.ENOSPC:
                raise DiskError("the host has no room for the sandbox's disk") from error
            raise DiskError(f"no disk: {error.strerror or type(error).__name__}") from error
        except BaseException:
            self.detach(sandbox)
            raise

    def number(self, sandbox: str) -> str | None:
        """Return the number of a sandbox's device (`7:2`); None if it has none."""
        return next((device.number for device in self._devices() if device.file.stem == sandbox), None)

    def numbers(self, sandboxes: frozenset[str]) -> frozenset[str]:
        """Return the numbers of the devices of several sandboxes."""
        return frozenset(device.number for device in self._devices() if device.file.stem in sandboxes)

    def detach(self, sandbox: str) -> tuple[str, ...]:
        """Unmount a sandbox's disk at all mount points; return what is left. Its container must be removed before."""
        deadline = time.monotonic() + _FREE_SECONDS
        while left := [device for device in self._devices() if device.file.stem == sandbox]:
            for point in mount_points({device.number for device in left}):
                unmount(point)
            with suppress(OSError):
                self._stage(sandbox).rmdir()  # this also removes the copies of the mount in other namespaces
            if time.monotonic() > deadline:
                break
            time.sleep(0.005)
        (self._directory / f"{sandbox}.img").unlink(missing_ok=True)
        with suppress(OSError):
            self._stage(sandbox).rmdir()  # without a device
        return tuple(f"disk {device.path} of {sandbox}" for device in left)

    def sweep(self, keep: frozenset[str] = frozenset()) -> tuple[str, ...]:
        """Detach every disk except those of `keep`; return what is left."""
        names = {device.file.stem for device in self._devices()}
        if self._directory.is_dir():
            names |= {path.stem for path in self._directory.iterdir()}
        return tuple(item for name in sorted(names - keep) for item in self.detach(name))

    def _devices(self) -> Iterator[LoopDevice]:
        place = self._directory.resolve()
        return (device for device in loop_devices() if device.file.parent == place)


def loop_devices() -> Iterator[LoopDevice]:
    """Yield every loop device of this host that holds a file."""
    for entry in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):  # freed during this loop
            file = Path(entry.read_text().rstrip("\n").removesuffix(" (deleted)"))
            number = (entry.parent.parent / "dev").read_text().strip()
            yield LoopDevice(entry.parent.parent.name, number, file)


def probe(directory: Path) -> str:
    """Prepare, attach and detach a disk in a temporary `directory`.

    Raises:
        DiskError: it cannot be done here.
    """
    disks, layer = Disks(directory / "disks"), directory / "layer"
    layer.mkdir()
    try:
        disks.prepare("probe", SMALLEST)
        held = disks.attach("probe", layer)
        if not 0 < held <= SMALLEST:
            raise DiskError("a disk is not of its size")
    finally:
        unmount(layer)
        shutil.rmtree(layer, ignore_errors=True)
        left = disks.detach("probe")
    if left:
        raise DiskError("; ".join(left))
    return "a disk of its own can be made and unmade"


def allocate(file: Path, size: int, *, sparse: bool = False) -> None:
    """Make a new file of `size` bytes, with all of its space on the host's disk unless it is `sparse`."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if sparse:
            os.ftruncate(fd, size)
        else:
            os.posix_fallocate(fd, 0, size)
    finally:
        os.close(fd)


def run(*command: str, accepted: int = 0) -> None:
    """Run a program. `accepted` is the highest exit status that is no failure.

    Raises:
        DiskError: it failed.
    """
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise DiskError(f"{command[0]} is missing") from None
    except subprocess.TimeoutExpired:
        raise DiskError(f"{command[0]} does not end within {_SECONDS:.0f} s") from None
    if not 0 <= done.returncode <= accepted:
        said = ((done.stderr or done.stdout).decode(errors="replace").strip().splitlines() or ["it says nothing"])[-1]
        raise DiskError(f"{command[0]} fails: {said[:200]}")


def attach_loop(file: Path) -> tuple[int, str]:
    """Attach `file` to a free loop device; return a descriptor that keeps it, and the device's path."""
    with open("/dev/loop-control", "rb+", buffering=0) as control, open(file, "rb+", buffering=0) as backing:
        for _ in range(_ATTEMPTS):
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            device = f"/dev/loop{number}"
            if not os.path.exists(device):
                os.mknod(device, stat.S_IFBLK | 0o600, os.makedev(_LOOP_MAJOR, number))
            fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            try:
                _configure(fd, backing.fileno(), file)
            except OSError as error:
                os.close(fd)
                if error.errno != errno.EBUSY:  # busy: another process took the device first
                    raise
            else:
                return fd, device
    raise DiskError("no loop device is free")


def _configure(fd: int, backing: int, file: Path) -> None:
    name = os.fsencode(file)[-63:]
    zeros = (0,) * 5
    fields = (backing, 0, *zeros, 0, 0, 0, _AUTOCLEAR | _DIRECT_IO, name, b"", b"", 0, 0, *(0,) * 8)
    fcntl.ioctl(fd, _LOOP_CONFIGURE, _LOOP_CONFIG.pack(*fields))


def mount_device(device: str, point: Path) -> None:
    """Mount an ext4 file system, without devices and set-user-id bits."""
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_NOATIME)
    if _libc.mount(device.encode(), os.fsencode(point), b"ext4", flags, _OPTIONS.encode()) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(point))


def unmount(point: Path) -> None:
    """Unmount what was mounted last at `point`, if something is."""
    _libc.umount2(os.fsencode(point), _MNT_DETACH)


def mount_points(numbers: set[str]) -> tuple[Path, ...]:
    """Return the mount points of devices with these numbers, in hostd's mount namespace."""
    lines = (line.split(" ") for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return tuple(Path(fields[4].encode().decode("unicode_escape")) for fields in lines if fields[2] in numbers)
