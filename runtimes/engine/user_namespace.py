"""Creates the user namespace of a runc container, with a range of host uids that nothing else uses.

The kernel counts many resources per user: inotify instances and watches, pending signals, timers, message queues,
locked memory, pipe pages, descriptors in flight, processes. It charges the owner of a user namespace as well. So each
sandbox has a range of uids, and its namespace is owned by the first of them.

`prepare` runs in the shim, which then becomes runc. Its mounts are in a private mount namespace that ends with runc,
so the host keeps none of them. In that namespace a tmpfs over /dev holds:

- the user namespace, which runc joins;
- the root file system: the same overlay2 layers, each idmapped (owners on disk do not change), and a new upper
  directory that belongs to the range;
- `sysfs` of the container's network namespace, and device nodes: runc can create neither in a user namespace. The
  nodes are not the host's, because locks and inotify on a shared node would connect sandboxes.

The process also enters the network namespace and takes over the container's rlimits. The reason: in the user
namespace runc lacks the privilege for the former, and on some hosts for the latter.

Standard library only. Needs Linux 5.19 and a file system that supports idmapped mounts (ext4, XFS, Btrfs).
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import stat
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing is slow to import, and this module is imported for each container
    from collections.abc import Container
    from typing import Any

RANGE = 65536
"""The number of users of a sandbox: 0 to 65535 inside."""
TERMINALS = 128
_SHELF = "/dev/sallyport"
_ROOT = f"{_SHELF}/root"
_NODES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_MOST_COPIED = 4096
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_BIND, _MS_REC, _MS_SLAVE = 0x1000, 0x4000, 0x80000
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_AT_FDCWD, _AT_EMPTY_PATH = -100, 0x1000
_CLONE_TREE, _CLOEXEC = 1, os.O_CLOEXEC
_FROM_EMPTY_PATH = 4
_ATTR_IDMAP = 0x00100000
_PR_SET_SECUREBITS, _NO_SETUID_FIXUP = 28, 1 << 2
_ESCAPED = re.compile(r"\\([0-7]{3})")

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _checked(_libc.mount(*arguments), target)


def prepare(config: dict[str, Any], base: int, network: tuple[str, int], volumes: Container[str] = ()) -> None:
    """Give the container of `config` the users `base` to `base + RANGE - 1` and a prepared network namespace.

    This process enters that network namespace and a private mount namespace. `network` is (path, inode). The mounts on
    `volumes` are idmapped, as all writable ones are: the users of the sandbox have the same numbers on disk.

    Raises:
        OSError: the kernel or a file system cannot do it.
        ValueError: the root file system is not an overlay, or not that of a new container; or the file system of a
            volume has no idmapped mounts.
    """
    users = _user_namespace(base)
    _enter_network(*network)
    lower, upper = _layers(config["root"]["path"])
    own = _own_part(upper, base)
    _unshare_mounts()
    written, work = map(_opened, own)
    layers = [_idmapped(path, users) for path in lower]
    trees = {mount["destination"]: _idmapped_volume(mount, users) for mount in _owned(config, volumes)}
    _cover_dev(base)
    _bind(f"/proc/self/fd/{users}", _file("user"))
    _overlay(layers, written, work)
    sources = {name: _put_volume(tree, f"volume{index}") for index, (name, tree) in enumerate(trees.items())}
    sysfs = _directory("sys")
    _mount("sysfs", sysfs, "sysfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    for fd in (users, written, work):
        os.close(fd)
    _rewrite(config, base, sysfs, sources)


def _rewrite(config: dict[str, Any], base: int, sysfs: str, volumes: dict[str, str]) -> None:
    linux = config["linux"]
    take_limits(config["process"])
    mapping = {"containerID": 0, "hostID": base, "size": RANGE}
    linux["uidMappings"], linux["gidMappings"] = [mapping], [mapping]
    linux["namespaces"] = [
        *(entry for entry in linux["namespaces"] if entry["type"] != "network"),
        {"type": "user", "path": f"{_SHELF}/user"},
    ]
    linux.pop("sysctl", None)  # hostd sets those of the network namespace
    config["root"]["path"] = _ROOT
    for mount in config["mounts"]:
        kind, options = mount.get("type"), mount.get("options") or []
        if kind == "sysfs":
            mount.update(type="bind", source=sysfs, options=["bind", "rprivate", *options])
        elif kind == "devpts":
            mount["options"] = [*options, f"max={TERMINALS}"]
        elif mount["destination"] in volumes:
            mount["source"] = volumes[mount["destination"]]


def prepare_exec(process: dict[str, Any], network: tuple[str, int]) -> None:
    """Prepare this process to become `runc exec`.

    runc first changes to the path of the root file system. It does not join the network namespace, which is no part
    of the container's configuration. Without this preparation the command would run in Docker's network namespace.
    """
    _enter_network(*network)
    _unshare_mounts()
    _cover_dev(0)
    take_limits(process)


def take_limits(process: dict[str, Any]) -> None:
    """Apply the rlimits of a container's process to this one, from which runc and the container inherit them.

    For a process of another user runc itself would need CAP_SYS_RESOURCE, which root does not have on every host.
    """
    for limit in process.pop("rlimits", None) or ():
        resource.setrlimit(getattr(resource, limit["type"]), (limit["soft"], limit["hard"]))


def _owned(config: dict[str, Any], volumes: Container[str]) -> list[dict[str, Any]]:
    """Return the bind mounts whose owners are users of the sandbox: volumes, those of the image too."""
    return [
        mount
        for mount in config["mounts"]
        if mount.get("type") == "bind" and (mount["destination"] in volumes or "ro" not in (mount.get("options") or []))
    ]


def _opened(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _overlay(layers: list[int], written: int, work: int) -> None:
    """Mount the root file system from detached mounts `layers`, topmost first, and two open directories."""
    places = [_put(tree, _directory(str(index))) for index, tree in enumerate(layers)]
    options = f"lowerdir={':'.join(places)},upperdir=/proc/self/fd/{written},workdir=/proc/self/fd/{work},index=off"
    options += ",redirect_dir=off,metacopy=off"  # a snapshot captures the upper directory alone
    _mount("overlay", _ROOT, "overlay", 0, options)


def probe(directory: str, base: int) -> None:
    """Make such a namespace and root file system for users from `base` in an empty `directory`.

    Changes this process as `prepare` does.

    Raises:
        OSError: this host cannot do it.
    """
    users = _user_namespace(base)
    for name in ("lower", "lower/file", "upper", "work"):
        os.mkdir(f"{directory}/{name}", 0o700)
    _unshare_mounts()
    written, work = _opened(f"{directory}/upper"), _opened(f"{directory}/work")
    layer = _idmapped(f"{directory}/lower", users)
    _cover_dev(base)
    _overlay([layer], written, work)
    if os.stat(f"{_ROOT}/file").st_uid != base:
        raise OSError("a layer keeps its owners")


def _user_namespace(base: int) -> int:
    """Create a user namespace that is owned by user `base`; return a descriptor of it."""
    ready, started = os.pipe()
    wait, go = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(go)
            # The process keeps its capabilities, because some hosts allow no unprivileged user namespaces.
            _checked(_libc.prctl(_PR_SET_SECUREBITS, _NO_SETUID_FIXUP, 0, 0, 0), "securebits")
            os.setresgid(base, base, base)
            os.setresuid(base, base, base)
            os.unshare(os.CLONE_NEWUSER)
            os.write(started, b"+")
            os.read(wait, 1)
            status = 0
        finally:
            os._exit(status)
    os.close(started)
    os.close(wait)
    try:
        if os.read(ready, 1) != b"+":
            raise OSError("no user namespace")
        for kind in ("uid", "gid"):
            with open(f"/proc/{child}/{kind}_map", "w", encoding="ascii") as file:
                file.write(f"0 {base} {RANGE}\n")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready)
        os.close(go)
        os.waitpid(child, 0)


def _enter_network(path: str, inode: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_ino != inode:
            raise OSError("the planned network namespace is not there")
        os.setns(fd, os.CLONE_NEWNET)
    finally:
        os.close(fd)


def _layers(root: str) -> tuple[list[str], str]:
    """Return the lower directories of the overlay at `root`, topmost first, and its upper directory."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        found = [line.rstrip("\n").split(" ") for line in file if _plain(line.split(" ", 5)[4]) == root]
    if not found or found[-1][-3] != "overlay":
        raise ValueError("the root file system is not an overlay")
    options = dict(item.partition("=")[::2] for item in found[-1][-1].split(","))
    beside = os.path.dirname(os.path.dirname(root))  # Docker's shortened names are relative to it
    lower = [os.path.join(beside, _plain(path)) for path in options["lowerdir"].split(":")]
    return lower, os.path.join(beside, _plain(options["upperdir"]))


def _plain(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)


def _own_part(upper: str, base: int) -> tuple[str, str]:
    """Create the upper and work directories of the container beside `upper`.

    The upper directory is a copy of `upper` for users from `base`. Docker keeps an overlay with `upper` mounted, and
    two overlays must not share an upper directory.
    """
    place = os.path.join(os.path.dirname(upper), "sallyport")
    os.mkdir(place, 0o700)
    os.mkdir(f"{place}/work", 0o700)
    _copy(upper, f"{place}/diff", base, [0])
    return f"{place}/diff", f"{place}/work"


def _copy(source: str, target: str, base: int, copied: list[int]) -> None:
    """Copy a tree of directories, links and empty files (Docker's mount points); add `base` to the owners."""
    copied[0] += 1
    status = os.lstat(source)
    if copied[0] > _MOST_COPIED or max(status.st_uid, status.st_gid) >= RANGE:
        raise ValueError("the container's own part is not that of a fresh one")
    if stat.S_ISDIR(status.st_mode):
        os.mkdir(target, 0o700)
        for name in os.listdir(source):
            _copy(os.path.join(source, name), os.path.join(target, name), base, copied)
    elif stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(source), target)
    elif stat.S_ISREG(status.st_mode) and status.st_size == 0:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    else:
        raise ValueError("the container's own part is not that of a fresh one")
    os.lchown(target, base + status.st_uid, base + status.st_gid)
    if not stat.S_ISLNK(status.st_mode):
        os.chmod(target, stat.S_IMODE(status.st_mode))


def _idmapped(path: str, users: int) -> int:
    """Return a detached mount of `path` that maps the owners of files into the user namespace."""
    tree = _checked(_libc.syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), _CLONE_TREE | _CLOEXEC), path)
    attributes = struct.pack("4Q", _ATTR_IDMAP, 0, 0, users)
    _checked(_libc.syscall(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, attributes, len(attributes)), path)
    return tree


def _idmapped_volume(mount: dict[str, Any], users: int) -> int:
    try:
        return _idmapped(mount["source"], users)
    except OSError as error:
        raise ValueError(f"the volume on {mount['destination']} cannot be idmapped: {error.strerror}") from None


def _put(tree: int, place: str) -> str:
    """Mount a detached mount at `place`; return `place`."""
    _checked(_libc.syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, place.encode(), _FROM_EMPTY_PATH), place)
    os.close(tree)
    return place


def _put_volume(tree: int, name: str) -> str:
    """Mount a detached mount of a directory or a file in the shelf; return its place."""
    return _put(tree, _directory(name) if stat.S_ISDIR(os.fstat(tree).st_mode) else _file(name))


def _unshare_mounts() -> None:
    os.unshare(os.CLONE_NEWNS)
    _mount("none", "/", "", _MS_REC | _MS_SLAVE)


def _cover_dev(base: int) -> None:
    """Mount a tmpfs over /dev, with device nodes of user `base` and an empty directory for the root file system."""
    _mount("none", "/dev", "tmpfs", _MS_NOSUID | _MS_NOEXEC, "mode=0755,size=64k")
    os.mkdir(_SHELF, 0o755)
    os.chmod(_SHELF, 0o755)  # noqa: S103 - only this mount namespace and the container's first process see it
    for name, numbers in _NODES.items():
        path = f"/dev/{name}"
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(*numbers))
        os.chmod(path, 0o666)  # noqa: S103 - the usual mode of these devices
        os.chown(path, base, base)
    _directory("root")


def _bind(source: str, target: str) -> None:
    _mount(source, target, "", _MS_BIND)


def _file(name: str) -> str:
    path = f"{_SHELF}/{name}"
    os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    return path


def _directory(name: str) -> str:
    path = f"{_SHELF}/{name}"
    os.mkdir(path, 0o755)
    os.chmod(path, 0o755)  # noqa: S103 - as above
    return path


if __name__ == "__main__":
    probe(sys.argv[1], int(sys.argv[2]))
