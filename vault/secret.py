"""A type for secret values, which prevents accidental disclosure.

- `repr` and `str` return a fixed text. Formatting into a string, pickling, copying and JSON encoding raise.
- Comparison takes constant time. A secret cannot be a dictionary key.
- Only `reveal()` returns the text, so a search for that word finds every use of a secret. `identity()` tells equal
  texts apart from others, for a caller with a key of its own.

The type does not wipe memory: Python strings are immutable, and the interpreter may copy them. The process limits the
exposure (no core dumps, not dumpable, pages locked if permitted).
"""

import hmac
from typing import Any, Never, NoReturn, SupportsIndex, final

MAX_SECRET_BYTES = 64 * 1024
MIN_SENT = 8
"""The shortest value, in characters, that the gateway sends. It could not find a shorter one reliably in a response."""


@final
class Secret:
    """One secret text."""

    __slots__ = ("_text",)
    _text: str

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError("a secret is a text")
        object.__setattr__(self, "_text", text)

    def reveal(self) -> str:
        """Return the text. Do not pass it to code that logs, formats or stores it."""
        return self._text

    def identity(self, key: bytes) -> bytes:
        """Return a keyed digest: equal for equal texts under one key, and without meaning under another.

        `key` is random and stays in this process, at least 32 bytes.
        """
        return hmac.digest(key, _octets(self._text), "sha256")

    def __repr__(self) -> str:
        return "Secret(hidden)"

    __str__ = __repr__

    def __format__(self, spec: str) -> Never:
        raise TypeError("a secret cannot be formatted: use reveal() if the text is needed")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(_octets(self._text), _octets(other._text))

    __hash__ = None  # type: ignore[assignment]  # a hash would reveal whether two values differ

    def __setattr__(self, name: str, value: Any) -> Never:
        raise AttributeError("a secret does not change")

    def __delattr__(self, name: str) -> Never:
        raise AttributeError("a secret does not change")

    def __copy__(self) -> NoReturn:
        raise TypeError("a secret is not copied")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError("a secret is not copied")

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a secret is not pickled")

    def __getstate__(self) -> NoReturn:
        raise TypeError("a secret is not pickled")


def text_problem(text: str) -> str | None:
    """Return why `text` cannot be a secret, without quoting it; None if it can."""
    if not text:
        return "the value is empty"
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        return "the value is not valid Unicode text"
    return f"the value is over {MAX_SECRET_BYTES} bytes" if size > MAX_SECRET_BYTES else None


def value_problem(text: str) -> str | None:
    """Like `text_problem`, for a secret that is sent in headers.

    A line break or NUL would split a header. White space at an end is a copying mistake that no service accepts. A
    value that is too short is never sent (see `MIN_SENT`).
    """
    if problem := text_problem(text):
        return problem
    if any(character in text for character in "\r\n\0"):
        return "the value contains a line break or NUL"
    if text != text.strip():
        return "the value begins or ends with white space"
    if len(text) < MIN_SENT:
        return f"the value is shorter than {MIN_SENT} characters: it could not be taken out of responses"
    return None


def _octets(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
