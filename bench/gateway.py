"""The gateway beside other proxies: requests, latency, new connections, bytes, processor time and memory.

- One nginx serves every path. Each path is measured in each round, so that a change of the machine's speed changes all.
- wrk is the client of HTTP/1.1, h2load of HTTP/2 and of a constant rate, curl of the large bodies. For Sallyport they
  run in the sandbox's network namespace, for the others in one that is connected like a host.
- The proxy has one core: for Sallyport the worker, auditd and vaultd together. Client and server share the other.
- Policy and audit are on. The access log of nginx is off, those of the peers are on.
"""

import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bench import clients, goals, peers
from bench.clients import Way
from bench.figures import Figure, of_connections
from bench.fixture import PAGES, BenchError, Fixture
from bench.goals import BARE, ENVOY, HALF_LOAD, INSPECTED, MITMPROXY, NEW_HEADS, SQUID, WAYS
from bench.peers import OTHER_CORE, PROXY_CORE
from runtimes.net.plan import RESOLV_CONF
from testbed.census import daemons
from testbed.internet import UP_ADDRESS

CONNECTIONS = goals.CONNECTIONS
NEW_CONNECTIONS = 16
SECONDS = 3
"""The length of one sample. With many connections it is longer, because of their handshakes."""
_MANY = 100
_REST_SECONDS, _REST_MOST = 0.2, 10.0
_TICKS = os.sysconf("SC_CLK_TCK")

type Samples = dict[tuple[str, str], list[float]]
"""By name and unit."""


def measure(fixture: Fixture, rounds: int, only: Collection[str] = WAYS) -> list[Figure]:
    """Measure the paths `only`, `rounds` times."""
    samples: Samples = {}
    sandbox = fixture.stack.create("runc", policy="bench", resource={"cpu": "2", "memory": "2Gi"})
    try:
        with ExitStack() as stack:
            stack.enter_context(peers.nginx(fixture))
            envoy = stack.enter_context(peers.envoy(fixture)) if ENVOY in only else 0
            mitmproxy = stack.enter_context(peers.mitmproxy(fixture)) if MITMPROXY in only else 0
            squid = stack.enter_context(peers.squid(fixture)) if SQUID in only else 0
            wanted = [way for way in ways(fixture, str(sandbox.id), envoy, mitmproxy, squid) if way.name in only]
            for way in wanted:
                clients.wrk(way, 1, 1)  # makes certificates, and shows that the path works
            for _ in range(rounds):
                for way in wanted:
                    _add(samples, way, _round(way))
                    _rest(way)
                _half_load(samples, wanted)
    finally:
        sandbox.kill()
        sandbox.close()
    return [Figure(name, unit, values, _peer(name, samples)) for (name, unit), values in samples.items()]


def _add(samples: Samples, way: Way, seen: Mapping[tuple[str, str], float]) -> None:
    for (what, unit), value in seen.items():
        samples.setdefault((f"{what}: {way.name}", unit), []).append(value)


def _half_load(samples: Samples, wanted: Collection[Way]) -> None:
    """Measure the latency at half of the requests that injection has reached in this round, at the same rate on all."""
    reached = [
        samples[f"requests, {of_connections(number)}: {goals.INJECTED}", "1/s"][-1]
        for number in CONNECTIONS
        if any(way.name == goals.INJECTED for way in wanted)
    ]
    for way in wanted if reached else ():
        if way.name in (BARE, goals.INJECTED, ENVOY):
            _add(samples, way, {(HALF_LOAD, "ms"): clients.paced(way, max(reached) / 2, SECONDS)})


def _peer(name: str, samples: Samples) -> str | None:
    peer = f"{name.partition(': ')[0]}: {ENVOY}"
    return peer if peer != name and any(peer == other for other, _ in samples) else None


def ways(fixture: Fixture, sandbox: str, envoy: int = 0, mitmproxy: int = 0, squid: int = 0) -> Iterator[Way]:
    """Yield all paths. The numbers are the processes of the peers."""
    directory = fixture.internet.directory
    resolver, hosts = directory / "resolv.conf", directory / "hosts"
    resolver.write_text(RESOLV_CONF)
    hosts.write_text("".join(f"{address} {host}\n" for host, address in PAGES.items()))
    peer_hosts = directory / "peer-hosts"
    peer_hosts.write_text(f"{UP_ADDRESS} {peers.INJECTED}\n")
    inside = _entering(fixture.stack.netns(sandbox, "sbx"), resolver, "/etc/resolv.conf")
    outside = _entering(fixture.internet.path(fixture.internet.control), hosts, "/etc/hosts")
    to_peers = _entering(fixture.internet.path(fixture.internet.control), peer_hosts, "/etc/hosts")

    def ours() -> list[int]:
        known = daemons(fixture.stack)
        return [fixture.stack.worker_pid(sandbox), known["audit.auditd"], known["vault.vaultd"]]

    for process in ours():
        for task in Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(task.name), {PROXY_CORE})
    yield Way(BARE, outside, f"https://{peers.INJECTED}", list)
    yield Way(goals.SPLICED, inside, f"https://{peers.SPLICED}", ours)
    yield Way(INSPECTED, inside, f"https://{peers.INSPECTED}", ours)
    yield Way(goals.INJECTED, inside, f"https://{peers.INJECTED}", ours)
    yield Way(NEW_HEADS, inside, f"https://{peers.INJECTED}", ours, "new")
    for name, port, process in (
        (ENVOY, peers.ENVOY_PORT, envoy),
        (MITMPROXY, peers.MITMPROXY_PORT, mitmproxy),
        (SQUID, peers.SQUID_PORT, squid),
    ):
        yield Way(name, to_peers, f"https://{peers.INJECTED}:{port}", lambda process=process: [process])  # type: ignore[misc]


def _entering(netns: str, file: Path, place: str) -> tuple[str, ...]:
    """Return the start of a command in a network namespace, with `file` at `place`, on the core of the clients."""
    mount = f'mount --bind {file} {place} && exec "$@"'
    return (
        *("nsenter", f"--net={netns}", "unshare", "--mount", "sh", "-c", mount, "sh"),
        *("taskset", "--cpu-list", str(OTHER_CORE)),
    )


def _round(way: Way) -> dict[tuple[str, str], float]:
    seen: dict[tuple[str, str], float] = {}
    for connections in CONNECTIONS:
        label = of_connections(connections)
        before = _processor_seconds(way)
        result = clients.wrk(way, connections, SECONDS * (4 if connections > _MANY else 1))
        seen[f"requests, {label}", "1/s"] = result["requests"] / result["seconds"]
        seen[f"p50, {label}", "ms"] = result["p50_ms"]
        seen[f"p99, {label}", "ms"] = result["p99_ms"]
        if way.proxies():
            spent = _processor_seconds(way) - before
            seen[f"processor time of a request, {label}", "us"] = 1e6 * spent / result["requests"]
        _rest(way)
    if way.kind == "same":
        result = clients.wrk(replace(way, kind="close"), NEW_CONNECTIONS, SECONDS)
        _rest(way)
        seen["new TLS connections", "1/s"] = result["requests"] / result["seconds"]
        if way.name == goals.INJECTED:
            seen["requests over HTTP/2, 16 connections", "1/s"] = clients.http2(way, SECONDS)
        seen["down", "MB/s"] = clients.download(way)
        if way.name not in (INSPECTED, SQUID):  # the rule of one allows GET only, and Squid 5.7 breaks uploads off
            seen["up", "MB/s"] = clients.upload(way)
    if way.proxies():
        seen["memory", "MiB"] = sum(_memory(process) for process in way.proxies()) / 2**20
    return seen


def _rest(way: Way) -> None:
    """Wait until the proxy rests: it closes the connections of a sample, and others share its core."""
    deadline, before = time.monotonic() + _REST_MOST, -1.0
    while (now := _processor_seconds(way)) - before > _REST_SECONDS / 10 and time.monotonic() < deadline:
        before = now
        time.sleep(_REST_SECONDS)


def _processor_seconds(way: Way) -> float:
    """Return the processor time that the proxy has used, in seconds."""
    fields = [Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split() for process in way.proxies()]
    return sum(int(user) + int(system) for _, *_, user, system in (row[:13] for row in fields)) / _TICKS


def _memory(process: int) -> int:
    """Return the proportional set size of a process, in bytes."""
    rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
    match = re.search(r"^Pss: +([0-9]+) kB", rollup, re.MULTILINE)
    if match is None:
        raise BenchError(f"process {process} has no memory")
    return int(match[1]) << 10
