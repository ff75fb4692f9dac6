"""A server that returns everything it receives, with whatever it knows of secrets, in many forms.

It has an address of the test internet and TLS, and asks for a client certificate without needing one.
"""

import base64
import contextlib
import gzip
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

from cryptography import x509

from testbed.internet import in_namespace


@dataclass(frozen=True)
class Received:
    """A request; `serial` is that of the client certificate, if there was one."""

    method: str
    target: str
    fields: tuple[tuple[str, str], ...]
    body: bytes
    serial: int | None

    def value(self, name: str) -> str:
        """Return the value of a field that was received once."""
        (found,) = [value for key, value in self.fields if key.lower() == name]
        return found


@dataclass
class Mirror:
    """What the server has received, and for each first segment of a path what it returns besides."""

    received: list[Received] = field(default_factory=list)
    told: dict[str, str] = field(default_factory=dict)

    def of(self, *marks: str) -> list[Received]:
        """Return the requests whose targets have all of these."""
        return [one for one in self.received if all(mark in one.target for mark in marks)]

    def returned(self, request: Received) -> bytes:
        """Return the body of the answer to a request."""
        fields = "\n".join(f"{name}: {value}" for name, value in request.fields)
        told = self.told.get(request.target.split("/")[1], "")
        text = f"{request.method} {request.target}\n{fields}\n{request.body.decode('latin-1')}\n{told}\n"
        raw = text.encode("latin-1")
        forms = {
            "plain": text,
            "quoted": quote(text, safe=""),
            "hex": raw.hex(),
            **{f"base64-{shift}": base64.b64encode(b"-" * shift + raw).decode() for shift in range(3)},
        }
        return json.dumps(forms).encode()


@contextlib.contextmanager
def mirroring(netns: str, address: str, certificate: Path, client_roots: str) -> Iterator[Mirror]:
    """Run the server on port 443 of an address in a namespace. It accepts certificates of these roots (PEM)."""
    mirror = Mirror()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_verify_locations(cadata=client_roots)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        connection: ssl.SSLSocket

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

        def _any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            shown = self.connection.getpeercert(binary_form=True)
            serial = x509.load_der_x509_certificate(shown).serial_number if shown else None
            request = Received(self.command, self.path, tuple(self.headers.items()), body, serial)
            mirror.received.append(request)
            answer = mirror.returned(request)
            self.send_response(200)
            if "gzip" in self.path:
                answer = gzip.compress(answer)
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.send_header("X-Echo", self.headers.get("authorization", "none"))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = _any

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def finish_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
            request.settimeout(30)
            with contextlib.suppress(OSError), context.wrap_socket(request, server_side=True) as secured:
                super().finish_request(secured, client_address)

    with Server((address, 443), Handler, bind_and_activate=False) as server:
        server.socket.close()
        server.socket = in_namespace(netns, lambda: socket.create_server((address, 443)))
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield mirror
        finally:
            server.shutdown()
            thread.join()
