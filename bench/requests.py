"""HTTPS requests per second and latency: spliced, inspected, injected; with plain `mitmdump`; without a gateway.

- The client is always the same: eight kept connections, small answers. For Sallyport it runs inside a sandbox.
- The peer is the unmodified program of the mitmproxy wheel, as an explicit proxy in the namespace from which workers
  dial, with an addon of one line that sets the same header.
- The far end counts the requests that have the header.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opensandbox.sync.sandbox import SandboxSync

from bench.figures import Figure
from bench.ground import (
    CLIENT,
    HOSTS,
    INJECTED,
    INSPECTED,
    SPLICED,
    BenchError,
    Ground,
    in_namespace,
    put_client,
    run_client,
    wait_until,
)
from testbed.internet import UP_ADDRESS

CONNECTIONS = 8
SECONDS = 1.0
PEER, BARE = "mitmdump", "no gateway"
_PROXY_PORT = 8899
_QUANTITIES = (("requests", "1/s", "rate"), ("latency p50", "ms", "p50_ms"), ("latency p99", "ms", "p99_ms"))


def measure(ground: Ground, rounds: int) -> list[Figure]:
    """Measure all paths in turn, `rounds` times."""
    sandbox = ground.stack.create("runc", policy="bench", resource={"cpu": "2", "memory": "2Gi"})
    try:
        put_client(sandbox)
        with _mitmdump(ground) as roots:
            seen: dict[str, list[dict[str, Any]]] = {}
            for number in range(rounds + 1):
                one_round = {way: _from_sandbox(sandbox, ground, way) for way in ("spliced", "inspected", "injected")}
                one_round[PEER] = _outside(ground, INJECTED, roots=roots, proxy=[UP_ADDRESS, _PROXY_PORT])
                one_round[BARE] = _outside(ground, INJECTED, roots=str(ground.internet.roots))
                if number:  # the first round makes certificates and connections
                    for way, result in one_round.items():
                        seen.setdefault(way, []).append(result)
        return [figure for way, results in seen.items() for figure in _figures(way, results)]
    finally:
        sandbox.kill()
        sandbox.close()


def _figures(way: str, results: list[dict[str, Any]]) -> Iterator[Figure]:
    for what, unit, key in _QUANTITIES:
        peer = None if way == PEER else f"{what}: {PEER}"
        yield Figure(f"{what}: {way}", unit, [float(result[key]) for result in results], peer)


def _plan(host: str, **more: object) -> dict[str, Any]:
    return {"host": host, "connections": CONNECTIONS, "seconds": SECONDS, **more}


def _from_sandbox(sandbox: SandboxSync, ground: Ground, way: str) -> dict[str, Any]:
    host = {"spliced": SPLICED, "inspected": INSPECTED, "injected": INJECTED}[way]
    mark = len(ground.notes())
    result = run_client(sandbox, _plan(host))
    return _checked(ground, mark, way, result, with_header=way == "injected")


def _outside(ground: Ground, host: str, **more: object) -> dict[str, Any]:
    mark = len(ground.notes())
    plan = json.dumps(_plan(host, address=HOSTS[host], **more))
    command = in_namespace(ground.internet, ground.internet.control, sys.executable, str(CLIENT), plan)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(f"the load client ended with {done.returncode}: {done.stderr[-300:]}")
    way = PEER if "proxy" in more else BARE
    return _checked(ground, mark, way, json.loads(done.stdout), with_header=way == PEER)


def _checked(ground: Ground, mark: int, way: str, result: dict[str, Any], *, with_header: bool) -> dict[str, Any]:
    """Compare the client's count with the far end's."""
    if result["failures"] or not result["requests"]:
        raise BenchError(f"{way}: {result['failures']}")

    def closed() -> list[dict[str, Any]]:
        return [note for note in ground.notes(mark) if note["event"] == "closed" and note["requests"]]

    wait_until(lambda: len(closed()) >= CONNECTIONS, f"{way}: the far end sees the connections end")
    arrived = sum(note["requests"] for note in closed())
    authorised = sum(note["authorised"] for note in closed())
    if arrived < result["requests"] or authorised != (arrived if with_header else 0):
        raise BenchError(f"{way}: {result['requests']} answers, {arrived} requests, {authorised} with the header")
    return {**result, "rate": result["requests"] / SECONDS}


def _listens(ground: Ground) -> bool:
    with ground.internet.open_socket(ground.internet.control, socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        return probe.connect_ex((UP_ADDRESS, _PROXY_PORT)) == 0


@contextmanager
def _mitmdump(ground: Ground) -> Iterator[str]:
    """Run the peer; yield the path of its root certificate."""
    directory = ground.internet.directory / "mitmdump"
    command = in_namespace(
        ground.internet,
        ground.internet.up,
        str(Path(sys.executable).with_name("mitmdump")),
        "--quiet",
        f"--listen-host={UP_ADDRESS}",
        f"--listen-port={_PROXY_PORT}",
        "--set=block_global=false",  # the internet of these benchmarks looks public
        f"--set=confdir={directory}",
        f"--set=ssl_verify_upstream_trusted_ca={ground.internet.roots}",
        f"--scripts={Path(__file__).with_name('set_header.py')}",
    )
    with subprocess.Popen(command, env={**os.environ, "BENCH_TOKEN": ground.token}) as process:
        try:
            wait_until(lambda: _listens(ground), "mitmdump listens")
            yield str(directory / "mitmproxy-ca-cert.pem")
        finally:
            process.terminate()
