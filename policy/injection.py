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

MAX_VALUE = 64 * 1024
MAX_PLACEHOLDER = 1024

_TOKEN = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")

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
    """The form of the header. BASIC encodes `user:password`; BASIC_RAW takes an encoded value."""

    BEARER = "bearer"
    BASIC = "basic"
    BASIC_RAW = "basic-raw"
    API_KEY = "api-key"


@dataclass(frozen=True, slots=True)
class InjectionPlan:
    """One secret to put into one slot of a request.

    Attributes:
        binding: the id of the rule or credential binding with this injection.
        name: the name of the header, in canonical case.
    """

    binding: str
    secret: str
    kind: InjectionKind
    name: str
    username: str | None = None

    def __post_init__(self) -> None:
        if self.name != header_name(self.name):
            raise ValueError(f"injection header {self.name!a} is not in canonical case")
        if self.kind is not InjectionKind.API_KEY and self.name != "Authorization":
            raise ValueError(f"{self.kind} is sent in the header Authorization, not in {self.name!a}")
        if self.username is not None:
            if self.kind is not InjectionKind.BASIC:
                raise ValueError(f"{self.kind} takes no username")
            if not self.username or ":" in self.username or not _is_clean(self.username):
                raise ValueError("a username is not empty and has no colon and no control character")

    @property
    def slot(self) -> str:
        """The place that the binding owns: the header name in lower case. A request can have only one plan per slot."""
        return self.name.lower()

    @property
    def place(self) -> str:
        """The place in words."""
        return self.name

    def agrees(self, other: "InjectionPlan") -> bool:
        """Whether both plans send the same in the same slot."""
        return self == replace(other, binding=self.binding)

    def collides(self, other: "InjectionPlan") -> bool:
        """Whether one request cannot have both plans."""
        return self.slot == other.slot and not self.agrees(other)


class Surface(StrEnum):
    """A part of a request in which a placeholder is replaced."""

    PATH = "path"
    QUERY = "query"
    HEADER = "header"
    BODY = "body"


@dataclass(frozen=True, slots=True)
class SubstitutionPlan:
    """One secret to put in place of each copy of a placeholder, on these surfaces of a request."""

    binding: str
    secret: str
    placeholder: str
    surfaces: tuple[Surface, ...]

    def __post_init__(self) -> None:
        if not self.placeholder.strip() or len(self.placeholder) > MAX_PLACEHOLDER or not _is_clean(self.placeholder):
            raise ValueError(
                f"a placeholder is 1 to {MAX_PLACEHOLDER} characters, not all blank, without control characters"
            )
        if not self.surfaces or len(set(self.surfaces)) != len(self.surfaces):
            raise ValueError("a substitution needs surfaces, each once")

    @property
    def kind(self) -> str:
        """What the plan does, in one word."""
        return "substitution"

    @property
    def slot(self) -> str:
        """The place that the plan names; other plans can name the same placeholder on other surfaces."""
        return f"placeholder:{self.placeholder}"

    @property
    def place(self) -> str:
        """The place in words."""
        return f"placeholder {self.placeholder!a} in {', '.join(self.surfaces)}"

    def collides(self, other: "SubstitutionPlan") -> bool:
        """Whether both put different secrets in place of one placeholder on one surface."""
        return (
            self.placeholder == other.placeholder
            and self.secret != other.secret
            and not set(self.surfaces).isdisjoint(other.surfaces)
        )


type SecretPlan = InjectionPlan | SubstitutionPlan
"""Any use of a secret in a request."""


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


def render(plan: InjectionPlan, value: str) -> tuple[str, str]:
    """Return the header's name and value for the secret `value`.

    Raises:
        ValueError: the value cannot be sent in a header. The message does not contain it.
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
