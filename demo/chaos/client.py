"""The load of one sandbox. Standard library only, any Python from 3.9, because it runs inside the sandbox.

    python3 client.py PLAN.json RESULTS.jsonl

- One process runs from the first kill to the last. It loads its trust roots only at its start.
- Every question has a random id in its path or its name; its outcome is one line of RESULTS.
- SIGTERM ends it in order: every question that has begun is answered or has failed, and has its line.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

TIMEOUT = 2.0
DNS_TIMEOUT = 1.0
"""Time limit of one datagram to the resolver, which is one hop away. A lost one is not sent again: a retry is a new
question."""
AGAIN = 0.25
"""The maximum of seconds between a failed question and the next one. It is the precision with which a recovery is
measured."""
RESOLVER = "192.0.2.1"
KEPT = 20
"""The number of requests over one kept connection."""

Result = tuple[bool, str, bytes]
"""Whether the outcome agrees with policy, a word that describes the outcome, and the bytes that were received."""


class Client:
    """The threads of one load and their results."""

    def __init__(self, plan: dict[str, Any], results: str) -> None:
        self._plan = plan
        self._results = open(results, "a", buffering=1)  # noqa: SIM115 - open as long as the process
        self._lock = threading.Lock()
        self._count = 0
        self._trust = ssl.create_default_context()
        self._trustless = ssl.create_default_context()
        self._trustless.check_hostname = False
        self._trustless.verify_mode = ssl.CERT_NONE
        self.stop = threading.Event()

    def run(self) -> None:
        """Ask questions until SIGTERM."""
        kinds: list[tuple[str, float, Callable[[], Callable[[str], Result]]]] = [
            ("secret", 0.2, lambda: self._https("api", "/v1/quiet/", echo="/v1/")),
            ("plain", 0.5, lambda: self._https("status", "/", keep=not self._plan["spliced"])),
            ("name", 0.6, lambda: self.forbidden_host),
            ("sni", 0.8, lambda: self.forbidden_sni),
            ("dns", 1.0, lambda: self.allowed_name),
            ("nodns", 0.8, lambda: self.forbidden_name),
            ("spam", 0.4, lambda: self.spam),
        ]
        if self._plan["paths"]:
            kinds.append(("path", 0.6, lambda: self._https("api", "/admin/", 403)))
        threads = [threading.Thread(target=self._repeat, args=(kind, pause, make())) for kind, pause, make in kinds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._results.close()

    def _repeat(self, kind: str, pause: float, ask: Callable[[str], Result]) -> None:
        while not self.stop.is_set():
            with self._lock:
                self._count += 1
                number = self._count
            ident = f"q{self._plan['tag']}{number:06x}{secrets.token_hex(8)}"
            began = time.time()
            try:
                good, saw, data = ask(ident)
            except Exception as error:  # noqa: BLE001 - whatever it was, the request has failed and says how
                good, saw, data = False, f"{type(error).__name__}: {str(error)[:120]}", b""
            line = {"id": ident, "kind": kind, "began": began, "ended": time.time(), "good": good, "saw": saw}
            line["got"] = data[:4096].decode("latin-1")
            with self._lock:
                self._results.write(json.dumps(line) + "\n")
            self.stop.wait(pause if good else min(pause, AGAIN))

    def _https(
        self, name: str, prefix: str, expected: int = 200, keep: bool = True, echo: str | None = None
    ) -> Callable[[str], Result]:
        """Return a function that sends requests to one host: every fourth (or each) over a new connection.

        Every tenth request has the prefix `echo`, where the server repeats the secret. The gateway limits how many
        responses with a secret a sandbox gets.
        """
        host = self._plan[name]
        kept: list[http.client.HTTPSConnection] = []
        used = [0]

        def ask(ident: str) -> Result:
            used[0] += 1
            if kept and used[0] % KEPT == 0:
                kept.pop().close()
            fresh = used[0] % 4 == 0 or not keep
            if fresh or not kept:
                connection = http.client.HTTPSConnection(host, timeout=TIMEOUT, context=self._trust)
                raw = socket.create_connection((resolve(host), 443), TIMEOUT)
                try:
                    connection.sock = self._trust.wrap_socket(raw, server_hostname=host)
                except BaseException:
                    raw.close()
                    raise
                if not fresh:
                    kept.append(connection)
            else:
                connection = kept[0]
            try:
                connection.request("GET", (echo if echo and used[0] % 10 == 0 else prefix) + ident)
                response = connection.getresponse()
                body = response.read()
            except BaseException:
                connection.close()
                kept.clear()
                raise
            if fresh or response.will_close:
                connection.close()
                if not fresh:
                    kept.clear()
            head = "".join(f"{key}: {value}\n" for key, value in response.getheaders()).encode("latin-1", "replace")
            return response.status == expected, str(response.status), head + body

        return ask

    def forbidden_host(self, ident: str) -> Result:
        """Send plain HTTP to the attacker's address and name: a readable denial is expected."""
        name = f"{ident}.{self._plan['attacker_name']}"
        with socket.create_connection((self._plan["attacker"], 80), TIMEOUT) as sock:
            sock.sendall(b"GET /%s HTTP/1.1\r\nHost: %s\r\n\r\n" % (ident.encode(), name.encode()))
            answer = read_all(sock)
        return answer.startswith(b"HTTP/1.1 403 "), answer[9:12].decode("latin-1") or "ended", answer

    def forbidden_sni(self, ident: str) -> Result:
        """Begin TLS for a name that policy denies: an alert is expected."""
        name = f"{ident}.{self._plan['attacker_name']}"
        with socket.create_connection((self._plan["attacker"], 443), TIMEOUT) as raw:
            try:
                with self._trustless.wrap_socket(raw, server_hostname=name) as sock:
                    sock.sendall(b"GET /%s HTTP/1.1\r\nHost: %s\r\n\r\n" % (ident.encode(), name.encode()))
                    return False, "talks", read_all(sock)
            except ssl.SSLError as error:
                return "UNRECOGNIZED_NAME" in str(error).upper(), str(error.reason), b""

    def allowed_name(self, ident: str) -> Result:
        """Ask for a new name below an allowed zone. It does not exist, but only the far end knows that."""
        answer = query(f"{ident}.{self._plan['zone']}")
        return answer[3] & 15 == 3, rcode(answer), answer

    def forbidden_name(self, ident: str) -> Result:
        """Ask for a name that policy does not resolve."""
        answer = query(f"{ident}.{self._plan['attacker_name']}")
        return answer[3] & 15 == 3, rcode(answer), answer

    def spam(self, ident: str) -> Result:
        """Try all other ways to the attacker. The only expectation: nothing arrives."""
        data, attacker = ident.encode(), self._plan["attacker"]
        got = []
        for port in (22, 53, 443, 9999):
            for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
                try:
                    with socket.socket(socket.AF_INET, kind) as sock:
                        sock.settimeout(0.1)
                        sock.connect((attacker, port))
                        sock.sendall(data)
                        got.append(sock.recv(1024))
                except OSError:
                    pass
        packet = struct.pack("!BBHHH", 8, 0, 0, 1, 1) + data
        for kind in (socket.SOCK_RAW, socket.SOCK_DGRAM):
            try:
                with socket.socket(socket.AF_INET, kind, socket.IPPROTO_ICMP) as sock:
                    sock.sendto(packet, (attacker, 0))
            except OSError:
                pass
        answered = b"ok" in got or any(b"attacker" in part for part in got)
        return not answered, "talks" if answered else "sent", b"".join(got)


def query(name: str) -> bytes:
    """Ask the resolver once for the A record of `name`."""
    ident = os.urandom(2)
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(DNS_TIMEOUT)
        sock.connect((RESOLVER, 53))
        sock.send(ident + b"\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + labels + b"\x00\x00\x01\x00\x01")
        while True:
            answer = sock.recv(4096)
            if answer[:2] == ident and len(answer) > 12:
                return answer


def resolve(name: str) -> str:
    """Return the first address of `name`. One question, no retries, because a failure must be visible."""
    answer = query(name)
    if answer[3] & 15 or not int.from_bytes(answer[6:8], "big"):
        raise OSError(f"no address: {rcode(answer)}")
    return socket.inet_ntoa(answer[-4:])


def rcode(answer: bytes) -> str:
    """Return the result code as one of a few fixed words."""
    return f"rcode {answer[3] & 15}"


def read_all(sock: socket.socket) -> bytes:
    """Read until the end or the time-out."""
    data = b""
    while part := sock.recv(4096):
        data += part
    return data


def main() -> None:
    """Run the load of the plan."""
    with open(sys.argv[1]) as file:
        client = Client(json.load(file), sys.argv[2])
    signal.signal(signal.SIGTERM, lambda _number, _frame: client.stop.set())
    client.run()


if __name__ == "__main__":
    main()
