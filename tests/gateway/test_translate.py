"""A request has one meaning, or is refused; what is forwarded is what was judged."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.hello import TOKEN, Refused
from gateway.translate import RequestParts, Translated, translate
from policy.facts import FlowFacts, RequestFacts, Scheme

FLOW = FlowFacts("good.test", 443, Scheme.HTTPS)
PLAIN = FlowFacts("good.test", 80, Scheme.HTTP)
GET = RequestParts(11, b"GET", b"/a%2Fb?x=1", b"", b"", ((b"Host", b"Good.Test"), (b"Accept", b"*/*")))
H2 = RequestParts(20, b"GET", b"/a", b"https", b"good.test", ((b"accept", b"*/*"),))


def with_headers(*headers: tuple[bytes, bytes], parts: RequestParts = GET) -> RequestParts:
    return replace(parts, headers=(*parts.headers, *headers))


def test_the_facts_are_what_is_forwarded():
    translated = translate(GET, FLOW)
    assert isinstance(translated, Translated)
    assert RequestFacts("good.test", 443, Scheme.HTTPS, "GET", "/a%2Fb", "x=1") == translated.facts
    assert (b"/a%2Fb?x=1", b"good.test", ((b"Accept", b"*/*"),)) == (
        translated.target,
        translated.host_header,
        translated.headers,
    )


@pytest.mark.parametrize(
    ("authority", "status"),
    [
        (b"good.test", None),
        (b"GOOD.TEST.", None),
        (b"good.test:443", None),
        (b"good.test:80", 421),
        (b"evil.test", 421),
        (b"", 400),
        (b"good.test@evil.test", 400),
        (b"good.test/x", 400),
        (b"good.test:0443", 400),
        (b"g\xc3\xb6od.test", 400),
        (b"127.0.0.1", 400),
    ],
)
@pytest.mark.parametrize("version", [11, 20])
def test_only_the_host_of_the_flow_is_served(authority, status, version):
    parts = replace(GET, headers=((b"Host", authority),)) if version == 11 else replace(H2, authority=authority)
    verdict = translate(parts, FLOW)
    assert status == (verdict.status if isinstance(verdict, Refused) else None)


def test_an_unusual_port_must_be_written():
    flow = FlowFacts("good.test", 8443, Scheme.HTTPS)
    assert isinstance(translate(GET, flow), Refused)
    written = replace(GET, headers=((b"Host", b"good.test:8443"),))
    assert b"good.test:8443" == translate(written, flow).host_header


def test_an_absolute_target_must_agree_and_becomes_a_path():
    for target, status in [
        (b"https://good.test/x", None),
        (b"https://good.test:443?q", None),
        (b"http://good.test/x", 400),
        (b"https://evil.test/x", 421),
        (b"ftp://good.test/x", 400),
        (b"HTTPS://good.test/x", 400),
        (b"//evil.test/x", None),
        (b"*", 400),
        (b"good.test:443", 400),
        (b"/a b", 400),
        (b"/a#b", 400),
        (b"/\xff", 400),
    ]:
        verdict = translate(replace(GET, target=target), FLOW)
        assert (target, status) == (target, verdict.status if isinstance(verdict, Refused) else None)
    assert b"/?q" == translate(replace(GET, target=b"https://good.test:443?q"), FLOW).target


@pytest.mark.parametrize(
    "headers",
    [
        [(b"Host", b"good.test")],
        [(b"Content-Length", b"1"), (b"content-length", b"1")],
        [(b"Content-Length", b"1, 1")],
        [(b"Content-Length", b"-1")],
        [(b"Content-Length", b"0x5")],
        [(b"Content-Length", b"9223372036854775808")],
        [(b"Content-Length", b"\xd9\xa3")],
        [(b"Content-Length", b"")],
        [(b"Content-Length", b"3"), (b"Transfer-Encoding", b"chunked")],
        [(b"Transfer-Encoding", b"chunked"), (b"Transfer-Encoding", b"chunked")],
        [(b"Transfer-Encoding", b"gzip, chunked")],
        [(b"Transfer-Encoding", b"CHUNKED")],
        [(b"Transfer-Encoding", b"chunked,")],
        [(b"Transfer_Encoding", b"chunked")],
        [(b"Content_Length", b"3")],
        [(b"Connection", b"host")],
        [(b"Connection", b"close, Content-Length")],
        [(b"Upgrade", b"h2c"), (b"Connection", b"upgrade")],
        [(b"Upgrade", b"websocket"), (b"Connection", b"upgrade")],
        [(b"Connection", b"upgrade")],
        [(b"HTTP2-Settings", b"AAMA")],
        [(b"Expect", b"100-continue"), (b"Expect", b"100-continue")],
        [(b"X Y", b"z")],
        [(b"", b"z")],
        [(b"X", b"a\r\nb")],
        [(b"X", b"a\0b")],
        [(b"X", b"a\x1bb")],
        [(b"X", b"a")] * 127,
        [(b"X", b"a" * 65536)],
    ],
)
def test_two_readings_are_none(headers):
    assert isinstance(translate(with_headers(*headers), FLOW), Refused)


@pytest.mark.parametrize("method", [b"CONNECT", b"TRACE", b"TRACK", b"PRI", b"G T", b"", b"A" * 33, b"G\0"])
def test_methods_that_are_never_forwarded(method):
    assert isinstance(translate(replace(GET, method=method), FLOW), Refused)


def test_methods_keep_their_case():
    assert "get" == translate(replace(GET, method=b"get"), FLOW).facts.method


@pytest.mark.parametrize(
    "parts",
    [
        replace(H2, scheme=b"http"),
        replace(H2, authority=b""),
        with_headers((b"host", b"evil.test"), parts=H2),
        with_headers((b"host", b"good.test:443"), parts=H2),
        with_headers((b"transfer-encoding", b"chunked"), parts=H2),
        with_headers((b"Accept", b"x"), parts=H2),
        with_headers((b"upgrade", b"websocket"), (b"connection", b"upgrade"), parts=H2),
        replace(H2, target=b"https://good.test/"),
        replace(H2, target=b"*"),
        replace(H2, target=b""),
    ],
)
def test_http2_has_the_same_rules(parts):
    assert isinstance(translate(parts, FLOW), Refused)


def test_what_belongs_to_the_connection_or_rewrites_the_request_is_not_forwarded():
    names = [b"Keep-Alive", b"Proxy-Connection", b"Proxy-Authorization", b"TE", b"Trailer", b"X-Hop"]
    names += [b"X-HTTP-Method-Override", b"X-Original-URL", b"X-Forwarded-For", b"Forwarded", b"Via"]
    parts = with_headers(*((name, b"1") for name in names), (b"Connection", b"x-hop, close"))
    translated = translate(parts, FLOW)
    assert ((b"Accept", b"*/*"),) == translated.headers
    assert translated.close


def test_a_websocket_handshake_is_recognised():
    parts = with_headers(
        (b"Connection", b"keep-alive, Upgrade"),
        (b"Upgrade", b"WebSocket"),
        (b"Sec-WebSocket-Version", b"13"),
        (b"Sec-WebSocket-Key", b"dGhlIHNhbXBsZSBub25jZQ=="),
    )
    assert translate(parts, FLOW).websocket
    assert translate(with_headers((b"Content-Length", b"0"), parts=parts), FLOW).websocket
    assert isinstance(translate(with_headers((b"Content-Length", b"1"), parts=parts), FLOW), Refused)


H2C = (
    (b"Connection", b"Upgrade, HTTP2-Settings"),
    (b"Upgrade", b"h2c"),
    (b"HTTP2-Settings", b"AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA"),
)


def test_an_offer_to_go_on_in_http2_is_no_part_of_a_plain_request():
    translated = translate(with_headers(*H2C), PLAIN)

    assert isinstance(translated, Translated)
    assert (((b"Accept", b"*/*"),), False, False) == (translated.headers, translated.websocket, translated.close)


@pytest.mark.parametrize(
    ("parts", "flow"),
    [
        (with_headers(*H2C), FLOW),
        (with_headers(*H2C, parts=replace(GET, version=10)), PLAIN),
        (with_headers(*H2C[1:], (b"Connection", b"Upgrade")), PLAIN),
        (with_headers(*H2C[:2]), PLAIN),
        (with_headers(*H2C, (b"Upgrade", b"websocket")), PLAIN),
        (with_headers(H2C[0], H2C[2], (b"Upgrade", b"h2c, websocket")), PLAIN),
        (with_headers(*H2C, (b"HTTP2_Settings", b"AAMA")), PLAIN),
    ],
)
def test_any_other_upgrade_than_that_is_refused(parts, flow):
    assert isinstance(translate(parts, flow), Refused)


@given(
    st.sampled_from([10, 11, 20]),
    st.binary(max_size=12),
    st.binary(max_size=30),
    st.sampled_from([b"", b"http", b"https"]),
    st.binary(max_size=20),
    st.lists(
        st.tuples(
            st.sampled_from([b"host", b"Host", b"content-length", b"transfer-encoding", b"connection", b"x"])
            | st.binary(max_size=8),
            st.sampled_from([b"good.test", b"chunked", b"close", b"5"]) | st.binary(max_size=12),
        ),
        max_size=6,
    ).map(tuple),
    st.sampled_from([FLOW, PLAIN]),
)
def test_nothing_raises_and_what_passes_is_clean(version, method, target, scheme, authority, headers, flow):
    verdict = translate(RequestParts(version, method, target, scheme, authority, headers), flow)
    if isinstance(verdict, Translated):
        assert (flow.host, flow.port, flow.scheme) == (verdict.facts.host, verdict.facts.port, verdict.facts.scheme)
        assert verdict.facts.path.startswith("/")
        for name, value in verdict.headers:
            assert TOKEN.fullmatch(name) and not set(value) & set(b"\r\n\0")
            assert name.lower() not in (b"host", b"connection", b"proxy-authorization")
