"""kill -9 of each of Sallyport's processes, alone and in pairs, while sandboxes work, and a machine that loses power.

The far end shows what holds: nothing arrives at the attacker, every request that arrived has its record, and the
programs that were started before the death get answers again, from a gateway that they trust, without help from
outside. It tests `runtimes/process/watchdog.py`.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from opensandbox.exceptions import SandboxException
from opensandbox.models.execd import RunCommandOpts

from demo.sandboxes import DemoSandbox, Secrets
from lifecycle.posture.capture import Capture
from runtimes.process.cgroups import Cgroups, Processor
from runtimes.process.freezer import Freeze, Freezer
from testbed.census import command_lines, daemons, take
from testbed.internet import ADDRESSES, API, ATTACKER, UP_ADDRESS, Internet
from testbed.stack import EMPTY_IMAGE, Stack
from testbed.traces import Traces, start_time
from tests.conftest import representatives
from tests.stacks import Second, beside, put_secrets
from tests.stopping import stop
from tests.system.test_create_and_delete import body, client
from wire.operations import Done, Ping

pytestmark = [pytest.mark.system, pytest.mark.faults]

PATIENCE = 60.0
"""Seconds until everything works again. The duration is measured elsewhere."""
ALONE = ["worker", "zygote", "guard", "auditd", "vaultd", "compiler", "serve", "hostd", "dockerd", "containerd"]
PAIRS = [
    "hostd+dockerd",
    "hostd+auditd",
    "hostd+containerd",
    "vaultd+worker",
    "auditd+vaultd",
    "dockerd+containerd",
    "serve+hostd",
]
_POLL = f"""
import ssl, sys, time, urllib.error, urllib.request
context = ssl.create_default_context()  # once: the authorities of before whatever happens
def get(url):
    try:
        with urllib.request.urlopen(url, timeout=2, context=context) as answer:
            return "ok" if answer.read() else "empty"
    except urllib.error.HTTPError as error:
        return f"http-{{error.code}}"
    except urllib.error.URLError as error:
        return type(error.reason).__name__
    except Exception as error:
        return type(error).__name__
for number in range(1000000):
    began = time.time()
    said = get(f"https://{API}/v1/quiet/poll/{{sys.argv[1]}}/{{number}}")
    denied = get(f"https://{API}/admin") if said == "ok" else "http-403"
    escaped = [get(url) for url in ("https://{ATTACKER}/", "https://{ADDRESSES[ATTACKER]}/")] if number % 3 == 0 else []
    print(began, number, said, denied, *escaped, flush=True)
    time.sleep(0.1)
"""


@dataclass(frozen=True, slots=True)
class Poll:
    """One round of the client inside: its start, the API's answer, and its other answers."""

    began: float
    said: str
    denied: str
    attacker: tuple[str, ...]


class Client:
    """A sandbox with a program in it that sends requests all the time, from before any death to after it."""

    def __init__(self, stack: Stack, runtime: str, values: Secrets) -> None:
        self.sandbox = DemoSandbox(stack, runtime, values)
        self.id = self.sandbox.id
        inside = stack.connect(self.id)
        inside.files.write_file("/tmp/poll.py", _POLL)
        command = f"python3 /tmp/poll.py {runtime} >/tmp/polls 2>&1"
        inside.commands.run(command, opts=RunCommandOpts(background=True))
        inside.close()

    def polls(self, last: int = 2000) -> list[Poll]:
        """Return its output, or nothing while the way in is closed."""
        try:
            _, text = self.sandbox.run(f"tail -n {last} /tmp/polls")
        except (SandboxException, httpx.HTTPError):
            return []
        rows = [line.split() for line in text.splitlines()]
        return [Poll(float(row[0]), row[2], row[3], tuple(row[4:])) for row in rows if len(row) >= 4]

    def served_since(self, moment: float) -> bool:
        return any(poll.said == "ok" and poll.began > moment for poll in self.polls(20))


@pytest.fixture(scope="module", name="stack")
def _stack(values: Secrets) -> Iterator[Stack]:
    """A separate server for this module, whose processes can be killed."""
    with beside(Stack, "death", values) as stack:
        put_secrets(stack, values)
        yield stack


@pytest.fixture(scope="module", name="internet")
def _internet(stack: Stack) -> Internet:
    return stack.internet


@pytest.fixture(scope="module", name="clients")
def _clients(stack: Stack, values: Secrets) -> Iterator[list[Client]]:
    made = [Client(stack, runtime, values) for runtime in ("runsc", "runc")]
    assert until(lambda: all(one.served_since(0) for one in made))
    yield made
    for one in made:
        one.sandbox.close()


def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def processes(stack: Stack, role: str, clients: list[Client]) -> set[int]:
    """Return the present processes of a role."""
    run = str(stack.run)
    match role:
        case "worker":
            return {int(stack.inspect(one.id).worker_pid or 0) for one in clients}
        case "hostd":
            return {pid} if (pid := daemons(stack).get("runtimes.hostd")) else set()
        case "containerd":
            return {pid for pid, line in command_lines().items() if "containerd --config" in line and run in line}
        case _:  # By hostd's note, with a check: a forked worker has the zygote's command line.
            pid, started = (stack.run / "config" / f"{role}.pid").read_text().split()[:2]
            return {int(pid)} if str(start_time(int(pid))) == started else set()


def back(stack: Stack, roles: list[str], dead: set[int], clients: list[Client], *, state: str = "Running") -> bool:
    """Return whether every role has its processes again and the API shows every sandbox in this state."""
    try:
        for role in roles:
            now = processes(stack, role, clients)
            if not now or now & (dead | {0}):
                return False
        for one in clients:
            answer = httpx.get(
                f"{stack.base}/v1/sandboxes/{one.id}", headers={"OPEN-SANDBOX-API-KEY": stack.api_key}, timeout=2
            )
            if answer.json()["status"]["state"] != state:
                return False
    except (OSError, httpx.HTTPError):
        return False
    return True


def policies(stack: Stack, clients: list[Client]) -> list[str]:
    return [stack.inspect(one.id).policy for one in clients]


def arrived(internet: Internet) -> set[str]:
    """Return the targets of the clients' requests that the API has received."""
    return {str(note["target"]) for note in internet.notes() if "/v1/quiet/poll/" in str(note.get("target"))}


def recorded(stack: Stack) -> set[str]:
    """Return the targets of the requests that the audit log allows."""
    return {
        str(record.get("path"))
        for record in stack.audit_records()
        if record.get("kind") == "request" and record.get("decision") == "allow"
    }


def attackers(frames: Any) -> list[Any]:
    """Return what reached the attacker, or asked for its name."""
    return [frame for frame in frames if frame.destination == ADDRESSES[ATTACKER] or b"\x08attacker" in frame.data]


def recovery(stack: Stack, victims: list[str], clients: list[Client], internet: Internet) -> float:
    """Kill the processes. Return the seconds until everything works again. The claims in between are asserted here."""
    before = policies(stack, clients)
    containers = [stack.container(one.id) for one in clients]
    since = time.time()
    with Capture(internet.path(internet.net), "net0") as wire:
        assert until(lambda: all(one.served_since(since) for one in clients))
        dead = set().union(*(processes(stack, role, clients) for role in victims))
        assert dead and 0 not in dead
        killed = time.monotonic()
        for pid in dead:
            with suppress(ProcessLookupError):  # dockerd ends its containerd.
                os.kill(pid, signal.SIGKILL)
        assert until(lambda: back(stack, ALONE, dead, clients)), stack.tail()
        again = time.time()
        assert until(lambda: all(one.served_since(again) for one in clients)), stack.tail()
        took = time.monotonic() - killed
        seen = wire.since(0)
    assert [frame for frame in seen if frame.destination == ADDRESSES[API]], "the capture hears nothing"
    assert [] == attackers(seen)
    assert containers == [stack.container(one.id) for one in clients]
    assert until(lambda: before == policies(stack, clients))
    for one in clients:
        polls = [poll for poll in one.polls() if poll.began > since]
        assert "SSLCertVerificationError" not in {poll.said for poll in polls}
        assert "http-403" in {poll.denied for poll in polls if poll.said == "ok"}
        assert "ok" not in {poll.denied for poll in polls}
        assert "ok" not in {said for poll in polls for said in poll.attacker}
    stack.sallyport("audit", "verify")
    assert set() == arrived(internet) - recorded(stack)
    return took


@pytest.mark.parametrize("victims", representatives((*ALONE, *PAIRS), *ALONE))
def test_after_any_death_nothing_escapes_and_everything_comes_back_by_itself(
    victims: str, stack: Stack, clients: list[Client], internet: Internet, record_property: Any
) -> None:
    took = recovery(stack, victims.split("+"), clients, internet)
    record_property("recovered_seconds", round(took, 2))
    print(f"{victims}: everything serves again after {took:.2f} s")


@pytest.mark.parametrize("victims", representatives((*ALONE, "hostd+dockerd"), "hostd"))
def test_a_pause_survives_the_death_of_each_process(
    victims: str, stack: Stack, clients: list[Client], internet: Internet
) -> None:
    """Nothing computes or arrives before the resume, and then everything serves, under the same policy."""
    before = policies(stack, clients)
    freezer, accounts = Freezer(), Processor(Cgroups(str(stack.run)))
    containers = [stack.container(one.id) for one in clients]
    for one in clients:
        assert 202 == turn(stack, one, "pause")
    time.sleep(1)  # for the servers to write down what they have received
    asked, used = arrived(internet), [accounts.seconds(container) for container in containers]
    with Capture(internet.path(internet.net), "net0", lambda frame: frame.source == UP_ADDRESS) as wire:
        dead = set().union(*(processes(stack, role, clients) for role in victims.split("+")))
        assert dead and 0 not in dead
        for pid in dead:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert until(lambda: back(stack, ALONE, dead, clients, state="Paused")), stack.tail()
        assert until(lambda: before == policies(stack, clients))
        assert ["paused"] * 2 == [stack.inspect(one.id).state for one in clients]
        assert [Freeze.FROZEN] * 2 == [freezer.state(container) for container in containers]
        assert used == [accounts.seconds(container) for container in containers]
        assert [] == [frame for frame in wire.since(0) if frame.protocol == 17 or len(frame.data) > 14 + 20 + 60]
    assert asked == arrived(internet)
    resumed = time.time()
    for one in clients:
        assert until(partial(resumes, stack, one)), stack.tail()
    assert until(lambda: all(one.served_since(resumed) for one in clients)), stack.tail()
    assert containers == [stack.container(one.id) for one in clients]
    assert set() == arrived(internet) - recorded(stack)


def turn(stack: Stack, one: Client, op: str) -> int:
    """Pause or resume a sandbox; return the status."""
    headers = {"OPEN-SANDBOX-API-KEY": stack.api_key}
    return httpx.post(f"{stack.base}/v1/sandboxes/{one.id}/{op}", headers=headers, timeout=60).status_code


def resumes(stack: Stack, one: Client) -> bool:
    """Return whether a resume is carried out. While auditd starts again, it may be refused, and changes nothing."""
    status = turn(stack, one, "resume")
    assert status in (202, 503)
    return status == 202


async def test_a_create_waits_for_a_dockerd_that_is_coming_back(stack: Stack) -> None:
    """It was killed several times, so its restart takes half a second at least."""
    killed: set[int] = set()
    async with client(stack) as http:
        for _ in range(3):
            assert until(lambda: bool(processes(stack, "dockerd", []) - killed))
            for pid in processes(stack, "dockerd", []) - killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        answer = await http.post("/sandboxes", json=body())
        assert 202 == answer.status_code, answer.text
        assert 204 == (await http.delete(f"/sandboxes/{answer.json()['id']}")).status_code


def test_a_worker_that_is_born_while_the_guard_comes_back_dials_under_the_new_one(
    stack: Stack, clients: list[Client]
) -> None:
    """Its spawn began with the guard that has ended. It gets the next guard, like all other workers."""
    one, other = clients
    (zygote,) = processes(stack, "zygote", clients)
    state = stack.inspect(one.id)
    groups = Cgroups(str(stack.run))
    group = groups.hierarchies.roots[0] / groups.parent / f"{one.id}.{state.generation + 1}"
    stop(zygote)
    try:
        os.kill(state.worker_pid, signal.SIGKILL)
        assert until(group.exists)
        for pid in processes(stack, "guard", clients):
            os.kill(pid, signal.SIGKILL)
        killed = time.time()
        assert until(lambda: other.served_since(killed)), stack.tail()
    finally:
        with suppress(ProcessLookupError):  # a hang of the zygote is noticed like its death, if this takes long
            os.kill(zygote, signal.SIGCONT)
    born = time.time()
    assert until(lambda: one.served_since(born)), stack.tail()


def test_calls_share_a_way_in_and_none_is_carried_out_twice_when_it_is_cut(stack: Stack, clients: list[Client]) -> None:
    """One record for many commands. The caller repeats a command that is lost with the worker."""
    for one in clients:
        before = ways_in(stack, one)
        for _ in range(10):
            one.sandbox.run("true")
        assert ways_in(stack, one) - before < 5
        done: list[int] = []
        numbers = count()

        def step(one: Client = one, done: list[int] = done, numbers: Iterator[int] = numbers) -> bool:
            number = next(numbers)
            with suppress(SandboxException):
                one.sandbox.run(f"echo {number} >>/tmp/done")
                done.append(number)
            return len(done) >= 10

        assert not any(step() for _ in range(5))
        os.kill(stack.worker_pid(one.id), signal.SIGKILL)
        assert until(step), stack.tail()
        written = [int(line) for line in one.sandbox.run("cat /tmp/done")[1].split()]
        assert len(set(written)) == len(written)
        assert set(done) <= set(written)


def ways_in(stack: Stack, client: Client) -> int:
    """Return the number of connections into a sandbox that the log has allowed."""
    records = (record for record in stack.audit_records() if record.get("sandbox") == client.id)
    return len([record for record in records if (record["kind"], record["decision"]) == ("ingress", "allow")])


def test_a_killed_watchdog_takes_hostd_with_it_and_the_next_start_adopts(
    stack: Stack, clients: list[Client], internet: Internet
) -> None:
    """No hostd runs without a watchdog. Without both the sandboxes are disconnected. The next `serve` adopts them."""
    before = policies(stack, clients)
    containers = [stack.container(one.id) for one in clients]
    hostd = daemons(stack)["runtimes.hostd"]
    with Capture(internet.path(internet.net), "net0") as wire:
        stack.kill()
        assert until(lambda: hostd not in command_lines())
        assert "runtimes.hostd" not in daemons(stack)
        workers_gone = until(lambda: not any("gateway" in line for line in _of(stack)))
        assert until(lambda: still(wire)), "the wire is not silent"  # The kernel may have had connections to end.
        mark = wire.mark()
        time.sleep(1.0)
        frames = [frame for frame in wire.since(mark) if frame.destination in ADDRESSES.values()]
        assert workers_gone
        assert [] == frames

        stack.start()

        again = time.time()
        assert until(lambda: all(one.served_since(again) for one in clients)), stack.tail()
        assert [] == attackers(wire.since(0))
    assert containers == [stack.container(one.id) for one in clients]
    assert until(lambda: before == policies(stack, clients))
    assert "SSLCertVerificationError" not in {poll.said for one in clients for poll in one.polls()}
    stack.sallyport("audit", "verify")


def still(wire: Capture) -> bool:
    """Return whether nothing came for a moment."""
    mark = wire.mark()
    time.sleep(0.5)
    return mark == wire.mark()


def _of(stack: Stack) -> list[str]:
    return [line for line in command_lines().values() if f"{stack.run}/" in line]


@pytest.mark.usefixtures("clients")  # runsc's first start leaves a mount in its state, which stays.
@pytest.mark.parametrize("op", ["create", "delete"])
async def test_hostd_killed_in_the_middle_leaves_all_or_nothing(op: str, stack: Stack) -> None:
    """An answered operation is complete. Any other one is undone, or its sandbox can be found and deleted."""
    before = take(stack)
    async with client(stack) as http:
        others = await listed(http)
        requests = [body(extensions={"sallyport.runtime": runtime}) for runtime in ("runc", "runsc")]
        made = [] if op == "create" else [await http.post("/sandboxes", json=request) for request in requests]
        names = [answer.json()["id"] for answer in made]
        if op == "create":
            calls = [http.post("/sandboxes", json=request) for request in requests]
        else:
            calls = [http.delete(f"/sandboxes/{name}") for name in names]
        under_way = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0.3 if op == "create" else 0.15)
        os.kill(daemons(stack)["runtimes.hostd"], signal.SIGKILL)
        answers = await asyncio.gather(*under_way)
        assert [] == [answer.status_code for answer in answers if answer.status_code not in (202, 204, 404, 500, 503)]

        deadline = time.monotonic() + PATIENCE
        while True:
            ours = await listed(http) - others
            for name in ours:
                await http.delete(f"/sandboxes/{name}")
            if not ours and hostd_answers(stack):
                break
            assert time.monotonic() < deadline, stack.tail()
            await asyncio.sleep(0.3)

    assert until(lambda: {} == take(stack).beyond(before)), take(stack).beyond(before)


async def listed(http: httpx.AsyncClient) -> set[str]:
    return {str(item["id"]) for item in (await http.get("/sandboxes", params={"pageSize": 200})).json()["items"]}


def hostd_answers(stack: Stack) -> bool:
    """Return whether hostd does."""
    try:
        return Done() == stack.ask(Ping())
    except OSError:
        return False


@pytest.mark.extended
def test_an_image_whose_file_is_gone_is_no_reason_to_close_a_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adopting hostd gives running sandboxes their gateways back, in any state of an image's file."""
    tar = Path(shutil.copy(os.environ["SALLYPORT_EMPTY_IMAGE"], tmp_path / "empty.tar"))
    monkeypatch.setenv("SALLYPORT_EMPTY_IMAGE", str(tar))
    with beside(Second, "second") as stack:
        sandbox = stack.create("runc", image=EMPTY_IMAGE, policy=None)
        try:
            tar.unlink()
            os.kill(daemons(stack)["runtimes.hostd"], signal.SIGKILL)

            assert until(lambda: hostd_answers(stack) and sandbox.is_healthy()), stack.tail()
            assert 1 < stack.inspect(str(sandbox.id)).generation
            assert until(lambda: str(tar) in stack.tail()), stack.tail()  # The log has the reason.
            assert sandbox.is_healthy()
        finally:
            sandbox.kill()
            sandbox.close()


@pytest.mark.extended
def test_a_create_waits_for_an_image_that_hostd_imports_after_an_adoption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import takes seconds, and hostd listens before it."""
    tar = Path(shutil.copy(os.environ["SALLYPORT_EMPTY_IMAGE"], tmp_path / "large.tar"))
    with tarfile.open(tar, "a") as archive:
        large = tarfile.TarInfo("large")
        large.size = 512 << 20
        with Path("/dev/zero").open("rb") as zeros:
            archive.addfile(large, zeros)
    monkeypatch.setenv("SALLYPORT_EMPTY_IMAGE", str(tar))
    with beside(Second, "second") as stack:
        removed = stack.docker("rmi", EMPTY_IMAGE)
        assert 0 == removed.returncode, removed.stderr
        os.kill(daemons(stack)["runtimes.hostd"], signal.SIGKILL)
        assert until(lambda: hostd_answers(stack) and stack.healthy()), stack.tail()

        sandbox = stack.create("runc", image=EMPTY_IMAGE, policy=None)

        assert sandbox.is_healthy()
        sandbox.kill()
        sandbox.close()


async def test_a_machine_that_lost_power_starts_clean(second: Stack) -> None:
    """Every process is killed, and the run directory removed. The database, the log and Docker's data are unchanged."""
    take(second)  # Until the slots made ahead exist.
    own = len(list((second.run / "netns").iterdir()))
    async with client(second) as http:
        requests = [body(extensions={"sallyport.runtime": runtime}) for runtime in ("runc", "runsc")]
        names = [(await http.post("/sandboxes", json=request)).json()["id"] for request in requests]
    second.sallyport("vault", "put", "kept", "--host", API, stdin="a-value-that-stays")
    secrets = second.sallyport("vault", "list")
    traces = [second.traces(name) for name in names]
    records = len(second.audit_records())

    lose_power(second, traces)
    assert 2 == len(list((second.state.parent.parent / "home" / "docker" / "containers").iterdir()))
    second.start()

    assert () == second.sandboxes()
    assert "" == second.docker("ps", "-aq").stdout
    assert "kept" in secrets
    assert secrets == second.sallyport("vault", "list")
    take(second)
    assert own == len(list((second.run / "netns").iterdir()))
    left = remaining(traces)
    # It is sealed, until the rows are deleted.
    assert {True} == {str(second.state / "vault") in item for item in left}, left
    async with client(second) as http:
        deadline = time.monotonic() + PATIENCE
        while True:
            statuses = [(await http.get(f"/sandboxes/{name}")).json()["status"] for name in names]
            if {"Failed"} == {status["state"] for status in statuses}:
                break
            assert time.monotonic() < deadline, statuses
            await asyncio.sleep(0.1)
        assert {"CONTAINER_LOST"} == {status["reason"] for status in statuses}
        assert {204} == {(await http.delete(f"/sandboxes/{name}")).status_code for name in names}
        assert [] == remaining(traces)
        after = await http.post("/sandboxes", json=body())
        assert 202 == after.status_code, after.text
        assert 204 == (await http.delete(f"/sandboxes/{after.json()['id']}")).status_code
    assert records < len(second.audit_records())
    second.sallyport("audit", "verify")


def remaining(traces: list[Traces]) -> list[str]:
    """Return what is left of them."""
    return [item for trace in traces for item in trace.remaining()]


def lose_power(stack: Stack, traces: list[Traces]) -> None:
    """Kill everything of `stack` at once and remove what a reboot would remove."""
    stack.kill()
    doomed = {pid for pid, line in command_lines().items() if f"{stack.run}/" in line}
    doomed |= {pid for trace in traces for pid, _ in trace.processes}
    for pid in doomed:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    assert until(lambda: not _of(stack))
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in reversed(points):
        if point.startswith((f"{stack.run}/", f"{stack.directory.parent}/home/")):
            subprocess.run(["umount", "-l", point], check=True)
    shutil.rmtree(stack.run)
