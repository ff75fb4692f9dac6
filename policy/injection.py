"""Where a secret goes in a request: the plans (no secret in them) and the rendering of a header (pure).

- An `InjectionPlan` puts a secret into its slot. A `SubstitutionPlan` puts a secret in place of each copy of a
  placeholder, on the surfaces that it names.
- A plan names the secret. The value exists only in the arguments and the result of `render`.
- No error message contains the value or a part of it.
- The binding owns its slot: the caller removes what the client sent in it before it applies a plan.
"""

import base64
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never
from urllib.parse import quote

from policy.signing import AwsSigning, HmacSigning

MAX_VALUE = 64 * 1024
MAX_PLACEHOLDER = 1024
MAX_NAME = 128

_TOKEN = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")

_UNRESERVED = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-._~")
_COOKIE = frozenset(map(chr, range(0x21, 0x7F))) - frozenset('",;\\')
"""The characters of a cookie's value: RFC 6265, 4.1.1."""

_RESERVED = frozenset(
    {
        # reserved by the OpenSandbox egress API
        "host",
        "content-length",
        "content-type",
        "transfer-encoding",
        "connection",
        "upgrade",
        "te",
        "trailer",
        "proxy-authorization",
        "proxy-authenticate",
        "forwarded",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-forwarded-proto",
        # framing, connection management, and routing headers that a server may obey
        "expect",
        "keep-alive",
        "proxy-connection",
        "http2-settings",
        "x-http-method",
        "x-http-method-override",
        "x-method-override",
        "x-original-url",
        "x-rewrite-url",
        "x-forwarded-port",
        "x-forwarded-server",
        "x-forwarded-prefix",
        "x-real-ip",
        "via",
        "content-encoding",
        "date",
    }
)
_RESERVED_PREFIXES = ("sec-websocket-", "opensandbox-", "open-sandbox-", "x-sallyport-")


class InjectionKind(StrEnum):
    """Where a secret is sent, and in which form. BASIC encodes `user:password`; BASIC_RAW takes an encoded value.

    QUERY is one parameter of the query, COOKIE one cookie of the header `Cookie`. CLIENT_CERTIFICATE is presented in
    the TLS handshake with the server. AWS_SIGV4 and HMAC sign the request, and the secret is not sent. The others are
    headers.
    """

    BEARER = "bearer"
    BASIC = "basic"
    BASIC_RAW = "basic-raw"
    API_KEY = "api-key"
    QUERY = "query"
    COOKIE = "cookie"
    CLIENT_CERTIFICATE = "client-certificate"
    AWS_SIGV4 = "aws-sigv4"
    HMAC = "hmac"


@dataclass(frozen=True, slots=True)
class InjectionPlan:
    """One secret to put into one slot of a request.

    Attributes:
        binding: the id of the rule or credential binding with this injection.
        name: the name of the header, in canonical case; of the query parameter; or of the cookie; empty for a client
            certificate.
        username: of BASIC, the user name before the secret.
        aws, hmac: how the request is signed, for the kinds of these names.
    """

    binding: str
    secret: str
    kind: InjectionKind
    name: str
    username: str | None = None
    aws: AwsSigning | None = None
    hmac: HmacSigning | None = None

    def __post_init__(self) -> None:
        match self.kind:
            case InjectionKind.QUERY:
                query_name(self.name)
            case InjectionKind.COOKIE:
                cookie_name(self.name)
            case InjectionKind.CLIENT_CERTIFICATE:
                if self.name:
                    raise ValueError(f"{self.kind} is presented in the TLS handshake and takes no name")
            case _:
                if self.name != header_name(self.name):
                    raise ValueError(f"injection header {self.name!a} is not in canonical case")
                own = self.kind in (InjectionKind.API_KEY, InjectionKind.HMAC)
                if not own and self.name != "Authorization":
                    raise ValueError(f"{self.kind} is sent in the header Authorization, not in {self.name!a}")
        self._check_signing()
        if self.username is not None:
            if self.kind is not InjectionKind.BASIC:
                raise ValueError(f"{self.kind} takes no username")
            if not self.username or ":" in self.username or not _is_clean(self.username):
                raise ValueError("a username is not empty and has no colon and no control character")

    def _check_signing(self) -> None:
        kinds = (InjectionKind.AWS_SIGV4, InjectionKind.HMAC)
        if [self.aws is not None, self.hmac is not None] != [self.kind is kind for kind in kinds]:
            raise ValueError(f"{self.kind} does not agree with how the request is signed")
        if self.hmac is not None:
            if self.hmac.header != self.name:
                raise ValueError(f"{self.kind} is sent in {self.hmac.header!a}, not in {self.name!a}")
            if (stamp := self.hmac.timestamp_header) is not None and stamp != header_name(stamp):
                raise ValueError(f"the header {stamp!a} is not in canonical case")

    @property
    def slot(self) -> str:
        """The place that the binding owns: the header name in lower case, `query:` or `cookie:` and the name,
        `tls:client-certificate`, or `signature:` and the name.

        A request can have only one plan per slot.
        """
        match self.kind:
            case InjectionKind.QUERY:
                return f"query:{self.name.lower()}"
            case InjectionKind.COOKIE:
                return f"cookie:{self.name}"
            case InjectionKind.CLIENT_CERTIFICATE:
                return "tls:client-certificate"
            case InjectionKind.AWS_SIGV4:
                return "signature:aws"
            case InjectionKind.HMAC:
                return "signature:hmac"
            case _:
                return self.name.lower()

    @property
    def handshake(self) -> bool:
        """Whether the secret is used in the TLS handshake with the server, and is not put into the request."""
        return self.kind is InjectionKind.CLIENT_CERTIFICATE

    @property
    def signs(self) -> bool:
        """Whether the secret is the key of a signature. It is not sent then."""
        return self.aws is not None or self.hmac is not None

    @property
    def claims(self) -> frozenset[str]:
        """Every slot that the plan writes; `_` and `-` of a header are equal. Signatures have one in common."""
        signing = self.aws or self.hmac
        if signing is not None:
            return signing.claims | {self.slot, "signature:one"}
        return frozenset((self.slot, self.slot.replace("_", "-")))

    @property
    def place(self) -> str:
        """The place in words."""
        match self.kind:
            case InjectionKind.QUERY:
                return f"query parameter {self.name}"
            case InjectionKind.COOKIE:
                return f"cookie {self.name}"
            case InjectionKind.CLIENT_CERTIFICATE:
                return "the client certificate"
            case InjectionKind.AWS_SIGV4 | InjectionKind.HMAC:
                return "the signature"
            case _:
                return self.name

    def agrees(self, other: "InjectionPlan") -> bool:
        """Whether both plans send the same in the same slot."""
        return self == replace(other, binding=self.binding)

    def collides(self, other: "InjectionPlan") -> bool:
        """Whether one request cannot have both plans: they own one slot, or one owns the whole header `Cookie`."""
        slots = (self.slot, other.slot)
        cookies = "cookie" in slots and all(one.partition(":")[0] == "cookie" for one in slots)
        same = cookies or not self.claims.isdisjoint(other.claims)
        return same and not self.agrees(other)


class Surface(StrEnum):
    """A part of a request in which a placeholder is replaced."""

    PATH = "path"
    QUERY = "query"
    HEADER = "header"
    BODY = "body"
    BASIC = "basic"
    """The whole password of a Basic login. Only rules of the operator's file name it."""


@dataclass(frozen=True, slots=True)
class SubstitutionPlan:
    """One secret to put in place of each copy of a placeholder, on these surfaces of a request.

    Attributes:
        username: of the Basic login whose password is replaced, empty without that surface. With another user name a
            server could take the name itself for a credential.
        issued: the identity of the provision that gives the placeholder to the sandbox, empty if the caller chose it.
            `placeholder` is then a form, until `placeholders.resolve` replaces it.
    """

    binding: str
    secret: str
    placeholder: str
    surfaces: tuple[Surface, ...]
    username: str = ""
    issued: str = ""

    def __post_init__(self) -> None:
        if not self.placeholder.strip() or len(self.placeholder) > MAX_PLACEHOLDER or not _is_clean(self.placeholder):
            raise ValueError(
                f"a placeholder is 1 to {MAX_PLACEHOLDER} characters, not all blank, without control characters"
            )
        if not self.surfaces or len(set(self.surfaces)) != len(self.surfaces):
            raise ValueError("a substitution needs surfaces, each once")
        if (Surface.BASIC in self.surfaces) is not bool(self.username):
            raise ValueError("a substitution in a Basic login, and no other, has a username")
        if ":" in self.username or not _is_clean(self.username):
            raise ValueError("a username has no colon and no control character")

    @property
    def login(self) -> tuple[bytes, bytes]:
        """User name and password of the Basic login in which the plan replaces the password."""
        return self.username.encode("utf-8"), self.placeholder.encode("utf-8")

    @property
    def kind(self) -> str:
        """What the plan does, in one word."""
        return "substitution"

    @property
    def slot(self) -> str:
        """The place that the plan names; other plans can name the same placeholder on other surfaces."""
        return f"placeholder:{self.issued or self.placeholder}"

    @property
    def place(self) -> str:
        """The place in words."""
        named = self.issued.rpartition(":")[0] or ascii(self.placeholder)
        return f"placeholder {named} in {', '.join(self.surfaces)}"

    def collides(self, other: "SubstitutionPlan") -> bool:
        """Whether both put different secrets in place of one placeholder on one surface."""
        return (
            (self.placeholder, self.issued) == (other.placeholder, other.issued)
            and self.secret != other.secret
            and not set(self.surfaces).isdisjoint(other.surfaces)
        )


type SecretPlan = InjectionPlan | SubstitutionPlan
"""Any use of a secret in a request."""


def collide(one: SecretPlan, other: SecretPlan) -> bool:
    """Whether one request cannot have both plans."""
    match one, other:
        case InjectionPlan(), InjectionPlan():
            return one.collides(other)
        case SubstitutionPlan(), SubstitutionPlan():
            return one.collides(other)
        case _:
            return False


def basic_login(value: bytes) -> tuple[bytes, bytes] | None:
    """Return user name and password of a header's value with a Basic login; None for any other value."""
    scheme, _, encoded = value.partition(b" ")
    if scheme.lower() != b"basic":
        return None
    try:
        text = base64.b64decode(encoded.strip() + b"==")  # some programs leave the padding out
    except ValueError:
        return None
    user, colon, password = text.partition(b":")
    return (user, password) if colon else None


def header_name(text: str) -> str:
    """Return a header name in canonical case (`x-api-key` -> `X-Api-Key`).

    Raises:
        ValueError: the name is no token, or a framing, routing or connection header.
    """
    if not text or len(text) > 256 or not _TOKEN.issuperset(text):
        raise ValueError(f'invalid credential header name "{text[:300].encode("unicode_escape").decode("ascii")}"')
    lower = text.lower()
    # Many servers read an underscore as a hyphen, so `content_length` is as dangerous as `content-length`.
    folded = lower.replace("_", "-")
    if folded in _RESERVED or folded.startswith(_RESERVED_PREFIXES):
        raise ValueError(f'reserved credential header name "{lower}"')
    return "-".join(part[:1].upper() + part[1:] for part in lower.split("-"))


def query_name(text: str) -> str:
    """Return `text` if it can name a query parameter that carries a secret: unreserved characters of a URL.

    Raises:
        ValueError: it cannot.
    """
    if not 0 < len(text) <= MAX_NAME or not _UNRESERVED.issuperset(text):
        raise ValueError(f"a query parameter's name is up to {MAX_NAME} of letters, digits, `-`, `.`, `_` and `~`")
    return text


def cookie_name(text: str) -> str:
    """Return `text` if it can name a cookie that carries a secret.

    Raises:
        ValueError: it is no token.
    """
    if not 0 < len(text) <= MAX_NAME or not _TOKEN.issuperset(text):
        raise ValueError(f"a cookie's name is a token of up to {MAX_NAME} characters")
    return text


def render(plan: InjectionPlan, value: str) -> tuple[str, str]:
    """Return the name and the text for the secret `value`: of a header, a query parameter or a cookie.

    Raises:
        ValueError: the value cannot be sent there. The message does not contain it.
    """
    if not value or len(value) > MAX_VALUE:
        raise ValueError(f"the value of secret {plan.secret!a} is empty or too long to send")
    if not _is_clean(value):
        raise ValueError(f"the value of secret {plan.secret!a} has a control character or is not Unicode")
    match plan.kind:
        case InjectionKind.BEARER:
            rendered = f"Bearer {_header_text(plan, value)}"
        case InjectionKind.BASIC if plan.username is not None:
            rendered = f"Basic {_base64(f'{plan.username}:{value}')}"
        case InjectionKind.BASIC:
            if ":" not in value:
                raise ValueError(f"the value of secret {plan.secret!a} is not user:password")
            rendered = f"Basic {_base64(value)}"
        case InjectionKind.BASIC_RAW:
            rendered = f"Basic {_header_text(plan, value)}"
        case InjectionKind.API_KEY:
            rendered = _header_text(plan, value)
        case InjectionKind.QUERY:
            rendered = quote(value, safe="")
        case InjectionKind.COOKIE:
            if not _COOKIE.issuperset(value):
                raise ValueError(f"the value of secret {plan.secret!a} has a character that a cookie cannot have")
            rendered = value
        case InjectionKind.CLIENT_CERTIFICATE:
            raise ValueError(f"secret {plan.secret!a} is used in the TLS handshake only")
        case InjectionKind.AWS_SIGV4 | InjectionKind.HMAC:
            raise ValueError(f"the secret {plan.secret!a} signs and is not sent")
        case _:
            assert_never(plan.kind)
    return plan.name, rendered


def _header_text(plan: InjectionPlan, value: str) -> str:
    # Receivers drop blanks at the edges, and read non-ASCII bytes differently. Neither is sent.
    if not value.isascii() or value != value.strip(" "):
        raise ValueError(f"the value of secret {plan.secret!a} has blanks at its edge or is not ASCII")
    return value


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode("ascii")


def _is_clean(text: str) -> bool:
    # The codec's own error for a lone surrogate would contain the whole value.
    return all(
        character >= " " and not "\x7f" <= character <= "\x9f" and not "\ud800" <= character <= "\udfff"
        for character in text
    )
