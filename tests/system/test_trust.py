"""Each common client trusts the sandbox's CA without an option of its own: as root, as another user, in any image.

Each request goes to an inspected host, for which the gateway issues the certificate. It is judged where it arrives:
with the secret that the gateway injected. The control runs the same client with other trust anchors, those of the far
end itself: then nothing arrives.
It tests `runtimes/engine/dockerd.py`.
"""

import base64
import io
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from opensandbox.models.execd import RunCommandOpts
from opensandbox.sync.sandbox import SandboxSync

from demo.sandboxes import Secrets
from runtimes.engine.containers import CA_VARIABLES, JAVA_STORE
from runtimes.engine.java_store import java_store
from testbed.internet import API, GIT, INDEX, Internet, received_field
from testbed.stack import CODE_ENTRYPOINT, IMAGE, Stack
from tests.conftest import ON_RUNC, representatives

pytestmark = [pytest.mark.system, pytest.mark.images]

SMALL, JAVA = "trust/small", "trust/java"
OTHER, OTHER_JAVA = "/tmp/other.pem", "/tmp/other.jks"
USERS = (0, 65534)
URL = f"https://{API}/v1/trust"
_PIP = (
    "install -q --disable-pip-version-check --root-user-action ignore --no-cache-dir --retries 0 --force-reinstall "
    f"--index-url https://{INDEX}/simple/ bank-tools"
)
_VENV = "/opt/venv"
"""A virtual environment of the base sandbox, made once: its pip has its own requests and certifi."""
_IMPORT = "-c 'import bank_tools; print(bank_tools.ANSWER)'"
_NPM = f"npm install --no-audit --no-fund --no-update-notifier --fetch-retries 0 --registry https://{INDEX}/npm/"
_PYTHON = {
    "urllib": f"import urllib.request as r; print(r.urlopen('{URL}', timeout=20).status)",
    "requests": f"import requests; print(requests.get('{URL}', timeout=20).status_code)",
    "httpx": f"import httpx; print(httpx.get('{URL}', timeout=20).status_code)",
}
_GO = """package main

import (
	"fmt"
	"net/http"
	"os"
)

func main() {
	answer, err := http.Get(os.Args[1])
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(answer.StatusCode)
}
"""
_JAVA = """
import java.net.*;
import java.net.http.*;

public class Trust {
    public static void main(String[] arguments) throws Exception {
        URI place = URI.create(arguments[1]);
        if (arguments[0].equals("HttpClient")) {
            HttpClient client = HttpClient.newHttpClient();
            HttpRequest request = HttpRequest.newBuilder(place).build();
            System.out.println(client.send(request, HttpResponse.BodyHandlers.ofString()).statusCode());
        } else {
            System.out.println(((HttpURLConnection) place.toURL().openConnection()).getResponseCode());
        }
    }
}
"""


@dataclass(frozen=True, slots=True)
class Client:
    """A command, its output if it worked, and the first path that it requests from its host."""

    command: str
    printed: str = "200"
    host: str = API
    path: str = "/v1/trust"


_SIMPLE = "/simple/bank-tools/"
CLIENTS = {
    "curl": Client(f"curl -sS --max-time 20 -o /dev/null -w '%{{http_code}}' {URL}"),
    "git": Client(
        f"git clone -q https://{GIT}/ledger.git x && cat x/ledger.txt", "ledger", GIT, "/ledger.git/info/refs"
    ),
    "pip": Client(f"pip {_PIP} && python3 {_IMPORT}", "42", INDEX, _SIMPLE),
    "venv": Client(
        f"{_VENV}/bin/pip {_PIP} --target v && PYTHONPATH=v {_VENV}/bin/python {_IMPORT}", "42", INDEX, _SIMPLE
    ),
    "npm": Client(f"{_NPM} bank-tools && node -p 'require(\"bank-tools\")'", "42", INDEX, "/npm/bank-tools"),
    "node https": Client(f"""node -e 'require("https").get("{URL}", answer => console.log(answer.statusCode))'"""),
    "node fetch": Client(f"""node -e 'fetch("{URL}").then(answer => console.log(answer.status))'"""),
    **{name: Client(f'python3 -c "{code}"') for name, code in _PYTHON.items()},
}
REPEATED = {"venv", "node fetch", "node https", "httpx"}
"""Clients with the library of another one."""
_OTHER_ANCHORS = dict.fromkeys(CA_VARIABLES, OTHER) | {
    # Git and Go read the directory of the mounted bundle too.
    "GIT_SSL_CAPATH": "/tmp/none",
    "SSL_CERT_DIR": "/tmp/none",
    "JAVA_TOOL_OPTIONS": f"-Djavax.net.ssl.trustStore={OTHER_JAVA}",
}
_GO_CLIENT = Client(f"/tmp/trust {URL}")
_DENO_CLIENT = Client(f"""deno eval 'console.log((await fetch("{URL}")).status)'""")
_JAVA_CLIENTS = [Client(f"java /tmp/Trust.java {kind} {URL}") for kind in ("HttpClient", "URLConnection")]


class Place:
    """A sandbox, and its requests that arrive at the far end."""

    def __init__(self, sandbox: SandboxSync, internet: Internet, values: Secrets) -> None:
        self._sandbox, self._internet, self._values = sandbox, internet, values
        for path, content in (
            (OTHER, internet.roots.read_bytes()),
            (OTHER_JAVA, java_store(internet.roots.read_text())),
        ):
            sandbox.files.write_file(path, content)

    def run(self, command: str, user: int | None = None, **envs: str) -> tuple[int | None, str]:
        """Run a command in a new directory of its user."""
        options = RunCommandOpts(timeout=timedelta(seconds=180), uid=user, gid=user, envs=envs or None)
        wrapped = f"HOME=$(mktemp -d 2>/dev/null || echo /) && export HOME && cd && {command}"
        execution = self._sandbox.commands.run(wrapped, opts=options)
        printed = "".join(message.text for message in (*execution.logs.stdout, *execution.logs.stderr))
        return execution.exit_code, printed

    def judge(self, client: Client, user: int | None = None) -> None:
        """The client's request arrives with its secret. With other anchors it fails, and nothing arrives."""
        code, printed, arrived = self._try(client, user)
        assert (0, True) == (code, client.printed in printed), printed
        assert {self._authorization(client.host)} == arrived
        code, printed, arrived = self._try(client, user, **_OTHER_ANCHORS)
        assert (True, set()) == (code != 0, arrived), printed

    def _try(self, client: Client, user: int | None, **envs: str) -> tuple[int | None, str, set[str]]:
        mark = len(self._internet.notes())
        code, printed = self.run(client.command, user, **envs)
        notes = [note for note in self._internet.notes()[mark:] if "target" in note and note["host"] == client.host]
        asked = [note for note in notes if str(note["target"]).startswith(client.path)]
        return code, printed, {received_field(note, "Authorization") or "none" for note in asked}

    def _authorization(self, host: str) -> str:
        if host == API:
            return f"Bearer {self._values.api}"
        pair = self._values.git if host == GIT else self._values.index
        return "Basic " + base64.b64encode(pair.encode()).decode()


@contextmanager
def made(stack: Stack, internet: Internet, values: Secrets, runtime: str, **options: Any) -> Iterator[Place]:
    sandbox = stack.create(runtime, **options)
    try:
        yield Place(sandbox, internet, values)
    finally:
        sandbox.kill()
        sandbox.close()


@pytest.fixture(scope="module", params=ON_RUNC, name="base")
def _base(request: pytest.FixtureRequest, stack: Stack, internet: Internet, values: Secrets) -> Iterator[Place]:
    with made(stack, internet, values, request.param, image=IMAGE) as place:
        place._sandbox.files.write_file("/tmp/httpx.tar", _httpx())
        site = "/usr/local/lib/python3.11/dist-packages"
        assert 0 == place.run(f"mkdir -p {site} && tar -C {site} -xf /tmp/httpx.tar")[0]
        code, printed = place.run(f"python3 -m venv {_VENV}")
        assert 0 == code, printed
        yield place


def _httpx() -> bytes:
    """httpx and its dependencies, from the tests' environment: pure Python."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("httpx", "httpcore", "h11", "anyio", "idna", "certifi", "typing_extensions"):
            found = find_spec(name)
            assert found is not None and found.origin is not None
            path = Path(found.origin)
            source = path.parent if path.name == "__init__.py" else path
            archive.add(source, source.name, filter=lambda entry: None if "__pycache__" in entry.name else entry)
    return buffer.getvalue()


@pytest.fixture(scope="module", name="go_program")
def _go_program(stack: Stack, code_image: str, internet: Internet, values: Secrets) -> bytes:
    """The Go client, built in the code-interpreter image: one static file."""
    with made(stack, internet, values, "runc", image=code_image, entrypoint=CODE_ENTRYPOINT) as place:
        place._sandbox.files.write_file("/tmp/main.go", _GO)
        code, printed = place.run("CGO_ENABLED=0 go build -ldflags='-s -w' -o /tmp/trust /tmp/main.go")
        assert 0 == code, printed
        return place._sandbox.files.read_bytes("/tmp/trust")


@pytest.fixture(scope="module", name="images")
def _images(stack: Stack) -> Iterator[None]:
    """Images of users: one without any certificate, and one with Debian's Java that does not run as root."""
    path = "ENV PATH=/usr/local/bin:/usr/bin:/bin"
    small, java = os.environ["SALLYPORT_SMALL_IMAGE"], os.environ["SALLYPORT_JAVA_IMAGE"]
    assert 0 == stack.docker("import", "-c", path, small, SMALL).returncode
    assert 0 == stack.docker("import", "-c", path, "-c", "USER 1234:1235", java, JAVA).returncode
    stack.permit_images(SMALL, JAVA)
    yield
    stack.remove_images(SMALL, JAVA)


@pytest.mark.parametrize("name", representatives(CLIENTS, *(set(CLIENTS) - REPEATED)))
def test_a_client_of_the_base_image_trusts_its_gateway(base: Place, name: str) -> None:
    for user in USERS:
        base.judge(CLIENTS[name], user)


@pytest.mark.extended
def test_go_trusts_its_gateway_in_an_image_without_certificates(
    runtime: str, stack: Stack, internet: Internet, values: Secrets, images: None, go_program: bytes
) -> None:
    with made(stack, internet, values, runtime, image=SMALL) as place:
        place._sandbox.files.write_file("/tmp/trust", go_program, mode=755)
        for user in USERS:
            place.judge(_GO_CLIENT, user)


@pytest.mark.extended
@pytest.mark.parametrize("runtime", ON_RUNC)
def test_java_of_a_users_image_trusts_its_gateway(
    runtime: str, stack: Stack, internet: Internet, values: Secrets, images: None
) -> None:
    with made(stack, internet, values, runtime, image=JAVA) as place:
        assert "1234" == place.run("id -u")[1].strip()
        place._sandbox.files.write_file("/tmp/Trust.java", _JAVA)
        for client in _JAVA_CLIENTS:
            place.judge(client)
        listed = place.run(f"keytool -list -keystore {JAVA_STORE} -storepass changeit")
        assert (0, True) == (listed[0], "contains 2 entries" in listed[1]), listed[1]


@pytest.mark.extended
def test_the_code_interpreter_image_trusts_its_gateway(
    runtime: str, stack: Stack, code_image: str, internet: Internet, values: Secrets, go_program: bytes
) -> None:
    """Its Java, its Deno, and a program of its Go."""
    with made(stack, internet, values, runtime, image=code_image, entrypoint=CODE_ENTRYPOINT) as place:
        place._sandbox.files.write_file("/tmp/Trust.java", _JAVA)
        place._sandbox.files.write_file("/tmp/trust", go_program, mode=755)
        for client in (*_JAVA_CLIENTS, _DENO_CLIENT, _GO_CLIENT, CLIENTS["requests"], CLIENTS["npm"]):
            place.judge(client, None if client is not _JAVA_CLIENTS[0] else USERS[1])
