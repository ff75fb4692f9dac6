"""The named volumes of one hostd: each is a file of a fixed size with a file system, which outlives its sandboxes.

- A volume is a directory `store/NAME` with the file `disk` and its record `volume.json`. Both are made under another
  name and renamed: a volume is complete, or it does not exist.
- All of its space is allocated on the host's disk when it is made. So its size limits what sandboxes write into it, and
  the host's disk cannot run full later.
- It is mounted at `mounts/NAME` while sandboxes use it. Its users are the mounts of its loop device below `stages`: the
  kernel has this state, also after hostd was killed. Devices and set-user-id bits have no effect on it.
- A volume is removed with the sandbox that made it, if that was requested or the launch failed. If other sandboxes use
  it then, it is removed after the last of them.

No lock: the caller makes one call at a time. All functions block.
"""

import errno
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import wire
from runtimes.engine import trees
from runtimes.engine.disk import DiskError, LoopDevice, allocate, attach_loop, loop_devices, mount_device, run
from wire.api.hostd import NamedVolume, VolumeState, check_volume_name

_DISK, _RECORD = "disk", "volume.json"
_NEW, _OLD = ".new-", ".old-"
_FREE_SECONDS: Final = 5.0
_REPAIRED: Final = 1
_MOST_RECORD: Final = 4096
_FLAGS: Final = ("-q", "-F", "-m", "0", "-E", "nodiscard,lazy_itable_init=1,root_owner=0:0")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VolumeLimits:
    """The operator's bounds: size of a volume without a requested size, largest size, largest number of volumes."""

    default_bytes: int
    most_bytes: int
    most: int


@dataclass(frozen=True, slots=True)
class _Record:
    """A volume. `settled`: a sandbox could write into it, so a failed launch does not remove it."""

    made_by: str
    made_at: int
    delete: bool
    settled: bool

    @property
    def temporary(self) -> bool:
        """Whether it is removed when no sandbox uses it any more."""
        return self.delete or not self.settled


_UNREADABLE: Final = _Record("", 0, delete=False, settled=True)
"""The record of a volume whose record cannot be read: only the operator removes it."""


class NamedVolumes:
    """The volumes in `store`, mounted in `mounts`, and used by the mounts below `stages`."""

    def __init__(self, store: Path, mounts: Path, stages: Path, limits: VolumeLimits) -> None:
        self._store, self._mounts, self._stages = store, mounts, stages
        self._limits = limits

    def open(self, volume: NamedVolume, sandbox: str) -> int:
        """Return a descriptor of the volume's root directory; make and mount the volume if that is necessary.

        Raises:
            wire.RequestError: it does not exist, or there is no room for it, or it cannot be used.
        """
        with _reported(volume.name):
            if not (self._store / volume.name).is_dir():
                self._make(volume, sandbox)
            elif not (record := self._record(volume.name)).settled and record.made_by != sandbox:
                self._write(self._store / volume.name, replace(record, settled=True))
            place = self._mount(volume.name)
            return os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def settle(self, sandbox: str) -> None:
        """Keep the volumes that the launch of `sandbox` has made. Those that it deletes are removed with it."""
        for name in self._names():
            record = self._record(name)
            if record.made_by == sandbox and not record.settled:
                self._write(self._store / name, replace(record, settled=True))

    def free(self) -> tuple[str, ...]:
        """Unmount the volumes that no sandbox uses, and remove those that are temporary. Return what is left."""
        devices, used, left = self._devices(), self._users(), []
        for name in self._names():
            if name in used:
                continue
            if name in devices or (self._mounts / name).is_dir():
                left += self._unmount(name)
            if self._record(name).temporary and self._device(name) is None:
                self._delete(name)
        return tuple(left)

    def sweep(self) -> tuple[str, ...]:
        """Do `free`, and remove what a killed hostd left: half-made volumes, and mounts of volumes that are gone."""
        for path in self._store.iterdir():
            if path.name.startswith((_NEW, _OLD)):
                shutil.rmtree(path)
        left, names = [*self.free()], self._names()
        for place in sorted(self._mounts.iterdir()):
            if place.name not in names:
                try:
                    trees.unmount(place)
                except OSError as error:
                    left.append(f"volumes: {error.strerror}: {place}")
        return tuple(left)

    def states(self) -> tuple[VolumeState, ...]:
        """Return every volume."""
        used, found = self._users(), []
        for name in self._names():
            record = self._record(name)
            found.append(
                VolumeState(name, self._size(name), used.get(name, 0), record.made_by, record.made_at, record.delete)
            )
        return tuple(found)

    def remove(self, name: str) -> None:
        """Remove a volume.

        Raises:
            wire.RequestError: there is none (`unknown_volume`), a sandbox uses it (`busy`), or it cannot be removed.
        """
        with _reported(name):
            if not (self._store / name).is_dir():
                raise wire.RequestError(wire.Code.UNKNOWN_VOLUME, f"there is no volume {name}")
            if used := self._users().get(name):
                raise wire.RequestError(wire.Code.BUSY, f"volume {name} is in use by sandboxes: {used}")
            if left := self._unmount(name):
                raise wire.RequestError(wire.Code.BUSY, "; ".join(left))
            self._delete(name)

    def _size(self, name: str) -> int:
        try:
            return (self._store / name / _DISK).stat().st_size
        except OSError:
            return 0

    def _names(self) -> list[str]:
        names = []
        for path in sorted(self._store.iterdir()):
            try:
                check_volume_name(path.name)
            except ValueError:
                continue
            names.append(path.name)
        return names

    def _record(self, name: str) -> _Record:
        try:
            with open(self._store / name / _RECORD, "rb") as file:
                found = json.loads(file.read(_MOST_RECORD))
            record = _Record(str(found["made_by"]), int(found["made_at"]), found["delete"], found["settled"])
        except (OSError, ValueError, KeyError, TypeError):
            _log.error("the record of volume %s cannot be read: it is kept", name)
            return _UNREADABLE
        return record if type(record.delete) is type(record.settled) is bool else _UNREADABLE

    def _write(self, directory: Path, record: _Record) -> None:
        temporary = directory / f"{_RECORD}.new"
        with open(temporary, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            json.dump(asdict(record), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(directory / _RECORD)
        _sync(directory)

    def _make(self, volume: NamedVolume, sandbox: str) -> None:
        if not volume.create:
            raise wire.RequestError(wire.Code.UNKNOWN_VOLUME, f"there is no volume {volume.name}")
        size = volume.size_bytes or min(self._limits.default_bytes, self._limits.most_bytes)
        if size > self._limits.most_bytes:
            raise wire.RequestError(
                wire.Code.VOLUME_SIZE, f"a volume has at most {self._limits.most_bytes} bytes on this host"
            )
        if len(self._names()) >= self._limits.most:
            raise wire.RequestError(wire.Code.FULL, f"there are {self._limits.most} volumes, the most on this host")
        found = os.statvfs(self._store)
        if size > found.f_bavail * found.f_frsize:  # an attempt would fill the disk for a moment
            raise wire.RequestError(wire.Code.DISK, f"the host has no room for volume {volume.name}")
        directory = self._store / f"{_NEW}{secrets.token_hex(8)}"
        directory.mkdir(mode=0o700)
        try:
            allocate(directory / _DISK, size)
            run("mkfs.ext4", *_FLAGS, str(directory / _DISK))
            record = _Record(sandbox, int(time.time()), delete=volume.delete, settled=False)
            self._write(directory, record)
            directory.rename(self._store / volume.name)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        _sync(self._store)

    def _delete(self, name: str) -> None:
        gone = self._store / f"{_OLD}{secrets.token_hex(8)}"
        (self._store / name).rename(gone)
        _sync(self._store)
        shutil.rmtree(gone)
        _log.info("volume %s is removed", name)

    def _devices(self) -> dict[str, LoopDevice]:
        """Return the loop device of each volume that has one."""
        store = self._store.resolve()
        return {device.file.parent.name: device for device in loop_devices() if device.file.parent.parent == store}

    def _device(self, name: str) -> LoopDevice | None:
        return self._devices().get(name)

    def _mount(self, name: str) -> Path:
        """Mount a volume, if it is not mounted; return the place.

        A file must never have two loop devices: two file systems would write into it.
        """
        place, file = self._mounts / name, self._store / name / _DISK
        device = self._device(name)
        if device is not None and _is_mount(place, device.number):
            return place
        if device is None:
            run("e2fsck", "-p", str(file), accepted=_REPAIRED)
            fd, node = attach_loop(file)
        else:  # another namespace holds a former mount
            node = device.path
            fd = os.open(node, os.O_RDWR | os.O_CLOEXEC)
        try:
            again = self._device(name)
            if again is None or again.path != node:
                raise DiskError(f"volume {name} has lost its device; try again")
            place.mkdir(mode=0o700, exist_ok=True)
            mount_device(node, place)
        finally:
            os.close(fd)
        with suppress(OSError):
            os.rmdir(place / "lost+found")
        return place

    def _unmount(self, name: str) -> list[str]:
        """Unmount a volume without users, and wait until its device is free. Return what is left."""
        trees.unmount(self._mounts / name)
        deadline = time.monotonic() + _FREE_SECONDS
        while (device := self._device(name)) is not None:
            if time.monotonic() > deadline:
                return [f"volume {name} is still mounted: {device.path}"]
            time.sleep(0.005)
        return []

    def _users(self) -> dict[str, int]:
        """Return the number of sandboxes that use each volume."""
        names = {device.number: name for name, device in self._devices().items()}
        stages = f"{self._stages.resolve()}/"
        users: dict[str, set[str]] = {}
        for number, point in _mounts():
            if number in names and point.startswith(stages):
                users.setdefault(names[number], set()).add(point.removeprefix(stages).split("/", 1)[0])
        return {name: len(sandboxes) for name, sandboxes in users.items()}


@contextmanager
def _reported(name: str) -> Iterator[None]:
    """Make refusals of the errors of the host."""
    try:
        yield
    except DiskError as error:
        raise wire.RequestError(wire.Code.VOLUME, f"volume {name}: {error}") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise wire.RequestError(wire.Code.DISK, f"the host has no room for volume {name}") from error
        raise wire.RequestError(wire.Code.VOLUME, f"volume {name}: {error.strerror}") from error


def _mounts() -> Iterator[tuple[str, str]]:
    """Yield the device number and the place of each mount of this namespace."""
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        fields = line.split(" ")
        yield fields[2], fields[4]


def _is_mount(place: Path, number: str) -> bool:
    try:
        status = os.stat(place, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}" == number


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
