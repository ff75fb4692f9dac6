"""Hostile calls, each judged by the answer to the next honest caller."""

import asyncio
import contextlib
import json
import logging
import socket
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from standins import IMAGE, KEY, World, world
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from lifecycle.api import connections, models
from lifecycle.serve import prepare

BODY: dict[str, Any] = {"image": {"uri": IMAGE}, "entrypoint": ["sleep", "1"], "resourceLimits": {}, "timeout": 600}


@pytest.mark.parametrize("moment", ["9999-12-31T23:59:59.999999Z", "9999-12-31T23:59:59-23:59", "2200-01-01T00:00:00Z"])
async def test_an_expiry_that_cannot_be_represented_is_refused(server: World, moment: str) -> None:
    """One sandbox with an expiry past the last date would make the list fail for every caller."""
    async with server.client() as client:
        made = (await client.post("/v1/sandboxes", json=BODY)).json()
        route = f"/v1/sandboxes/{made['id']}"
        answer = await client.post(f"{route}/renew-expiration", json={"expiresAt": moment})
        assert (400, "DOCKER::INVALID_EXPIRATION") == (answer.status_code, answer.json()["code"])
        assert made["expiresAt"] == (await client.get(route)).json()["expiresAt"]
        assert 200 == (await client.get("/v1/sandboxes")).status_code


async def test_an_unforeseen_failure_is_answered_with_a_fixed_message(
    server: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller gets code and message, and the log the type of the failure. Neither contains the failure's text."""

    def fail(*_: object) -> None:
        raise ValueError("a value of somebody's")

    monkeypatch.setattr(models, "shown", fail)
    async with server.client() as client:
        made = (await client.post("/v1/sandboxes", json=BODY)).json()
        with caplog.at_level(logging.INFO):
            answer = await client.get(f"/v1/sandboxes/{made['id']}")
    assert 500 == answer.status_code
    assert {"code": "GENERAL::UNKNOWN_ERROR", "message": "Internal server error."} == json.loads(answer.text)
    assert "ValueError" in caplog.text
    assert "somebody" not in caplog.text


@pytest.mark.parametrize("port", ["18080", "018080", "00018080"])
async def test_the_egress_api_has_one_spelling(port: str) -> None:
    """Without keys a page of another origin can reach a sandbox's ports, but not the egress API on port 18080."""
    async with world(key_digests=()) as described, described.serving() as server, server.client() as client:
        made = (await client.post("/v1/sandboxes", json=BODY)).json()
        page = {"Origin": "http://elsewhere.test"}
        route = f"/v1/sandboxes/{made['id']}/proxy"
        assert 200 == (await client.get(f"{route}/8000/", headers=page)).status_code
        assert (await client.get(f"{route}/{port}/healthz", headers=page)).status_code in (403, 422)


ODD: dict[str, Any] = {**BODY, "egress": 1, "expiresAt": 1, "a": 1}
NO_JSON: dict[str, bytes] = {
    "deep": b"[" * 200_000,
    "deep in a field": b'{"volumes": [' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"]}",
    "a huge number": b'{"timeout": ' + b"9" * 10_000 + b"}",
    "not a number": b'{"timeout": NaN, "eventType": NaN, "expiresAt": NaN, "egress": NaN, "a": NaN}',
    "infinite": b'{"timeout": 1e400, "eventType": 1e400, "expiresAt": 1e400, "egress": 1e400, "a": 1e400}',
    "half a character as a key": b'{"\\ud800": 1, "metadata": {"\\ud800": 1}, "env": {"\\ud800": 1}, "egress": 1}',
    "half a character as an image": json.dumps({**ODD, "image": {"uri": "\ud800"}}).encode(),
    "half a character as a command": json.dumps({**ODD, "entrypoint": ["a", "\ud800"]}).encode(),
    "half a character as a value": json.dumps({**ODD, "env": {"A": "\ud800"}, "expiresAt": "\ud800"}).encode(),
    "half a character as a label": json.dumps({**ODD, "metadata": {"a": "\ud800"}, "a": None, "b": "\ud800"}).encode(),
    "half a character as a target": b'[{"action": "allow", "target": "\\ud800"}]',
    "half a character as a name": b'["\\ud800", 1]',
    "a cut character": b'{"metadata": {"a": "\xff\xfe"}}',
    "another encoding": json.dumps({**ODD, "image": 1}).encode("utf-16"),
    "nothing": b"",
    "null": b"null",
}
BODIES = [
    ("POST", "/sandboxes"),
    ("POST", "/sandboxes/{id}/renew-expiration"),
    ("PATCH", "/sandboxes/{id}/metadata"),
    ("PUT", "/sandboxes/{id}/networkpolicy"),
    ("PATCH", "/sandboxes/{id}/networkpolicy"),
    ("DELETE", "/sandboxes/{id}/networkpolicy"),
    ("POST", "/metrics/events"),
]


async def test_a_body_that_is_none_is_refused_and_changes_nothing(server: World) -> None:
    """On every route: the answer is one of the server's own refusals, and the next caller finds no change."""
    kind = {"content-type": "application/json"}
    async with server.client() as client:
        made = (await client.post("/v1/sandboxes", json={**BODY, "metadata": {"k": "v"}})).json()
        before = await client.get("/v1/sandboxes")
        for case, content in NO_JSON.items():
            for method, path in BODIES:
                route = f"/v1{path.format(id=made['id'])}"
                answer = await client.request(method, route, content=content, headers=kind)
                assert 400 <= answer.status_code < 500, (case, route, answer.text)
                assert {"code", "message"} <= answer.json().keys(), (case, route)
            assert before.json() == (await client.get("/v1/sandboxes")).json(), case


async def test_a_label_that_cannot_be_encoded_is_refused(server: World) -> None:
    """Otherwise each list that contains it would fail."""
    kind = {"content-type": "application/json"}
    async with server.client() as client:
        made = (await client.post("/v1/sandboxes", json=BODY)).json()
        for patch in (b'{"\\ud800": "x"}', b'{"a": "\\ud800"}', b'{"a": "\\u0000"}', b'{"a": "b\\r\\nc: d"}'):
            answer = await client.patch(f"/v1/sandboxes/{made['id']}/metadata", content=patch, headers=kind)
            assert 400 == answer.status_code, (patch, answer.text)
            assert made["id"] == (await client.get("/v1/sandboxes")).json()["items"][0]["id"]


CHUNKED = b"Transfer-Encoding: chunked"
FRAMINGS: dict[str, tuple[bytes, bool]] = {
    "a length and chunks": (b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", True),
    "chunks and a length": (b"Transfer-Encoding: chunked\r\nContent-Length: 40\r\n\r\n0\r\n\r\n", True),
    "two lengths": (b"Content-Length: 0\r\nContent-Length: 34\r\n\r\n", False),
    "a signed length": (b"Content-Length: +0\r\n\r\n", False),
    "a hexadecimal length": (b"Content-Length: 0x0\r\n\r\n", False),
    "no chunks by name": (b"Transfer-Encoding: xchunked\r\n\r\n", False),
    "chunks among others": (b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", False),
    "a blank before the colon": (b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", False),
    "a chunk's size with a sign": (b"Transfer-Encoding: chunked\r\n\r\n+0\r\n\r\n", False),
    "a chunk's size in hexadecimal": (b"Transfer-Encoding: chunked\r\n\r\n0x0\r\n\r\n", False),
    "a name of nothing": (b": x\r\n\r\n", False),
    "a NUL": (b"X: a\0b\r\n\r\n", False),
}


async def test_a_request_is_one_request(server: World) -> None:
    """For any contradictory or malformed length: no second request, smuggled in the body, reaches the sandbox."""
    async with server.client() as client:
        made = (await client.post("/v1/sandboxes", json=BODY)).json()
    route = f"/v1/sandboxes/{made['id']}/proxy/8000"
    program = server.hostd.program  # type: ignore[attr-defined]
    for case, (fields, arrives) in FRAMINGS.items():
        program.seen.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(f"POST {route}/first HTTP/1.1\r\nHost: x\r\n".encode() + fields)
        writer.write(f"GET {route}/second HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answers = await asyncio.wait_for(reader.read(), 15)
        writer.close()
        seen = [item.raw_path for item in program.seen]
        assert ([b"/first", b"/second"] if arrives else []) == seen, (case, answers)
        assert answers.startswith(b"HTTP/1.1 200 " if arrives else b"HTTP/1.1 400 "), (case, answers)


async def test_a_call_that_is_too_large_to_pass_on_is_its_callers_failure(server: World) -> None:
    """hostd has one connection from the server. A call that does not fit must not break other callers' calls."""
    server.hostd.hold["launch"] = asyncio.Event()
    server.hostd.reached["launch"] = asyncio.Event()
    async with server.client() as client:
        honest = asyncio.create_task(client.post("/v1/sandboxes", json=BODY))
        await asyncio.wait_for(server.hostd.reached["launch"].wait(), 10)
        env = {f"A{number}": "\x7f" * 131000 for number in range(7)}
        refused = await client.post("/v1/sandboxes", json={**BODY, "env": env})
        server.hostd.hold["launch"].set()
        made = await honest
        assert (400, "SANDBOX::INVALID_PARAMETER") == (refused.status_code, refused.json()["code"])
        assert 202 == made.status_code, made.text
        listed = (await client.get("/v1/sandboxes")).json()
        assert [(made.json()["id"], "Running")] == [(item["id"], item["status"]["state"]) for item in listed["items"]]


def many_bindings(hosts: int) -> dict[str, Any]:
    """Return a vault whose 256 bindings have no competing hosts, which is known only after all were compared."""
    return {
        "credentials": [{"name": "c", "source": {"type": "inline", "value": "a-value-of-somebody"}}],
        "bindings": [
            {
                "name": f"b{binding}",
                "match": {"hosts": [f"h{binding}-{number}.a.test" for number in range(hosts)]},
                "auth": {"type": "bearer", "credential": "c"},
            }
            for binding in range(256)
        ],
    }


async def test_very_many_bindings_delay_no_other_caller(server: World) -> None:
    """Eight times as many names, as many as fit into a body, take about eight times as long, not 64 times.

    A comparison of each name with each other would be quadratic. Other callers' requests are answered meanwhile.
    """
    few, many = 19, 152
    lasted: dict[int, list[float]] = {few: [], many: []}
    async with server.client() as client, server.client() as other:
        body = {**BODY, "networkPolicy": {"defaultAction": "allow"}, "credentialProxy": {"enabled": True}}
        made = (await client.post("/v1/sandboxes", json=body)).json()
        route = f"/v1/sandboxes/{made['id']}/proxy/18080/credential-vault"
        for hosts in (few, many) * 3:
            began = time.monotonic()
            asking = asyncio.create_task(client.post(route, json=many_bindings(hosts)))
            answered = 0
            while not asking.done():
                assert 200 == (await other.get("/health")).status_code
                answered += not asking.done()
                await asyncio.sleep(0)
            assert 400 == (await asking).status_code, asking.result().text
            assert answered
            lasted[hosts].append(time.monotonic() - began)
    assert statistics.median(lasted[many]) < 3 * many / few * statistics.median(lasted[few]), lasted


async def test_a_sandbox_leads_the_server_nowhere(server: World) -> None:
    """It answers a handshake with a redirect to an address of the host. A client follows it, the server does not."""
    reached: list[str] = []

    async def elsewhere(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append("somebody")
        writer.close()

    other = await asyncio.start_server(elsewhere, "127.0.0.1", 0)
    address = f"127.0.0.1:{other.sockets[0].getsockname()[1]}"

    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 302 Found\r\nLocation: ws://{address}/\r\nContent-Length: 0\r\n\r\n".encode())
        writer.close()

    sandboxed = await asyncio.start_server(redirect, "127.0.0.1", 0)
    async with other, sandboxed:
        server.hostd.backend = sandboxed.sockets[0].getsockname()[1]
        async with server.client() as client:
            made = (await client.post("/v1/sandboxes", json=BODY)).json()
        async with connect(f"ws://{server.domain}/v1/sandboxes/{made['id']}/proxy/8000/", proxy=None) as ws:
            with pytest.raises(ConnectionClosed) as closed:
                await ws.recv()
        assert closed.value.rcvd is not None
        assert 1008 == closed.value.rcvd.code
        assert [] == reached
        with contextlib.suppress(Exception):
            await connect(f"ws://127.0.0.1:{server.hostd.backend}/", proxy=None)
        assert ["somebody"] == reached


async def test_an_answer_that_breaks_off_is_not_whole_and_fills_no_log(
    server: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller can see that the answer is incomplete.

    The log has one or two lines, however often a sandbox does this.
    """

    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        framing = b"Content-Length: 10" if b"/length" in await reader.readuntil(b"\r\n\r\n") else CHUNKED
        writer.write(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n3\r\nabc\r\n")
        writer.close()

    async with await asyncio.start_server(break_off, "127.0.0.1", 0) as sandboxed, server.client() as client:
        server.hostd.backend = sandboxed.sockets[0].getsockname()[1]
        made = (await client.post("/v1/sandboxes", json=BODY)).json()
        for path in ("length", "chunks"):
            caplog.clear()
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(f"/v1/sandboxes/{made['id']}/proxy/8000/{path}")
            assert 200 == (await client.get("/v1/sandboxes")).status_code
            said = [record for record in caplog.records if not record.name.startswith("http")]
            assert 1 <= len(said) <= 2
            assert [] == [record for record in said if record.exc_info]


QUERY, TOKEN = "token=query-value-of-somebody", "header-value-of-somebody"


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
async def test_no_log_repeats_what_a_request_says(server: World, level: int, caplog: pytest.LogCaptureFixture) -> None:
    """Keys, tokens and queries are in no line, at any log level."""
    with caplog.at_level(level):
        async with server.client() as client:
            made = (await client.post("/v1/sandboxes", json=BODY)).json()
            route = f"/v1/sandboxes/{made['id']}/proxy/44772"
            fields = {"X-EXECD-ACCESS-TOKEN": TOKEN, "OPEN-SANDBOX-API-KEY": KEY}
            assert 200 == (await client.get(f"{route}/x?{QUERY}", headers=fields)).status_code
            for path in ("/ws", "/refuse"):
                url = f"ws://{server.domain}{route}{path}?{QUERY}"
                async with connect(url, additional_headers=fields, proxy=None, logger=logging.Logger("x")) as ws:
                    with contextlib.suppress(Exception):
                        await ws.send("words-of-somebody")
                        await ws.recv()
    lines = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    server_lines = "\n".join(lines)
    for secret in ("query-value", TOKEN, KEY, "words-of-somebody", server.tokens.execd(made["id"])):
        assert secret not in server_lines


@pytest.fixture
async def hasty(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """Run a server with a short time limit for request heads."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 1.0)
    async with world() as described, described.serving() as running:
        yield running


WHOLE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b"GET /heal", WHOLE[:-2], WHOLE + b"G"])
async def test_a_head_that_does_not_come_ends_its_connection(hasty: World, sent: bytes) -> None:
    """Also if it comes byte by byte: a byte does not restart the time limit."""
    reader, writer = await asyncio.open_connection("127.0.0.1", hasty.port)
    writer.write(sent)
    async with asyncio.timeout(30):
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"x" if sent else b"")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(4096), 0.1)
    writer.close()


@pytest.mark.slow
async def test_a_request_that_has_begun_may_take_its_time(hasty: World) -> None:
    """The head's time limit does not end an endless answer, a slow body, a WebSocket, or an idle connection."""
    async with hasty.client() as client:
        made = (await client.post("/v1/sandboxes", json=BODY)).json()
        route = f"/v1/sandboxes/{made['id']}/proxy/8000"

        async def slowly() -> AsyncIterator[bytes]:
            for piece in (b"one", b"two"):
                await asyncio.sleep(0.7)
                yield piece

        async with connect(f"ws://{hasty.domain}{route}/ws", proxy=None) as ws:
            async with client.stream("GET", f"{route}/wait") as answer:
                pieces = answer.aiter_raw()
                assert b"first" == await anext(pieces)
                posted = await client.post(f"{route}/x", content=slowly())
                assert b"pong:onetwo" == posted.content
                hasty.hostd.program.release.set()  # type: ignore[attr-defined]
                assert b"second" == await anext(pieces)
            await ws.send("still")
            assert "still" == await ws.recv()
        reader, writer = await asyncio.open_connection("127.0.0.1", hasty.port)
        for _ in range(2):
            writer.write(WHOLE)
            head = await asyncio.wait_for(reader.readuntil(b"}"), 10)
            assert head.startswith(b"HTTP/1.1 200 ")
            await asyncio.sleep(1.2)
        writer.close()


def test_a_client_that_vanished_is_asked_after() -> None:
    """The kernel probes accepted connections. Without traffic, nothing else detects a dead WebSocket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        prepare(listener)
        with socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
        with accepted:
            assert 1 == accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            most = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) + accepted.getsockopt(
                socket.IPPROTO_TCP, socket.TCP_KEEPINTVL
            ) * accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
            assert most <= 120
