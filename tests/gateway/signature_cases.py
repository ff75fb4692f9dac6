"""Cases of requests that get a signature, for all engines. The far end verifies it apart from the gateway's code."""

import hashlib
import hmac
from datetime import UTC, datetime

from gateway.placeholders import Placeholders
from policy.compiled import SecretAt
from policy.decision import AllowRequest
from policy.facts import Scheme
from policy.injection import InjectionKind, InjectionPlan
from policy.rules import Endpoint
from policy.signing import AwsSigning, HmacSigning
from tests.gateway.exchange_cases import (
    BODY,
    CONNECTED,
    HOST,
    MASKED,
    MAX_BODY,
    ORDER,
    SECRET,
    WHOLE,
    Case,
    Fields,
    Seen,
    split,
)
from tests.gateway.signing.aws_server import Keys, verify

S3 = InjectionPlan("api", "api-token", InjectionKind.AWS_SIGV4, "Authorization", aws=AwsSigning("eu-west-1", "s3"))
DYNAMO = InjectionPlan(
    "api", "api-token", InjectionKind.AWS_SIGV4, "Authorization", aws=AwsSigning("eu-west-1", "dynamodb")
)
WEBHOOK = InjectionPlan(
    "api",
    "api-token",
    InjectionKind.HMAC,
    "X-Sign",
    hmac=HmacSigning("X-Sign", "{method}{target}{timestamp}{body}", value="v1={signature}", timestamp_header="X-Time"),
)
LONG_TERM = f"AKIDEXAMPLE:{SECRET}"
TOKEN = "session/token+3v4l=="

PLACEHOLDER = b"AWS4-HMAC-SHA256 Credential=AKIAPLACEHOLDER/20200101/us-east-1/s3/aws4_request, "
CLIENT: Fields = (
    (b"Authorization", PLACEHOLDER + b"SignedHeaders=host;x-own, Signature=" + b"0" * 64),
    (b"X-Amz-Date", b"20200101T000000Z"),
    (b"X-Amz-Security-Token", b"placeholder-token"),
    (b"X-Own", b"1"),
)
"""The headers of a client with placeholder keys."""
_HOLLOW = b"0" * 64


def _declared(text: str) -> tuple[bytes, bytes]:
    return b"X-Amz-Content-Sha256", text.encode()


def _aws(case: Case, seen: Seen) -> None:
    """Verify the signature of what the server received, at the time that it names."""
    assert seen.sent is not None
    fields = [*((name.decode(), value.decode()) for name, value in seen.sent), ("host", seen.authority.decode())]
    times = [value for name, value in fields if name == "x-amz-date"]
    times += [one.partition("=")[2] for one in seen.target.decode().split("&") if one.startswith("X-Amz-Date=")]
    (time,) = times
    parts = case.ports().secret.split(":")
    known = {parts[0]: Keys(parts[1], parts[2] if len(parts) > 2 else None)}
    now = datetime.strptime(time, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    found = verify(case.method.decode(), seen.target.decode(), fields, seen.body_sent, known, now)
    assert (found.region, found.body) == ("eu-west-1", _data(case))
    received = b"\n".join([seen.target, *(value for _, value in seen.sent)])
    assert b"PLACEHOLDER" not in received.upper() and SECRET.encode() not in received
    assert ("range" in dict(fields)) is (b"range" in {name.lower() for name, _ in case.headers} and len(parts) == 2)


def _data(case: Case) -> bytes:
    """Return the data of a case's body, without the frames of its chunks."""
    return case.body if b";chunk-signature=" not in case.body else b"ab"


def _hmac(case: Case, seen: Seen) -> None:
    """Compute the keyed hash as the template describes it."""
    assert seen.sent is not None
    named = dict(seen.sent)
    text = case.method + seen.target + named[b"x-time"] + seen.body_sent
    assert named[b"x-sign"] == b"v1=" + hmac.new(SECRET.encode(), text, "sha256").hexdigest().encode()
    assert seen.body_sent == case.body


def _nothing(_case: Case, seen: Seen) -> None:
    assert seen.sent is None


def _cut(_case: Case, seen: Seen) -> None:
    """The server does not get a whole request."""
    assert seen.sent is None or not seen.ports.steps[-1].startswith("request")
    assert b"0;chunk-signature" not in seen.body_sent


def _signed(name: str, plan: InjectionPlan, shown: int | None = 200, **more: object) -> Case:
    """Return the case of a request that is signed."""
    given: dict[str, object] = {
        "steps": CONNECTED,
        "decision": AllowRequest("r", (plan,)),
        "uses": (SecretAt(plan, HOST, Endpoint(443, Scheme.HTTPS)),),
        "secret": SECRET if plan.hmac is not None else LONG_TERM,
        "far_end": _nothing if shown is None or shown == 403 else _hmac if plan.hmac is not None else _aws,
        **more,
    }
    if given.get("http2"):
        given["headers"] = tuple((key.lower(), value) for key, value in given["headers"])  # type: ignore[attr-defined]
    return Case(name, shown=shown, **given)  # type: ignore[arg-type]


def _upload(*chunks: bytes) -> bytes:
    """Return a signed upload in chunks, with the client's signatures."""
    parts = [b"%x;chunk-signature=%s\r\n%s\r\n" % (len(one), _HOLLOW, one) for one in (*chunks, b"")]
    return b"".join(parts)


CHUNKS = (*CLIENT, _declared("STREAMING-AWS4-HMAC-SHA256-PAYLOAD"), (b"X-Amz-Decoded-Content-Length", b"2"))
VERSIONS = ("HTTP/1.1", "HTTP/2")

SIGNED = [
    *(
        _signed(
            f"{title} over {version}",
            plan,
            http2=version == "HTTP/2",
            **{"steps": CONNECTED, "headers": CLIENT, **more},
        )
        for version in VERSIONS
        for title, plan, more in (
            ("a request of S3", S3, {"headers": (*CLIENT, _declared(hashlib.sha256(b"").hexdigest()))}),
            (
                "an upload with a declared hash",
                S3,
                {
                    "method": b"PUT",
                    "body": b"data",
                    "headers": (*CLIENT, _declared(hashlib.sha256(b"data").hexdigest())),
                },
            ),
            (
                "an upload that is not signed",
                S3,
                {"method": b"PUT", "body": b"data", "headers": (*CLIENT, _declared("UNSIGNED-PAYLOAD"))},
            ),
            ("a body without a declared hash", DYNAMO, {"method": b"POST", "body": b"{}", "steps": WHOLE}),
            ("a signed upload in chunks", S3, {"method": b"PUT", "body": _upload(b"a", b"b"), "headers": CHUNKS}),
            ("a keyed hash with the body", WEBHOOK, {"method": b"POST", "body": b"x=1", "steps": WHOLE}),
        )
    ),
    _signed(
        "a signed upload in chunks, in the chunked coding",
        S3,
        chunked=True,
        method=b"PUT",
        body=_upload(b"a", b"b"),
        headers=CHUNKS,
    ),
    _signed("a body without a declared hash, in the chunked coding", DYNAMO, chunked=True, body=b"{}", steps=WHOLE),
    _signed("a request without a signature", S3, path=b"/v1?list-type=2&a=%2F"),
    _signed(
        "a presigned request",
        S3,
        path=b"/v1?versionId=1&X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAPLACEHOLDER%2F20200101%2Fus-east-1"
        b"%2Fs3%2Faws4_request&X-Amz-Date=20200101T000000Z&X-Amz-Expires=60&X-Amz-SignedHeaders=host&X-Amz-Signature="
        + _HOLLOW,
    ),
    _signed(
        "keys that policy gave to the sandbox",
        S3,
        headers=CLIENT,
        known=Placeholders({"AKIAPLACEHOLDER": "api-token", "placeholder-token": "api-token"}),
    ),
    _signed(
        "keys that policy gave to the sandbox, in another place",
        S3,
        403,
        headers=(*CLIENT, (b"X-Else", b"AKIAPLACEHOLDER")),
        known=Placeholders({"AKIAPLACEHOLDER": "api-token"}),
        steps=[*ORDER[:4], "request deny"],
        page=b"where no rule replaces it",
        denied=("placeholder",),
    ),
    _signed("keys with a session token", S3, secret=f"{LONG_TERM}:{TOKEN}", headers=CLIENT),
    *(
        _signed(
            f"a malformed upload in chunks over {version}",
            S3,
            None,
            http2=version == "HTTP/2",
            method=b"PUT",
            body=body,
            headers=CHUNKS,
            far_end=_cut,
            denied=("protocol",),
        )
        for version, body in (
            ("HTTP/1.1", _upload(b"a", b"b")[:-1] + b"x"),
            ("HTTP/1.1, incomplete,", _upload(b"a", b"b")[: -len(_upload())]),
            ("HTTP/2", _upload(b"a", b"b")[: -len(_upload())]),
        )
    ),
    *(
        _signed(name, plan, 403, steps=["decide", "request deny"], page=page, denied=("r",), **more)
        for name, plan, page, more in (
            ("a signature of version 2", S3, b"version 2", {"headers": ((b"Authorization", b"AWS AKID:sig"),)}),
            ("a broken escape", S3, b"no escape", {"path": b"/v1?a=%zz"}),
            ("two hashes of the body", S3, b"two hashes", {"headers": (_declared("0" * 64), _declared("1" * 64))}),
        )
    ),
    *(
        _signed(
            f"a secret that is no key for {plan.slot}",
            plan,
            403,
            steps=[*ORDER[:4], "request deny"],
            secret=secret,
            page=b"is not",
            denied=("r",),
        )
        for plan, secret in ((S3, "no-access-key"),)
    ),
    _signed(
        "a body above the limit that has to be signed",
        DYNAMO,
        413,
        method=b"POST",
        body=bytes(MAX_BODY + 1),
        steps=["decide", "count"],
        far_end=_nothing,
        denied=("limits",),
    ),
    _signed(
        "a part of a document at a host that is sent no secret",
        S3,
        headers=((b"Range", b"bytes=3-8"), (b"Accept-Encoding", b"gzip")),
        status=206,
        answer=((b"content-range", b"bytes 3-8/20"),),
        shown=206,
        pieces=split(BODY, 7),
        got=((b"content-range", b"bytes 3-8/20"),),
        text=MASKED,
    ),
    _signed(
        "an object that was uploaded in chunks",
        S3,
        answer=((b"content-encoding", b"aws-chunked"),),
        pieces=split(BODY, 7),
        got=((b"content-encoding", b"aws-chunked"),),
        text=MASKED,
    ),
    _signed(
        "a part of a document at a host that is sent a session token",
        S3,
        secret=f"{LONG_TERM}:{TOKEN}",
        headers=((b"Range", b"bytes=3-8"),),
        pieces=(b"the token is " + TOKEN.encode() + b".",),
        text=b"the token is " + b"*" * len(TOKEN) + b".",
    ),
]
