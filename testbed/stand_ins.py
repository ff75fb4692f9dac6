"""HTTP servers of the tests that stand in for services of the Internet, at the names of those in the test internet."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from testbed.internet import STAND_IN_ADDRESS, STAND_INS, Internet, in_namespace


class Server(ThreadingHTTPServer):
    """All services on one socket. `contexts` has the TLS of each host; without any it is plain HTTP.

    Attributes:
        services: what its handlers answer from.
    """

    daemon_threads = True

    def __init__(
        self,
        listener: socket.socket,
        handler: type[BaseHTTPRequestHandler],
        services: Any,
        contexts: dict[str, ssl.SSLContext],
    ) -> None:
        super().__init__(("", 0), handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.services, self._first = listener, services, None
        for context in contexts.values():
            self._first = self._first or context
            context.sni_callback = lambda connection, name, _: setattr(connection, "context", contexts[name])

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Do the handshake in the request's own thread."""
        with contextlib.suppress(OSError):
            if self._first is None:
                super().finish_request(request, client_address)
            else:
                with self._first.wrap_socket(request, server_side=True) as secured:
                    super().finish_request(secured, client_address)


@contextlib.contextmanager
def served(
    internet: Internet, handler: type[BaseHTTPRequestHandler], services: Any, *, plain: bool = False
) -> Iterator[None]:
    """Serve each name of `STAND_INS` over HTTPS, and over HTTP too if `plain`, until the end of the context."""
    contexts: dict[str, ssl.SSLContext] = {}
    for host in STAND_INS:
        contexts[host] = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        contexts[host].load_cert_chain(internet.directory / f"{host}.pem")
    ports: list[tuple[int, dict[str, ssl.SSLContext]]] = [(443, contexts), *([(80, {})] if plain else [])]
    servers = []
    try:
        for port, tls in ports:
            listener = in_namespace(internet.path(internet.net), lambda at=port: _listening(at))  # type: ignore[misc]
            servers.append(Server(listener, handler, services, tls))
            threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        yield
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def _listening(port: int) -> socket.socket:
    return socket.create_server((STAND_IN_ADDRESS, port), backlog=128)
