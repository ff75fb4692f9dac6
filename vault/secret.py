"""A secret value that does not slip out.

- `repr` and `str` show a fixed text; formatting into a string, pickling, copying and JSON encoding raise.
- Equality takes time independent of where two values differ; a secret cannot be a dictionary key.
- The one way to the text is `reveal()`, so that a search for that word finds every place where secrets are used.

It does not wipe memory: Python strings are immutable and may have been copied by the interpreter. What limits the
exposure is the process around it (no core dumps, not dumpable, pages locked where allowed).
"""

import hmac
from typing import Any, Never, NoReturn, SupportsIndex, final

MAX_SECRET_BYTES = 64 * 1024
MIN_SENT = 8
"""Characters below which a value cannot be told from other text: the gateway could not take it out of a response, and
does not send it."""


@final
class Secret:
    """Holds one secret text."""

    __slots__ = ("_text",)
    _text: str

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError("a secret is a text")
        object.__setattr__(self, "_text", text)

    def reveal(self) -> str:
        """Return the text. Give it to nothing that logs, formats or keeps it."""
        return self._text

    def __repr__(self) -> str:
        return "Secret(hidden)"

    __str__ = __repr__

    def __format__(self, spec: str) -> Never:
        raise TypeError("a secret is not formatted; use reveal() where the text must be known")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(_octets(self._text), _octets(other._text))

    __hash__ = None  # type: ignore[assignment]  # a hash would tell values apart without comparing them

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
    """Say why `text` can never be a secret, without quoting it; None if it can."""
    if not text:
        return "the value is empty"
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        return "the value is not valid Unicode text"
    return f"the value is over {MAX_SECRET_BYTES} bytes" if size > MAX_SECRET_BYTES else None


def value_problem(text: str) -> str | None:
    """As `text_problem`, for a secret that goes into headers.

    A line break or NUL would split a header; white space at an end is a pasting mistake that no service accepts; what
    is too short would never be sent (see `MIN_SENT`).
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
