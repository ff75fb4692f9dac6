"""How the gateway signs a request with a secret: the parts of a plan (no secret in them). Pure.

- `AwsSigning` is Signature Version 4. Region and service come from the rule, or from the host.
- `HmacSigning` is a keyed hash over a text that the rule describes. A template is literal text and parts from a closed
  list. A part that is not in the list is refused when the policy is read. Nothing is evaluated.
- Each claims the slots that it writes, so no other injection of the request can have them.

`gateway/signing/` does the work.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from policy.aws_hosts import AwsScope, scope_of

MAX_TEMPLATE = 1024

AWS_HEADERS = ("authorization", "x-amz-date", "x-amz-security-token", "x-amz-content-sha256")
AWS_QUERY_KEYS = (
    "x-amz-algorithm",
    "x-amz-credential",
    "x-amz-date",
    "x-amz-expires",
    "x-amz-signedheaders",
    "x-amz-signature",
    "x-amz-security-token",
)
"""The slots of a version 4 signature, in lower case."""

_SCOPE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,62}[A-Za-z0-9])?")
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,256}")
_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|([^{}]+)")
_HEADER_PART = "header:"
_UNSTABLE = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "keep-alive", "te", "trailer", "upgrade", "expect"}
    | {"cookie", "proxy-authorization", "proxy-connection", "http2-settings", "accept-encoding", "range", "if-range"}
)
"""Headers that differ between the connections of the client and of the server, or that the gateway sets."""


@dataclass(frozen=True, slots=True)
class AwsSigning:
    """Signature Version 4. A missing part is derived from the host."""

    region: str | None = None
    service: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("region", self.region), ("service", self.service)):
            if value is not None and _SCOPE.fullmatch(value) is None:
                raise ValueError(f"an AWS {name} is up to 64 letters, digits and hyphens")

    def scope(self, host: str) -> AwsScope:
        """Return the scope for a host.

        Raises:
            ValueError: a part is neither given nor derivable.
        """
        derived = scope_of(host)
        region = self.region or (derived and derived.region)
        service = self.service or (derived and derived.service)
        if not region or not service:
            missing = " and ".join(name for name, value in (("region", region), ("service", service)) if not value)
            raise ValueError(f"the AWS {missing} of {host} does not follow from its name: give it in the rule")
        return AwsScope(region, service)

    @property
    def claims(self) -> frozenset[str]:
        """The slots that a signature writes."""
        return frozenset((*AWS_HEADERS, *(f"query:{key}" for key in AWS_QUERY_KEYS)))


class HmacDigest(StrEnum):
    """The hash. SHA-1 is only for services that have no other."""

    SHA256 = "sha256"
    SHA512 = "sha512"
    SHA1 = "sha1"


class KeyForm(StrEnum):
    """How the secret's text contains the key."""

    RAW = "raw"
    BASE64 = "base64"
    HEX = "hex"


class SignatureForm(StrEnum):
    """How the signature is written."""

    HEX = "hex"
    BASE64 = "base64"


class TimestampForm(StrEnum):
    """The unit of the time, since 1970."""

    SECONDS = "seconds"
    MILLISECONDS = "milliseconds"


class PartKind(StrEnum):
    """A part of a template. TEXT and HEADER have an argument."""

    TEXT = "text"
    METHOD = "method"
    HOST = "host"
    PATH = "path"
    QUERY = "query"
    TARGET = "target"
    BODY = "body"
    BODY_SHA256 = "body_sha256"
    TIMESTAMP = "timestamp"
    HEADER = "header"
    SIGNATURE = "signature"


_IN_MESSAGE = frozenset(PartKind) - {PartKind.TEXT, PartKind.HEADER, PartKind.SIGNATURE}
_IN_VALUE = frozenset({PartKind.SIGNATURE, PartKind.TIMESTAMP})


@dataclass(frozen=True, slots=True)
class TemplatePart:
    """One part of a template; `argument` is the text, or the name of the header in lower case."""

    kind: PartKind
    argument: str = ""


def message_parts(template: str) -> tuple[TemplatePart, ...]:
    """Return the parts of a text to sign, such as `{timestamp}{method}{target}{body}`. `{{` is a brace.

    Raises:
        ValueError: the template is not valid.
    """
    return _parts(template, _IN_MESSAGE, headers=True)


def value_parts(template: str) -> tuple[TemplatePart, ...]:
    """Return the parts of a header's value, such as `sha256={signature}`.

    Raises:
        ValueError: the template is not valid.
    """
    if any(not " " <= character <= "~" for character in template) or template != template.strip(" "):
        raise ValueError("a header's value is ASCII text without blanks at its edges")
    return _parts(template, _IN_VALUE, headers=False)


def _parts(template: str, known: frozenset[PartKind], *, headers: bool) -> tuple[TemplatePart, ...]:
    if not 0 < len(template) <= MAX_TEMPLATE:
        raise ValueError(f"a template has 1 to {MAX_TEMPLATE} characters")
    found: list[TemplatePart] = []
    at = 0
    while at < len(template):
        piece = _PIECE.match(template, at)
        if piece is None:
            raise ValueError("a brace of the template has no partner; a brace itself is written twice")
        at = piece.end()
        if piece[1] is None:
            found.append(TemplatePart(PartKind.TEXT, piece[2] or piece[0][0]))
        elif headers and piece[1].startswith(_HEADER_PART):
            found.append(TemplatePart(PartKind.HEADER, _signed_header(piece[1].removeprefix(_HEADER_PART))))
        elif piece[1] in known:
            found.append(TemplatePart(PartKind(piece[1])))
        else:
            names = ", ".join(sorted(known)) + (", header:NAME" if headers else "")
            raise ValueError(f"the template has the unknown part {piece[1][:100]!a}; known here: {names}")
    return tuple(found)


def _signed_header(name: str) -> str:
    lower = name.lower()
    if _TOKEN.fullmatch(name) is None:
        raise ValueError(f"{name[:100]!a} is not the name of a header")
    if lower.replace("_", "-") in _UNSTABLE:
        raise ValueError(f"the header {lower} cannot be signed: the gateway and HTTP change it")
    return lower


@dataclass(frozen=True, slots=True)
class HmacSigning:
    """A keyed hash in a header.

    Attributes:
        header: the name of the header, in canonical case.
        message: the template of the text that is signed.
        value: the template of the header's value.
        timestamp_header: the header that carries the time, in canonical case.
    """

    header: str
    message: str
    algorithm: HmacDigest = HmacDigest.SHA256
    key: KeyForm = KeyForm.RAW
    output: SignatureForm = SignatureForm.HEX
    value: str = "{signature}"
    timestamp: TimestampForm = TimestampForm.SECONDS
    timestamp_header: str | None = None

    def __post_init__(self) -> None:
        message, value = message_parts(self.message), value_parts(self.value)
        if sum(part.kind is PartKind.SIGNATURE for part in value) != 1:
            raise ValueError("the value of the header contains {signature} once")
        timed = any(part.kind is PartKind.TIMESTAMP for part in message)
        sent = self.timestamp_header is not None or any(part.kind is PartKind.TIMESTAMP for part in value)
        if timed and not sent:
            raise ValueError("a signed {timestamp} is sent in `timestamp_header`, or in `value`")
        if sent and not timed:
            raise ValueError("a timestamp that is sent is a part of the text that is signed")
        if self.timestamp_header is not None and _folded(self.timestamp_header) == _folded(self.header):
            raise ValueError("signature and timestamp are in different headers")
        if any(part.kind is PartKind.HEADER and _folded(part.argument) in self.claims for part in message):
            raise ValueError("the signature does not cover the headers that it writes")

    @property
    def signs_body(self) -> bool:
        """Whether the body is a part of the text."""
        return any(part.kind in (PartKind.BODY, PartKind.BODY_SHA256) for part in message_parts(self.message))

    @property
    def claims(self) -> frozenset[str]:
        """The slots that a signature writes."""
        return frozenset(_folded(name) for name in (self.header, self.timestamp_header) if name is not None)


def _folded(name: str) -> str:
    return name.lower().replace("_", "-")
