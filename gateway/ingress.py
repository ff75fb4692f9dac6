"""Ingress: connections from the control plane to a port of this sandbox.

A client connects to the worker's unix listener, writes a port (2 bytes, big-endian) and reads one byte (0 connected,
1 refused). Its bytes are then relayed to that port of the sandbox.

- The destination address is the configured inside address; a client cannot choose it. The socket is bound to the link.
- Each connection is accepted by the audit log before it is dialled; without the log it is refused. Requests on a
  connection are not counted.
- While the sandbox is paused, new connections are refused, and no byte moves on the existing ones.
- The number of connections is limited. The preamble and the dial have deadlines. An established relay has no idle
  limit: terminals and event streams can be silent for hours.
"""

import asyncio
import socket

from audit.client import AuditClient, AuditUnavailable
from gateway.inside import InsideSockets
from gateway.splice import Traffic, relay
from gateway.state import WorkerState
from wire.dialling import connect
from wire.patience import Patience

MAX_CONNECTIONS = 256
PREAMBLE_SECONDS = 5.0
DIAL_SECONDS = 5.0
CHUNK = 256 * 1024  # larger than for egress: an ingress transfer is large, and few run at once
_CONNECTED = b"\x00"
_REFUSED = b"\x01"


class Ingress:
    """Serves the ingress listener of one worker.

    Args:
        state: while it has no configuration, every connection is refused.
    """

    def __init__(
        self,
        listener: socket.socket,
        inside: InsideSockets,
        audit: AuditClient,
        state: WorkerState,
    ) -> None:
        self._listener = listener
        self._inside = inside
        self._audit = audit
        self._state = state
        self._connections: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        while True:
            try:
                peer, _ = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            if len(self._connections) >= MAX_CONNECTIONS:
                peer.close()
                continue
            task = loop.create_task(self._connection(peer), name="ingress")
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _connection(self, peer: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        traffic = Traffic()
        with peer:
            try:
                async with asyncio.timeout(PREAMBLE_SECONDS):
                    port = await _port(peer)
                inner = await self._dial(port) if port else None
                if inner is None:
                    await loop.sock_sendall(peer, _REFUSED)
                    return
            except (OSError, TimeoutError):
                return
            with inner:
                try:
                    await loop.sock_sendall(peer, _CONNECTED)
                    await relay(peer, inner, traffic, idle=None, total=None, chunk=CHUNK, moving=self._state.moving)
                except OSError:
                    return
                finally:
                    self._audit.note("ingress", "info", port=port, bytes_up=traffic.up, bytes_down=traffic.down)

    async def _dial(self, port: int) -> socket.socket | None:
        """Connect to the sandbox's port. None if it is paused, or the connection fails or cannot be recorded."""
        config = self._state.config
        if config is None or not self._state.moving.is_set():
            return None
        try:
            await self._audit.accept("ingress", "allow", address=str(config.constants.inside), port=port)
        except AuditUnavailable:
            return None
        sock = await self._inside.dialling_socket()
        try:
            async with Patience(DIAL_SECONDS):
                await connect(sock, config.constants.inside, port)
        except (OSError, TimeoutError):
            sock.close()
            return None
        except BaseException:
            sock.close()
            raise
        return sock


async def _port(peer: socket.socket) -> int:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < 2:
        part = await loop.sock_recv(peer, 2 - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return int.from_bytes(data, "big")
