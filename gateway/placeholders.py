"""Finds the placeholders of a sandbox in what the sandbox sends. Pure.

- A placeholder leaves the sandbox in no inspected request. Where a rule binds it, its secret is in its place; elsewhere
  the request is refused, or the flow is cut.
- It is found as it is, percent-encoded, and in a Basic login; in a body as it is, over any split; in a name in
  lower case. A program that encodes it in another way on purpose gets it out. It is worth nothing there.
- The placeholder of another sandbox is an unknown text.
"""

from collections.abc import Mapping
from urllib.parse import unquote_to_bytes

from gateway.translate import Headers
from policy.decision import Deny
from policy.injection import basic_login

RULE = "placeholder"
"""The rule of denials, in the log."""


class Placeholders:
    """The placeholders of one sandbox, each with the name of its secret. Without one, every search is free.

    A search returns the name of the secret of a placeholder that it finds, None if there is none.
    """

    __slots__ = ("_lower", "_texts", "longest")

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = tuple((text.encode("ascii"), secret) for text, secret in sorted(texts.items()))
        self._lower = tuple((text.lower(), secret) for text, secret in sorted(texts.items()))
        self.longest = max(map(len, texts), default=0)

    def __bool__(self) -> bool:
        return bool(self._texts)

    def __repr__(self) -> str:
        return f"Placeholders({len(self._texts)})"

    def in_bytes(self, data: bytes) -> str | None:
        """Search the data as it is."""
        return next((secret for text, secret in self._texts if text in data), None)

    def in_head(self, target: bytes, headers: Headers) -> str | None:
        """Search a request head: its target, and the names and values of its headers."""
        if not self._texts:
            return None
        for text in (target, *(part for header in headers for part in header)):
            found = self.in_bytes(text) or self._encoded(text)
            if found is not None:
                return found
        return None

    def in_name(self, host: str) -> str | None:
        """Search a canonical host name. Names have no upper case."""
        return next((secret for text, secret in self._lower if text in host), None)

    def _encoded(self, text: bytes) -> str | None:
        unquoted = self.in_bytes(unquote_to_bytes(text)) if b"%" in text else None
        return unquoted or self.in_bytes(b":".join(basic_login(text) or ()))


class BodySearch:
    """Searches one body, which comes in pieces. It keeps less than one placeholder of it."""

    __slots__ = ("_known", "_tail")

    def __init__(self, known: Placeholders) -> None:
        self._known = known
        self._tail = b""

    def find(self, data: bytes) -> str | None:
        """Search for a placeholder that ends in this piece; return the name of its secret."""
        keep = self._known.longest - 1
        across = self._tail + data[:keep]
        self._tail = data[-keep:] if len(data) >= keep else (self._tail + data)[-keep:]
        return self._known.in_bytes(across) or self._known.in_bytes(data)


NONE = Placeholders({})


def refusal(secret: str) -> Deny:
    """Return the denial of a request with the placeholder of this secret."""
    return Deny(RULE, f"The request has the placeholder of secret {secret} where no rule replaces it.")
