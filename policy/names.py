"""Host names: one canonical form, and the patterns that match it.

- The canonical form is lower-case ASCII: letters, digits, `-` and `_` in labels of 1 to 63, joined by single dots, at
  most 253 in all, no dot at the end. Labels beginning `xn--` are canonical Punycode.
- Folding is ASCII only. A wire name with another byte is refused, never corrected or truncated.
- A name whose last label is a number (`127.1`, `0x7f.1`, `10.0.0.1`) is an address, and refused.
- `*.suffix` matches one or more labels before the suffix, and never the suffix itself. There is no other wildcard.

The module resolves nothing. The public suffix list is that of the pinned package `publicsuffixlist`.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

import idna
from publicsuffixlist import PublicSuffixList

MAX_HOST = 253
MAX_LABEL = 63

_LOWER = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"abcdefghijklmnopqrstuvwxyz")
_ALLOWED = b"abcdefghijklmnopqrstuvwxyz0123456789-_."
_DIGITS = frozenset("0123456789")
_HEX = frozenset("0123456789abcdef")

# Names of this machine or of private networks, for every resolver (RFC 6761, 6762, 8375, 9476).
_LOCAL_SUFFIXES = (
    "localhost",
    "localdomain",
    "local",
    "internal",
    "intranet",
    "private",
    "corp",
    "home",
    "lan",
    "home.arpa",
    "in-addr.arpa",
    "ip6.arpa",
    "onion",
    "alt",
)


class InvalidName(ValueError):
    """The text is no accepted host name. The message quotes it with `ascii`, never raw."""


def wire_host(raw: bytes) -> str:
    """Return the canonical form of a name received from the network.

    Raises:
        InvalidName: the text is not one clean name; IP literals are refused, too.
    """
    return _wire_host_before(raw) if len(raw) <= MAX_HOST else _wire_host(raw)


def _wire_host(raw: bytes) -> str:
    name = raw.translate(_LOWER)
    if name.endswith(b"."):
        name = name[:-1]
    if not name:
        raise InvalidName("host name is empty")
    if len(name) > MAX_HOST:
        raise InvalidName(f"host name is longer than {MAX_HOST} characters")
    if name.translate(None, _ALLOWED):
        raise InvalidName(f"host name {_quote(raw)} has a character that is not allowed in host names")
    host = name.decode("ascii")
    labels = host.split(".")
    for label in labels:
        _check_label(label, raw)
    last = labels[-1]
    if _DIGITS.issuperset(last) or (last.startswith("0x") and _HEX.issuperset(last[2:])):
        raise InvalidName(f"host name {_quote(raw)} ends in a number, so it is an address and not a name")
    return host


_wire_host_before = lru_cache(maxsize=256)(_wire_host)


def canonical_host(text: str) -> str:
    """Return the canonical form of a name from a document or an API call: U-labels become A-labels.

    Raises:
        InvalidName: the text is no host name, or IDNA 2008 does not allow a label (full-width letters, soft hyphens).
    """
    if text.isascii():
        return wire_host(text.encode("ascii"))
    # Only "." separates labels. A full-width dot (U+3002, U+FF0E, U+FF61) stays in a label, and IDNA refuses it.
    return wire_host(".".join(_a_label(label, text) for label in text.split(".")).encode("ascii"))


@lru_cache(maxsize=4096)
def is_canonical(host: str) -> bool:
    """Whether `host` is in canonical form, as `wire_host` returns it."""
    try:
        return host.isascii() and wire_host(host.encode("ascii")) == host
    except InvalidName:
        return False


def is_local_name(host: str) -> bool:
    """Whether a canonical name belongs to this machine or a private network, as single labels do."""
    return "." not in host or any(host == suffix or host.endswith(f".{suffix}") for suffix in _LOCAL_SUFFIXES)


@dataclass(frozen=True, slots=True)
class HostPattern:
    """An exact canonical name, or `*.` and one.

    Raises:
        InvalidName: the text is another one. Use `parse_pattern` for text of a document.
    """

    text: str

    def __post_init__(self) -> None:
        if not is_canonical(self.text.removeprefix("*.")):
            raise InvalidName(f"{self.text[:300]!a} is not a canonical host pattern")

    @property
    def wildcard(self) -> bool:
        """Whether this is a `*.suffix` pattern."""
        return self.text.startswith("*.")

    @property
    def suffix(self) -> str:
        """The name after `*.`; for an exact pattern, the name itself."""
        return self.text.removeprefix("*.")

    def matches(self, host: str) -> bool:
        """Whether the pattern matches the canonical name `host`."""
        if self.wildcard:
            return host.endswith(self.text[1:]) and len(host) > len(self.text) - 1
        return host == self.text


def parse_pattern(text: str) -> HostPattern:
    """Read a pattern of an allow rule.

    Raises:
        InvalidName: the text is no pattern, or a wildcard over names of different owners.
    """
    pattern = parse_any_pattern(text)
    if pattern.wildcard and spans_owners(pattern.suffix):
        raise InvalidName(f"wildcard {text[:300]!a} spans a public suffix: name the registered domain below it")
    return pattern


def parse_any_pattern(text: str) -> HostPattern:
    """Read a pattern that may span a public suffix: in denials, a ceiling, or the API.

    Raises:
        InvalidName: the text is no pattern.
    """
    wildcard = text.startswith("*.")
    rest = text[2:] if wildcard else text
    if "*" in rest or not rest:
        raise InvalidName(f"{text[:300]!a}: the only wildcard is a leading `*.` in front of a name")
    return HostPattern(f"*.{canonical_host(rest)}" if wildcard else canonical_host(rest))


def spans_owners(suffix: str) -> bool:
    """Whether names below a canonical `suffix` have unrelated owners: it is a public suffix, or above one."""
    suffixes, ancestors = _public_suffixes()
    return suffix in ancestors or suffixes.publicsuffix(suffix) == suffix


@cache
def _public_suffixes() -> tuple[PublicSuffixList, frozenset[str]]:
    """Return the pinned list (ICANN and private sections) and the parents of its entries."""
    suffixes = PublicSuffixList(accept_unknown=True)
    ancestors: set[str] = set()
    # The package has no public iteration over its rules. A test checks this attribute for known entries.
    for rule in suffixes._publicsuffix:
        labels = rule.lstrip("!").split(".")
        ancestors.update(".".join(labels[start:]) for start in range(1, len(labels)))
    return suffixes, frozenset(ancestors)


def _check_label(label: str, raw: bytes) -> None:
    if not label:
        raise InvalidName(f"host name {_quote(raw)} has an empty label")
    if len(label) > MAX_LABEL:
        raise InvalidName(f"host name {_quote(raw)} has a label longer than {MAX_LABEL} characters")
    if label[0] == "-" or label[-1] == "-":
        raise InvalidName(f"host name {_quote(raw)} has a label with a hyphen at its edge")
    if label.startswith("xn--"):
        try:
            decoded = label[4:].encode("ascii").decode("punycode")
            again = decoded.encode("punycode").decode("ascii")
        except (UnicodeError, ValueError, OverflowError) as error:
            raise InvalidName(f"host name {_quote(raw)} has a label that is not Punycode") from error
        if decoded.isascii() or again != label[4:]:
            raise InvalidName(f"host name {_quote(raw)} has a label that is not canonical Punycode")


def _a_label(label: str, text: str) -> str:
    if label.isascii():
        return label
    folded = []
    for character in label:
        lower = character.lower()
        # The Kelvin sign folds to an ASCII k. A non-ASCII letter must never become an ASCII letter.
        if len(lower) != 1 or (lower.isascii() and not character.isascii()):
            raise InvalidName(f"host name {text[:300]!a} has a letter that cannot be folded")
        folded.append(lower)
    try:
        return idna.alabel("".join(folded)).decode("ascii")
    except UnicodeError as error:
        raise InvalidName(f"host name {text[:300]!a} is not valid under IDNA 2008") from error


def _quote(raw: bytes) -> str:
    return ascii(raw[:300].decode("latin-1"))
