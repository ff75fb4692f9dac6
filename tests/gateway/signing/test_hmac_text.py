"""Keyed hashes over a described text: the documented schemes of three services, each computed by its own recipe."""

import base64
import hashlib
import hmac
from collections.abc import Callable

import pytest

from gateway.signing.hmac_text import HmacSigner, hmac_key
from gateway.signing.sigv4 import SigningRefused
from gateway.verdicts import ForwardHead
from policy.facts import RequestFacts, Scheme
from policy.signing import HmacDigest, HmacSigning, KeyForm, SignatureForm, TimestampForm

NOW = 1_700_000_000.5
BODY = b'{"side": "buy"}'
RAW = b"\x00\xffkey of the service\x80"
KEY = "k\u00e9y of the service"
HEAD = ForwardHead(
    b"/orders/a%20b?limit=10",
    b"",
    ((b"Host", b"api.example.com"), (b"X-Id", b"one"), (b"X-Sign", b"mine"), (b"x_time", b"mine")),
)
FACTS = RequestFacts("api.example.com", 443, Scheme.HTTPS, "POST", "/orders/a%20b", "limit=10")


def sign(signing: HmacSigning, *, head: ForwardHead = HEAD, secret: str = KEY) -> dict[bytes, bytes]:
    signer = HmacSigner(signing, FACTS)
    return dict(signer.sign(secret, head, NOW, BODY if signer.needs_body else None).headers)


def test_an_exchange_that_wants_time_method_target_and_body() -> None:
    """The scheme of Coinbase Exchange: base64 of the hash, key in base64, time in seconds in a header of its own."""
    signing = HmacSigning(
        "X-Sign",
        "{timestamp}{method}{target}{body}",
        key=KeyForm.BASE64,
        output=SignatureForm.BASE64,
        timestamp_header="X-Time",
    )

    got = sign(signing, secret=base64.b64encode(RAW).decode())

    text = b"1700000000" + b"POST" + b"/orders/a%20b?limit=10" + BODY
    assert got[b"X-Sign"] == base64.b64encode(hmac.new(RAW, text, hashlib.sha256).digest())
    assert got[b"X-Time"] == b"1700000000"
    assert b"x_time" not in got


def test_a_webhook_that_wants_the_body() -> None:
    """The scheme of GitHub's webhooks: `sha256=` and the hash of the body."""
    got = sign(HmacSigning("X-Sign", "{body}", value="sha256={signature}"))

    assert got[b"X-Sign"] == b"sha256=" + hmac.new(KEY.encode(), BODY, hashlib.sha256).hexdigest().encode()


def test_a_webhook_with_a_version_and_a_time() -> None:
    """The scheme of Slack: `v0:TIME:BODY`."""
    signing = HmacSigning("X-Sign", "v0:{timestamp}:{body}", value="v0={signature}", timestamp_header="X-Time")

    assert (
        sign(signing)[b"X-Sign"]
        == b"v0=" + hmac.new(KEY.encode(), b"v0:1700000000:" + BODY, "sha256").hexdigest().encode()
    )


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("{method}\n{host}\n{path}\n{query}", b"POST\napi.example.com\n/orders/a%20b\nlimit=10"),
        ("{body_sha256}", hashlib.sha256(BODY).hexdigest().encode()),
        ("{{{header:X-ID}}}", b"{one}"),
        ("\u00e9{method}", "\u00e9POST".encode()),
    ],
)
@pytest.mark.parametrize("algorithm", list(HmacDigest))
def test_each_part_is_what_is_sent(message: str, text: bytes, algorithm: HmacDigest) -> None:
    """The parts are the bytes of the request, not a reading of them."""
    digest: Callable[[], object] = getattr(hashlib, algorithm.value)

    got = sign(HmacSigning("X-Sign", message, algorithm))

    assert got[b"X-Sign"] == hmac.new(KEY.encode(), text, digest).hexdigest().encode()  # type: ignore[arg-type]


def test_a_time_can_be_in_milliseconds_and_in_the_value() -> None:
    """Some services want the time beside the signature."""
    signing = HmacSigning(
        "X-Sign", "{timestamp}", value="t={timestamp},v1={signature}", timestamp=TimestampForm.MILLISECONDS
    )

    wanted = hmac.new(KEY.encode(), b"1700000000500", "sha256").hexdigest()
    assert sign(signing)[b"X-Sign"] == f"t=1700000000500,v1={wanted}".encode()


def test_over_http2_the_host_is_the_authority_and_names_are_in_lower_case() -> None:
    """HTTP/2 has no Host header."""
    head = ForwardHead(HEAD.target, b"api.example.com:8443", HEAD.headers[1:])

    assert sign(HmacSigning("X-Sign", "{host}"), head=head)[b"x-sign"] == (
        hmac.new(KEY.encode(), b"api.example.com:8443", "sha256").hexdigest().encode()
    )


@pytest.mark.parametrize("headers", [(), ((b"X-Id", b"a"), (b"x_id", b"b"))], ids=["absent", "there twice"])
def test_a_signed_header_is_there_once(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    """Otherwise gateway and server could sign different values."""
    with pytest.raises(SigningRefused, match="x-id, which the request must have once"):
        sign(HmacSigning("X-Sign", "{header:x-id}"), head=ForwardHead(b"/", b"", headers))


def test_a_body_that_was_not_collected_is_never_signed_as_empty() -> None:
    """A fault of the caller ends the flow."""
    with pytest.raises(RuntimeError):
        HmacSigner(HmacSigning("X-Sign", "{body}"), FACTS).sign(KEY, HEAD, NOW, None)


@pytest.mark.parametrize(("form", "text"), [(KeyForm.BASE64, "a*b="), (KeyForm.BASE64, "abc"), (KeyForm.HEX, "0g")])
def test_a_key_in_another_form_is_refused_without_a_part_of_it(form: KeyForm, text: str) -> None:
    """The message names the form only."""
    with pytest.raises(SigningRefused) as refused:
        hmac_key(form, text)

    assert str(refused.value) == f"the secret is not a key in {form.value}"
