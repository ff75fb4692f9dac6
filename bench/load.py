"""A client that keeps flows open. It needs only the standard library, because it runs inside sandboxes.

    python3 load.py HOST...

It opens one flow to each host, and reads an answer that the host begins and never finishes. So each flow keeps its own
connection to the host: the gateway would use one whose answer is complete for another flow. It prints when each flow
was aborted: times of the monotonic clock, which a runc sandbox shares with its host. It prints one JSON object.
"""

import json
import socket
import ssl
import sys
import threading
import time
from typing import IO, Any


def read_head(reader: IO[bytes]) -> None:
    """Read the head of a response.

    Raises:
        OSError: it is incomplete, or its status is not 200.
    """
    status = line = reader.readline()
    while line not in (b"\r\n", b""):
        line = reader.readline()
    if not line or status.split(b" ")[1:2] != [b"200"]:
        raise OSError(f"answered {status[:40]!r}")


def connect(host: str, address: str) -> ssl.SSLSocket:
    """Open one connection with TLS."""
    sock = socket.create_connection((address, 443), 20)
    return ssl.create_default_context().wrap_socket(sock, server_hostname=host)


def request(host: str) -> bytes:
    """Return a request."""
    return f"GET /v1/held HTTP/1.1\r\nHost: {host}\r\nAccept: */*\r\n\r\n".encode()


class Hold:
    """Keeps flows open until the other side ends them."""

    def __init__(self, hosts: list[str]) -> None:
        self._hosts = hosts
        # Resolve each name once: the rate of queries is limited, and names are not measured.
        self._addresses = {host: socket.gethostbyname(host) for host in set(hosts)}
        self.ended: list[float] = []
        self.failures: list[str] = []

    def keep(self, host: str) -> None:
        """Open a flow, and read until its end."""
        try:
            with connect(host, self._addresses[host]) as sock, sock.makefile("rb") as reader:
                sock.settimeout(60)
                sock.sendall(request(host))
                read_head(reader)
                while self._read(reader):
                    pass
                self.ended.append(time.monotonic())
        except OSError as error:
            self.failures.append(f"{type(error).__name__}: {error}")

    def _read(self, reader: IO[bytes]) -> bytes:
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
    print(json.dumps(Hold(sys.argv[1:]).result()))
