"""A fault at each step of a launch, a removal, a restart and a change, on the real system: nothing half-made is left.

The steps of hostd come from `faulty_hostd`, those of the control plane from `faulty_serve`. Both are the real programs
with wrapped calls. tests/lifecycle/test_faults_at_each_step.py has all cases of the control plane, and is faster.
"""

import asyncio
import json
import os
import secrets
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

import wire
from runtimes.process.freezer import Freeze, Freezer
from testbed.census import Census, command_lines, take
from testbed.stack import EMPTY_IMAGE, Stack, StackError
from tests.conftest import ON_RUNSC, representatives
from tests.image_files import ImageFile, entry, tar
from tests.stacks import DISK, beside
from wire.api import hostd

pytestmark = [pytest.mark.system, pytest.mark.faults]

ROOT = Path(__file__).resolve().parents[2]
IDLE = ["tail", "-f", "/dev/null"]
OLD = {"defaultAction": "deny", "egress": [{"action": "allow", "target": "api.bank.example"}]}
RULE = {"action": "allow", "target": "status.bank.example"}
PARALLEL = 4
KILLS = 4
RESTARTS = 4
PATIENCE = 120.0
_KEEPER = """
import pathlib, sys
from runtimes.process import watchdog
watchdog._BACKOFF = (0.0,)  # as in faulty_hostd
command = [sys.executable, "-m", "tests.system.faulty_hostd", sys.argv[1]]
sys.exit(watchdog.Watchdog(command, watchdog.ending(pathlib.Path(sys.argv[1]))).run())
"""


class Faulty(Stack):
    """A separate Sallyport whose hostd and serve have faults where a test asks for them."""

    slots_ahead = 0

    @property
    def images(self) -> dict[str, str]:
        return {EMPTY_IMAGE: os.environ["SALLYPORT_EMPTY_IMAGE"]}

    def __enter__(self) -> "Faulty":
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o711)
        self.config.write_text(self.settings)
        command = [sys.executable, "-m", "lifecycle.cli", "--config", str(self.config), "serve", "--write-only"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert 0 == done.returncode, done.stderr
        host = self.run / "launch" / "host.json"
        document = json.loads(host.read_text())
        for process in document["processes"]:
            if process["name"] == "serve":
                process["module"] = "tests.system.faulty_serve"
        host.write_text(json.dumps(document))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _KEEPER, str(host)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def rows(self) -> dict[str, dict[str, Any]]:
        path = self.state / "lifecycle" / "sallyport.db"
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            database.row_factory = sqlite3.Row
            return {row["id"]: dict(row) for row in database.execute("SELECT * FROM sandboxes")}

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        headers = {"OPEN-SANDBOX-API-KEY": self.api_key}
        async with httpx.AsyncClient(base_url=f"{self.base}/v1", headers=headers, timeout=120, trust_env=False) as http:
            yield http

    def hook(self, op: str, **parameters: Any) -> dict[str, Any]:
        """Send a request that only `faulty_hostd` answers.

        Raises:
            StackError: it refused.
            OSError: it does not answer.
        """
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as sock:
            sock.settimeout(60)
            sock.connect(str(self.run / "hostd.sock"))
            wire.send(sock, {"id": 1, "op": op, **parameters})
            received = wire.receive(sock)
        if received is None or "ok" not in received[0]:
            raise StackError(f"hostd refused {op}: {received}")
        return dict(received[0]["ok"])

    def disagreements(self, only: str | None = None) -> list[str]:
        """Return the differences between the registry, hostd and the workers themselves.

        `only` names the sandbox to compare. Without it nothing else may make or remove sandboxes meanwhile.
        """
        rows = {name: row for name, row in self.rows().items() if only in (None, name)}
        there = {item.sandbox: item for item in self.sandboxes() if only in (None, item.sandbox)}
        paused = {name for name, item in there.items() if item.state == "paused"}
        states = {name: "Paused" if name in paused else "Running" for name in rows}
        found = [f"{name} is {row['state']}" for name, row in rows.items() if row["state"] != states[name]]
        found += [f"{name} is frozen or not" for name in there if self.frozen(name) is not (name in paused)]
        found += [f"hostd and registry differ in {name}" for name in rows.keys() ^ there.keys()]
        for name in rows.keys() & there.keys():
            digest = self.hook("digest", sandbox=name)["digest"]
            if not digest or (digest != rows[name]["policy_digest"] and not rows[name]["idle"]):
                found.append(f"{name}: registry {rows[name]['policy_digest'][:8]!r}, worker {digest and digest[:8]!r}")
        return found

    def frozen(self, name: str) -> bool:
        """Return whether the kernel has frozen a sandbox."""
        return Freezer().state(self.container(name)) is Freeze.FROZEN

    def wrong(self, before: Census | None = None) -> list[str]:
        """Return the differences from `before` (if given) and between the parts: none, or those that are left when the
        time is over.
        """
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                found = [*self.disagreements(), *(f"{kind}: {what}" for kind, what in self._beyond(before).items())]
            except (OSError, httpx.HTTPError, sqlite3.Error, StackError) as error:
                found = [f"not to be asked: {error}"]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.2)

    def _beyond(self, before: Census | None) -> dict[str, object]:
        return {} if before is None else take(self).beyond(before)

    def state_of(self, sandbox: str) -> tuple[str, str]:
        """Return state and reason, after it has ended or the time is over."""
        deadline = time.monotonic() + PATIENCE
        while True:
            row = self.rows()[sandbox]
            if row["state"] in ("Failed", "Terminated") or time.monotonic() > deadline:
                return row["state"], row["reason"]
            time.sleep(0.1)

    @property
    def serve(self) -> int:
        """Return the process of the control plane."""
        return next(pid for pid, line in command_lines().items() if f"-m tests.system.faulty_serve {self.run}/" in line)


@pytest.fixture(scope="module", name="faulty")
def _faulty() -> Iterator[Faulty]:
    with beside(Faulty, "faulty", below=DISK) as stack:  # a volume needs a disk
        assert isinstance(stack, Faulty)
        asyncio.run(_warm(stack))
        yield stack


@pytest.fixture(autouse=True, name="clean")
def _clean(faulty: Faulty) -> Iterator[None]:
    """So the next test does not report the same leftovers again."""
    yield
    headers = {"OPEN-SANDBOX-API-KEY": faulty.api_key}
    for name in faulty.rows():
        httpx.delete(f"{faulty.base}/v1/sandboxes/{name}", headers=headers, timeout=60)


async def _warm(stack: Faulty) -> None:
    async with stack.client() as http:
        made = await asyncio.gather(
            *(http.post("/sandboxes", json=body(runtime)) for runtime in ("runc", "runsc", "runc", "runsc"))
        )
        await asyncio.gather(*(http.delete(f"/sandboxes/{answer.json()['id']}") for answer in made))


def body(runtime: str = "runc", fault: str = "") -> dict[str, Any]:
    return {
        "image": {"uri": EMPTY_IMAGE},
        "resourceLimits": {"memory": "256Mi"},
        "entrypoint": IDLE,
        "timeout": 3600,
        "networkPolicy": OLD,
        "volumes": [{"name": "own", "pvc": _own_volume(), "mountPath": "/mnt/own"}],
        "env": {"FAULT": fault} if fault else {},
        "extensions": {"sallyport.runtime": runtime},
    }


def _own_volume() -> dict[str, Any]:
    """Return a new named volume that ends with its sandbox."""
    return {"claimName": f"own-{secrets.token_hex(6)}", "deleteOnSandboxTermination": True}


async def made(http: httpx.AsyncClient, runtime: str = "runc", fault: str = "") -> str:
    answer = await http.post("/sandboxes", json=body(runtime, fault))
    assert 202 == answer.status_code, answer.text
    name: str = answer.json()["id"]
    return name


async def deleted(http: httpx.AsyncClient, name: str) -> None:
    assert (await http.delete(f"/sandboxes/{name}")).status_code in (204, 404)


async def _in_parallel(cases: list[Callable[[], Any]]) -> None:
    gate = asyncio.Semaphore(PARALLEL)

    async def one(case: Callable[[], Any]) -> None:
        async with gate:
            await case()

    await asyncio.gather(*(one(case) for case in cases))


@pytest.mark.parametrize("runtime", ON_RUNSC)
@pytest.mark.parametrize("mode", ["refused", pytest.param("unanswered", marks=pytest.mark.extended)])
async def test_a_launch_that_fails_at_any_step_leaves_nothing(mode: str, faulty: Faulty, runtime: str) -> None:
    """In hostd. The caller gets an error, or has a complete sandbox. The next launch succeeds."""
    before = take(faulty)
    async with faulty.client() as http:
        await deleted(http, await made(http, runtime, f"{runtime}-{mode}:-1:none"))
        steps = faulty.hook("faulted", label=f"{runtime}-{mode}")["seen"]
        assert len(steps) > 20
        # The runtimes differ in Docker and the worker.
        numbers = [i for i, step in enumerate(steps) if runtime == "runc" or step.startswith(("Docker.", "Worker."))]
        told: dict[str, int] = {}

        async def one(number: int) -> None:
            label = f"{runtime}-{mode}-{number}"
            answer = await http.post("/sandboxes", json=body(runtime, f"{label}:{number}:{mode}"))
            assert faulty.hook("faulted", label=label)["fired"]
            told[f"{number} {steps[number]}"] = answer.status_code
            if answer.status_code == 202:
                assert [] == faulty.disagreements(answer.json()["id"])
                await deleted(http, answer.json()["id"])

        await _in_parallel([lambda number=number: one(number) for number in numbers])  # type: ignore[misc]
        assert [] == faulty.wrong(before), told
        failed = [step for step, status in told.items() if status >= 400]
        assert len(failed) >= 4, told
        await deleted(http, await made(http, runtime))
    assert [] == faulty.wrong(before)


@pytest.mark.parametrize("runtime", ON_RUNSC)
@pytest.mark.parametrize("mode", [pytest.param("refused", marks=pytest.mark.extended), "unanswered"])
async def test_a_removal_that_fails_at_any_step_is_finished(mode: str, faulty: Faulty, runtime: str) -> None:
    before = take(faulty)
    async with faulty.client() as http:
        name, label = await made(http, runtime), f"remove-{runtime}-{mode}"
        faulty.hook("fault", sandbox=name, label=label, of="remove", number=-1, mode="none")
        await deleted(http, name)
        steps = faulty.hook("faulted", label=label)["seen"]
        assert len(steps) > 10
        numbers = [i for i, step in enumerate(steps) if runtime == "runc" or step.startswith(("Docker.", "Worker."))]

        async def one(number: int) -> None:
            sandbox = await made(http, runtime)
            faulty.hook("fault", sandbox=sandbox, label=f"{label}-{number}", of="remove", number=number, mode=mode)
            answer = await http.delete(f"/sandboxes/{sandbox}")
            assert answer.status_code in (204, 500), answer.text
            assert faulty.hook("faulted", label=f"{label}-{number}")["fired"]

        await _in_parallel([lambda number=number: one(number) for number in numbers])  # type: ignore[misc]
    assert [] == faulty.wrong(before)


async def test_a_gateway_whose_restart_fails_at_any_step_comes_back(faulty: Faulty) -> None:
    """Its worker is killed. After any fault during its replacement there is a next worker, with the same policy."""
    before = take(faulty)
    async with faulty.client() as http:
        name = await made(http)
        digest = faulty.rows()[name]["policy_digest"]

        def kill(label: str, number: int, mode: str) -> None:
            faulty.hook("fault", sandbox=name, label=label, of="respawn", number=number, mode=mode)
            former = faulty.inspect(name).worker_pid
            os.kill(former, signal.SIGKILL)
            deadline = time.monotonic() + PATIENCE
            while faulty.inspect(name).worker_pid in (None, former) or faulty.disagreements():
                assert time.monotonic() < deadline, (label, faulty.disagreements())
                time.sleep(0.05)
            assert digest == faulty.hook("digest", sandbox=name)["digest"]

        kill("respawn", -1, "none")
        steps = faulty.hook("faulted", label="respawn")["seen"]
        assert len(steps) > 5
        # Not all of them: each is the death of a worker, and after a death by signal the zygote is renewed first.
        for number in range(0, len(steps), max(1, len(steps) // RESTARTS)):
            mode = ("refused", "unanswered")[number % 2]
            kill(f"respawn-{number}-{mode}", number, mode)
            assert faulty.hook("faulted", label=f"respawn-{number}-{mode}")["fired"]
        await deleted(http, name)
    assert [] == faulty.wrong(before)


@pytest.mark.extended
@pytest.mark.parametrize("mode", ["killed-before", "killed-after"])
async def test_a_host_daemon_killed_in_a_launch_leaves_nothing_of_it(mode: str, faulty: Faulty) -> None:
    """SIGKILL of hostd at steps from the first to the last. Existing sandboxes continue, half-made ones are removed."""
    async with faulty.client() as http:
        label = f"killed-{mode}"
        await deleted(http, await made(http, fault=f"{label}:-1:none"))
        steps = faulty.hook("faulted", label=label)["seen"]
        kept = await made(http)
        before = take(faulty)
        for number in range(0 if mode == "killed-before" else 2, len(steps), max(1, len(steps) // KILLS)):
            try:
                answer = await http.post("/sandboxes", json=body(fault=f"{label}-{number}:{number}:{mode}"))
                assert answer.status_code >= 500, answer.text
            except httpx.TransportError:
                pass  # serve ended with it.
            await _serving(http)
            assert [] == faulty.wrong(before), steps[number]
            assert [kept] == list(faulty.rows())
        await deleted(http, kept)


@pytest.mark.parametrize("runtime", ON_RUNSC)
@pytest.mark.parametrize("mode", representatives(("refused", "unanswered", "killed-before", "killed-after"), "refused"))
async def test_a_pause_and_a_resume_are_whole_after_a_fault_at_any_step(
    mode: str, faulty: Faulty, runtime: str
) -> None:
    """Of hostd. Kernel, hostd and registry agree on one state, and the next call succeeds."""
    before = take(faulty)
    async with faulty.client() as http:
        name = await made(http, runtime)
        steps: dict[str, list[str]] = {}
        for op in ("pause", "resume"):
            faulty.hook("fault", sandbox=name, label=f"{op}-{runtime}-{mode}", of=op, number=-1, mode="none")
            assert 202 == (await http.post(f"/sandboxes/{name}/{op}")).status_code
            steps[op] = faulty.hook("faulted", label=f"{op}-{runtime}-{mode}")["seen"]
            assert len(steps[op]) >= 2
        for op in ("pause", "resume"):
            for number, step in enumerate(steps[op]):
                if op == "resume":
                    await _turned(http, name, "pause")
                label = f"{op}-{runtime}-{mode}-{number}"
                faulty.hook("fault", sandbox=name, label=label, of=op, number=number, mode=mode)
                answer = await _fault(http, "none", "POST", f"/sandboxes/{name}/{op}", None)
                assert answer is None or answer.status_code in (202, 500)
                await _serving(http)
                assert [] == faulty.wrong(), step
                await _turned(http, name, op)
                assert [] == faulty.disagreements(), step
                await _turned(http, name, "resume")
        await deleted(http, name)
    assert [] == faulty.wrong(before)


async def _turned(http: httpx.AsyncClient, name: str, op: str) -> None:
    """Pause or resume a sandbox, if it is not in that state already."""
    answer = await http.post(f"/sandboxes/{name}/{op}")
    assert answer.status_code in (202, 409), answer.text
    state = (await http.get(f"/sandboxes/{name}")).json()["status"]["state"]
    assert {"pause": "Paused", "resume": "Running"}[op] == state


@pytest.mark.extended
@pytest.mark.parametrize("mode", ["killed-before", "killed-after", "unanswered"])
async def test_a_pause_and_a_resume_that_lose_their_control_plane_are_whole(mode: str, faulty: Faulty) -> None:
    before = take(faulty)
    async with faulty.client() as http:
        name = await made(http)
        for op in ("pause", "resume"):
            answer = await _fault(http, "fault.-1.none", "POST", f"/sandboxes/{name}/{op}", None)
            assert answer is not None and 202 == answer.status_code
            steps = answer.headers["x-steps"].split(",")
            assert len(steps) >= 3
            for number, step in enumerate(steps):
                await _turned(http, name, "resume" if op == "pause" else "pause")
                await _fault(http, f"fault.{number}.{mode}", "POST", f"/sandboxes/{name}/{op}", None)
                await _serving(http)
                assert [] == faulty.wrong(), step
                await _turned(http, name, op)
        await deleted(http, name)
    assert [] == faulty.wrong(before)


POOL: dict[str, Any] = {
    "name": "p",
    "template": {"spec": {"containers": [{"image": EMPTY_IMAGE, "resources": {"limits": {"memory": "64Mi"}}}]}},
    "capacitySpec": {"bufferMin": 1, "bufferMax": 1, "poolMin": 0, "poolMax": 3},
}


@pytest.mark.extended
@pytest.mark.parametrize("victim", ["hostd", "serve"])
async def test_a_claim_that_is_killed_at_any_step_is_whole_or_leaves_nothing(victim: str, faulty: Faulty) -> None:
    """The member has its caller and its policy, or is removed. The pool then has another one, and a claim succeeds."""
    before = take(faulty)
    claim = {"extensions": {"poolRef": "p"}, "networkPolicy": OLD, "entrypoint": IDLE, "timeout": 3600}
    async with faulty.client() as http:
        assert 201 == (await http.post("/pools", json=POOL)).status_code

        async def claimed(number: int, mode: str) -> tuple[httpx.Response | None, list[str]]:
            member = await _only_member(http, faulty)
            request, label = f"fault.{number}.{mode}", f"claim-{number}-{mode}"
            if victim == "hostd":
                faulty.hook("fault", sandbox=member, label=label, of="claim", number=number, mode=mode)
                request = "none"
            answer = await _fault(http, request, "POST", "/sandboxes", claim)
            await _serving(http)
            if victim == "serve" or mode != "none":
                return answer, [] if answer is None else answer.headers.get("x-steps", "").split(",")
            return answer, faulty.hook("faulted", label=label)["seen"]

        answer, steps = await claimed(-1, "none")
        assert answer is not None and 202 == answer.status_code
        await deleted(http, answer.json()["id"])
        assert len(steps) >= 2, steps
        cases = [*((number, "killed-before") for number in range(len(steps))), (len(steps) - 1, "killed-after")]
        for number, mode in cases:
            answer, _ = await claimed(number, mode)
            assert answer is None or answer.status_code >= 500, steps[number]
            assert [] == faulty.wrong(), steps[number]
            for name, row in faulty.rows().items():
                if not row["idle"]:  # It is complete, and its caller has no id. The list has it.
                    assert (victim, mode) == ("serve", "killed-after")
                    assert json.loads(row["network_policy"]) == OLD
                    await deleted(http, name)
        assert 204 == (await http.delete("/pools/p")).status_code
    assert [] == faulty.wrong(before)


@pytest.mark.parametrize("op", representatives(("launch", "remove", "claim"), "launch"))
async def test_after_a_death_of_dockerd_at_any_step_an_operation_is_whole_or_leaves_nothing(
    op: str, faulty: Faulty
) -> None:
    """dockerd is killed before a step; the operation goes on. What has begun before works on."""
    before = take(faulty)
    async with faulty.client() as http:
        kept = await made(http)
        if op == "claim":
            assert 201 == (await http.post("/pools", json=POOL)).status_code

        async def operated(number: int, mode: str) -> tuple[httpx.Response, list[str]]:
            """Do the operation with its fault, and remove what it made. Return the answer and the steps."""
            label = f"docker-{op}-{number}"
            if op == "launch":
                answer = await http.post("/sandboxes", json=body(fault=f"{label}:{number}:{mode}"))
                name = answer.json().get("id")
            elif op == "remove":
                name = await made(http)
                faulty.hook("fault", sandbox=name, label=label, of=op, number=number, mode=mode)
                answer = await http.delete(f"/sandboxes/{name}")
            else:
                member = await _only_member(http, faulty, kept)
                faulty.hook("fault", sandbox=member, label=label, of=op, number=number, mode=mode)
                claim = {"extensions": {"poolRef": "p"}, "networkPolicy": OLD, "entrypoint": IDLE, "timeout": 3600}
                answer = await http.post("/sandboxes", json=claim)
                name = answer.json().get("id")
            seen = faulty.hook("faulted", label=label)
            assert seen["fired"] is (number >= 0)
            if answer.is_success and op != "remove":
                assert json.loads(faulty.rows()[name]["network_policy"]) == OLD
            assert answer.is_success or (answer.status_code >= 500 and op != "remove"), answer.text
            if name is not None:
                await deleted(http, name)
            return answer, seen["seen"]

        answer, steps = await operated(-1, "none")
        assert answer.is_success
        asked = [number for number, step in enumerate(steps) if step.startswith("Docker.")] or range(len(steps))
        for number in asked:
            await operated(number, "docker-killed")
            assert [] == faulty.wrong(), steps[number]
            assert faulty.rows()[kept]["state"] == "Running"
        if op == "claim":
            assert 204 == (await http.delete("/pools/p")).status_code
        await deleted(http, kept)
    assert [] == faulty.wrong(before)


@pytest.mark.extended
@pytest.mark.parametrize("op", ["image-remove", "image-add"])
def test_after_a_death_of_dockerd_at_any_step_the_list_of_images_is_what_docker_has(
    op: str, faulty: Faulty, tmp_path: Path
) -> None:
    """An addition is whole or leaves nothing. A removal succeeds; its bytes go when dockerd is back."""
    before, name, path = take(faulty), "fault:1", tmp_path / "image.tar"
    image = ImageFile([tar([entry("etc/motd", b"hello")])])
    path.write_bytes(image.saved(name))
    add = hostd.AddImage(hostd.ImageOrigin.FILE, str(path), (name,), "", replace=False)

    def operated(number: int, mode: str) -> list[str]:
        label = f"{op}-{number}"
        if op == "image-remove":
            faulty.ask(add)
        faulty.hook("fault", sandbox=name, label=label, of=op, number=number, mode=mode)
        if op == "image-remove":
            assert (name,) == faulty.ask(hostd.RemoveImage(name)).names
        else:
            with suppress(StackError):
                faulty.ask(add)
                deadline = time.monotonic() + PATIENCE
                while image.id not in take(faulty).images:  # dockerd can be away
                    assert time.monotonic() < deadline
                faulty.ask(hostd.RemoveImage(name))
        assert name not in [one.name for one in faulty.ask(hostd.ListImages()).images]
        seen = faulty.hook("faulted", label=label)
        assert seen["fired"] is (number >= 0)
        return list(seen["seen"])

    steps = operated(-1, "none")
    asked = [number for number, step in enumerate(steps) if step.startswith("Docker.")]
    assert len(asked) >= 3, steps
    for number in asked:
        operated(number, "docker-killed")
        assert [] == faulty.wrong(before), steps[number]


async def _only_member(http: httpx.AsyncClient, faulty: Faulty, *others: str) -> str:
    """Wait until the pool has its idle member, and there is nothing else but `others`."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        rows = {name: row for name, row in faulty.rows().items() if name not in others}
        idle = [name for name, row in rows.items() if row["idle"] and row["state"] == "Running"]
        if len(rows) == len(idle) == 1:
            return idle[0]
        await asyncio.sleep(0.1)
    raise AssertionError(faulty.rows())


async def _fault(http: httpx.AsyncClient, fault: str, method: str, path: str, content: Any) -> httpx.Response | None:
    """Send a request with a fault of the control plane. Return None if it died or closed the connection."""
    try:
        return await http.request(method, path, json=content, headers={"X-Request-ID": fault})
    except httpx.TransportError:
        return None


async def _serving(http: httpx.AsyncClient) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            if (await http.get("/sandboxes")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.1)  # It needs the processor to start.
    raise AssertionError("serve does not come back")


async def test_a_change_that_fails_or_loses_its_control_plane_leaves_one_policy(faulty: Faulty) -> None:
    """SIGKILL of `serve` before and after each step of a PATCH, and an error after each: all parts have the old or the
    new.
    """
    before = take(faulty)
    async with faulty.client() as http:
        name = await made(http)
        answer = await _fault(http, "fault.-1.none", "PATCH", _policy_of(name), [RULE])
        assert answer is not None and 200 == answer.status_code
        steps = answer.headers["x-steps"].split(",")
        assert len(steps) >= 4
        kills = [*((number, "killed-before") for number in range(len(steps))), (len(steps) - 1, "killed-after")]
        for number, mode in kills:
            assert None is await _change(http, name, number, mode)
            await _serving(http)
            assert [] == faulty.wrong(), (steps[number], mode)
            await _changed(http, name, number, mode)
            assert [] == faulty.disagreements()
        # An error ends no process: each step has its own sandbox, and all faults happen at once.
        names = [name, *await asyncio.gather(*(made(http) for _ in steps[1:]))]
        answers = await asyncio.gather(*(_change(http, one, n, "unanswered") for n, one in enumerate(names)))
        assert None not in answers
        assert [] == faulty.wrong()
        await asyncio.gather(*(_changed(http, one, n, "unanswered") for n, one in enumerate(names)))
        assert [] == faulty.disagreements()
        await asyncio.gather(*(deleted(http, one) for one in names))
    assert [] == faulty.wrong(before)


def _policy_of(name: str) -> str:
    return f"/sandboxes/{name}/networkpolicy"


def _rule(number: int, mode: str) -> dict[str, Any]:
    return {**RULE, "target": f"s{number}-{mode}.bank.example"}


async def _change(http: httpx.AsyncClient, name: str, number: int, mode: str) -> httpx.Response | None:
    """A change of a policy, with a fault."""
    return await _fault(http, f"fault.{number}.{mode}", "PATCH", _policy_of(name), [_rule(number, mode)])


async def _changed(http: httpx.AsyncClient, name: str, number: int, mode: str) -> None:
    """The same without a fault: at this point at the latest it happens."""
    again = await http.patch(_policy_of(name), json=[_rule(number, mode)])
    assert 200 == again.status_code, again.text
    assert f"s{number}-{mode}.bank.example" in [rule["target"] for rule in again.json()["policy"]["egress"]]


@pytest.mark.parametrize("mode", representatives(("killed-before", "left-before"), "left-before"))
async def test_a_creation_that_loses_its_control_plane_leaves_nothing(mode: str, faulty: Faulty) -> None:
    """At each step. A sandbox whose id no caller got is removed, and the workload never ran without its gateway."""
    before = take(faulty)
    async with faulty.client() as http:
        answer = await _fault(http, "fault.-1.none", "POST", "/sandboxes", body())
        assert answer is not None
        steps = answer.headers["x-steps"].split(",")
        await deleted(http, answer.json()["id"])
        for number in range(len(steps)):
            answer = await _fault(http, f"fault.{number}.{mode}", "POST", "/sandboxes", body())
            await _serving(http)
            if answer is not None and answer.status_code == 202:
                await deleted(http, answer.json()["id"])
            assert [] == faulty.wrong(before), steps[number]


async def test_a_removal_that_loses_its_control_plane_is_finished(faulty: Faulty) -> None:
    before = take(faulty)
    async with faulty.client() as http:
        name = await made(http)
        answer = await _fault(http, "fault.-1.none", "DELETE", f"/sandboxes/{name}", None)
        assert answer is not None and 204 == answer.status_code
        steps = answer.headers["x-steps"].split(",")
        assert len(steps) >= 5
        for number in range(len(steps)):
            name = await made(http)
            assert await _fault(http, f"fault.{number}.killed-before", "DELETE", f"/sandboxes/{name}", None) is None
            await _serving(http)
            if number == 0:  # Nothing had happened yet.
                assert [] == faulty.wrong()
                await deleted(http, name)
            assert [] == faulty.wrong(before), steps[number]


async def test_a_control_plane_killed_during_fifty_operations_comes_back_to_one_truth(faulty: Faulty) -> None:
    """Concurrent creates, deletes and changes, and SIGKILL during them: the list shows what runs."""
    before = take(faulty)
    async with faulty.client() as http:
        names = list(await asyncio.gather(*(made(http) for _ in range(6))))
        patches = [
            http.patch(f"/sandboxes/{name}/networkpolicy", json=[{**RULE, "target": f"p{index}.bank.example"}])
            for name in names
            for index in range(5)
        ]
        creates = [http.post("/sandboxes", json=body()) for _ in range(17)]
        deletes = [http.delete(f"/sandboxes/{name}") for name in names[:3]]
        work = [asyncio.ensure_future(one) for one in (*patches, *creates, *deletes)]
        assert 50 == len(work)
        await asyncio.sleep(0.7)
        os.kill(faulty.serve, signal.SIGKILL)
        await asyncio.gather(*work, return_exceptions=True)
        await _serving(http)
        assert [] == faulty.wrong()
        for name in faulty.rows():
            await deleted(http, name)
    assert [] == faulty.wrong(before)


async def test_twenty_changes_at_once_are_all_there(faulty: Faulty) -> None:
    """No update is lost, and the worker has the last version."""
    before = take(faulty)
    async with faulty.client() as http:
        name = await made(http)
        path = f"/sandboxes/{name}/networkpolicy"
        targets = {f"t{index}.bank.example" for index in range(20)}
        answers = await asyncio.gather(
            *(http.patch(path, json=[{**RULE, "target": target}]) for target in sorted(targets))
        )
        assert {200} == {answer.status_code for answer in answers}
        rules = (await http.get(path)).json()["policy"]["egress"]
        assert targets <= {rule["target"] for rule in rules}
        assert [] == faulty.disagreements()
        await deleted(http, name)
    assert [] == faulty.wrong(before)


@pytest.mark.parametrize("runtime", ON_RUNSC)
@pytest.mark.parametrize("end", ["restart", "kill", "exit"])
async def test_a_container_that_ends_does_not_come_back(end: str, faulty: Faulty, runtime: str) -> None:
    """`docker restart`, its first process killed, or ended by itself: reported as ended, not started again."""
    before = take(faulty)
    async with faulty.client() as http:
        name = await made(http, runtime)
        container = faulty.container(name)
        if end == "restart":
            assert 0 != faulty.docker("restart", "-t", "0", container).returncode
        elif end == "kill":
            assert 0 == faulty.docker("kill", container).returncode
        else:
            pid = int(faulty.docker("inspect", "-f", "{{.State.Pid}}", container).stdout)
            os.kill(pid, signal.SIGKILL)
        assert ("Failed", "CONTAINER_EXITED_ERROR") == faulty.state_of(name)
        assert 0 != faulty.docker("start", container).returncode
        running = faulty.docker("inspect", "-f", "{{.State.Running}}", container).stdout.strip()
        assert "false" == running
        await deleted(http, name)
    assert [] == faulty.wrong(before)
