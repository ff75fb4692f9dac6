"""The clients of the benchmark `gateway`: wrk, h2load and curl, each in the namespaces and on the core of its way."""

import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench import peers
from bench.figures import quantile
from bench.fixture import BenchError

_SCRIPT = Path(__file__).with_name("report.lua")
_RATE = re.compile(r"finished in .*?, ([0-9.]+) req/s")
_FAILED = re.compile(r"([0-9]+) failed, ([0-9]+) errored, ([0-9]+) timeout")
_OK = 200


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


def wrk(way: Way, connections: int, seconds: int) -> dict[str, float]:
    """Load the path with as many requests as it takes.

    Raises:
        BenchError: a request failed.
    """
    done = _run(way, *_wrk(way, connections, seconds, way.kind))
    found = result(done.stdout)
    if done.returncode != 0 or found is None:
        raise BenchError(f"{way.name}: wrk ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
    if found["failures"] or not found["requests"]:
        raise BenchError(f"{way.name}, {connections} connections, wrk {way.kind}: {found}")
    return found


def new_heads(way: Way, connections: int, seconds: int, beginning: str) -> list[str]:
    """Return the command of wrk with a new path in each request, from `beginning`/1 on."""
    return [*way.prefix, *_wrk(way, connections, seconds, "new", beginning)]


def _wrk(way: Way, connections: int, seconds: int, *arguments: str) -> tuple[str, ...]:
    return (
        *("wrk", "--threads", "1", "--connections", str(connections), "--duration", f"{seconds}s"),
        *("--timeout", "20s", "--script", str(_SCRIPT), f"{way.url}/page", "--", *arguments),
    )


def result(output: str) -> dict[str, float] | None:
    """Return what wrk's script has printed; None if it has not ended."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return dict(json.loads(lines[-1])) if lines else None


def get(way: Way, path: str) -> None:
    """Send one request.

    Raises:
        BenchError: it failed.
    """
    done = _run(way, "curl", "--silent", "--show-error", "--insecure", "--fail", "--max-time", "60", f"{way.url}{path}")
    if done.returncode != 0:
        raise BenchError(f"{way.name}: curl ended with {done.returncode}: {done.stderr[-300:]}")


def http2(way: Way, seconds: int) -> float:
    """Return requests a second over HTTP/2, with 16 connections of one stream each."""
    return _h2load(way, seconds, "--clients=16", "--max-concurrent-streams=1")


def paced(way: Way, rate: float, seconds: int) -> float:
    """Send `rate` requests a second over 16 connections of HTTP/1.1; return the 99th percentile of the latency, in ms.

    Requests of the first second do not count: the connections are opened then.

    Raises:
        BenchError: a request failed, or none was sent after the first second.
    """
    with tempfile.NamedTemporaryFile("r", prefix="sallyport-bench-") as log:
        each = f"--rps={rate / 16:.6f}"
        _h2load(way, seconds + 1, "--h1", "--clients=16", each, f"--log-file={log.name}")
        rows = [tuple(map(int, line.split()[:3])) for line in log]
    if any(status != _OK for _, status, _ in rows):
        raise BenchError(f"{way.name}: a request at {rate:.0f} a second failed")
    counted = min((begun for begun, _, _ in rows), default=0) + 1_000_000
    latencies = sorted(microseconds / 1000 for begun, _, microseconds in rows if begun >= counted)
    if not latencies:
        raise BenchError(f"{way.name}: no request at {rate:.0f} a second")
    return quantile(latencies, 0.99)


def _h2load(way: Way, seconds: int, *options: str) -> float:
    """Return requests a second.

    Raises:
        BenchError: a request failed.
    """
    done = _run(way, "h2load", f"--duration={seconds}", *options, f"{way.url}/page")
    rate, failed = _RATE.search(done.stdout), _FAILED.search(done.stdout)
    if rate is None or failed is None or any(map(int, failed.groups())):
        raise BenchError(f"{way.name}: h2load: {(done.stdout + done.stderr)[-300:]}")
    return float(rate[1])


def download(way: Way) -> float:
    """Receive one large body; return megabytes a second."""
    return _curl(way, "--output", "/dev/null", f"{way.url}/bulk")


def upload(way: Way) -> float:
    """Send one large body; return megabytes a second."""
    with tempfile.NamedTemporaryFile(prefix="sallyport-bench-") as body:
        body.truncate(peers.BULK_BYTES)
        return _curl(way, "--upload-file", body.name, f"{way.url}/upload")


def _curl(way: Way, *arguments: str) -> float:
    command = ("curl", "--silent", "--show-error", "--insecure", "--http1.1", "--fail", "--max-time", "600")
    about = "%{size_download} %{size_upload} %{time_total}"
    done = _run(way, *command, "--write-out", f"\n{about}", *arguments)
    if done.returncode != 0:
        raise BenchError(f"{way.name}: curl ended with {done.returncode}: {done.stderr[-300:]}")
    down, up, seconds = map(float, done.stdout.splitlines()[-1].split())
    if max(down, up) < peers.BULK_BYTES:
        raise BenchError(f"{way.name}: {down:g} bytes down, {up:g} up")
    return peers.BULK_BYTES / seconds / 1e6


def _run(way: Way, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*way.prefix, *command], capture_output=True, text=True, check=False)
