"""TLS in memory, against Python's own TLS: handshake, records of any size, close, and bytes that are no TLS."""

import contextlib
import ssl
from pathlib import Path

import pytest

from gateway.engines.port import Leaf
from gateway.tls.contexts import ClientContexts, UpstreamContext
from gateway.tls.memory import MemoryTls, TlsFailed
from tests.gateway.mitm.conftest import Authority, server_context


class Pair:
    """A `MemoryTls` as server or client, and a peer by the module `ssl`."""

    def __init__(self, directory: Path, *, client: bool, host: str = "good.test") -> None:
        root = Authority.root("root")
        leaf = root.leaf("good.test")
        self.there_in, self.there_out = ssl.MemoryBIO(), ssl.MemoryBIO()
        if client:
            self.here = MemoryTls(UpstreamContext(root.pem).connect(host, [b"http/1.1"]))
            context = server_context(leaf, directory)
            self.there = context.wrap_bio(self.there_in, self.there_out, server_side=True)
        else:
            presented = Leaf(leaf.pem.encode(), leaf.key_pem.encode())
            self.here = MemoryTls(ClientContexts().accept(presented, http2=False))
            context = ssl.create_default_context(cadata=root.pem)
            context.set_alpn_protocols(["http/1.1"])
            self.there = context.wrap_bio(self.there_in, self.there_out, server_hostname=host)
        self.plain = b""

    def shake(self, part: int = 100_000) -> None:
        """Finish the handshake; each piece of it has at most `part` bytes."""
        self.here.handshake()
        for _ in range(10):
            self.exchange(part)

    def exchange(self, part: int = 100_000) -> None:
        with contextlib.suppress(ssl.SSLWantReadError):
            self.there.do_handshake()
        sent = self.there_out.read()
        for start in range(0, len(sent), part):
            self.plain += self.here.receive(sent[start : start + part])
        self.there_in.write(self.here.to_send())


@pytest.fixture(params=[True, False], ids=["client", "server"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    return Pair(tmp_path, client=request.param)


@pytest.mark.parametrize("part", [1, 7, 100_000])
def test_bytes_pass_both_ways_in_pieces_of_any_size(pair: Pair, part: int) -> None:
    pair.shake(part)
    assert pair.here.secure
    for data in (b"x", b"y" * 16384, b"z" * 200_000):
        pair.here.write(data)
        pair.there_in.write(pair.here.to_send())
        read = b""
        while len(read) < len(data):
            read += pair.there.read(65536)
        assert data == read
        pair.there.write(data)
        pair.plain = b""
        pair.exchange(part)
        assert data == pair.plain
    assert b"" == pair.here.to_send()


def test_the_close_alert_ends_a_direction_after_the_bytes_before_it(pair: Pair) -> None:
    pair.shake()
    pair.there.write(b"last")
    with pytest.raises(ssl.SSLWantReadError):
        pair.there.unwrap()
    assert not pair.here.closed
    assert b"last" == pair.here.receive(pair.there_out.read())
    assert pair.here.closed
    pair.here.end()
    pair.there_in.write(pair.here.to_send())
    pair.there.unwrap()  # it is the peer's alert, and no error


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"x" * 100, bytes(100)])
def test_bytes_that_are_no_tls_fail_once_and_for_all(pair: Pair, data: bytes) -> None:
    with pytest.raises(TlsFailed):
        pair.here.receive(data)
    for step in (pair.here.read, pair.here.handshake, lambda: pair.here.write(b"x"), lambda: pair.here.receive(b"x")):
        with pytest.raises(TlsFailed):
            step()
    assert not pair.here.secure


def test_a_record_that_was_changed_fails(pair: Pair) -> None:
    pair.shake()
    pair.there.write(b"a secret")
    sent = bytearray(pair.there_out.read())
    sent[-1] ^= 1
    with pytest.raises(TlsFailed):
        pair.here.receive(bytes(sent))


def test_a_certificate_of_another_host_fails_and_the_server_gets_an_alert(tmp_path: Path) -> None:
    pair = Pair(tmp_path, client=True, host="other.test")
    with pytest.raises(TlsFailed):
        pair.shake()
    assert not pair.here.secure
    pair.there_in.write(pair.here.to_send())
    with pytest.raises(ssl.SSLError, match=r"(?i)alert"):
        pair.there.do_handshake()


def test_nothing_is_written_before_the_handshake(pair: Pair) -> None:
    with pytest.raises(TlsFailed):
        pair.here.write(b"early")
    assert b"early" not in pair.here.to_send()


def test_an_error_of_another_connection_is_not_taken_for_an_own_one(pair: Pair, tmp_path: Path) -> None:
    pair.shake()
    other = Pair(tmp_path, client=False)
    with pytest.raises(TlsFailed):
        other.here.receive(b"no TLS at all" * 10)
    pair.there.write(b"fine")
    assert b"fine" == pair.here.receive(pair.there_out.read())
