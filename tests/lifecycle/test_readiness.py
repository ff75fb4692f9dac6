"""The question to a new sandbox's execd, over the way in of a gateway. The answers are hostile."""

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

from lifecycle.proxy.ingress import WayIn
from lifecycle.proxy.readiness import reached
from lifecycle.sandboxes.starting import Reached

NAME = "sbx-1"


async def ask(answer: bytes, *, connected: bool = True, uid: int | None = None) -> tuple[Reached, bytes]:
    """Return the result, and the request that arrived."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = await reader.readexactly(2)
        writer.write(b"\0" if connected else b"\1")
        if connected:
            requests.append(port + await reader.readuntil(b"\r\n\r\n"))
            writer.write(answer)
        writer.close()

    with tempfile.TemporaryDirectory(prefix="rd-") as name:
        async with await asyncio.start_unix_server(serve, f"{name}/{NAME}.sock"):
            result = await reached(WayIn(Path(name), os.getuid() if uid is None else uid), NAME)
    return result, b"".join(requests)


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", Reached.STARTED),
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}", Reached.SERVING),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", Reached.SERVING),
        (b"", Reached.NOTHING),
        (b"HTTP/1.1 200", Reached.NOTHING),
        (b"SSH-2.0-x\r\n\r\n", Reached.NOTHING),
        (b"HTTP/1.1 200 OK\r\nA: " + b"x" * 200_000, Reached.NOTHING),
    ],
)
async def test_an_answer_is_read_by_its_status(answer: bytes, result: Reached) -> None:
    found, request = await ask(answer)
    assert result is found
    assert request == (44772).to_bytes(2, "big") + b"GET /ready HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


async def test_a_refused_connection_a_missing_gateway_and_a_foreign_one_are_no_answer() -> None:
    assert (Reached.NOTHING, b"") == await ask(b"", connected=False)
    assert Reached.NOTHING is await reached(WayIn(Path("/nonexistent"), 0), NAME)
    assert (Reached.NOTHING, b"") == await ask(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", uid=os.getuid() + 1)
