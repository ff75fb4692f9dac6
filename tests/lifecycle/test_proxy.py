"""The server proxy: bytes of path and query, header rules in both directions, streaming, WebSocket, limits."""

import asyncio
from typing import Any

import pytest
from standins import IMAGE, KEY, Seen, World, world
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

BODY: dict[str, Any] = {"image": {"uri": IMAGE}, "entrypoint": ["sleep", "1"], "resourceLimits": {}}


@pytest.fixture
async def route(server: World) -> str:
    """Return the proxy route of a new sandbox."""
    async with server.client() as client:
        made = await client.post("/v1/sandboxes", json=BODY)
    return f"/v1/sandboxes/{made.json()['id']}/proxy"


def last(server: World) -> Seen:
    seen: Seen = server.hostd.program.seen[-1]  # type: ignore[attr-defined]
    return seen


async def raw(server: World, target: str, *lines: str) -> bytes:
    """Send a request line exactly as given; return the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = "\r\n".join([f"GET {target} HTTP/1.1", f"Host: {server.domain}", "Connection: close", *lines])
    writer.write(f"{head}\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


@pytest.mark.parametrize(
    "tail",
    ["/a%2Fb/%3F?x=%26&y=a+b&&z", "/a//b/./c?", "/%C3%A4?q=%00", "", "?only=query", "/..%2f..%2fetc"],
)
async def test_path_and_query_arrive_byte_for_byte(server: World, route: str, tail: str) -> None:
    """Nothing is decoded, normalised or re-encoded on the way."""
    await raw(server, f"{route}/8000{tail}")
    path, _, query = tail.partition("?")
    assert (path.encode() or b"/", query.encode()) == (last(server).raw_path, last(server).query)
    assert 8000 == server.hostd.ports[-1]


async def test_request_headers(server: World, route: str) -> None:
    """The server removes its own credentials, forwards the application's, and sets the source address itself."""
    ours = {
        "OPEN-SANDBOX-API-KEY": KEY,
        "OPENSANDBOX-EGRESS-AUTH": "token",
        "OpenSandbox-Secure-Access": "token",
        "OPEN-SANDBOX-CLIENT-IP": "10.0.0.1",
        "X-EXECD-ACCESS-TOKEN": KEY,
        "X-Any": f"Bearer {KEY}",
        "Forwarded": "for=1.2.3.4",
        "X-Forwarded-For": "1.2.3.4",
        "X-Real-IP": "1.2.3.4",
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "1",
        "TE": "trailers",
        "OpenSandbox-Access-Renew": "skip",
    }
    kept = {"Authorization": "Bearer app-token", "Cookie": "session=app", "X-Custom": "1"}
    async with server.client(None) as client:
        await client.get(f"{route}/44772/x", headers={**ours, **kept, "X-Request-ID": "rid"})
    seen = last(server)
    for name in ours:
        if not name.startswith("X-Forwarded") and name != "Connection":
            assert [] == seen.header(name.lower()), name
    for name, value in kept.items():
        assert [value] == seen.header(name.lower())
    assert ["127.0.0.1"] == seen.header("x-forwarded-for")
    assert [server.domain] == seen.header("x-forwarded-host")
    assert ["rid"] == seen.header("x-request-id")
    assert ["localhost:44772"] == seen.header("host")


async def test_the_execd_token_goes_to_execd_only(server: World, route: str) -> None:
    """Port 44772 receives it, a user's port does not."""
    async with server.client(None) as client:
        for port, arrived in ((44772, ["t"]), (8000, [])):
            await client.get(f"{route}/{port}/x", headers={"X-EXECD-ACCESS-TOKEN": "t"})
            assert arrived == last(server).header("x-execd-access-token")


async def test_response_headers(server: World, route: str) -> None:
    """Repeated fields stay, Server is removed, a rooted Location stays below the route, pages get their own origin."""
    async with server.client(None) as client:
        answer = await client.get(f"{route}/8000/moved")
    assert (302, f"{route}/8000/there?x=1") == (answer.status_code, answer.headers["location"])
    own = f"; Path={route}/8000/"
    assert [f"a=1{own}", f"b=2{own}"] == answer.headers.get_list("set-cookie")
    assert "server" not in answer.headers
    assert 1 == len(answer.headers.get_list("date"))
    assert answer.headers["content-security-policy"].startswith("sandbox ")
    assert "allow-same-origin" not in answer.headers["content-security-policy"]
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"])
async def test_methods_and_bodies(server: World, route: str, method: str) -> None:
    """Each method arrives; a chunked body arrives completely and in order."""

    async def chunks() -> Any:
        for _ in range(100):
            yield b"x" * 10_000

    has_body = method in ("POST", "PUT", "PATCH", "DELETE")
    async with server.client(None) as client:
        answer = await client.request(method, f"{route}/8000/x", content=chunks() if has_body else None)
    assert 200 == answer.status_code
    assert (method, 1_000_000 if has_body else 0) == (last(server).method, len(last(server).body))


async def test_answers_stream_and_idle_ones_are_not_cut(server: World, route: str) -> None:
    """The first event arrives before the second one is written."""
    async with server.client(None) as client, client.stream("GET", f"{route}/8000/wait") as answer:
        parts = answer.aiter_raw()
        assert b"first" == await anext(parts)
        server.hostd.program.release.set()  # type: ignore[attr-defined]
        assert b"second" == await anext(parts)


async def test_a_client_that_leaves_ends_the_request_inside(server: World, route: str) -> None:
    """The program in the sandbox is notified that its client has disconnected."""
    async with server.client(None) as client, client.stream("GET", f"{route}/8000/wait") as answer:
        parts = answer.aiter_raw()
        assert b"first" == await anext(parts)
    await parts.aclose()
    async with asyncio.timeout(60):
        await server.hostd.program.cut.wait()  # type: ignore[attr-defined]


async def test_nothing_listens(server: World, route: str) -> None:
    """The answer is 502 with its code for a port without a server, and 404 for a removed sandbox."""
    async with server.client() as client:
        answer = await client.get(f"{route}/9/x")
        assert (502, "BACKEND_CONNECTION_FAILED") == (answer.status_code, answer.json()["code"])
        await client.delete(route.removesuffix("/proxy"))
        assert 404 == (await client.get(f"{route}/8000/x")).status_code


async def test_execd_is_waited_for_after_a_start_and_nothing_else_is(server: World, route: str) -> None:
    """The first call after a create does not fail if execd needs some more milliseconds."""
    async with server.client() as client:
        server.hostd.refusals = 3
        assert 200 == (await client.get(f"{route}/44772/x")).status_code
        assert 0 == server.hostd.refusals
        server.hostd.refusals = 1
        assert 502 == (await client.get(f"{route}/8000/x")).status_code
        server.offset = 60
        assert server.server is not None
        server.server.edge.proxy.close()  # closes the connection of the first call
        server.hostd.refusals = 1
        assert 502 == (await client.get(f"{route}/44772/x")).status_code


async def test_connections_are_counted_per_sandbox() -> None:
    """Requests to a sandbox at its limit are refused. Requests to another one are not."""
    async with world(proxy_connections=1) as described, described.serving() as server, server.client() as client:
        first, second = [
            f"/v1/sandboxes/{(await client.post('/v1/sandboxes', json=BODY)).json()['id']}/proxy/8000" for _ in "ab"
        ]
        async with client.stream("GET", f"{first}/wait") as answer:
            parts = answer.aiter_raw()
            assert b"first" == await anext(parts)
            over = await client.get(f"{first}/x")
            assert (503, "SANDBOX::TOO_MANY_CONNECTIONS") == (over.status_code, over.json()["code"])
            assert 200 == (await client.get(f"{second}/x")).status_code
            server.hostd.program.release.set()  # type: ignore[attr-defined]


async def test_secure_access(server: World) -> None:
    """A secured sandbox requires its token of every caller on every port."""
    async with server.client() as client:
        name = (await client.post("/v1/sandboxes", json={**BODY, "secureAccess": True})).json()["id"]
        headers = (await client.get(f"/v1/sandboxes/{name}/endpoints/8000")).json()["headers"]
        path = f"/v1/sandboxes/{name}/proxy/8000/x"
        refused = await client.get(path)
        assert (401, "MISSING_OR_INVALID_SECURE_ACCESS") == (refused.status_code, refused.json()["code"])
        assert 401 == (await client.get(path, headers={"OpenSandbox-Secure-Access": "x"})).status_code
        assert 200 == (await client.get(path, headers=headers)).status_code


async def test_websocket(server: World, route: str) -> None:
    """Text, bytes, subprotocol, raw path and close code arrive. The API key does not."""
    uri = f"ws://{server.domain}{route}/8000/ws%2Fx?q=%26"
    async with connect(
        uri, subprotocols=["one"], additional_headers={"OPEN-SANDBOX-API-KEY": KEY, "Cookie": "a=b"}, proxy=None
    ) as socket:
        assert "one" == socket.subprotocol
        await socket.send("hello")
        assert "hello" == await socket.recv()
        await socket.send(b"\x00\x01")
        assert b"\x00\x01" == await socket.recv()
        await socket.send("bye")
        with pytest.raises(ConnectionClosed) as caught:
            await socket.recv()
    assert caught.value.rcvd is not None
    assert 4321 == caught.value.rcvd.code
    seen = last(server)
    assert (b"/ws%2Fx", b"q=%26") == (seen.raw_path, seen.query)
    assert ([], ["a=b"]) == (seen.header("open-sandbox-api-key"), seen.header("cookie"))


@pytest.mark.parametrize(("path", "code"), [("8000/refuse", 1008), ("9/x", 1011), ("18080/policy", 1008)])
async def test_websocket_refusals(server: World, route: str, path: str, code: int) -> None:
    """A refused handshake closes with 1008, an unreachable port with 1011."""
    async with connect(f"ws://{server.domain}{route}/{path}", proxy=None) as socket:
        with pytest.raises(ConnectionClosed) as caught:
            await socket.recv()
    assert caught.value.rcvd is not None
    assert code == caught.value.rcvd.code


async def test_renew_on_access() -> None:
    """An access extends the expiry of a sandbox that requested this, except with `skip`, within the interval, or while
    it is paused.
    """
    async with world(renew_interval=60.0) as described, described.serving() as server, server.client() as client:
        body = {**BODY, "timeout": 60, "extensions": {"access.renew.extend.seconds": "300"}}
        name = (await client.post("/v1/sandboxes", json=body)).json()["id"]

        async def expiry() -> str:
            return str((await client.get(f"/v1/sandboxes/{name}")).json()["expiresAt"])

        before = await expiry()
        assert 202 == (await client.post(f"/v1/sandboxes/{name}/pause")).status_code
        assert 409 == (await client.get(f"/v1/sandboxes/{name}/proxy/80/x")).status_code
        assert before == await expiry()
        assert 202 == (await client.post(f"/v1/sandboxes/{name}/resume")).status_code
        await client.get(f"/v1/sandboxes/{name}/proxy/80/x", headers={"OpenSandbox-Access-Renew": "skip"})
        assert before == await expiry()
        await client.get(f"/v1/sandboxes/{name}/proxy/80/x")
        moved = await expiry()
        assert before < moved
        await client.get(f"/v1/sandboxes/{name}/proxy/80/x")
        assert moved == await expiry()


async def test_the_proxy_needs_no_key(server: World, route: str) -> None:
    """The ports' own tokens protect it."""
    async with server.client(None) as client:
        assert b"pong:" == (await client.get(f"{route}/8000/x")).content
