"""Signature Version 4: AWS's published test suite, and botocore's own signer over generated requests."""

from datetime import UTC, datetime
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.signing.aws import AwsSigner
from gateway.signing.sigv4 import AwsKeys, SigningRefused, canonical_path, canonical_query, read_keys
from gateway.verdicts import ForwardHead
from policy.facts import RequestFacts, Scheme
from policy.signing import AwsSigning
from tests.gateway.signing.aws_server import Keys, verify

SUITE_TIME = datetime(2015, 8, 30, 12, 36, tzinfo=UTC)
SUITE_KEYS = AwsKeys("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")
HOST = "example.amazonaws.com"
LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
FORM = "application/x-www-form-urlencoded"

type Lines = tuple[tuple[str, str], ...]

# AWS Signature Version 4 Test Suite, Copyright 2019 Amazon.com, Apache License 2.0. Targets are percent-encoded, as
# HTTP requires. Cases that are no valid HTTP (values on several lines, raw blanks and UTF-8) are absent.
SUITE: list[tuple[str, str, str, Lines, bytes, str]] = [
    (
        "get-header-key-duplicate",
        "GET",
        "/",
        (("My-Header1", "value2"), ("My-Header1", "value2"), ("My-Header1", "value1")),
        b"",
        "c9d5ea9f3f72853aea855b47ea873832890dbdd183b4468f858259531a5138ea",
    ),
    (
        "get-header-value-order",
        "GET",
        "/",
        (("My-Header1", "value4"), ("My-Header1", "value1"), ("My-Header1", "value3"), ("My-Header1", "value2")),
        b"",
        "08c7e5a9acfcfeb3ab6b2185e75ce8b1deb5e634ec47601a50643f830c755c01",
    ),
    (
        "get-header-value-trim",
        "GET",
        "/",
        (("My-Header1", "value1"), ("My-Header2", '"a   b   c"')),
        b"",
        "acc3ed3afb60bb290fc8d2dd0098b9911fcaa05412b367055dee359757a9c736",
    ),
    (
        "get-unreserved",
        "GET",
        f"/-._~{LETTERS}",
        (),
        b"",
        "07ef7494c76fa4850883e2b006601f940f8a34d404d0cfa977f52a65bbf5f24f",
    ),
    ("get-vanilla", "GET", "/", (), b"", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
    (
        "get-vanilla-empty-query-key",
        "GET",
        "/?Param1=value1",
        (),
        b"",
        "a67d582fa61cc504c4bae71f336f98b97f1ea3c7a6bfe1b6e45aec72011b9aeb",
    ),
    (
        "get-vanilla-query-order-encoded",
        "GET",
        "/?Param-3=Value3&Param=Value2&%E1%88%B4=Value1",
        (),
        b"",
        "371d3713e185cc334048618a97f809c9ffe339c62934c032af5a0e595648fcac",
    ),
    (
        "get-vanilla-query-order-key",
        "GET",
        "/?Param1=value2&Param1=Value1",
        (),
        b"",
        "eedbc4e291e521cf13422ffca22be7d2eb8146eecf653089df300a15b2382bd1",
    ),
    (
        "get-vanilla-query-order-key-case",
        "GET",
        "/?Param2=value2&Param1=value1",
        (),
        b"",
        "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500",
    ),
    (
        "get-vanilla-query-order-value",
        "GET",
        "/?Param1=value2&Param1=value1",
        (),
        b"",
        "5772eed61e12b33fae39ee5e7012498b51d56abc0abb7c60486157bd471c4694",
    ),
    (
        "get-vanilla-query-unreserved",
        "GET",
        f"/?-._~{LETTERS}=-._~{LETTERS}",
        (),
        b"",
        "9c3e54bfcdf0b19771a7f523ee5669cdf59bc7cc0884027167c21bb143a40197",
    ),
    (
        "get-vanilla-utf8-query",
        "GET",
        "/?%E1%88%B4=bar",
        (),
        b"",
        "2cdec8eed098649ff3a119c94853b13c643bcf08f8b0a1d91e12c9027818dd04",
    ),
    (
        "get-relative",
        "GET",
        "/example/..",
        (),
        b"",
        "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31",
    ),
    (
        "get-relative-relative",
        "GET",
        "/example1/example2/../..",
        (),
        b"",
        "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31",
    ),
    ("get-slash", "GET", "//", (), b"", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
    ("get-slash-dot-slash", "GET", "/./", (), b"", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
    (
        "get-slash-pointless-dot",
        "GET",
        "/./example",
        (),
        b"",
        "ef75d96142cf21edca26f06005da7988e4f8dc83a165a80865db7089db637ec5",
    ),
    (
        "get-slashes",
        "GET",
        "//example//",
        (),
        b"",
        "9a624bd73a37c9a373b5312afbebe7a714a789de108f0bdfe846570885f57e84",
    ),
    (
        "get-special-character",
        "GET",
        "/example/$delete",
        (),
        b"",
        "a853c9b21b528b19643d00910d35b83a10c366a10833ceefb45edd6c80e40f27",
    ),
    ("post-vanilla", "POST", "/", (), b"", "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b"),
    (
        "post-header-key-sort",
        "POST",
        "/",
        (("My-Header1", "value1"),),
        b"",
        "c5410059b04c1ee005303aed430f6e6645f61f4dc9e1461ec8f8916fdf18852c",
    ),
    (
        "post-header-value-case",
        "POST",
        "/",
        (("My-Header1", "VALUE1"),),
        b"",
        "cdbc9802e29d2942e5e10b5bccfdd67c5f22c7c4e8ae67b53629efa58b974b7d",
    ),
    (
        "post-vanilla-query",
        "POST",
        "/?Param1=value1",
        (),
        b"",
        "28038455d6de14eafc1f9222cf5aa6f1a96197d7deb8263271d420d138af7f11",
    ),
    (
        "post-x-www-form-urlencoded",
        "POST",
        "/",
        (("Content-Type", FORM),),
        b"Param1=value1",
        "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a",
    ),
    (
        "post-x-www-form-urlencoded-parameters",
        "POST",
        "/",
        (("Content-Type", f"{FORM}; charset=utf8"),),
        b"Param1=value1",
        "1a72ec8f64bd914b0e42e42607c7fbce7fb2c7465f63e3092b3b0d39fa77a6fe",
    ),
]


def sent(
    method: str,
    target: str,
    lines: Lines,
    body: bytes,
    *,
    keys: AwsKeys = SUITE_KEYS,
    service: str = "service",
    host: str = HOST,
    now: datetime = SUITE_TIME,
) -> ForwardHead:
    """Return the head of a request that a client signed with a placeholder, as the gateway sends it."""
    path, _, query = target.partition("?")
    names = ";".join(sorted({"host", "x-amz-date", *(name.lower() for name, _ in lines)}))
    placeholder = f"AWS4-HMAC-SHA256 Credential=PLACEHOLDER/x, SignedHeaders={names}, Signature={'0' * 64}"
    fields = [*lines, ("X-Amz-Date", "19700101T000000Z"), ("Authorization", placeholder)]
    if body:
        fields.append(("Content-Length", str(len(body))))
    headers = tuple((name.encode(), value.encode("latin-1")) for name, value in fields)
    facts = RequestFacts(host, 443, Scheme.HTTPS, method, path, query)
    signer = AwsSigner(AwsSigning("us-east-1", service), facts, headers, http2=False)
    head = ForwardHead(target.encode(), b"", ((b"Host", host.encode()), *headers))
    secret = ":".join(filter(None, (keys.access_key_id, keys.secret_access_key, keys.session_token)))
    return signer.sign(secret, head, now.timestamp(), body if signer.needs_body else None)


@pytest.mark.parametrize(("name", "method", "target", "lines", "body", "wanted"), SUITE, ids=[row[0] for row in SUITE])
def test_the_signature_is_that_of_the_published_test_suite(
    name: str, method: str, target: str, lines: Lines, body: bytes, wanted: str
) -> None:
    """Each case of AWS's suite gets its published signature."""
    authorization = dict(sent(method, target, lines, body).headers)[b"Authorization"].decode()

    assert authorization.endswith(f"Signature={wanted}")
    assert authorization.startswith("AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, ")


def test_the_session_token_is_sent_and_signed() -> None:
    """The suite's case with a token, which is a header of the request to sign."""
    token = (
        "AQoDYXdzEPT//////////wEXAMPLEtc764bNrC9SAPBSM22wDOk4x4HIZ8j4FZTwdQWLWsKWHGBuFqwAeMicRXmxfpSPfIeoIYRqTflfKD8YUuwth"
        "Ax7mSEI/qkPpKPi/kMcGdQrmGdeehM4IC1NtBmUpp2wUE8phUZampKsburEDy0KPkyQDYwT7WZ0wq5VSXDvp75YU9HFvlRd8Tx6q6fE8YQcHNVXAkiY"
        "9q6d+xo0rKwT38xVqr7ZD0u0iPPkUL64lIZbqBAz+scqKmlzm8FDrypNC9Yjc8fPOLn9FX9KSYvKTr4rvx3iSIlTJabIQwj2ICCR/oLxBA=="
    )
    keys = AwsKeys(SUITE_KEYS.access_key_id, SUITE_KEYS.secret_access_key, token)

    headers = dict(sent("POST", "/", (), b"", keys=keys).headers)

    assert headers[b"X-Amz-Security-Token"] == token.encode()
    assert headers[b"Authorization"].endswith(b"85d96828115b5dc0cfc3bd16ad9e210dd772bbebba041836c64533a82be05ead")


# Without a slash: botocore signs `%2F` in a key of S3 as it is sent, servers sign what it means.
TEXT = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x2FF, exclude_characters="/"), min_size=1, max_size=12)
SEGMENTS = st.lists(TEXT.filter(lambda one: one not in (".", "..")), max_size=4)
PAIRS = st.lists(st.tuples(TEXT, st.one_of(st.just(""), TEXT)), max_size=5).map(
    lambda pairs: [(name, value) for name, value in pairs if not name.lower().startswith("x-amz-")]
)
VALUES = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=20)
HEADERS = st.lists(
    st.tuples(st.sampled_from(["X-Amz-Meta-A", "X-Amz-Target", "X-Own", "Content-Type"]), VALUES), max_size=4
)


@given(
    method=st.sampled_from(["GET", "PUT", "POST", "DELETE", "HEAD"]),
    segments=SEGMENTS,
    pairs=PAIRS,
    lines=HEADERS,
    body=st.binary(max_size=40),
    service=st.sampled_from(["s3", "dynamodb", "sts", "execute-api"]),
    token=st.sampled_from([None, "sess/ion+token=="]),
)
def test_a_signed_request_is_accepted_by_botocore(
    method: str,
    segments: list[str],
    pairs: list[tuple[str, str]],
    lines: list[tuple[str, str]],
    body: bytes,
    service: str,
    token: str | None,
) -> None:
    """Whatever path, query, headers and body: an independent verifier computes the same signature from what is sent."""
    path = "/" + "/".join(quote(one, safe="-_.~") for one in segments)
    query = "&".join(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in pairs)
    target = path + (f"?{query}" if query else "")
    keys = AwsKeys("AKIDEXAMPLE", SUITE_KEYS.secret_access_key, token)

    head = sent(method, target, tuple(lines), body, keys=keys, service=service)

    known = {"AKIDEXAMPLE": Keys(keys.secret_access_key, token)}
    fields = [(name.decode(), value.decode()) for name, value in head.headers]
    found = verify(method, head.target.decode(), fields, body, known, SUITE_TIME)
    assert (found.key_id, found.service, found.body) == ("AKIDEXAMPLE", service, body)
    assert head.target.decode() == target


def test_paths_of_s3_are_encoded_once_and_others_twice() -> None:
    """S3 takes the key's bytes; the others take the path as it is sent."""
    assert canonical_path("/a%20b//c/../%c3%a9%2Fd", s3=True) == "/a%20b//c/../%C3%A9/d"
    assert canonical_path("/a%20b//c/../d:e", s3=False) == "/a%2520b/d%3Ae"
    assert canonical_path("/", s3=False) == canonical_path("/a/..", s3=False) == "/"


def test_a_query_has_one_reading() -> None:
    """Pairs are sorted after encoding; a plus is a blank; a name without a value has an empty one."""
    assert canonical_query("b&a=x+y&a=%2b&a=%7E") == "a=%2B&a=x%20y&a=~&b="


@pytest.mark.parametrize("text", ["/a%", "/a%2", "/%zz"])
def test_a_broken_escape_is_refused(text: str) -> None:
    """A server could read it differently."""
    with pytest.raises(SigningRefused):
        canonical_path(text, s3=True)
    with pytest.raises(SigningRefused):
        canonical_query(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "AKID", "AKID:", ":secretsecret", "AKID:short", "AKID:secret secret", "AK ID:secretsecret"),
        *("AKID:secretsecret:", "AKID:" + "s" * 300, "AKID:secretsecret:token:more", "AKID:secretsecr\u00e9t"),
        '{"AccessKeyId": "AKID"}',
    ],
)
def test_a_secret_of_another_form_is_refused_without_a_part_of_it(text: str) -> None:
    """The message is the same for each, so it shows nothing of the value."""
    with pytest.raises(SigningRefused) as refused:
        read_keys(text)

    with pytest.raises(SigningRefused) as other:
        read_keys("another")
    assert str(other.value) == str(refused.value)


def test_keys_do_not_show_themselves() -> None:
    """A repr in a log would show them otherwise."""
    assert repr(read_keys("AKID:secretsecret:tokentoken")) == "AwsKeys(access_key_id='AKID')"
