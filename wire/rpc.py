"""Requests and answers between processes, on top of frames.

    -> {"id": 7, "op": "launch", ...parameters}            ... and descriptors
    <- {"id": 7, "ok": {...result}}
    <- {"id": 7, "error": {"code": "...", "message": "..."}}
    -> {"op": "revoke", ...parameters}                     a notification: no id, no answer

The connection is symmetric: each side may send requests and notifications, and answers those of the other. `ask` and
`tell` send the typed values of `operations`, which also makes the handlers that take them.

- Requests of one connection are handled concurrently, up to its `FrameLimits`. Above them reading stops. A request
  counts until its answer is sent, so reading also stops if a peer does not read its answers.
- After `_TURN` bytes of one connection the event loop serves others, so a flood of one peer does not block them.
- Descriptors are accepted only if this end permits them (`descriptors`), from a trusted peer. Answers have none.
- A frame that is no request and no answer to a request ends the connection. Codes and messages of errors are bounded.
- A handler's `RequestError` is sent as the answer, with its code. Any other exception becomes the answer `internal`
  without its text, which could contain a secret. This side logs only its class.
- When a connection ends, every waiting call fails with `ConnectionError`. No call hangs.
- A call's time-out counts only time in which the peer sent nothing and the caller's event loop ran (`patience`). A peer
  that answers other calls is not silent, and an answer that waits in the socket is not late.
- A message that cannot be sent as a frame, for example a too large one, fails at its sender, and the connection stays
  open. So both ends have equal limits for a direction: `takes` of one end is `gives` of the other.
"""

import asyncio
import contextlib
import logging
import os
import select
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from wire import codec
from wire import descriptors as passing
from wire.errors import Code, RemoteError, RequestError
from wire.frames import FrameError, Message, Receiver, close_all, decode, encode, send_async, weigh
from wire.limits import WHOLE, FrameLimits
from wire.operations import Notification, Ping, Request, answer_type, operation, parameters
from wire.patience import Patience
from wire.sockets import BACKLOG, Peer, connect_unix, peer_of

DEFAULT_TIMEOUT: Final = 30.0
MOST_ABANDONED: Final = 1024
"""The limit of abandoned calls whose answers may still come."""
_MOST_OP, _MOST_MESSAGE = 64, 2000
_TURN, _LEAST_FRAME = 64 * 1024, 4 * 1024

_log = logging.getLogger(__name__)


type Handler = Callable[["Client", str, Message, list[int]], Awaitable[Message | None]]
"""`handler(connection, op, parameters, fds) -> result`, see `Operations.handler`. The handler owns `fds`."""


async def _refuse(_client: "Client", op: str, _parameters: Message, fds: list[int]) -> None:
    close_all(fds)
    raise RequestError(Code.UNKNOWN_OP, f"unknown operation {op!r}")


class Client:
    """One end of a connection. Start it with `start`, or through `connect` / `serve_unix`.

    Args:
        takes: the limits of frames from the peer.
        gives: the limits of frames to the peer.
        descriptors: whether the peer may send descriptors with requests; it must be trusted then.
    """

    def __init__(
        self,
        sock: socket.socket,
        handler: Handler = _refuse,
        *,
        takes: FrameLimits = WHOLE,
        gives: FrameLimits = WHOLE,
        descriptors: bool = False,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._handler = handler
        self._takes, self._gives = takes, gives
        if descriptors:
            passing.allow(sock)
        self._shielded = not descriptors and passing.refuse(sock)
        self._receiver = Receiver(sock, takes, expects=descriptors, shielded=self._shielded)
        self._next_id = 1
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._abandoned: set[int] = set()
        self._write_lock = asyncio.Lock()
        self._room = _Room(takes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader: asyncio.Task[None] | None = None
        self._frames = 0
        self._accepted = True
        self.closed = asyncio.Event()

    @classmethod
    async def connect(
        cls, path: str | os.PathLike[str], uid: int, handler: Handler = _refuse, *, gives: FrameLimits = WHOLE
    ) -> Self:
        """Connect to the unix socket at `path`, which a process of user `uid` must serve.

        Raises:
            WrongServer: a process of another user serves it; nothing was sent.
            OSError: no process listens there, or this process may not connect.
        """
        client = cls(await connect_unix(path, uid), handler, gives=gives)
        client._accepted = False
        client.start()
        return client

    @property
    def peer(self) -> Peer:
        """The process at the other end."""
        return peer_of(self._sock)

    def start(self) -> None:
        """Start reading. Call once, inside a running event loop."""
        self._reader = asyncio.get_running_loop().create_task(self._read(), name="wire-reader")

    async def call(
        self, op: str, fds: Sequence[int] = (), timeout: float | None = DEFAULT_TIMEOUT, **parameters: Any
    ) -> Message:
        """Send a request and return its result.

        Args:
            fds: descriptors to send; the caller still owns them.
            timeout: seconds without a frame from the peer, and four times as many in all; None waits until the
                connection ends.

        Raises:
            RemoteError: the peer refused.
            ConnectionError: the connection ended before the answer.
            FrameError: the request cannot be sent as a frame; nothing was sent.
            TimeoutError: no answer in time.
        """
        if self.closed.is_set():
            raise ConnectionError(f"connection closed before {op!r}")
        if fds and not self._accepted:  # a listener takes descriptors only of accepted peers
            with contextlib.suppress(RemoteError):
                await self.ask(Ping(), timeout=timeout)
        if len(self._abandoned) >= MOST_ABANDONED:
            self._shut()
            raise ConnectionError("the peer answers nothing")
        ident = self._next_id
        frame = encode({"id": ident, "op": op, **parameters}, self._gives)
        self._next_id += 1
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[ident] = future
        try:
            async with Patience(timeout, self._progress):
                await self._send(frame, fds)
                return await future
        finally:
            if self._waiting.pop(ident, None) is not None:
                self._abandoned.add(ident)
            if future.done() and not future.cancelled():
                future.exception()  # after a failed send no caller waits; marks it as read

    async def notify(self, op: str, fds: Sequence[int] = (), **parameters: Any) -> None:
        """Send a notification; returns when it is with the kernel."""
        if self.closed.is_set():
            raise ConnectionError(f"connection closed before {op!r}")
        await self._send(encode({"op": op, **parameters}, self._gives), fds)

    async def ask[Answer](
        self, request: Request[Answer], fds: Sequence[int] = (), timeout: float | None = DEFAULT_TIMEOUT
    ) -> Answer:
        """Send a request and return its answer; arguments and errors are those of `call`.

        Raises:
            ConnectionError: also if the answer is not exactly of the request's type.
        """
        op = operation(request)
        answer = await self.call(op, fds, timeout, **parameters(request))
        try:
            decoded: Answer = codec.decode(answer_type(request), answer)
        except codec.CodecError as error:
            raise ConnectionError(f"the answer to {op!r} is none: {error}"[:_MOST_MESSAGE]) from None
        return decoded

    async def tell(self, notification: Notification, fds: Sequence[int] = ()) -> None:
        """Send a notification; returns when it is with the kernel."""
        await self.notify(operation(notification), fds, **parameters(notification))

    async def answered(self, seconds: float) -> None:
        """Wait until the calls under way have ended, for at most `seconds`."""
        if self._waiting:
            await asyncio.wait(list(self._waiting.values()), timeout=seconds)

    async def close(self) -> None:
        """End the connection and all of its tasks."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._shut()

    def _progress(self) -> object:
        """Return evidence that the peer works: the number of frames, and the bytes that wait in the socket."""
        if self.closed.is_set():
            return self._frames
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return object() if poll.poll(0) else self._frames

    async def _send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Send one complete frame, also if the caller is cancelled during the send.

        The descriptors are duplicated, because the caller may close its own during the send.
        """
        copies = [os.dup(fd) for fd in fds]
        sending = asyncio.get_running_loop().create_task(self._send_whole(frame, copies), name="wire-send")
        self._tasks.add(sending)
        sending.add_done_callback(self._sent)
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            if sending.cancelled():  # by the end of the connection, not of the caller
                raise ConnectionError("connection closed") from None
            raise

    def _sent(self, sending: asyncio.Task[None]) -> None:
        self._tasks.discard(sending)
        if not sending.cancelled() and sending.exception() is not None:
            self._shut()  # also if the caller no longer waits

    async def _send_whole(self, frame: bytes, fds: list[int]) -> None:
        try:
            async with self._write_lock:
                await send_async(self._sock, frame, fds)
        except (OSError, ValueError) as error:
            raise ConnectionError("the peer has closed the connection or accepts no bytes") from error
        finally:
            close_all(fds)

    async def _read(self) -> None:
        turn = 0
        try:
            while (received := await self._receiver.body()) is not None:
                self._frames += 1
                self._accepted = True
                await self._take(*received)
                turn += max(_LEAST_FRAME, len(received[0]))
                if turn >= _TURN:
                    turn = 0
                    await asyncio.sleep(0)
        except (FrameError, OSError) as error:
            _log.debug("connection ended: %s", type(error).__name__)
        finally:
            self._shut()

    async def _take(self, body: bytes, fds: list[int]) -> None:
        """Begin to handle one frame.

        Raises:
            FrameError: the frame is neither a request nor an answer.
        """
        taken = False
        try:
            cost = weigh(body, self._takes)
            message = decode(body)
            if "op" not in message:
                self._resolve(message)
                return
            ident, op = message.pop("id", None), message.pop("op")
            if not (ident is None or type(ident) is int) or not isinstance(op, str) or len(op) > _MOST_OP:
                raise FrameError("frame is no request")
            await self._room.take(cost)
            task = asyncio.get_running_loop().create_task(
                self._handle(ident, op, message, fds, cost), name="wire-request"
            )
            taken = True
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        finally:
            if not taken:
                passing.discard(fds)

    def _resolve(self, message: Message) -> None:
        ident, error, result = message.get("id"), message.get("error"), message.get("ok")
        if type(ident) is not int or len(message) != 2 or not (isinstance(error, dict) or isinstance(result, dict)):
            raise FrameError("frame is no answer")
        future = self._waiting.pop(ident, None)
        if future is None:
            if ident not in self._abandoned:
                raise FrameError("an answer to nothing")
            self._abandoned.discard(ident)
        elif future.done():  # the caller has just abandoned the call
            return
        elif isinstance(error, dict):
            future.set_exception(refusal(error))
        else:
            future.set_result(result or {})

    async def _handle(self, ident: int | None, op: str, parameters: Message, fds: list[int], cost: int) -> None:
        try:
            try:
                answer: Message = {"id": ident, "ok": await self._handler(self, op, parameters, fds) or {}}
            except RequestError as error:
                answer = {"id": ident, "error": {"code": error.code, "message": error.message}}
            except Exception as error:  # noqa: BLE001 - fails closed: the peer gets an error
                _log.exception("request %s failed: %s", op, type(error).__name__, exc_info=False)
                answer = {
                    "id": ident,
                    "error": {"code": Code.INTERNAL, "message": f"{op} failed: {type(error).__name__}"},
                }
            if ident is not None:
                await self._answer(ident, op, answer)
        except (ConnectionError, FrameError):
            self._shut()
        finally:
            self._room.give(cost)

    async def _answer(self, ident: int, op: str, answer: Message) -> None:
        try:
            frame = encode(answer, self._gives)
        except FrameError:
            message = f"the answer to {op!r} is no frame"
            frame = encode({"id": ident, "error": {"code": Code.TOO_LARGE, "message": message}}, self._gives)
        await self._send(frame)

    def _shut(self) -> None:
        if self.closed.is_set():
            return
        self.closed.set()
        if self._shielded:
            self._sock.close()
        else:
            passing.release(self._sock)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionError("connection closed"))
        for task in self._tasks:
            task.cancel()


class _Room:
    """Counts the requests of one connection against its limits. Only its reader waits."""

    def __init__(self, limits: FrameLimits) -> None:
        self._limits = limits
        self._requests = 0
        self._held = 0
        self._freed = asyncio.Event()

    async def take(self, cost: int) -> None:
        """Wait until there is room for one more request."""
        while self._requests >= self._limits.requests or (self._requests and self._held + cost > self._limits.memory):
            self._freed.clear()
            await self._freed.wait()
        self._requests += 1
        self._held += cost

    def give(self, cost: int) -> None:
        """Release the room of one request."""
        self._requests -= 1
        self._held -= cost
        self._freed.set()


def refusal(error: object) -> RemoteError:
    """Return the error of an answer, with a code of the list and a message that is safe to log."""
    found = error if isinstance(error, dict) else {}
    return RemoteError(_code(found.get("code")), _sentence(found.get("message")))


def _code(value: object) -> Code:
    return Code(value) if isinstance(value, str) and value in Code else Code.MALFORMED


def _sentence(value: object) -> str:
    """Return a peer's message in a safe form for logs, records and answers."""
    text = value[:_MOST_MESSAGE] if isinstance(value, str) else ""
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)


async def serve_connection(
    sock: socket.socket, handler: Handler, *, takes: FrameLimits = WHOLE, descriptors: bool = False
) -> Client:
    """Serve one connected socket, for example one end of a pair; return the running connection."""
    client = Client(sock, handler, takes=takes, descriptors=descriptors)
    client.start()
    return client


async def serve_unix(
    listener: socket.socket,
    handler: Handler,
    *,
    allowed_uids: frozenset[int],
    max_connections: int = 16,
    takes: FrameLimits = WHOLE,
    descriptors_from: frozenset[int] = frozenset(),
) -> asyncio.Task[None]:
    """Listen on a bound socket and serve every peer with a permitted uid; return the accepting task.

    To close the listener and all its connections, cancel the task.

    Args:
        listener: a socket of `sockets.bind_unix`, or an inherited one.
        max_connections: the limit per uid; a further connection is accepted and closed at once.
        takes: the limits of frames from a peer.
        descriptors_from: uids that may send descriptors.
    """
    listener.setblocking(False)
    shielded = passing.refuse(listener)
    listener.listen(BACKLOG)  # each process calls `listen` itself: clients see the uid of the last caller
    server = _Server(listener, handler, allowed_uids, max_connections, takes, descriptors_from, shielded)
    return asyncio.get_running_loop().create_task(server.accept(), name="wire-accept")


@dataclass(frozen=True, slots=True)
class _Server:
    listener: socket.socket
    handler: Handler
    allowed_uids: frozenset[int]
    max_connections: int
    takes: FrameLimits
    descriptors_from: frozenset[int]
    shielded: bool

    async def accept(self) -> None:
        loop = asyncio.get_running_loop()
        connections: dict[Client, int] = {}
        try:
            while True:
                sock, _ = await loop.sock_accept(self.listener)
                uid = peer_of(sock).uid
                connections = {client: its for client, its in connections.items() if not client.closed.is_set()}
                if uid not in self.allowed_uids or list(connections.values()).count(uid) >= self.max_connections:
                    if self.shielded:
                        sock.close()
                    else:
                        passing.release(sock)
                    continue
                granted = uid in self.descriptors_from
                client = await serve_connection(sock, self.handler, takes=self.takes, descriptors=granted)
                connections[client] = uid
        finally:
            self.listener.close()
            for client in connections:
                await client.close()
