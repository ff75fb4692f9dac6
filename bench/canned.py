"""The SDK's own share of a call: the same calls, answered at once with the server's previous answers.

Calls are first forwarded to the real server, and its answers stored. Then a server in a thread of this process
returns these answers, byte for byte, without any other work. An answer belongs to the first line of its request; the
last one counts.
"""

import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from opensandbox.config.connection_sync import ConnectionConfigSync
from opensandbox.sync.sandbox import SandboxSync


@contextmanager
def canned(api_key: str, port: int, sandbox: str, calls: Callable[[SandboxSync], Any]) -> Iterator[SandboxSync]:
    """Yield an SDK object of a sandbox; only the calls that `calls` makes work with it."""
    with _Server(("127.0.0.1", 0), _Answers) as server:
        ours = f"127.0.0.1:{server.server_address[1]}"
        with _Recording(port, server.answers) as transport:
            # Host and execd's address in the answers stay those of the server here.
            passed_on = ConnectionConfigSync(domain=ours, api_key=api_key, transport=transport)
            calls(SandboxSync.connect(sandbox, connection_config=passed_on))
        threading.Thread(target=server.serve_forever, name="canned", daemon=True).start()
        try:
            answered = SandboxSync.connect(
                sandbox, connection_config=ConnectionConfigSync(domain=ours, api_key=api_key)
            )
            try:
                yield answered
            finally:
                answered.close()
        finally:
            server.shutdown()


class _Recording(httpx.HTTPTransport):
    """Forwards requests to a port of this host; stores the answers."""

    def __init__(self, port: int, answers: dict[bytes, bytes]) -> None:
        super().__init__()
        self._port, self._answers = port, answers

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        line = b"%s %s HTTP/1.1\r\n" % (request.method.encode(), request.url.raw_path)
        request.url = request.url.copy_with(port=self._port)
        answer = super().handle_request(request)
        body = answer.read()
        head = b"HTTP/1.1 %d %s\r\n" % (answer.status_code, answer.reason_phrase.encode())
        fields = b"".join(b"%s: %s\r\n" % field for field in answer.headers.raw)
        sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if "transfer-encoding" in answer.headers else body
        self._answers[line] = head + fields + b"\r\n" + sent
        return httpx.Response(answer.status_code, headers=answer.headers, content=body)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.answers: dict[bytes, bytes] = {}


class _Answers(socketserver.StreamRequestHandler):
    disable_nagle_algorithm = True
    server: _Server

    def handle(self) -> None:
        while line := self.rfile.readline():
            fields = {}
            while (field := self.rfile.readline()).strip():
                name, _, value = field.partition(b":")
                fields[name.lower()] = value.strip()
            self.rfile.read(int(fields.get(b"content-length", 0)))
            if fields.get(b"transfer-encoding") == b"chunked":
                while size := int(self.rfile.readline(), 16):
                    self.rfile.read(size + 2)
                self.rfile.readline()
            self.wfile.write(self.server.answers[line])
