"""How a secret becomes a header: the plan (no secret in it) and the rendering (pure).

- A plan names the secret. The value exists only in the arguments and the result of `render`.
- No error message contains the value or a part of it.
- The binding owns its slot: the caller removes every header of that name from the request before it applies a plan.
"""

import base64
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

MAX_VALUE = 64 * 1024

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
    """One header to set on one request from one secret.

    `binding` is the id of the rule or credential binding with this injection. `header` is in canonical case.
    """

    binding: str
    secret: str
    kind: InjectionKind
    header: str
    username: str | None = None

    def __post_init__(self) -> None:
        if self.header != header_name(self.header):
            raise ValueError(f"injection header {self.header!a} is not in canonical case")
        if self.kind is not InjectionKind.API_KEY and self.header != "Authorization":
            raise ValueError(f"{self.kind} is sent in the header Authorization, not in {self.header!a}")
        if self.username is not None:
            if self.kind is not InjectionKind.BASIC:
                raise ValueError(f"{self.kind} takes no username")
            if not self.username or ":" in self.username or not _is_clean(self.username):
                raise ValueError("a username is not empty and has no colon and no control character")

    @property
    def slot(self) -> str:
        """The header name in lower case. A request can have only one plan per slot."""
        return self.header.lower()


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
    return plan.header, rendered


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
