"""A host that records raw TCP: it receives what a splice relays, byte for byte, with the ClientHello.

The client sends one TLS ClientHello and then, in clear, a line of JSON that instructs the host: `mark`, and

- `exchange`: send `down` bytes of `stream(mark)`, in chunks, and read until the end of the stream. With `wait` the
  first byte is sent when the client's stream has ended. Sending ends with a half close.
- `reset`: read `after` bytes and reset the connection.
- `silent`: read and send nothing. `drip`: send a byte five times a second. `deaf`: read nothing more.

Each connection makes two notes: `began`, and `ended` with `received` and `sent` (bytes), `digest` (SHA-256 of all
received bytes) and `how` (`eof`, `reset`). It is no TLS server: a gateway between client and host must splice the
flow.
"""

import hashlib
import json
import random
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_BLOCK = 1 << 20


def stream(mark: str, size: int) -> Iterator[bytes]:
    """Yield `size` bytes that depend only on `mark`, in chunks of random sizes."""
    chosen = random.Random(mark)  # noqa: S311 - both ends make the same bytes
    block = chosen.randbytes(_BLOCK)
    while size > 0:
        part = block[: min(size, chosen.choice((1, 7, 1460, 16_384, 65_537, _BLOCK)))]
        size -= len(part)
        yield part


class _Connection(socketserver.BaseRequestHandler):
    server: "RawHost"

    def handle(self) -> None:
        self.received, self.sent, self.digest, self.how = 0, 0, hashlib.sha256(), "eof"
        self.request.settimeout(60)
        order: dict[str, Any] = {}
        try:
            order = self._order()
            self.server.note(order, event="began")
            getattr(self, f"_{order['do']}")(order)
        except OSError as error:
            self.how = "timeout" if isinstance(error, TimeoutError) else "reset"
        except (ValueError, KeyError) as error:
            self.how = type(error).__name__
        counts = {"received": self.received, "sent": self.sent, "digest": self.digest.hexdigest(), "how": self.how}
        self.server.note(order, event="ended", **counts)

    def _take(self, count: int) -> bytes:
        data: bytes = self.request.recv(count)
        self.received += len(data)
        self.digest.update(data)
        return data

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self._take(count - len(data))
            if not part:
                raise ValueError("ended early")
            data += part
        return data

    def _order(self) -> dict[str, Any]:
        left = None
        while left != 0:  # the records of one handshake message
            record = self._exactly(5)
            body = self._exactly(int.from_bytes(record[3:5]))
            if left is None:
                head, body = body[:4], body[4:]
                while len(head) < 4:  # the header is split by a record's end
                    self._exactly(3)
                    more = self._exactly(int.from_bytes(self._exactly(2)))
                    head, body = (head + more)[:4], (head + more)[4:]
                left = int.from_bytes(head[1:])
            left -= len(body)
        line = b""
        while not line.endswith(b"\n"):
            line += self._exactly(1)
        order: dict[str, Any] = json.loads(line)
        return order

    def _exchange(self, order: dict[str, Any]) -> None:
        if order.get("wait"):
            self._read()
            self._write(order)
            return
        writer = threading.Thread(target=self._write, args=(order,))
        writer.start()
        try:
            self._read()
        finally:
            writer.join()

    def _read(self) -> None:
        while self._take(_BLOCK):
            pass

    def _write(self, order: dict[str, Any]) -> None:
        try:
            for part in stream(order["mark"], order["down"]):
                self.request.sendall(part)
                self.sent += len(part)
            self.request.shutdown(socket.SHUT_WR)
        except OSError:
            self.how = "reset"

    def _reset(self, order: dict[str, Any]) -> None:
        self._exactly(order["after"])
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _silent(self, _order: dict[str, Any]) -> None:
        self._read()

    def _drip(self, _order: dict[str, Any]) -> None:
        while True:
            self.request.sendall(b".")
            self.sent += 1
            time.sleep(0.2)

    def _deaf(self, _order: dict[str, Any]) -> None:
        # Only the connection's own end is awaited: it is an error, because nothing is read.
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if self.request.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != 1:  # not ESTABLISHED
                self.how = "reset"
                return
            time.sleep(0.05)


class RawHost(socketserver.ThreadingTCPServer):
    """One address and port; `note` gets the mark and the fields of each note."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 1024

    def __init__(self, name: str, address: tuple[str, int], log: Callable[..., None]) -> None:
        self._name, self._log = name, log
        super().__init__(address, _Connection)

    def note(self, order: dict[str, Any], **fields: object) -> None:
        self._log(self._name, raw=order.get("mark"), **fields)
