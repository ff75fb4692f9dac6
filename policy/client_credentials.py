"""Credentials that the client itself puts into a request: where they are, and what a policy does with them. Pure.

A host is bound if a rule or credential binding can send a secret to it. On a bound host the policy owns the credential
slots. Otherwise code in the sandbox could use an allowed host under another account, and carry data out.

- A slot is a text: `header:NAME` in lower case, `query:NAME` or `cookie:NAME`.
- `examine` finds the slots of a request that no secret of this request owns, and handles each one. It does not judge
  values: each value in such a slot counts, whatever its scheme.
- A slot that a secret owns is left to the injection, which removes what the client sent there. A slot with nothing but
  a placeholder of the request, or the name of a scheme before it, has no credential of the client. Neither has a Basic
  login with the user name of the rule and its placeholder.
- All bytes of the request that are not stripped stay as they are.
- No result contains a value or a query. Of the client's text it has the names of headers only.

Bodies and paths are not judged.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import unquote_to_bytes

from policy.credential_names import compact_key, is_credential_header, query_slot
from policy.injection import InjectionPlan, SecretPlan, Surface, basic_login, header_name

RULE = "client-credentials"
"""The rule of a refusal in the log."""

CLASSES = ("headers", "cookies", "query")
MAX_SLOTS = 64
_MAX_SHOWN = 64
_MAX_FOUND = 16
_PAIRS = re.compile(r"([&;])")
_SCHEME = re.compile(rb"\A[A-Za-z][A-Za-z0-9-]{0,15} (?! )")
_COOKIE_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}")
_QUERY_NAME = re.compile(r"[!-~]{1,64}")


class Handling(StrEnum):
    """What happens to a credential of the client. The order is from the strictest to the least strict."""

    REFUSE = "refuse"
    STRIP = "strip"
    ALLOW = "allow"


_ORDER = tuple(Handling)


@dataclass(frozen=True, slots=True)
class SlotHandling:
    """The handling of one slot. `slot` is in its one form (`slot_name`)."""

    slot: str
    handling: Handling

    def __post_init__(self) -> None:
        if slot_name(self.slot) != self.slot:
            raise ValueError(f"{self.slot[:100]!a} is not the canonical name of a slot")


@dataclass(frozen=True, slots=True)
class ClientCredentials:
    """The handling of each class of slots, and of single slots, which may be unknown to the table of names."""

    headers: Handling = Handling.REFUSE
    cookies: Handling = Handling.STRIP
    query: Handling = Handling.REFUSE
    slots: tuple[SlotHandling, ...] = ()

    def __post_init__(self) -> None:
        names = [one.slot for one in self.slots]
        if names != sorted(set(names)) or len(names) > MAX_SLOTS:
            raise ValueError(f"slots are sorted, each once, and {MAX_SLOTS} at most")

    @property
    def named(self) -> dict[str, SlotHandling]:
        """The single slots. The key of a query's slot is in the form in which such keys are compared."""
        return {_compared(one.slot): one for one in self.slots}

    def __str__(self) -> str:
        each = {kind: getattr(self, kind) for kind in CLASSES} | {one.slot: one.handling for one in self.slots}
        return ", ".join(f"{name} {handling}" for name, handling in each.items())


DEFAULT = ClientCredentials()
OF_BINDINGS = ClientCredentials(headers=Handling.STRIP)
"""For requests that a credential binding of the API matches: the egress API forwards these without a refusal."""


def slot_name(text: str) -> str:
    """Return the canonical name of a slot that a policy names.

    Raises:
        ValueError: the text names no slot, or a header that frames or routes requests.
    """
    place, _, name = text.partition(":")
    if place == "header":
        lower = _folded(header_name(name))
        if lower == "cookie":
            raise ValueError("a cookie is named as cookie:NAME")
        return f"header:{lower}"
    if place == "cookie" and _COOKIE_NAME.fullmatch(name):
        return text
    if place == "query" and _QUERY_NAME.fullmatch(name) and compact_key(name) and not _PAIRS.search(name):
        return text
    raise ValueError(f"{text[:100]!a} is no slot: header:NAME, query:NAME or cookie:NAME")


def made(classes: Mapping[str, Handling], slots: Mapping[str, Handling], base: ClientCredentials) -> ClientCredentials:
    """Return `base` with the handling of some classes and slots replaced."""
    single = {one.slot: one.handling for one in base.slots} | dict(slots)
    return ClientCredentials(
        classes.get("headers", base.headers),
        classes.get("cookies", base.cookies),
        classes.get("query", base.query),
        tuple(SlotHandling(slot, handling) for slot, handling in sorted(single.items())),
    )


def strictest(stated: Iterable[ClientCredentials]) -> ClientCredentials:
    """Return the strictest handling of each class and slot. `stated` has at least one value."""
    each = tuple(stated)
    if len(each) == 1:
        return each[0]
    names = sorted({one.slot for item in each for one in item.slots})
    return ClientCredentials(
        _strictest(item.headers for item in each),
        _strictest(item.cookies for item in each),
        _strictest(item.query for item in each),
        tuple(SlotHandling(name, _strictest(_handling_of(item, name) for item in each)) for name in names),
    )


def _strictest(stated: Iterable[Handling]) -> Handling:
    return min(stated, key=_ORDER.index)


def _handling_of(credentials: ClientCredentials, slot: str) -> Handling:
    single = credentials.named.get(_compared(slot))
    if single is not None:
        return single.handling
    if slot.startswith("query:"):
        return credentials.query
    return credentials.cookies if slot.startswith("cookie:") else credentials.headers


type Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class Examined:
    """What becomes of the credentials of the client in one request.

    Attributes:
        refused, stripped, forwarded: the slots, each once, 16 at most.
        headers, query: the request without the stripped ones.
    """

    refused: tuple[str, ...]
    stripped: tuple[str, ...]
    forwarded: tuple[str, ...]
    headers: Headers
    query: str


@dataclass(frozen=True, slots=True)
class Owned:
    """What the secrets of a request own: slots, the placeholders that become secrets in headers and the query, and the
    Basic logins whose password becomes one.
    """

    slots: frozenset[str] = frozenset()
    in_headers: frozenset[bytes] = frozenset()
    in_query: frozenset[str] = frozenset()
    logins: frozenset[tuple[bytes, bytes]] = frozenset()

    @classmethod
    def by(cls, plans: Iterable[SecretPlan]) -> "Owned":
        """Return what the secrets of these plans own."""
        slots: set[str] = set()
        in_headers: set[bytes] = set()
        in_query: set[str] = set()
        logins: set[tuple[bytes, bytes]] = set()
        for plan in plans:
            if isinstance(plan, InjectionPlan):
                slots |= {claim if ":" in claim else f"header:{_folded(claim)}" for claim in plan.claims}
                continue
            if Surface.HEADER in plan.surfaces:
                in_headers.add(plan.placeholder.encode())
            if Surface.QUERY in plan.surfaces:
                in_query.add(plan.placeholder)
            if Surface.BASIC in plan.surfaces:
                logins.add(plan.login)
        return cls(frozenset(slots), frozenset(in_headers), frozenset(in_query), frozenset(logins))


def examine(handling: ClientCredentials, owned: Owned, headers: Headers, query: str) -> Examined:
    """Find the credentials of the client in a request, and handle them."""
    return _Examination(handling, owned).result(headers, query)


class _Examination:
    def __init__(self, handling: ClientCredentials, owned: Owned) -> None:
        self._handling = handling
        self._owned = owned
        self._owned_keys = {slot[6:].lower() for slot in owned.slots if slot.startswith("query:")}
        self._named = handling.named
        self._found: dict[Handling, dict[str, None]] = {each: {} for each in Handling}

    def result(self, headers: Headers, query: str) -> Examined:
        kept = tuple(self._headers(headers))
        left = self._query(query) if query else query
        refused, stripped, forwarded = (tuple(self._found[each])[:_MAX_FOUND] for each in _ORDER)
        return Examined(refused, stripped, forwarded, kept, left)

    def _note(self, shown: str, handling: Handling) -> bool:
        """Note a slot; return whether its content stays."""
        self._found[handling][shown] = None
        return handling is not Handling.STRIP

    def _stays(self, single: SlotHandling | None, shown: str, handling: Handling) -> bool:
        return self._note(shown, handling) if single is None else self._note(single.slot, single.handling)

    def _headers(self, headers: Headers) -> Iterator[tuple[bytes, bytes]]:
        for name, value in headers:
            folded = _folded(name.decode("ascii", "replace"))
            if folded == "cookie":
                left = self._cookies(value)
                if left:
                    yield name, left
            elif f"header:{folded}" in self._owned.slots or self._header_stays(folded, value):
                yield name, value

    def _header_stays(self, name: str, value: bytes) -> bool:
        if self._owned.in_headers and _SCHEME.sub(b"", value) in self._owned.in_headers:
            return True
        if self._owned.logins and name == "authorization" and basic_login(value) in self._owned.logins:
            return True
        single = self._named.get(f"header:{name}")
        if single is None and not is_credential_header(name):
            return True
        return self._stays(single, f"header:{name[:_MAX_SHOWN]}", self._handling.headers)

    def _cookies(self, value: bytes) -> bytes:
        """Return the value of a Cookie header without the stripped cookies."""
        pieces = value.split(b";")
        kept = [piece for piece in pieces if self._cookie_stays(piece)]
        return value if len(kept) == len(pieces) else b";".join(kept).strip(b" \t")

    def _cookie_stays(self, piece: bytes) -> bool:
        if not piece.strip(b" \t"):
            return True
        name, _, content = piece.partition(b"=")
        if content.strip(b" \t") in self._owned.in_headers:
            return True
        slot = f"cookie:{name.strip(b' \t').decode('latin-1')}"
        # Some servers separate cookies at commas or read quotes: such a piece may have another name.
        plain = b"," not in piece and b'"' not in piece
        if plain and slot in self._owned.slots:
            return True
        return self._stays(self._named.get(slot) if plain else None, "cookie", self._handling.cookies)

    def _query(self, query: str) -> str:
        parts = _PAIRS.split(query)
        kept = [position for position in range(0, len(parts), 2) if self._pair_stays(parts[position])]
        if len(kept) * 2 == len(parts) + 1:
            return query
        return "".join(
            parts[position] if index == 0 else parts[position - 1] + parts[position]
            for index, position in enumerate(kept)
        )

    def _pair_stays(self, pair: str) -> bool:
        key, _, value = pair.partition("=")
        if value in self._owned.in_query:
            return True
        if self._owned_keys and _plain_key(key) in self._owned_keys:
            return True
        single = self._named.get(f"query:{compact_key(key)}") if self._named else None
        shown = query_slot(key)
        if single is None and shown is None:
            return True
        return self._stays(single, f"query:{shown}", self._handling.query)


def refusal(slots: tuple[str, ...]) -> str:
    """Return why a request with these slots is refused, and what to do, as sentences."""
    return (
        f"The request has credentials of its own ({', '.join(slots[:4])}), and on this host only the policy sends "
        "credentials. Send it without them. For an exception the operator sets client_credentials in a rule."
    )


def _compared(slot: str) -> str:
    return f"query:{compact_key(slot[6:])}" if slot.startswith("query:") else slot


def _folded(name: str) -> str:
    """Return a header name in the form in which servers compare names: many read `_` as `-`."""
    return name.lower().replace("_", "-")


def _plain_key(key: str) -> str:
    """Return a key as the injection compares it with the key that a secret owns."""
    return unquote_to_bytes(key.replace("+", " ")).strip(b" \t").lower().decode("latin-1")
