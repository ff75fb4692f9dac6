"""The gateway beside other proxies: requests, latency, new connections, bytes, processor time and memory.

- One nginx serves every path. Each path is measured in each round, so that a change of the machine's speed changes all.
- wrk is the client of HTTP/1.1, h2load of HTTP/2, curl of the large bodies. For Sallyport they run in the sandbox's
  network namespace, for the others in one that is connected like a host.
- The proxy has one core: for Sallyport the worker, auditd and vaultd together. Client and server share the other.
- Policy and audit are on. The access log of nginx is off, those of the peers are on.
"""

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench import peers
from bench.figures import Figure
from bench.fixture import PAGES, BenchError, Fixture
from bench.peers import INJECTED, INSPECTED, OTHER_CORE, PROXY_CORE, SPLICED
from runtimes.net.plan import RESOLV_CONF
from testbed.census import daemons
from testbed.internet import UP_ADDRESS

CONNECTIONS = (1, 16, 256)
SECONDS = 3
"""The length of one sample. With many connections it is longer, because of their handshakes."""
BARE, ENVOY, MITMPROXY = "no gateway", "Envoy", "mitmproxy"
_SCRIPT = Path(__file__).with_name("report.lua")
_MANY = 100
_TICKS = os.sysconf("SC_CLK_TCK")
_H2LOAD = re.compile(r"finished in .*?, ([0-9.]+) req/s")
_H2LOAD_FAILED = re.compile(r"([0-9]+) failed, ([0-9]+) errored, ([0-9]+) timeout")


@dataclass(frozen=True, slots=True)
class Way:
    """One path from the client to nginx.

    Attributes:
        prefix: enters the client's namespaces.
        url: of the server, as the client calls it.
        proxies: returns the processes of the proxy.
        kind: the argument of wrk's script.
    """

    name: str
    prefix: tuple[str, ...]
    url: str
    proxies: Callable[[], list[int]]
    kind: str = "same"


def measure(fixture: Fixture, rounds: int) -> list[Figure]:
    """Measure every path `rounds` times."""
    samples: dict[tuple[str, str], list[float]] = {}
    sandbox = fixture.stack.create("runc", policy="bench", resource={"cpu": "2", "memory": "2Gi"})
    try:
        with ExitStack() as stack:
            stack.enter_context(peers.nginx(fixture))
            envoy = stack.enter_context(peers.envoy(fixture))
            mitmproxy = stack.enter_context(peers.mitmproxy(fixture))
            ways = list(_ways(fixture, str(sandbox.id), envoy, mitmproxy))
            for way in ways:
                _wrk(way, 1, 1)  # makes certificates, and shows that the path works
            for _ in range(rounds):
                for way in ways:
                    for (what, unit), value in _round(way).items():
                        samples.setdefault((f"{what}: {way.name}", unit), []).append(value)
    finally:
        sandbox.kill()
        sandbox.close()
    return [Figure(name, unit, values, _peer(name, samples)) for (name, unit), values in samples.items()]


def _peer(name: str, samples: Mapping[tuple[str, str], list[float]]) -> str | None:
    peer = f"{name.partition(': ')[0]}: {ENVOY}"
    return peer if peer != name and any(peer == other for other, _ in samples) else None


def _ways(fixture: Fixture, sandbox: str, envoy: int, mitmproxy: int) -> Iterator[Way]:
    directory = fixture.internet.directory
    resolver, hosts = directory / "resolv.conf", directory / "hosts"
    resolver.write_text(RESOLV_CONF)
    hosts.write_text("".join(f"{address} {host}\n" for host, address in PAGES.items()))
    peer_hosts = directory / "peer-hosts"
    peer_hosts.write_text(f"{UP_ADDRESS} {INJECTED}\n")
    inside = _entering(fixture.stack.netns(sandbox, "sbx"), resolver, "/etc/resolv.conf")
    outside = _entering(fixture.internet.path(fixture.internet.control), hosts, "/etc/hosts")
    to_peers = _entering(fixture.internet.path(fixture.internet.control), peer_hosts, "/etc/hosts")

    def ours() -> list[int]:
        known = daemons(fixture.stack)
        return [fixture.stack.worker_pid(sandbox), known["audit.auditd"], known["vault.vaultd"]]

    for process in ours():
        for task in Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(task.name), {PROXY_CORE})
    yield Way(BARE, outside, f"https://{INJECTED}", list)
    yield Way("spliced", inside, f"https://{SPLICED}", ours)
    yield Way("inspected", inside, f"https://{INSPECTED}", ours)
    yield Way("injected", inside, f"https://{INJECTED}", ours)
    yield Way("injected, each head new", inside, f"https://{INJECTED}", ours, "new")
    for name, port, process in (
        (ENVOY, peers.ENVOY_PORT, envoy),
        (MITMPROXY, peers.MITMPROXY_PORT, mitmproxy),
    ):
        yield Way(name, to_peers, f"https://{INJECTED}:{port}", lambda process=process: [process])  # type: ignore[misc]


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
        label = "1 connection" if connections == 1 else f"{connections} connections"
        before = _processor_seconds(way)
        result = _wrk(way, connections, SECONDS * (4 if connections > _MANY else 1))
        seen[f"requests, {label}", "1/s"] = result["requests"] / result["seconds"]
        seen[f"p50, {label}", "ms"] = result["p50_ms"]
        seen[f"p99, {label}", "ms"] = result["p99_ms"]
        if way.proxies():
            spent = _processor_seconds(way) - before
            seen[f"processor time of a request, {label}", "us"] = 1e6 * spent / result["requests"]
    if way.kind == "same":
        closing = Way(way.name, way.prefix, way.url, way.proxies, "close")
        result = _wrk(closing, 16, SECONDS)
        seen["new TLS connections", "1/s"] = result["requests"] / result["seconds"]
        if way.name == "injected":
            seen["requests over HTTP/2, 16 connections", "1/s"] = _h2load(way)
        seen["down", "MB/s"] = _curl(way, "--output", "/dev/null", f"{way.url}/bulk")
        if way.name != "inspected":  # its rule allows GET only
            seen["up", "MB/s"] = _upload(way)
    if way.proxies():
        seen["memory", "MiB"] = sum(_memory(process) for process in way.proxies()) / 2**20
    return seen


def _wrk(way: Way, connections: int, seconds: int) -> dict[str, float]:
    """Load the path.

    Raises:
        BenchError: a request failed.
    """
    command = (
        *("wrk", "--threads", "1", "--connections", str(connections), "--duration", f"{seconds}s"),
        *("--timeout", "20s", "--script", str(_SCRIPT), f"{way.url}/page", "--", way.kind),
    )
    done = subprocess.run([*way.prefix, *command], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        raise BenchError(f"{way.name}: wrk ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
    result: dict[str, float] = json.loads(lines[-1])
    if result["failures"] or not result["requests"]:
        raise BenchError(f"{way.name}, {connections} connections: {result}")
    return result


def _h2load(way: Way) -> float:
    """Return requests a second over HTTP/2, with 16 connections of one stream each."""
    command = ("h2load", "--clients=16", f"--duration={SECONDS}", "--max-concurrent-streams=1", f"{way.url}/page")
    done = subprocess.run([*way.prefix, *command], capture_output=True, text=True, check=False)
    rate, failed = _H2LOAD.search(done.stdout), _H2LOAD_FAILED.search(done.stdout)
    if rate is None or failed is None or any(map(int, failed.groups())):
        raise BenchError(f"{way.name}: h2load: {(done.stdout + done.stderr)[-300:]}")
    return float(rate[1])


def _curl(way: Way, *arguments: str) -> float:
    """Transfer one large body; return megabytes a second."""
    command = ("curl", "--silent", "--show-error", "--insecure", "--http1.1", "--fail", "--max-time", "600")
    about = "%{size_download} %{size_upload} %{time_total}"
    done = subprocess.run(
        [*way.prefix, *command, "--write-out", f"\n{about}", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BenchError(f"{way.name}: curl ended with {done.returncode}: {done.stderr[-300:]}")
    down, up, seconds = map(float, done.stdout.splitlines()[-1].split())
    if max(down, up) < peers.BULK_BYTES:
        raise BenchError(f"{way.name}: {down:g} bytes down, {up:g} up")
    return peers.BULK_BYTES / seconds / 1e6


def _upload(way: Way) -> float:
    with tempfile.NamedTemporaryFile(prefix="sallyport-bench-") as body:
        body.truncate(peers.BULK_BYTES)
        return _curl(way, "--upload-file", body.name, f"{way.url}/upload")


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
