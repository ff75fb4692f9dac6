"""Typed requests between processes, and the closed set of requests that an end of a connection accepts.

A request is a frozen dataclass. Its base names the type of the answer; its operation is its name in snake case:

    @dataclass(frozen=True, slots=True)
    class CloseSandbox(Request[Closed]):
        sandbox: str

Its only form as a frame is `{"op": "close_sandbox", "sandbox": "..."}`.

- A handler receives only valid requests of the set.
- A type's own checks (`__post_init__`) limit its values.

Pure; `wire.serving` answers requests.
"""

import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Final

from wire import codec
from wire.errors import Code, RequestError

_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_MOST_TEXT: Final = 300
_RESERVED: Final = frozenset({"id", "op", "fds", "timeout"})
"""Reserved names: the other members of a frame, and the arguments of `Client.call`. No message has such a field."""


class Request[Answer]:
    """A request whose answer is an `Answer`."""

    __slots__ = ()


class Notification:
    """A message without an answer."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Done:
    """An answer without content."""


@dataclass(frozen=True, slots=True)
class Ping(Request[Done]):
    """Tests whether the peer's event loop runs. `wire.serving` answers it."""


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
    raise TypeError(f"{kind.__name__} has no type of answer: derive it from Request[...]")


def parameters(message: object) -> dict[str, codec.Json]:
    """Return the members of a request, notification or answer for a frame."""
    encoded = codec.encode(message)
    if not isinstance(encoded, dict):  # its only field is `text`
        raise TypeError(f"{type(message).__name__} has no members")
    return encoded


class Operations:
    """A closed set of requests and notifications."""

    def __init__(self, *kinds: type[Message]) -> None:
        """Accept exactly `kinds`, and `Ping`.

        Raises:
            TypeError: a field of one of them has a reserved name.
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
