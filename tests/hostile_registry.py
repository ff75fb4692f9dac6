"""A registry of an attacker: `python -m tests.hostile_registry CERTIFICATE ADDRESS PORT NOTES`.

It demands a login and accepts none, serves one small image, and sends its client for the layer to the place that the
tag names. Each request is noted, one JSON object a line.
"""

import json
import ssl
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.image_files import DOCKER, ImageFile, digest

PLACES = {"metadata": "http://169.254.169.254/latest/", "attacker": "http://www.attacker.example/layer"}
NOTES = Path()


def image(tag: str) -> ImageFile:
    """Return an image of its own for each tag."""
    return ImageFile(changes={"author": tag})


class Evil(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing to standard error."""

    def do_GET(self) -> None:
        with NOTES.open("a") as notes:
            notes.write(json.dumps({"path": self.path, "login": self.headers.get("Authorization")}) + "\n")
        if self.path == "/v2/":
            self._answer(200, b"{}")
            return
        tag = self.path.split("/")[3]
        manifest, blobs = image(tag).blobs(kind=DOCKER)
        wanted = self.path.rpartition("/")[2]
        if "/manifests/" in self.path:
            self._answer(200, manifest, kind=f"{DOCKER}distribution.manifest.v2+json")
        elif wanted == image(tag).id:
            self._answer(200, blobs[wanted])
        else:
            self._answer(307, b"", location=PLACES[tag])

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, kind: str = "application/octet-stream", location: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Docker-Content-Digest", digest(body))
        if location:
            self.send_header("Location", location)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def main(certificate: str, address: str, port: str, notes: str) -> None:
    """Serve until killed."""
    global NOTES
    NOTES = Path(notes)
    NOTES.touch()
    server = ThreadingHTTPServer((address, int(port)), Evil)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    print("ready", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
