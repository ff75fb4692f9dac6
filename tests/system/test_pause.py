"""A paused sandbox uses no processor time and sends nothing, and goes on as before after its resume.

Judged at the far end by captured frames, and by the kernel's accounts of the container's group. It tests
`runtimes/pausing.py` and `runtimes/process/freezer.py`.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from opensandbox.exceptions import SandboxException
from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.execd_sync import ExecutionHandlersSync
from opensandbox.models.sandboxes import CredentialProxyConfig, NetworkPolicy, NetworkRule

from lifecycle.posture.capture import Capture, Frame
from runtimes.process.cgroups import Cgroups, Processor
from runtimes.process.freezer import Freeze, Freezer
from testbed.internet import ADDRESSES, API, SPLICED, STATUS, UP_ADDRESS, Internet, received_field
from testbed.stack import Stack
from tests.conftest import ON_RUNC, ON_RUNSC

pytestmark = [pytest.mark.system, pytest.mark.images]

SECONDS = 4.0
"""How long a sandbox is observed while it is paused: longer than a round of the watch."""
NOTED_SECONDS = 1.0
"""The time that a server can need to write down a request that it has received."""
_BUSY = f"""
import http.client, json, socket, ssl, sys, threading, time, urllib.request
context = ssl.create_default_context()
def spin():
    while True:
        pass
def ask():
    number = 0
    while True:
        number += 1
        try:
            with urllib.request.urlopen(f"https://{API}/v1/quiet/poll/{{sys.argv[1]}}/{{number}}", timeout=5) as answer:
                said = "ok" if answer.read() else "empty"
        except Exception as error:
            said = type(error).__name__
        print(time.time(), said, flush=True)
        time.sleep(0.02)
def look_up():
    while True:
        try:
            socket.getaddrinfo("{STATUS}", 443)
        except OSError:
            pass
        time.sleep(0.01)
def upload():
    while True:
        try:
            sock = socket.create_connection(("{ADDRESSES[SPLICED]}", 443), timeout=5)
            hello = ssl.MemoryBIO()
            try:
                context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="{SPLICED}").do_handshake()
            except ssl.SSLWantReadError:
                pass
            order = json.dumps({{"mark": "m" + sys.argv[1], "do": "exchange", "down": 0}}).encode()
            sock.sendall(hello.read() + order + bytes([10]))
            while True:
                sock.sendall(b"x" * 32768)
                time.sleep(0.02)  # few enough frames for the capture
        except Exception:
            time.sleep(0.05)
for work in (spin, ask, look_up, upload):
    threading.Thread(target=work).start()
"""
_FORKS = """
import mmap, os, subprocess, time
idle = [os.fork() for _ in range(4)]
if 0 in idle:
    while not os.path.exists("/tmp/enough"):
        time.sleep(0.2)
    for _ in range(200):
        mmap.mmap(-1, 65536).close()
    os._exit(0)
failed = turns = 0
while not os.path.exists("/tmp/enough"):
    failed += 0 != subprocess.run(["/bin/true"]).returncode
    mmap.mmap(-1, 65536).close()
    turns += 1
failed += sum(0 != os.waitpid(child, 0)[1] for child in idle)
print(turns, failed, flush=True)
"""
"""Begins processes and maps memory all the time, beside processes that rest until the end. Counts what failed."""
_TURNS = 40


def until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Return whether `condition` became true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@dataclass(frozen=True, slots=True)
class Api:
    """The lifecycle API, without a client's caches and checks."""

    stack: Stack

    def call(self, method: str, path: str, content: Any = None, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.request(
            method,
            f"{self.stack.base}/v1/sandboxes/{path}",
            json=content,
            headers={"OPEN-SANDBOX-API-KEY": self.stack.api_key, **named},
            timeout=60,
            trust_env=False,
        )

    def change(self, name: str, op: str) -> tuple[int, str]:
        """Pause or resume a sandbox; return the status and the state that the next read shows."""
        answer = self.call("POST", f"{name}/{op}")
        assert answer.status_code != 202 or b"" == answer.content
        return answer.status_code, self.state(name)

    def state(self, name: str) -> str:
        return str(self.call("GET", name).json()["status"]["state"])

    def ping(self, name: str) -> httpx.Response:
        """Call execd in a sandbox, as each SDK does before its first command."""
        place = self.call("GET", f"{name}/endpoints/44772").json()
        return httpx.get(f"http://{place['endpoint']}/ping", headers=place["headers"], timeout=20, trust_env=False)


@pytest.fixture(name="api")
def _api(stack: Stack) -> Api:
    return Api(stack)


@contextmanager
def sandbox(stack: Stack, runtime: str, **options: Any) -> Iterator[Any]:
    made = stack.create(runtime, **options)
    try:
        yield made
    finally:
        with suppress(SandboxException):  # a test can have removed it
            made.kill()
        made.close()


@contextmanager
def busy(stack: Stack, runtime: str) -> Iterator[Any]:
    """A sandbox that computes, sends requests, looks names up and uploads, all the time."""
    with sandbox(stack, runtime, policy="splicing") as made:
        made.files.write_file("/tmp/busy.py", _BUSY)
        command = f"python3 /tmp/busy.py {made.id} >/tmp/said 2>/tmp/error"
        made.commands.run(command, opts=RunCommandOpts(background=True))
        assert until(lambda: len(polls(stack.internet, made.id)) > 3), made.commands.run("tail /tmp/said /tmp/error")
        yield made


def polls(internet: Internet, name: str) -> list[dict[str, Any]]:
    """Return the sandbox's requests that the API has received."""
    return [note for note in internet.notes() if f"/v1/quiet/poll/{name}/" in str(note.get("target"))]


def carries(frame: Frame) -> bool:
    """Return whether a frame of the workers asks for a connection or a name, or has bytes of a stream."""
    if frame.source != UP_ADDRESS:
        return False
    if frame.protocol == 17:
        return True
    header = 14 + (frame.data[14] & 15) * 4
    total = int.from_bytes(frame.data[16:18], "big")
    offset = (frame.data[header + 12] >> 4) * 4
    flags = frame.data[header + 13]
    return bool(flags & 2) or total - (header - 14) - offset > 0


@dataclass(frozen=True, slots=True)
class Use:
    """The processor time that a container's group, and each process in it, has used."""

    group: float
    processes: dict[int, tuple[str, str]]


def used(container: str) -> Use:
    freezer = Freezer()
    processes = {}
    for pid in freezer._processes(container):
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            processes[pid] = (fields[11], fields[12])
    return Use(Processor(Cgroups("/run/none")).seconds(container), processes)


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_a_paused_sandbox_neither_computes_nor_sends(api: Api, runtime: str, stack: Stack) -> None:
    """It computes, asks, resolves and uploads until then. After the answer not one byte leaves."""
    internet = stack.internet
    with busy(stack, runtime) as made:
        name, container = str(made.id), stack.container(made.id)
        before, policy = used(container), stack.inspect(name).policy
        with Capture(internet.path(internet.net), "net0", carries) as capture:
            time.sleep(SECONDS)
            running, sent = used(container), capture.since(0)
        assert running.group - before.group > SECONDS / 20
        assert {ADDRESSES[API], ADDRESSES[SPLICED]} <= {frame.destination for frame in sent}

        began = time.monotonic()
        assert (202, "Paused") == api.change(name, "pause")
        took = time.monotonic() - began
        with Capture(internet.path(internet.net), "net0", carries) as capture:
            first = used(container)
            time.sleep(NOTED_SECONDS)
            asked = len(polls(internet, name))
            time.sleep(SECONDS)
            assert [] == capture.since(0)
            assert 0 == capture.missed()
        assert asked == len(polls(internet, name))
        assert first == used(container)
        assert first.processes
        assert Freeze.FROZEN is Freezer().state(container)
        paused = stack.inspect(name)
        assert ("paused", policy) == (paused.state, paused.policy)
        assert (409, "DOCKER::SANDBOX_NOT_RUNNING") == _coded(api.ping(name))

        began = time.monotonic()
        assert (202, "Running") == api.change(name, "resume")
        print(f"{runtime}: pause {took * 1000:.0f} ms, resume {(time.monotonic() - began) * 1000:.0f} ms")
        assert 200 == api.ping(name).status_code
        assert until(lambda: len(polls(internet, name)) > asked + 3)
        assert "done" == made.commands.run("echo done").logs.stdout[0].text.strip()
        assert (policy, container) == (stack.inspect(name).policy, stack.container(name))


def _coded(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, json.loads(answer.content)["code"]


_ASK = f"""
import sys, time, urllib.request
for number in range(100000):
    for host in ("{API}", "{STATUS}"):
        try:
            urllib.request.urlopen(f"https://{{host}}/vaulted/{{sys.argv[1]}}/{{number}}", timeout=5).read()
        except OSError:
            pass
    time.sleep(0.02)
"""


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_what_is_changed_during_a_pause_binds_the_first_request(api: Api, runtime: str, stack: Stack) -> None:
    """A host that is taken away gets no request after the resume, and a revoked credential is in none."""
    internet, value = stack.internet, f"paused-{secrets.token_hex(16)}"
    both = [NetworkRule(action="allow", target=host) for host in (API, STATUS)]
    options: dict[str, Any] = {"network_policy": NetworkPolicy(defaultAction="deny", egress=both)}
    with sandbox(stack, runtime, policy=None, credential_proxy=CredentialProxyConfig(enabled=True), **options) as made:
        auth = {"type": "bearer", "credential": "token"}
        made.credential_vault.create(
            credentials=[{"name": "token", "source": {"type": "inline", "value": value}}],
            bindings=[{"name": "b", "match": {"hosts": [API], "paths": ["/vaulted/*"]}, "auth": auth}],
        )
        made.files.write_file("/tmp/ask.py", _ASK)
        made.commands.run(f"python3 /tmp/ask.py {made.id}", opts=RunCommandOpts(background=True))
        assert until(lambda: {API, STATUS} <= set(asked(internet, made.id)))
        assert {f"Bearer {value}", None} == {
            received_field(note, "authorization") for note in vaulted(internet, made.id)
        }

        assert (202, "Paused") == api.change(made.id, "pause")
        mine = {"defaultAction": "deny", "egress": [{"action": "allow", "target": API}]}
        made.credential_vault.delete()
        assert 200 == api.call("PUT", f"{made.id}/networkpolicy", mine).status_code
        time.sleep(NOTED_SECONDS)
        before = len(asked(internet, made.id))
        assert (202, "Running") == api.change(made.id, "resume")

        assert until(lambda: len(asked(internet, made.id)) > before + 5)
        assert {API} == set(asked(internet, made.id)[before:])
        assert {None} == {received_field(note, "authorization") for note in vaulted(internet, made.id)[before:]}


def vaulted(internet: Internet, name: str) -> list[dict[str, Any]]:
    """Return the sandbox's requests that servers have received."""
    return [note for note in internet.notes() if f"/vaulted/{name}/" in str(note.get("target"))]


def asked(internet: Internet, name: str) -> list[str]:
    """Return the hosts that have received these requests."""
    return [str(received_field(note, "host")) for note in vaulted(internet, name)]


@pytest.mark.parametrize("end", ["delete", "expiry"])
@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_paused_sandbox_ends_without_a_trace(end: str, api: Api, runtime: str, stack: Stack) -> None:
    """Its processes are killed while they are frozen, so no request is sent once more."""
    internet = stack.internet
    with busy(stack, runtime) as made:
        traces = stack.traces(made.id)
        assert (202, "Paused") == api.change(made.id, "pause")
        time.sleep(NOTED_SECONDS)
        sent = len(polls(internet, made.id))
        if end == "delete":
            assert 204 == api.call("DELETE", made.id).status_code
        else:
            soon = (datetime.now(UTC) + timedelta(seconds=2)).isoformat()
            assert 200 == api.call("POST", f"{made.id}/renew-expiration", {"expiresAt": soon}).status_code
            assert until(lambda: api.call("GET", made.id).status_code == 404)
        assert until(lambda: [] == traces.remaining()), traces.remaining()
        assert sent == len(polls(internet, made.id))


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_a_command_that_runs_rests(api: Api, runtime: str, stack: Stack) -> None:
    """Its stream was open before the pause, and continues after it."""
    with sandbox(stack, runtime) as made:
        name = str(made.id)
        with ThreadPoolExecutor(1) as pool:
            text = "for n in $(seq 40); do echo $n; sleep 0.05; done; echo done"
            heard: list[float] = []
            handlers = ExecutionHandlersSync(on_stdout=lambda _message: heard.append(time.monotonic()))
            running = pool.submit(made.commands.run, text, handlers=handlers)
            assert until(lambda: len(heard) > 3)
            assert (202, "Paused") == api.change(name, "pause")
            paused = time.monotonic()
            time.sleep(NOTED_SECONDS)
            count = len(heard)
            time.sleep(SECONDS)
            assert count == len(heard)
            assert (202, "Running") == api.change(name, "resume")
            said = [message.text.strip() for message in running.result(60).logs.stdout]
        assert [*map(str, range(1, 41)), "done"] == said
        assert heard[-1] > paused + SECONDS


@pytest.mark.extended
def test_processes_survive_many_pauses(api: Api, runtime: str, stack: Stack) -> None:
    """A pause interrupts each system call, also those by which gVisor reaches its stub processes."""
    with sandbox(stack, runtime) as made:
        name = str(made.id)
        made.files.write_file("/tmp/forks.py", _FORKS)
        made.commands.run("python3 /tmp/forks.py >/tmp/said 2>&1", opts=RunCommandOpts(background=True))
        for turn in range(_TURNS):
            assert 202 == api.call("POST", f"{name}/pause").status_code
            time.sleep(0.05 * (turn % 3))
            assert 202 == api.call("POST", f"{name}/resume").status_code
            time.sleep(0.05 * (turn % 5))
        made.commands.run("touch /tmp/enough")
        words: list[str] = []

        def ended() -> bool:
            words[:] = "".join(line.text for line in made.commands.run("cat /tmp/said").logs.stdout).split()
            return len(words) == 2

        assert until(ended), words
        assert int(words[0]) > _TURNS
        assert "0" == words[1]


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_a_pause_by_dockers_own_command_is_a_pause(api: Api, runtime: str, stack: Stack) -> None:
    """Another program pauses the container with Docker. The sandbox is paused completely, and can be resumed."""
    with busy(stack, runtime) as made:
        name, container = str(made.id), stack.container(made.id)
        assert 0 == stack.docker("pause", container).returncode
        assert until(lambda: api.state(name) == "Paused")
        assert until(lambda: Freezer().state(container) is Freeze.FROZEN)
        assert until(lambda: _has(stack, name, "gateway.pause"))
        assert 409 == api.ping(name).status_code
        sent = len(polls(stack.internet, name))
        assert (202, "Running") == api.change(name, "resume")
        assert "running" == stack.docker("inspect", "-f", "{{.State.Status}}", container).stdout.strip()
        assert until(lambda: len(polls(stack.internet, name)) > sent)
        # And the reverse: a pause of the API ends if another program thaws the processes.
        assert (202, "Paused") == api.change(name, "pause")
        Freezer().thaw(container)
        assert until(lambda: api.state(name) == "Running")
        sent = len(polls(stack.internet, name))
        assert until(lambda: len(polls(stack.internet, name)) > sent)


def _has(stack: Stack, name: str, kind: str) -> bool:
    return any(item["kind"] == kind and item.get("sandbox") == name for item in stack.audit_records())


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_the_log_shows_what_left_before_and_after_a_pause(api: Api, runtime: str, stack: Stack) -> None:
    """Between the worker's records of a pause and of the resume no record allows anything."""
    with busy(stack, runtime) as made:
        name = str(made.id)
        for op in ("pause", "resume"):
            assert 202 == api.change(name, op)[0]
            time.sleep(0.5)
        records = [item for item in stack.audit_records() if item.get("sandbox") == name]
    kinds = [item["kind"] for item in records]
    order = ["lifecycle.pause", "gateway.pause", "lifecycle.resume", "gateway.resume"]
    assert order == [kind for kind in kinds if kind in order]
    meanwhile = records[kinds.index("gateway.pause") : kinds.index("gateway.resume")]
    assert [] == [item for item in meanwhile if item["decision"] == "allow"]
    assert meanwhile[0]["count"] > 0
