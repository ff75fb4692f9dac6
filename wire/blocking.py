"""A client for programs without an event loop: one typed request at a time, on a blocking socket."""

import os
import socket
from types import TracebackType
from typing import Self

from wire import codec
from wire.frames import FrameError, receive, send
from wire.operations import Request, answer_type, operation, parameters
from wire.rpc import refusal
from wire.sockets import check_server


class BlockingClient:
    """A connection to the unix socket at `path`, which a process of user `uid` must serve; closed by `with`."""

    def __init__(self, path: str | os.PathLike[str], uid: int, timeout: float) -> None:
        """Connect; `timeout` is in seconds, for each step of a request.

        Raises:
            WrongServer: a process of another user serves it; nothing was sent.
            OSError: no process listens there, or this process may not connect.
        """
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._last = 0
        try:
            self._sock.settimeout(timeout)
            self._sock.connect(os.fspath(path))
            check_server(self._sock, path, uid)
        except BaseException:
            self._sock.close()
            raise

    def __enter__(self) -> Self:
        """Return the client itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def ask[Answer](self, request: Request[Answer]) -> Answer:
        """Send a request and return its answer.

        Raises:
            RemoteError: the peer refused.
            ConnectionError: the connection ended, or the answer is not exactly of the request's type.
            TimeoutError: a step took too long.
        """
        self._last += 1
        send(self._sock, {"id": self._last, "op": operation(request), **parameters(request)})
        try:
            received = receive(self._sock)
        except FrameError as error:
            raise ConnectionError(f"the answer is no frame: {error}") from None
        if received is None:
            raise ConnectionError("the connection ended before the answer")
        message = received[0]
        if message.get("id") != self._last:
            raise ConnectionError("the answer is to another request")
        if "ok" not in message:
            raise refusal(message.get("error"))
        try:
            answer: Answer = codec.decode(answer_type(request), message["ok"])
        except codec.CodecError as error:
            raise ConnectionError(f"the answer to {operation(request)!r} is none: {error}") from None
        return answer
