"""The far end: TLS hosts that answer each GET with the same small page, and note when connections begin and end.

The answer to a request for /v1/held, which `bench/load.py` makes, is begun and never finished.

    python -m bench.far_end DIRECTORY NAME=ADDRESS...

Certificates are DIRECTORY/NAME.pem; notes go to DIRECTORY/far-end.jsonl; times are those of the host's monotonic
clock.
"""

import asyncio
import json
import ssl
import sys
import time
from pathlib import Path
from typing import TextIO, cast

import uvloop

BODY = b"x" * 1024
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
_HELD = b"get /v1/held "
_BEGUN = _ANSWER[: -len(BODY) // 2]
_END = b"\r\n\r\n"


class Connection(asyncio.Protocol):
    """One connection to one host."""

    def __init__(self, host: str, notes: TextIO) -> None:
        self._host = host
        self._notes = notes
        self._pending = b""
        self._transport: asyncio.Transport | None = None
        self.requests = self.authorised = 0

    def _note(self, event: str, **fields: object) -> None:
        self._notes.write(json.dumps({"event": event, "host": self._host, "at": time.monotonic(), **fields}) + "\n")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is no subclass

    def data_received(self, data: bytes) -> None:
        self._pending += data
        while (end := self._pending.find(_END)) >= 0:
            head, self._pending = self._pending[:end].lower(), self._pending[end + len(_END) :]
            self.authorised += b"\r\nauthorization: bearer " in head
            self.requests += 1
            if self._transport is not None:
                self._transport.write(_BEGUN if head.startswith(_HELD) else _ANSWER)
            if self.requests == 1:
                self._note("first")

    def connection_lost(self, exc: Exception | None) -> None:
        self._note("closed", requests=self.requests, authorised=self.authorised)


async def serve(directory: Path, hosts: dict[str, str]) -> None:
    """Serve all hosts for ever."""
    notes = (directory / "far-end.jsonl").open("a", buffering=1)
    loop = asyncio.get_running_loop()
    for host, address in hosts.items():
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(directory / f"{host}.pem")
        await loop.create_server(lambda host=host: Connection(host, notes), address, 443, ssl=context, backlog=512)  # type: ignore[misc]
    print("ready", flush=True)
    await loop.create_future()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), dict(pair.split("=", 1) for pair in sys.argv[2:])))
