"""Signs one request for AWS in place of the client, which signed it with placeholder keys or not at all.

- Nothing of the client's signature is verified or sent: its `Authorization`, date, token and query keys are removed.
- The signature is for the host that is dialled, at the gateway's time. It covers the Host, every `x-amz-` header, the
  content type, and the headers that the client signed, each as it is sent.
- A request that is signed in its query (presigned) stays so. Its signature is valid for `MAX_EXPIRES` seconds at most,
  because it is used at once. A URL that is read later, in a log of the server, has no effect.
- A hash of the body that the client declares is kept: the server compares it with the body. `UNSIGNED-PAYLOAD` is kept
  for S3 over TLS. Signed chunks are signed again. Otherwise the body is collected and hashed.
- Version 2, version 4a, S3 Express sessions and event streams are refused.

Pure. `gateway.signing.signer` has the interface.
"""

import hashlib
import re
from dataclasses import dataclass
from datetime import UTC, datetime

from gateway.inject import slot
from gateway.signing.aws_chunked import ChunkSigner
from gateway.signing.sigv4 import (
    ALGORITHM,
    EMPTY_SHA256,
    UNSIGNED,
    AwsKeys,
    Signature,
    SigningRefused,
    canonical_headers,
    canonical_path,
    canonical_query,
    canonical_request,
    credential_scope,
    encoded,
    is_s3,
    query_text,
    read_keys,
    signature,
    signing_key,
)
from gateway.translate import Headers
from gateway.verdicts import ForwardHead
from policy.facts import RequestFacts, Scheme
from policy.signing import AWS_HEADERS, AWS_QUERY_KEYS, AwsSigning

MAX_EXPIRES = 300
"""The longest life of a signature in a query, in seconds: enough for clocks that differ."""
MAX_SIGNED_HEADERS = 100
_DAY = 86400

_UNSIGNED_TRAILER = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
_CHUNKS = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
_CHUNKS_TRAILER = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SIGNED_HEADERS = re.compile(r"[ ,]SignedHeaders=([^, ]*)")
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9a-z]{1,256}")
_LENGTH = re.compile(rb"0|[1-9][0-9]{0,17}")
_OWNED_HEADERS = frozenset(AWS_HEADERS)
_OWNED_KEYS = frozenset(AWS_QUERY_KEYS)
_REFUSED = {
    "x-amz-region-set": "signatures of version 4a (X-Amz-Region-Set) are not supported: sign for one region",
    "x-amz-s3session-token": "sessions of S3 Express are not supported",
}
_NEVER_SIGNED = frozenset(
    {b"authorization", b"connection", b"cookie", b"expect", b"keep-alive", b"te", b"trailer", b"transfer-encoding"}
    | {b"upgrade", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"user-agent"}
    | {b"baggage", b"traceparent", b"tracestate", b"x-amzn-trace-id"}
)
"""HTTP or a proxy of the service changes them. SDKs do not sign them either."""


@dataclass(frozen=True, slots=True)
class _Client:
    """What the client's own signature says about the request.

    Attributes:
        presigned: the signature is in the query, and lives this number of seconds; None for a signature in a header.
        signed: the names of the headers that it signed, in lower case.
    """

    presigned: int | None
    signed: frozenset[bytes]


class AwsSigner:
    """See `gateway.signing.signer.Signer`."""

    def __init__(self, signing: AwsSigning, facts: RequestFacts, headers: Headers, *, http2: bool) -> None:
        """Read the request as the client sent it.

        Raises:
            SigningRefused: it cannot be signed.
        """
        self._method = facts.method
        self._scope = signing.scope(facts.host)
        self._s3 = is_s3(self._scope)
        canonical_path(facts.path, s3=self._s3)
        canonical_query(facts.query)
        self._client = _client(headers, facts.query)
        self._declares = any(slot(name) == "x-amz-content-sha256" for name, _ in headers)
        self._payload = self._declared(headers, facts)
        self._chunks: ChunkSigner | None = None
        self._length = 0
        if self._payload in (_CHUNKS, _CHUNKS_TRAILER):
            self._length = _decoded_length(headers)
        elif self._payload is None and not http2 and not _has_body(headers):
            self._payload = EMPTY_SHA256
        self.needs_body = self._payload is None

    def sign(self, secret: str, head: ForwardHead, now: float, body: bytes | None) -> ForwardHead:
        """See `gateway.signing.signer.Signer`."""
        keys, payload = read_keys(secret), self._payload
        if body is not None and payload in (_CHUNKS, _CHUNKS_TRAILER):
            raise SigningRefused("the body of a signed upload in chunks cannot be changed")
        if body is not None and payload not in (UNSIGNED, _UNSIGNED_TRAILER):
            payload = hashlib.sha256(body).hexdigest()
        if payload is None:
            raise RuntimeError("a body that is signed was not collected")
        time = _time(now)
        plain, headers = self.without_signature(head.target, head.headers)
        path, _, query = plain.decode("ascii").partition("?")
        if self._client.presigned is None:
            signed, headers = self._in_header(keys, head, path, query, headers, time, payload)
            target = path + (f"?{query}" if query else "")
        else:
            signed, query, headers = self._in_query(keys, head, path, query, headers, time, payload)
            target = f"{path}?{query}"
        if payload in (_CHUNKS, _CHUNKS_TRAILER):
            self._chunks = ChunkSigner(signed, self._length, trailers=payload == _CHUNKS_TRAILER)
        return ForwardHead(target.encode("ascii"), head.authority, headers)

    def without_signature(self, target: bytes, headers: Headers) -> tuple[bytes, Headers]:
        """See `gateway.signing.signer.Signer`."""
        path, _, query = target.decode("ascii").partition("?")
        query = "&".join(part for part in query.split("&") if _key(part) not in _OWNED_KEYS)
        plain = path + (f"?{query}" if query else "")
        return plain.encode("ascii"), tuple(one for one in headers if slot(one[0]) not in _OWNED_HEADERS)

    def chunk(self, data: bytes) -> bytes:
        """See `gateway.signing.signer.Signer`."""
        return data if self._chunks is None else self._chunks.feed(data)

    def end(self) -> None:
        """See `gateway.signing.signer.Signer`."""
        if self._chunks is not None and not self._chunks.complete:
            raise SigningRefused("the signed upload is incomplete")

    def _in_header(
        self, keys: AwsKeys, head: ForwardHead, path: str, query: str, headers: Headers, time: str, payload: str
    ) -> tuple[Signature, Headers]:
        own = [(b"X-Amz-Date", time)]
        if self._s3 or self._declares:
            own.append((b"X-Amz-Content-Sha256", payload))
        if keys.session_token is not None:
            own.append((b"X-Amz-Security-Token", keys.session_token))
        headers = (*headers, *((_cased(head, name), value.encode("ascii")) for name, value in own))
        covered, names = self._covered(head, headers, {b"content-type", b"content-md5"})
        signed = self._signature(keys, path, query, covered, names, time, payload)
        value = f"{ALGORITHM} Credential={keys.access_key_id}/{signed.scope}, SignedHeaders={names}, "
        authorization = f"{value}Signature={signed.text}".encode("ascii")
        return signed, (*headers, (_cased(head, b"Authorization"), authorization))

    def _in_query(
        self, keys: AwsKeys, head: ForwardHead, path: str, query: str, headers: Headers, time: str, payload: str
    ) -> tuple[Signature, str, Headers]:
        if self._declares:
            headers = (*headers, (_cased(head, b"X-Amz-Content-Sha256"), payload.encode("ascii")))
        covered, names = self._covered(head, headers, set())
        own = [
            ("X-Amz-Algorithm", ALGORITHM),
            ("X-Amz-Credential", f"{keys.access_key_id}/{credential_scope(time, self._scope)}"),
            ("X-Amz-Date", time),
            ("X-Amz-Expires", str(self._client.presigned)),
            ("X-Amz-SignedHeaders", names),
        ]
        if keys.session_token is not None:
            own.append(("X-Amz-Security-Token", keys.session_token))
        query = "&".join([*([query] if query else []), *(f"{name}={encoded(value)}" for name, value in own)])
        signed = self._signature(keys, path, query, covered, names, time, payload)
        return signed, f"{query}&X-Amz-Signature={signed.text}", headers

    def _covered(self, head: ForwardHead, headers: Headers, also: set[bytes]) -> tuple[bytes, str]:
        sent = (*headers, (b"host", head.authority)) if head.authority else headers
        names = {name.lower() for name, _ in sent}
        wanted = {name for name in names if name.startswith(b"x-amz-")} | self._client.signed | also
        return canonical_headers(sent, frozenset(wanted - _NEVER_SIGNED | {b"host"}))

    def _signature(
        self, keys: AwsKeys, path: str, query: str, covered: bytes, names: str, time: str, payload: str
    ) -> Signature:
        canonical = canonical_path(path, s3=self._s3), canonical_query(query)
        request = canonical_request(self._method, *canonical, covered, names, payload)
        return signature(keys, self._scope, time, request)

    def _declared(self, headers: Headers, facts: RequestFacts) -> str | None:
        """Return what is signed for the body; None if it has to be collected."""
        found = [value.decode("latin-1") for name, value in headers if slot(name) == "x-amz-content-sha256"]
        if self._client.presigned is not None:
            found += [
                query_text(part.partition("=")[2]).decode("latin-1")
                for part in facts.query.split("&")
                if _key(part) == "x-amz-content-sha256"
            ]
        if len(set(found)) > 1:
            raise SigningRefused("the request declares two hashes of its body")
        declared = found[0] if found else UNSIGNED if self._s3 and self._client.presigned is not None else None
        if declared is None or _SHA256.fullmatch(declared) is not None:
            return declared
        if "ECDSA" in declared:
            raise SigningRefused("signatures of version 4a are not supported: sign for one region")
        unsigned = declared in (UNSIGNED, _UNSIGNED_TRAILER)
        if unsigned and facts.scheme is not Scheme.HTTPS:
            raise SigningRefused("an unsigned body is sent over TLS only")
        if self._s3 and (unsigned or (declared in (_CHUNKS, _CHUNKS_TRAILER) and self._client.presigned is None)):
            return declared
        if declared == UNSIGNED:
            return None
        raise SigningRefused(
            "the request declares a form of its body (X-Amz-Content-Sha256) that is not supported here"
        )


def signing_keys(signing: AwsSigning, keys: AwsKeys, host: str, now: float) -> tuple[bytes, ...]:
    """Return the derived keys that sign requests to `host` today and tomorrow."""
    scope = signing.scope(host)
    return tuple(signing_key(keys, credential_scope(_time(at), scope)) for at in (now, now + _DAY))


def _time(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).strftime("%Y%m%dT%H%M%SZ")


def _client(headers: Headers, query: str) -> _Client:
    """Return what the client's signature says. It may have none.

    Raises:
        SigningRefused: it is of another version, or has no single meaning.
    """
    values: dict[str, list[str]] = {}
    for part in query.split("&"):
        values.setdefault(_key(part), []).append(query_text(part.partition("=")[2]).decode("latin-1"))
    for name in (*values, *(slot(name) for name, _ in headers)):
        if name in _REFUSED:
            raise SigningRefused(_REFUSED[name])
    given = [value.decode("latin-1") for name, value in headers if slot(name) == "authorization"]
    kind = given[0].partition(" ")[0] if given else ""
    if kind == "AWS" or {"awsaccesskeyid", "signature"} <= values.keys():
        raise SigningRefused("signatures of version 2 are not supported: use version 4")
    algorithms = ([kind] if kind.startswith("AWS4-") else []) + values.get("x-amz-algorithm", [])
    if len(algorithms) > 1:
        raise SigningRefused("the request has two signatures")
    if algorithms and algorithms[0] != ALGORITHM:
        raise SigningRefused(f"only signatures of the kind {ALGORITHM} are supported")
    if any(len(values[key]) > 1 for key in _OWNED_KEYS & values.keys()):
        raise SigningRefused("a part of the signature in the query is there twice")
    if "x-amz-algorithm" in values:
        expires = values.get("x-amz-expires", [""])[0]
        if re.fullmatch(r"[1-9][0-9]{0,5}", expires) is None:
            raise SigningRefused("X-Amz-Expires is not a number of seconds")
        return _Client(min(int(expires), MAX_EXPIRES), _names(values.get("x-amz-signedheaders", [""])[0]))
    if _OWNED_KEYS & values.keys():
        raise SigningRefused("the signature in the query is incomplete: X-Amz-Algorithm is missing")
    listed = _SIGNED_HEADERS.search(given[0]) if algorithms else None
    return _Client(None, _names(listed[1]) if listed is not None else frozenset())


def _names(text: str) -> frozenset[bytes]:
    names = [name for name in text.split(";") if name]
    if len(names) > MAX_SIGNED_HEADERS or any(_NAME.fullmatch(name) is None for name in names):
        raise SigningRefused("the signature names headers in a form that is not valid")
    return frozenset(name.encode("ascii") for name in names)


def _key(part: str) -> str:
    """Return the name of one pair of a query, in lower case."""
    return query_text(part.partition("=")[0]).decode("latin-1").lower()


def _cased(head: ForwardHead, name: bytes) -> bytes:
    """Return a header's name as the protocol writes it: in lower case for HTTP/2."""
    return name.lower() if head.authority else name


def _has_body(headers: Headers) -> bool:
    named = {name.lower(): value for name, value in headers}
    return b"transfer-encoding" in named or named.get(b"content-length", b"0") != b"0"


def _decoded_length(headers: Headers) -> int:
    found = [value for name, value in headers if slot(name) == "x-amz-decoded-content-length"]
    if len(found) != 1 or _LENGTH.fullmatch(found[0]) is None:
        raise SigningRefused("a signed upload in chunks needs X-Amz-Decoded-Content-Length")
    return int(found[0])
