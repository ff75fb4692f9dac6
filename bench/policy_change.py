"""The time from a change of policy to the end of the last flow that it forbids.

Twenty flows of one sandbox, half of them spliced and half inspected, wait for the rest of an answer when a `PUT` of the
policy forbids their hosts. The end of each is measured on both sides: by the client in the sandbox and by the far end.
"""

import threading
import time
from typing import Any

import httpx

from bench.figures import Figure, Goal
from bench.fixture import INSPECTED, SPLICED, BenchError, Fixture, put_client, run_client, wait_until

FLOWS = 20
LIMIT = 250.0
_NOTHING: dict[str, Any] = {"defaultAction": "deny", "egress": []}
_EVERYTHING: dict[str, Any] = {"defaultAction": "allow", "egress": []}


def measure(fixture: Fixture, rounds: int) -> list[Figure]:
    """Abort all flows `rounds` times."""
    sandbox = fixture.create("runc")  # it shares the host's monotonic clock
    key = {"OPEN-SANDBOX-API-KEY": fixture.stack.api_key}
    try:
        put_client(sandbox)
        with httpx.Client(base_url=fixture.stack.base, headers=key, timeout=30) as client:
            url = f"/v1/sandboxes/{sandbox.id}/networkpolicy"
            samples = [_cut(fixture, sandbox, client, url) for _ in range(rounds)]
    finally:
        sandbox.kill()
        sandbox.close()
    inside, outside, answered = zip(*samples, strict=True)
    return [
        Figure("policy change: last flow ended at the client", "ms", inside, None, Goal("p99", LIMIT)),
        Figure("policy change: last flow ended at the far end", "ms", outside, None, Goal("p99", LIMIT)),
        Figure("policy change: call answered", "ms", answered),
    ]


def _cut(fixture: Fixture, sandbox: Any, client: httpx.Client, url: str) -> tuple[float, float, float]:
    mark = len(fixture.notes())
    results: list[dict[str, Any]] = []
    hosts = [SPLICED, INSPECTED] * (FLOWS // 2)
    flows = threading.Thread(target=lambda: results.append(run_client(sandbox, hosts)))
    flows.start()
    wait_until(lambda: _count(fixture, mark, "first") == FLOWS, "all flows are open")
    began = time.monotonic()
    client.put(url, json=_NOTHING).raise_for_status()
    answered = time.monotonic()
    wait_until(lambda: _count(fixture, mark, "closed") == FLOWS, "all flows end at the far end")
    flows.join()
    if not results or results[0]["failures"] or len(results[0]["ended"]) != FLOWS:
        raise BenchError(f"the client's flows: {results}")
    if min(results[0]["ended"]) < began:
        raise BenchError("a flow ended before the change")
    client.put(url, json=_EVERYTHING).raise_for_status()
    inside = max(results[0]["ended"])
    outside = max(note["at"] for note in fixture.notes(mark) if note["event"] == "closed")
    return 1000 * (inside - began), 1000 * (outside - began), 1000 * (answered - began)


def _count(fixture: Fixture, mark: int, event: str) -> int:
    return sum(note["event"] == event for note in fixture.notes(mark))
