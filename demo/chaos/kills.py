"""What can be killed, and how it is found.

- Only processes of one server: their command line names its run directory, or (the guard) they stand in the upstream
  namespace of its internet, or hostd named them as a worker.
- A process is killed through its pidfd, after a second look: a number that was used again is never hit.
- Which comes when is the choice of one seeded generator.
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
    """Every process of `stack` that is `part`; of workers, those that hostd knows."""
    if part is Part.WORKER:
        pids = list(workers(stack).values())
    else:
        upstream = os.stat(stack.internet.path(stack.internet.up)).st_ino
        pids = [pid for pid in _pids() if _is(stack, part, pid, upstream)]
    return [process for pid in pids if (process := _named(pid)) is not None]


def workers(stack: Stack) -> dict[str, int]:
    """The worker of each sandbox, as hostd has it; those that have none are not there."""
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
        # Workers have their zygote's command line, but another user.
        return words[1:3] == ["-m", _MODULES[part]] and (part is not Part.ZYGOTE or os.stat(f"/proc/{pid}").st_uid == 0)
    except OSError:
        return False


@contextmanager
def held(processes: Sequence[Process]) -> Iterator[list[int]]:
    """Pidfds of those processes that are still the ones that were meant."""
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
    """Kill one process of each part, all found before the first is hit; returns those that were killed."""
    victims = [chosen.choice(found) for part in parts if (found := sorted(find(stack, part)))]
    with held(victims) as fds:
        for fd in fds:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
    return victims


def plan(parts: Sequence[Part], chosen: random.Random) -> Iterator[tuple[Part, ...]]:
    """Kills without end: each part alone and then each pair, in random order, and all again in another."""
    alone: list[tuple[Part, ...]] = [(part,) for part in parts]
    pairs = list(combinations(parts, 2))
    while True:
        chosen.shuffle(alone)
        chosen.shuffle(pairs)
        yield from alone  # first, so that a short run has met every part
        yield from pairs
