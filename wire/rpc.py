"""Requests and answers between our processes, on top of frames.

    -> {"id": 7, "op": "launch", ...parameters}            ... and descriptors
    <- {"id": 7, "ok": {...result}}
    <- {"id": 7, "error": {"code": "...", "message": "..."}}
    -> {"op": "revoke", ...parameters}                     a notification: no id, no answer

The connection is symmetric: each side may send requests and notifications, and answers those of the other. `ask` and
`tell` send the typed values of `operations`, which also makes the handlers that take them.

- Requests of one connection are handled concurrently, as many as its `Limits` say; beyond it reading stops. A request
  counts until its answer is with the kernel: a peer that does not read its answers is not read.
- A peer that floods gets its turns of the event loop like any other: after `_TURN` bytes of frames others are served.
- Descriptors are taken only where this end said so (`descriptors`), from a peer that it trusts. Answers carry none.
- What is no request, no answer or the answer to nothing ends the connection. Codes and messages of errors are bounded.
- A handler's `RequestError` is the peer's answer, with its code. Any other exception becomes the answer
  `internal` without its text (which might hold a secret) and is logged on this side by class only.
- When a connection ends, every call that waits on it fails with `ConnectionError`: never a silent hang.
- A call's time-out counts the time in which the peer sent nothing and the caller's own loop ran (`patience`): a peer
  that answers other calls is not silent, and an answer that waits in the socket is not late.
- A message that is no frame, too large a one for instance, is its sender's failure alone: the connection goes on. So
  both ends are made with the same limits for a direction: `takes` of the one is `gives` of the other.
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
from wire.limits import WHOLE, Limits
from wire.operations import Notification, Ping, Request, answer_type, operation, parameters
from wire.patience import Patience
from wire.sockets import BACKLOG, Peer, connect_unix, peer_of

DEFAULT_TIMEOUT: Final = 30.0
MOST_ABANDONED: Final = 1024
"""Calls that were given up and whose answers may still come."""
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
        takes: what the peer may send.
        gives: what the peer takes.
        descriptors: the peer may pass descriptors with requests; it must be trusted.
    """

    def __init__(
        self,
        sock: socket.socket,
        handler: Handler = _refuse,
        *,
        takes: Limits = WHOLE,
        gives: Limits = WHOLE,
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
        cls, path: str | os.PathLike[str], uid: int, handler: Handler = _refuse, *, gives: Limits = WHOLE
    ) -> Self:
        """Connect to the unix socket at `path`, which a process of user `uid` must serve.

        Raises:
            WrongServer: another user's process serves it; nothing was sent.
            OSError: nothing listens there, or this process may not connect.
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
        if self.closed.is_set():
            raise ConnectionError(f"connection closed before {op!r}")
        if fds and not self._accepted:  # a listener takes descriptors of those whom it has accepted and knows
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
                future.exception()  # when sending has failed nobody waits for the answer, and its failure is no news

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
        return object() if poll.poll(0) else self._frames

    async def _send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Send one frame whole: a caller that is cancelled in the middle must not leave half a frame behind.

        The descriptors are duplicated, so that they outlive a caller that closes its own meanwhile.
        """
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
            FrameError: it is neither request nor answer.
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
        elif future.done():  # its caller has just given up
            return
        elif isinstance(error, dict):
            future.set_exception(RemoteError(_code(error.get("code")), _sentence(error.get("message"))))
        else:
            future.set_result(result or {})

    async def _handle(self, ident: int | None, op: str, parameters: Message, fds: list[int], cost: int) -> None:
        try:
            try:
                answer: Message = {"id": ident, "ok": await self._handler(self, op, parameters, fds) or {}}
            except RequestError as error:
                answer = {"id": ident, "error": {"code": error.code, "message": error.message}}
            except Exception as error:  # noqa: BLE001 - closes: the peer gets an error, never a result
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
    """Room for the requests of one connection; its reader alone waits for it."""

    def __init__(self, limits: Limits) -> None:
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
        """Give the room of one request back."""
        self._requests -= 1
        self._held -= cost
        self._freed.set()


def _code(value: object) -> Code:
    return Code(value) if isinstance(value, str) and value in Code else Code.MALFORMED


def _sentence(value: object) -> str:
    """Return a peer's message as it may go into logs, records and answers."""
    text = value[:_MOST_MESSAGE] if isinstance(value, str) else ""
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)


async def serve_connection(
    sock: socket.socket, handler: Handler, *, takes: Limits = WHOLE, descriptors: bool = False
) -> Client:
    """Serve one connected socket (one end of a pair, say); returns the running connection."""
    client = Client(sock, handler, takes=takes, descriptors=descriptors)
    client.start()
    return client


async def serve_unix(
    listener: socket.socket,
    handler: Handler,
    *,
    allowed_uids: frozenset[int],
    max_connections: int = 16,
    takes: Limits = WHOLE,
    descriptors_from: frozenset[int] = frozenset(),
) -> asyncio.Task[None]:
    """Listen on a bound socket and serve every peer whose uid is allowed; returns the accepting task.

    Cancelling the task closes the listener here and all its connections.

    Args:
        listener: of `sockets.bind_unix`, or inherited.
        max_connections: of one uid; a further one is accepted and closed at once.
        takes: what a peer may send on one connection.
        descriptors_from: uids that may pass descriptors.
    """
    listener.setblocking(False)
    shielded = passing.refuse(listener)
    listener.listen(BACKLOG)  # by this process, also where another has before: clients see the last caller's uid
    server = _Server(listener, handler, allowed_uids, max_connections, takes, descriptors_from, shielded)
    return asyncio.get_running_loop().create_task(server.accept(), name="wire-accept")


@dataclass(frozen=True, slots=True)
class _Server:
    listener: socket.socket
    handler: Handler
    allowed_uids: frozenset[int]
    max_connections: int
    takes: Limits
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
