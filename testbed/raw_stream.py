"""The client of `raw_host`: sends a ClientHello, an order and many bytes; reports the answers. Standard library only.

    python3 raw_stream.py < cases.json > results.json

A case has `address`, `port`, `sni`, `order` (the instruction for the host; its `mark` names the connection), `up`
(the number of bytes sent after the order, made from the mark). It can have `segment` and `record` (sizes into which
the ClientHello is split), `wait` (send only when the host's stream has ended), `slow` (seconds between reads of 64
KiB), `deaf` (seconds without reading), `then` (`reset`, or `close` at once) after sending, `hold` (seconds before the
end of the stream is sent). A result has `received`, `sent`, `digest`, `digest_up` (of all bytes sent, with the
ClientHello), `how` and `seconds`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_BLOCK = 1 << 20


def stream(mark: str, size: int) -> Iterator[bytes]:
    """Yield the same bytes as in `raw_host`."""
    chosen = random.Random(mark)  # noqa: S311 - both ends make the same bytes
    block = chosen.randbytes(_BLOCK)
    while size > 0:
        part = block[: min(size, chosen.choice((1, 7, 1460, 16_384, 65_537, _BLOCK)))]
        size -= len(part)
        yield part


def hello(sni: str | None, record: int | None) -> bytes:
    """Return a real ClientHello, in records of `record` bytes."""
    context = ssl.create_default_context()
    context.check_hostname = False
    out = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=sni).do_handshake()
    data = out.read()
    if record is None:
        return data
    body = data[5:]
    parts = [body[at : at + record] for at in range(0, len(body), record)]
    return b"".join(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in parts)


class Conversation:
    """One connection and its counts."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.received = self.sent = 0
        self.digest, self.digest_up = hashlib.sha256(), hashlib.sha256()
        self.how = "eof"
        self.sock = socket.create_connection((case["address"], case["port"]), timeout=case.get("patience", 60))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _send(self, data: bytes) -> None:
        self.sock.sendall(data)
        self.sent += len(data)
        self.digest_up.update(data)

    def _open(self) -> None:
        case = self.case
        data = hello(case.get("sni"), case.get("record"))
        size = case.get("segment", len(data))
        for at in range(0, len(data), size):
            self._send(data[at : at + size])
        self._send(json.dumps(case["order"]).encode() + b"\n")

    def _upload(self) -> None:
        try:
            for part in stream(self.case["order"]["mark"] + "up", self.case.get("up", 0)):
                self._send(part)
            time.sleep(self.case.get("hold", 0))
            if self.case.get("then") == "reset":
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                self.sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            self.how = type(error).__name__

    def _download(self) -> None:
        time.sleep(self.case.get("deaf", 0))
        while True:
            data = self.sock.recv(65_536)
            if not data:
                return
            self.received += len(data)
            self.digest.update(data)
            time.sleep(self.case.get("slow", 0))

    def run(self) -> None:
        self._open()
        if self.case.get("wait"):
            self._download()
            self._upload()
            return
        if self.case.get("then"):
            self._upload()
            return
        upload = threading.Thread(target=self._upload, daemon=True)
        upload.start()
        self._download()
        upload.join()


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case. Never raises."""
    began = time.monotonic()
    try:
        conversation = Conversation(case)
    except OSError as error:
        return {"how": type(error).__name__, "received": 0, "sent": 0}
    try:
        conversation.run()
    except OSError as error:
        conversation.how = type(error).__name__
    finally:
        conversation.sock.close()
    return {
        "received": conversation.received,
        "sent": conversation.sent,
        "digest": conversation.digest.hexdigest(),
        "digest_up": conversation.digest_up.hexdigest(),
        "how": conversation.how,
        "seconds": time.monotonic() - began,
    }


def main() -> None:
    """Run all cases concurrently."""
    cases = json.load(sys.stdin)
    with ThreadPoolExecutor(max(1, len(cases))) as pool:
        results = list(pool.map(run, cases.values()))
    json.dump(dict(zip(cases, results)), sys.stdout)  # noqa: B905 - as long as one another, and Python 3.9 has no strict


if __name__ == "__main__":
    main()
