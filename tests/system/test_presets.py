"""Each preset with its real client in a sandbox, against a stand-in of the service. Judged by what arrives there.

It tests `policy/load.py` and the files of `policy/presets/`.
"""

import base64
import gzip
import hashlib
import io
import json
import os
import secrets
import ssl
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from opensandbox.sync.sandbox import SandboxSync

from testbed.internet import Internet
from testbed.packages import NAME, VERSION, index_pages
from testbed.stack import Stack
from testbed.stand_ins import Server, served
from tests.conftest import ON_RUNC

pytestmark = [pytest.mark.system, pytest.mark.images]

TOKEN = f"ghp_{secrets.token_hex(18)}"
SCOPED = "@bank/tools"
DEB = "bank-tools++"


@dataclass
class Received:
    """One request, as it arrived."""

    scheme: str
    host: str
    method: str
    path: str
    authorization: str | None


@dataclass
class Services:
    """The stand-ins. `pages` has the answers by host and path; GitHub's are those of git itself."""

    pages: dict[tuple[str, str], tuple[bytes, str]]
    repositories: Path
    received: list[Received] = field(default_factory=list)

    def asked(self, *hosts: str) -> list[Received]:
        return [one for one in self.received if one.host in hosts]


class Handler(BaseHTTPRequestHandler):
    """One request to any of the services."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing to standard error."""

    def _any(self) -> None:
        services, host = self.server.services, str(self.headers["Host"]).partition(":")[0]
        scheme = "https" if isinstance(self.connection, ssl.SSLSocket) else "http"
        sent = self.headers.get("Authorization")
        services.received.append(Received(scheme, host, self.command, self.path, sent))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if host == "github.com":
            login = base64.b64encode(f"x-access-token:{TOKEN}".encode()).decode()
            return self._git(body) if sent == f"Basic {login}" else self._reply(401, b"", WWW_Authenticate="Basic")
        if host == "api.github.com":
            return self._reply(200 if sent == f"Bearer {TOKEN}" else 401, b'{"login": "agent"}\n')
        found = services.pages.get((host, unquote(urlsplit(self.path).path)))
        if found is None:
            return self._reply(404, b"not found\n")
        return self._reply(200, found[0], Content_Type=found[1])

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = _any

    def _reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _git(self, body: bytes) -> None:
        parts = urlsplit(self.path)
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(self.server.services.repositories),
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": parts.path,
            "QUERY_STRING": parts.query,
            "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "HTTP_GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            "REMOTE_USER": "agent",
            "HOME": str(self.server.services.repositories),
        }
        done = subprocess.run(["git", "http-backend"], input=body, capture_output=True, env=environment, check=False)
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n") if ": " in line)
        status = int(fields.pop("Status", "200").split()[0])
        self._reply(status, content, Content_Type=fields.get("Content-Type", "text/plain"))


def npm_pages() -> dict[tuple[str, str], tuple[bytes, str]]:
    """Return the document and the file of a scoped package."""
    buffer = io.BytesIO()
    files = {"package.json": json.dumps({"name": SCOPED, "version": "1.0.0"}), "index.js": "module.exports = 43;\n"}
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size, entry.mode = len(text), 0o644
            archive.addfile(entry, io.BytesIO(text.encode()))
    tarball, path = buffer.getvalue(), f"/{SCOPED}/-/tools-1.0.0.tgz"
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(tarball).digest()).decode()
    distribution = {"tarball": f"https://registry.npmjs.org{path}", "integrity": integrity}
    version = {"name": SCOPED, "version": "1.0.0", "dist": distribution}
    document = {"name": SCOPED, "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
    host = "registry.npmjs.org"
    return {
        (host, f"/{SCOPED}"): (json.dumps(document).encode(), "application/json"),
        (host, path): (tarball, "application/octet-stream"),
    }


def pypi_pages() -> dict[tuple[str, str], tuple[bytes, str]]:
    """Return the index page, which names the host of the files, and the wheel."""
    (wheel,) = [(path, page) for path, page in index_pages().items() if path.endswith(".whl")]
    file = wheel[0].rpartition("/")[2]
    place = f"/packages/aa/bb/{file}"
    digest = hashlib.sha256(wheel[1][0]).hexdigest()
    page = f'<!DOCTYPE html><a href="https://files.pythonhosted.org{place}#sha256={digest}">{file}</a>'
    return {
        ("pypi.org", f"/simple/{NAME}/"): (page.encode(), "text/html"),
        ("files.pythonhosted.org", place): wheel[1],
    }


def debian_pages(directory: Path) -> dict[tuple[str, str], tuple[bytes, str]]:
    """Return an archive with one package, whose name apt encodes in its requests."""
    root = directory / "deb"
    (root / "DEBIAN").mkdir(parents=True)
    root.chmod(0o755)
    (root / "DEBIAN").chmod(0o755)
    (root / "usr" / "share").mkdir(parents=True)
    (root / "usr" / "share" / "bank-tools").write_text("44\n")
    control = f"Package: {DEB}\nVersion: 1.0~1\nArchitecture: all\nMaintainer: a <a@bank.example>\nDescription: tools\n"
    (root / "DEBIAN" / "control").write_text(control)
    file = directory / "package.deb"
    build = ["dpkg-deb", "--build", "--root-owner-group", str(root), str(file)]
    subprocess.run(build, check=True, capture_output=True)
    package, place = file.read_bytes(), f"pool/main/b/{DEB}_1.0~1_all.deb"
    entry = f"{control}Filename: {place}\nSize: {len(package)}\nSHA256: {hashlib.sha256(package).hexdigest()}\n\n"
    index = gzip.compress(entry.encode())
    listed = f" {hashlib.sha256(index).hexdigest()} {len(index)} main/binary-amd64/Packages.gz\n"
    listed += f" {hashlib.sha256(entry.encode()).hexdigest()} {len(entry)} main/binary-amd64/Packages\n"
    release = "Origin: bank\nSuite: bookworm\nCodename: bookworm\nArchitectures: amd64\nComponents: main\n"
    release += f"Date: Thu, 01 Jan 2026 00:00:00 UTC\nSHA256:\n{listed}"
    kind, base = "application/octet-stream", "/debian/dists/bookworm"
    pages = {
        f"{base}/Release": release.encode(),
        f"{base}/main/binary-amd64/Packages.gz": index,
        f"{base}/main/binary-amd64/Packages": entry.encode(),
        f"/debian/{place}": package,
    }
    return {("deb.debian.org", path): (page, kind) for path, page in pages.items()}


def repositories(directory: Path) -> Path:
    """Make a bare repository with one commit, into which can be pushed."""
    place, bare = directory / "work", directory / "owner" / "ledger.git"
    names = {f"GIT_{which}_{what}": "agent" for which in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {"PATH": os.environ["PATH"], "HOME": str(directory), **names}

    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], check=True, capture_output=True, env=environment)

    git("init", "-q", "-b", "main", str(place))
    (place / "ledger.txt").write_text("the ledger\n")
    git("-C", str(place), "add", ".")
    git("-C", str(place), "commit", "-qm", "open")
    git("clone", "-q", "--bare", str(place), str(bare))
    git("-C", str(bare), "config", "http.receivepack", "true")
    return directory


@pytest.fixture(scope="module", name="services")
def _services(internet: Internet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    directory = tmp_path_factory.mktemp("services")
    pages = {**pypi_pages(), **npm_pages(), **debian_pages(directory)}
    made = Services(pages, repositories(directory))
    with served(internet, Handler, made, plain=True):
        yield made


@pytest.fixture(name="sandbox")
def _sandbox(stack: Stack, services: Services, runtime: str) -> Iterator[SandboxSync]:
    services.received.clear()
    stack.sallyport(*("vault", "put", "github-token", "--host", "github.com", "--host", "api.github.com"), stdin=TOKEN)
    made = stack.create(runtime, policy="installing")
    try:
        yield made
    finally:
        made.kill()
        made.close()
        stack.sallyport("vault", "delete", "github-token")


def done(sandbox: SandboxSync, command: str) -> str:
    """Run a command that must succeed; return its output."""
    printed = sandbox.commands.run(f"{command} 2>&1 && echo && echo succeeded").text
    assert printed.strip().endswith("succeeded"), printed
    return printed


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_each_client_works_under_its_preset(sandbox: SandboxSync, services: Services) -> None:
    """pip, npm, git, curl and apt with their own default addresses. Only GitHub receives the token."""
    done(sandbox, f"pip install -q --disable-pip-version-check --target /tmp/site {NAME}=={VERSION}")
    assert "42" in done(sandbox, "PYTHONPATH=/tmp/site python3 -c 'import bank_tools; print(bank_tools.ANSWER)'")
    done(sandbox, f"mkdir -p /tmp/n && cd /tmp/n && npm install --no-audit --no-fund --loglevel=error {SCOPED}")
    assert "43" in done(sandbox, f"cd /tmp/n && node -p 'require(\"{SCOPED}\")'")
    git = "git -c user.name=a -c user.email=a@bank.example"
    done(sandbox, f"cd /tmp && {git} clone -q https://github.com/owner/ledger.git")
    done(sandbox, f"cd /tmp/ledger && echo more >>ledger.txt && {git} commit -qam more && {git} push -q")
    assert "agent" in done(sandbox, "curl -sSf -X PATCH https://api.github.com/user")
    sources = "deb [trusted=yes] http://deb.debian.org/debian bookworm main"
    done(sandbox, f"echo '{sources}' >/tmp/sources.list")
    only = "-o Dir::Etc::sourcelist=/tmp/sources.list -o Dir::Etc::sourceparts=/dev/null -o APT::Sandbox::User=root"
    done(sandbox, f"apt-get -q {only} update")
    done(sandbox, f"apt-get -q -y {only} install '{DEB}'")
    assert "44" in done(sandbox, "cat /usr/share/bank-tools")

    for host in ("pypi.org", "files.pythonhosted.org", "registry.npmjs.org", "github.com", "api.github.com"):
        assert {"https"} == {one.scheme for one in services.asked(host)}, host
    assert {"http"} == {one.scheme for one in services.asked("deb.debian.org")}
    assert any("%2b%2b" in one.path for one in services.asked("deb.debian.org"))
    assert any("%2f" in one.path for one in services.asked("registry.npmjs.org"))
    assert {"github.com", "api.github.com"} == {one.host for one in services.received if one.authorization}
    assert TOKEN not in str(sandbox.commands.run("env; cat /tmp/ledger/.git/config").text)


REFUSED = {
    "an upload to the index": "-X POST https://pypi.org/simple/x/",
    "a page of the index": "https://pypi.org/account/login/",
    "a publication of a package": "-X PUT https://registry.npmjs.org/x",
    "a POST request to an archive": "-X POST http://deb.debian.org/debian/",
}


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_what_a_preset_does_not_allow_does_not_arrive(sandbox: SandboxSync, services: Services) -> None:
    """The control arrives."""
    done(sandbox, "curl -sS -o /dev/null https://pypi.org/simple/x/")
    assert ["/simple/x/"] == [one.path for one in services.received]
    for name, arguments in REFUSED.items():
        printed = done(sandbox, f"curl -sS -w '%{{http_code}}' {arguments}")
        assert "Denied by policy rule" in printed and "403" in printed, name
    assert ["/simple/x/"] == [one.path for one in services.received]
