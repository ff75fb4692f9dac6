"""Many idle sandboxes on one runtime: memory and processor time by component, and what one more sandbox costs.

- The sandboxes are made through the API. Each has a worker with a policy and a bound secret. Then nothing uses them.
- The first and the last ones are made one at a time, from rest, to time the start of a worker; the others are made
  `PARALLEL` at once.
- Beside the demo's authority the workers get the roots of the system, as on a real host.
- The peer is Docker alone: containers of the same image on the same runtime without the shim, and without the network
  that Sallyport gives them. There are fewer of them, because they are made one after the other.
- A run ends early, and removes what it has made, if too little memory is available.
- At the end everything is removed. Processes, namespaces, mounts, control groups, files and containers are compared
  with those before.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import docker
import httpx

from bench import components, slots
from bench.components import COMPONENTS, GOFERS, HOSTD, SANDBOXES, SHIMS, WORKERS, Meter, classify, members
from bench.create import PLAIN, add_plain_runsc, host_config, launched
from bench.figures import Figure, Goal
from bench.fixture import BenchError, Fixture
from testbed import census
from testbed.stack import IMAGE

RUNTIME, SANDBOXES_WANTED, SLOTS_WANTED = "runsc", 500, 1000
LEAST, PARALLEL, ALONE = 3, 3, 20
PEERS = 50
SETTLE_SECONDS, REST_SECONDS = 20.0, 30.0
LEAST_AVAILABLE_MIB = 2048
WATCH = "watch"
"""The name of the thread in which hostd's watch reads and compares slots."""
_PAUSE_SECONDS = 1.0
_CREATE_SECONDS, _REMOVE_SECONDS, _GONE_SECONDS = 300.0, 300.0, 60.0
_CONFIGURED, _PRIVATE, _WATCH_SHARE = 25.0, 8.0, 10.0
_SMALLEST_DISK = "64Mi"
_ENTRYPOINT = ["tail", "-f", "/dev/null"]


def measure(
    fixture: Fixture,
    _rounds: int,
    *,
    runtime: str = RUNTIME,
    sandboxes: int = SANDBOXES_WANTED,
    number_of_slots: int = SLOTS_WANTED,
) -> list[Figure]:
    """Measure idle sandboxes with their peer, then slots without containers; zero leaves a part out.

    Raises:
        BenchError: there is not enough memory, or something is left after the removal.
    """
    figures: list[Figure] = []
    if sandboxes:
        with _docker(fixture) as api:
            with _containers(api, runtime, 1):  # runsc keeps an empty namespace from its first container on
                pass
            before = census.take(fixture.stack)
            figures += _sandboxes(fixture, runtime, sandboxes)
            _removed(fixture, before)
            figures += _peer(fixture, api, runtime, min(sandboxes, PEERS))
            _removed(fixture, before)
    if number_of_slots:
        figures += slots.measure(number_of_slots)
    return figures


def _sandboxes(fixture: Fixture, runtime: str, number: int) -> list[Figure]:
    empty = available_mib()
    at_rest = _look(fixture, SETTLE_SECONDS, REST_SECONDS)
    made: list[str] = []
    try:
        seconds = asyncio.run(_create(fixture, runtime, number, made))
        print(f"bench: density, {number} sandboxes made in {sum(seconds):.0f} s of calls", file=sys.stderr, flush=True)
        with_all = _look(fixture, SETTLE_SECONDS, REST_SECONDS)
        full = available_mib()
        return _figures(fixture, made, seconds, at_rest, with_all, (empty - full) / number)
    finally:
        asyncio.run(_remove(fixture, made))


def _figures(
    fixture: Fixture, made: list[str], seconds: list[float], at_rest: "Look", with_all: "Look", machine: float
) -> list[Figure]:
    number = len(made)
    running = [state for state in fixture.stack.sandboxes() if state.worker_pid is not None]
    if len(running) != number:
        raise BenchError(f"{len(running)} of {number} sandboxes run")
    timings = launched(fixture.stack)
    configured = [timings[name]["worker_ms"] for name in made]
    alone = _alone(number)
    goal = Goal("median", _CONFIGURED)
    return [
        Figure(f"{_IDLE}: running", "", [len(running)]),
        Figure(f"{_IDLE}: create call, {PARALLEL} at once", "ms", [1000 * one for one in seconds[alone:-alone]]),
        Figure("worker: fork and configure, the first", "ms", configured[:alone], None, goal),
        Figure("worker: fork and configure, the last", "ms", configured[-alone:], None, goal),
        Figure(f"worker: fork and configure, {PARALLEL} creates at once", "ms", configured[alone:-alone]),
        Figure("worker: its processor time before it rests", "ms", [1000 * one for one in with_all.started]),
        *_of_workers(with_all),
        *_by_component(at_rest, with_all, number),
        Figure("one sandbox: memory of the kernel", "MiB", [(with_all.kernel - at_rest.kernel) / 1024 / number]),
        Figure("one sandbox: memory of the machine", "MiB", [machine]),
    ]


_IDLE = "idle sandboxes"


def _of_workers(look: "Look") -> list[Figure]:
    workers = look.memory[WORKERS]
    return [
        Figure("worker: private memory", "MiB", [one.private / 1024 for one in workers], None, Goal("max", _PRIVATE)),
        Figure("worker: PSS", "MiB", [one.pss / 1024 for one in workers]),
    ]


def _by_component(empty: "Look", full: "Look", number: int) -> Iterator[Figure]:
    """Yield PSS and processor time of each component, and what one sandbox adds to those that grow with them."""
    for name in COMPONENTS:
        if name in full.memory:
            yield Figure(f"memory: {name}", "MiB", [full.pss(name)])
    yield Figure("memory: all", "MiB", [sum(map(full.pss, full.memory))])
    for name in COMPONENTS:
        if name in full.share:
            yield Figure(f"processor: {name}", "% of a core", [full.share[name]])
    yield Figure("processor: all", "% of a core", [sum(share for name, share in full.share.items() if name != WATCH)])
    if WATCH in full.share:
        goal = Goal("median", _WATCH_SHARE)
        yield Figure("processor: of hostd the watch", "% of a core", [full.share[WATCH]], None, goal)
    for name in (HOSTD, "serve", "vaultd", "auditd", "dockerd", "containerd"):
        if name in full.memory and name in empty.memory:
            grown = 1024 * (full.pss(name) - empty.pss(name)) / number
            yield Figure(f"one sandbox adds to {name}", "KiB", [grown])
    yield Figure("one sandbox: sandbox, gofer and shim", "MiB", [_of_the_runtime(full) / number], _PEER_MEMORY)


_PEER_MEMORY = "one container of Docker alone: sandbox, gofer and shim"


def _of_the_runtime(look: "Look") -> float:
    """Return the PSS of sandboxes, gofers and shims, in MiB. runc has no gofers."""
    return sum(look.pss(name) for name in (SANDBOXES, GOFERS, SHIMS) if name in look.memory)


@dataclass(frozen=True, slots=True)
class Look:
    """The memory of each component, and its share of a core in percent over a time of rest.

    `started` are the seconds of processor time that each worker had used before, `kernel` the KiB of the kernel's own
    objects.
    """

    memory: dict[str, list[components.Memory]]
    share: dict[str, float]
    started: list[float]
    kernel: int

    def pss(self, name: str) -> float:
        """Return the PSS of a component, in MiB."""
        return sum(one.pss for one in self.memory[name]) / 1024


def _look(fixture: Fixture, settle: float, rest: float) -> Look:
    time.sleep(settle)
    found = classify(components.processes(), fixture.stack.run)
    meter, began = Meter(found, WATCH), time.monotonic()
    time.sleep(rest)
    seconds, took = meter.read(), time.monotonic() - began
    memory = {name: components.memory(pids) for name, pids in members(found).items()}
    share = {name: 100 * used / took for name, used in seconds.items()}
    return Look(memory, share, meter.begun(WORKERS), slots.kernel_kib(Path("/proc/meminfo").read_text()))


async def _create(fixture: Fixture, runtime: str, number: int, made: list[str]) -> list[float]:
    """Create sandboxes, `PARALLEL` at once. Append their ids to `made`; return the seconds of each call."""
    body = {
        "image": {"uri": IMAGE},
        "resourceLimits": {"memory": "256Mi", "disk": _SMALLEST_DISK},
        "entrypoint": _ENTRYPOINT,
        "timeout": 7200,
        "extensions": {"sallyport.runtime": runtime, "sallyport.policy": "bench"},
    }
    seconds: list[float] = []
    async with _client(fixture) as http:

        async def some(numbers: Iterator[int], pause: float = 0.0) -> None:
            for index in numbers:
                await asyncio.sleep(pause)
                if (left := available_mib()) < LEAST_AVAILABLE_MIB:
                    raise BenchError(f"stopped at {len(made)} sandboxes: only {left} MiB of memory are available")
                began = time.monotonic()
                answer = await http.post("/sandboxes", json=body)
                answer.raise_for_status()
                seconds.append(time.monotonic() - began)
                made.append(answer.json()["id"])
                if index % 50 == 49:
                    print(f"bench: density, {len(made)} made, {left} MiB available", file=sys.stderr, flush=True)

        alone = _alone(number)
        await _together(1, partial(some, iter(range(alone)), _PAUSE_SECONDS))
        await _together(PARALLEL, partial(some, iter(range(alone, number - alone))))
        await asyncio.sleep(SETTLE_SECONDS)
        await _together(1, partial(some, iter(range(number - alone, number)), _PAUSE_SECONDS))
        for name in made:
            await _running(http, name)
    return seconds


def _alone(number: int) -> int:
    """Return how many sandboxes are made one at a time, of the first and of the last."""
    return min(ALONE, max(1, number // 4))


async def _running(http: httpx.AsyncClient, name: str) -> None:
    deadline = time.monotonic() + _CREATE_SECONDS
    while (state := (await http.get(f"/sandboxes/{name}")).json()["status"]["state"]) != "Running":
        if state != "Pending" or time.monotonic() > deadline:
            raise BenchError(f"{name} is {state}")
        await asyncio.sleep(0.1)


async def _remove(fixture: Fixture, made: Sequence[str]) -> None:
    names = iter(made)
    async with _client(fixture) as http:

        async def some() -> None:
            for name in names:
                deadline = time.monotonic() + _REMOVE_SECONDS
                while (answer := await http.delete(f"/sandboxes/{name}")).status_code not in (204, 404):
                    log = [line for line in fixture.stack.log.read_text().splitlines() if name in line]
                    problem = f"{name} was not removed: {answer.status_code} {answer.text[:200]}\n" + "\n".join(
                        log[-5:]
                    )
                    if time.monotonic() > deadline:
                        raise BenchError(problem)
                    print(f"bench: {problem}; again", file=sys.stderr, flush=True)
                    await asyncio.sleep(1)

        await _together(PARALLEL, some)


async def _together(number: int, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(number):
                group.create_task(work())
    except ExceptionGroup as errors:
        error = errors.exceptions[0]
        raise error if isinstance(error, BenchError) else BenchError(f"{type(error).__name__}: {error}") from errors


def _client(fixture: Fixture) -> httpx.AsyncClient:
    headers = {"OPEN-SANDBOX-API-KEY": fixture.stack.api_key}
    return httpx.AsyncClient(
        base_url=f"{fixture.stack.base}/v1", headers=headers, timeout=_REMOVE_SECONDS, trust_env=False
    )


def available_mib() -> int:
    """Return the memory that new processes can have, in MiB."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))) >> 10


def _removed(fixture: Fixture, before: census.Census) -> None:
    """Wait until everything is as `before`.

    Raises:
        BenchError: something is left.
    """
    deadline = time.monotonic() + _GONE_SECONDS
    while left := census.take(fixture.stack).beyond(before):
        if time.monotonic() > deadline:
            raise BenchError(f"left after the removal: {left}"[:2000])
        time.sleep(0.5)


@contextmanager
def _docker(fixture: Fixture) -> Iterator[Any]:
    """Yield a client of the server's dockerd, which knows runsc without the shim."""
    api = docker.APIClient(base_url=f"unix://{fixture.stack.run / 'docker.sock'}", version="auto", timeout=120)
    try:
        add_plain_runsc(fixture, api)
        yield api
    finally:
        api.close()


def _peer(fixture: Fixture, api: Any, runtime: str, number: int) -> list[Figure]:
    """Measure containers of Docker alone."""
    empty, kernel = available_mib(), slots.kernel_kib(Path("/proc/meminfo").read_text())
    with _containers(api, runtime, number):
        look = _look(fixture, SETTLE_SECONDS, REST_SECONDS)
        full = available_mib()
    theirs = _of_the_runtime(look) / number
    busy = sum(look.share.get(name, 0.0) for name in (SANDBOXES, GOFERS, SHIMS, "dockerd", "containerd"))
    return [
        Figure("containers of Docker alone: running", "", [number]),
        Figure(_PEER_MEMORY, "MiB", [theirs]),
        Figure("one container of Docker alone: memory of the kernel", "MiB", [(look.kernel - kernel) / 1024 / number]),
        Figure("one container of Docker alone: memory of the machine", "MiB", [(empty - full) / number]),
        Figure("containers of Docker alone: processor, with dockerd and containerd", "% of a core", [busy]),
    ]


@contextmanager
def _containers(api: Any, runtime: str, number: int) -> Iterator[None]:
    made = []
    try:
        for _ in range(number):
            host = host_config(api, PLAIN[runtime])
            made.append(api.create_container(image=IMAGE, command=_ENTRYPOINT, host_config=host)["Id"])
            api.start(made[-1])
        yield
    finally:
        for container in made:
            api.remove_container(container, force=True)
