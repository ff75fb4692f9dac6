"""A connection into the sandbox goes only to the configured address, and after its record."""

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address

import pytest

from audit.client import AuditUnavailable
from gateway.config import GatewayConfig, WorkerConstants
from gateway.ingress import Ingress
from policy.compiled import DENY_ALL

CONFIG = GatewayConfig("sbx-1", 1, DENY_ALL, WorkerConstants("", (), IPv4Address("127.0.0.1")))
CONNECTED, REFUSED = b"\x00", b"\x01"


@dataclass
class Way:
    """The listener, and the parts that a connection needs: a socket to dial with, and a log."""

    path: str
    config: GatewayConfig | None = CONFIG
    moving: asyncio.Event = field(default_factory=asyncio.Event)
    failing: bool = False
    steps: list[str] = field(default_factory=list)
    records: list[tuple[str, str, dict[str, object]]] = field(default_factory=list)

    async def dialling_socket(self) -> socket.socket:
        self.steps.append("dial")
        sock = socket.socket()
        sock.setblocking(False)
        return sock

    async def accept(self, kind: str, decision: str, **fields: object) -> None:
        self.steps.append("record")
        if self.failing:
            raise AuditUnavailable("no log")
        self.records.append((kind, decision, fields))

    def note(self, kind: str, decision: str, **fields: object) -> None:
        self.records.append((kind, decision, fields))

    async def ask(self, preamble: bytes, data: bytes = b"") -> bytes:
        """Write these bytes on a connection. Return the answer when it ends."""
        reader, writer = await asyncio.open_unix_connection(self.path)
        writer.write(preamble + data)
        writer.write_eof()
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
        return answer


@pytest.fixture
async def way(tmp_path) -> AsyncIterator[Way]:
    made = Way(str(tmp_path / "in"))
    made.moving.set()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(made.path)
    listener.listen()
    ingress = Ingress(listener, made, made, made)  # type: ignore[arg-type]
    task = asyncio.create_task(ingress.serve())
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    listener.close()


@pytest.fixture
async def inside() -> AsyncIterator[int]:
    """Run a server on a port of the sandbox that echoes its input."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def test_a_connection_is_recorded_and_then_dialled(way: Way, inside: int) -> None:
    assert CONNECTED + b"hello" == await way.ask(inside.to_bytes(2, "big"), b"hello")
    assert ["record", "dial"] == way.steps
    assert ("ingress", "allow", {"address": "127.0.0.1", "port": inside}) == way.records[0]


@pytest.mark.parametrize("missing", ["configuration", "log"])
async def test_without_a_configuration_or_a_log_nothing_is_dialled(way: Way, inside: int, missing: str) -> None:
    if missing == "log":
        way.failing = True
    else:
        way.config = None
    assert REFUSED == await way.ask(inside.to_bytes(2, "big"))
    assert "dial" not in way.steps and [] == way.records


@pytest.mark.parametrize("preamble", [b"", b"\x00"], ids=["nothing", "half"])
async def test_without_a_whole_port_nothing_is_dialled(way: Way, preamble: bytes) -> None:
    assert b"" == await way.ask(preamble)
    assert [] == way.steps


async def test_port_0_is_refused(way: Way) -> None:
    assert REFUSED == await way.ask(b"\x00\x00")
    assert [] == way.steps


async def test_the_address_is_that_of_the_configuration_in_force(way: Way, inside: int) -> None:
    """Nothing listens at the other address."""
    way.config = replace(CONFIG, constants=replace(CONFIG.constants, inside=IPv4Address("127.0.0.2")))
    assert REFUSED == await way.ask(inside.to_bytes(2, "big"))
    assert [{"address": "127.0.0.2", "port": inside}] == [fields for _, _, fields in way.records]


async def test_a_paused_sandbox_is_not_dialled(way: Way, inside: int) -> None:
    way.moving.clear()
    assert REFUSED == await way.ask(inside.to_bytes(2, "big"))
    assert [] == way.steps
    way.moving.set()
    assert CONNECTED + b"x" == await way.ask(inside.to_bytes(2, "big"), b"x")


async def test_an_existing_connection_rests_during_a_pause(way: Way, inside: int) -> None:
    """No byte moves until the resume, and then every byte arrives."""
    reader, writer = await asyncio.open_unix_connection(way.path)
    writer.write(inside.to_bytes(2, "big"))
    assert CONNECTED == await reader.readexactly(1)
    way.moving.clear()
    writer.write(b"held")
    writer.write_eof()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):  # a longer wait only makes the test stronger
            await reader.read(1)
    way.moving.set()
    assert b"held" == await reader.read()
    writer.close()
