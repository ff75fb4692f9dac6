"""Framing of HTTP/1.1: bodies of requests, responses of servers, and the heads that the engine writes."""

import h11
import pytest
from h11._readers import ChunkedReader
from h11._receivebuffer import ReceiveBuffer
from hypothesis import given
from hypothesis import strategies as st

from gateway.engines.http1.framing import (
    MAX_INFORMATIONAL,
    MAX_RESPONSE_HEAD,
    Begun,
    ChunkedBody,
    ClientRequest,
    FramingError,
    HeadWriter,
    Response,
    SizedBody,
    binds_connection,
    check_framing,
    read_request,
    request_head,
    response_head,
)
from gateway.verdicts import ForwardHead

REST = b"GET /next HTTP/1.1\r\n"


def head(raw: bytes) -> ClientRequest:
    found = read_request(raw)
    assert isinstance(found, ClientRequest)
    return found


# Bodies of requests.


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.lists(st.integers(1, 30), max_size=20))
def test_a_chunked_body_does_not_depend_on_its_segments(parts: list[bytes], cuts: list[int]) -> None:
    raw = b"".join(b"%x;e=1\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\nX-T: 1\r\n\r\n" + REST
    body, data, content = ChunkedBody(), bytearray(), b""
    while raw and not body.done:
        cut = cuts.pop() if cuts else len(raw)
        data += raw[:cut]
        raw = raw[cut:]
        content += body.take(data)
    assert (b"".join(parts), True, REST) == (content, body.done, bytes(data) + raw)


_PIECES = (b"3", b"0", b"a", b"\r\n", b"\r", b"\n", b";", b"abc", b" ", b"x: y", b"0\r\n\r\n", b"3\r\nabc\r\n")


@given(st.lists(st.sampled_from(_PIECES), max_size=12).map(b"".join))
def test_what_is_accepted_as_chunked_another_parser_reads_alike(raw: bytes) -> None:
    """Source of the other reading: h11, which nothing of the gateway's framing shares."""
    body, data = ChunkedBody(), bytearray(raw)
    try:
        content = body.take(data)
    except FramingError:
        return
    if not body.done:
        return
    buffer, reader, theirs = ReceiveBuffer(), ChunkedReader(), b""
    buffer += raw
    while not isinstance(event := reader(buffer), h11.EndOfMessage):
        assert isinstance(event, h11.Data)
        theirs += bytes(event.data)
    assert (theirs, bytes(buffer)) == (content, bytes(data))


@pytest.mark.parametrize(
    "raw",
    [
        b"g\r\n",
        b"-3\r\n",
        b"+3\r\n",
        b"0x3\r\n",
        b" 3\r\n",
        b"3\n",
        b"3\rabc",
        b"3;a\rb\r\n",
        b"3;a\x00\r\n",
        b"1" * 16 + b"\r\n",
        b"3;" + b"a" * 300,
        b"3\r\nabcX",
        b"3\r\nabc0\r\n",
        b"0\r\nno field\r\n",
        b"0\r\nA : b\r\n",
        b"0\r\n" + b"a: b\r\n" * 8000,
    ],
)
def test_malformed_chunks_are_refused(raw: bytes) -> None:
    with pytest.raises(FramingError):
        ChunkedBody().take(bytearray(raw + b"\r\n\r\n"))


@pytest.mark.parametrize("length", [0, 1, 5])
def test_a_sized_body_takes_its_length_and_no_more(length: int) -> None:
    body, data = SizedBody(length), bytearray(b"abcde"[:length] + REST)
    assert (length == 0) == body.done
    assert (b"abcde"[:length], True, REST) == (body.take(data), body.done, bytes(data))


def test_the_body_is_the_one_of_the_head() -> None:
    chunked = head(b"POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n")
    sized = head(b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 3\r\n\r\n")
    assert isinstance(chunked.body(), ChunkedBody)
    assert b"abc" == sized.body().take(bytearray(b"abcdef"))
    assert head(b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n").body().done


@pytest.mark.parametrize(
    ("version", "connection", "expected"),
    [
        (b"1.1", b"keep-alive", False),
        (b"1.1", b"x, Close", True),
        (b"1.1", b"closed", False),
        (b"1.0", b"x", True),
        (b"1.0", b"Keep-Alive", False),
        (b"1.0", b"keep-alive, close", True),
    ],
)
def test_whether_a_client_wants_its_connection_closed(version: bytes, connection: bytes, expected: bool) -> None:
    raw = b"GET / HTTP/%s\r\nHost: a.test\r\nConnection: %s\r\n\r\n" % (version, connection)
    assert expected == head(raw).closes


# Heads that are written.


def test_a_head_is_written_as_it_is() -> None:
    fields = ((b"Host", b"a.test"), (b"Content-Length", b"1"))
    assert b"PUT /x HTTP/1.0\r\nHost: a.test\r\nContent-Length: 1\r\n\r\n" == request_head(b"PUT", b"/x", 0, fields)
    assert b"HTTP/1.1 404 Not Found\r\nA: b\r\n\r\n" == response_head(404, "Not Found", ((b"A", b"b"),))


@pytest.mark.parametrize("other", [(b"transfer-encoding", b"chunked"), (b"content-length", b"1")])
def test_a_request_with_two_framings_is_not_written(other: tuple[bytes, bytes]) -> None:
    check_framing((other,))
    with pytest.raises(FramingError):
        request_head(b"POST", b"/", 1, ((b"Content-Length", b"1"), other))


def test_a_repeated_head_is_written_once() -> None:
    writer, head_ = HeadWriter(), ForwardHead(b"/x", b"", ((b"Host", b"a.test"),))
    sent = writer.write(b"GET", 1, head_)
    assert sent is writer.write(b"GET", 1, head_)
    assert (b"GET /x HTTP/1.1\r\nHost: a.test\r\n\r\n", False, False) == (sent.data, sent.expects, sent.binds)
    assert sent.data.replace(b"GET", b"PUT") == writer.write(b"PUT", 1, head_).data
    assert sent.data.replace(b"1.1", b"1.0") == writer.write(b"GET", 0, head_).data
    other = ForwardHead(b"/x", b"", ((b"Host", b"a.test"), (b"Expect", b"100-continue"), (b"Authorization", b"NTLM x")))
    sent = writer.write(b"GET", 1, other)
    assert (True, True) == (sent.expects, sent.binds) and b"xpect" not in sent.data
    assert "NTLM" not in repr(sent)


def test_a_repeated_response_head_is_written_once() -> None:
    writer, headers = HeadWriter(), ((b"Transfer-Encoding", b"chunked"), (b"A", b"b"))
    begun = writer.begin(200, "OK", 1, headers)
    assert begun is writer.begin(200, "OK", 1, headers)
    assert Begun(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nA: b\r\n\r\n", True, False) == begun
    assert Begun(b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n", False, True) == writer.begin(200, "OK", 0, headers)
    assert begun == writer.begin(200, "OK", 1, headers)
    assert Begun(b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n", False, False) == writer.begin(200, "OK", 1, headers[1:])
    assert Begun(b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n", False, False) == writer.begin(200, "OK", 0, headers[1:])
    assert begun.data.replace(b"200", b"201") == writer.begin(201, "OK", 1, headers).data


# Responses.


def read(raw: bytes, *, bodiless: bool = False, ended: bool = False, step: int = 7) -> tuple[Response, bytes]:
    """Feed a response in small pieces."""
    response, body = Response(bodiless=bodiless), b""
    for at in range(0, len(raw), step):
        body += b"".join(response.feed(bytearray(raw[at : at + step])))
    if ended:
        response.end()
    return response, body


OK = b"HTTP/1.1 200 OK\r\n"
INFORMATIONAL = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nA: b\r\n\r\n"


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize(
    ("raw", "bodiless", "body", "reusable"),
    [
        (OK + b"Content-Length: 3\r\n\r\nabc", False, b"abc", True),
        (OK + b"Content-Length: 3\r\nConnection: close\r\n\r\nabc", False, b"abc", False),
        (OK + b"Content-Length: 0\r\n\r\n", False, b"", True),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\nX-T: 1\r\n\r\n", False, b"abcde", True),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nabc", False, b"abc", False),
        (b"HTTP/1.1 204 No Content\r\n\r\n", False, b"", True),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", False, b"", True),
        (OK + b"Content-Length: 9\r\n\r\n", True, b"", True),
        (INFORMATIONAL + OK + b"Content-Length: 1\r\n\r\na", False, b"a", True),
    ],
)
def test_a_response_is_read_to_its_end(raw: bytes, bodiless: bool, body: bytes, reusable: bool, step: int) -> None:
    response, found = read(raw, bodiless=bodiless, step=step)
    assert (body, True, True, reusable) == (found, response.complete, response.framed, response.reusable)
    assert (b"A", b"b") not in response.headers


def test_a_response_without_a_length_ends_with_its_connection() -> None:
    response, body = read(OK + b"\r\nabc", ended=True)
    assert (b"abc", True, False, False) == (body, response.complete, response.framed, response.reusable)


@pytest.mark.parametrize(
    "raw", [b"", OK, OK + b"Content-Length: 3\r\n\r\nab", OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n"]
)
def test_a_response_that_ends_early_is_incomplete(raw: bytes) -> None:
    with pytest.raises(FramingError):
        read(raw, ended=True)


@pytest.mark.parametrize("step", [1, 10_000])
@pytest.mark.parametrize("extra", [b"x", OK + b"Content-Length: 1\r\n\r\na", b"\r\n\r\nHTTP"])
def test_a_connection_with_bytes_behind_a_response_carries_no_other(extra: bytes, step: int) -> None:
    response, body = read(OK + b"Content-Length: 3\r\n\r\nabc" + extra, step=step)
    assert (b"abc", True, False) == (body, response.complete, response.reusable)


def test_a_body_after_the_head_of_a_bodiless_response_makes_its_connection_useless() -> None:
    response, body = read(OK + b"Content-Length: 3\r\n\r\nabc", bodiless=True)
    assert (b"", True, False) == (body, response.complete, response.reusable)


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/9.9 200 OK\r\n\r\n",
        OK + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        OK + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        OK + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Content-Length: 1x\r\n\r\na",
        OK + b"A b: c\r\n\r\n",
        OK + b"A: b\x00c\r\n\r\n",
        OK + b"A: b\rc\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\ng\r\n",
        OK + b"A: " + b"b" * MAX_RESPONSE_HEAD + b"\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * (MAX_INFORMATIONAL + 1),
    ],
)
def test_a_malformed_response_is_refused(raw: bytes) -> None:
    with pytest.raises(FramingError):
        read(raw, step=1000)


def test_the_bytes_behind_an_upgrade_are_kept() -> None:
    raw = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nframes"
    response, body = read(raw, step=10_000)
    assert (101, b"frames", b"", True) == (response.status, response.upgraded, body, response.headed)


@pytest.mark.parametrize(
    ("name", "value", "binds"),
    [
        (b"WWW-Authenticate", b"NTLM", True),
        (b"www-authenticate", b'Basic realm="a",negotiate', True),
        (b"Authorization", b"Negotiate YII=", True),
        (b"AUTHORIZATION", b"nTLM TlRMTVNTUAABAAAA", True),
        (b"WWW-Authenticate", b"Kerberos", True),
        (b"Proxy-Authenticate", b"Basic", True),
        (b"Persistent-Auth", b"true", True),
        (b"Authorization", b"Bearer abc", False),
        (b"WWW-Authenticate", b'Digest realm="a"', False),
        (b"WWW-Authenticate", b"NTLMX, Negotiated", False),
        (b"X-Authorization", b"NTLM", False),
    ],
)
def test_headers_that_authenticate_a_connection_are_known(name: bytes, value: bytes, binds: bool) -> None:
    assert binds is binds_connection([(b"A", b"b"), (name, value)])
