"""Creation and removal are complete or have no effect, across failures, disconnected clients, and restarts.

It also tests `lifecycle/sandboxes/creation.py`, by calls of the API.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import uvicorn
from standins import BOUNDS, IMAGE, KEY, World, world
from uvicorn.server import ServerState

import wire
from lifecycle.api.connections import ApiConnection
from lifecycle.sandboxes import reaper
from lifecycle.sandboxes.bounds import CreationBounds
from lifecycle.sandboxes.registry import Sandbox
from vault.grants import Grant
from wire.api.hostd import HostSandboxState
from wire.api.states import HostState

pytestmark = pytest.mark.slow

BODY: dict[str, Any] = {"image": {"uri": IMAGE}, "entrypoint": ["sleep", "1"], "resourceLimits": {}}


async def until(condition: Callable[[], Any]) -> None:
    """Wait for the effect of another task."""
    async with asyncio.timeout(60):
        while True:
            outcome = condition()
            if asyncio.iscoroutine(outcome):
                outcome = await outcome
            if outcome:
                return
            await asyncio.sleep(0.01)


async def rows(server: World) -> int:
    assert server.server is not None
    return await server.server.registry.count()


async def test_a_failed_launch_leaves_nothing(server: World) -> None:
    """hostd refuses: vaultd no longer has the sandbox, and no row remains."""
    server.hostd.fail["launch"] = wire.RequestError(wire.Code.DOCKER, "no")
    async with server.client() as client:
        answer = await client.post("/v1/sandboxes", json=BODY)
    assert (500, "DOCKER::SANDBOX_START_FAILED") == (answer.status_code, answer.json()["code"])
    assert 1 == len(server.vaultd.named("close_sandbox"))
    assert ({}, {}, 0) == (server.vaultd.grants, server.hostd.sandboxes, await rows(server))


@pytest.mark.parametrize(
    ("code", "status", "answer_code"),
    [("full", 429, "SANDBOX::TOO_MANY_REQUESTS"), ("unavailable", 503, "DOCKER::INITIALIZATION_ERROR")],
)
async def test_refusals_of_hostd_keep_their_meaning(server: World, code: str, status: int, answer_code: str) -> None:
    """If the host is full or still starts, the client can try again later."""
    server.hostd.fail["launch"] = wire.RequestError(code, "x")
    async with server.client() as client:
        answer = await client.post("/v1/sandboxes", json=BODY)
    assert (status, answer_code) == (answer.status_code, answer.json()["code"])
    assert "retry-after" in answer.headers


async def test_without_a_record_nothing_is_made(server: World) -> None:
    """The audit log refuses: nothing was launched, and nothing was opened at vaultd."""
    server.auditd.fail["record"] = wire.RequestError(wire.Code.STORAGE, "no")
    async with server.client() as client:
        answer = await client.post("/v1/sandboxes", json=BODY)
    assert answer.status_code >= 500
    assert ([], [], 0) == (server.hostd.named("launch"), server.vaultd.named("open_sandbox"), await rows(server))


async def test_a_vault_that_refuses_stops_the_launch(server: World) -> None:
    """A secret that cannot be granted is the caller's error. Nothing was launched."""
    server.vaultd.fail["open_sandbox"] = wire.RequestError(wire.Code.NOT_BOUND, "secret x is not bound to y")
    async with server.client() as client:
        answer = await client.post("/v1/sandboxes", json=BODY)
    assert (400, []) == (answer.status_code, server.hostd.named("launch"))


async def test_undoing_is_retried_until_it_is_done(server: World) -> None:
    """A step that could not be undone at once is undone later. Until then its row stays."""
    server.hostd.fail["launch"] = wire.RequestError(wire.Code.DOCKER, "no")
    server.hostd.fail["remove"] = wire.RequestError(wire.Code.DOCKER, "no")
    async with server.client() as client:
        assert 500 == (await client.post("/v1/sandboxes", json=BODY)).status_code
        assert 1 == await rows(server)
        del server.hostd.fail["remove"]
        await until(lambda: _none(server))
    assert {} == server.vaultd.grants


async def _none(server: World) -> bool:
    return await rows(server) == 0


async def test_a_client_that_goes_away_leaves_nothing(server: World) -> None:
    """The connection ends during the sandbox's creation. The sandbox is removed after the creation."""
    server.hostd.hold["launch"] = asyncio.Event()
    server.hostd.reached["launch"] = asyncio.Event()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = json.dumps(BODY).encode()
    writer.write(
        b"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        + f"OPEN-SANDBOX-API-KEY: {KEY}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    await server.hostd.reached["launch"].wait()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    del reader
    await asyncio.sleep(0.2)  # for the server to read the connection's end; a longer wait only makes the test stronger
    server.hostd.hold["launch"].set()
    await until(lambda: _none(server))
    assert ({}, {}) == (server.hostd.sandboxes, server.vaultd.grants)
    assert 1 == len(server.hostd.named("launch"))


@pytest.mark.parametrize("launch", ["done", "pending", "failed"])
async def test_a_client_that_disconnects_before_its_answer_is_sent_leaves_nothing(launch: str) -> None:
    """The server waits for a disconnection during the creation, which does not come. It comes before the answer."""
    messages = iter([{"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False}, None])
    headers = [(b"host", b"x"), (b"content-type", b"application/json"), (b"open-sandbox-api-key", KEY.encode())]
    path = "/v1/sandboxes"
    scope = {"type": "http", "method": "POST", "scheme": "http", "path": path, "raw_path": path.encode()}
    answers = []

    async def receive() -> Any:
        message = next(messages, {"type": "http.disconnect"})
        if message is None:
            await asyncio.Event().wait()
        return message

    async def send(message: Any) -> None:
        answers.append(message)

    bounds = BOUNDS if launch == "done" else replace(BOUNDS, answer_seconds=0.2)
    async with world(bounds=bounds) as described, described.serving() as server:
        server.hostd.hold["launch"] = asyncio.Event()
        if launch == "failed":
            server.hostd.fail["launch"] = wire.RequestError(wire.Code.DOCKER, "no")
        if launch == "done":
            server.hostd.hold["launch"].set()
        assert server.server is not None
        await server.server.edge({**scope, "query_string": b"", "headers": headers}, receive, send)
        server.hostd.hold["launch"].set()
        assert 202 == answers[0]["status"]
        await until(lambda: _none(server))
        assert ({}, {}) == (server.hostd.sandboxes, server.vaultd.grants)
        assert 1 == len(server.hostd.named("launch"))


async def test_a_server_is_told_of_a_disconnection_at_once() -> None:
    """The protocol reports it in the same turn of the event loop in which it reads the connection's end."""
    received: list[str] = []
    receives: list[Any] = []
    asked = asyncio.Event()

    async def application(_scope: Any, receive: Any, _send: Any) -> None:
        assert "http.request" == (await receive())["type"]
        receives.append(receive)
        asked.set()
        await asyncio.sleep(60)

    class Observed(ApiConnection):
        def eof_received(self) -> None:
            super().eof_received()
            message = asyncio.Task(receives[0](), loop=asyncio.get_running_loop(), eager_start=True)
            received.append(message.result()["type"] if message.done() else "nothing")
            message.cancel()

    config = uvicorn.Config(application, log_config=None)
    config.load()
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with theirs:
        transport, connection = await loop.connect_accepted_socket(lambda: Observed(config, ServerState(), {}), ours)
        theirs.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asked.wait()
        theirs.shutdown(socket.SHUT_WR)
        await until(lambda: bool(received))
        assert ["http.disconnect"] == received
        for task in connection.tasks:
            task.cancel()
        transport.close()


async def test_a_slow_launch_is_answered_pending() -> None:
    """The caller gets the id and an endpoint in time. The state becomes Running after the launch."""
    async with world(bounds=replace(BOUNDS, answer_seconds=0.2)) as described, described.serving() as server:
        server.hostd.hold["launch"] = asyncio.Event()
        async with server.client() as client:
            made = await client.post("/v1/sandboxes", json=BODY)
            assert (202, "Pending") == (made.status_code, made.json()["status"]["state"])
            path = f"/v1/sandboxes/{made.json()['id']}"
            assert 200 == (await client.get(f"{path}/endpoints/44772")).status_code
            ping = await client.get(f"{path}/proxy/44772/ping")
            assert (502, "BACKEND_CONNECTION_FAILED") == (ping.status_code, ping.json()["code"])
            server.hostd.hold["launch"].set()

            async def running() -> bool:
                return (await client.get(path)).json()["status"]["state"] == "Running"

            await until(running)


async def test_a_failure_after_the_answer_is_shown() -> None:
    """A client that got Pending then gets Failed, and can delete the sandbox."""
    async with world(bounds=replace(BOUNDS, answer_seconds=0.2)) as described, described.serving() as server:
        server.hostd.hold["launch"] = asyncio.Event()
        server.hostd.fail["launch"] = wire.RequestError(wire.Code.DOCKER, "no")
        async with server.client() as client:
            path = f"/v1/sandboxes/{(await client.post('/v1/sandboxes', json=BODY)).json()['id']}"
            server.hostd.hold["launch"].set()

            async def failed() -> bool:
                return (await client.get(path)).json()["status"]["state"] == "Failed"

            await until(failed)
            assert 204 == (await client.delete(path)).status_code
            assert 404 == (await client.get(path)).status_code


@pytest.mark.parametrize("is_answered", [False, True], ids=["waiting", "answered"])
async def test_a_failed_start_is_undone_and_its_output_is_not_stored(is_answered: bool) -> None:
    """A caller that waits gets the output. One that got Pending finds the exit code in the row."""
    bounds = replace(BOUNDS, answer_seconds=0.2 if is_answered else 60.0)
    async with world(bounds=bounds) as described:
        described.start_seconds = 60.0
        async with described.serving() as server, server.client() as client:
            server.hostd.refusals = 1 << 30  # execd does not serve
            creating = asyncio.create_task(client.post("/v1/sandboxes", json=BODY))
            await until(lambda: bool(server.hostd.sandboxes))
            name = next(iter(server.hostd.sandboxes))
            if is_answered:
                assert "Pending" == (await creating).json()["status"]["state"]
            server.hostd.printed[name] = "the-output-of-a-program\n"
            server.hostd.change(name, state=HostState.EXITED, exit_code=3)
            await until(lambda: not server.hostd.sandboxes)
            if not is_answered:
                answer = await creating
                assert (500, "DOCKER::SANDBOX_START_FAILED") == (answer.status_code, answer.json()["code"])
                assert answer.json()["message"].endswith("exit code 3; the end of its output: the-output-of-a-program")
                assert 0 == await rows(server)
                return

            async def failed() -> bool:
                status = (await client.get(f"/v1/sandboxes/{name}")).json()["status"]
                return (status["state"], status.get("message")) == ("Failed", "The entrypoint ended with exit code 3.")

            await until(failed)


async def test_a_start_that_is_waited_for_holds_up_no_other_launch() -> None:
    async with world(bounds=replace(BOUNDS, launches=1, answer_seconds=60.0)) as described:
        described.start_seconds = 60.0
        async with described.serving() as server, server.client() as client:
            server.hostd.refusals = 1 << 30
            creating = [asyncio.create_task(client.post("/v1/sandboxes", json=BODY)) for _ in range(3)]
            await until(lambda: 3 == len(server.hostd.sandboxes))
            for name in list(server.hostd.sandboxes):
                server.hostd.change(name, state=HostState.EXITED, exit_code=0)
            assert [202] * 3 == [(await one).status_code for one in creating]


async def test_a_removal_does_not_wait_for_the_turn_of_a_launch() -> None:
    bounds = replace(BOUNDS, launches=1, answer_seconds=0.1)
    async with world(bounds=bounds) as described, described.serving() as server, server.client() as client:
        assert server.server is not None
        creations = server.server.context.creations
        server.hostd.hold["launch"] = asyncio.Event()
        first, second = [(await client.post("/v1/sandboxes", json=BODY)).json()["id"] for _ in range(2)]
        assert 204 == (await client.delete(f"/v1/sandboxes/{second}")).status_code
        server.hostd.hold["launch"].set()
        await until(lambda: not creations.is_making(second))
        assert [first] == list(server.hostd.sandboxes)


async def test_delete_says_what_is_left(server: World) -> None:
    """A residue is an error. The sandbox stays listed, and the reaper completes the removal."""
    async with server.client() as client:
        path = f"/v1/sandboxes/{(await client.post('/v1/sandboxes', json=BODY)).json()['id']}"
        server.hostd.fail["remove"] = wire.RequestError(wire.Code.DOCKER, "no")
        answer = await client.delete(path)
        assert (500, "DOCKER::SANDBOX_DELETE_FAILED") == (answer.status_code, answer.json()["code"])
        del server.hostd.fail["remove"]
        await until(lambda: _none(server))
        assert 404 == (await client.delete(path)).status_code


async def test_expiry(server: World) -> None:
    """At its expiry a sandbox is removed as by DELETE."""
    async with server.client() as client:
        path = f"/v1/sandboxes/{(await client.post('/v1/sandboxes', json={**BODY, 'timeout': 60})).json()['id']}"
        server.offset = 61
        assert 404 == (await client.get(path)).status_code
        assert server.server is not None
        server.server.reaper.wake()
        await until(lambda: _none(server))
    assert ({}, {}) == (server.hostd.sandboxes, server.vaultd.grants)


async def test_an_expiry_while_others_are_looked_at_is_on_time(server: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It expires after the read of expired rows and before the read of the next expiry.

    It is removed without a wake.
    """
    assert server.server is not None
    registry, expired = server.server.registry, server.server.registry.expired
    async with server.client() as client:
        await client.post("/v1/sandboxes", json={**BODY, "timeout": 60})

        async def late(now: float) -> list[Sandbox]:
            over = await expired(now)
            server.offset = 61
            return over

        monkeypatch.setattr(registry, "expired", late)
        server.server.reaper.wake()
        async with asyncio.timeout(reaper.RETRY_MOST / 3):
            await until(lambda: _none(server))
    assert ({}, {}) == (server.hostd.sandboxes, server.vaultd.grants)


async def test_a_removal_that_hangs_holds_up_no_expiry(server: World) -> None:
    """hostd does not answer one removal. Another sandbox is removed at its expiry nevertheless."""
    async with server.client() as client:
        first = (await client.post("/v1/sandboxes", json={**BODY, "timeout": 60})).json()["id"]
        second = (await client.post("/v1/sandboxes", json={**BODY, "timeout": 120})).json()["id"]
        server.hostd.slow[first] = asyncio.Event()
        assert server.server is not None
        server.offset = 61
        server.server.reaper.wake()
        await until(lambda: first in [call["sandbox"] for call in server.hostd.named("remove")])
        server.offset = 121
        server.server.reaper.wake()
        await until(lambda: second not in server.hostd.sandboxes)
        assert first in server.hostd.sandboxes
        server.hostd.slow[first].set()
        await until(lambda: _none(server))


async def test_many_removals_are_a_few_at_a_time(server: World) -> None:
    """All expire together and all are removed. hostd gets at most four removals at a time."""
    async with server.client() as client:
        made = [(await client.post("/v1/sandboxes", json={**BODY, "timeout": 60})).json()["id"] for _ in range(9)]
        server.hostd.slow = {name: asyncio.Event() for name in made}
        assert server.server is not None
        server.offset = 61
        server.server.reaper.wake()
        for ended, asked in enumerate((4, 5, 6, 7, 8, 9, 9, 9, 9)):
            await until(lambda least=asked: len(server.hostd.named("remove")) >= least)
            await asyncio.sleep(0.05)  # for an additional removal, which must not come
            names = [parameters["sandbox"] for parameters in server.hostd.named("remove")]
            assert asked == len(names)
            server.hostd.slow[names[ended]].set()
        await until(lambda: _none(server))


async def test_restart() -> None:
    """Sandboxes, metadata and renewals survive. Expired sandboxes, and hostd's without a row, are removed."""
    async with world() as described:
        async with described.serving() as server, server.client() as client:
            keep = (await client.post("/v1/sandboxes", json={**BODY, "timeout": 3600})).json()["id"]
            await client.patch(f"/v1/sandboxes/{keep}/metadata", json={"a": "b"})
            short = (await client.post("/v1/sandboxes", json={**BODY, "timeout": 60})).json()["id"]
            lost = (await client.post("/v1/sandboxes", json=BODY)).json()["id"]
        del described.hostd.sandboxes[lost]
        described.hostd.sandboxes["sbx-stranger"] = HostSandboxState("sbx-stranger", HostState.RUNNING)
        described.offset = 120
        async with described.serving() as server, server.client() as client:
            await until(lambda: {keep} == set(described.hostd.sandboxes))
            assert {"a": "b"} == (await client.get(f"/v1/sandboxes/{keep}")).json()["metadata"]
            assert 404 == (await client.get(f"/v1/sandboxes/{short}")).status_code
            status = (await client.get(f"/v1/sandboxes/{lost}")).json()["status"]
            assert ("Failed", "CONTAINER_LOST") == (status["state"], status["reason"])
            assert 200 == (await client.get(f"/v1/sandboxes/{keep}/proxy/80/x")).status_code


async def test_an_ended_entrypoint_is_shown(server: World) -> None:
    """Exit 0 is Terminated, any other exit is Failed; at the memory limit the reason is OOM."""
    assert server.server is not None
    async with server.client() as client:
        for exit_code, oom, expected in (
            (0, False, ("Terminated", "CONTAINER_EXITED")),
            (0, True, ("Terminated", "CONTAINER_EXITED")),  # a child process was killed there
            (3, False, ("Failed", "CONTAINER_EXITED_ERROR")),
            (137, True, ("Failed", "OOM")),
        ):
            name = (await client.post("/v1/sandboxes", json=BODY)).json()["id"]
            server.hostd.change(name, state=HostState.EXITED, exit_code=exit_code, oom=oom)
            await server.server.observer.observe()
            status = (await client.get(f"/v1/sandboxes/{name}")).json()["status"]
            assert expected == (status["state"], status["reason"])
        server.hostd.change(name, oom=False)  # Docker has forgotten the event
        await server.server.observer.observe()
        assert status == (await client.get(f"/v1/sandboxes/{name}")).json()["status"]


async def test_creations_are_bounded() -> None:
    """Above the limit a caller gets an answer to try again. The requests that fill it continue."""
    async with world(bounds=replace(BOUNDS, pending=1, answer_seconds=0.1)) as described, described.serving() as server:
        server.hostd.hold["launch"] = asyncio.Event()
        async with server.client() as client:
            assert 202 == (await client.post("/v1/sandboxes", json=BODY)).status_code
            assert 429 == (await client.post("/v1/sandboxes", json=BODY)).status_code
        server.hostd.hold["launch"].set()


@pytest.mark.parametrize(
    "bounds", [replace(BOUNDS, pending=2, answer_seconds=0.1), replace(BOUNDS, sandboxes=2, answer_seconds=0.1)]
)
async def test_creations_that_come_together_are_bounded(bounds: CreationBounds) -> None:
    async with world(bounds=bounds) as described, described.serving() as server:
        server.hostd.hold["launch"] = asyncio.Event()
        async with server.client() as client:
            answers = await asyncio.gather(*(client.post("/v1/sandboxes", json=BODY) for _ in range(10)))
        server.hostd.hold["launch"].set()

    statuses = [answer.status_code for answer in answers]
    assert {202, 429} == set(statuses)
    assert statuses.count(202) <= 2


async def test_concurrent_metadata_patches_are_atomic(server: World) -> None:
    """All of many concurrent patches are in the result."""
    async with server.client() as client:
        path = f"/v1/sandboxes/{(await client.post('/v1/sandboxes', json=BODY)).json()['id']}"
        await asyncio.gather(*(client.patch(f"{path}/metadata", json={f"k{i}": "v"}) for i in range(20)))
        assert 20 == len((await client.get(path)).json()["metadata"])


async def test_a_sandbox_that_hostd_lost_while_we_ran_is_failed() -> None:
    """hostd was killed and could not adopt it. A sandbox that hostd still has stays Running."""
    async with world() as described, described.serving() as server, server.client() as client:
        keep, lost = [(await client.post("/v1/sandboxes", json=BODY)).json()["id"] for _ in range(2)]
        assert server.server is not None
        del server.hostd.sandboxes[lost]
        await server.server.observer.observe()
        status = (await client.get(f"/v1/sandboxes/{lost}")).json()["status"]
        assert ("Failed", "CONTAINER_LOST") == (status["state"], status["reason"])
        assert "Running" == (await client.get(f"/v1/sandboxes/{keep}")).json()["status"]["state"]
        assert 204 == (await client.delete(f"/v1/sandboxes/{lost}")).status_code


async def test_a_gateway_with_another_policy_is_given_the_registrys() -> None:
    """hostd was killed between the gateway's confirmation and the server's write. The registry's policy wins."""
    async with world() as described, described.serving() as server, server.client() as client:
        name = (await client.post("/v1/sandboxes", json=BODY)).json()["id"]
        assert server.server is not None
        ours = server.hostd.policies[name]
        server.hostd.change(name, policy=ours["digest"])
        await server.server.observer.observe()
        calls = len(server.hostd.named("configure"))

        server.hostd.change(name, policy="0" * 64)
        server.hostd.policies[name] = {}
        await server.server.observer.observe()

        assert ours == server.hostd.policies[name]
        assert calls + 1 == len(server.hostd.named("configure"))


async def test_after_a_restart_every_gateway_and_every_vault_is_as_the_registry_says() -> None:
    """A former process was killed during a change. The grants that it added are removed."""
    async with world() as described:
        async with described.serving() as server, server.client() as client:
            name = (await client.post("/v1/sandboxes", json=BODY)).json()["id"]
        ours, granted = described.hostd.policies[name], described.vaultd.grants[name]
        described.hostd.policies[name] = {}
        described.vaultd.grants[name] = [Grant.make("s", "x.example", 443, "https")]
        described.vaultd.inline[name] = {"left": "over"}
        async with described.serving() as server, server.client() as client:
            assert server.server is not None
            await server.server.observer.observe()
            assert ours == described.hostd.policies[name]
            assert (granted, {}) == (described.vaultd.grants[name], described.vaultd.inline[name])
