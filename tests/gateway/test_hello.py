"""The first bytes of a flow have one meaning or none, however they are split."""

import ssl
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tls.hello import (
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
    split_absolute,
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


def test_a_hello_without_a_name_is_a_case_of_its_own():
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
    """Check that every longer prefix has the verdict of the first decided one, and that nothing raises."""
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


def malformed(reason):
    return Refused(f"malformed ClientHello: {reason}")


OVER = malformed("a field extends beyond the end of its structure")
BEHIND = malformed("bytes after the end of a structure")
NOT_TLS = Refused("a record inside the ClientHello is not a TLS handshake record")
WHOLE = records(message(GOOD))
HELLOS = {
    "two names": (records(REFUSED["two-names"]), Refused("more than one server name")),
    "two extensions": (records(REFUSED["two-extensions"]), Refused("duplicate extension")),
    "a name of another type": (records(REFUSED["other-type"]), Refused("server name of unknown type")),
    "a name that is none": (records(REFUSED["nul"]), Refused("server name is not a clean host name")),
    "an empty list of names": (records(REFUSED["no-name"]), OVER),
    "an encrypted name": (records(REFUSED["esni"]), Refused("encrypted server name (ESNI)")),
    "an inner ECH": (
        records(message(GOOD + extension(0xFE0D, b"\1"))),
        Refused("encrypted ClientHello of the inner type"),
    ),
    "an empty ECH": (
        records(message(GOOD + extension(0xFE0D, b""))),
        Refused("encrypted ClientHello of the inner type"),
    ),
    "bytes behind the list of names": (records(REFUSED["trailing-list"]), BEHIND),
    "bytes behind the extensions": (records(REFUSED["trailing-body"]), BEHIND),
    "a session of 33 bytes": (records(REFUSED["session"]), Refused("session id over the limit")),
    "no suites": (records(REFUSED["no-suites"]), Refused("malformed cipher suite list")),
    "half a suite": (records(message(GOOD, suites=b"\x13\x01\x13")), Refused("malformed cipher suite list")),
    "no compression": (
        records(b"\x01" + vector(3, b"\x03\x03" + bytes(33) + vector(2, b"\x13\x01") + b"\0")),
        Refused("no compression method"),
    ),
    "another version of the message": (
        records(b"\x01" + vector(3, b"\x02\x03" + message(GOOD)[6:])),
        Refused("unsupported TLS version"),
    ),
    "a short message": (records(b"\x01" + vector(3, b"\x03\x03" + bytes(31))), OVER),
    "an empty list of protocols": (records(REFUSED["empty-alpn"]), malformed("empty protocol list")),
    "an empty protocol": (records(message(GOOD[:18] + alpn(b"h2", b""))), malformed("empty protocol name")),
    "another message": (records(REFUSED["server-hello"]), Refused("first TLS message is not a ClientHello")),
    "a second message": (records(REFUSED["second-message"]), Refused("bytes after the ClientHello in its record")),
    "another major version of the record": (b"\x16\x02\x01" + WHOLE[3:], NOT_TLS),
    "another minor version of the record": (b"\x16\x03\x05" + WHOLE[3:], NOT_TLS),
    "an alert as the second record": (records(message(GOOD), 20)[:25] + b"\x15\x03\x03\0\2\1\0", NOT_TLS),
    "an empty record": (b"\x16\x03\x01\0\0", Refused("TLS record with an invalid length")),
    "a record of 16385 bytes": (b"\x16\x03\x01\x40\x01", Refused("TLS record with an invalid length")),
    "a message that says it is too long": (b"\x16\x03\x01\0\4\1\1\0\0", Refused("ClientHello over the limit")),
    "nothing": (b"", NeedMore(1)),
    "another protocol": (b"\x17", NotTls()),
    "one byte": (b"\x16", NeedMore(5)),
    "a part of the record": (WHOLE[:-1], NeedMore(len(WHOLE))),
    "a part of the second record": (records(message(GOOD), 20)[:27], NeedMore(30)),
    "a minor version of 4": (b"\x16\x03\x04" + WHOLE[3:], Hello("good.test", (b"h2", b"http/1.1"), False, len(WHOLE))),
    "an outer ECH": (
        records(message(sni(b"good.test") + extension(0xFE0D, b"\0"))),
        Hello("good.test", (), True, len(records(message(sni(b"good.test") + extension(0xFE0D, b"\0"))))),
    ),
    "a session of 32 bytes": (
        records(message(GOOD, session=bytes(32))),
        Hello("good.test", (b"h2", b"http/1.1"), False, len(WHOLE) + 32),
    ),
    "no extensions": (records(message(None)), NoSni((), len(records(message(None))))),
    "no name": (records(message(alpn(b"h2"))), NoSni((b"h2",), len(records(message(alpn(b"h2")))))),
}


@pytest.mark.parametrize("case", HELLOS)
def test_each_hello_has_its_verdict(case):
    data, expected = HELLOS[case]
    assert expected == read_hello(data)


def filled(size, cut=16384):
    """Return a ClientHello whose records have `size` bytes in all."""
    empty = len(records(message(GOOD + extension(51, b"")), cut))
    content = size - empty
    while len(records(message(GOOD + extension(51, bytes(content))), cut)) > size:
        content -= 1
    return records(message(GOOD + extension(51, bytes(content))), cut)


def test_the_longest_hello_has_64_kib():
    longest, longer = filled(65536), filled(65537)
    assert (65536, 65537) == (len(longest), len(longer))
    assert isinstance(read_hello(longest), Hello)
    assert Refused("ClientHello over the limit") == read_hello(longer)
    said = b"\x16\x03\x01\0\4\1"
    assert NeedMore(14) == read_hello(said + (65536 - 4).to_bytes(3, "big"))
    assert Refused("ClientHello over the limit") == read_hello(said + (65536 - 3).to_bytes(3, "big"))


def test_a_hello_has_at_most_1024_records():
    data = message(GOOD + extension(51, bytes(1024 - len(message(GOOD + extension(51, b""))))))
    assert 1024 == len(data)
    assert isinstance(read_hello(records(data, 1)), Hello)
    longer = message(GOOD + extension(51, bytes(1025 - len(message(GOOD + extension(51, b""))))))
    assert Refused("ClientHello in too many records") == read_hello(records(longer, 1))


def head(*lines, line=b"GET / HTTP/1.1", host=b"a.test"):
    return b"\r\n".join((line, *((b"Host: " + host,) if host is not None else ()), *lines, b"", b""))


HOSTS = Refused("a request must have exactly one Host header")
UNCLEAN = Refused("Host is not a clean host name")
LINE_END = Refused("a line does not end with CRLF")
HEADS = {
    "nothing": (b"", NeedMore(1)),
    "a part": (b"GET / HT", NeedMore(9)),
    "no method": (b"\r\n", Refused("request does not begin with a method")),
    "another protocol": (b"\x16", Refused("request does not begin with a method")),
    "a blank in front": (b" GET", Refused("request does not begin with a method")),
    "a target with a blank": (head(line=b"GET / x HTTP/1.1"), Refused("malformed request line")),
    "HTTP/1.2": (head(line=b"GET / HTTP/1.2"), Refused("malformed request line")),
    "a method of 65 characters": (head(line=b"G" * 65 + b" / HTTP/1.1"), Refused("malformed request line")),
    "a line without a colon": (head(b"X"), Refused("malformed header line")),
    "a name that is no token": (head(b"X : y"), Refused("malformed header line")),
    "a folded line": (head(b" x: y"), Refused("malformed header line")),
    "a control character": (head(b"X: a\0b"), Refused("control character in a header value")),
    "no Host": (head(host=None), HOSTS),
    "two Hosts": (head(b"host: a.test"), HOSTS),
    "userinfo": (head(host=b"u@a.test"), UNCLEAN),
    "port 0": (head(host=b"a.test:0"), UNCLEAN),
    "port 65536": (head(host=b"a.test:65536"), UNCLEAN),
    "two ports": (head(host=b"a.test:1:2"), UNCLEAN),
    "a lone line feed": (head(b"X: a\nY: b"), LINE_END),
    "a lone carriage return": (head(b"X: a\rY: b"), LINE_END),
    "a line feed in a head that goes on": (b"GET / HTTP/1.1\nHost", LINE_END),
    "a carriage return that may go on": (b"GET / HTTP/1.1\r", NeedMore(16)),
    "a URL of another host": (
        head(line=b"GET http://B.test:81/ HTTP/1.1"),
        Refused("target and Host name different hosts", asked_host="b.test:81"),
    ),
    "a URL of another host without a port": (
        head(line=b"GET http://b.test HTTP/1.1"),
        Refused("target and Host name different hosts", asked_host="b.test"),
    ),
    "a URL with userinfo": (
        head(line=b"GET http://u:p@a.test/ HTTP/1.1"),
        Refused("target and Host name different hosts"),
    ),
    "a URL of the host": (
        head(line=b"GET http://a.test/ HTTP/1.0"),
        RequestHead(b"GET", b"http://a.test/", 0, ((b"Host", b"a.test"),), "a.test", None, 45),
    ),
    "port 65535": (
        head(host=b"a.test:65535"),
        RequestHead(b"GET", b"/", 1, ((b"Host", b"a.test:65535"),), "a.test", 65535, 38),
    ),
    "values and their blanks": (
        head(b"X: \t XaX \t", b"Y:", b"Z:a:b"),
        RequestHead(
            b"GET", b"/", 1, ((b"Host", b"a.test"), (b"X", b"XaX"), (b"Y", b""), (b"Z", b"a:b")), "a.test", None, 55
        ),
    ),
}


@pytest.mark.parametrize("case", HEADS)
def test_each_head_has_its_verdict(case):
    data, expected = HEADS[case]
    assert expected == read_head(data)


def test_a_head_ends_at_its_first_blank_line():
    first = head()
    assert read_head(first) == read_head(first + head(b"X: y"))


def test_the_longest_head_has_64_kib_and_its_first_line_16():
    rest = len(head(b"X: "))
    assert 65536 == read_head(head(b"X: " + b"a" * (65536 - rest))).length
    over = Refused("request head over the limit", 431)
    assert over == read_head(head(b"X: " + b"a" * (65537 - rest)))
    assert NeedMore(65536) == read_head(head(b"X: " + b"a" * 65536)[:65535])
    assert over == read_head(head(b"X: " + b"a" * 65536)[:65536])
    line = b"GET /" + b"a" * (16384 - 14) + b" HTTP/1.1"
    assert 16384 == len(line)
    assert isinstance(read_head(head(line=line)), RequestHead)
    assert NeedMore(16385) == read_head(line)
    over = Refused("request line over the limit", 414)
    assert over == read_head(b"A" + line) == read_head(head(line=b"A" + line))
    assert LINE_END == read_head(line + b"\n")
    assert over == read_head(b"A" + line + b"\n"), "what comes first decides"
    assert LINE_END == read_head(head(b"X: a\nb", line=line))


def test_a_head_has_at_most_128_headers():
    assert 128 == len(read_head(head(*[b"X: a"] * 127)).headers)
    assert Refused("too many headers", 431) == read_head(head(*[b"X: a"] * 128))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (b"http://a.test", (b"http", b"a.test", b"/")),
        (b"https://a.test:1/x?y", (b"https", b"a.test:1", b"/x?y")),
        (b"http://a.test?x/y?", (b"http", b"a.test", b"/?x/y?")),
        (b"http:///x", (b"http", b"", b"/x")),
        (b"http://a.test#x", None),
        (b"HTTP://a.test/", None),
        (b"ftp://a.test/", None),
        (b"/x", None),
    ],
)
def test_an_absolute_target_is_taken_apart(target, expected):
    assert expected == split_absolute(target)
