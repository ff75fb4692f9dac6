"""Signs the chunks of an upload in the coding `aws-chunked` again, as they pass. Sans-IO, pure.

    SIZE;chunk-signature=SIGNATURE CRLF data CRLF ... 0;chunk-signature=SIGNATURE CRLF [trailers] CRLF

- Each signature covers the one before it; the first covers the signature of the head. The client's signatures are
  replaced by others of the same length, so the length of the body stays.
- The signature of a chunk is in front of its data. So one chunk is held, up to `MAX_CHUNK`; a larger one is refused.
- The body has exactly this form and the announced number of bytes, up to its end. Anything else is refused before it is
  sent: the server would refuse it, too.

Source: "Signature Calculations for the Authorization Header: Transferring Payload in Multiple Chunks" and its form with
trailing headers, S3 API Reference.
"""

import hashlib
import re
from enum import Enum, auto

from gateway.signing.sigv4 import EMPTY_SHA256, Signature, SigningRefused, mac

MAX_CHUNK = 1024 * 1024
"""The largest chunk, in bytes of data. SDKs use 64 KiB or 128 KiB."""
_MAX_LINE = 128
_MAX_TRAILERS = 4096
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8});chunk-signature=[0-9a-f]{64}")
_TRAILER = re.compile(rb"([a-z0-9-]{1,128}):([\x21-\x7e]{1,256})")
_SIGNED_BY = re.compile(rb"x-amz-trailer-signature:[0-9a-f]{64}")


class _Next(Enum):
    CHUNK = auto()
    DATA = auto()
    TRAILER = auto()
    LAST_LINE = auto()
    NOTHING = auto()


class ChunkSigner:
    """One upload. `length` is the announced number of bytes of data. `trailers`: the body ends with signed trailers."""

    def __init__(self, seed: Signature, length: int, *, trailers: bool) -> None:
        self._signature = seed.text
        self._seed = seed
        self._left = length
        self._trailers = trailers
        self._next = _Next.CHUNK
        self._data = bytearray()
        self._size = 0
        self._size_text = b""
        self._signed_trailers = b""
        self._held_line = b""
        self._bare_end = False

    @property
    def complete(self) -> bool:
        """Whether the last byte of the body has passed."""
        return self._next is _Next.NOTHING

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the body; return those to send.

        Raises:
            SigningRefused: the body has another form. Nothing more of it may be sent.
        """
        self._data += data
        out = bytearray()
        while (part := self._step()) is not None:
            out += part
        return bytes(out)

    def _step(self) -> bytes | None:
        """Return the next part to send, None if more bytes are needed."""
        match self._next:
            case _Next.CHUNK:
                return self._chunk_line()
            case _Next.DATA:
                return self._chunk_data()
            case _Next.TRAILER:
                return self._trailer_line()
            case _Next.LAST_LINE:
                return self._last_line()
            case _Next.NOTHING if self._data:
                raise SigningRefused("the signed upload has bytes after its end")
        return None

    def _chunk_line(self) -> bytes | None:
        line = self._line(_MAX_LINE)
        if line is None:
            return None
        found = _CHUNK.fullmatch(line.removesuffix(b"\r\n"))
        if found is None or not line.endswith(b"\r\n"):
            raise SigningRefused("a chunk of the signed upload is malformed")
        self._size, self._size_text = int(found[1], 16), found[1]
        if self._size > MAX_CHUNK:
            raise SigningRefused(f"a chunk of the signed upload is over {MAX_CHUNK} bytes")
        if self._size > self._left:
            raise SigningRefused("the signed upload is longer than announced")
        if self._size:
            self._next = _Next.DATA
            return b""
        if self._left:
            raise SigningRefused("the signed upload is shorter than announced")
        self._next = _Next.TRAILER if self._trailers else _Next.LAST_LINE
        return self._header(b"")

    def _chunk_data(self) -> bytes | None:
        if len(self._data) < self._size + 2:
            return None
        data = bytes(self._data[: self._size])
        if self._data[self._size : self._size + 2] != b"\r\n":
            raise SigningRefused("a chunk of the signed upload is malformed")
        del self._data[: self._size + 2]
        self._left -= self._size
        self._next = _Next.CHUNK
        return self._header(data) + data + b"\r\n"

    def _header(self, data: bytes) -> bytes:
        text = f"{EMPTY_SHA256}\n{hashlib.sha256(data).hexdigest()}"
        return self._size_text + b";chunk-signature=" + self._sign("AWS4-HMAC-SHA256-PAYLOAD", text) + b"\r\n"

    def _trailer_line(self) -> bytes | None:
        line = self._line(_MAX_TRAILERS)
        if line is None:
            return None
        # The Go client of MinIO writes a trailer as `name:value LF CRLF`.
        if line == b"\r\n" and self._bare_end:
            self._bare_end = False
            return line
        self._bare_end = not line.endswith(b"\r\n")
        plain = line.rstrip(b"\r\n")
        if _SIGNED_BY.fullmatch(plain) is not None and not self._bare_end and self._signed_trailers:
            self._next = _Next.LAST_LINE
            text = hashlib.sha256(self._signed_trailers).hexdigest()
            return b"x-amz-trailer-signature:" + self._sign("AWS4-HMAC-SHA256-TRAILER", text) + b"\r\n"
        if _TRAILER.fullmatch(plain) is None or plain.startswith(b"x-amz-trailer-signature:"):
            raise SigningRefused("the trailers of the signed upload are malformed")
        self._signed_trailers += plain + b"\n"
        if len(self._signed_trailers) > _MAX_TRAILERS:
            raise SigningRefused("the trailers of the signed upload are too long")
        return line

    def _last_line(self) -> bytes | None:
        if len(self._data) < 2:
            return None
        if self._data[:2] != b"\r\n":
            raise SigningRefused("the end of the signed upload is malformed")
        del self._data[:2]
        self._next = _Next.NOTHING
        return b"\r\n"

    def _line(self, limit: int) -> bytes | None:
        """Take a line with its end; None if its end has not arrived."""
        end = self._data.find(b"\n", 0, limit)
        if end < 0:
            if len(self._data) >= limit:
                raise SigningRefused("a line of the signed upload is too long")
            return None
        line = bytes(self._data[: end + 1])
        del self._data[: end + 1]
        return line

    def _sign(self, algorithm: str, text: str) -> bytes:
        seed = self._seed
        self._signature = mac(seed.key, f"{algorithm}\n{seed.time}\n{seed.scope}\n{self._signature}\n{text}")
        return self._signature.encode("ascii")
