"""The packages that the demo internet's index publishes, in the formats of pip and npm."""

import base64
import hashlib
import io
import json
import tarfile
import zipfile

from testbed.internet import INDEX

PACKAGE = "bank_tools"
VERSION = "1.0"
NPM_VERSION = "1.0.0"
NAME = PACKAGE.replace("_", "-")
_WHEEL = f"{PACKAGE}-{VERSION}-py3-none-any.whl"
SCOPED = "@bank/tools"
_TARBALLS = {NAME: f"/npm/{NAME}/-/{NAME}-{NPM_VERSION}.tgz", SCOPED: f"/npm/{SCOPED}/-/tools-{NPM_VERSION}.tgz"}


def _wheel() -> bytes:
    info = f"{PACKAGE}-{VERSION}.dist-info"
    files = {
        f"{PACKAGE}.py": "ANSWER = 42\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: demo\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record += f"{name},sha256={digest},{len(text)}\n"
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return buffer.getvalue()


def _tarball(name: str) -> bytes:
    files = {
        "package/package.json": json.dumps({"name": name, "version": NPM_VERSION, "main": "index.js"}),
        "package/index.js": "module.exports = 42;\n",
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text), 0o644
            archive.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


def index_pages() -> dict[str, tuple[bytes, str]]:
    """Return each path of the index with its content and type: PEP 503 at `/simple/`, npm's registry at `/npm/`.

    npm asks for a scoped package at a path in which the slash of its name is encoded.
    """
    wheel = _wheel()
    digest = hashlib.sha256(wheel).hexdigest()
    page = f'<!DOCTYPE html><html><body><a href="/files/{_WHEEL}#sha256={digest}">{_WHEEL}</a></body></html>'
    pages = {
        f"/simple/{NAME}/": (page.encode(), "text/html"),
        f"/files/{_WHEEL}": (wheel, "application/octet-stream"),
    }
    for name, place in _TARBALLS.items():
        tarball = _tarball(name)
        distribution = {
            "tarball": f"https://{INDEX}{place}",
            "integrity": "sha512-" + base64.b64encode(hashlib.sha512(tarball).digest()).decode(),
        }
        document = {
            "name": name,
            "dist-tags": {"latest": NPM_VERSION},
            "versions": {NPM_VERSION: {"name": name, "version": NPM_VERSION, "dist": distribution}},
        }
        pages[f"/npm/{name.replace('/', '%2f')}"] = (json.dumps(document).encode(), "application/json")
        pages[place] = (tarball, "application/octet-stream")
    return pages
