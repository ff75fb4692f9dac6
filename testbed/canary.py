"""Listens on every address of its namespace and counts connections: a service that no sandbox may reach.

python -m testbed.canary COUNTER PORT...        one byte is appended to COUNTER for each connection
"""

import contextlib
import os
import socketserver
import sys
import threading


class _Answer(socketserver.BaseRequestHandler):
    server: "_Server"

    def handle(self) -> None:
        os.write(self.server.counter, b".")
        with contextlib.suppress(OSError):
            self.request.sendall(b"canary: you reached a service of the host\n")


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, port: int, counter: int) -> None:
        self.counter = counter
        super().__init__(("0.0.0.0", port), _Answer)


def main() -> None:
    """Listen until killed; print `ready` when every port is open."""
    counter = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    servers = [_Server(int(port), counter) for port in sys.argv[2:]]
    threads = [threading.Thread(target=server.serve_forever) for server in servers]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
