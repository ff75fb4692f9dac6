"""Sends exact bytes, in exact pieces, over TCP, TLS or UDP, and reports the answers.

    python3 raw_client.py < cases.json > results.json

Standard library only. It runs inside sandboxes and, as a control, in a place without a gateway. It reads an object of
named cases, or a list of such objects: batches, one after the other. A case is an object:

- `address`, `port`; `udp: true` for a datagram; `sni`: use TLS with that server name, with `alpn` if given;
- `send`: a list of texts (latin-1, one write each) and numbers (seconds to wait);
- `hello`: changes of the first flight: `replace` [from, to], `append` (hex of an extension), `record` (bytes in each
  TLS record), `segment` (bytes in each write), `between` (hex put between the records), `limit` (bytes sent);
- `quiet`: seconds without a byte after which the answer counts as complete; `patience`: seconds until its first byte.

A result has `received` (latin-1), `ended` (whether the other side has closed) and `error` (the name of the exception,
or "").
"""

from __future__ import annotations

import json
import socket
import ssl
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PATIENCE_SECONDS = 6.0
"""The limit for a datagram's answer, which can be missing. A connection's limit is twice as long, because a busy host
delays it."""
QUIET_SECONDS = 0.8
_PARALLEL = 24


class Channel:
    """A connected socket, with TLS if the case requests it."""

    def __init__(self, case: dict[str, Any]) -> None:
        kind = socket.SOCK_DGRAM if case.get("udp") else socket.SOCK_STREAM
        self._sock = socket.socket(socket.AF_INET, kind)
        self.patience = case.get("patience", PATIENCE_SECONDS if kind == socket.SOCK_DGRAM else 2 * PATIENCE_SECONDS)
        self._sock.settimeout(self.patience)
        self._sock.connect((case["address"], case["port"]))
        if kind == socket.SOCK_STREAM:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._tls: ssl.SSLObject | None = None
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        if "sni" in case:
            self._handshake(case["sni"], case.get("alpn"), case.get("hello", {}))

    def _handshake(self, sni: str | None, alpn: list[str] | None, shape: dict[str, Any]) -> None:
        context = ssl.create_default_context()
        if sni is None:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if alpn is not None:
            context.set_alpn_protocols(alpn)
        self._tls = context.wrap_bio(self._in, self._out, server_hostname=sni)
        first = True
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                data = self._out.read()
                if first:
                    self._first_flight(data, shape)
                    first = False
                elif data:
                    self._sock.sendall(data)
                received = self._sock.recv(65536)
                if not received:
                    raise ConnectionError("closed during the handshake") from None
                self._in.write(received)
        self._flush()

    def _first_flight(self, data: bytes, shape: dict[str, Any]) -> None:
        if "replace" in shape:
            old, new = (text.encode("latin-1") for text in shape["replace"])
            if old not in data or len(old) != len(new):
                raise ValueError("a replacement keeps the length")
            data = data.replace(old, new)
        if "append" in shape:
            data = _with_extension(data, bytes.fromhex(shape["append"]))
        if "record" in shape:
            body, size = data[5:], shape["record"]
            between = bytes.fromhex(shape.get("between", ""))
            parts = [body[start : start + size] for start in range(0, len(body), size)]
            data = between.join(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in parts)
        data = data[: shape.get("limit", len(data))]
        size = shape.get("segment", len(data))
        for start in range(0, len(data), size):
            self._sock.sendall(data[start : start + size])
            if size < len(data):
                time.sleep(0.005)

    def _flush(self) -> None:
        data = self._out.read()
        if data:
            self._sock.sendall(data)

    def send(self, data: bytes) -> None:
        if self._tls is None:
            self._sock.sendall(data)
        else:
            self._tls.write(data)
            self._flush()

    def receive(self, seconds: float) -> bytes:
        """Return the next bytes; empty at the end.

        Raises:
            TimeoutError: nothing arrived in time.
        """
        self._sock.settimeout(seconds)
        if self._tls is None:
            return self._sock.recv(65536)
        while True:
            try:
                return self._tls.read(65536)
            except ssl.SSLWantReadError:
                data = self._sock.recv(65536)
                if not data:
                    return b""
                self._in.write(data)
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""

    def close(self) -> None:
        self._sock.close()


def _with_extension(data: bytes, extension: bytes) -> bytes:
    """Return the ClientHello in one record, with one more extension at the end."""
    body = bytearray(data[9:])
    at = 34 + 1 + body[34]
    at += 2 + int.from_bytes(body[at : at + 2], "big")
    at += 1 + body[at]
    length = int.from_bytes(body[at : at + 2], "big") + len(extension)
    body[at : at + 2] = length.to_bytes(2, "big")
    body += extension
    message = b"\x01" + len(body).to_bytes(3, "big") + bytes(body)
    return data[:3] + len(message).to_bytes(2, "big") + message


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case. Never raises."""
    received, ended, error = bytearray(), False, ""
    channel = None
    try:
        channel = Channel(case)
        for part in case["send"]:
            if isinstance(part, str):
                channel.send(part.encode("latin-1"))
            else:
                time.sleep(part)
    except Exception as problem:  # noqa: BLE001 - what went wrong is the result
        error = type(problem).__name__
    try:
        while channel is not None and not ended:
            data = channel.receive(case.get("quiet", QUIET_SECONDS) if received else channel.patience)
            received += data
            ended = not data
    except Exception as problem:  # noqa: BLE001 - what went wrong is the result
        error = error or type(problem).__name__
        ended = isinstance(problem, ConnectionError)
    if channel is not None:
        channel.close()
    return {"received": received.decode("latin-1"), "ended": ended, "error": error}


def main() -> None:
    """Run all cases of a batch, a few at a time, in order of their names."""
    given = json.load(sys.stdin)
    results: dict[str, Any] = {}
    with ThreadPoolExecutor(_PARALLEL) as pool:
        for cases in given if isinstance(given, list) else [given]:
            results.update(zip(cases, pool.map(run, cases.values())))  # noqa: B905 - Python 3.9 has no strict
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
