"""Fetches or unpacks an image where it can do no harm. `python -m runtimes.images.jail ORDER`, started by hostd.

The process imports its code as root, then confines itself, and only then reads the first byte of an image:

- its own user, without capabilities and without a way to gain any; limits of memory, processes and files;
- a root of its own: an empty tmpfs with the work directory. For skopeo also `/usr`, read-only, and the files of
  `/etc` that a TLS client needs;
- to unpack: a network namespace without any link. To fetch: the upstream namespace, where the guard judges the packets
  of this user like those of a worker;
- a filter of system calls (`filter`), which permits no further namespace;
- a process namespace of its own. When its first process ends, the kernel kills the others.

It prints one JSON object: the result, or why the image is refused.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from runtimes.images.fetcher import Fetcher, keep_login
from runtimes.images.filter import filter_program
from runtimes.images.manifests import RefusedImage
from runtimes.images.sources import Archive, Directory
from runtimes.images.unpacker import Unpacked, Unpacker
from wire import codec

WORK: Final = Path("/work")
OUT: Final = "out"
SOURCE: Final = "source"
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_PR_SET_SECCOMP, _SECCOMP_FILTER = 22, 2
_CAPABILITIES = 64
_SYS_PIVOT_ROOT: Final = {"x86_64": 155, "aarch64": 41}
_OPEN_FILES = 256
_MOST_ROOTS = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


class Task(StrEnum):
    """What is done in the jail."""

    FETCH = "fetch"
    """Fetch `name` from its registry into the work directory."""
    UNPACK_FETCHED = "unpack_fetched"
    """Unpack what was fetched."""
    UNPACK_ARCHIVE = "unpack_archive"
    """Unpack the archive at standard input."""
    UNPACK_LAYOUT = "unpack_layout"
    """Unpack the OCI layout in the work directory."""


@dataclass(frozen=True, slots=True)
class JailOrder:
    """One piece of work.

    Attributes:
        groups: the control groups to join.
        netns: the upstream namespace; None is the present one. It is used to fetch only.
        root: an empty directory, for the jail's root.
        work: the work directory. It becomes `/work`.
        uid: the user.
        files: for `/etc`, by path.
        roots: the file with the authorities of TLS servers.
        skopeo: the program.
        name: what to fetch; for an archive, which image of several; for a fetched one, the digest that must match.
        login: the descriptor of a pipe with the credentials; None for none.
        most: the limit of the image, in bytes.
    """

    task: Task
    groups: tuple[str, ...]
    netns: str | None
    root: str
    work: str
    uid: int
    files: Mapping[str, str]
    roots: str
    skopeo: str
    name: str
    architecture: str
    login: int | None
    most: int
    file_size: int


@dataclass(frozen=True, slots=True)
class Report:
    """The result of an order: an image, nothing, or the reason of a refusal."""

    refused: str
    image: Unpacked | None


class _FilterProgram(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _check(_libc.mount(*arguments), target)


def _bind(source: str, target: str, flags: int) -> None:
    _mount(source, target, "", _MS_BIND)
    _mount("none", target, "", _MS_REMOUNT | _MS_BIND | flags)


def _separate(order: JailOrder) -> None:
    """Enter or make the namespaces, and become the first process of its own process namespace."""
    fetching = order.task is Task.FETCH
    if fetching and order.netns is not None:
        fd = os.open(order.netns, os.O_RDONLY | os.O_CLOEXEC)
        os.setns(fd, os.CLONE_NEWNET)
        os.close(fd)
    os.unshare(
        os.CLONE_NEWNS | os.CLONE_NEWIPC | os.CLONE_NEWUTS | os.CLONE_NEWPID | (0 if fetching else os.CLONE_NEWNET)
    )
    if child := os.fork():
        _die_with_parent()
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    _die_with_parent()


def _die_with_parent() -> None:
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "parent death signal")


def _change_root(order: JailOrder) -> None:
    root, nothing = order.root, _MS_NOSUID | _MS_NODEV
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    _mount("none", root, "tmpfs", nothing, "mode=0755,size=4m")
    for name in ("work", "run", "dev", "etc", "usr"):
        os.mkdir(f"{root}/{name}", 0o755)
    _bind(order.work, f"{root}/work", nothing | _MS_NOEXEC)
    _mount("none", f"{root}/run", "tmpfs", nothing | _MS_NOEXEC, f"mode=0700,size=1m,uid={order.uid},gid={order.uid}")
    if order.task is Task.FETCH:
        _add_programs(order)
    os.chdir(root)
    _check(_libc.syscall(_SYS_PIVOT_ROOT[os.uname().machine], b".", b"."), "root")
    _check(_libc.umount2(b".", _MNT_DETACH), "the former root")
    os.chdir("/work")
    _mount("none", "/", "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | nothing)


def _add_programs(order: JailOrder) -> None:
    """Put in what skopeo needs: itself, the libraries, a null device, resolver and authorities."""
    root = order.root
    _bind("/usr", f"{root}/usr", _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    for name in ("bin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
        elif os.path.isdir(f"/{name}"):
            os.mkdir(f"{root}/{name}")
            _bind(f"/{name}", f"{root}/{name}", _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    if not order.skopeo.startswith(("/usr/", "/bin/")):
        os.close(os.open(f"{root}/skopeo", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o755))
        _bind(order.skopeo, f"{root}/skopeo", _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    os.close(os.open(f"{root}/dev/null", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))
    _mount("/dev/null", f"{root}/dev/null", "", _MS_BIND)
    for name, text in order.files.items():
        Path(f"{root}/etc", name).write_text(text)
    authorities = Path(f"{root}/etc/ssl/certs/ca-certificates.crt")
    authorities.parent.mkdir(parents=True)
    with open(order.roots, "rb") as file:
        authorities.write_bytes(file.read(_MOST_ROOTS))


def _drop(order: JailOrder) -> None:
    """Give up root, permanently."""
    for number in range(_CAPABILITIES):
        _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)  # those that the kernel does not know fail
    os.setgroups([])
    os.setresgid(order.uid, order.uid, order.uid)
    os.setresuid(order.uid, order.uid, order.uid)
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "parent death signal")  # a new user clears it
    program = filter_program()
    instructions = ctypes.create_string_buffer(program)
    prog = _FilterProgram(len(program) // 8, ctypes.addressof(instructions))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_FILTER, ctypes.byref(prog), 0, 0), "seccomp")
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_FSIZE, order.file_size),
    ):
        resource.setrlimit(limit, (value, value))


def perform(order: JailOrder, work: Path = WORK) -> Report:
    """Do the work of an order."""
    try:
        if order.task is Task.FETCH:
            login = "" if order.login is None else keep_login(order.login)
            skopeo = order.skopeo if order.skopeo.startswith(("/usr/", "/bin/")) else "/skopeo"
            Fetcher(skopeo, work, order.architecture, order.most, login).fetch(order.name)
            return Report("", None)
        out = work / OUT
        out.mkdir(mode=0o700)
        unpacker = Unpacker(out, order.architecture, order.most)
        match order.task:
            case Task.UNPACK_FETCHED:
                return Report("", unpacker.fetched(Directory(work), order.name))
            case Task.UNPACK_LAYOUT:
                return Report("", unpacker.archive(Directory(work / SOURCE), order.name))
            case _:
                return Report("", unpacker.archive(Archive(sys.stdin.fileno()), order.name))
    except RefusedImage as refusal:
        return Report(str(refusal)[:600], None)
    except MemoryError:
        return Report("the image needs too much memory to be read", None)
    except OSError as error:
        place = f" ({error.filename})" if isinstance(error.filename, str) else ""
        return Report(f"the image cannot be written: {error.strerror or type(error).__name__}{place}", None)


def main(arguments: list[str]) -> int:
    """Execute one order; return 0 if a report was printed."""
    order = codec.decode(JailOrder, json.loads(arguments[0]))
    for group in order.groups:
        Path(group, "cgroup.procs").write_text("0")
    os.umask(0o022)  # the jail's directories are root's, and its user enters them
    _separate(order)
    _change_root(order)
    _drop(order)
    report = perform(order)
    sys.stdout.write(json.dumps(codec.encode(report)))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
