"""Creates at once: the time of each until its sandbox runs; beside the same number of containers of Docker alone.

- One burst is `AT_ONCE` calls of the API at the same moment, each with a client of its own. A call is answered when its
  entrypoint runs. The peer is `AT_ONCE` containers with the same image, limits and runtime, without the shim.
- A client does nothing but send and wait: the SDK's processor time for twenty sandboxes would be most of the figure.
- The spread of a burst is its longest time divided by its median. With a queue that serves in order it is 2.
"""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import docker
import httpx

from bench.create import PLAIN, add_plain_runsc, plain_container
from bench.figures import Figure, Goal, quantile
from bench.fixture import BenchError, Fixture
from testbed.stack import IMAGE

AT_ONCE = 20
SPREAD = 3.0
_REST_SECONDS = 3.0
_MOST_BURSTS = 5


def measure(fixture: Fixture, rounds: int) -> list[Figure]:
    """Measure both runtimes, Sallyport and the peer in turn: a few bursts, each of which has many samples."""
    api = docker.APIClient(base_url=f"unix://{fixture.stack.run / 'docker.sock'}", version="auto", num_pools=AT_ONCE)
    headers = {"OPEN-SANDBOX-API-KEY": fixture.stack.api_key}
    try:
        add_plain_runsc(fixture, api)
        with httpx.Client(base_url=f"{fixture.stack.base}/v1", headers=headers, timeout=300, trust_env=False) as client:
            bursts = min(rounds, _MOST_BURSTS)
            return [figure for runtime in PLAIN for figure in _runtime(fixture, api, client, runtime, bursts)]
    finally:
        api.close()


def _runtime(fixture: Fixture, api: Any, client: httpx.Client, runtime: str, bursts: int) -> list[Figure]:
    docker_socket = str(fixture.stack.run / "docker.sock")
    body = {
        "image": {"uri": IMAGE},
        "entrypoint": ["tail", "-f", "/dev/null"],
        "resourceLimits": {"cpu": "1", "memory": "2Gi"},
        "timeout": 3600,
        "extensions": {"sallyport.policy": "bench", "sallyport.runtime": runtime},
    }
    ways: dict[str, tuple[Callable[[], str], Callable[[str], object]]] = {
        "Sallyport": (lambda: _created(client, body), lambda name: client.delete(f"/sandboxes/{name}")),
        "Docker alone": (
            lambda: plain_container(api, docker_socket, PLAIN[runtime]),
            lambda name: api.remove_container(name, force=True),
        ),
    }
    samples: dict[str, list[float]] = {way: [] for way in ways}
    spreads: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(bursts):
        for way, (make, remove) in ways.items():
            time.sleep(_REST_SECONDS)
            took = _burst(make, remove)
            samples[way] += took
            spreads[way].append(quantile(sorted(took), 0.99) / statistics.median(took))
    name = f"{AT_ONCE} creates at once {runtime}"
    peer = f"{name}: Docker alone"
    return [
        Figure(name, "ms", samples["Sallyport"], peer),
        Figure(peer, "ms", samples["Docker alone"]),
        Figure(f"{name}: p99 by p50", "x", spreads["Sallyport"], f"{peer}: p99 by p50", Goal("median", SPREAD)),
        Figure(f"{peer}: p99 by p50", "x", spreads["Docker alone"]),
    ]


def _created(client: httpx.Client, body: dict[str, Any]) -> str:
    answer = client.post("/sandboxes", json=body)
    if answer.status_code != httpx.codes.ACCEPTED or answer.json()["status"]["state"] != "Running":
        raise BenchError(f"create: {answer.status_code} {answer.text}")
    return str(answer.json()["id"])


def _burst(make: Callable[[], str], remove: Callable[[str], object]) -> Sequence[float]:
    """Make all at once, then remove all. Return the milliseconds of each."""
    ready = threading.Barrier(AT_ONCE)

    def one(_: int) -> tuple[str, float]:
        ready.wait()
        began = time.perf_counter()
        name = make()
        return name, 1000 * (time.perf_counter() - began)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        futures = [threads.submit(one, number) for number in range(AT_ONCE)]
    made = [future.result() for future in futures if future.exception() is None]
    for name, _ in made:
        remove(name)
    if failed := [future.exception() for future in futures if future.exception() is not None]:
        raise BenchError(f"{len(failed)} of {AT_ONCE} at once failed: {failed[0]}")
    return [took for _, took in made]
