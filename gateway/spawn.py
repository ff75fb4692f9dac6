"""Turns a forked child of the zygote into a confined worker.

The steps have a fixed order. A step that fails ends the child:
close foreign descriptors -> cgroup -> IPC namespace -> empty mount namespace -> no new privileges -> listeners in the
gateway namespace (as root: port 53) -> drop groups, gid, uid -> not dumpable, limits -> reseed generators -> event loop
-> system call filter -> run.

- No upstream socket exists before the change of user. A socket keeps the uid of its maker, and the guard's rules match
  by uid.
- `become_worker` uses nothing of the zygote except imported modules and `Order.constants`.
"""

import contextlib
import ctypes
import encodings
import importlib
import logging
import os
import pkgutil
import random
import resource
import signal
import ssl
import sys
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from functools import partial
from typing import TYPE_CHECKING

from gateway import confine
from gateway.config import WorkerConstants
from gateway.inside import InsideSockets, Listeners

if TYPE_CHECKING:  # `preload` imports it
    from gateway.tls.contexts import UpstreamContext

MAX_DESCRIPTORS = 8192
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_HEAP, _OF_HEAP = 4 * 1024 * 1024, 2 * 1024 * 1024
_OOM_SCORE = b"500"
# A worker cannot open files, so the zygote imports also the modules that libraries import late.
_PRELOADED = (
    "uvloop",
    "dnslib",
    "traceback",
    "_suggestions",  # traceback
    "idna.uts46data",
    "_sha2",  # random, when seeded with bytes
    "cryptography.hazmat.backends.openssl.backend",  # cryptography's Rust side, at its first use
    "cryptography.x509",
    "OpenSSL.rand",
    "gateway.worker",
    "gateway.rehearsal",
    "gateway.engines.http1.flow",
    "gateway.engines.mitm.connection",
    "gateway.engines.postgres.flow",
)

_WINDOWS_ONLY = frozenset({"mbcs", "oem"})

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Descriptors:
    """The descriptors of a new worker, in the order of the `fork` request."""

    control: int
    audit: int
    vault: int
    namespace: int
    guard: int
    ingress: int
    ledger: int
    ring: int
    cursor: int
    wake: int
    errors: int
    """Becomes standard error, in place of the zygote's."""


@dataclass(frozen=True, slots=True)
class Order:
    """One worker to spawn."""

    sandbox: str
    generation: int
    uid: int
    gid: int
    cgroup: tuple[str, ...]
    constants: WorkerConstants
    descriptors: Descriptors
    trusted: "UpstreamContext | None" = None
    """The roots of `constants`, read before the fork; None if they cannot be read."""


class _LateImports:
    """The last entry of `sys.meta_path`. Logs each module that a worker cannot import, as a hint for `_PRELOADED`."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Find nothing."""
        _log.warning("module %s is not preloaded: add it to _PRELOADED in gateway/spawn.py", name)


def preload() -> None:
    """Import all modules of a worker. The zygote calls this once."""
    codecs = [item.name for item in pkgutil.iter_modules(encodings.__path__) if item.name not in _WINDOWS_ONLY]
    for name in (*(f"encodings.{codec}" for codec in codecs), *_PRELOADED):
        importlib.import_module(name)


def become_worker(order: Order) -> int:
    """Turn this newly forked process into the worker of `order` and run it. Return its exit code.

    Raises:
        OSError: a step failed; the caller must exit.
    """
    own: tuple[int, ...] = astuple(order.descriptors)
    _close_others({0, 1, 2, *own})
    os.environ.clear()
    os.environ["PATH"] = "/nonexistent"
    os.setsid()
    _standard_streams(order.descriptors.errors)
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_DFL)
    _join(order.cgroup)
    _write("/proc/self/oom_score_adj", _OOM_SCORE)
    os.unshare(os.CLONE_NEWIPC)
    sys.meta_path.append(_LateImports())
    confine.empty_root()
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    inside = InsideSockets(order.descriptors.namespace)
    listeners = inside.listen()
    os.close(order.descriptors.namespace)
    _drop_privileges(order.uid, order.gid)
    _reseed()
    keep_heap()
    return _run(order, inside, listeners)


def prctl(option: int, value: int) -> None:
    """Call prctl(2) with one argument.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def keep_heap() -> None:
    """Keep up to `_KEPT_HEAP` bytes of freed memory, and take buffers of relayed bodies from it.

    Otherwise the C library returns each buffer to the kernel, which clears the pages of the next one.
    """
    with contextlib.suppress(AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_HEAP)
        libc.mallopt(_M_MMAP_THRESHOLD, _OF_HEAP)


def _run(order: Order, inside: InsideSockets, listeners: Listeners) -> int:
    # `preload` has imported these; at the top they would be an import cycle. Only this function names an engine.
    from gateway import worker
    from gateway.engines.engine import FlowEngine
    from gateway.engines.http1.flow import Http1Flow
    from gateway.engines.mitm.connection import FlowConnection
    from gateway.engines.postgres.flow import PostgresFraming

    make_engine = partial(
        FlowEngine, http1=Http1Flow, http2=FlowConnection, postgres=PostgresFraming(), trusted=order.trusted
    )
    return worker.run(order, inside, listeners, make_engine)


def _close_others(keep: Iterable[int]) -> None:
    low = 0
    for fd in (*sorted(set(keep)), resource.getrlimit(resource.RLIMIT_NOFILE)[0]):
        if fd > low:  # closerange(0, 0) would close everything
            os.closerange(low, fd)
        low = fd + 1


def _standard_streams(errors: int) -> None:
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.dup2(errors, 2)
    os.close(null)
    os.close(errors)


def _join(directories: tuple[str, ...]) -> None:
    """Move this process, which has one thread, into its control groups.

    A version 1 hierarchy can move a single thread (`tasks`). That is faster: to move a process the kernel blocks every
    fork and exit of the machine, for milliseconds per hierarchy (cgroup_attach_lock in kernel/cgroup/cgroup.c).
    """
    for directory in directories:
        tasks = f"{directory}/tasks"
        _write(tasks if os.path.exists(tasks) else f"{directory}/cgroup.procs", b"0")


def _write(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def _drop_privileges(uid: int, gid: int) -> None:
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    prctl(_PR_SET_DUMPABLE, 0)
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    soft = min(MAX_DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
    if os.getresuid() != (uid, uid, uid) or os.getresgid() != (gid, gid, gid) or os.getgroups():
        raise OSError("the worker still has its old uid, gid or groups after the change of user")


def _reseed() -> None:
    """Give new seeds to the random generators that the fork copied. The process has two copies of OpenSSL."""
    # `preload` has imported it; at the top it would delay every import of this module.
    from OpenSSL import rand

    random.seed(os.urandom(64))
    ssl.RAND_add(os.urandom(64), 64.0)
    rand.add(os.urandom(64), 64)
