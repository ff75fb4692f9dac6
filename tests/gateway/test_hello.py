"""The first bytes of a flow have one meaning, however they arrive, or none."""

import ssl
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.hello import (
    MAX_HEAD,
    MAX_HELLO,
    Hello,
    NeedMore,
    NoSni,
    NotTls,
    Refused,
    RequestHead,
    read_head,
    read_hello,
)


def vector(size: int, data: bytes) -> bytes:
    return len(data).to_bytes(size, "big") + data


def extension(kind: int, data: bytes) -> bytes:
    return struct.pack("!H", kind) + vector(2, data)


def sni(*names: bytes, kind: int = 0) -> bytes:
    return extension(0, vector(2, b"".join(bytes([kind]) + vector(2, name) for name in names)))


def alpn(*protocols: bytes) -> bytes:
    return extension(16, vector(2, b"".join(vector(1, one) for one in protocols)))


def message(extensions: bytes | None, *, session: bytes = b"", suites: bytes = b"\x13\x01") -> bytes:
    body = b"\x03\x03" + bytes(32) + vector(1, session) + vector(2, suites) + vector(1, b"\0")
    if extensions is not None:
        body += vector(2, extensions)
    return b"\x01" + vector(3, body)


def records(data: bytes, size: int = 16384) -> bytes:
    cut = [data[index : index + size] for index in range(0, len(data), size)]
    return b"".join(b"\x16\x03\x01" + vector(2, part) for part in cut)


GOOD = sni(b"Good.Test") + alpn(b"h2", b"http/1.1")


def test_a_hello_of_openssl_is_read():
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2", "http/1.1"])
    client = context.wrap_bio(incoming, outgoing, server_hostname="api.good.test")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    raw = outgoing.read()
    assert Hello("api.good.test", (b"h2", b"http/1.1"), False, len(raw)) == read_hello(raw)


@pytest.mark.parametrize("size", [1, 4, 5, 37, 511, 16384])
def test_record_boundaries_change_nothing(size):
    raw = records(message(GOOD), size)
    assert Hello("good.test", (b"h2", b"http/1.1"), False, len(raw)) == read_hello(raw)


def test_a_hello_without_a_name_is_told_apart():
    raw = records(message(alpn(b"h2")))
    assert NoSni((b"h2",), len(raw)) == read_hello(raw)
    assert isinstance(read_hello(records(message(None))), NoSni)


def test_the_outer_type_of_ech_is_reported_and_the_inner_refused():
    assert read_hello(records(message(GOOD + extension(0xFE0D, b"\0" + bytes(40))))).ech is True
    for content in (b"\x01", b"", b"\x02x"):
        assert isinstance(read_hello(records(message(GOOD + extension(0xFE0D, content)))), Refused)


def test_a_large_hello_with_post_quantum_shares_is_read_and_a_huge_one_is_not():
    assert isinstance(read_hello(records(message(GOOD + extension(51, bytes(20_000))))), Hello)
    assert isinstance(read_hello(records(message(GOOD + extension(51, bytes(65_450))))), Refused)
    assert isinstance(read_hello(b"\x16\x03\x01\x00\x04\x01\xff\xff\xff"), Refused)


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1", b"SSH-2.0", b"\x80\x2e\x01", b"\x15\x03\x03", b"\0", b"\r\n"])
def test_other_protocols_are_not_tls(first):
    assert isinstance(read_hello(first), NotTls)


REFUSED = {
    "two-names": message(sni(b"good.test", b"evil.test")),
    "two-extensions": message(sni(b"good.test") + sni(b"good.test")),
    "no-name": message(extension(0, vector(2, b""))),
    "empty-name": message(sni(b"")),
    "other-type": message(sni(b"good.test", kind=1)),
    "nul": message(sni(b"evil.test\0.good.test")),
    "newline": message(sni(b"good.test\n")),
    "address": message(sni(b"93.184.216.34")),
    "ipv6": message(sni(b"[::1]")),
    "utf8": message(sni("gööd.test".encode())),
    "port": message(sni(b"good.test:443")),
    "dots": message(sni(b"good..test")),
    "esni": message(GOOD + extension(0xFFCE, b"x")),
    "trailing-list": message(extension(0, vector(2, b"\0" + vector(2, b"good.test")) + b"x")),
    "trailing-body": b"\x01" + vector(3, message(GOOD)[4:] + b"x"),
    "session": message(GOOD, session=bytes(33)),
    "no-suites": message(GOOD, suites=b""),
    "empty-alpn": message(sni(b"good.test") + extension(16, vector(2, b""))),
    "server-hello": b"\x02" + message(GOOD)[1:],
    "second-message": message(GOOD) + b"\x01\0\0\0",
}


@pytest.mark.parametrize("raw", REFUSED.values(), ids=REFUSED.keys())
def test_an_unclear_hello_is_refused(raw):
    assert isinstance(read_hello(records(raw)), Refused)


@pytest.mark.parametrize(
    "between", [b"\x16\x03\x01\0\0", b"\x15\x03\x03\0\x02\x01\0", b"\x14\x03\x03\0\x01\x01", b"GET / "]
)
def test_nothing_may_come_between_the_records_of_a_hello(between):
    raw = records(message(GOOD), 20)
    assert isinstance(read_hello(raw[:25] + between + raw[25:]), Refused)


def prefixes_agree(read, data: bytes) -> None:
    """Once a prefix has a verdict, every longer one has the same; and nothing raises."""
    whole = read(data)
    decided = None
    for end in range(len(data) + 1):
        verdict = read(data[:end])
        if decided is not None:
            assert decided == verdict
        elif not isinstance(verdict, NeedMore):
            decided = verdict
        else:
            assert verdict.total > end
    assert (decided is None and isinstance(whole, NeedMore)) or decided == whole


@given(st.binary(max_size=300), st.integers(0, 400), st.integers(1, 200))
@settings(max_examples=150)
def test_a_damaged_hello_has_one_verdict_for_any_segmentation(noise, position, size):
    raw = records(message(GOOD + extension(51, bytes(30))), size)
    position %= len(raw)
    prefixes_agree(read_hello, raw[:position] + noise + raw[position + len(noise) :])


@given(st.binary(max_size=200))
def test_random_bytes_never_raise(data):
    prefixes_agree(read_hello, b"\x16\x03\x01" + data)
    prefixes_agree(read_head, data)


HEAD = b"GET /a?b=c HTTP/1.1\r\nHost: Good.Test:8080\r\nX-Y: z\r\n\r\n"


def test_a_head_is_read():
    expected = RequestHead(
        b"GET", b"/a?b=c", 1, ((b"Host", b"Good.Test:8080"), (b"X-Y", b"z")), "good.test", 8080, len(HEAD)
    )
    assert expected == read_head(HEAD)
    assert expected == read_head(HEAD + b"\n\r\0 whatever follows")


@given(st.binary(max_size=40), st.integers(0, len(HEAD)), st.integers(0, 20))
@settings(max_examples=300)
def test_a_damaged_head_has_one_verdict_for_any_segmentation(noise, position, removed):
    prefixes_agree(read_head, HEAD[:position] + noise + HEAD[position + removed :])


@given(
    st.lists(
        st.sampled_from([b"\r", b"\n", b"\r\n", b":", b" ", b"\t", b"Host: good.test", b"GET / HTTP/1.1", b"a", b"\0"])
    )
)
@settings(max_examples=300)
def test_a_head_of_delimiters_has_one_verdict(parts):
    prefixes_agree(read_head, b"".join(parts))


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\nHost: a.test\r\nHost: a.test\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost:\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a.test, b.test\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: u@a.test\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a.test:0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a.test:065\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a.test:65536\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a.test:+80\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a.test:\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a%2etest\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.1\r\n\r\n",
        b"GET http://b.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n",
        b"GET http://u@a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n",
        b"GET  / HTTP/1.1\r\nHost: a.test\r\n\r\n",
        b"GET / x HTTP/1.1\r\nHost: a.test\r\n\r\n",
        b"GET\t/ HTTP/1.1\r\nHost: a.test\r\n\r\n",
        b"GET / http/1.1\r\nHost: a.test\r\n\r\n",
        b"GET / HTTP/1.1\r\n Host: a.test\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a.test\r\nX\0: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a.test\nX: y\r\n\r\n",
        b" GET / HTTP/1.1\r\nHost: a.test\r\n\r\n",
    ],
)
def test_an_unclear_head_is_refused(raw):
    assert isinstance(read_head(raw), Refused)


def test_limits_are_the_documented_ones():
    line = b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: a.test\r\n\r\n"
    assert 414 == read_head(line).status
    assert 431 == read_head(b"GET / HTTP/1.1\r\nHost: a.test\r\nX: " + b"a" * MAX_HEAD).status
    assert 431 == read_head(b"GET / HTTP/1.1\r\nHost: a.test\r\n" + b"X: a\r\n" * 128 + b"\r\n").status
    assert MAX_HELLO == 65536
