"""WebSockets from a sandbox, between the client and the server of the package `websockets`. Judged at the far end.

The server sends the head of each handshake back: in the head of its answer and in its first message.

The module tests `gateway/scrub/frames.py` and `gateway/exchange.py` with real workers.
"""

import json
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest
import websockets
from opensandbox.sync.sandbox import SandboxSync

from testbed.internet import Internet
from testbed.leaks import forms_of, leaks_in
from testbed.stack import Stack
from tests.conftest import ON_RUNC
from tests.system.test_create_and_delete import until
from tests.system.test_substitutions import packed
from tests.websocket_server import HOST, EchoServer, echo_server

pytestmark = pytest.mark.system

TOKEN, KEY = "socket-token", "socket-key"
CLIENT = """
import asyncio, json, sys
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

async def talk(url, words):
    heads, got = [], []
    try:
        async with asyncio.timeout(60), connect(url, open_timeout=20) as client:
            heads += [[name, value] for name, value in client.response.headers.raw_items()]
            got.append(await client.recv())
            for word in words:
                await client.send(word)
                got.append(await client.recv())
            while not words:
                await client.send("more")
                await client.recv()
                await asyncio.sleep(0.05)
        return {"heads": heads, "got": got}
    except InvalidStatus as error:
        return {"status": error.response.status_code, "body": error.response.body.decode()}
    except ConnectionClosed:
        return {"heads": heads, "got": got, "closed": True}

print(json.dumps(asyncio.run(talk(sys.argv[1], sys.argv[2:]))))
"""
"""One thread: Python 3.11 does not protect a TLS connection that two threads use, as those of `websockets.sync` do."""


@dataclass
class Sockets:
    """A sandbox with the client, the server, and the secrets that the sandbox may use and never see."""

    sandbox: SandboxSync
    server: EchoServer
    stack: Stack
    token: str
    key: str

    def talk(self, path: str, *words: str) -> dict[str, Any]:
        """Open a WebSocket, send words, and return what the client got. Without words it talks until the end."""
        line = " ".join(("PYTHONPATH=/tmp/websockets.zip python3 /tmp/client.py", f"'wss://{HOST}{path}'", *words))
        done = self.sandbox.commands.run(line)
        return dict(json.loads(done.text))


@pytest.fixture(scope="module", name="server")
def _server(internet: Internet) -> Iterator[EchoServer]:
    with echo_server(internet) as server:
        yield server


@pytest.fixture(scope="module", name="sockets")
def _sockets(request: pytest.FixtureRequest, stack: Stack, server: EchoServer) -> Iterator[Sockets]:
    values = {name: f"{name}+{secrets.token_hex(20)}=end" for name in (TOKEN, KEY)}
    for name, value in values.items():
        stack.sallyport("vault", "put", name, "--host", HOST, stdin=value)
    sandbox = stack.create(request.param, policy="sockets")
    try:
        sandbox.files.write_file("/tmp/websockets.zip", packed(websockets))
        sandbox.files.write_file("/tmp/client.py", CLIENT)
        yield Sockets(sandbox, server, stack, values[TOKEN], values[KEY])
    finally:
        sandbox.kill()
        sandbox.close()
        for name in values:
            stack.sallyport("vault", "delete", name)


@pytest.mark.parametrize("sockets", ON_RUNC, indirect=True)
def test_a_handshake_gets_its_secrets_and_neither_head_nor_message_shows_them(sockets: Sockets) -> None:
    """A header and a query parameter. What the client sends is relayed, and its echo is what it sent."""
    mark = secrets.token_hex(8)
    shown = sockets.talk(f"/live/{mark}?room=1", "hello", "x" * 300)
    ((target, fields),) = sockets.server.of(mark)

    assert {"room": ["1"], "key": [sockets.key]} == parse_qs(urlsplit(target).query)
    assert f"Bearer {sockets.token}" == fields["authorization"]
    assert "sec-websocket-extensions" not in fields  # the client asks for compression
    first, *echoes = shown["got"]
    seen_target, seen = json.loads(first)
    assert ["hello", "x" * 300] == echoes
    assert (f"Bearer {'*' * len(sockets.token)}", fields["sec-websocket-key"]) == (
        seen["authorization"],
        seen["sec-websocket-key"],
    )
    hidden = "*" * len(quote(sockets.key, safe=""))
    assert f"/live/{mark}?room=1&key={hidden}" == seen_target
    assert ["Bearer [REDACTED]"] == [value for name, value in shown["heads"] if name == "X-Echo"]
    text = json.dumps(shown).encode()
    assert 0 == leaks_in([text], [*forms_of(sockets.token), *forms_of(sockets.key)])
    records = [one for one in sockets.stack.audit_records() if mark in one.get("path", "")]
    uses = [one for one in records if one["kind"] == "secret.use"]
    assert {("allow", TOKEN), ("allow", KEY)} == {(one["decision"], one["secret"]) for one in uses}
    assert any(one["kind"] == "request" and one.get("websocket") for one in records)


@pytest.mark.parametrize("sockets", ON_RUNC, indirect=True)
def test_a_handshake_that_no_rule_allows_does_not_arrive(sockets: Sockets) -> None:
    mark = secrets.token_hex(8)
    shown = sockets.talk(f"/other/{mark}", "hello")

    assert 403 == shown["status"]
    assert "/other/" in shown["body"]
    assert [] == sockets.server.of(mark)


@pytest.mark.parametrize("sockets", ON_RUNC, indirect=True)
def test_a_rotation_of_its_secret_ends_a_websocket(sockets: Sockets) -> None:
    mark, shown = secrets.token_hex(8), list[dict[str, Any]]()
    talking = threading.Thread(target=lambda: shown.append(sockets.talk(f"/live/{mark}")))
    talking.start()
    assert until(lambda: bool(sockets.server.of(mark)), 20)
    assert talking.is_alive()
    sockets.stack.sallyport("vault", "rotate", KEY, stdin=f"another-{secrets.token_hex(20)}")
    talking.join(20)

    ((ended),) = shown
    assert ended["closed"]
    ends = [one for one in sockets.stack.audit_records() if mark in one.get("path", "") and one["decision"] == "info"]
    assert ("the flow was aborted", 101) == (ends[-1]["reason"], ends[-1]["status"])
