"""Responses of a server that returns a secret, in every form that HTTP has for it.

Each form has the bytes of a complete response, in the pieces in which they are written, and whether the connection
ends with it. The demo API sends them from `/v1/echo?form=NAME`.
"""

import base64
import gzip
import html
import json
import zlib
from collections.abc import Callable
from urllib.parse import quote

import brotli  # type: ignore[import-untyped]
import zstandard

from testbed.internet import ATTACKER, METADATA_ADDRESS

type Pieces = list[bytes]

_ENCODED: dict[str, Callable[[str], bytes]] = {
    "plain": str.encode,
    "twice": lambda secret: f"{secret}{secret}".encode(),
    "json": lambda secret: json.dumps({"token": secret}).encode(),
    "json-unicode": lambda secret: "".join(f"\\u{ord(character):04x}" for character in secret).encode(),
    "percent": lambda secret: quote(secret, safe="").encode(),
    "percent-all": lambda secret: "".join(f"%{byte:02x}" for byte in secret.encode()).encode(),
    "html": lambda secret: html.escape(secret).encode(),
    "hex": lambda secret: secret.encode().hex().encode(),
    "hex-upper": lambda secret: secret.encode().hex().upper().encode(),
    "base64-0": lambda secret: base64.b64encode(secret.encode()),
    "base64-1": lambda secret: base64.b64encode(b"-" + secret.encode() + b"--"),
    "base64-2": lambda secret: base64.b64encode(b"--" + secret.encode() + b"-"),
    "base64-url": lambda secret: base64.urlsafe_b64encode(b"Bearer " + secret.encode()),
}
_COMPRESSED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "gzip-twice": ("gzip, gzip", lambda body: gzip.compress(gzip.compress(body))),
    "deflate": ("deflate", zlib.compress),
    "deflate-raw": ("deflate", lambda body: zlib.compress(body, wbits=-15)),
    "br": ("br", brotli.compress),
    "zstd": ("zstd", lambda body: zstandard.ZstdCompressor().compress(body)),
    "gzip-called-br": ("br", gzip.compress),
    "gzip-cut": ("gzip", lambda body: gzip.compress(body)[:-9]),
    "plain-called-gzip": ("gzip", lambda body: body),
    "unknown-coding": ("x-none", lambda body: body),
    "gzip-then-plain": ("gzip", lambda body: gzip.compress(b"nothing") + body),
    "four-layers": ("gzip, gzip, gzip, gzip", lambda body: gzip.compress(gzip.compress(gzip.compress(body)))),
}
_HEADERS = {
    "header": "X-Echo: {}",
    "header-name": "X-{}: 1",
    "cookie": "Set-Cookie: s={}; Path=/",
    "location": "Location: https://elsewhere.example/?t={}",
    "challenge": 'WWW-Authenticate: Bearer realm="{}"',
    "etag": 'ETag: "{}"',
    "disposition": 'Content-Disposition: attachment; filename="{}"',
    "alt-svc": 'Alt-Svc: h3="{}.example:443"',
    "link": "Link: <https://elsewhere.example/{}>; rel=preload",
    "refresh": "Refresh: 0; url=https://elsewhere.example/{}",
    "header-folded": "X-Echo: a\r\n {}",
}
_STATUSES = {
    "204": "204 No Content",
    "304": "304 Not Modified",
    "401": "401 Unauthorized",
    "404": "404 Not Found",
    "500": "500 Internal Server Error",
}

PAUSE = b""
"""Instead of a piece: a pause in which nothing is sent."""

REDIRECTS = {
    "attacker": f"https://{ATTACKER}/taken",
    "metadata": f"http://{METADATA_ADDRESS}/latest/meta-data/",
    "plain": "http://api.bank.example/v1/plain",
}
"""The targets of `/v1/redirect?to=NAME&status=CODE`."""


def _whole(status: str, body: bytes, *fields: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", "Content-Type: text/plain", f"Content-Length: {len(body)}", *fields]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def _chunked(body: bytes, size: int, trailers: bytes = b"") -> Pieces:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return [head, *(b"%x\r\n%s\r\n" % (len(part), part) for part in parts), b"0\r\n" + trailers + b"\r\n"]


def mirror(body: bytes, first: int) -> Pieces:
    """Return the client's bytes as a response: the first ones, and after a pause the others."""
    head, *_ = _chunked(b"", 1)
    parts = (b"%x\r\n%s\r\n" % (len(part), part) if part else b"" for part in (body[:first], body[first:]))
    before, after = parts
    return [head + before, PAUSE, after + b"0\r\n\r\n"]


def forms(secret: str) -> dict[str, tuple[Pieces, bool]]:
    """Return every response that contains `secret`, by name."""
    body = f"you sent {secret} to me\n".encode()
    raw = secret.encode()
    made: dict[str, tuple[Pieces, bool]] = {
        name: ([_whole("200 OK", b"<" + encode(secret) + b">\n")], False) for name, encode in _ENCODED.items()
    }
    for name, (label, compress) in _COMPRESSED.items():
        made[name] = ([_whole("200 OK", compress(body), f"Content-Encoding: {label}")], False)
    for name, line in _HEADERS.items():
        made[name] = ([_whole("200 OK", b"ok\n", line.format(secret))], False)
    for name, status in _STATUSES.items():
        empty = name in ("204", "304")
        made[f"status-{name}"] = ([_whole(status, b"" if empty else body, f"X-Echo: {secret}")], False)
    for size in (1, 3, len(raw)):
        made[f"chunks-of-{size if size < len(raw) else 'all'}"] = (_chunked(body, size), False)
    half = body.index(raw) + len(raw) // 2
    made |= {
        "trailers": (_chunked(b"ok\n", 3, f"X-Echo: {secret}\r\n".encode()), False),
        "chunk-extension": (
            [
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
                b"3;note=" + raw + b"\r\nok\n\r\n0\r\n\r\n",
            ],
            True,
        ),
        "early-hints": (
            [f"HTTP/1.1 103 Early Hints\r\nLink: </{secret}>; rel=preload\r\n\r\n".encode(), _whole("200 OK", b"ok\n")],
            False,
        ),
        "continue": (
            [f"HTTP/1.1 100 {secret}\r\nX-Echo: {secret}\r\n\r\n".encode(), _whole("200 OK", b"ok\n")],
            False,
        ),
        "many-informational": ([f"HTTP/1.1 102 {secret}\r\n\r\n".encode() * 64, _whole("200 OK", b"ok\n")], True),
        "reason": ([_whole(f"200 {secret}", b"ok\n")], False),
        "until-the-end": ([b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", body], True),
        "cut-short": ([_whole("200 OK", body)[: -(len(body) - half)]], True),
        "cut-properly": ([_whole("200 OK", body[:half])], False),
        "in-two-writes": ([_whole("200 OK", body)[: -(len(body) - half)], body[half:]], False),
        "second-response": ([_whole("200 OK", b"ok\n") + _whole("200 OK", body)], False),
        "length-and-chunks": (
            [
                b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
                b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n",
            ],
            True,
        ),
        "two-lengths": ([b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 200\r\n\r\n" + body], True),
        "upgrade": (
            [b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n" + body],
            True,
        ),
        "version-0.9": ([body], True),
        "bare-lf": ([b"HTTP/1.1 200 OK\nX-Echo: " + raw + b"\nContent-Length: 3\n\nok\n"], True),
        "body-after-204": ([b"HTTP/1.1 204 No Content\r\n\r\n" + body], True),
        "body-after-304": ([b"HTTP/1.1 304 Not Modified\r\nContent-Length: 64\r\n\r\n" + body], True),
    }
    return made
