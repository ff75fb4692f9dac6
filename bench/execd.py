"""execd through the SDK and the complete path to it: commands, files, transfers; its start; its memory.

- Small calls are compared with the parts of them that are not Sallyport's: the SDK's own share (its call against
  canned answers), and for a command also bash's time, when another program of the same sandbox starts it.
- Transfers are compared with `docker cp` of the same bytes to and from a plain container.
- The start is that of the runtime alone: from the call of its `start` on a created container, whose root has only
  execd, to the first answer on the host's loopback.
- Memory is the difference between the control groups of a new sandbox and of a container that sleeps.
"""

import contextlib
import http.client
import json
import os
import secrets
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docker

from bench.canned import canned
from bench.create import PLAIN, add_plain_runsc
from bench.figures import Figure, Goal
from bench.fixture import BenchError, Fixture
from runtimes.engine.docker import CAPABILITIES
from runtimes.engine.profile import RUNSC
from testbed.stack import IMAGE

ECHO = {"runc": 6.0, "runsc": 15.0}
START = {"runc": 60.0, "runsc": 150.0}
SMALL_FILE = 1.5
IDLE_MIB = 12.0
OF_DOCKER_CP = 0.6
OPERATIONS, TRANSFERS, TRANSFER_BYTES = 300, 3, 100_000_000
SETTLE_SECONDS = 2.0
_CANNED = "the SDK against canned answers"
_BASH = """
import json, subprocess, time
samples = []
for _ in range({rounds}):
    began = time.perf_counter()
    subprocess.run(["bash", "-c", "echo x"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    samples.append(1000 * (time.perf_counter() - began))
print(json.dumps(samples))
"""
_PORT = 24790
"""Below the ephemeral range, in which a client could connect to itself."""


def measure(fixture: Fixture, rounds: int) -> list[Figure]:
    """Measure both runtimes."""
    api = docker.APIClient(base_url=f"unix://{fixture.stack.run / 'docker.sock'}", version="auto")
    try:
        add_plain_runsc(fixture, api)
    finally:
        api.close()
    with tempfile.TemporaryDirectory(prefix="sallyport-bench-execd-") as name:
        content = Path(name) / "content"
        content.write_bytes(secrets.token_bytes(TRANSFER_BYTES))
        up, down = _docker_cp(fixture, content)
        figures = [Figure("execd: docker cp up", "ms", up), Figure("execd: docker cp down", "ms", down)]
        for runtime in PLAIN:
            figures += _runtime(fixture, runtime, rounds, content.read_bytes(), (up, down))
            figures += _not_ours(fixture, runtime, rounds)
            starts = [_start(runtime, Path(name)) for _ in range(rounds)]
            figures.append(
                Figure(f"execd {runtime}: start to /ping", "ms", starts, None, Goal("median", START[runtime]))
            )
    return figures


def _runtime(
    fixture: Fixture, runtime: str, rounds: int, content: bytes, cp: tuple[list[float], list[float]]
) -> list[Figure]:
    with _sleeping(fixture, PLAIN[runtime]) as plain:
        sandbox = fixture.create(runtime)
        try:
            time.sleep(SETTLE_SECONDS)
            container = fixture.stack.container(str(sandbox.id))
            idle = (_memory(container) - _memory(plain)) / (1 << 20)
            sandbox.commands.run("echo warm")
            echo = _echoes(sandbox, rounds)
            small = _small_files(sandbox)
            up = [_timed(lambda: sandbox.files.write_file("/tmp/big", content)) for _ in range(TRANSFERS)]  # noqa: S108
            down = [_timed(lambda: sandbox.files.read_bytes("/tmp/big")) for _ in range(TRANSFERS)]  # noqa: S108
        finally:
            sandbox.kill()
            sandbox.close()
    name = f"execd {runtime}"
    limits = [statistics.median(values) / OF_DOCKER_CP for values in cp]
    return [
        Figure(f"{name}: echo", "ms", echo, f"{name}: bash alone", Goal("median", ECHO[runtime])),
        Figure(
            f"{name}: small file",
            "ms",
            small,
            f"{name}: small file: {_CANNED}",
            Goal("median", SMALL_FILE) if runtime == "runc" else None,
        ),
        Figure(f"{name}: 100 MB up", "ms", up, "execd: docker cp up", Goal("median", limits[0])),
        Figure(f"{name}: 100 MB down", "ms", down, "execd: docker cp down", Goal("median", limits[1])),
        Figure(f"{name}: memory when idle", "MiB", [idle], None, Goal("median", IDLE_MIB)),
    ]


def _not_ours(fixture: Fixture, runtime: str, rounds: int) -> list[Figure]:
    """Return the figures of the parts of small calls that are not Sallyport's."""
    sandbox = fixture.create(runtime)
    try:
        printed = sandbox.commands.run(f"python3 -c '{_BASH.format(rounds=rounds)}'").logs.stdout
        bash = json.loads("".join(message.text for message in printed))
        stack = fixture.stack
        with canned(stack.api_key, stack.port, str(sandbox.id), lambda it: (_echoes(it, 1), _small_files(it))) as alone:
            echo, small = _echoes(alone, rounds), _small_files(alone)
    finally:
        sandbox.kill()
        sandbox.close()
    name = f"execd {runtime}"
    return [
        Figure(f"{name}: bash alone", "ms", bash),
        Figure(f"{name}: echo: {_CANNED}", "ms", echo),
        Figure(f"{name}: small file: {_CANNED}", "ms", small),
    ]


def _echoes(sandbox: Any, rounds: int) -> list[float]:
    """Return the milliseconds of each of `rounds` commands."""
    return [_timed(lambda: sandbox.commands.run("echo x")) for _ in range(rounds)]


def _small_files(sandbox: Any) -> list[float]:
    """Return the milliseconds of each of many writes and reads, in turn."""
    samples = []
    for index in range(OPERATIONS // 2):
        path = f"/tmp/small-{index}"  # noqa: S108
        samples.append(_timed(lambda path=path: sandbox.files.write_file(path, "x" * 100)))  # type: ignore[misc]
        samples.append(_timed(lambda path=path: sandbox.files.read_file(path)))  # type: ignore[misc]
    return samples


def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - began)


def _docker_cp(fixture: Fixture, content: Path) -> tuple[list[float], list[float]]:
    def copy(*names: str) -> None:
        if (done := fixture.stack.docker("cp", *names)).returncode != 0:
            raise BenchError(f"docker cp: {done.stderr.strip()}")

    with _sleeping(fixture, "runc") as container:
        up = [_timed(lambda: copy(str(content), f"{container}:/tmp/big")) for _ in range(TRANSFERS)]
        down = [_timed(lambda: copy(f"{container}:/tmp/big", f"{content}.back")) for _ in range(TRANSFERS)]
    return up, down


@contextmanager
def _sleeping(fixture: Fixture, runtime: str) -> Iterator[str]:
    """Yield the id of a Docker container that sleeps."""
    options = ("--network", "none", "--runtime", runtime, "--memory", "2g", "--pids-limit", "1024")
    made = fixture.stack.docker("run", "-d", *options, IMAGE, "sleep", "infinity")
    if made.returncode != 0:
        raise BenchError(f"docker run: {made.stderr.strip()}")
    container = made.stdout.strip()
    try:
        yield container
    finally:
        fixture.stack.docker("rm", "-f", container)


def _memory(container: str) -> int:
    """Return the memory that the container's control group counts, in bytes."""
    for name in ("memory.usage_in_bytes", "memory.current"):
        for path in Path("/sys/fs/cgroup").glob(f"**/*{container}*/{name}"):
            return int(path.read_text())
    raise BenchError("no memory control group of a container")


def _start(runtime: str, directory: Path) -> float:
    """Return the milliseconds from the runtime's `start` to an answer."""
    bundle = Path(tempfile.mkdtemp(dir=directory))
    (bundle / "rootfs").mkdir()
    shutil.copy(os.environ["SALLYPORT_EXECD"], bundle / "rootfs" / "execd")
    (bundle / "config.json").write_text(json.dumps(_bundle(str(bundle / "rootfs"))))
    program, flags = "runc", [f"--root={bundle / 'state'}"]
    if runtime == "runsc":
        program = os.environ["SALLYPORT_RUNSC"]
        flags += [flag for flag in RUNSC.flags if not flag.startswith("--network")]
        flags += ["--network=host", "--ignore-cgroups"]
    name = f"bench-{secrets.token_hex(4)}"

    def run(*words: str) -> None:
        silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        done = subprocess.run([program, *flags, *words], check=False, **silent)  # type: ignore[call-overload]
        if done.returncode != 0:
            raise BenchError(f"{runtime} {words[0]} failed")

    run("create", f"--bundle={bundle}", name)
    try:
        began = time.perf_counter()
        with subprocess.Popen([program, *flags, "start", name], stdin=subprocess.DEVNULL):
            _await_ping(began)
            return 1000 * (time.perf_counter() - began)
    finally:
        run("delete", "--force", name)
        # runsc keeps an empty network namespace mounted in its state.
        subprocess.run(["umount", "-l", str(bundle / "state" / "null-netns")], check=False, stderr=subprocess.DEVNULL)


def _await_ping(began: float) -> None:
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", _PORT, timeout=1)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("GET", "/ping")
            if connection.getresponse().status == http.HTTPStatus.OK:
                return
        if time.perf_counter() - began > 10:
            raise BenchError("execd does not answer")
        time.sleep(0.0005)


def _bundle(root: str) -> dict[str, Any]:
    capabilities = [f"CAP_{name}" for name in CAPABILITIES]
    arguments = [
        "/execd",
        "--port",
        str(_PORT),
        "--access-token-sha256",
        "0" * 64,
        "--init",
        "--",
        "tail",
        "-f",
        "/dev/null",
    ]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": arguments,
            "env": ["PATH=/"],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
        },
        "root": {"path": root},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]},
    }
