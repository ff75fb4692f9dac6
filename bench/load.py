"""A load client that needs only the standard library: it also runs inside sandboxes, on their Python.

    python3 load.py '{"host": ..., "connections": 8, "seconds": 1.0, "address": null, "proxy": null, "roots": null}'
    python3 load.py '{"hold": [HOST, ...]}'

The first form sends one GET after another on each of `connections` kept connections, one thread each; with `proxy`
([address, port]) it first requests a tunnel to `address`. The second form opens one flow to each host, uses it once,
and prints when it was aborted: times of the monotonic clock, which a runc sandbox shares with its host. Both print
one JSON object.
"""

import json
import os
import socket
import ssl
import sys
import threading
import time
from typing import IO, Any


def read_answer(reader: IO[bytes]) -> None:
    """Read one response.

    Raises:
        OSError: it is incomplete, or its status is not 200.
    """
    status = reader.readline()
    length = 0
    while (line := reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    if len(reader.read(length)) != length or status.split(b" ")[1:2] != [b"200"]:
        raise OSError(f"answered {status[:40]!r}")


def connect(plan: dict[str, Any]) -> ssl.SSLSocket:
    """Open one connection with TLS."""
    address = plan.get("address") or plan["host"]
    sock = socket.create_connection(tuple(plan.get("proxy") or (address, 443)), 20)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if plan.get("proxy"):
        sock.sendall(f"CONNECT {address}:443 HTTP/1.1\r\nHost: {address}:443\r\n\r\n".encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            byte = sock.recv(1)
            if not byte:
                raise OSError("the proxy hung up")
            head += byte
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise OSError("the proxy refused")
    context = ssl.create_default_context(cafile=plan.get("roots") or os.environ.get("SSL_CERT_FILE"))
    return context.wrap_socket(sock, server_hostname=plan["host"])


def request(host: str) -> bytes:
    """Return the request; all requests are equal."""
    return f"GET /v1/page HTTP/1.1\r\nHost: {host}\r\nAccept: */*\r\n\r\n".encode()


class Load:
    """Sends requests as fast as the answers arrive."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._ready = threading.Barrier(plan["connections"])
        self.latencies: list[float] = []
        self.failures: list[str] = []

    def drive(self) -> None:
        """Send requests on one connection until the time is over."""
        data = request(self._plan["host"])
        try:
            with connect(self._plan) as sock, sock.makefile("rb") as reader:
                sock.sendall(data)  # not counted, because it makes the connection to the far end
                read_answer(reader)
                self._ready.wait()
                deadline = time.monotonic() + self._plan["seconds"]
                while time.monotonic() < deadline:
                    began = time.perf_counter()
                    sock.sendall(data)
                    read_answer(reader)
                    self.latencies.append(time.perf_counter() - began)
        except (OSError, ValueError) as error:
            self.failures.append(f"{type(error).__name__}: {error}")
            self._ready.abort()
        except threading.BrokenBarrierError:
            return

    def result(self) -> dict[str, Any]:
        """Run all connections; return counts, failures and latencies."""
        _all([threading.Thread(target=self.drive) for _ in range(self._plan["connections"])])
        ordered = sorted(self.latencies)
        count = len(ordered)
        seen: dict[str, Any] = {"requests": count, "failures": self.failures[:3]}
        if count:
            seen["p50_ms"] = 1000 * ordered[count // 2]
            seen["p99_ms"] = 1000 * ordered[min(count - 1, int(count * 0.99))]
        return seen


class Hold:
    """Keeps flows open until the other side ends them."""

    def __init__(self, hosts: list[str]) -> None:
        self._hosts = hosts
        # Resolve each name once: the rate of queries is limited, and names are not measured.
        self._addresses = {host: socket.gethostbyname(host) for host in set(hosts)}
        self.ended: list[float] = []
        self.failures: list[str] = []

    def keep(self, host: str) -> None:
        """Open a flow, use it once, and wait for its end."""
        try:
            with connect({"host": host, "address": self._addresses[host]}) as sock, sock.makefile("rb") as reader:
                sock.settimeout(60)
                sock.sendall(request(host))
                read_answer(reader)
                left = self._wait(reader)
                self.ended.append(time.monotonic())
                if left:
                    self.failures.append("data after the answer")
        except OSError as error:
            self.failures.append(f"{type(error).__name__}: {error}")

    def _wait(self, reader: IO[bytes]) -> bytes:
        try:
            return reader.read(1)
        except TimeoutError:
            raise
        except OSError:  # a reset, or an end without a TLS close
            return b""

    def result(self) -> dict[str, Any]:
        """Hold all flows until their ends; return the times."""
        _all([threading.Thread(target=self.keep, args=(host,)) for host in self._hosts])
        return {"ended": self.ended, "failures": self.failures[:3]}


def _all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(Hold(asked["hold"]).result() if "hold" in asked else Load(asked).result()))
