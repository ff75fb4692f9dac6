"""The fetcher's end of hostd's channel: asks hostd to open something, and reads the descriptor that comes.

- Each request has a ticket, and only a descriptor with its ticket counts. Another one is closed.
- Only regular files are read, at most `MOST_BYTES` of each. They are in the page cache or on a memory file system, or
  the operator has chosen a slow disk: reads are made outside of the event loop.
"""

import asyncio
import os
import socket
import stat
from typing import Final

import wire
from vault.stores.backend import NoValueError
from vault.stores.supplied import decoded
from wire.api.fetcher import CONTROL, Fault, Material, Open, Supply
from wire.frames import close_all
from wire.serving import handler

MOST_BYTES: Final = 64 * 1024
_SECONDS: Final = 5.0
_SAID: Final = {
    Material.ENVIRONMENT: (
        "the server's environment has no such variable: set it where `sallyport serve` starts",
        "name the variable in sallyport.vault.environment",
    ),
    Material.FILE: (
        "there is no such file in sallyport.vault.file_directories",
        "the file is no regular file below sallyport.vault.file_directories",
    ),
    Material.CREDENTIAL: (
        "the file of sallyport.vault.hashicorp.credential_file is missing",
        "the file of sallyport.vault.hashicorp.credential_file is no regular file",
    ),
}


class HostSupplier:
    """Reads what hostd opens; see `vault.stores.supplied.Supplier`."""

    def __init__(self) -> None:
        self._client: wire.Client | None = None
        self._tickets: dict[int, int | None] = {}
        self._last = 0

    def serve(self, client: wire.Client) -> None:
        """Use this connection to hostd, whose handler is `handle`."""
        self._client = client

    async def handle(self, _client: wire.Client, request: Supply, fds: list[int]) -> None:
        """Take the descriptor of a ticket."""
        try:
            if len(fds) != 1 or self._tickets.get(request.ticket, -1) is not None:
                raise wire.RequestError(wire.Code.INVALID, "no such ticket")
            self._tickets[request.ticket] = fds.pop()
        finally:
            close_all(fds)

    async def text(self, material: Material, name: str = "") -> str:
        """See `Supplier`."""
        missing, forbidden = _SAID[material]
        if self._client is None:
            raise NoValueError(Fault.FAILED, "hostd is not connected")
        self._last += 1
        ticket = self._last
        self._tickets[ticket] = None
        try:
            await self._client.ask(Open(ticket, material, name), timeout=_SECONDS)
            fd = self._tickets[ticket]
            if fd is None:
                raise NoValueError(Fault.FAILED, "hostd has opened nothing")
            self._tickets[ticket] = None
            content = await asyncio.to_thread(_read, fd)
        except wire.RemoteError as error:
            match error.code:
                case wire.Code.PATH_MISSING:
                    raise NoValueError(Fault.MISSING, missing) from None
                case wire.Code.PATH_FORBIDDEN:
                    raise NoValueError(Fault.UNCONFIGURED, forbidden) from None
            raise NoValueError(Fault.FAILED, f"hostd cannot open it: {error.code}") from None
        except (OSError, wire.FrameError) as error:
            raise NoValueError(Fault.FAILED, f"it cannot be read: {type(error).__name__}") from None
        finally:
            left = self._tickets.pop(ticket, None)
            if left is not None:
                os.close(left)
        return decoded(content, MOST_BYTES)


def _read(fd: int) -> bytes:
    with os.fdopen(fd, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError("no regular file")
        content = bytearray()
        while len(content) <= MOST_BYTES and (part := file.read(MOST_BYTES + 1 - len(content))):
            content += part
        return bytes(content)


async def connect(sock: socket.socket, supplier: HostSupplier) -> wire.Client:
    """Serve hostd's channel."""
    client = await wire.serve_connection(sock, handler(CONTROL, supplier.handle), descriptors=True)
    supplier.serve(client)
    return client
