"""A request has one meaning or is refused. The forwarded request is the judged one."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tls.hello import TOKEN, Refused
from gateway.translate import Headers, RequestParts, Translated, body_length, head_size, refusal_of_form, translate
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


def refused(parts, flow=FLOW):
    verdict = translate(parts, flow)
    assert isinstance(verdict, Refused)
    return verdict


SETTINGS = (b"HTTP2-Settings", b"AAMA")
REFUSALS = {
    "a method that is no token": (replace(GET, method=b"G T"), Refused("malformed method")),
    "a long method": (replace(GET, method=b"A" * 33), Refused("malformed method")),
    "CONNECT": (replace(GET, method=b"CONNECT"), Refused("method not supported", 405)),
    "TRACE": (replace(GET, method=b"TRACE"), Refused("method not supported", 405)),
    "TRACK": (replace(GET, method=b"TRACK"), Refused("method not supported", 405)),
    "PRI": (replace(GET, method=b"PRI"), Refused("method not supported", 405)),
    "129 headers": (with_headers(*[(b"X", b"a")] * 127), Refused("too many headers", 431)),
    "a header name that is no token": (with_headers((b"X Y", b"a")), Refused("malformed header name")),
    "an upper-case name in HTTP/2": (with_headers((b"X", b"a"), parts=H2), Refused("malformed header name")),
    "a control character": (with_headers((b"X", b"a\0b")), Refused("malformed header value")),
    "a blank in front": (with_headers((b"X", b" a")), Refused("malformed header value")),
    "a tab behind": (with_headers((b"X", b"a\t")), Refused("malformed header value")),
    "a target of another form": (
        replace(GET, target=b"good.test:443"),
        Refused("target is neither a path nor an http URL"),
    ),
    "another scheme": (replace(GET, target=b"http://good.test/"), Refused("target names another scheme")),
    "another host": (
        replace(GET, target=b"https://Evil.test:444/"),
        Refused("target names another host", 421, "evil.test:444"),
    ),
    "a host that is none": (replace(GET, target=b"https://a@b/"), Refused("target names another host", 421)),
    "a fragment": (replace(GET, target=b"/a#b"), Refused("malformed path")),
    "a path of HTTP/2 that is a URL": (replace(H2, target=b"https://good.test/"), Refused("malformed path")),
    "the scheme of HTTP/2": (replace(H2, scheme=b"http"), Refused(":scheme is not that of the connection")),
    "no authority": (replace(H2, authority=b""), Refused("exactly one authority is required")),
    "an authority and another Host": (
        with_headers((b"host", b"evil.test"), parts=H2),
        Refused("exactly one authority is required"),
    ),
    "an authority and two Hosts": (
        with_headers((b"host", b"good.test"), (b"host", b"good.test"), parts=H2),
        Refused("exactly one authority is required"),
    ),
    "no Host": (replace(GET, headers=()), Refused("a request must have exactly one Host header")),
    "two Hosts": (with_headers((b"host", b"good.test")), Refused("a request must have exactly one Host header")),
    "a Host that is none": (replace(GET, headers=((b"Host", b"a@b"),)), Refused("Host is not a clean host name")),
    "a Host of another flow": (
        replace(GET, headers=((b"Host", b"evil.test"),)),
        Refused("this connection serves another host", 421, "evil.test"),
    ),
    "a length that is no number": (with_headers((b"Content-Length", b"+1")), Refused("malformed Content-Length")),
    "a length with a zero in front": (with_headers((b"Content-Length", b"01")), Refused("malformed Content-Length")),
    "a length of 19 digits": (with_headers((b"Content-Length", b"1" * 19)), Refused("malformed Content-Length")),
    "a coding in HTTP/2": (
        with_headers((b"transfer-encoding", b"chunked"), parts=H2),
        Refused("Transfer-Encoding belongs to HTTP/1.1"),
    ),
    "a coding in HTTP/1.0": (
        with_headers((b"Transfer-Encoding", b"chunked"), parts=replace(GET, version=10)),
        Refused("Transfer-Encoding belongs to HTTP/1.1"),
    ),
    "a length and a coding": (
        with_headers((b"Content-Length", b"1"), (b"Transfer-Encoding", b"chunked")),
        Refused("both Content-Length and Transfer-Encoding"),
    ),
    "another coding": (with_headers((b"Transfer-Encoding", b"gzip")), Refused("unsupported Transfer-Encoding")),
    "a framing header that is hop-by-hop": (
        with_headers((b"Connection", b"close"), (b"Connection", b"x,\tTransfer-Encoding ".strip())),
        Refused("Connection lists a framing header"),
    ),
    "an upgrade without its header": (
        with_headers((b"Connection", b"upgrade")),
        Refused("only a well-formed WebSocket upgrade is supported"),
    ),
    "settings of HTTP/2 alone": (
        with_headers(SETTINGS),
        Refused("only a well-formed WebSocket upgrade is supported"),
    ),
    "another expectation": (
        with_headers((b"Expect", b"x")),
        Refused("only the expectation 100-continue is supported", 417),
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_each_refusal_has_its_reason_and_status(case):
    parts, expected = REFUSALS[case]
    assert expected == refused(parts)


def head_of(size):
    """Return a request whose head counts `size` bytes: target, and name, value and four bytes for each header."""
    counted = len(GET.target) + sum(len(name) + len(value) + 4 for name, value in GET.headers)
    return with_headers((b"X", b"a" * (size - counted - 5)))


def test_the_longest_request_passes():
    assert isinstance(translate(replace(GET, method=b"A" * 32), FLOW), Translated)
    assert isinstance(translate(with_headers(*[(b"X", b"a")] * 126), FLOW), Translated)
    assert isinstance(translate(head_of(65536), FLOW), Translated)
    assert Refused("request head over the limit", 431) == refused(head_of(65537))
    length = with_headers((b"Content-Length", b"1" * 18))
    assert (b"Content-Length", b"1" * 18) in translate(length, FLOW).headers


SINGLE = (b"Content-Length", b"Transfer-Encoding", b"Content-Type", b"Expect", b"Upgrade", b"Authorization")
DROPPED = (
    *(b"Keep-Alive", b"Proxy-Connection", b"Proxy-Authorization", b"Proxy-Authenticate", b"TE", b"Trailer"),
    *(b"X-HTTP-Method", b"X-HTTP-Method-Override", b"X-Method-Override"),
    *(b"X-Original-URL", b"X-Original-URI", b"X-Rewrite-URL", b"Forwarded", b"Via"),
    *(b"X-Forwarded-For", b"X-Forwarded-Host", b"X-Forwarded-Port", b"X-Forwarded-Proto", b"X-Forwarded-Server"),
    *(b"X-Forwarded-Prefix", b"X-Forwarded-URI", b"X-Forwarded-Method", b"X-Host", b"X-Real-IP"),
)


@pytest.mark.parametrize("name", SINGLE)
def test_a_header_that_has_one_value_comes_once(name):
    expected = Refused(f"more than one {name.decode().lower()} header")
    assert expected == refused(with_headers((name, b"1"), (name.lower(), b"1")))
    assert expected == refused(with_headers((name.lower(), b"1"), (b"x", b"y"), (name.lower(), b"1"), parts=H2))


@pytest.mark.parametrize("name", DROPPED)
def test_each_header_of_the_connection_is_dropped(name):
    assert ((b"Accept", b"*/*"),) == translate(with_headers((name, b"1")), FLOW).headers
    assert ((b"accept", b"*/*"),) == translate(with_headers((name.lower(), b"1"), parts=H2), FLOW).headers
    if b"-" in name:
        plain = name.lower().decode()
        assert Refused(f"header name can be taken for {plain}") == refused(
            with_headers((name.replace(b"-", b"_"), b"1"))
        )


@pytest.mark.parametrize("name", [b"Transfer_Encoding", b"Content_Length", b"Content_Type", b"HTTP2_Settings"])
def test_a_name_that_imitates_framing_is_refused(name):
    expected = Refused(f"header name can be taken for {name.decode().lower().replace('_', '-')}")
    assert expected == refused(with_headers((name, b"1")))


def test_another_name_with_an_underscore_passes():
    assert (b"X_Key", b"1") in translate(with_headers((b"X_Key", b"1")), FLOW).headers


def test_only_blanks_are_refused_at_the_edges_of_a_value():
    assert (b"X", b"X a X") in translate(with_headers((b"X", b"X a X")), FLOW).headers


def test_only_the_trailers_of_grpc_go_on_in_http2():
    assert ((b"accept", b"*/*"), (b"te", b"trailers")) == translate(
        with_headers((b"te", b"Trailers"), parts=H2), FLOW
    ).headers
    assert ((b"accept", b"*/*"),) == translate(with_headers((b"te", b"gzip"), parts=H2), FLOW).headers
    assert ((b"Accept", b"*/*"),) == translate(with_headers((b"TE", b"trailers")), FLOW).headers


@pytest.mark.parametrize(
    ("version", "connection", "close"),
    [
        (11, None, False),
        (11, b"close", True),
        (11, b" x ,CLOSE", True),
        (11, b"keep-alive", False),
        (10, None, True),
        (10, b"Keep-Alive", False),
        (10, b"keep-alive, close", True),
        (20, None, False),
    ],
)
def test_a_client_that_wants_its_connection_closed_says_so(version, connection, close):
    parts = H2 if version == 20 else replace(GET, version=version)
    headers = () if connection is None else ((b"Connection", connection.strip()),)
    assert close is translate(with_headers(*headers, parts=parts), FLOW).close


def test_an_expectation_is_reported_and_passed_on():
    translated = translate(with_headers((b"Expect", b"100-Continue")), FLOW)
    assert translated.expect_continue and (b"Expect", b"100-Continue") in translated.headers
    assert not translate(GET, FLOW).expect_continue


WEBSOCKET = {
    b"Connection": b"x, Upgrade",
    b"Upgrade": b"websocket",
    b"Sec-WebSocket-Version": b"13",
    b"Sec-WebSocket-Key": b"dGhlIHNhbXBsZSBub25jZQ==",
}
SPOILED = {
    "another method": (replace(GET, method=b"POST"), {}),
    "HTTP/1.0": (replace(GET, version=10), {}),
    "no Upgrade": (GET, {b"Upgrade": None}),
    "another protocol": (GET, {b"Upgrade": b"websockets"}),
    "no Connection": (GET, {b"Connection": None}),
    "another option": (GET, {b"Connection": b"keep-alive"}),
    "no version": (GET, {b"Sec-WebSocket-Version": None}),
    "another version": (GET, {b"Sec-WebSocket-Version": b"8"}),
    "no key": (GET, {b"Sec-WebSocket-Key": None}),
    "a short key": (GET, {b"Sec-WebSocket-Key": b"A" * 23}),
    "a long key": (GET, {b"Sec-WebSocket-Key": b"A" * 25}),
    "a second key": (GET, {b"sec-websocket-key": b"A" * 24}),
    "a header that begins like the key": (GET, {b"Sec-WebSocket-Key1": b"A" * 24}),
    "a body": (GET, {b"Content-Length": b"1"}),
    "a body in chunks": (GET, {b"Transfer-Encoding": b"chunked"}),
    "settings of HTTP/2 beside it, without the protocol": (GET, {b"Upgrade": b"h2c", SETTINGS[0]: SETTINGS[1]}),
}


def handshake(parts, changes):
    merged = WEBSOCKET | changes
    return with_headers(*((name, value) for name, value in merged.items() if value is not None), parts=parts)


def test_the_handshake_that_the_next_test_spoils_is_one():
    translated = translate(handshake(GET, {}), FLOW)
    assert translated.websocket and not translated.close
    kept = [(b"Accept", b"*/*"), *((name, WEBSOCKET[name]) for name in list(WEBSOCKET)[2:])]
    assert tuple(kept) == translated.headers
    assert not translate(GET, FLOW).websocket


@pytest.mark.parametrize("case", SPOILED)
def test_a_handshake_that_is_spoiled_in_one_place_is_refused(case):
    parts, changes = SPOILED[case]
    assert Refused("only a well-formed WebSocket upgrade is supported") == refused(handshake(parts, changes))


def test_http2_may_repeat_its_authority_as_host():
    translated = translate(with_headers((b"host", b"good.test"), parts=H2), FLOW)
    assert ((b"accept", b"*/*"),) == translated.headers
    assert b"good.test" == translated.host_header


def facts(method="GET", path="/a", query="", host="good.test", port=443, scheme=Scheme.HTTPS):
    return RequestFacts(host, port, scheme, method, path, query)


FORMS = {
    "a request": (facts(), None),
    "a query": (facts(query="x=1&y"), None),
    "another port": (facts(port=8443), None),
    "plain HTTP": (facts(port=80, scheme=Scheme.HTTP), None),
    "plain HTTP on another port": (facts(port=8080, scheme=Scheme.HTTP), None),
    "a path that is not ASCII": (facts(path="/\u00e4"), "the request line is not ASCII"),
    "a line end": (
        facts(path="/a HTTP/1.1\r\nX: y\r\nZ:"),
        "the gateway reads another method or target from this request line",
    ),
    "a whole request": (
        facts(path="/a HTTP/1.1\r\nHost: good.test\r\n\r\nGET /b"),
        "the gateway reads another method or target from this request line",
    ),
    "a target that hides the end": (facts(path="/a\r\n"), "malformed request line"),
    "a blank": (facts(path="/a b"), "malformed request line"),
    "a method that is none": (facts(method="G\0"), "malformed request line"),
    "no method": (facts(method=""), "request does not begin with a method"),
    "a method that is never forwarded": (facts(method="TRACE"), "method not supported"),
    "a long path": (facts(path="/" + "a" * 20000), "request line over the limit"),
    "a URL as the path": (
        facts(path="https://good.test/a"),
        "the gateway reads another path or query from this target",
    ),
    "a URL of another host": (facts(path="https://evil.test/a"), "target and Host name different hosts"),
    "a query in the path": (facts(path="/a?b"), "the gateway reads another path or query from this target"),
    "a fragment": (facts(path="/a#b"), "malformed path"),
}


@pytest.mark.parametrize("case", FORMS)
def test_a_form_that_is_refused_before_policy_is_reported(case):
    """`sallyport policy explain` shows it."""
    request, expected = FORMS[case]
    assert expected == refusal_of_form(request)


def test_the_options_of_a_connection_are_its_own_and_are_read_in_any_case():
    parts = with_headers((b"X-Hop", b"1"), (b"X-Keep", b"1"), (b"X", b"x-keep, close"), (b"Connection", b"X-Hop"))
    translated = translate(parts, FLOW)
    assert ((b"Accept", b"*/*"), (b"X-Keep", b"1"), (b"X", b"x-keep, close")) == translated.headers
    assert not translated.close


@pytest.mark.parametrize(
    ("parts", "more", "length"),
    [
        (GET, (), 0),
        (GET, ((b"Content-Length", b"9"),), 9),
        (GET, ((b"CONTENT-LENGTH", b"9"),), 9),
        (GET, ((b"Transfer-Encoding", b"chunked"),), None),
        (GET, ((b"TRANSFER-ENCODING", b"chunked"),), None),
        (replace(GET, version=10), (), 0),
        (H2, (), None),
        (replace(H2, ended=True), (), 0),
        (H2, ((b"content-length", b"9"),), 9),
    ],
)
def test_the_length_of_a_body_is_known_if_the_head_says_it(
    parts: RequestParts, more: Headers, length: int | None
) -> None:
    """That of a WebSocket is not."""
    asked = replace(parts, headers=(*parts.headers, *more))
    assert length == body_length(asked, websocket=False)
    assert body_length(asked, websocket=True) is None


def test_the_size_of_a_head_is_that_of_all_that_the_client_chooses() -> None:
    assert len("GET/a%2Fb?x=1HostGood.TestAccept*/*") == head_size(GET)
    assert len("GET/aaccept*/*") == head_size(H2)
