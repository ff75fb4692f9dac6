"""A create or a delete happens completely or not at all, also with failures, disconnected clients, races and kills.

It tests `lifecycle/sandboxes/transaction.py`.
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from opensandbox.models.execd import RunCommandOpts

from demo.sandboxes import DemoSandbox, Secrets
from testbed.census import Census, command_lines, daemons, descriptors, take
from testbed.internet import API, ATTACKER, STATUS
from testbed.stack import EMPTY_IMAGE, Stack
from tests.conftest import ON_RUNC

pytestmark = [pytest.mark.system, pytest.mark.faults]

IDLE = ["tail", "-f", "/dev/null"]
LOOPS = 20
UNSTARTABLE = "sallyport/unstartable"
SLACK = 8
"""The number of descriptors that a daemon can have in addition: connections kept for the next call, for example one per
thread for Docker.
"""


def client(stack: Stack) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"{stack.base}/v1", headers={"OPEN-SANDBOX-API-KEY": stack.api_key}, timeout=120, trust_env=False
    )


def body(**changes: Any) -> dict[str, Any]:
    """Return a create call: the empty image, without a policy."""
    plain = {"image": {"uri": EMPTY_IMAGE}, "resourceLimits": {"memory": "256Mi"}, "entrypoint": IDLE, "timeout": 600}
    return plain | changes


def settled(stack: Stack, before: Census, seconds: float = 60.0) -> dict[str, object]:
    """Return the differences from `before`: none, or those that are left when the time is over."""
    deadline = time.monotonic() + seconds
    while (beyond := take(stack).beyond(before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return beyond


def grown(stack: Stack, held: dict[str, int], seconds: float = 60.0) -> dict[str, tuple[int, int]]:
    """Return the daemons that have more descriptors than they `held` and the slack: none, or those that are left when
    the time is over.
    """

    def more() -> dict[str, tuple[int, int]]:
        return {name: (held[name], now) for name, now in descriptors(stack).items() if now > held[name] + SLACK}

    until(lambda: not more(), seconds)
    return more()


def until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Return whether `condition` became true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture(scope="module", autouse=True, name="warm")
def _warm(stack: Stack) -> Iterator[None]:
    """Create what is created once and kept: connections to Docker, runsc's own directory, an image for these tests."""
    # Its work directory is a file. So all steps succeed, and only the start fails.
    work = ("import", "-c", "WORKDIR /dev/null", os.environ["SALLYPORT_EMPTY_IMAGE"], UNSTARTABLE)
    assert 0 == stack.docker(*work).returncode
    stack.permit_images(UNSTARTABLE)

    async def fill() -> None:
        async with client(stack) as http:
            requests = [body(extensions={"sallyport.runtime": runtime}) for runtime in ("runc", "runsc") * 4]
            made = await asyncio.gather(*(http.post("/sandboxes", json=request) for request in requests))
            await asyncio.gather(*(http.delete(f"/sandboxes/{answer.json()['id']}") for answer in made))

    asyncio.run(fill())
    yield
    stack.remove_images(UNSTARTABLE)


@pytest.mark.parametrize(
    "change",
    [
        {"image": {"uri": "sallyport/nowhere"}},
        {"extensions": {"sallyport.policy": "misbound"}},
        {"image": {"uri": UNSTARTABLE}},
    ],
    ids=["image", "secret", "start"],
)
@pytest.mark.parametrize("runtime", ON_RUNC)
async def test_a_create_that_fails_leaves_nothing(change: dict[str, Any], runtime: str, stack: Stack) -> None:
    before, held = take(stack), descriptors(stack)
    extensions = {"sallyport.runtime": runtime} | change.get("extensions", {})
    async with client(stack) as http:
        request = body(**change) | {"extensions": extensions}
        answers = [
            answer
            for _ in range(4)
            for answer in await asyncio.gather(*(http.post("/sandboxes", json=request) for _ in range(3)))
        ]

    assert {400, 500} >= {answer.status_code for answer in answers}, answers[0].text
    assert [] == [answer.text for answer in answers if not {"code", "message"} <= answer.json().keys()]
    assert {} == settled(stack, before)
    assert {} == grown(stack, held)


@pytest.mark.parametrize("runtime", ON_RUNC)
async def test_an_entrypoint_that_does_not_exist_ends_the_sandbox_and_not_its_removal(
    runtime: str, stack: Stack
) -> None:
    """Only Docker can detect the fault, in the image. The sandbox becomes Failed, and its removal leaves nothing."""
    before = take(stack)
    async with client(stack) as http:
        request = body(entrypoint=["/no/such/program"], extensions={"sallyport.runtime": runtime})
        answer = await http.post("/sandboxes", json=request)
        if answer.status_code == 202:
            name = answer.json()["id"]
            states: list[str] = []
            for _ in range(600):
                states.append((await http.get(f"/sandboxes/{name}")).json()["status"]["state"])
                if states[-1] == "Failed":
                    break
                await asyncio.sleep(0.1)
            assert "Failed" == states[-1]
            assert 204 == (await http.delete(f"/sandboxes/{name}")).status_code
        else:
            assert 400 <= answer.status_code < 600

    assert {} == settled(stack, before)


async def test_names_that_are_taken_are_passed_over(stack: Stack) -> None:
    """A leftover at the place of a slot is not taken over, and later launches succeed."""
    before = take(stack)
    used = {int(path.name.split("-")[0]) for path in (stack.run / "netns").glob("*-*")}
    taken = [number for number in range(64) if number not in used][:40]
    squatters = [stack.run / "netns" / f"{number}-{side}" for number in taken[::2] for side in ("sbx", "gw")]
    try:
        for path in squatters:
            path.write_text("somebody else's")
        async with client(stack) as http:
            for _ in range(3):
                answer = await http.post("/sandboxes", json=body())
                assert 202 == answer.status_code, answer.text
                assert 204 == (await http.delete(f"/sandboxes/{answer.json()['id']}")).status_code
        assert {"somebody else's"} == {path.read_text() for path in squatters}
    finally:
        for path in squatters:
            path.unlink(missing_ok=True)

    assert {} == settled(stack, before)


@pytest.mark.parametrize("runtime", ON_RUNC)
async def test_a_client_that_leaves_during_create_leaves_no_orphan(runtime: str, stack: Stack) -> None:
    """A started creation is completed and can be found, or is undone. The list shows every resource that exists."""
    before = take(stack)
    payload = httpx.Request(
        "POST",
        f"{stack.base}/v1/sandboxes",
        json=body(extensions={"sallyport.runtime": runtime}),
        headers={"OPEN-SANDBOX-API-KEY": stack.api_key},
    )
    head = f"POST /v1/sandboxes HTTP/1.1\r\n{''.join(f'{k}: {v}\r\n' for k, v in payload.headers.items())}\r\n"
    for pause in (0.0, 0.05, 0.2, 0.5):
        with socket.create_connection(("127.0.0.1", stack.port), timeout=10) as sock:
            sock.sendall(head.encode() + payload.read())
            await asyncio.sleep(pause)
    async with client(stack) as http:
        listed: set[str] = set()
        for _ in range(600):
            there = {item.sandbox for item in stack.sandboxes()}
            items = (await http.get("/sandboxes", params={"pageSize": 200})).json()["items"]
            listed = {item["id"] for item in items}
            if there == listed and not [item for item in items if item["status"]["state"] == "Pending"]:
                break
            await asyncio.sleep(0.1)
        assert there == listed
        old = {state.sandbox for state in stack.sandboxes()} - _named(before)
        for name in old:
            assert (await http.delete(f"/sandboxes/{name}")).status_code in (204, 404)

    assert {} == settled(stack, before)


def _named(census: Census) -> set[str]:
    """Return the sandboxes that have a directory of mounted files."""
    return {Path(path).name for path in census.files if Path(path).parent.name == "sandboxes"}


async def test_creates_and_deletes_that_meet_each_other(stack: Stack) -> None:
    """Ten concurrent creates, then five concurrent deletes of each: one gets 204, the others 204 or 404."""
    before = take(stack)
    async with client(stack) as http:
        made = await asyncio.gather(*(http.post("/sandboxes", json=body()) for _ in range(10)))
        names = [answer.json()["id"] for answer in made]
        assert 10 == len(set(names))
        deletes = [http.delete(f"/sandboxes/{name}") for name in names for _ in range(5)]
        statuses = [answer.status_code for answer in await asyncio.gather(*deletes)]
        assert {204, 404} >= set(statuses)
        for index in range(10):
            assert 204 in statuses[index * 5 : index * 5 + 5]
        gone = await asyncio.gather(*(http.get(f"/sandboxes/{name}") for name in names))

    assert {404} == {answer.status_code for answer in gone}
    assert {} == settled(stack, before)


@pytest.mark.extended
@pytest.mark.parametrize("runtime", ON_RUNC)
async def test_twenty_lives_leave_everything_as_it_was(runtime: str, stack: Stack) -> None:
    request = body(extensions={"sallyport.runtime": runtime})
    async with client(stack) as http:
        first = await http.post("/sandboxes", json=request)
        await http.delete(f"/sandboxes/{first.json()['id']}")
        before, held = take(stack), descriptors(stack)
        for _ in range(LOOPS // 2):
            pair = await asyncio.gather(http.post("/sandboxes", json=request), http.post("/sandboxes", json=request))
            for answer in pair:
                assert 204 == (await http.delete(f"/sandboxes/{answer.json()['id']}")).status_code

    assert {} == settled(stack, before)
    assert {} == grown(stack, held)


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_delete_in_the_middle_of_work_leaves_nothing(runtime: str, stack: Stack, values: Secrets) -> None:
    """A command runs, a flow is open with half of its answer, a secret is in use. All of them end long before their own
    end.
    """
    before = take(stack)
    sandbox = DemoSandbox(stack, runtime, values)
    try:
        inside = stack.connect(sandbox.id)
        # A request whose body never ends, so the flow stays open through the gateway.
        hanging = f"(printf 'x'; sleep 300) | curl -sS -T - -X POST https://{API}/v1/slow"
        for command in (hanging, "while :; do :; done", "setsid sh -c 'trap \"\" TERM; sleep 300'"):
            inside.commands.run(command, opts=RunCommandOpts(background=True))
        inside.close()
        traces = stack.traces(sandbox.id)
    finally:
        sandbox.close()

    assert [] == traces.remaining()
    assert {} == settled(stack, before)


@pytest.mark.parametrize("runtime", ON_RUNC)
async def test_expiry_removes_all_the_same(runtime: str, stack: Stack) -> None:
    before = take(stack)
    async with client(stack) as http:
        made = (await http.post("/sandboxes", json=body(extensions={"sallyport.runtime": runtime}))).json()["id"]
        traces = stack.traces(made)
        soon = (datetime.now(UTC) + timedelta(seconds=5)).isoformat()
        assert 200 == (await http.post(f"/sandboxes/{made}/renew-expiration", json={"expiresAt": soon})).status_code
        for _ in range(600):
            if (await http.get(f"/sandboxes/{made}")).status_code == 404:
                break
            await asyncio.sleep(0.1)
        assert 404 == (await http.get(f"/sandboxes/{made}")).status_code

    assert {} == settled(stack, before)
    assert [] == traces.remaining()


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_killed_control_plane_comes_back_to_what_it_left(runtime: str, stack: Stack, values: Secrets) -> None:
    """SIGKILL of `serve`: the sandbox continues under its policy, is listed again, and its token is still valid."""
    before = take(stack)
    sandbox = DemoSandbox(stack, runtime, values)
    inside = stack.connect(sandbox.id)
    endpoint = inside.get_endpoint(44772)
    inside.files.write_file("/tmp/loop.sh", _LOOP)
    inside.commands.run("sh /tmp/loop.sh", opts=RunCommandOpts(background=True))
    serve = daemons(stack)["lifecycle.serve"]
    container = stack.container(sandbox.id)

    os.kill(serve, signal.SIGKILL)
    seen = stack.docker("exec", container, "sh", "-c", f"curl -sS -o /dev/null -w %{{http_code}} https://{STATUS}/")
    denied = stack.docker("exec", container, "sh", "-c", f"curl -sSk --max-time 3 https://{ATTACKER}/")
    assert "200" == seen.stdout
    assert 0 != denied.returncode

    address = f"{stack.base}/v1/sandboxes/{sandbox.id}"
    key = {"OPEN-SANDBOX-API-KEY": stack.api_key}

    def back() -> bool:
        try:
            return httpx.get(address, headers=key, timeout=10).status_code == 200
        except httpx.HTTPError:
            return False

    assert until(back)
    assert "Running" == httpx.get(address, headers=key, timeout=30).json()["status"]["state"]
    ping = httpx.get(f"http://{endpoint.endpoint}/ping", headers=endpoint.headers, timeout=30)
    assert 200 == ping.status_code
    assert serve != daemons(stack)["lifecycle.serve"]
    assert until(lambda: "x" in inside.commands.run("cat /tmp/count 2>/dev/null").text)
    inside.close()
    sandbox.close()
    assert {} == settled(stack, before)


_LOOP = f"while :; do curl -sS -o /dev/null --max-time 5 https://{STATUS}/ && echo x >>/tmp/count; sleep 0.2; done\n"


async def test_the_end_of_the_host_daemon_is_the_end_of_its_sandboxes(second: Stack) -> None:
    """SIGTERM with sandboxes on both runtimes: no process, namespace, mount, group or container is left."""
    async with client(second) as http:
        requests = [body(extensions={"sallyport.runtime": runtime}) for runtime in ("runc", "runsc")]
        made = await asyncio.gather(*(http.post("/sandboxes", json=request) for request in requests))
    traces = [second.traces(answer.json()["id"]) for answer in made]
    assert all(len(trace.processes) > 1 for trace in traces)

    second.stop()

    assert [] == [item for trace in traces for item in trace.remaining()]
    assert {} == {pid: line for pid, line in command_lines().items() if f"{second.run}/" in line}
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    assert [] == [line for line in mounts if f"{second.run}/" in line]


@pytest.mark.extended
async def test_a_launch_whose_docker_dies_leaves_nothing(second: Stack) -> None:
    """Docker is killed during launches and restarts. Failed launches leave nothing, and the next create succeeds."""
    before = take(second)
    async with client(second) as http:
        launches = [asyncio.create_task(http.post("/sandboxes", json=body())) for _ in range(4)]
        await asyncio.sleep(0.35)
        dockerd = next(pid for pid, line in command_lines().items() if "dockerd" in line and str(second.run) in line)
        os.kill(dockerd, signal.SIGKILL)
        answers = await asyncio.gather(*launches)
        assert {202, 400, 500, 503} >= {answer.status_code for answer in answers}
        for answer in answers:
            if answer.status_code == 202:
                name = answer.json()["id"]
                for _ in range(100):
                    with contextlib.suppress(httpx.HTTPError):
                        if (await http.delete(f"/sandboxes/{name}")).status_code in (204, 404):
                            break
                    await asyncio.sleep(0.2)
        after: httpx.Response | None = None
        for _ in range(60):
            after = await http.post("/sandboxes", json=body())
            if after.status_code == 202:
                break
            await asyncio.sleep(0.5)
        assert after is not None and after.status_code == 202, after and after.text
        assert 204 == (await http.delete(f"/sandboxes/{after.json()['id']}")).status_code

    assert {} == settled(second, before)
    second.stop()
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    assert [] == [line for line in mounts if f"{second.run}/" in line or str(second.directory.parent) in line]
