"""WebSockets to a host that is sent a secret, between the client and the server of the package `websockets`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidStatus

from policy.decision import AllowRequest, Deny
from policy.facts import Scheme
from tests.gateway.mitm.conftest import SECRET, Lab, Rig

STARS = "*" * len(SECRET)
SECONDS = 20.0


@asynccontextmanager
async def socket(
    lab: Lab, handler: Callable[[ServerConnection], Awaitable[None]]
) -> AsyncIterator[tuple[Rig, Callable[[], Awaitable[ClientConnection]]]]:
    """Yield a rig whose server runs `handler`, and a function that connects a client to it."""
    context = lab.tls(lab.upstream_root.leaf("good.test"))
    async with lab.running(context) as rig, serve(handler, "127.0.0.1", 0, ssl=context) as server:
        rig.dial_port = next(iter(server.sockets)).getsockname()[1]

        async def open_one() -> ClientConnection:
            return await connect(
                "wss://good.test/v1/live",
                host="127.0.0.1",
                port=rig.port,
                ssl=rig.client_context("http/1.1"),
                server_hostname="good.test",
                open_timeout=SECONDS,
                ping_interval=None,
            )

        async with asyncio.timeout(SECONDS):
            yield rig, open_one


async def echo(server: ServerConnection) -> None:
    async for message in server:
        await server.send(message)


async def test_the_handshake_carries_the_secret_and_no_message_shows_it(lab: Lab) -> None:
    asked: list[tuple[str | None, str | None]] = []

    async def show(server: ServerConnection) -> None:
        assert server.request is not None
        headers = server.request.headers
        asked.append((headers.get("Authorization"), headers.get("Sec-WebSocket-Extensions")))
        secret = headers["Authorization"].removeprefix("Bearer ")
        await server.send(f"text {secret} end")
        await server.send(b"binary " + secret.encode())
        await server.send([secret[:1], secret[1:9], secret[9:] + " in fragments"])
        await server.send(f"«{secret}» «{secret.encode().hex()}»")
        await server.ping(secret)
        await server.close(1008, f"no {secret}")

    async with socket(lab, show) as (rig, open_one):
        client = await open_one()
        got: list[str | bytes] = []
        with pytest.raises(ConnectionClosed):
            while True:
                got.append(await client.recv())
    assert [(f"Bearer {SECRET}", None)] == asked
    hidden = "*" * len(SECRET.encode().hex())
    assert [f"text {STARS} end", b"binary " + STARS.encode(), f"{STARS} in fragments", f"«{STARS}» «{hidden}»"] == got
    assert (1008, f"no {STARS}") == (client.close_code, client.close_reason)
    uses = [fields["path"] for kind, _, fields in rig.audit.records if kind == "secret.use"]
    assert ["/v1/live"] == uses
    ends = [fields for _, decision, fields in rig.audit.records if decision == "info" and fields.get("websocket")]
    assert [(101, "the server ended it")] == [(one["status"], one["reason"]) for one in ends]
    assert 0 < ends[0]["bytes_down"]  # type: ignore[operator]


async def test_each_message_arrives_without_a_later_one(lab: Lab) -> None:
    async with socket(lab, echo) as (_, open_one), await open_one() as client:
        for message in ("", "a", SECRET[:3], "«»", "x" * 200_000, b"\0\xff" * 40_000):
            await client.send(message)
            assert message == await client.recv()
        await (await client.ping())


async def test_many_messages_each_way_at_once(lab: Lab) -> None:
    sent = [f"{number} {SECRET if number % 100 == 0 else ''}" for number in range(5000)]

    async with socket(lab, echo) as (_, open_one), await open_one() as client:

        async def send() -> None:
            for one in sent:
                await client.send(one)

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            got = [await client.recv() for _ in sent]
    assert [one.replace(SECRET, STARS) for one in sent] == got


@pytest.mark.parametrize("change", ["revocation", "revocation of another secret", "policy", "another secret"])
async def test_a_change_ends_an_open_websocket(lab: Lab, change: str) -> None:
    async with socket(lab, echo) as (rig, open_one), await open_one() as client:
        await client.send("before")
        assert "before" == await client.recv()
        match change:
            case "revocation":
                assert 1 == rig.engine.revoke(frozenset({"api-token"}))
            case "revocation of another secret":  # the control
                assert 0 == rig.engine.revoke(frozenset({"other"}))
                assert 0 == rig.engine.recheck()
                await client.send("after")
                assert "after" == await client.recv()
                return
            case "policy":
                rig.decide, rig.bound = lambda _facts: Deny("new", "closed"), True
                assert 1 == rig.engine.recheck()
            case "another secret":
                former = rig.plan
                rig.plan = type(former)("other", "other-token", former.kind, "Authorization")
                rig.decide, rig.bound = lambda _facts: AllowRequest("api", (former,)), True
                assert 1 == rig.engine.recheck()
        with pytest.raises(ConnectionClosed):
            await client.recv()
    ends = [
        fields["reason"] for _, decision, fields in rig.audit.records if decision == "info" and fields.get("websocket")
    ]
    assert ["the flow was aborted"] == ends


@pytest.mark.parametrize(
    ("frames", "shown"),
    [
        (b"\x81\x02ok\xc1\x02no", "ok"),  # RSV1: compressed
        (b"\x81\x02ok\x81\x82abcd\0\0", "ok"),  # masked
        (b"\x81\x02ok\x83\x00", "ok"),
        (b"\x81\x02ok\x89\x7e\x00\x7e", "ok"),
    ],
)
async def test_malformed_frames_of_a_server_end_the_flow(lab: Lab, frames: bytes, shown: str) -> None:
    async def reply(server: ServerConnection) -> None:
        server.transport.write(frames)
        await server.wait_closed()

    async with socket(lab, reply) as (rig, open_one):
        client = await open_one()
        got = []
        with pytest.raises(ConnectionClosed):
            while True:
                got.append(await client.recv())
        assert got in ([], [shown])
        assert 1006 == client.close_code
    assert ["scrub"] == [
        fields["rule"] for kind, decision, fields in rig.audit.records if (kind, decision) == ("request", "deny")
    ]


async def test_bytes_of_a_client_that_are_no_frames_do_not_arrive(lab: Lab) -> None:
    async with socket(lab, echo) as (rig, open_one):
        client = await open_one()
        client.transport.write(b"GET /admin HTTP/1.1\r\nHost: good.test\r\n\r\n")
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert 1006 == client.close_code  # a server that got them would have answered with a close frame
    assert ["protocol"] == [
        fields["rule"] for kind, decision, fields in rig.audit.records if (kind, decision) == ("request", "deny")
    ]


async def test_a_refused_handshake_is_an_ordinary_response(lab: Lab) -> None:
    async def refuse(_head: bytes, _body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 401 No\r\nContent-Length: 18\r\n\r\n" + SECRET.encode())

    async with socket(lab, echo) as (rig, open_one):
        own = await asyncio.start_server(
            rig.upstream.serve, "127.0.0.1", 0, ssl=lab.tls(lab.upstream_root.leaf("good.test"))
        )
        rig.upstream.reply = refuse
        rig.dial_port = own.sockets[0].getsockname()[1]
        with pytest.raises(InvalidStatus) as refused:
            await open_one()
        own.close()
    assert (401, STARS.encode()) == (refused.value.response.status_code, refused.value.response.body)


async def test_a_websocket_over_plain_http_carries_no_secret(lab: Lab) -> None:
    async with lab.running(None, scheme=Scheme.HTTP) as rig, serve(echo, "127.0.0.1", 0) as server:
        rig.dial_port = next(iter(server.sockets)).getsockname()[1]
        rig.decide, rig.bound = lambda _facts: AllowRequest("open"), False
        async with connect("ws://good.test/open", host="127.0.0.1", port=rig.port) as client:
            await client.send("hello")
            assert "hello" == await client.recv()
