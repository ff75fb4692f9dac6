"""Records that are missing after kill -9 of each component, while the gateway serves as many requests as it can.

- Each request has a new path and is injected. nginx writes the path of each request that arrives.
- wrk reconnects when the gateway resets its connections.
- A request that has arrived must have a record. One that has a record need not have arrived.
"""

import random
import subprocess
import time
from collections.abc import Iterator, Set
from contextlib import ExitStack

from bench import clients, gateway, peers
from bench.clients import Way
from bench.figures import Figure, Goal
from bench.fixture import BenchError, Fixture, wait_until
from bench.goals import INJECTED
from demo.chaos import kills
from demo.chaos.kills import Part

CONNECTIONS, SECONDS = 16, 6
PARTS = tuple(Part)
_BEFORE_SECONDS, _BACK_SECONDS, _LOG_SECONDS = 2.0, 120.0, 30.0


def measure(fixture: Fixture, _rounds: int) -> list[Figure]:
    """Kill each component once under load.

    Raises:
        BenchError: a component was not found, the gateway did not come back, or no request arrived.
    """
    sandbox = fixture.stack.create("runc", policy="bench", resource={"cpu": "2", "memory": "2Gi"})
    try:
        with ExitStack() as stack:
            log = stack.enter_context(peers.nginx(fixture))
            (way,) = (one for one in gateway.ways(fixture, str(sandbox.id)) if one.name == INJECTED)
            clients.wrk(way, 1, 1)
            rates = {part: _killed(fixture, way, part) for part in PARTS}
            last = f"/{peers.LOGGED}/last/1"
            clients.get(way, last)
            wait_until(lambda: last in log.read_text(), "nginx writes its log", _LOG_SECONDS)
            arrived = set(log.read_text().split())
    finally:
        sandbox.kill()
        sandbox.close()
    return list(figures(rates, arrived, recorded(fixture)))


def _killed(fixture: Fixture, way: Way, part: Part) -> float:
    """Kill a component while requests are sent; return the responses per second, errors included."""
    command = clients.new_heads(way, CONNECTIONS, SECONDS, f"/{peers.LOGGED}/{part}")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as load:
        time.sleep(_BEFORE_SECONDS)
        if not kills.kill(fixture.stack, (part,), random.Random(0)):  # noqa: S311 - not for a secret
            load.kill()
            raise BenchError(f"{part} does not run")
        output, _ = load.communicate()
    result = clients.result(output)
    if load.returncode != 0 or result is None:
        raise BenchError(f"wrk ended with {load.returncode}: {output[-300:]}")
    wait_until(lambda: _serves(way), f"the gateway after the death of {part}", _BACK_SECONDS)
    return result["requests"] / result["seconds"]


def _serves(way: Way) -> bool:
    try:
        clients.wrk(way, 1, 1)
    except BenchError:
        return False
    return True


def recorded(fixture: Fixture) -> set[str]:
    """Return the paths of all requests that the log says were allowed."""
    records = fixture.stack.audit_records()
    return {one["path"] for one in records if one["kind"] == "request" and one["decision"] == "allow"}


def figures(rates: dict[Part, float], arrived: Set[str], known: Set[str]) -> Iterator[Figure]:
    """Yield the figures of each kill.

    Args:
        rates: the responses per second.
        arrived: the paths of the requests that arrived.
        known: the paths that have a record.

    Raises:
        BenchError: no request arrived around a kill.
    """
    for part, rate in rates.items():
        paths = {path for path in arrived if path.startswith(f"/{peers.LOGGED}/{part}/")}
        if not paths:
            raise BenchError(f"no request arrived around the death of {part}")
        yield Figure(f"kill -9 of {part}: responses", "1/s", [rate])
        yield Figure(f"kill -9 of {part}: requests that arrived", "", [len(paths)])
        yield Figure(f"kill -9 of {part}: of these without a record", "", [len(paths - known)], None, Goal("max", 0))
