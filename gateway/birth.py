"""How a forked child of the zygote becomes a worker that can do no more than a worker must.

In this order, each step before what depends on it; any failure ends the child:
close what is not its own -> own cgroup -> own IPC namespace -> empty mount namespace -> no new privileges -> listeners
in the gateway namespace (as root: port 53) -> drop groups, gid, uid -> not dumpable, limits -> reseed generators ->
event loop -> system call filter -> run.

- No upstream socket exists before the change of user: a socket keeps the user it was made by, and the guard's rules
  go by user.
- After `become_worker` has begun nothing of the zygote is used but its modules.
"""

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

from gateway import confine
from gateway.inside import InsideSockets, Listeners

MAX_DESCRIPTORS = 8192
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_OOM_SCORE = b"500"
# A worker cannot open a single file: whatever it would import late must be here already.
_PRELOADED = (
    "uvloop",
    "dnslib",
    "traceback",
    "_suggestions",  # traceback
    "idna.uts46data",
    "_sha2",  # random, when seeded with bytes
    "cryptography.hazmat.backends.openssl.backend",  # cryptography's Rust side, at its first use
    "cryptography.x509",
    "gateway.worker",
    "gateway.full.engine",
)

_WINDOWS_ONLY = frozenset({"mbcs", "oem"})

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Descriptors:
    """What a worker is born with, in the order of the `fork` request."""

    control: int
    audit: int
    vault: int
    namespace: int
    guard: int
    ingress: int
    ledger: int
    errors: int
    """Becomes standard error: never the zygote's, which is not the worker's own."""


@dataclass(frozen=True, slots=True)
class Order:
    """One worker to be made."""

    sandbox: str
    generation: int
    uid: int
    gid: int
    cgroup: tuple[str, ...]
    descriptors: Descriptors


class _LateImports:
    """Last in `sys.meta_path`: says which module a worker wanted and could not have, so that it gets preloaded."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Find nothing."""
        _log.warning("module %s is not in the worker", name)


def preload() -> None:
    """Import what workers use, once, in the zygote."""
    codecs = [item.name for item in pkgutil.iter_modules(encodings.__path__) if item.name not in _WINDOWS_ONLY]
    for name in (*(f"encodings.{codec}" for codec in codecs), *_PRELOADED):
        importlib.import_module(name)


def become_worker(order: Order) -> int:
    """Turn this freshly forked process into the worker of `order` and run it; returns its exit code.

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
    return _run(order, inside, listeners)


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def _run(order: Order, inside: InsideSockets, listeners: Listeners) -> int:
    # Imported by `preload` already; a cycle otherwise. The one place that names an engine.
    from gateway import worker
    from gateway.full.engine import FullEngine

    return worker.run(order, inside, listeners, FullEngine)


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
    """Move this process, which has one thread, into its groups.

    Where a hierarchy takes threads (`tasks`, version 1) this one is moved as such: the kernel then need not stop every
    fork and exit of the machine meanwhile, which takes milliseconds for each hierarchy (cgroup_attach_lock in
    kernel/cgroup/cgroup.c).
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
        raise OSError("privileges were not dropped")


def _reseed() -> None:
    """Fresh state for every generator that survived the fork."""
    random.seed(os.urandom(64))
    ssl.RAND_add(os.urandom(64), 64.0)
