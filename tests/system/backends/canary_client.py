"""Uses each kind of credential from inside a sandbox, by curl and by the protocol of PostgreSQL. Standard library.

    python3 canary_client.py HTTP_HOST DATABASE_HOST MARK OUTPUT

It prints a JSON object with the result of each. All answers are in the directory OUTPUT.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import struct
import subprocess
import sys

HTTP, DATABASE, MARK, OUTPUT = sys.argv[1:5] if __name__ == "__main__" else ("",) * 4
OPTIONS = {
    "placed": ["-H", "X-Own: __PLACED__", "-H", "Content-Type: application/json", "-d", '{"a": "__PLACED__"}'],
    "variable": ["-H", f"Authorization: Bearer {os.environ.get('API_TOKEN')}"],
    "netrc": ["-n"],
    "aws": ["-d", "x=1"],
}
KINDS = (
    *("bearer", "basic", "header", "query", "cookie", "placed", "variable", "netrc", "kv", "dynamic"),
    *("oauth", "jwt", "app", "aws", "hmac", "certificate", "inline"),
)


def curl(kind: str, form: str) -> str:
    """Make a request; return its status, or what curl says."""
    path = f"/{kind}/{MARK}/{form}" + ("/__PLACED__?a=__PLACED__" if kind == "placed" else "")
    name = os.path.join(OUTPUT, f"{kind}-{form}")
    command = ["curl", "-sS", "--max-time", "30", "-D", f"{name}.head", "-o", name, "-w", "%{http_code}"]
    done = subprocess.run([*command, *OPTIONS.get(kind, []), f"https://{HTTP}{path}"], capture_output=True, text=True)
    return done.stdout + done.stderr


def read(sock: ssl.SSLSocket) -> tuple[bytes, bytes]:
    """Return the kind of a message of PostgreSQL and its content."""
    head = b""
    while len(head) < 5:
        head += sock.recv(5 - len(head)) or sys.exit("the session ended")
    size, content = struct.unpack("!I", head[1:])[0] - 4, b""
    while len(content) < size:
        content += sock.recv(size - len(content)) or sys.exit("the session ended")
    return head[:1], content


def session() -> list[str]:
    """Open a database session without a password; return what the server says of it."""
    plain = socket.create_connection((DATABASE, 5432), 30)
    plain.sendall(struct.pack("!II", 8, 80877103))
    assert plain.recv(1) == b"S"
    with ssl.create_default_context().wrap_socket(plain, server_hostname=DATABASE) as sock:
        fields = b"user\0anyone\0database\0ledger\0\0"
        sock.sendall(struct.pack("!II", len(fields) + 8, 196608) + fields)
        while (message := read(sock))[0] != b"Z":
            if message[0] == b"E":
                return [message[1].decode(errors="replace")]
        query = b"SELECT current_user\0"
        sock.sendall(b"Q" + struct.pack("!I", len(query) + 4) + query)
        rows = []
        while (message := read(sock))[0] != b"Z":
            if message[0] == b"D":
                rows.append(message[1][6:].decode())
        return rows


def main() -> None:
    """Use everything."""
    os.makedirs(OUTPUT, exist_ok=True)
    results: dict[str, object] = {kind: [curl(kind, form) for form in ("plain", "gzip")] for kind in KINDS}
    results["ledger"] = session()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
