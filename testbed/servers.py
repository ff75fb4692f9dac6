"""The servers of the demo internet, in one process inside its namespace: real protocols, no mocks.

    python -m testbed.servers DIRECTORY ACCOUNTS

- Each address is one host with its own certificate; each request is noted before it is answered.
- The Git host runs the unmodified `git http-backend`; the index implements PEP 503 and npm's protocol; both require
  basic authentication, or the password as a bearer token.
- The API requires a bearer token. Like a careless upstream, it returns what it received, with the token.
- The raw host accepts any bytes after a ClientHello (`raw_host`).
- The attacker accepts and notes everything, on HTTPS, HTTP and several other ports.
"""

import base64
import contextlib
import io
import json
import os
import socket
import socketserver
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from dnslib import QTYPE, RCODE, RR, A, DNSError, DNSRecord

from testbed.echoes import PAUSE, REDIRECTS, forms, mirror
from testbed.hostile_names import HostileNames
from testbed.internet import (
    ADDRESSES,
    API,
    ATTACKER,
    ATTACKER_V6,
    AWS_STORAGE,
    AWS_STORAGE_ADDRESS,
    DATABASE,
    DATABASE_ADDRESS,
    DNS_ADDRESS,
    GIT,
    INDEX,
    METADATA_ADDRESS,
    REGISTRY,
    REGISTRY_ADDRESS,
    SILENT,
    SILENT_ADDRESS,
    SPLICED,
    STAND_IN_ADDRESS,
    STAND_INS,
    STATUS,
    STORAGE,
    STORAGE_ADDRESS,
)
from testbed.packages import index_pages
from testbed.raw_host import RawHost

_ZONE = {
    **ADDRESSES,
    SILENT: SILENT_ADDRESS,
    REGISTRY: REGISTRY_ADDRESS,
    DATABASE: DATABASE_ADDRESS,
    STORAGE: STORAGE_ADDRESS,
    AWS_STORAGE: AWS_STORAGE_ADDRESS,
    **dict.fromkeys(STAND_INS, STAND_IN_ADDRESS),
}
_MAX_BODY = 64 * 1024 * 1024
_MAX_HEARD = 64 * 1024


class RequestLog:
    """What the servers received, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)  # each note in one write
        self._lock = threading.Lock()

    def note(self, host: str, **fields: object) -> None:
        with self._lock:
            self._file.write(json.dumps({"host": host, "at": time.time(), **fields}).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


def _git_repository(parent: Path) -> Path:
    """Make the private repository, with one commit, as a bare repository below `parent`."""
    work, bare = parent / "work", parent / "ledger.git"
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(parent),
        **{f"GIT_{who}_{what}": "demo" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }

    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], check=True, capture_output=True, env=environment)

    git("init", "-q", "-b", "main", str(work))
    (work / "ledger.txt").write_text("the private ledger\n")
    git("-C", str(work), "add", ".")
    git("-C", str(work), "commit", "-qm", "open the ledger")
    git("clone", "-q", "--bare", str(work), str(bare))
    return bare


class _Heard(io.RawIOBase):
    """Reads a connection and keeps the first bytes that it has read."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.data = bytearray()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._connection.recv_into(buffer)
        if len(self.data) < _MAX_HEARD:
            self.data += bytes(buffer[:count])
        return count


class Handler(BaseHTTPRequestHandler):
    """One request to any of the hosts; its server determines which host."""

    protocol_version = "HTTP/1.1"
    server: "Host"

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing to standard error: the request log is the record."""

    def setup(self) -> None:
        super().setup()
        self._heard = _Heard(self.connection)
        self.rfile = io.BufferedReader(self._heard)

    def finish(self) -> None:
        """Note all received bytes, also those that were no request."""
        super().finish()
        self.server.log.note(self.server.name, port=self.server.port, heard=bytes(self._heard.data).decode("latin-1"))

    def _body(self) -> bytes:
        length = int(self.headers.get("Content-Length") or 0)
        if length:
            return self.rfile.read(min(length, _MAX_BODY))
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return b""
        body = bytearray()
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return bytes(body)

    def _reply(self, status: int, body: bytes, kind: str = "text/plain", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _raw(self, pieces: list[bytes], ends: bool) -> None:
        """Send a response unchanged, each piece in its own TLS record; for HEAD only the first piece."""
        for piece in pieces[:1] if self.command == "HEAD" else pieces:
            if piece == PAUSE:
                time.sleep(0.3)
                continue
            self.wfile.write(piece)
            self.wfile.flush()
        self.close_connection = ends or self.command == "HEAD"

    def _stream(self) -> None:
        """Send a short line twenty times a second, for a minute or until the connection ends."""
        self._raw([b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"], False)
        with contextlib.suppress(OSError):
            for number in range(1200):
                self._raw([b"5\r\n%04d\n\r\n" % number], False)
                time.sleep(0.05)
            self._raw([b"0\r\n\r\n"], False)
        self.close_connection = True

    def _any(self) -> None:
        body = self._body()
        host = self.server.name
        self.server.log.note(
            host,
            port=self.server.port,
            method=self.command,
            target=self.path,
            headers=self.headers.items(),
            body=body[:65536].decode("latin-1"),
        )
        if host == GIT:
            self._git(body)
        elif host == INDEX:
            self._index()
        elif host == API:
            self._api(body)
        else:
            # An object store answers an upload without a body.
            self._reply(200, b"" if self.command == "PUT" else f"this is {host}\n".encode())

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = do_PATCH = _any

    def _authorised(self, account: str) -> bool:
        password = account.partition(":")[2]
        expected = ("Basic " + base64.b64encode(account.encode()).decode(), f"Bearer {password}")
        if self.headers.get("Authorization") in expected:
            return True
        self._reply(401, b"who are you?\n", WWW_Authenticate='Basic realm="bank"')
        return False

    def _git(self, body: bytes) -> None:
        if not self._authorised(self.server.accounts["git"]):
            return
        parts = urlsplit(self.path)
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(self.server.repositories),
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": unquote(parts.path),
            "QUERY_STRING": parts.query,
            "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "HTTP_GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            "REMOTE_USER": "demo",
            "HOME": str(self.server.repositories),
        }
        done = subprocess.run(["git", "http-backend"], input=body, capture_output=True, env=environment, check=False)
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n") if ": " in line)
        status = int(fields.pop("Status", "200").split()[0])
        self._reply(status, content, fields.get("Content-Type", "text/plain"))

    def _index(self) -> None:
        if not self._authorised(self.server.accounts["index"]):
            return
        if (page := self.server.index.get(self.path)) is not None:
            self._reply(200, *page)
        else:
            self._reply(404, b"no such project\n")

    def _api(self, body: bytes) -> None:
        if self.headers.get("Authorization") != f"Bearer {self.server.accounts['api']}":
            self._reply(401, b'{"error": "no token"}\n', "application/json")
            return
        parts = urlsplit(self.path)
        options = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if parts.path == "/v1/echo":
            pieces, ends = forms(self.server.accounts["api"])[options["form"]]
            self._raw(pieces, ends)
            return
        if parts.path == "/v1/mirror":
            self._raw(mirror(body, int(options["first"])), False)
            return
        if parts.path == "/v1/redirect":
            self._reply(int(options["status"]), b"this way\n", Location=REDIRECTS[options["to"]])
            return
        if parts.path.startswith("/v1/stream/"):
            self._stream()
            return
        if parts.path.startswith("/v1/quiet/"):
            self._reply(200, b"ok\n")
            return
        received = {
            "method": self.command,
            "target": self.path,
            "headers": list(self.headers.items()),
            "token_base64": base64.b64encode(self.server.accounts["api"].encode()).decode(),
            "body": body.decode("latin-1"),
        }
        echo = self.headers["Authorization"]
        self._reply(200, json.dumps(received).encode(), "application/json", X_Echo=echo)


class Host(ThreadingHTTPServer):
    """One host of the internet, on one address and port."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self,
        name: str,
        address: tuple[str, int],
        log: RequestLog,
        accounts: dict[str, str],
        repositories: Path,
        index: dict[str, tuple[bytes, str]],
        certificate: Path | None,
    ) -> None:
        self.name, self.log, self.accounts = name, log, accounts
        self.repositories, self.index = repositories, index
        self.port = address[1]
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._context = None
        if certificate is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(certificate)
        super().__init__(address, Handler)

    def finish_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        """Do the handshake in the request's own thread, so that a silent client does not delay another one."""
        request.settimeout(30)
        with contextlib.suppress(OSError):
            if self._context is None:
                super().finish_request(request, client_address)
            else:
                with self._context.wrap_socket(request, server_side=True) as secured:
                    super().finish_request(secured, client_address)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a broken connection: the client's side judges it."""


class _TcpSink(socketserver.BaseRequestHandler):
    """One of the attacker's other TCP ports: notes what it receives, sends a greeting."""

    server: "_TcpSinkServer"

    def handle(self) -> None:
        self.request.settimeout(5)
        with contextlib.suppress(OSError):
            self.request.sendall(b"hello from the attacker\n")
            data = self.request.recv(65536)
            self.server.log.note(ATTACKER, port=self.server.port, body=data.decode("latin-1"))


class _TcpSinkServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], log: RequestLog) -> None:
        self.log, self.port = log, address[1]
        super().__init__(address, _TcpSink)


class Names:
    """The authoritative DNS of this internet, over UDP and TCP; it notes each question."""

    def __init__(self, log: RequestLog) -> None:
        self._log = log
        self._hostile = HostileNames()

    def answer(self, query: bytes) -> bytes | None:
        """Answer one message; return None if it is not a valid query."""
        try:
            request = DNSRecord.parse(query)
        except (DNSError, ValueError, IndexError):
            return None
        name = str(request.q.qname).rstrip(".").lower()
        self._log.note(DNS_ADDRESS, question=name, type=QTYPE.get(request.q.qtype))
        reply = request.reply()
        hostile = self._hostile.records(name)
        if hostile is not None:
            reply.add_answer(*hostile)
        elif name in _ZONE:
            if request.q.qtype == QTYPE.A:
                reply.add_answer(RR(request.q.qname, QTYPE.A, rdata=A(_ZONE[name]), ttl=60))
        else:
            reply.header.rcode = RCODE.NXDOMAIN
        return bytes(reply.pack())

    def serve(self) -> None:
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind((DNS_ADDRESS, 53))
        tcp = socket.create_server((DNS_ADDRESS, 53))
        threading.Thread(target=self._serve_udp, args=(udp,), daemon=True).start()
        threading.Thread(target=self._serve_tcp, args=(tcp,), daemon=True).start()

    def _serve_udp(self, sock: socket.socket) -> None:
        while True:
            query, peer = sock.recvfrom(65535)
            reply = self.answer(query)
            if reply is not None:
                sock.sendto(reply, peer)

    def _serve_tcp(self, listener: socket.socket) -> None:
        while True:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):
                sock.settimeout(2)
                length = int.from_bytes(sock.recv(2))
                reply = self.answer(sock.recv(length))
                if reply is not None:
                    sock.sendall(len(reply).to_bytes(2) + reply)


def _serve_udp_sink(log: RequestLog, address: str, port: int) -> None:
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((address, port))

    def run() -> None:
        while True:
            data, peer = sock.recvfrom(65535)
            log.note(ATTACKER, port=port, udp=True, body=data[:2048].decode("latin-1"))
            with contextlib.suppress(OSError):
                sock.sendto(b"ok", peer)

    threading.Thread(target=run, daemon=True).start()


def main() -> None:
    """Serve until killed; print `ready` when everything listens."""
    os.umask(0o077)  # the notes contain what the servers received
    directory, accounts_path = Path(sys.argv[1]), Path(sys.argv[2])
    accounts = dict(line.split("=", 1) for line in accounts_path.read_text().splitlines())
    log = RequestLog(directory / "requests.jsonl")
    with tempfile.TemporaryDirectory(dir=directory) as parent:
        repositories = _git_repository(Path(parent)).parent
        index = index_pages()

        def host(name: str, address: str, port: int, certificate: Path | None) -> None:
            server = Host(name, (address, port), log, accounts, repositories, index, certificate)
            threading.Thread(target=server.serve_forever, daemon=True).start()

        for name, address in ADDRESSES.items():
            if name != SPLICED:
                host(name, address, 443, directory / f"{name}.pem")
            host(name, address, 80, None)
        raw = RawHost(SPLICED, (ADDRESSES[SPLICED], 443), log.note)
        threading.Thread(target=raw.serve_forever, daemon=True).start()
        host(STATUS, ADDRESSES[STATUS], 8443, directory / f"{STATUS}.pem")
        host(ATTACKER, ATTACKER_V6, 443, directory / f"{ATTACKER}.pem")
        host("metadata", METADATA_ADDRESS, 80, None)
        for port in (22, 53, 853, 8443):
            sink = _TcpSinkServer((ADDRESSES[ATTACKER], port), log)
            threading.Thread(target=sink.serve_forever, daemon=True).start()
        for address in (ADDRESSES[ATTACKER], ATTACKER_V6):
            for port in (53, 443, 9999):
                _serve_udp_sink(log, address, port)
        Names(log).serve()
        print("ready", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
