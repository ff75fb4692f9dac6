"""The far end of signed requests: verifies each signature with botocore's own signer, apart from the gateway's code.

`verify` judges one request from its bytes. It imports nothing of the product.
"""

import hashlib
import hmac
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qsl, urlsplit

from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth, SigV4Auth, SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

logging.getLogger("botocore").setLevel(logging.WARNING)  # at a lower level it logs what it signs

MAX_SKEW = timedelta(minutes=15)
EMPTY = hashlib.sha256(b"").hexdigest()
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/,]+)/(\d{8})/([^/]+)/([^/]+)/aws4_request, SignedHeaders=([^,]+), "
    r"Signature=([0-9a-f]{64})"
)

type Fields = Sequence[tuple[str, str]]


class Refused(Exception):
    """The request is not what its signature says. The text is the reason."""


@dataclass(frozen=True)
class Keys:
    """An access key that the server knows."""

    secret: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Verified:
    """A request with a valid signature; `body` is decoded."""

    key_id: str
    region: str
    service: str
    presigned: bool
    signed: tuple[str, ...]
    body: bytes


def verify(method: str, target: str, fields: Fields, body: bytes, keys: Mapping[str, Keys], now: datetime) -> Verified:
    """Return what a service would know of a request.

    Raises:
        Refused: it would refuse the request.
    """
    named: dict[str, list[str]] = {}
    for name, value in fields:
        named.setdefault(name.lower(), []).append(value)
    host = one(named, "host")
    query = dict(parse_qsl(urlsplit(target).query, keep_blank_values=True))
    presigned = "X-Amz-Signature" in query
    if presigned == ("authorization" in named):
        raise Refused("not exactly one signature")
    if presigned:
        key_id, day, region, service, _ = query["X-Amz-Credential"].split("/")
        names, given, time = query["X-Amz-SignedHeaders"], query["X-Amz-Signature"], query["X-Amz-Date"]
        token = query.get("X-Amz-Security-Token")
        target = re.sub(r"[?&]X-Amz-Signature=[0-9a-f]{64}", "", target)
        life = timedelta(seconds=int(query["X-Amz-Expires"]))
    else:
        found = _AUTHORIZATION.fullmatch(one(named, "authorization"))
        if found is None:
            raise Refused("malformed Authorization")
        key_id, day, region, service, names, given = found.groups()
        time, token, life = one(named, "x-amz-date"), named.get("x-amz-security-token", [None])[0], MAX_SKEW
    signed = names.split(";")
    moment = datetime.strptime(time, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    if not time.startswith(day) or not -MAX_SKEW <= now - moment <= life:
        raise Refused("expired, or not yet valid")
    if "host" not in signed or any(name.startswith("x-amz-") and name not in signed for name in named):
        raise Refused("a header that must be signed is not")
    if key_id not in keys or keys[key_id].token != token:
        raise Refused("unknown key or token")
    known = keys[key_id]
    declared = _payload(service, presigned, named, query, body)
    credentials = Credentials(key_id, known.secret, token)
    kinds = (S3SigV4QueryAuth, S3SigV4Auth) if service == "s3" else (SigV4QueryAuth, SigV4Auth)
    judge = kinds[0 if presigned else 1](credentials, service, region)
    request = AWSRequest(method=method, url=f"https://{host}{target}", data=body)
    request.context["timestamp"] = time
    for name in signed:
        for value in named.get(name, ()):
            request.headers.add_header(name, value)
    if declared is not None and not presigned:
        judge.payload = lambda _request: declared
    wanted = judge.signature(judge.string_to_sign(request, judge.canonical_request(request)), request)
    if not hmac.compare_digest(wanted, given):
        raise Refused("SignatureDoesNotMatch")
    if declared is not None and declared.startswith("STREAMING-"):
        body = _Chunks(known.secret, time, region, service, given, body).decoded(declared)
        if len(body) != int(one(named, "x-amz-decoded-content-length")):
            raise Refused("IncompleteBody")
    return Verified(key_id, region, service, presigned, tuple(signed), body)


def one(named: Mapping[str, list[str]], name: str) -> str:
    """Return the value of a header that must be there once."""
    if len(named.get(name, ())) != 1:
        raise Refused(f"not exactly one {name}")
    return named[name][0]


def _payload(
    service: str, presigned: bool, named: Mapping[str, list[str]], query: Mapping[str, str], body: bytes
) -> str | None:
    """Return the declared hash, which agrees with the body; None if the body itself is hashed."""
    declared = named.get("x-amz-content-sha256", [None])[0] or (
        query.get("X-Amz-Content-Sha256") if presigned else None
    )
    if declared is None and service == "s3" and not presigned:
        raise Refused("S3 requires X-Amz-Content-Sha256")
    hashed = declared is not None and re.fullmatch("[0-9a-f]{64}", declared) is not None
    if hashed and declared != hashlib.sha256(body).hexdigest():
        raise Refused("XAmzContentSHA256Mismatch")
    return declared


@dataclass
class _Chunks:
    """Decodes `aws-chunked`, and verifies the chain of signatures as the S3 API Reference describes it."""

    secret: str
    time: str
    region: str
    service: str
    previous: str
    left: bytes

    def decoded(self, declared: str) -> bytes:
        out = b""
        while True:
            line, _, self.left = self.left.partition(b"\r\n")
            size, _, extension = line.partition(b";")
            data, self.left = self.left[: int(size, 16)], self.left[int(size, 16) :]
            if "HMAC" in declared:
                text = f"{EMPTY}\n{hashlib.sha256(data).hexdigest()}"
                self._check(extension.removeprefix(b"chunk-signature="), "AWS4-HMAC-SHA256-PAYLOAD", text)
            if not data:
                break
            out += data
            if not self.left.startswith(b"\r\n"):
                raise Refused("malformed chunk")
            self.left = self.left[2:]
        if declared.endswith("HMAC-SHA256-PAYLOAD-TRAILER"):
            lines, _, given = self.left.removesuffix(b"\r\n\r\n").rpartition(b"x-amz-trailer-signature:")
            text = hashlib.sha256(lines.replace(b"\n\r\n", b"\n").replace(b"\r\n", b"\n")).hexdigest()
            self._check(given, "AWS4-HMAC-SHA256-TRAILER", text)
        elif not self.left.endswith(b"\r\n"):
            raise Refused("malformed end")
        return out

    def _check(self, given: bytes, algorithm: str, text: str) -> None:
        key = b"AWS4" + self.secret.encode()
        for part in (self.time[:8], self.region, self.service, "aws4_request"):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        scope = f"{self.time[:8]}/{self.region}/{self.service}/aws4_request"
        signed = f"{algorithm}\n{self.time}\n{scope}\n{self.previous}\n{text}"
        self.previous = hmac.new(key, signed.encode(), hashlib.sha256).hexdigest()
        if self.previous.encode() != given:
            raise Refused("a chunk's SignatureDoesNotMatch")
