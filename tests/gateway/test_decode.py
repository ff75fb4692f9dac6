"""An encoded body is decoded completely and within its limit, or not at all."""

import gzip
import zlib
from collections.abc import Callable

import brotli  # type: ignore[import-untyped]
import pytest
import zstandard

from gateway.scrub.decode import decode

TEXT = b"".join(b"%d: correct-horse-battery\n" % number for number in range(200))


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


CODINGS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("x-gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "deflate without a header": ("deflate", raw_deflate),
    "br": ("br", brotli.compress),
    "zstd": ("zstd", zstandard.ZstdCompressor().compress),
}
coded = pytest.mark.parametrize("name", CODINGS)


@coded
def test_a_body_is_decoded_within_its_limit(name: str) -> None:
    coding, encode = CODINGS[name]
    body = encode(TEXT)
    assert len(body) > 2 * 64  # more than one piece for decoders that are fed in pieces
    assert TEXT == decode([coding], body, len(TEXT))
    assert decode([coding], body, len(TEXT) - 1) is None
    assert b"" == decode([coding], encode(b""), 0)
    assert TEXT == decode(["gzip", coding], encode(gzip.compress(TEXT)), len(TEXT))


@coded
def test_a_body_that_is_cut_or_goes_on_is_not_decoded(name: str) -> None:
    coding, encode = CODINGS[name]
    body = encode(TEXT)
    assert decode([coding], body[:-1], 2 * len(TEXT)) is None
    assert decode([coding], b"", len(TEXT)) is None
    for behind in (b"x", b"x" * 64, body):
        assert decode([coding], body + behind, 2 * len(TEXT)) is None


@coded
def test_a_body_that_is_another_one_is_not_decoded(name: str) -> None:
    assert decode([CODINGS[name][0]], b"\xff" * 100, len(TEXT)) is None


def test_a_small_body_that_becomes_large_is_not_decoded() -> None:
    for coding, encode in CODINGS.values():
        assert decode([coding], encode(bytes(1 << 20)), 1 << 12) is None


def test_two_codings_are_undone_in_their_order_and_no_more() -> None:
    once = gzip.compress(TEXT)
    assert TEXT == decode(["gzip", "br"], brotli.compress(once), len(TEXT))
    assert decode(["br", "gzip"], brotli.compress(once), len(TEXT)) is None
    assert decode(["gzip"] * 3, gzip.compress(gzip.compress(once)), len(TEXT)) is None
    assert TEXT == decode(["identity", "identity"], TEXT, len(TEXT)) == decode([], TEXT, 0)
    assert decode(["identity"], TEXT, len(TEXT) - 1) is None


@pytest.mark.parametrize("coding", ["compress", "", "GZIP", "dcb"])
def test_an_unknown_coding_is_not_decoded(coding: str) -> None:
    assert decode([coding], TEXT, len(TEXT)) is None
