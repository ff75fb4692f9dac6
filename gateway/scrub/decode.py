"""Decodes a response's Content-Encoding, up to a limit, so that the body can be scrubbed.

- The result is never larger than the limit.
- The result is None for an unknown coding, and for malformed, incomplete or trailing bytes. The caller then withholds
  the response.
"""

import zlib
from collections.abc import Callable, Sequence

import brotli  # type: ignore[import-untyped]
import zstandard

MAX_LAYERS = 2


def decode(encodings: Sequence[str], data: bytes, limit: int) -> bytes | None:
    """Decode `encodings` (in the order in which they were applied). None if this fails within `limit` bytes."""
    if len(encodings) > MAX_LAYERS:
        return None
    for encoding in reversed(encodings):
        decoder = _DECODERS.get(encoding)
        if decoder is None:
            return None
        try:
            decoded = decoder(data, limit)
        except (zlib.error, zstandard.ZstdError, brotli.error, EOFError, MemoryError):
            return None
        if decoded is None or len(decoded) > limit:
            return None
        data = decoded
    return data


def _inflate(data: bytes, limit: int, window: int) -> bytes | None:
    inflater = zlib.decompressobj(wbits=window)
    out = inflater.decompress(data, limit + 1)
    return out if inflater.eof and not inflater.unused_data else None


def _gzip(data: bytes, limit: int) -> bytes | None:
    return _inflate(data, limit, 16 + zlib.MAX_WBITS)


def _deflate(data: bytes, limit: int) -> bytes | None:
    try:
        return _inflate(data, limit, zlib.MAX_WBITS)
    except zlib.error:
        return _inflate(data, limit, -zlib.MAX_WBITS)


def _brotli(data: bytes, limit: int) -> bytes | None:
    decompressor = brotli.Decompressor()
    out = bytes(decompressor.process(data, output_buffer_limit=limit + 1))
    while not decompressor.is_finished() and len(out) <= limit:
        part = decompressor.process(b"", output_buffer_limit=limit + 1 - len(out))
        if not part:
            break
        out += part
    return out if decompressor.is_finished() else None


def _zstd(data: bytes, limit: int) -> bytes | None:
    # One call has no limit of its output, so the input is passed in small pieces: 64 bytes give at most 2 MiB.
    inflater = zstandard.ZstdDecompressor(max_window_size=8 * 1024 * 1024).decompressobj()
    out = bytearray()
    for start in range(0, len(data), 64):
        if inflater.eof:
            return None
        out += inflater.decompress(data[start : start + 64])
        if len(out) > limit:
            return None
    return bytes(out) if inflater.eof and not inflater.unused_data else None


def _identity(data: bytes, limit: int) -> bytes | None:
    return data


_DECODERS: dict[str, Callable[[bytes, int], bytes | None]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,
    "deflate": _deflate,
    "br": _brotli,
    "zstd": _zstd,
    "identity": _identity,
}
