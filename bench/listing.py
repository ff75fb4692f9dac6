"""Requests of the API that read: one sandbox, and a page of twenty out of a thousand, newest first.

- The rows are written into the server's SQLite file, as sandboxes that have ended: no process looks for their
  containers. Everything from the socket to the row is the product's.
- The peer is FastAPI on uvicorn that answers the same bytes from a constant, without keys, rows or ids of requests. So
  it is a bound of what this framework allows. The published server is no peer here: it asks Docker for its sandboxes,
  and would need a thousand containers.
- wrk has one core, the server the other one. The processor time of a request does not depend on other load. Its goal is
  1,500 requests a second on one core.
"""

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from bench.components import Meter, classify, processes
from bench.figures import Figure, Goal
from bench.fixture import BenchError, Fixture, wait_until
from bench.peers import OTHER_CORE, PROXY_CORE, pinned
from testbed.ports import reserve_port
from testbed.stack import IMAGE

ROWS, PAGE = 1000, 20
SECONDS = 2
CONNECTIONS = 16
LIMIT = 1e6 / 1500
_SCRIPT = Path(__file__).with_name("report.lua")
_FIRST = 1795569600.0


def measure(fixture: Fixture, rounds: int) -> list[Figure]:
    """Measure both calls, the server and its peer in turn."""
    stack = fixture.stack
    key = f"OPEN-SANDBOX-API-KEY: {stack.api_key}"
    serve = next(pid for pid, name in classify(processes(), stack.run).items() if name == "serve")
    calls = {"get": f"/v1/sandboxes/{_name(7)}", f"list, {PAGE} of {ROWS}": f"/v1/sandboxes?pageSize={PAGE}"}
    figures = []
    with _rows(stack.state / "lifecycle"), _on_core(serve, PROXY_CORE):
        for what, path in calls.items():
            with _constant(_answer(f"{stack.base}{path}", key)) as (peer, port):
                ways = {"": (serve, f"{stack.base}{path}"), ": a constant": (peer, f"http://127.0.0.1:{port}{path}")}
                rates: dict[str, list[float]] = {way: [] for way in ways}
                costs: dict[str, list[float]] = {way: [] for way in ways}
                for _ in range(rounds):
                    for way, (pid, url) in ways.items():
                        rate, cost = _sample(pid, url, key)
                        rates[way].append(rate)
                        costs[way].append(cost)
            cost_of = f"{what}: processor time of a request"
            figures += [
                Figure(what, "1/s", rates[""], f"{what}: a constant"),
                Figure(f"{what}: a constant", "1/s", rates[": a constant"]),
                Figure(cost_of, "us", costs[""], f"{cost_of}: a constant", Goal("median", LIMIT)),
                Figure(f"{cost_of}: a constant", "us", costs[": a constant"]),
            ]
    return figures


def _name(number: int) -> str:
    return f"sbx-{number:024x}"


@contextmanager
def _rows(state: Path) -> Iterator[None]:
    """Add the rows, and remove them at the end."""
    owner = (state / "server-id").read_text().strip()
    names = [_name(number) for number in range(ROWS)]
    policy = {"defaultAction": "deny", "egress": [{"action": "allow", "target": "api.example.org"}]}
    common = {
        "state": "Terminated",
        "reason": "CONTAINER_EXITED",
        "message": "The entrypoint has ended.",
        "image": IMAGE,
        "entrypoint": json.dumps(["tail", "-f", "/dev/null"]),
        "runtime": "runsc",
        "metadata": json.dumps({"team": "treasury", "stage": "test"}),
        "extensions": json.dumps({"sallyport.policy": "agents"}),
        "platform": json.dumps({"os": "linux", "arch": "amd64"}),
        "policy_name": "agents",
        "network_policy": json.dumps(policy),
        "policy_digest": "ab" * 32,
        "credential_proxy": 0,
        "secure_access": 0,
        "owner": owner,
    }
    columns = [*common, "id", "lineage", "created_at", "changed_at"]
    values = [[*common.values(), name, name, _FIRST + n, _FIRST + n] for n, name in enumerate(names)]
    insert = f"INSERT INTO sandboxes ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"  # noqa: S608
    with closing(sqlite3.connect(state / "sallyport.db", timeout=10)) as database:
        with database:
            database.executemany(insert, values)
        try:
            yield
        finally:
            with database:
                database.executemany("DELETE FROM sandboxes WHERE id = ?", [[name] for name in names])


@contextmanager
def _on_core(pid: int, core: int) -> Iterator[None]:
    """Keep all threads of a process on one core."""
    before = os.sched_getaffinity(pid)
    for cores in ({core}, None):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), before if cores is None else cores)
        if cores is not None:
            yield


@contextmanager
def _constant(text: bytes) -> Iterator[tuple[int, int]]:
    """Run the peer. Yield its process and its port."""
    port = reserve_port()
    command = pinned(PROXY_CORE, sys.executable, "-m", "bench.constant", str(port))
    with subprocess.Popen(command, stdin=subprocess.PIPE) as peer:
        assert peer.stdin is not None  # noqa: S101 - it is a pipe
        peer.stdin.write(text)
        peer.stdin.close()
        try:
            wait_until(lambda: _listens(port), "the peer listens")
            yield peer.pid, port
        finally:
            peer.kill()


def _listens(port: int) -> bool:
    return subprocess.run(["curl", "-s", f"http://127.0.0.1:{port}/"], check=False, capture_output=True).returncode == 0


def _answer(url: str, key: str) -> bytes:
    done = subprocess.run(["curl", "-sS", "--fail", "-H", key, url], check=False, capture_output=True)
    if done.returncode != 0:
        raise BenchError(f"{url}: {done.stderr.decode(errors='replace')}")
    return done.stdout


def _sample(pid: int, url: str, key: str) -> tuple[float, float]:
    """Return requests a second, and microseconds of processor time for each.

    Raises:
        BenchError: a request failed.
    """
    load = ("--threads", "1", "--connections", str(CONNECTIONS), "--duration", f"{SECONDS}s", "--timeout", "20s")
    command = pinned(OTHER_CORE, "wrk", *load, "-H", key, "--script", str(_SCRIPT), url, "--", "same")
    meter = Meter({pid: "server"}, "")
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    seconds = meter.read()["server"]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        raise BenchError(f"wrk ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
    result = json.loads(lines[-1])
    if result["failures"] or not result["requests"]:
        raise BenchError(f"{url}: {result}")
    return result["requests"] / result["seconds"], 1e6 * seconds / result["requests"]
