"""TLS in memory: encrypted bytes of the transport on one side, plain bytes on the other. No IO.

- It uses the BIOs of a pyOpenSSL connection with OpenSSL's own calls. pyOpenSSL raises an exception each time that no
  bytes are left, which costs more than the decryption of a small message.
- `read` ends the direction only at the peer's close alert. An end without one is the transport's end.
- An error is final: each later call raises again.
"""

from typing import Any

from OpenSSL import SSL

_PART = 64 * 1024
_NO_PROTOCOL = "alert no application protocol"
_lib: Any = SSL._lib  # type: ignore[attr-defined]
_ffi: Any = SSL._ffi  # type: ignore[attr-defined]
_buffer: Any = _ffi.new("char[]", _PART)
"""Bytes on their way out of OpenSSL, within one call. A worker has one thread that uses it."""


class TlsFailed(Exception):
    """TLS failed: a malformed record, a refused certificate, an alert."""


class MemoryTls:
    """One end of a TLS connection.

    Attributes:
        secure: the handshake is complete.
        closed: the peer has ended its direction with an alert.
        no_protocol: the handshake failed because the peer speaks none of the offered application protocols.
    """

    __slots__ = ("_connection", "_failed", "_from", "_into", "_ssl", "closed", "no_protocol", "secure")

    def __init__(self, connection: SSL.Connection) -> None:
        """Use `connection`, which has memory BIOs and has not begun its handshake."""
        internal: Any = connection
        self._connection = connection
        self._ssl, self._into, self._from = internal._ssl, internal._into_ssl, internal._from_ssl
        self._failed = False
        self.secure = False
        self.closed = False
        self.no_protocol = False

    def receive(self, data: bytes) -> bytes:
        """Take encrypted bytes; continue the handshake; return the plain bytes that they complete.

        Raises:
            TlsFailed: the connection must end. Bytes to send can be left.
        """
        self._check()
        view = _ffi.from_buffer(data)
        left = len(data)
        while left > 0:
            taken = _lib.BIO_write(self._into, view + (len(data) - left), left)
            if taken <= 0:
                self._fail()
            left -= taken
        if not self.secure:
            self.handshake()
        return self.read() if self.secure else b""

    def handshake(self) -> None:
        """Continue the handshake.

        Raises:
            TlsFailed: it failed.
        """
        self._check()
        try:
            self._connection.do_handshake()  # with the callbacks, whose exceptions pyOpenSSL raises
            self.secure = True
        except SSL.WantReadError:
            pass
        except (SSL.Error, ValueError) as error:
            self.no_protocol = _NO_PROTOCOL in str(error)
            self._fail()

    def read(self) -> bytes:
        """Return all plain bytes of the complete records.

        Raises:
            TlsFailed: a record is invalid.
        """
        self._check()
        parts: list[bytes] = []
        _lib.ERR_clear_error()
        while (count := _lib.SSL_read(self._ssl, _buffer, _PART)) > 0:
            parts.append(_ffi.buffer(_buffer, count)[:])
        reason = _lib.SSL_get_error(self._ssl, count)
        if reason == _lib.SSL_ERROR_ZERO_RETURN:
            self.closed = True
        elif reason != _lib.SSL_ERROR_WANT_READ:
            self._fail()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, data: bytes) -> None:
        """Encrypt all of `data`.

        Raises:
            TlsFailed: it cannot be sent.
        """
        self._check()
        view = _ffi.from_buffer(data)
        done, size = 0, len(data)
        while done < size:
            count = _lib.SSL_write(self._ssl, view + done, size - done)
            if count <= 0:
                self._fail()
            done += count

    def end(self) -> None:
        """Add the close alert, if the connection can still send one."""
        if self.secure and not self._failed:
            _lib.SSL_shutdown(self._ssl)
            _lib.ERR_clear_error()

    def to_send(self) -> bytes:
        """Return the encrypted bytes that are ready, none if there are none."""
        parts: list[bytes] = []
        while (count := _lib.BIO_read(self._from, _buffer, _PART)) > 0:
            parts.append(_ffi.buffer(_buffer, count)[:])
            if count < _PART:
                break
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _check(self) -> None:
        if self._failed:
            raise TlsFailed

    def _fail(self) -> None:
        _lib.ERR_clear_error()
        self._failed = True
        raise TlsFailed
