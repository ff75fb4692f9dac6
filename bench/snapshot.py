"""The time of a snapshot of 100 MB together with its restore; on runc beside the same with Docker alone.

- The source has written 100 MB of random bytes. From the request for the snapshot until it is `Ready`, as the API says,
  and from the create call that names it until the result of a command that reads the size of the file.
- The peer is `commit` of Docker's API for a container that has written the same, and a container of the new image until
  its first output. On runsc there is none: `commit` does not have what gVisor keeps.
"""

import time
from collections.abc import Mapping
from typing import Any

import docker
import httpx

from bench.create import PLAIN, plain_container
from bench.figures import Figure, Goal
from bench.fixture import BenchError, Fixture

BYTES = 100_000_000
LIMIT = 1500.0
_FILE = "/srv/bench.bin"
_REST_SECONDS = 2.0
_POLL_SECONDS = 0.01
_READY_SECONDS = 120.0
_MOST_ROUNDS = 10


def measure(fixture: Fixture, rounds: int) -> list[Figure]:
    """Measure both runtimes, Sallyport and on runc the peer, in turn."""
    api = docker.APIClient(base_url=f"unix://{fixture.stack.run / 'docker.sock'}", version="auto")
    headers = {"OPEN-SANDBOX-API-KEY": fixture.stack.api_key}
    try:
        with httpx.Client(base_url=f"{fixture.stack.base}/v1", headers=headers, timeout=60, trust_env=False) as client:
            rounds = min(rounds, _MOST_ROUNDS)
            return [figure for runtime in PLAIN for figure in _runtime(fixture, api, client, runtime, rounds)]
    finally:
        api.close()


def _runtime(fixture: Fixture, api: Any, client: httpx.Client, runtime: str, rounds: int) -> list[Figure]:
    taken, restored, alone = [], [], []
    source = fixture.create(runtime)
    try:
        source.commands.run(f"head -c {BYTES} /dev/urandom >{_FILE}")
        for _ in range(rounds):
            time.sleep(_REST_SECONDS)
            took = _sallyport(fixture, client, str(source.id), runtime)
            taken.append(took[0])
            restored.append(took[1])
            if runtime == "runc":
                time.sleep(_REST_SECONDS)
                alone.append(_plain(fixture, api))
    finally:
        source.kill()
        source.close()
    both = [one + other for one, other in zip(taken, restored, strict=True)]
    name = f"snapshot of {BYTES // 1_000_000} MB and its restore"
    peer = f"{name} runc: Docker alone" if alone else None
    figures = [
        Figure(f"{name} {runtime}", "ms", both, peer, Goal("median", LIMIT)),
        Figure(f"{name} {runtime}: of it the snapshot", "ms", taken),
        Figure(f"{name} {runtime}: of it the restore", "ms", restored),
    ]
    return [*figures, Figure(peer, "ms", alone)] if peer else figures


def _sallyport(fixture: Fixture, client: httpx.Client, source: str, runtime: str) -> tuple[float, float]:
    """Return the milliseconds of a snapshot, and of a restore to the first result."""
    began = time.perf_counter()
    snapshot = _answer(client.post(f"/sandboxes/{source}/snapshots", json={}))["id"]
    try:
        while (state := _answer(client.get(f"/snapshots/{snapshot}"))["status"]["state"]) == "Creating":
            if time.perf_counter() - began > _READY_SECONDS:
                raise BenchError(f"a snapshot is not ready within {_READY_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)
        if state != "Ready":
            raise BenchError(f"a snapshot is {state}")
        taken = time.perf_counter()
        restored = fixture.restore(runtime, snapshot)
        try:
            printed = restored.commands.run(f"stat -c %s {_FILE}").text
            ended = time.perf_counter()
            if printed != str(BYTES):
                raise BenchError(f"the restored file has {printed} bytes")
        finally:
            restored.kill()
            restored.close()
    finally:
        client.delete(f"/snapshots/{snapshot}")
    return 1000 * (taken - began), 1000 * (ended - taken)


def _answer(answer: httpx.Response) -> Mapping[str, Any]:
    if answer.is_error:
        raise BenchError(f"{answer.request.method} {answer.request.url.path}: {answer.status_code} {answer.text}")
    document: Mapping[str, Any] = answer.json()
    return document


def _plain(fixture: Fixture, api: Any) -> float:
    """Return the milliseconds of `commit` and of a container of the new image."""
    docker_socket = str(fixture.stack.run / "docker.sock")
    source = plain_container(api, docker_socket, PLAIN["runc"])
    made = []
    try:
        api.exec_start(api.exec_create(source, ["sh", "-c", f"head -c {BYTES} /dev/urandom >{_FILE}"])["Id"])
        began = time.perf_counter()
        image = api.commit(source)["Id"]
        made.append(plain_container(api, docker_socket, PLAIN["runc"], image))
        return 1000 * (time.perf_counter() - began)
    finally:
        for container in (*made, source):
            api.remove_container(container, force=True)
        if made:
            api.remove_image(image)
