"""Chunks of a signed upload are signed again: the examples of the S3 API Reference, and any split of the bytes."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.signing.aws_chunked import MAX_CHUNK, ChunkSigner
from gateway.signing.sigv4 import (
    AwsKeys,
    Signature,
    SigningRefused,
    canonical_headers,
    canonical_path,
    canonical_request,
    signature,
)
from policy.aws_hosts import AwsScope

KEYS = AwsKeys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
TIME = "20130524T000000Z"
HOLLOW = b"0" * 64


def seed(payload: str, *more: tuple[bytes, bytes]) -> Signature:
    """Sign the head of the documented example."""
    headers = (
        (b"Host", b"s3.amazonaws.com"),
        (b"x-amz-date", TIME.encode()),
        (b"x-amz-storage-class", b"REDUCED_REDUNDANCY"),
        (b"Content-Encoding", b"aws-chunked"),
        (b"x-amz-content-sha256", payload.encode()),
        (b"x-amz-decoded-content-length", b"66560"),
        *more,
    )
    covered, names = canonical_headers(headers, frozenset(name.lower() for name, _ in headers))
    path = canonical_path("/examplebucket/chunkObject.txt", s3=True)
    return signature(
        KEYS, AwsScope("us-east-1", "s3"), TIME, canonical_request("PUT", path, "", covered, names, payload)
    )


def upload(*chunks: bytes, end: bytes = b"") -> bytes:
    """Return a body with hollow signatures."""
    parts = [b"%x;chunk-signature=%s\r\n%s\r\n" % (len(one), HOLLOW, one) for one in chunks]
    return b"".join(parts) + b"0;chunk-signature=" + HOLLOW + b"\r\n" + end + b"\r\n"


TRAILERS = b"x-amz-checksum-crc32c:sOO8/Q==\r\nx-amz-trailer-signature:" + HOLLOW + b"\r\n"
OF_MINIO = TRAILERS.replace(b"==\r\n", b"==\n\r\n")
EXAMPLE = (b"a" * 65536, b"a" * 1024)
PLAIN = seed("STREAMING-AWS4-HMAC-SHA256-PAYLOAD", (b"Content-Length", b"66824"))
TRAILED = seed("STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER", (b"x-amz-trailer", b"x-amz-checksum-crc32c"))


def test_the_signatures_are_those_of_the_documented_example() -> None:
    """The example of the S3 API Reference for chunked uploads."""
    signer = ChunkSigner(PLAIN, 66560, trailers=False)

    out = signer.feed(body := upload(*EXAMPLE))

    assert PLAIN.text == "4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9"
    assert re.findall(rb"chunk-signature=([0-9a-f]{64})", out) == [
        b"ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648",
        b"0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497",
        b"b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9",
    ]
    assert signer.complete and len(out) == len(body)


@pytest.mark.parametrize("end", [TRAILERS, OF_MINIO], ids=["as documented", "as the Go client of MinIO writes it"])
def test_trailers_are_signed_as_documented(end: bytes) -> None:
    """The example of the S3 API Reference with a trailing checksum."""
    signer = ChunkSigner(TRAILED, 66560, trailers=True)

    out = signer.feed(body := upload(*EXAMPLE, end=end))

    assert TRAILED.text == "106e2a8a18243abcf37539882f36619c00e2dfc72633413f02d3b74544bfeb8e"
    assert re.findall(rb"signature[=:]([0-9a-f]{64})", out) == [
        b"b474d8862b1487a5145d686f57f013e54db672cee1c953b3010fb58501ef5aa2",
        b"1c1344b170168f8e65b41376b44b20fe354e373826ccbbe2c1d40a8cae51e5c7",
        b"2ca2aba2005185cf7159c6277faf83795951dd77a3a99e6e65d5c9f85863f992",
        b"d81f82fc3505edab99d459891051a732e8730629a2e4a59689829ca17fe2e435",
    ]
    assert signer.complete and len(out) == len(body)


@given(chunks=st.lists(st.binary(min_size=1, max_size=300), max_size=5), data=st.data(), trailers=st.booleans())
def test_the_split_of_the_bytes_changes_nothing(chunks: list[bytes], data: st.DataObject, trailers: bool) -> None:
    """The output is the same for any pieces, and differs from the input in the signatures only."""
    body = upload(*chunks, end=TRAILERS if trailers else b"")
    length = sum(map(len, chunks))
    whole = ChunkSigner(PLAIN, length, trailers=trailers).feed(body)
    signer, out = ChunkSigner(PLAIN, length, trailers=trailers), b""
    at = 0
    while at < len(body):
        size = data.draw(st.integers(1, max(1, len(body) - at)))
        out += signer.feed(body[at : at + size])
        at += size

    assert out == whole and signer.complete
    assert re.sub(rb"(signature[=:])[0-9a-f]{64}", rb"\g<1>" + HOLLOW, out) == body


@given(body=st.binary(max_size=200), mutation=st.integers(0, 10_000), octet=st.integers(0, 255))
def test_what_passes_has_the_announced_form(body: bytes, mutation: int, octet: int) -> None:
    """A changed byte of the frame is refused, or passes with the same length and the same data."""
    good = bytearray(upload(body) if body else upload())
    good[mutation % len(good)] = octet
    signer = ChunkSigner(PLAIN, len(body), trailers=False)
    try:
        out = signer.feed(bytes(good))
    except SigningRefused:
        return

    assert len(out) <= len(good)
    if signer.complete:
        assert len(out) == len(good)


@pytest.mark.parametrize(
    ("body", "length", "trailers"),
    [
        (upload(b"abc"), 2, False),
        (upload(b"abc"), 4, False),
        (upload(b"abc") + b"x", 3, False),
        (b"3\r\nabc\r\n0\r\n\r\n", 3, False),
        (b"3;chunk-signature=" + b"0" * 63 + b"\r\nabc\r\n", 3, False),
        (b"3;chunk-signature=" + HOLLOW + b"\nabc\r\n", 3, False),
        (b"3;chunk-signature=" + HOLLOW + b"\r\nabcd\r\n", 3, False),
        (b"-3;chunk-signature=" + HOLLOW + b"\r\n", 3, False),
        (b"4;chunk-signature=" + HOLLOW + b"\r\nabcd\r\n", 3, False),
        (b"%x;chunk-signature=%s\r\n" % (MAX_CHUNK + 1, HOLLOW), MAX_CHUNK + 1, False),
        (b"0" * 200, 3, False),
        (upload(b"abc"), 3, True),
        (upload(b"abc", end=b"x-amz-trailer-signature:" + HOLLOW + b"\r\n"), 3, True),
        (upload(b"abc", end=b"X Y\r\n" + TRAILERS), 3, True),
        (upload(b"abc", end=b"a:b\r\n" * 2000), 3, True),
        (upload(b"abc", end=b"a:" + b"b" * 300 + b"\r\n"), 3, True),
        (upload(b"abc", end=TRAILERS + b"more:x\r\n"), 3, True),
    ],
)
def test_another_form_is_refused(body: bytes, length: int, trailers: bool) -> None:
    """Length, line ends, sizes, trailers: nothing but the documented form passes."""
    with pytest.raises(SigningRefused):
        ChunkSigner(PLAIN, length, trailers=trailers).feed(body)


def test_an_incomplete_upload_is_not_complete() -> None:
    """The end of the request is then an error."""
    signer = ChunkSigner(PLAIN, 3, trailers=False)
    signer.feed(upload(b"abc")[:-1])

    assert not signer.complete


def test_no_more_than_a_chunk_is_held() -> None:
    """Whatever the length of the upload: what is held is a part of one chunk."""
    signer, chunk = ChunkSigner(PLAIN, 16 * MAX_CHUNK, trailers=False), b"\0" * MAX_CHUNK
    part = b"%x;chunk-signature=%s\r\n%s\r\n" % (len(chunk), HOLLOW, chunk)
    held, out = [], 0
    for _ in range(16):
        for begin in range(0, len(part), 65536):
            out += len(signer.feed(part[begin : begin + 65536]))
            held.append(len(signer._data))

    assert max(held) <= MAX_CHUNK + 2
    assert out == 16 * len(part)
