"""Relays each connection through a proxy's CONNECT, for clients that do not know CONNECT.

python -m bench.tunnel LISTEN_ADDRESS:PORT PROXY_ADDRESS:PORT HOST
"""

import asyncio
import socket
import sys
from typing import cast

import uvloop

_AGREED = b"HTTP/1.1 200 "
_END = b"\r\n\r\n"


class _End(asyncio.Protocol):
    """One side of a relayed connection."""

    def __init__(self) -> None:
        self.other: asyncio.Transport | None = None
        self.transport: asyncio.Transport | None = None
        self._waiting = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transport is no subclass

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._waiting += data
        else:
            self.other.write(data)

    def join(self, other: asyncio.Transport, head: bytes = b"") -> None:
        """Relay to `other`: first `head`, then what has come, then what comes."""
        self.other = other
        other.write(head + bytes(self._waiting))
        self._waiting.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.close()


class _Proxy(_End):
    """The proxy's side, which answers CONNECT first."""

    def __init__(self, client: _End) -> None:
        super().__init__()
        self._client = client
        self._head = b""

    def data_received(self, data: bytes) -> None:
        if self.other is not None or self.transport is None or self._client.transport is None:
            super().data_received(data)
            return
        self._head += data
        if _END in self._head:
            if not self._head.startswith(_AGREED):
                self._client.transport.close()
                self.transport.close()
                return
            rest = self._head.partition(_END)[2]
            self.join(self._client.transport, rest)
            self._client.join(self.transport)


class _Client(_End):
    """The client's side."""

    def __init__(self, proxy: tuple[str, int], host: str) -> None:
        super().__init__()
        self._proxy = proxy
        self._host = host
        self._opening: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._opening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: _Proxy(self), *self._proxy)
        if self.transport is None or self.transport.is_closing():
            transport.close()
            return
        transport.write(f"CONNECT {self._host}:443 HTTP/1.1\r\nHost: {self._host}:443\r\n\r\n".encode())


def _place(text: str) -> tuple[str, int]:
    address, _, port = text.rpartition(":")
    return address, int(port)


async def serve(listen: tuple[str, int], proxy: tuple[str, int], host: str) -> None:
    """Serve for ever."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Client(proxy, host), *listen, backlog=512, family=socket.AF_INET)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(_place(sys.argv[1]), _place(sys.argv[2]), sys.argv[3]))
