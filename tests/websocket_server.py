"""A real WebSocket server of the test internet, behind TLS: `websockets`.

It sends back what it received: the head of a handshake in the first message, and messages as they are.
"""

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

from testbed.internet import REGISTRY, REGISTRY_ADDRESS, Internet, in_namespace

HOST = REGISTRY


@dataclass
class EchoServer:
    """The requests that the server received: each a target and the fields of its head."""

    received: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def of(self, mark: str) -> list[tuple[str, dict[str, str]]]:
        """Return the requests of a mark."""
        return [(target, fields) for target, fields in self.received if mark in target]

    def examine(self, _connection: ServerConnection, request: Request) -> None:
        """Store the head of a request."""
        self.received.append((request.path, {name.lower(): value for name, value in request.headers.raw_items()}))

    def accept(self, connection: ServerConnection, _request: Request, response: Response) -> None:
        """Send the credential back in the head of the answer, too."""
        assert connection.request is not None
        response.headers["X-Echo"] = connection.request.headers.get("Authorization", "none")

    def talk(self, connection: ServerConnection) -> None:
        """Serve one WebSocket."""
        assert connection.request is not None
        fields = {name.lower(): value for name, value in connection.request.headers.raw_items()}
        try:
            connection.send(json.dumps([connection.request.path, fields]))
            for message in connection:
                connection.send(message)
        except ConnectionClosed:
            pass


@contextmanager
def echo_server(internet: Internet) -> Iterator[EchoServer]:
    """Run the server at `HOST`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(internet.directory / f"{HOST}.pem")
    listener = in_namespace(
        internet.path(internet.net), lambda: socket.create_server((REGISTRY_ADDRESS, 443), reuse_port=True)
    )
    made = EchoServer()
    with serve(
        made.talk, sock=listener, ssl=context, process_request=made.examine, process_response=made.accept
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()
