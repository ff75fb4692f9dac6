"""Properties of a response head."""

import pytest

from gateway import response_head
from gateway.response_head import (
    accepts_websocket,
    encodings,
    end_to_end,
    head_facts,
    is_grpc,
    own_fields,
    plainly_framed,
    unsearchable,
)
from gateway.verdicts import ResponseHead

KEY = b"dGhlIHNhbXBsZSBub25jZQ=="  # the example of RFC 6455
ACCEPT = (b"Sec-WebSocket-Accept", b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")
UPGRADE = (b"Upgrade", b"WebSocket")


def head(*headers: tuple[bytes, bytes], status: int = 200) -> ResponseHead:
    return ResponseHead(status, False, headers)


def test_a_handshake_is_completed_by_the_answer_to_its_key_only() -> None:
    assert accepts_websocket(head(ACCEPT, UPGRADE), KEY)
    assert not accepts_websocket(head(ACCEPT, UPGRADE), None)
    assert not accepts_websocket(head(ACCEPT, UPGRADE), b"x" * 24)
    assert not accepts_websocket(head(ACCEPT), KEY)
    assert not accepts_websocket(head(ACCEPT, ACCEPT, UPGRADE), KEY)


@pytest.mark.parametrize(
    ("values", "plain"),
    [([], True), ([b"chunked"], True), ([b"Chunked"], True), ([b"gzip"], False), ([b"chunked", b"chunked"], False)],
)
def test_chunked_is_the_only_transfer_coding(values: list[bytes], plain: bool) -> None:
    assert plain is plainly_framed(head(*((b"Transfer-Encoding", value) for value in values)))


def test_a_body_in_an_unknown_form_cannot_be_searched() -> None:
    assert unsearchable(head((b"content-type", b"text/plain; charset=utf-8"))) is None
    assert "charset" in (unsearchable(head((b"content-type", b"text/plain; charset=utf-7"))) or "")
    assert "compressed" in (unsearchable(head((b"grpc-encoding", b"gzip"))) or "")
    assert unsearchable(head((b"grpc-encoding", b"identity"))) is None


@pytest.mark.parametrize(
    ("value", "grpc"),
    [(b"application/grpc", True), (b"Application/gRPC+proto", True), (b"application/grpc-web", False), (b"", False)],
)
def test_grpc_is_known_by_its_type(value: bytes, grpc: bool) -> None:
    assert grpc is is_grpc(head((b"content-type", value)))


def test_codings_are_listed_in_the_order_of_their_application() -> None:
    assert ["gzip", "br", "zstd"] == encodings(((b"Content-Encoding", b"GZIP, br"), (b"content-encoding", b" zstd,")))
    assert ["gzip"] == encodings(((b"content-encoding", b"gzip,AWS-chunked"),))


def test_what_is_between_neighbours_is_not_passed_on_and_a_value_has_one_line() -> None:
    received = head((b"Connection", b"close"), (b"Alt-Svc", b"h3"), (b"X-A", b"a\r\n b"), (b"X-B", b"plain"))
    assert ((b"X-A", b"a b"), (b"X-B", b"plain")) == end_to_end(received)
    assert ((b"Connection", b"close"),) == own_fields(received)
    assert () == own_fields(head())
    assert ((b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")) == own_fields(head(status=101))


def test_a_head_with_a_secret_is_not_kept() -> None:
    clean, secret = head((b"X-A", b"b")), head((b"X-Echo", b"tok-0123456789"))
    before = response_head._facts_before.cache_info().currsize
    assert head_facts(secret, keep=False) == head_facts(secret, keep=False)
    assert before == response_head._facts_before.cache_info().currsize
    assert head_facts(clean, keep=True) is head_facts(clean, keep=True)
    assert head_facts(secret, keep=False).headers == secret.headers
