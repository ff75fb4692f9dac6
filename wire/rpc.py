"""Requests and answers between our processes, on top of frames.

    -> {"id": 7, "op": "launch", ...parameters}            ... and descriptors
    <- {"id": 7, "ok": {...result}}                        ... and descriptors
    <- {"id": 7, "error": {"code": "...", "message": "..."}}
    -> {"op": "revoke", ...parameters}                     a notification: no id, no answer

The connection is symmetric: each side may send requests and notifications, and answers those of the other.

- Requests of one connection are handled concurrently, at most `MAX_IN_FLIGHT` at once; beyond it reading stops.
- A handler's `RequestError` is the peer's answer, with its code. Any other exception becomes the answer
  `internal` without its text (which might hold a secret) and is logged on this side by class only.
- When a connection ends, every call that waits on it fails with `ConnectionError`: never a silent hang.
- A call's time-out counts the time in which the peer sent nothing and the caller's own loop ran (`patience`): a peer
  that answers other calls is not silent, and an answer that waits in the socket is not late.
- A message that is no frame, too large a one for instance, is its sender's failure alone: the connection goes on.
"""

import asyncio
import logging
import os
import select
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from wire.frames import FrameError, Message, close_all, encode, receive_async, send_async
from wire.patience import Patience

MAX_IN_FLIGHT = 64
DEFAULT_TIMEOUT = 30.0

_log = logging.getLogger(__name__)


class RequestError(Exception):
    """A request that cannot be fulfilled, as the peer is told: a stable code and a sentence without secrets."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class RemoteError(Exception):
    """The peer answered a call with an error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, as the kernel says (SO_PEERCRED)."""

    pid: int
    uid: int
    gid: int


type Result = Message | tuple[Message, Sequence[int]] | None
"""A handler's answer, optionally with descriptors; they are closed here once sent."""

type Handler = Callable[["Client", str, Message, list[int]], Awaitable[Result]]
"""`handler(connection, op, parameters, fds) -> result`. The handler owns `fds`."""


async def _refuse(_client: "Client", op: str, _parameters: Message, fds: list[int]) -> Result:
    close_all(fds)
    raise RequestError("unknown_op", f"unknown operation {op!r}")


class Client:
    """One end of a connection. Start it with `start`, or through `connect` / `serve_unix`."""

    def __init__(self, sock: socket.socket, handler: Handler = _refuse) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._handler = handler
        self._next_id = 1
        self._waiting: dict[int, asyncio.Future[tuple[Message, list[int]]]] = {}
        self._write_lock = asyncio.Lock()
        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader: asyncio.Task[None] | None = None
        self._frames = 0
        self.evidence: Callable[[], object] = lambda: None
        """What else than frames shows that the peer works: a value unlike the former one. Must not raise."""
        self.closed = asyncio.Event()

    @classmethod
    async def connect(cls, path: str | os.PathLike[str], handler: Handler = _refuse) -> "Client":
        """Connect to the unix socket at `path`.

        Raises:
            OSError: nobody listens there, or this process may not connect.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, os.fspath(path))
        except BaseException:
            sock.close()
            raise
        client = cls(sock, handler)
        client.start()
        return client

    @property
    def peer(self) -> Peer:
        """The process at the other end. For a socket pair: the one that made the pair."""
        data = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return Peer(*struct.unpack("3i", data))

    def start(self) -> None:
        """Begin to read; call once, inside a running loop."""
        self._reader = asyncio.get_running_loop().create_task(self._read(), name="wire-reader")

    async def call(
        self, op: str, fds: Sequence[int] = (), timeout: float | None = DEFAULT_TIMEOUT, **parameters: Any
    ) -> Message:
        """Send a request and return its result.

        Args:
            fds: descriptors to send; they stay the caller's.
            timeout: seconds without a word of the peer, and four times as many in all; None waits as long as the
                connection lives.

        Raises:
            RemoteError: the peer refused.
            ConnectionError: the connection ended before the answer.
            FrameError: the request is no frame; nothing was sent.
            TimeoutError: no answer in time.
        """
        result, received = await self.call_with_fds(op, fds, timeout, **parameters)
        close_all(received)
        return result

    async def call_with_fds(
        self, op: str, fds: Sequence[int] = (), timeout: float | None = DEFAULT_TIMEOUT, **parameters: Any
    ) -> tuple[Message, list[int]]:
        """As `call`, and the descriptors of the answer, which the caller then owns."""
        if self.closed.is_set():
            raise ConnectionError(f"connection closed before {op!r}")
        ident = self._next_id
        self._next_id += 1
        future: asyncio.Future[tuple[Message, list[int]]] = asyncio.get_running_loop().create_future()
        self._waiting[ident] = future
        try:
            async with Patience(timeout, self._progress):
                await self._send({"id": ident, "op": op, **parameters}, fds)
                return await future
        finally:
            self._waiting.pop(ident, None)
            if future.done() and not future.cancelled():
                future.exception()  # when sending has failed nobody waits for the answer, and its failure is no news

    async def notify(self, op: str, fds: Sequence[int] = (), **parameters: Any) -> None:
        """Send a notification; returns when it is with the kernel."""
        if self.closed.is_set():
            raise ConnectionError(f"connection closed before {op!r}")
        await self._send({"op": op, **parameters}, fds)

    async def answered(self, seconds: float) -> None:
        """Wait until the calls that are under way have ended, but no longer than `seconds`."""
        if self._waiting:
            await asyncio.wait(list(self._waiting.values()), timeout=seconds)

    async def close(self) -> None:
        """End the connection and everything that runs for it."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._shut()

    def _progress(self) -> object:
        """Evidence that the peer works: frames that were read, and whatever waits in the socket to be read."""
        if self.closed.is_set():
            return self._frames
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return object() if poll.poll(0) else (self._frames, self.evidence())

    async def _send(self, message: Message, fds: Sequence[int]) -> None:
        """Send one frame whole: a caller that is cancelled in the middle must not leave half a frame behind.

        The descriptors are duplicated, so that they outlive a caller that closes its own meanwhile.
        """
        frame = encode(message)
        copies = [os.dup(fd) for fd in fds]
        sending = asyncio.get_running_loop().create_task(self._send_whole(frame, copies), name="wire-send")
        self._tasks.add(sending)
        sending.add_done_callback(self._sent)
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            if sending.cancelled():  # by the end of the connection, not by our caller's
                raise ConnectionError("connection closed") from None
            raise

    def _sent(self, sending: asyncio.Task[None]) -> None:
        self._tasks.discard(sending)
        if not sending.cancelled() and sending.exception() is not None:
            self._shut()  # also when the caller no longer waits to be told

    async def _send_whole(self, frame: bytes, fds: list[int]) -> None:
        try:
            async with self._write_lock:
                await send_async(self._sock, frame, fds)
        except (OSError, ValueError) as error:
            raise ConnectionError("peer is gone") from error
        finally:
            close_all(fds)

    async def _read(self) -> None:
        try:
            while True:
                received = await receive_async(self._sock)
                if received is None:
                    return
                self._frames += 1
                message, fds = received
                if "op" in message:
                    await self._slots.acquire()
                    task = asyncio.get_running_loop().create_task(self._handle(message, fds), name="wire-request")
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                else:
                    self._resolve(message, fds)
        except (FrameError, OSError) as error:
            _log.debug("connection ended: %s", type(error).__name__)
        finally:
            self._shut()

    def _resolve(self, message: Message, fds: list[int]) -> None:
        ident = message.get("id")
        future = self._waiting.get(ident) if isinstance(ident, int) else None
        if future is None or future.done():
            close_all(fds)
            return
        error = message.get("error")
        if isinstance(error, dict):
            close_all(fds)
            future.set_exception(RemoteError(str(error.get("code")), str(error.get("message"))))
            return
        result = message.get("ok")
        future.set_result((result if isinstance(result, dict) else {}, fds))

    async def _handle(self, message: Message, fds: list[int]) -> None:
        ident = message.pop("id", None)
        op = str(message.pop("op"))
        out: list[int] = []
        try:
            try:
                result = await self._handler(self, op, message, fds)
                if isinstance(result, tuple):
                    result, sent = result
                    out = list(sent)
                answer: Message = {"id": ident, "ok": result or {}}
            except RequestError as error:
                answer = {"id": ident, "error": {"code": error.code, "message": error.message}}
            except Exception as error:  # noqa: BLE001 - closes: the peer gets an error, never a result
                _log.exception("request %s failed: %s", op, type(error).__name__, exc_info=False)
                answer = {"id": ident, "error": {"code": "internal", "message": f"{op} failed: {type(error).__name__}"}}
            if ident is not None:
                await self._answer(ident, op, answer, out)
        except (ConnectionError, FrameError):
            self._shut()
        finally:
            close_all(out)
            self._slots.release()

    async def _answer(self, ident: Any, op: str, answer: Message, fds: list[int]) -> None:
        try:
            await self._send(answer, fds)
        except FrameError:
            message = f"the answer to {op[:80]!r} is no frame"
            await self._send({"id": ident, "error": {"code": "no_frame", "message": message}}, [])

    def _shut(self) -> None:
        if self.closed.is_set():
            return
        self.closed.set()
        self._sock.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionError("connection closed"))
        for task in self._tasks:
            task.cancel()


async def serve_connection(sock: socket.socket, handler: Handler) -> Client:
    """Serve one connected socket (one end of a pair, say); returns the running connection."""
    client = Client(sock, handler)
    client.start()
    return client


async def serve_unix(
    path: str | os.PathLike[str],
    handler: Handler,
    *,
    allowed_uids: frozenset[int],
    mode: int = 0o600,
    owner: tuple[int, int] | None = None,
    max_connections: int = 64,
) -> asyncio.Task[None]:
    """Listen on `path` and serve every peer whose uid is allowed; returns the accepting task.

    Cancelling the task closes the listener and all its connections.

    Args:
        mode: permission bits of the socket file.
        owner: (uid, gid) of the socket file; needs root.
        max_connections: a further one is accepted and closed at once.
    """
    name = os.fspath(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    try:
        if os.path.exists(name):
            os.unlink(name)
        previous = os.umask(0o177)
        try:
            listener.bind(name)
        finally:
            os.umask(previous)
        if owner is not None:
            os.chown(name, *owner)
        os.chmod(name, mode)
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return asyncio.get_running_loop().create_task(
        _accept(listener, handler, allowed_uids, max_connections), name=f"wire-accept:{name}"
    )


async def _accept(
    listener: socket.socket, handler: Handler, allowed_uids: frozenset[int], max_connections: int
) -> None:
    loop = asyncio.get_running_loop()
    connections: set[Client] = set()
    try:
        while True:
            sock, _ = await loop.sock_accept(listener)
            connections = {client for client in connections if not client.closed.is_set()}
            client = Client(sock, handler)
            if client.peer.uid not in allowed_uids or len(connections) >= max_connections:
                sock.close()
                continue
            client.start()
            connections.add(client)
    finally:
        listener.close()
        for client in connections:
            await client.close()
