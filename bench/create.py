"""The time from a create call to the first command's result, through the SDK; beside the same with Docker alone.

- The peer is the minimum that Docker does for the same: a container of the same image and limits on the same runtime
  without the shim, created and started through Docker's API, until the first output of its command is read.
- `ours` is the difference of each pair of neighbouring rounds. The processor time of the calling process itself is
  subtracted from both, because the SDK's clients belong neither to Docker nor to Sallyport. The difference is small
  also because the shim removes a hook of Docker's. The parts show where the time is spent in any case.
- A sandbox from a pool is claimed with the same policy and secret. The pool makes its next member after it.
- Every sandbox is new, and has a policy and a bound secret. hostd makes an empty slot ahead of need; it does this in
  the pauses between two measurements, so neither of them counts it.
"""

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import docker
import httpx

from bench.figures import Figure, Goal
from bench.fixture import BenchError, Fixture, wait_until
from runtimes.engine import seccomp
from runtimes.engine.profile import RUNSC
from testbed.stack import IMAGE, Stack

PLAIN = {"runc": "runc", "runsc": "plain-runsc"}
WHOLE = {"runc": 400.0, "runsc": 600.0}
OURS = 80.0
POOL = 60.0
_LAUNCHED = re.compile(r"launched (\S+) on \S+: (\{.*\})")
_REST_SECONDS = 1.5
_PARTS = ("slot", "gateway", "create", "start", "launch")


def measure(fixture: Fixture, rounds: int) -> list[Figure]:
    """Measure both runtimes, Sallyport and the peer in turn."""
    api = docker.APIClient(base_url=f"unix://{fixture.stack.run / 'docker.sock'}", version="auto")
    try:
        add_plain_runsc(fixture, api)
        figures: list[Figure] = []
        for runtime in PLAIN:
            figures += _runtime(fixture, api, runtime, rounds)
            figures.append(_from_a_pool(fixture, runtime, rounds))
        return figures
    finally:
        api.close()


def _runtime(fixture: Fixture, api: Any, runtime: str, rounds: int) -> list[Figure]:
    docker_socket = str(fixture.stack.run / "docker.sock")
    _plain(api, docker_socket, PLAIN[runtime])  # the first call reads files that are in memory for the later ones
    _sallyport(fixture, runtime)
    plain, whole, ready, command, names, ours, callers = [], [], [], [], [], [], []
    for _ in range(rounds):
        time.sleep(_REST_SECONDS)
        alone, its_caller = _plain(api, docker_socket, PLAIN[runtime])
        plain.append(alone)
        time.sleep(_REST_SECONDS)
        name, to_ready, to_result, caller = _sallyport(fixture, runtime)
        names.append(name)
        callers.append(caller)
        ours.append((to_result - caller) - (alone - its_caller))
        ready.append(to_ready)
        command.append(to_result - to_ready)
        whole.append(to_result)
    timings = launched(fixture.stack)
    parts = {part: [timings[name][f"{part}_ms"] for name in names] for part in _PARTS}
    peer = f"create {runtime}: Docker alone"
    outside = [one - launch for one, launch in zip(ready, parts["launch"], strict=True)]
    return [
        Figure(f"create {runtime}: to the first result", "ms", whole, peer, Goal("median", WHOLE[runtime])),
        Figure(peer, "ms", plain),
        Figure(f"create {runtime}: ours", "ms", ours, None, Goal("median", OURS)),
        Figure(f"create {runtime}: of it slot", "ms", parts["slot"]),
        Figure(f"create {runtime}: of it gateway", "ms", parts["gateway"]),
        Figure(f"create {runtime}: meanwhile docker create", "ms", parts["create"]),
        Figure(f"create {runtime}: of it docker start", "ms", parts["start"]),
        Figure(f"create {runtime}: of it API, SDK, execd ready", "ms", outside),
        Figure(f"create {runtime}: of it the command", "ms", command),
        Figure(f"create {runtime}: of it the SDK's own processor time", "ms", callers),
    ]


def _from_a_pool(fixture: Fixture, runtime: str, rounds: int) -> Figure:
    """Measure sandboxes of a pool with one idle member, on the way of `_sallyport`."""
    headers = {"OPEN-SANDBOX-API-KEY": fixture.stack.api_key}
    container = {"image": IMAGE, "resources": {"limits": {"cpu": "1", "memory": "2Gi"}}}
    body = {
        "name": "bench",
        "template": {"spec": {"containers": [container], "runtimeClassName": runtime}},
        "capacitySpec": {"bufferMin": 1, "bufferMax": 1, "poolMin": 0, "poolMax": 2},
    }
    whole = []
    with httpx.Client(base_url=f"{fixture.stack.base}/v1", headers=headers, timeout=60, trust_env=False) as client:
        client.post("/pools", json=body).raise_for_status()
        for _ in range(rounds):
            wait_until(lambda: client.get("/pools/bench").json()["status"]["available"] == 1, "a member is idle")
            time.sleep(_REST_SECONDS)
            _, _, to_result, _ = _sallyport(fixture, runtime, {"poolRef": "bench"})
            whole.append(to_result)
        client.delete("/pools/bench").raise_for_status()
    return Figure(
        f"create {runtime}: from a pool", "ms", whole, f"create {runtime}: Docker alone", Goal("median", POOL)
    )


def launched(stack: Stack) -> dict[str, dict[str, float]]:
    """Return the parts of the launch of each sandbox in milliseconds, as hostd timed them, from its log."""
    return {name: json.loads(parts) for name, parts in _LAUNCHED.findall(stack.log.read_text())}


def _sallyport(
    fixture: Fixture, runtime: str, extensions: Mapping[str, str] | None = None
) -> tuple[str, float, float, float]:
    """Measure one sandbox, with `extensions` beside policy and runtime.

    Returns:
        Its id, and milliseconds until the SDK reports it as ready, until a command's result, and of this process's
        cpu.
    """
    began, spent = time.perf_counter(), time.process_time()
    sandbox = fixture.create(runtime, extensions)
    ready = time.perf_counter()
    try:
        sandbox.commands.run("true")
        result, spent = time.perf_counter(), time.process_time() - spent
    finally:
        sandbox.kill()
        sandbox.close()
    return str(sandbox.id), 1000 * (ready - began), 1000 * (result - began), 1000 * spent


def _plain(api: Any, docker_socket: str, runtime: str) -> tuple[float, float]:
    """Return the milliseconds until a container of Docker has printed something, and those of this process's cpu."""
    began, spent = time.perf_counter(), time.process_time()
    container = plain_container(api, docker_socket, runtime)
    took = 1000 * (time.perf_counter() - began), 1000 * (time.process_time() - spent)
    api.remove_container(container, force=True)
    return took


def plain_container(api: Any, docker_socket: str, runtime: str, image: str = IMAGE) -> str:
    """Start a container of Docker alone. Return its id when it has printed something."""
    host = host_config(api, runtime)
    command = ["sh", "-c", "echo ready; exec tail -f /dev/null"]
    container = str(api.create_container(image=image, command=command, host_config=host)["Id"])
    try:
        with _attached(docker_socket, container) as output:
            api.start(container)
            output.recv(1)
    except BaseException:
        api.remove_container(container, force=True)
        raise
    return container


def host_config(api: Any, runtime: str) -> Any:
    """Return the limits of a sandbox for a container of Docker alone."""
    return api.create_host_config(
        network_mode="none",
        cap_drop=["ALL"],
        security_opt=["no-new-privileges:true", f"seccomp={seccomp.profile_json()}"],
        pids_limit=1024,
        mem_limit=2 << 30,
        memswap_limit=2 << 30,
        nano_cpus=1_000_000_000,
        log_config={"Type": "json-file", "Config": {}},
        ipc_mode="private",
        cgroupns="private",
        runtime=runtime,
    )


@contextmanager
def _attached(docker_socket: str, container: str) -> Iterator[socket.socket]:
    """Yield a connection that receives the container's output (docker-py does not close its own)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(30)
        sock.connect(docker_socket)
        path = f"/containers/{container}/attach?stream=1&stdout=1"
        sock.sendall(f"POST {path} HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n".encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += sock.recv(1) or b"\r\n\r\n"
        if b" 101 " not in head.partition(b"\r\n")[0]:
            raise BenchError("Docker does not attach")
        yield sock


def add_plain_runsc(fixture: Fixture, api: Any) -> None:
    """Add runsc without the shim to the runtimes of the benchmark's own dockerd."""
    path = fixture.stack.run / "config" / "daemon.json"
    known = json.loads(path.read_text())
    known["runtimes"][PLAIN["runsc"]] = {"path": os.environ["SALLYPORT_RUNSC"], "runtimeArgs": list(RUNSC.flags)}
    path.write_text(json.dumps(known))
    os.kill(int((fixture.stack.run / "docker.pid").read_text()), signal.SIGHUP)
    wait_until(lambda: PLAIN["runsc"] in api.info()["Runtimes"], "dockerd learns of another runtime")
