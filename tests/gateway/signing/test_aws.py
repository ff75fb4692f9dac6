"""Requests of the SDK of AWS, signed with placeholder keys: the gateway signs them again, and a server judges them.

The client is botocore's signer. The server is `aws_server.verify`, which uses botocore, too.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs, urlsplit

import pytest
from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth, SigV4Auth, SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from gateway.signing.aws import MAX_EXPIRES, AwsSigner
from gateway.signing.sigv4 import UNSIGNED, AwsKeys, SigningRefused
from gateway.verdicts import ForwardHead
from policy.facts import RequestFacts, Scheme
from policy.signing import AwsSigning
from tests.gateway.signing.aws_server import Keys, Refused, Verified, verify

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
PLACEHOLDER = Credentials("AKIAPLACEHOLDER", "placeholder-key", "placeholder-token")
KEYS = AwsKeys("AKIDEXAMPLE", "s3cr3t/K7MDENG+bPxRfi", "sess/ion+token==")
SECRET = f"{KEYS.access_key_id}:{KEYS.secret_access_key}:{KEYS.session_token}"
KNOWN = {"AKIDEXAMPLE": Keys(KEYS.secret_access_key, KEYS.session_token)}
S3, DYNAMO = "s3.eu-west-1.amazonaws.com", "dynamodb.eu-west-1.amazonaws.com"

type Fields = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Ask:
    """A request of a client."""

    method: str = "GET"
    host: str = S3
    target: str = "/bucket/key"
    fields: Fields = ()
    body: bytes = b""
    scheme: Scheme = Scheme.HTTPS
    http2: bool = False

    def with_fields(self, *fields: tuple[str, str]) -> "Ask":
        return replace(self, fields=(*self.fields, *fields))


def signed_by_client(ask: Ask, *, service: str, presigned: int | None = None) -> Ask:
    """Return the request as the SDK sends it, with signatures by the placeholder."""
    request = AWSRequest(
        method=ask.method, url=f"https://{ask.host}{ask.target}", data=ask.body, headers=dict(ask.fields)
    )
    if presigned is None:
        (S3SigV4Auth if service == "s3" else SigV4Auth)(PLACEHOLDER, service, "us-west-2").add_auth(request)
    else:
        kind = S3SigV4QueryAuth if service == "s3" else SigV4QueryAuth
        kind(PLACEHOLDER, service, "us-west-2", expires=presigned).add_auth(request)
    parts = urlsplit(request.url)
    fields = tuple((name, str(value)) for name, value in request.headers.items())
    return replace(ask, target=parts.path + (f"?{parts.query}" if parts.query else ""), fields=fields)


def signer(ask: Ask, *, signing: AwsSigning | None = None) -> AwsSigner:
    path, _, query = ask.target.partition("?")
    facts = RequestFacts(ask.host, 443, ask.scheme, ask.method, path, query)
    return AwsSigner(signing or AwsSigning(), facts, headers_of(ask), http2=ask.http2)


def secret_of(keys: AwsKeys) -> str:
    return ":".join(filter(None, (keys.access_key_id, keys.secret_access_key, keys.session_token)))


def headers_of(ask: Ask) -> tuple[tuple[bytes, bytes], ...]:
    framing = (("Content-Length", str(len(ask.body))),) if ask.body else ()
    return tuple((name.encode(), value.encode("latin-1")) for name, value in (*ask.fields, *framing))


def sent(ask: Ask, *, signing: AwsSigning | None = None, keys: AwsKeys = KEYS) -> tuple[ForwardHead, bytes]:
    """Return head and body as the gateway sends them."""
    made = signer(ask, signing=signing)
    headers = headers_of(ask)
    authority = ask.host.encode() if ask.http2 else b""
    if not ask.http2:
        headers = ((b"Host", ask.host.encode()), *headers)
    body = ask.body if made.needs_body else None
    head = made.sign(secret_of(keys), ForwardHead(ask.target.encode(), authority, headers), NOW.timestamp(), body)
    if made.needs_body:
        return head, ask.body
    body = made.chunk(ask.body)
    made.end()
    return head, body


def judged(ask: Ask, head: ForwardHead, body: bytes, *, now: datetime = NOW) -> Verified:
    """Return what the server knows of it."""
    fields = [(name.decode(), value.decode("latin-1")) for name, value in head.headers]
    if head.authority:
        fields.append(("host", head.authority.decode()))
    return verify(ask.method, head.target.decode(), fields, body, KNOWN, now)


def received(ask: Ask, *, service: str = "s3", presigned: int | None = None) -> tuple[ForwardHead, Verified]:
    """Return what the server gets and knows of a request that the client signs."""
    ask = signed_by_client(ask, service=service, presigned=presigned)
    head, body = sent(ask)
    return head, judged(ask, head, body)


def wire(head: ForwardHead, body: bytes = b"") -> bytes:
    return b"\n".join([head.target, *(b": ".join(one) for one in head.headers), body])


@pytest.mark.parametrize(
    ("ask", "service"),
    [
        (Ask(), "s3"),
        (Ask("PUT", fields=(("Content-Type", "text/plain"), ("x-amz-meta-a", "b")), body=b"data"), "s3"),
        (Ask(target="/bucket?list-type=2&prefix=a%2Fb%20c&delimiter=%2F"), "s3"),
        (Ask(target="/bucket/a%20b/%C3%A9//c~d"), "s3"),
        (Ask("POST", DYNAMO, "/", (("X-Amz-Target", "DynamoDB_20120810.GetItem"),), b"{}"), "dynamodb"),
        (Ask("POST", "sts.amazonaws.com", "/", (("Content-Type", "form"),), b"Action=GetCallerIdentity"), "sts"),
        (Ask("GET", "lambda.eu-west-1.amazonaws.com", "/2015/functions/arn%3Aaws%3Ax%2Fy/versions"), "lambda"),
    ],
)
def test_a_request_of_the_sdk_is_signed_again(ask: Ask, service: str) -> None:
    """The server accepts it under the real key; nothing of the placeholder reaches it."""
    head, verified = received(ask, service=service)

    assert (verified.key_id, verified.service, verified.body) == ("AKIDEXAMPLE", service, ask.body)
    assert head.target.decode() == ask.target
    assert b"PLACEHOLDER" not in wire(head).upper() and b"us-west-2" not in wire(head)
    assert KEYS.secret_access_key.encode() not in wire(head)


@pytest.mark.parametrize("part", ["key", "host", "header", "body", "query", "method"])
def test_the_server_refuses_what_was_changed_after_signing(part: str) -> None:
    """The control of every other test: the far end verifies."""
    ask = signed_by_client(
        Ask("PUT", target="/b/k?acl", fields=(("x-amz-acl", "private"),), body=b"data"), service="s3"
    )
    head, body = sent(ask, keys=replace(KEYS, secret_access_key="another-key") if part == "key" else KEYS)
    changed = {
        "host": [(b"Host", b"s3.eu-west-2.amazonaws.com")],
        "header": [(b"x-amz-acl", b"public-read")],
    }.get(part, [])
    names = {name.lower() for name, _ in changed}
    head = replace(head, headers=(*(one for one in head.headers if one[0].lower() not in names), *changed))
    if part == "query":
        head = replace(head, target=head.target.replace(b"acl", b"policy"))

    with pytest.raises(Refused):
        judged(replace(ask, method="POST") if part == "method" else ask, head, b"datb" if part == "body" else body)


def test_the_signature_is_for_the_dialled_host_whatever_the_client_signed() -> None:
    """The Host of the head is the one that was judged; the client's scope has no effect."""
    head, verified = received(Ask("GET", "bucket.s3.eu-central-1.amazonaws.com", "/key"))

    assert (verified.region, verified.service) == ("eu-central-1", "s3")
    assert "host" in verified.signed
    assert b"20260102/eu-central-1/s3/aws4_request" in wire(head)


def test_the_time_is_the_gateways() -> None:
    """A date of the client, wrong or in the future, does not decide how long a signature lives."""
    ask = signed_by_client(Ask(), service="s3")  # at the SDK's time, which is not NOW
    head, body = sent(ask)

    assert dict(head.headers)[b"X-Amz-Date"] == b"20260102T030405Z"
    assert judged(ask, head, body).key_id == "AKIDEXAMPLE"


@pytest.mark.parametrize(("service", "host"), [("s3", S3), ("sts", "sts.amazonaws.com")])
def test_a_presigned_request_stays_one_with_a_short_life(service: str, host: str) -> None:
    """The style of the client is kept, since its other query keys may have a meaning only so."""
    ask = Ask("GET", host, "/bucket/k?versionId=a%2Fb" if service == "s3" else "/?Action=GetCallerIdentity")

    head, verified = received(ask, service=service, presigned=604800)

    query = parse_qs(head.target.decode().partition("?")[2])
    assert verified.presigned and verified.key_id == "AKIDEXAMPLE"
    assert query["X-Amz-Expires"] == [str(MAX_EXPIRES)]
    assert all(len(values) == 1 for values in query.values())
    assert b"PLACEHOLDER" not in wire(head).upper()
    assert b"uthorization" not in wire(head)


def test_a_presigned_url_is_of_no_use_later() -> None:
    """After five minutes the server refuses it."""
    ask = signed_by_client(Ask(), service="s3", presigned=604800)
    head, body = sent(ask)

    assert judged(ask, head, body, now=NOW + timedelta(seconds=MAX_EXPIRES)).presigned
    with pytest.raises(Refused, match="expired"):
        judged(ask, head, body, now=NOW + timedelta(seconds=MAX_EXPIRES + 1))


def test_a_shorter_life_is_kept() -> None:
    """The client's own limit."""
    head, _ = received(Ask(), presigned=7)

    assert b"X-Amz-Expires=7&" in head.target


def test_a_hash_of_the_client_is_kept_and_the_server_compares_it() -> None:
    """The body then passes as it comes."""
    ask = signed_by_client(Ask("PUT", body=b"data"), service="s3")
    made = signer(ask)

    assert not made.needs_body
    head, _ = sent(ask)
    with pytest.raises(Refused, match="XAmzContentSHA256Mismatch"):
        judged(ask, head, b"other")


@pytest.mark.parametrize("payload", [UNSIGNED, "STREAMING-UNSIGNED-PAYLOAD-TRAILER"])
def test_an_unsigned_body_stays_unsigned_for_s3_over_tls(payload: str) -> None:
    """SDKs send large uploads so."""
    body = b"4\r\ndata\r\n0\r\nx-amz-checksum-crc32:rfPzYw==\r\n\r\n" if "TRAILER" in payload else b"data"
    ask = Ask("PUT", fields=(("X-Amz-Content-Sha256", payload), ("x-amz-decoded-content-length", "4")), body=body)
    head, sent_body = sent(ask)

    assert judged(ask, head, sent_body).body == b"data"
    with pytest.raises(SigningRefused, match="over TLS only"):
        sent(replace(ask, scheme=Scheme.HTTP))


def test_another_service_gets_the_hash_in_place_of_an_unsigned_body() -> None:
    """Only S3 accepts an unsigned body."""
    ask = Ask("POST", DYNAMO, "/", (("X-Amz-Content-Sha256", UNSIGNED),), b"{}")

    head, body = sent(ask)

    assert signer(ask).needs_body
    assert judged(ask, head, body).service == "dynamodb"
    assert UNSIGNED.encode() not in wire(head)


@pytest.mark.parametrize("http2", [False, True])
def test_a_request_without_a_signature_is_signed(http2: bool) -> None:
    """A plain client can use AWS, too. Over HTTP/2 a body needs no announcement, so it is awaited."""
    ask = Ask("GET", DYNAMO, "/", http2=http2)

    head, body = sent(ask)

    assert signer(ask).needs_body is http2
    assert judged(ask, head, body).key_id == "AKIDEXAMPLE"
    assert not http2 or all(name == name.lower() for name, _ in head.headers)


def test_headers_that_the_client_signed_are_signed_as_they_are_sent() -> None:
    """A header that the gateway replaced is signed with its new value; a removed one is not named."""
    client = (
        "AWS4-HMAC-SHA256 Credential=A/1/r/s/aws4_request, SignedHeaders=accept-encoding;host;range;x-own, Signature=0"
    )
    ask = Ask(fields=(("Authorization", client), ("X-Own", "1"), ("X-Other", "2"), ("Accept-Encoding", "identity")))

    head, body = sent(ask)

    signed = judged(ask, head, body).signed
    assert {"accept-encoding", "host", "x-own"} <= set(signed) and not {"range", "x-other"} & set(signed)


def test_headers_that_http_changes_are_never_signed() -> None:
    """A later hop may remove or change them."""
    names = "connection;cookie;expect;host;te;transfer-encoding;user-agent;x-amzn-trace-id"
    client = f"AWS4-HMAC-SHA256 Credential=A/1/r/s/aws4_request, SignedHeaders={names}, Signature=0"
    fields = (("Authorization", client), ("Cookie", "a=b"), ("Expect", "100-continue"), ("User-Agent", "x"))

    head, _ = sent(Ask(fields=fields))

    assert b"SignedHeaders=host;x-amz-content-sha256;x-amz-date;x-amz-security-token," in wire(head)


@pytest.mark.parametrize("name", ["authorization", "X_Amz_Security_Token", "x-amz-SECURITY-token", "X-Amz-Date"])
def test_no_credential_of_the_client_is_sent(name: str) -> None:
    """The binding owns these headers, in any case and with `_` for `-`."""
    head, _ = sent(Ask(fields=((name, "mine-mine"),)))

    assert b"mine-mine" not in wire(head)


@pytest.mark.parametrize(
    ("ask", "problem"),
    [
        (Ask(fields=(("Authorization", "AWS AKID:sig"),)), "version 2"),
        (Ask(target="/k?AWSAccessKeyId=a&Signature=b&Expires=1"), "version 2"),
        (Ask(fields=(("Authorization", "AWS4-ECDSA-P256-SHA256 Credential=a"),)), "only signatures of the kind"),
        (Ask(target="/k?X-Amz-Algorithm=AWS4-ECDSA-P256-SHA256"), "only signatures of the kind"),
        (Ask(fields=(("X-Amz-Region-Set", "*"),)), "version 4a"),
        (Ask(target="/k?X-Amz-Region-Set=%2A"), "version 4a"),
        (Ask(target="/k?x%2Damz-region-set=%2A"), "version 4a"),
        (Ask(fields=(("X-Amz-Content-Sha256", "STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD"),)), "version 4a"),
        (Ask(fields=(("x-amz-s3session-token", "t"),)), "S3 Express"),
        (Ask(fields=(("X-Amz-Content-Sha256", "STREAMING-AWS4-HMAC-SHA256-EVENTS"),)), "that is not supported"),
        (Ask(fields=(("X-Amz-Content-Sha256", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"),)), "Decoded-Content-Length"),
        (Ask(fields=(("X-Amz-Content-Sha256", "0" * 64), ("x_amz_content_sha256", "1" * 64))), "two hashes"),
        (Ask(target="/k?X-Amz-Signature=0"), "incomplete"),
        (Ask(target="/k?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Expires=-1"), "not a number"),
        (Ask(target="/k?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Expires=1&X-Amz-Date=1&x-amz-date=2"), "twice"),
        (Ask(target="/k?X-Amz-Algorithm=AWS4-HMAC-SHA256&x-amz-algorithm=AWS4-HMAC-SHA256"), "two signatures"),
        (
            Ask(target="/k?X-Amz-Algorithm=AWS4-HMAC-SHA256", fields=(("Authorization", "AWS4-HMAC-SHA256 x"),)),
            "two signatures",
        ),
        (
            Ask(fields=(("Authorization", "AWS4-HMAC-SHA256 Credential=a, SignedHeaders=A B, Signature=0"),)),
            "in a form that is not valid",
        ),
        (Ask(target="/k%"), "no escape"),
        (Ask(target="/k?a=%zz"), "no escape"),
    ],
)
def test_what_cannot_be_signed_is_refused_with_the_reason(ask: Ask, problem: str) -> None:
    """Nothing is sent with a signature that means something else."""
    with pytest.raises(SigningRefused, match=problem):
        sent(ask)


@pytest.mark.parametrize("trailer", [False, True])
def test_a_signed_upload_in_chunks_is_signed_again(trailer: bool) -> None:
    """The server verifies head and chunks as one chain, and gets the data."""
    hollow = b"0" * 64
    chunks = [b"a" * 65536, b"b" * 1000]
    body = b"".join(b"%x;chunk-signature=%s\r\n%s\r\n" % (len(one), hollow, one) for one in chunks)
    body += b"0;chunk-signature=" + hollow + b"\r\n"
    body += b"x-amz-checksum-crc32:AAAAAA==\r\nx-amz-trailer-signature:" + hollow + b"\r\n\r\n" if trailer else b"\r\n"
    payload = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD" + ("-TRAILER" if trailer else "")
    fields = (
        ("X-Amz-Content-Sha256", payload),
        ("x-amz-decoded-content-length", str(sum(map(len, chunks)))),
        ("Content-Encoding", "aws-chunked"),
    )
    ask = Ask("PUT", fields=fields, body=body)

    head, changed = sent(ask)

    assert judged(ask, head, changed).body == b"".join(chunks)
    assert len(changed) == len(body)
    with pytest.raises(Refused, match="SignatureDoesNotMatch"):
        judged(ask, head, changed.replace(b"b" * 1000, b"b" * 999 + b"c"))
    made = signer(ask)
    made.sign(SECRET, ForwardHead(b"/k", b"", headers_of(ask)), 0.0, None)
    made.chunk(body[:-1])
    with pytest.raises(SigningRefused, match="incomplete"):
        made.end()
    with pytest.raises(SigningRefused, match="cannot be changed"):
        signer(ask).sign(SECRET, ForwardHead(b"/k", b"", headers_of(ask)), 0.0, body)


@pytest.mark.parametrize(("host", "service"), [(S3, "s3"), (DYNAMO, "dynamodb")])
def test_a_changed_body_gets_its_own_hash(host: str, service: str) -> None:
    """If a placeholder was replaced in the body, the hash of the client is not that of what is sent."""
    ask = signed_by_client(Ask("PUT", host, "/", (), b"{placeholder}"), service=service)
    plain = ForwardHead(b"/", b"", ((b"Host", host.encode()), *headers_of(ask)))

    head = signer(ask).sign(SECRET, plain, NOW.timestamp(), b"{}")

    assert judged(ask, head, b"{}").body == b"{}"


def test_a_body_that_was_not_collected_is_never_signed_as_empty() -> None:
    """A fault of the caller ends the flow."""
    ask = Ask("POST", DYNAMO, "/", (), b"{}")

    with pytest.raises(RuntimeError):
        signer(ask).sign(SECRET, ForwardHead(b"/", b"", ()), 0.0, None)
