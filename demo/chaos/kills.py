"""The processes that can be killed, and how they are found.

- Only processes of one server are killed: their command line has its run directory, or (the guard) they are in the
  upstream namespace of its internet, or hostd reports them as a worker.
- A process is killed through its pidfd, after a second check, so that a process which reuses the number is never
  killed.
- A generator with a seed determines the order.
"""

import os
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from itertools import combinations
from pathlib import Path

from testbed.stack import Stack, StackError
from testbed.traces import start_time


class Part(StrEnum):
    """One kind of process."""

    WORKER = "worker"
    ZYGOTE = "zygote"
    GUARD = "guard"
    AUDITD = "auditd"
    VAULTD = "vaultd"
    COMPILER = "compiler"
    SERVE = "serve"
    HOSTD = "hostd"
    DOCKERD = "dockerd"
    CONTAINERD = "containerd"


_MODULES = {
    Part.ZYGOTE: "gateway.zygote",
    Part.AUDITD: "audit.auditd",
    Part.VAULTD: "vault.vaultd",
    Part.COMPILER: "policy.compiler",
    Part.SERVE: "lifecycle.serve",
    Part.HOSTD: "runtimes.hostd",
}

type Process = tuple[int, int]
"""Process id and start time."""


def find(stack: Stack, part: Part) -> list[Process]:
    """Return every process of `stack` that is `part`; of workers, those that hostd reports."""
    if part is Part.WORKER:
        pids = list(workers(stack).values())
    else:
        upstream = os.stat(stack.internet.path(stack.internet.up)).st_ino
        pids = [pid for pid in _pids() if _is(stack, part, pid, upstream)]
    return [process for pid in pids if (process := _named(pid)) is not None]


def workers(stack: Stack) -> dict[str, int]:
    """Return the worker of each sandbox, as hostd reports it; sandboxes without a worker are left out."""
    try:
        listed = stack.sandboxes()
    except (OSError, StackError):
        return {}
    return {state.sandbox: state.worker_pid for state in listed if state.worker_pid is not None}


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _named(pid: int) -> Process | None:
    started = start_time(pid)
    return None if started is None else (pid, started)


def _is(stack: Stack, part: Part, pid: int, upstream: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        if part is Part.GUARD:
            return words == ["nft", "-i"] and os.stat(f"/proc/{pid}/ns/net").st_ino == upstream
        if not any(f"{stack.run}/" in word for word in words):
            return False
        if part in (Part.DOCKERD, Part.CONTAINERD):
            return Path(words[0]).name == part
        # A worker has its zygote's command line, but another user.
        return words[1:3] == ["-m", _MODULES[part]] and (part is not Part.ZYGOTE or os.stat(f"/proc/{pid}").st_uid == 0)
    except OSError:
        return False


@contextmanager
def held(processes: Sequence[Process]) -> Iterator[list[int]]:
    """Yield pidfds of those processes that still have the expected start time."""
    fds: list[int] = []
    try:
        for pid, started in processes:
            with suppress(ProcessLookupError):
                fd = os.pidfd_open(pid)
                if start_time(pid) == started:
                    fds.append(fd)
                else:
                    os.close(fd)
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def kill(stack: Stack, parts: Sequence[Part], chosen: random.Random) -> list[Process]:
    """Kill one process of each part, after all have been found; return those that were chosen."""
    victims = [chosen.choice(found) for part in parts if (found := sorted(find(stack, part)))]
    with held(victims) as fds:
        for fd in fds:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
    return victims


def plan(parts: Sequence[Part], chosen: random.Random) -> Iterator[tuple[Part, ...]]:
    """Yield kills without end: each part alone and then each pair, in random order, then again in another order."""
    alone: list[tuple[Part, ...]] = [(part,) for part in parts]
    pairs = list(combinations(parts, 2))
    while True:
        chosen.shuffle(alone)
        chosen.shuffle(pairs)
        yield from alone  # first, so that a short run kills every part
        yield from pairs
