"""Requests of one process to another as typed values, and the closed set of them that an end of a connection takes.

A request is a frozen dataclass that says with which one it is answered; its operation is its name in snake case:

    @dataclass(frozen=True, slots=True)
    class CloseSandbox(Request[Closed]):
        sandbox: str

`{"op": "close_sandbox", "sandbox": "..."}` is then the one frame that it is read from.

- What is not in the set, or not exactly a request of it, never reaches a handler.
- A type's own checks (`__post_init__`) bound its values.
"""

import re
import typing
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from wire import codec
from wire.errors import Code, RequestError
from wire.frames import close_all

if TYPE_CHECKING:
    from wire.rpc import Client
    from wire.rpc import Handler as Untyped

_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_MOST_TEXT: Final = 300
_RESERVED: Final = frozenset({"id", "op", "fds", "timeout"})
"""What a frame has beside the parameters, and what `Client.call` has: no message has a field of this name."""


class Request[Answer]:
    """A request that is answered with an `Answer`."""

    __slots__ = ()


class Notification:
    """A message that is not answered."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The answer of what has nothing more to say."""


@dataclass(frozen=True, slots=True)
class Ping(Request[Done]):
    """Asks whether the peer's event loop runs; each end answers it by itself."""


type Message = Request[Any] | Notification


def operation(message: Message) -> str:
    """Return the name of a message's operation on the wire."""
    kind: Any = type(message)
    return _operation(kind)


def answer_type(request: Request[Any]) -> type:
    """Return the type of the answer to a request."""
    kind: Any = type(request)
    return _answer_type(kind)


@cache
def _operation(kind: Any) -> str:
    return _HUMP.sub("_", kind.__name__).lower()


@cache
def _answer_type(kind: Any) -> type:
    for base in getattr(kind, "__orig_bases__", ()):
        if typing.get_origin(base) is Request:
            answer: type = typing.get_args(base)[0]
            return answer
    raise TypeError(f"{kind.__name__} does not say how it is answered")


def parameters(message: object) -> dict[str, codec.Json]:
    """Return the members of a request, notification or answer as they are sent."""
    encoded = codec.encode(message)
    if not isinstance(encoded, dict):  # its only field is called `text`
        raise TypeError(f"{type(message).__name__} has no members")
    return encoded


type Handler[Taken: Message] = Callable[["Client", Taken, list[int]], Awaitable[object]]
"""`handler(connection, message, fds) -> answer`: an answer of the request's type, None for `Done` and notifications.
The handler owns `fds`."""


class Operations:
    """A closed set of requests and notifications."""

    def __init__(self, *kinds: type[Message]) -> None:
        """Take exactly `kinds`, and `Ping`.

        Raises:
            TypeError: a field of one of them would take the place of a part of the frame.
        """
        taken: tuple[Any, ...] = (Ping, *kinds)
        for kind in taken:
            if wrong := _RESERVED & {field.name for field in fields(kind)}:
                raise TypeError(f"{kind.__name__} has a field that is reserved: {min(wrong)}")
        self._kinds: Final = {_operation(kind): kind for kind in taken}

    def __contains__(self, kind: object) -> bool:
        """Whether messages of a type are in the set."""
        return kind in self._kinds.values()

    def read(self, op: str, given: Mapping[str, Any]) -> Message:
        """Return the message of operation `op`.

        Raises:
            RequestError: `UNKNOWN_OP` or `INVALID`.
        """
        if (kind := self._kinds.get(op)) is None:
            raise RequestError(Code.UNKNOWN_OP, f"unknown operation {op[:64]!r}")
        try:
            message: Message = codec.decode(kind, given, op)
        except codec.CodecError as error:
            raise RequestError(Code.INVALID, str(error)[:_MOST_TEXT]) from None
        return message

    def handler(self, handle: Handler[Any]) -> "Untyped":
        """Return what serves a connection with `handle`, which gets messages of this set only; `Ping` is answered."""

        async def serve(client: "Client", op: str, given: Mapping[str, Any], fds: list[int]) -> dict[str, Any]:
            try:
                message = self.read(op, given)
            except RequestError:
                close_all(fds)
                raise
            if isinstance(message, Ping):
                close_all(fds)
                return {}
            answer = await handle(client, message, fds)
            if not isinstance(message, Request):
                return {}
            kind = answer_type(message)
            if answer is None and kind is Done:
                return {}
            if not isinstance(answer, kind):
                raise TypeError(f"{op} was answered with a {type(answer).__name__}")
            return parameters(answer)

        return serve
