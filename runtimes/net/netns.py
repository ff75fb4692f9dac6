"""Network namespaces and the link between them. The only module that uses pyroute2.

Work inside a namespace runs in a new thread that enters the namespace and then ends. The reason: a network namespace
belongs to a thread, and a thread that has changed its namespace is never used again.

- A namespace is held by a bind mount of its nsfs inode at a path that hostd chooses. A path that exists already is
  never adopted.
- Addresses, routes and neighbours are complete before any process runs inside (runsc reads them once, at its start).
- Sysctls are written before the first link exists; one that cannot be written is an error.

All functions block for milliseconds: call them in a worker thread.
"""

import contextlib
import ctypes
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtimes.net.plan import GATEWAY_SYSCTLS, SANDBOX_SYSCTLS, NetworkPlan

_MS_BIND = 0x1000
_MNT_DETACH = 2
_NFT_TIMEOUT = 20.0
_NUD_PERMANENT = 0x80
_QUEUE = 0x10000
"""The handle of a link's queue."""

_libc = ctypes.CDLL(None, use_errno=True)


def _mount_bind(source: str, target: str) -> None:
    if _libc.mount(source.encode(), target.encode(), b"none", ctypes.c_ulong(_MS_BIND), None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def _unmount(target: str) -> None:
    if _libc.umount2(target.encode(), _MNT_DETACH) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def in_thread[T](work: Callable[[], T]) -> T:
    """Run `work` in a new thread and return its result, or raise its exception."""
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:  # noqa: BLE001 - carried to the caller below
            failure.append(error)

    thread = threading.Thread(target=run, name="netns", daemon=True)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


class WrongNamespaceError(Exception):
    """The namespace at a path is not the one that was made there, or there is none."""


def inside[T](path: Path, work: Callable[[], T], inode: int | None = None) -> T:
    """Run `work` in a new thread inside the namespace at `path`. Subprocesses that it starts are inside too.

    Raises:
        WrongNamespaceError: `inode` is given, and the namespace has another one; nothing was run.
    """

    def entered() -> T:
        enter(path, inode)
        return work()

    return in_thread(entered)


def enter(path: Path, inode: int | None = None) -> None:
    """Move the calling thread into the namespace at `path`. It stays there, and keeps the namespace alive.

    Raises:
        WrongNamespaceError: `inode` is given, and the namespace has another one; the thread has not moved.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if inode is None:
            raise
        raise WrongNamespaceError(f"{path.name} cannot be opened: {error.strerror}") from error
    try:
        if inode is not None and os.fstat(fd).st_ino != inode:
            raise WrongNamespaceError(f"{path.name} is another namespace")
        os.setns(fd, os.CLONE_NEWNET)
    finally:
        os.close(fd)


def create(path: Path, sysctls: Mapping[str, str]) -> int:
    """Make a network namespace, held by a bind mount at `path`; return its inode.

    Raises:
        FileExistsError: there is something at `path`.
        OSError: the kernel refused; nothing is left.
    """
    os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    def make() -> int:
        os.unshare(os.CLONE_NEWNET)
        own = f"/proc/self/task/{threading.get_native_id()}/ns/net"
        for name, value in sysctls.items():
            Path("/proc/sys", name).write_text(value)
        _mount_bind(own, str(path))
        return os.stat(own).st_ino

    try:
        return in_thread(make)
    except BaseException:
        delete(path)
        raise


def delete(path: Path) -> None:
    """Unmount and remove the namespace at `path`, if there is one."""
    with contextlib.suppress(OSError):
        while True:  # a second mount at the same path is removed as well
            _unmount(str(path))
    path.unlink(missing_ok=True)


def create_gateway(path: Path) -> int:
    """Make the gateway's namespace: sysctls only, every link down."""
    return create(path, GATEWAY_SYSCTLS)


def create_sandbox(path: Path) -> int:
    """Make the sandbox's namespace, with its loopback up."""
    inode = create(path, SANDBOX_SYSCTLS)
    try:
        inside(path, lambda: _loopback_up())
    except BaseException:
        delete(path)
        raise
    return inode


@contextmanager
def _netlink() -> Iterator[Any]:
    # Imported late: the import takes most of a second, and a hostd that adopts needs no link.
    from pyroute2 import IPRoute

    handle = IPRoute()
    try:
        yield handle
    finally:
        handle.close()


def _loopback_up() -> None:
    with _netlink() as route:
        route.link("set", index=1, state="up")


def link(sandbox: Path, gateway: Path, plan: NetworkPlan) -> None:
    """Make the slot's veth pair directly inside the two namespaces and set both ends up.

    The gateway's end is configured first, so it has its address and static neighbour when the sandbox's end comes up.
    Each end has a queue that sends at the plan's bandwidth: a program inside that sends more waits, as on a slow link.
    """
    fd = os.open(gateway, os.O_RDONLY | os.O_CLOEXEC)
    try:
        inside(sandbox, lambda: _make_pair(fd, plan))
    finally:
        os.close(fd)
    inside(gateway, lambda: _configure_gateway(plan))
    inside(sandbox, lambda: _configure_sandbox(plan))


def _make_pair(gateway_fd: int, plan: NetworkPlan) -> None:
    with _netlink() as route:
        route.link(
            "add",
            ifname=plan.inside_interface,
            kind="veth",
            address=plan.inside_mac,
            peer={"ifname": plan.gateway_interface, "address": plan.gateway_mac, "net_ns_fd": gateway_fd},
        )


def _index(route: Any, name: str) -> int:
    found = route.link_lookup(ifname=name)
    if len(found) != 1:
        raise OSError(f"{len(found)} links are called {name}")
    return int(found[0])


def _end(route: Any, name: str, address: str, peer: str, peer_mac: str, plan: NetworkPlan) -> int:
    index, prefix = _index(route, name), plan.prefix
    if plan.bandwidth is not None:
        _limit(route, index, plan)
    route.addr("add", index=index, address=address, prefixlen=prefix)
    route.link("set", index=index, state="up")
    route.neigh("replace", dst=peer, lladdr=peer_mac, ifindex=index, state=_NUD_PERMANENT)
    return index


def _limit(route: Any, index: int, plan: NetworkPlan) -> None:
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        route.tc("add", "tbf", index, _QUEUE, rate=plan.bandwidth, burst=plan.burst, limit=plan.burst)
    except NetlinkError as error:
        raise OSError(error.code, "network_bandwidth needs a kernel with sch_tbf") from None


def _configure_gateway(plan: NetworkPlan) -> None:
    with _netlink() as route:
        name = plan.gateway_interface
        _end(route, name, str(plan.gateway), str(plan.inside), plan.inside_mac, plan)


def _configure_sandbox(plan: NetworkPlan) -> None:
    with _netlink() as route:
        index = _end(route, plan.inside_interface, str(plan.inside), str(plan.gateway), plan.gateway_mac, plan)
        route.route("add", dst="0.0.0.0/0", gateway=str(plan.gateway), oif=index)


def links(path: Path) -> tuple[str, ...]:
    """Return the names of the links in the namespace at `path`, sorted."""

    def read() -> tuple[str, ...]:
        with _netlink() as route:
            return tuple(sorted(item.get_attr("IFLA_IFNAME") for item in route.get_links()))

    return inside(path, read)


def sever(path: Path, inode: int) -> None:
    """Remove every link except the loopback from the namespace at `path`; set down a link that cannot be removed.

    Raises:
        WrongNamespaceError: the namespace does not have `inode`; nothing was changed.
    """

    def cut() -> None:
        from pyroute2.netlink.exceptions import NetlinkError

        with _netlink() as route:
            for item in route.get_links():
                if item.get_attr("IFLA_IFNAME") == "lo":
                    continue
                try:
                    route.link("del", index=item["index"])
                except NetlinkError:  # removed with its other end, or a device that cannot be deleted
                    with contextlib.suppress(NetlinkError):
                        route.link("set", index=item["index"], state="down")

    inside(path, cut, inode)


class NftError(Exception):
    """nft refused a ruleset. The message is nft's own, bounded; rulesets hold no secrets."""


def _nft(*arguments: str, text: str | None = None) -> str:
    try:
        done = subprocess.run(
            ["nft", *arguments], input=text, capture_output=True, text=True, timeout=_NFT_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise NftError(f"nft {' '.join(arguments)}: took too long") from None
    if done.returncode != 0:
        raise NftError(f"nft {' '.join(arguments)}: {done.stderr.strip()[:500]}")
    return done.stdout


def load_rules(path: Path | None, ruleset: str) -> None:
    """Load `ruleset` in the namespace at `path` (None: that of the caller), in one transaction.

    Raises:
        NftError: nft refused; nothing of it is in force.
    """
    if path is None:
        _nft("-f", "-", text=ruleset)
    else:
        inside(path, lambda: _nft("-f", "-", text=ruleset))


def list_rules(path: Path | None, *what: str) -> str:
    """Return `nft -s list <what>` of the namespace at `path` (None: the caller's). Options in `what` come first."""
    options = tuple(word for word in what if word.startswith("-"))
    arguments = ("-s", *options, "list", *what[len(options) :])
    return _nft(*arguments) if path is None else inside(path, lambda: _nft(*arguments))


def inode(path: Path | None) -> int:
    """Return the inode of the network namespace at `path` (None: that of the current process)."""
    return os.stat(path or "/proc/self/ns/net").st_ino


def of_process(pid: int) -> int:
    """Return the inode of the network namespace of process `pid`.

    Raises:
        OSError: there is no such process.
    """
    return os.stat(f"/proc/{pid}/ns/net").st_ino


def mounted(inodes: frozenset[int]) -> tuple[str, ...]:
    """Return the mount points of these namespaces in hostd's mount namespace."""
    wanted = {f"net:[{number}]" for number in inodes}
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split(" ")
        if fields[3] in wanted:
            found.append(fields[4])
    return tuple(found)


def unmount_below(directory: Path) -> None:
    """Unmount every namespace that is mounted below `directory` (runsc keeps an empty one in its state directory)."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split(" ")[4]
        if " - nsfs " in line and Path(point).is_relative_to(directory):
            _unmount(point)


def is_mount_point(path: Path) -> bool:
    """Return whether `path` is a mount point, also if it is bound over itself."""
    point = re.sub(r"[\\ \t\n]", lambda found: f"\\{ord(found[0]):03o}", os.path.realpath(path))
    return any(line.split(" ")[4] == point for line in Path("/proc/self/mountinfo").read_text().splitlines())


def unmount(path: Path) -> None:
    """Remove one mount from `path`, if there is one."""
    with contextlib.suppress(OSError):
        _unmount(str(path))


def processes(inodes: frozenset[int]) -> tuple[int, ...]:
    """Return the processes of which any thread is in one of these namespaces."""
    return tuple(sorted(int(name) for name in os.listdir("/proc") if name.isdigit() and _is_inside(name, inodes)))


def _is_inside(process: str, inodes: frozenset[int]) -> bool:
    try:
        tasks = os.listdir(f"/proc/{process}/task")
    except OSError:
        return False
    for task in tasks:
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{process}/task/{task}/ns/net").st_ino in inodes:
                return True
    return False
