"""Signature Version 4 of AWS: the canonical request, the text to sign, and the signature. Pure.

- `canonical_path` and `canonical_query` read what is sent, byte for byte, and return what a server computes from it. A
  percent sign that is no escape is refused.
- S3 encodes each byte of the decoded path once. Other services encode the path as it was sent once more, without empty
  and dot segments.
- A `+` in a query is a blank, as in a form: servers of AWS read it so.

Source: "Create a signed AWS API request" of the IAM User Guide, and "Authenticating Requests" of the S3 API Reference.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import quote, unquote_to_bytes

from policy.aws_hosts import AwsScope

ALGORITHM = "AWS4-HMAC-SHA256"
UNSIGNED = "UNSIGNED-PAYLOAD"
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()

_ENDS = "aws4_request"
_BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_BLANKS = re.compile(rb"[ \t]+")
_OF_S3 = frozenset({"s3", "s3-object-lambda", "s3-outposts", "s3express"})

type Headers = Iterable[tuple[bytes, bytes]]


class SigningRefused(ValueError):
    """A request that the gateway does not sign. The text is a sentence for the client, without a secret."""


@dataclass(frozen=True, slots=True)
class AwsKeys:
    """An access key. The access key id is no secret; the other two are."""

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


_KEY_ID = re.compile(r"[A-Za-z0-9_.-]{3,128}")
_KEY = re.compile(r"[!-9;-~]{8,256}")
_SESSION = re.compile(r"[!-9;-~]{8,8192}")


def read_keys(text: str) -> AwsKeys:
    """Read `ACCESS_KEY_ID:SECRET_ACCESS_KEY`, or that with `:SESSION_TOKEN`. No part has a colon or a blank.

    Raises:
        SigningRefused: the text has another form. The message does not contain a part of it.
    """
    key_id, _, rest = text.partition(":")
    key, colon, session = rest.partition(":")
    well_formed = _KEY_ID.fullmatch(key_id) and _KEY.fullmatch(key) and (not colon or _SESSION.fullmatch(session))
    if not well_formed:
        raise SigningRefused("the secret is not ACCESS_KEY_ID:SECRET_ACCESS_KEY or ACCESS_KEY_ID:SECRET:SESSION_TOKEN")
    return AwsKeys(key_id, key, session if colon else None)


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature, with what the signatures of its chunks need.

    Attributes:
        time: in the form `20150830T123600Z`.
    """

    text: str
    time: str
    scope: str
    key: bytes = field(repr=False)


def is_s3(scope: AwsScope) -> bool:
    """Whether the service has the rules of S3 for paths and payloads."""
    return scope.service in _OF_S3


def canonical_path(path: str, *, s3: bool) -> str:
    """Return the canonical form of a path as it is sent.

    Raises:
        SigningRefused: the path has a percent sign that is no escape.
    """
    if _BROKEN_ESCAPE.search(path) is not None:
        raise SigningRefused("the path has a percent sign that is no escape")
    if s3:
        return quote(unquote_to_bytes(path), safe="/-_.~")
    kept: list[str] = []
    for segment in path.split("/"):
        if segment == "..":
            del kept[-1:]
        elif segment not in ("", "."):
            kept.append(segment)
    plain = "/" + "/".join(kept) + ("/" if kept and path.endswith(("/", "/.", "/..")) else "")
    return quote(plain, safe="/-_.~")


def canonical_query(query: str) -> str:
    """Return the canonical form of a query as it is sent.

    Raises:
        SigningRefused: the query has a percent sign that is no escape.
    """
    if _BROKEN_ESCAPE.search(query) is not None:
        raise SigningRefused("the query has a percent sign that is no escape")
    pairs = sorted(
        (encoded(query_text(name)), encoded(query_text(value)))
        for name, _, value in (part.partition("=") for part in query.split("&") if part)
    )
    return "&".join(f"{name}={value}" for name, value in pairs)


def query_text(part: str) -> bytes:
    """Return the bytes that a name or value of a query means."""
    return unquote_to_bytes(part.replace("+", " "))


def encoded(value: bytes | str) -> str:
    """Percent-encode all but letters, digits and `-_.~`."""
    return quote(value, safe="-_.~")


def canonical_headers(headers: Headers, signed: frozenset[bytes]) -> tuple[bytes, str]:
    """Return the canonical headers and the list of their names. `signed` has names in lower case."""
    found: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        if (lower := name.lower()) in signed:
            found.setdefault(lower, []).append(_BLANKS.sub(b" ", value.strip(b" \t")))
    lines = [b"%s:%s\n" % (name, b",".join(values)) for name, values in sorted(found.items())]
    return b"".join(lines), ";".join(name.decode("ascii") for name in sorted(found))


def canonical_request(method: str, path: str, query: str, headers: bytes, names: str, payload: str) -> bytes:
    """Put a canonical request together."""
    head = f"{method}\n{path}\n{query}\n".encode("ascii")
    return head + headers + f"\n{names}\n{payload}".encode("ascii")


def credential_scope(time: str, scope: AwsScope) -> str:
    """Return the credential scope of a time and a service."""
    return f"{time[:8]}/{scope.region}/{scope.service}/{_ENDS}"


def signing_key(keys: AwsKeys, where: str) -> bytes:
    """Return the key that is derived from the secret key for a credential scope."""
    key = f"AWS4{keys.secret_access_key}".encode()
    for part in where.split("/"):
        key = hmac.digest(key, part.encode("ascii"), "sha256")
    return key


def signature(keys: AwsKeys, scope: AwsScope, time: str, request: bytes) -> Signature:
    """Sign a canonical request."""
    where = credential_scope(time, scope)
    key = signing_key(keys, where)
    text = f"{ALGORITHM}\n{time}\n{where}\n{hashlib.sha256(request).hexdigest()}"
    return Signature(mac(key, text), time, where, key)


def mac(key: bytes, text: str) -> str:
    """Return the HMAC-SHA256 of a text, in hexadecimal."""
    return hmac.digest(key, text.encode("ascii"), "sha256").hex()
