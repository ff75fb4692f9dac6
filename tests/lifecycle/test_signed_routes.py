"""Signed routes: what they open, for how long, and that a route is not visible to anyone but its caller."""

import asyncio
import base64
import hashlib
import hmac
import logging
import math
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest
from standins import IMAGE, KEY, Seen, World, world
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

import wire
from lifecycle.api.auth import Caller, Refusals
from lifecycle.api.credentials import RouteKeys
from lifecycle.api.errors import ApiError
from lifecycle.proxy import signed

BODY: dict[str, Any] = {"image": {"uri": IMAGE}, "entrypoint": ["sleep", "1"], "resourceLimits": {}}
SECURED = {**BODY, "secureAccess": True}
HOUR = 3600
WIRE_TAIL = "/a%2Fb/%3F//c/./..?x=%26&y=a+b&&z"


def last(server: World) -> Seen:
    seen: Seen = server.hostd.program.seen[-1]  # type: ignore[attr-defined]
    return seen


def expiry(seconds: float = HOUR) -> int:
    return math.ceil(time.time() + seconds)


async def create(server: World, **changes: Any) -> str:
    async with server.client() as client:
        return str((await client.post("/v1/sandboxes", json={**SECURED, **changes})).json()["id"])


async def endpoint(server: World, name: str, port: int = 8000, until: int | None = None) -> dict[str, Any]:
    """Return the signed endpoint of a port."""
    until = expiry() if until is None else until
    async with server.client() as client:
        answer = await client.get(f"/v1/sandboxes/{name}/endpoints/{port}?expires={until}")
    assert 200 == answer.status_code, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def route(server: World, name: str, port: int = 8000, until: int | None = None) -> str:
    """Return the path of the signed route to a port."""
    return str((await endpoint(server, name, port, until))["endpoint"]).removeprefix(server.domain)


async def raw(server: World, method: str, target: str, *lines: str) -> bytes:
    """Send a head exactly as given; return the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = "\r\n".join([f"{method} {target} HTTP/1.1", f"Host: {server.domain}", "Connection: close", *lines])
    writer.write(f"{head}\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def closed(url: str, **headers: str) -> int:
    """Open a WebSocket and return the code with which it is closed."""
    async with connect(url, additional_headers=headers, proxy=None, logger=logging.Logger("x")) as socket:
        with pytest.raises(ConnectionClosed) as caught:
            await socket.recv()
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code


async def test_the_endpoint_is_the_route_and_nothing_else(server: World) -> None:
    """It has the caller's Host and mount prefix, and no token of a user's port. The tokens of 44772 and 18080 stay."""
    name, until = await create(server), expiry()
    found = await endpoint(server, name, until=until)
    host, *parts = found["endpoint"].split("/")
    assert [server.domain, "v1", "signed", name, "8000"] == [host, *parts[:4]]
    assert (until, 44, "a") == (int(parts[4], 36), len(parts[5]), parts[5][-1])
    assert {"endpoint"} == set(found)
    assert {"X-EXECD-ACCESS-TOKEN": server.tokens.execd(name)} == (await endpoint(server, name, 44772))["headers"]
    assert {"OPENSANDBOX-EGRESS-AUTH": server.tokens.egress(name)} == (await endpoint(server, name, 18080))["headers"]
    async with server.client() as client:
        plain = await client.get(f"/sandboxes/{name}/endpoints/80?expires={until}")
        assert plain.json()["endpoint"].startswith(f"{server.domain}/signed/{name}/80/")
        plain = await client.get(f"/sandboxes/{name}/endpoints/80?expires={until}&use_server_proxy=false")
        assert 200 == plain.status_code


async def test_a_route_is_in_the_log_before_its_caller_has_it(server: World) -> None:
    """Without the log there is no route. The record has no part of the signature."""
    name, until = await create(server), expiry()
    made = await route(server, name, until=until)
    record = server.auditd.records[-1]
    assert ("lifecycle.signed_route", name, 8000, until) == tuple(
        record[key] for key in ("kind", "sandbox", "port", "expires")
    )
    assert made.rpartition("/")[2] not in repr(server.auditd.records)
    server.auditd.fail["record"] = wire.RequestError(wire.Code.UNAVAILABLE, "no")
    async with server.client() as client:
        answer = await client.get(f"/v1/sandboxes/{name}/endpoints/8000?expires={until}")
    assert (503, "AUDIT::UNAVAILABLE") == (answer.status_code, answer.json()["code"])


@pytest.mark.parametrize(
    "expires",
    [
        "0",
        "1",
        "{now}",
        "",
        "x",
        "-1",
        "1.5",
        "1e12",
        "+9999999999",
        "0x7fffffffffffffff",
        "\uff19" * 10,
        f"{1 << 64}",
        "9" * 64,
    ],
)
async def test_an_expiry_that_is_none_is_refused(server: World, expires: str) -> None:
    """Past, of no number, or of more than 64 bits."""
    name = await create(server)
    async with server.client() as client:
        params = {"expires": expires.format(now=int(time.time()))}
        answer = await client.get(f"/v1/sandboxes/{name}/endpoints/8000", params=params)
    assert (400, "SANDBOX::INVALID_PARAMETER") == (answer.status_code, answer.json()["code"])


async def test_the_latest_expiry_is_accepted(server: World) -> None:
    name = await create(server)
    made = await route(server, name, until=(1 << 64) - 1)
    assert "3w5e11264sgsf" == made.split("/")[5]
    async with server.client(None) as client:
        assert 200 == (await client.get(f"{made}/x")).status_code


async def test_a_route_excludes_the_server_proxy(server: World) -> None:
    """The SDK asks for both if it is set to use the server proxy."""
    name = await create(server)
    async with server.client() as client:
        answer = await client.get(f"/v1/sandboxes/{name}/endpoints/80?use_server_proxy=true&expires={expiry()}")
        assert (400, "SANDBOX::INVALID_PARAMETER") == (answer.status_code, answer.json()["code"])
        assert 404 == (await client.get(f"/v1/sandboxes/sbx-unknown/endpoints/80?expires={expiry()}")).status_code


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"])
async def test_secure_access_on_each_method(server: World, method: str) -> None:
    """Without the token, with a wrong one or another sandbox's: 401. With the token or by a signed route: the program's
    answer.
    """
    name, other = await create(server), await create(server)
    path, by_signature = f"/v1/sandboxes/{name}/proxy/8000/x", await route(server, name)
    async with server.client(None) as client:
        seen = len(server.hostd.program.seen)  # type: ignore[attr-defined]
        for token in (None, "", "x", server.tokens.secure(other), server.tokens.secure(name)[:-1]):
            headers = {} if token is None else {"OpenSandbox-Secure-Access": token}
            answer = await client.request(method, path, headers=headers)
            assert 401 == answer.status_code
        assert seen == len(server.hostd.program.seen)  # type: ignore[attr-defined]
        for asked, token in ((path, server.tokens.secure(name)), (f"{by_signature}/x", "")):
            answer = await client.request(method, asked, headers={"OpenSandbox-Secure-Access": token})
            assert (200, method) == (answer.status_code, last(server).method)
            assert [] == last(server).header("opensandbox-secure-access")


async def test_secure_access_of_websockets(server: World) -> None:
    name, other = await create(server), await create(server)
    url = f"ws://{server.domain}/v1/sandboxes/{name}/proxy/8000/ws"
    for token in ("", "x", server.tokens.secure(other)):
        assert 1008 == await closed(url, **{"OpenSandbox-Secure-Access": token})
    by_signature = f"ws://{server.domain}{await route(server, name)}/ws"
    for asked, token in ((url, server.tokens.secure(name)), (by_signature, "x")):
        headers = {"OpenSandbox-Secure-Access": token}
        async with connect(asked, additional_headers=headers, proxy=None) as socket:
            await socket.send("hello")
            assert "hello" == await socket.recv()
            await socket.send(b"\x00\x01")
            assert b"\x00\x01" == await socket.recv()


async def test_path_query_and_repeated_headers_arrive_as_on_the_proxy(server: World) -> None:
    made = await route(server, await create(server))
    await raw(server, "GET", made + WIRE_TAIL, "X-Twice: a", "X-Twice: b")
    path, _, query = WIRE_TAIL.partition("?")
    assert (path.encode(), query.encode()) == (last(server).raw_path, last(server).query)
    assert ["a", "b"] == last(server).header("x-twice")
    await raw(server, "GET", made)
    assert b"/" == last(server).raw_path


async def test_a_route_can_be_used_without_a_body_limit_and_streams(server: World) -> None:
    """A body in chunks arrives; the first event of an answer arrives before the second one is written."""
    made = await route(server, await create(server))

    async def chunks() -> Any:
        for _ in range(100):
            yield b"x" * 10_000

    async with server.client(None) as client:
        assert 200 == (await client.post(f"{made}/x", content=chunks())).status_code
        assert 1_000_000 == len(last(server).body)
        async with client.stream("GET", f"{made}/wait") as answer:
            parts = answer.aiter_raw()
            assert b"first" == await anext(parts)
            server.hostd.program.release.set()  # type: ignore[attr-defined]
            assert b"second" == await anext(parts)


def changed(made: str, other: str) -> dict[str, str]:
    """Return routes that differ from a right one in one place each, by the difference."""
    _, mount, word, name, port, until, signature = made.split("/")

    def path(**parts: str) -> str:
        given = {"name": name, "port": port, "until": until, "signature": signature} | parts
        return "/".join(("", mount, word, *given.values()))

    flipped = ("A" if signature[0] != "A" else "B") + signature[1:]
    later = signed.base36(int(until, 36) + 1)
    return {
        "another sandbox": path(name=other),
        "an unknown sandbox": path(name="sbx-unknown"),
        "no sandbox": path(name="%00"),
        "another port": path(port="8001"),
        "execd": path(port="44772"),
        "a port in another form": path(port="08000"),
        "no port": path(port="x"),
        "a port out of range": path(port="99999"),
        "later": path(until=later),
        "a time in another form": path(until="0" + until),
        "a time in upper case": path(until=until.upper()),
        "no time": path(until="-"),
        "another first character": path(signature=flipped),
        "the other key": path(signature=signature[:-1] + "b"),
        "an unknown key": path(signature=signature[:-1] + "c"),
        "no key": path(signature=signature[:-1]),
        "no signature": path(signature="a"),
        "longer": path(signature=signature + "a"),
        "percent-encoded": path(signature=f"%{ord(signature[0]):02X}" + signature[1:]),
    }


async def test_each_changed_route_gets_the_same_answer(server: World) -> None:
    """Expired, changed, or of another sandbox that exists or not: status, code, text and headers are equal."""
    name, other = await create(server), await create(server)
    made = await route(server, name)
    expired = await route(server, name, until=expiry(60))
    server.offset = 61
    routes = {**changed(made, other), "expired": expired}
    assert server.server is not None
    async with server.client(None) as client:
        answers = {}
        for what, path in routes.items():
            object.__setattr__(server.server.edge, "refusals", Refusals())
            answer = await client.get(f"{path}/x", headers={"X-Request-ID": "1"})
            answers[what] = (answer.status_code, answer.content, sorted(answer.headers.items()))
            assert (401, "MISSING_OR_INVALID_SECURE_ACCESS") == (answer.status_code, answer.json()["code"]), what
            assert 1008 == await closed(f"ws://{server.domain}{path}/ws"), what
        without_date = {repr((status, body)) for status, body, _ in answers.values()}
        assert 1 == len(without_date)
        assert 200 == (await client.get(f"{made}/x")).status_code


async def test_a_wrong_signature_is_counted_and_an_expired_route_is_not(server: World) -> None:
    """A page that polls with an expired route does not lock its user out of a new one."""
    name = await create(server)
    expired = await route(server, name, until=expiry(60))
    server.offset = 61
    made = await route(server, name, until=expiry(HOUR))
    async with server.client(None) as client:
        assert {401} == {(await client.get(f"{expired}/x")).status_code for _ in range(40)}
        assert 200 == (await client.get(f"{made}/x")).status_code
        wrong = made[:-1] + "z"
        assert 429 == [(await client.get(f"{wrong}/x")).status_code for _ in range(25)][-1]
        assert 200 == (await client.get(f"{made}/x")).status_code
        wrong = f"{made[:-2]}{'A' if made[-2] != 'A' else 'B'}a"
        assert 429 == [(await client.get(f"{wrong}/x")).status_code for _ in range(25)][-1]
        assert 429 == (await client.get(f"{made}/x")).status_code


async def test_a_route_ends_with_its_sandbox(server: World) -> None:
    name = await create(server)
    made = await route(server, name)
    async with server.client() as client:
        assert 202 == (await client.post(f"/v1/sandboxes/{name}/pause")).status_code
        assert 409 == (await client.get(f"{made}/x")).status_code
        await client.delete(f"/v1/sandboxes/{name}")
        assert 404 == (await client.get(f"{made}/x")).status_code


async def test_a_route_gives_nobody_execds_or_the_egress_token(server: World) -> None:
    """The signature stands for secure access only."""
    name = await create(server, networkPolicy={})
    execd, egress = await route(server, name, 44772), await route(server, name, 18080)
    async with server.client(None) as client:
        await client.get(f"{execd}/ping")
        assert [] == last(server).header("x-execd-access-token")
        token = server.tokens.execd(name)
        await client.get(f"{execd}/ping", headers={"X-EXECD-ACCESS-TOKEN": token})
        assert [token] == last(server).header("x-execd-access-token")
        assert 401 == (await client.get(f"{egress}/policy")).status_code
        headers = {"OPENSANDBOX-EGRESS-AUTH": server.tokens.egress(name)}
        assert 200 == (await client.get(f"{egress}/policy", headers=headers)).status_code


async def almost_over(server: World, name: str) -> str:
    """Return a route that expires soon. The wait is as short as whole seconds permit."""
    until = math.ceil(time.time()) + 10
    made = await route(server, name, until=until)
    server.offset = until - time.time() - 0.5
    return made


async def test_open_streams_and_websockets_end_at_the_expiry(server: World) -> None:
    """The client sees an incomplete answer or the code 1008, and the program the end of its connection."""
    name = await create(server)
    made = await almost_over(server, name)
    async with asyncio.timeout(60), server.client(None) as client:
        socket = await connect(f"ws://{server.domain}{made}/ws", proxy=None)
        async with client.stream("GET", f"{made}/wait") as answer:
            parts = answer.aiter_raw()
            assert b"first" == await anext(parts)
            with pytest.raises(httpx.RemoteProtocolError):
                await anext(parts)
        await server.hostd.program.cut.wait()  # type: ignore[attr-defined]
        with pytest.raises(ConnectionClosed) as caught:
            await socket.recv()
        assert caught.value.rcvd is not None
        assert 1008 == caught.value.rcvd.code
        assert 401 == (await client.get(f"{made}/x")).status_code


async def test_a_request_without_an_answer_at_the_expiry_is_refused(server: World) -> None:
    name = await create(server)
    made = await almost_over(server, name)
    async with asyncio.timeout(60), server.client(None) as client:
        answer = await client.get(f"{made}/never")
    assert (401, "MISSING_OR_INVALID_SECURE_ACCESS") == (answer.status_code, answer.json()["code"])


async def test_keys_rotate(server: World) -> None:
    """A route of a former key is valid while its key is there. After the key's removal it is not."""
    name = await create(server)
    made = await route(server, name)
    server.server = None
    rotated = {"both": RouteKeys("b", dict(server.route_keys.keys)), "new": RouteKeys("b", {"b": b"b" * 32})}
    for which, status in (("both", 200), ("new", 401)):
        again = replace(server, route_keys=rotated[which], port=0)
        async with again.serving(), again.client(None) as client:
            assert status == (await client.get(f"{made}/x")).status_code
            signed_by_b = await route(again, name)
            assert "b" == signed_by_b[-1]
            assert 200 == (await client.get(f"{signed_by_b}/x")).status_code


async def test_the_sandbox_and_other_servers_never_see_a_route(server: World) -> None:
    """Headers that repeat it are removed, on the route itself and on the proxy. A page sends no address elsewhere."""
    name = await create(server)
    made = await route(server, name)
    signature = made.rpartition("/")[2]
    secret = {
        "Referer": f"http://{server.domain}{made}/page?x=1",
        "X-Original-URI": f"{made}/x",
        "X-Escaped": f"%2Fv1%2Fsigned%2F{signature}",
        "Cookie": f"at={signature}",
    }
    token = {"OpenSandbox-Secure-Access": server.tokens.secure(name)}
    async with server.client(None) as client:
        answer = await client.get(f"{made}/moved", headers=secret)
        assert signature not in repr(last(server))
        assert (["no-referrer"], f"{made}/there?x=1") == (
            answer.headers.get_list("referrer-policy"),
            answer.headers["location"],
        )
        assert [f"a=1; Path={made}/", f"b=2; Path={made}/"] == answer.headers.get_list("set-cookie")
        assert answer.headers["content-security-policy"].startswith("sandbox ")
        plain = await client.get(f"/v1/sandboxes/{name}/proxy/8000/x", headers={**token, "Referer": secret["Referer"]})
        assert "referrer-policy" not in plain.headers
        assert [] == last(server).header("referer")
        kept = {"Referer": f"http://{server.domain}/signed/page", "Cookie": "a=b"}
        await client.get(f"{made}/x", headers=kept)
        assert [kept["Referer"], "a=b"] == [*last(server).header("referer"), *last(server).header("cookie")]
    async with connect(f"ws://{server.domain}{made}/ws", additional_headers=secret, proxy=None) as socket:
        await socket.send("hello")
        await socket.recv()
        assert signature not in repr(last(server))


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
async def test_no_log_has_a_route(server: World, level: int, caplog: pytest.LogCaptureFixture) -> None:
    name = await create(server)
    with caplog.at_level(level):
        made = await almost_over(server, name)
        async with server.client(None) as client, client.stream("GET", f"{made}/wait") as answer:
            parts = answer.aiter_raw()
            await anext(parts)
            with pytest.raises(httpx.RemoteProtocolError):
                await anext(parts)
        await closed(f"ws://{server.domain}{made}/ws")
    lines = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert made.rpartition("/")[2] not in "\n".join(lines)


async def test_a_web_page_cannot_use_a_server_without_keys_by_a_signed_route() -> None:
    """The Host must be this server's, as on the proxy."""
    async with world(key_digests=()) as described, described.serving() as server, server.client() as client:
        made = await route(server, await create(server))
        assert 403 == (await client.get(f"{made}/x", headers={"Host": "attacker.example"})).status_code
        assert 200 == (await client.get(f"{made}/x", headers={"Origin": "http://other.example"})).status_code


# -- signatures alone

KEYS = RouteKeys("a", {"a": b"k" * 32, "b": b"l" * 32})


def test_a_signature_is_a_whole_hmac_over_all_parts() -> None:
    """Computed here a second time, by the letter of the documentation."""
    text = b"sallyport signed route 1\nsbx-1\n8000\nt9hzls"
    mac = base64.urlsafe_b64encode(hmac.new(b"k" * 32, text, hashlib.sha256).digest()).decode().rstrip("=")
    until = int("t9hzls", 36)
    assert f"signed/sbx-1/8000/t9hzls/{mac}a" == signed.signed(KEYS, "sbx-1", 8000, until)


@pytest.mark.parametrize(("moment", "right"), [(-1, True), (-0.001, True), (0, False), (1, False)])
def test_a_route_ends_at_its_expiry(moment: float, right: bool) -> None:
    until = 1_767_323_045
    match = signed.ROUTE.fullmatch(f"/{signed.signed(KEYS, 'sbx-1', 80, until)}/x".encode())
    assert match is not None
    caller = Caller.at("192.0.2.1", Refusals())
    if right:
        assert signed.SignedRoute("sbx-1", 80, until) == signed.read(KEYS, match, caller, until + moment)
    else:
        with pytest.raises(ApiError):
            signed.read(KEYS, match, caller, until + moment)


@pytest.mark.parametrize(
    ("active", "keys"),
    [("a", {}), ("a", {"b": b"k" * 32}), ("a", {"a": b"k" * 15}), ("A", {"A": b"k" * 32}), ("ab", {"ab": b"k" * 32})],
)
def test_keys_that_cannot_be_are_refused(active: str, keys: dict[str, bytes]) -> None:
    with pytest.raises(ValueError, match=r"key of signed routes|keys"):
        RouteKeys(active, keys)
    assert "kkk" not in repr(KEYS)


def test_a_key_of_the_api_is_not_needed_or_accepted_in_place_of_a_signature() -> None:
    match = signed.ROUTE.fullmatch(f"/v1/signed/sbx-1/80/zzzzzz/{KEY}".encode())
    assert match is not None
    with pytest.raises(ApiError):
        signed.read(KEYS, match, Caller.at("192.0.2.1", Refusals()), 0)
