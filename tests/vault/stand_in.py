"""HTTPS servers of a few lines, in place of servers that a test cannot have."""

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.vault.vault_server import Authority


@contextmanager
def https(authority: Authority, answer: Callable[[BaseHTTPRequestHandler], None], port: int = 0) -> Iterator[int]:
    """Serve HTTPS on loopback; return the port, a free one if none is given."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _any(self) -> None:
            answer(self)

        do_GET = do_POST = do_PUT = _any

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    certificate, key = authority.issue()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        server.daemon_threads = True
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes, *headers: tuple[str, str]) -> None:
    """Answer a request of `https`."""
    handler.send_response(status)
    for name, value in (("content-length", str(len(body))), *headers):
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)
