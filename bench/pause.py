"""The time of a pause and of a resume, by the API's answer; beside the same with Docker alone.

- The peer is `pause` and `unpause` of Docker's API for a container of the same image, on the same runtime without the
  shim. It freezes processes and nothing else. Sallyport also writes two states and two records, and cuts all flows.
- A loop of the shell runs in both. One of them is paused while the other is measured.
"""

import time
from contextlib import suppress
from typing import Any

import docker
import httpx

from bench.create import PLAIN, add_plain_runsc
from bench.figures import Figure, Goal
from bench.fixture import BenchError, Fixture
from testbed.stack import IMAGE

LIMIT = 50.0
_BUSY = "while :; do :; done"
_REST_SECONDS = 0.2
_OPS = ("pause", "resume")


def measure(fixture: Fixture, rounds: int) -> list[Figure]:
    """Measure both runtimes, Sallyport and the peer in turn."""
    api = docker.APIClient(base_url=f"unix://{fixture.stack.run / 'docker.sock'}", version="auto")
    try:
        add_plain_runsc(fixture, api)
        return [figure for runtime in PLAIN for figure in _runtime(fixture, api, runtime, rounds)]
    finally:
        api.close()


def _runtime(fixture: Fixture, api: Any, runtime: str, rounds: int) -> list[Figure]:
    ours: dict[str, list[float]] = {op: [] for op in _OPS}
    peers: dict[str, list[float]] = {op: [] for op in _OPS}
    key = {"OPEN-SANDBOX-API-KEY": fixture.stack.api_key}
    host = api.create_host_config(network_mode="none", runtime=PLAIN[runtime], nano_cpus=1_000_000_000)
    container = api.create_container(image=IMAGE, command=["sh", "-c", _BUSY], host_config=host)["Id"]
    sandbox = fixture.create(runtime)
    name = str(sandbox.id)
    try:
        api.start(container)
        sandbox.commands.run(f"nohup sh -c '{_BUSY}' >/dev/null 2>&1 &")
        with httpx.Client(base_url=fixture.stack.base, headers=key, timeout=30, trust_env=False) as client:
            ways = (
                (ours, lambda: _change(client, name, "pause"), lambda: _change(client, name, "resume")),
                (peers, lambda: api.pause(container), lambda: api.unpause(container)),
            )
            ways[1][1]()
            for number in range(2 * rounds):  # each of them while the other is paused
                (samples, pause, resume), (_, _, resume_other) = ways[number % 2], ways[1 - number % 2]
                for op, work in (("pause", pause), ("resume", resume)):
                    time.sleep(_REST_SECONDS)
                    samples[op].append(_timed(work))
                pause()
                resume_other()
    finally:
        sandbox.kill()
        sandbox.close()
        with suppress(docker.errors.APIError):  # Docker can leave the shim of a container that is removed while paused
            api.unpause(container)
        api.remove_container(container, force=True)
    figures = []
    for op in _OPS:
        peer = f"{op} {runtime}: Docker alone"
        figures.append(Figure(f"{op} {runtime}", "ms", ours[op], peer, Goal("median", LIMIT)))
        figures.append(Figure(peer, "ms", peers[op]))
    return figures


def _change(client: httpx.Client, sandbox: str, op: str) -> None:
    answer = client.post(f"/v1/sandboxes/{sandbox}/{op}")
    if answer.status_code != httpx.codes.ACCEPTED:
        raise BenchError(f"{op}: {answer.status_code} {answer.text}")


def _timed(work: Any) -> float:
    began = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - began)
