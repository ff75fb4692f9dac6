"""Becomes a daemon: joins its group, enters its namespace, makes its interpreter readable, drops its user, executes.

Started as root, `python3 -IS enter.py <json>`, standard library only. The JSON is an object with `cgroup` (a
directory), `netns` (path or null), `uid`, `gid`, `locks` (it locks its memory), `expose` (paths the daemon must be able
to read) and `argv`.

- Another user could not execute an interpreter below a closed home directory. Only in that case the daemon gets its
  own mount namespace. There an empty directory covers the closed one, and only the exposed paths are mounted into it.
- In that mount namespace no mount of a network namespace remains, so that a daemon never keeps a slot's namespace
  alive.
- Daemons with their own user can gain no privileges (`no_new_privs`).
- A daemon that locks its memory may lock all of it where root may permit that. The limit of its group is the bound.
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import sys

_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_PR_SET_NO_NEW_PRIVS = 38
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _check(_libc.mount(*arguments), target)


def closed_ancestor(path: str) -> str | None:
    """Return the topmost directory of `path` that other users cannot enter, None if there is none."""
    parts = path.strip("/").split("/")
    for count in range(1, len(parts)):
        directory = "/" + "/".join(parts[:count])
        if not os.stat(directory).st_mode & 0o001:
            return directory
    return None


def expose(paths: list[str]) -> None:
    """Make `paths` reachable for every user, if necessary in a new mount namespace."""
    closed = {path: closed_ancestor(path) for path in dict.fromkeys([*paths, *map(os.path.realpath, paths)])}
    wanted = {path: directory for path, directory in closed.items() if directory is not None}
    if not wanted:
        return
    os.unshare(os.CLONE_NEWNS)
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    _forget_namespaces()
    # Opened in this namespace, before the directories are covered: so the binds below find the original files.
    sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in wanted}
    for directory in sorted(set(wanted.values())):
        _mount("none", directory, "tmpfs", 0, "mode=0711,size=64k")
    for path, fd in sorted(sources.items()):
        os.makedirs(path, mode=0o755, exist_ok=True)
        _mount(f"/proc/self/fd/{fd}", path, "", _MS_BIND)
        os.close(fd)


def _namespaces() -> list[str]:
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        return [line.split(" ")[4] for line in file if " - nsfs " in line]


def _forget_namespaces() -> None:
    """Unmount every network namespace here. A mount that another process removes meanwhile is no error."""
    for point in _namespaces():
        if _libc.umount2(point.encode(), _MNT_DETACH) != 0 and ctypes.get_errno() not in (errno.ENOENT, errno.EINVAL):
            _check(-1, point)
    if left := _namespaces():
        raise OSError(errno.EBUSY, "namespaces stay mounted", left[0])


def become(uid: int, gid: int) -> None:
    """Drop to `uid`, permanently."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if uid != 0:
        _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def permit_locks() -> None:
    """Permit any amount of locked memory, if this process may: a container can lack the capability."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def main(text: str) -> None:
    """Perform the steps and execute the daemon. Never returns."""
    order = json.loads(text)
    os.umask(0o022)
    with open(os.path.join(order["cgroup"], "cgroup.procs"), "wb", buffering=0) as group:
        group.write(b"0")
    if order["netns"] is not None:
        fd = os.open(order["netns"], os.O_RDONLY | os.O_CLOEXEC)
        os.setns(fd, os.CLONE_NEWNET)
        os.close(fd)
    expose(order["expose"])
    os.umask(0o077)
    if order["locks"]:
        permit_locks()
    become(order["uid"], order["gid"])
    os.execv(order["argv"][0], order["argv"])  # noqa: S606 - becomes the daemon; no shell


if __name__ == "__main__":
    main(sys.argv[1])
