"""Each `osb` command in the README of the published command line, as it is written there, in its order.

Replaced are the address, the key and the names in angle brackets, which are those that earlier commands printed. The
files that the README supposes are made here. The image is one with `python` under the name of the examples. Commands
that cannot succeed here have the error that they end with.

It tests `lifecycle/serve.py` and `lifecycle/api/routes/`.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.stack import IMAGE, Stack
from tests.contracts.test_published_clients import ANSWER_SECONDS, HERE, Lines, Osb
from tests.stacks import beside

pytestmark = [pytest.mark.system, pytest.mark.extended]

_IMAGE = "python:3.12"
_TEMPLATES = "FSB::API_NOT_SUPPORTED"
REFUSED = {
    "osb template create --image": _TEMPLATES,
    "osb template create -f": _TEMPLATES,
    "osb template get": _TEMPLATES,
    "osb template list": _TEMPLATES,
    "osb template delete": _TEMPLATES,
    "osb sandbox create --template": _TEMPLATES,
    "osb sandbox create --image my-registry.example.com/team/app:latest": "DOCKER::SANDBOX_IMAGE_PULL_FAILED",
    "osb command run <sandbox-id> -o raw -- curl -I https://pypi.org": "CommandExecError",
}
"""The error of each command that cannot succeed: there are no templates, no such registry, and no such host."""
_CREATE = f"osb sandbox create --image {_IMAGE} --timeout 30m -o json"
_PROXIED = f"osb sandbox create --image {_IMAGE} --network-policy-file network-policy.json --credential-proxy -o json"
_PREPARE = (
    "mkdir -p /workspace; cd /workspace; echo pass >main.py; echo old >app.py; echo >script.sh; echo 1 >result.json"
)
NEEDED = {
    "osb sandbox kill": (_CREATE,),
    "osb sandbox create --snapshot-id": ("osb snapshot create <sandbox-id> --name golden -o json",),
    "osb command session create": ("osb file mkdir <sandbox-id> /workspace",),
    "osb file upload": (f"osb command run <sandbox-id> -- sh -c '{_PREPARE}'",),
    "osb credential-vault create": (_PROXIED,),
    "osb file cat": ('osb file write <sandbox-id> /workspace/hello.txt -c "hello" -o json',),
    "osb sandbox endpoint": ("osb sandbox resume <sandbox-id>",),
}
"""What the README supposes to have been done before a command."""
FILES = {
    "network-policy.json": '{"defaultAction": "deny", "egress": [{"action": "allow", "target": "api.example.com"}]}',
    "volumes.json": '[{"name": "v", "mountPath": "/data", "pvc": {"claimName": "readme"}}]',
    "vault.yaml": """
credentials: [{name: token, source: {value: of-the-example}}]
bindings: [{name: api, match: {hosts: [api.example.com]}, auth: {type: bearer, credential: token}}]
""",
    "mutation.yaml": "credentials: {replace: [{name: token, source: {value: another-value}}]}\n",
    "local.txt": "local\n",
}


def _readme(clients: Path) -> str:
    (found,) = clients.glob("osb/lib/python*/site-packages/opensandbox_cli-*.dist-info/METADATA")
    return found.read_text()


def commands(readme: str) -> list[str]:
    """Return the lines of the README that call `osb`; a line that continues is one."""
    blocks = re.findall(r"```bash\n(.*?)```", readme, re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(" +", " ", line).strip() for line in lines if line.startswith("osb ")]


class Terminal:
    """Runs the commands of the README. It knows what was printed under the names in angle brackets."""

    def __init__(self, osb: Osb, server: Stack) -> None:
        self._osb = osb
        self._names = {"<your-api-key>": server.api_key, "<token>": "token-of-the-example", "<template-id>": "tpl_x"}
        self._address = f"127.0.0.1:{server.port}"
        self.made: list[str] = []

    def run(self, command: str) -> tuple[int, str]:
        """Run a command; return its exit code and all that it printed."""
        for name, value in {**self._names, "localhost:8080": self._address}.items():
            command = command.replace(name, value)
        code, out, err = self._osb(*shlex.split(command)[1:])
        if code == 0:
            self._learn(command, out)
        if command.startswith("osb snapshot create"):
            self._ready()
        return code, out + err

    def _ready(self) -> None:
        deadline = time.monotonic() + ANSWER_SECONDS
        while '"Creating"' in self.run("osb snapshot get <snapshot-id> -o json")[1]:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def _learn(self, command: str, out: str) -> None:
        wanted = {
            "osb sandbox create": ("<sandbox-id>", "id"),
            "osb snapshot create": ("<snapshot-id>", "id"),
            "osb command session create": ("<session-id>", "session_id"),
        }
        if "--background" in command:
            self._names["<execution-id>"] = json.loads(out)["execution_id"]
        for start, (name, key) in wanted.items():
            if command.startswith(start):
                match = re.search(rf'"?{key}"?\W+((?:sbx|snap|bash|[0-9a-f]{{4,}})[\w-]+)', out)
                assert match is not None, out
                self._names[name] = match[1]
                if key == "id" and "sandbox" in name:
                    self.made.append(match[1])

    def needs(self, commands: tuple[str, ...]) -> None:
        """Run what must have been done before a command."""
        for command in commands:
            code, said = self.run(command)
            assert 0 == code, said

    def name(self, name: str) -> str:
        """Return what stands for a name in angle brackets."""
        return self._names[name]


@pytest.fixture(scope="module", name="server")
def _server() -> Iterator[Stack]:
    with beside(Stack, "osb") as server:
        assert 0 == server.docker("create", "--name", "made", IMAGE, "true").returncode
        link = server.directory / "python"
        link.symlink_to("/usr/bin/python3")
        assert 0 == server.docker("cp", str(link), "made:/usr/local/bin/python").returncode
        assert 0 == server.docker("commit", "made", _IMAGE).returncode
        assert 0 == server.docker("rm", "made").returncode
        server.permit_images(_IMAGE)
        yield server


@pytest.fixture(name="place")
def _place(tmp_path: Path) -> Path:
    """Return the current directory of the user, with the files that the README supposes."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture(name="osb")
def _osb(place: Path) -> Iterator[Osb]:
    """Run `osb` for a user without its variables. The README sets the address and the key in its configuration."""
    clients = Path(os.environ["SALLYPORT_CLIENTS"])
    environment = {"PATH": os.environ["PATH"], "HOME": str(place / "home"), "NO_COLOR": "1", "COLUMNS": "200"}
    (place / "home").mkdir()
    command: list[str | Path] = ["env", "-C", place, clients / "osb/bin/python", HERE / "osb_calls.py"]
    lines = Lines(command, environment, place / "log")
    try:
        yield Osb(lines, place)
    finally:
        lines.end()


def test_each_command_of_the_readme_works_or_says_what_cannot_be(server: Stack, osb: Osb, place: Path) -> None:
    clients = Path(os.environ["SALLYPORT_CLIENTS"])
    readme = _readme(clients)
    request, template, *_ = re.findall(r"```json\n(.*?)```", readme, re.DOTALL)
    (place / "sandbox-request.json").write_text(request)
    (place / "template-request.json").write_text(template)
    terminal = Terminal(osb, server)
    written = commands(readme)
    assert 90 < len(written)
    wrong = []
    for command in written:
        command = command.replace("/tmp/dev.toml", str(place / "dev.toml"))
        if "--watch" in command:
            continue  # the next test
        error = next((error for start, error in REFUSED.items() if command.startswith(start)), None)
        if command.startswith("osb sandbox kill"):
            assert 0 == terminal.run(command)[0]
        for start, needed in NEEDED.items():
            if command.startswith(start):
                terminal.needs(needed)
        if command.startswith("osb sandbox kill"):
            continue
        code, said = terminal.run(command)
        if (code, error) != (0, None) and (code == 0 or error is None or error not in "".join(said.split())):
            wrong.append((command, code, said[-300:]))
    for sandbox in terminal.made:
        osb("sandbox", "kill", sandbox)
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.extended
def test_metrics_are_watched_until_an_interrupt(server: Stack, osb: Osb) -> None:
    """The one command of the README that does not end by itself."""
    terminal = Terminal(osb, server)
    terminal.run("osb config init")
    terminal.run("osb config set connection.domain localhost:8080")
    terminal.run("osb config set connection.api_key <your-api-key>")
    assert 0 == terminal.run(f"osb sandbox create --image {_IMAGE} --timeout 30m -o json")[0]
    clients, sandbox = Path(os.environ["SALLYPORT_CLIENTS"]), terminal.name("<sandbox-id>")
    command = [
        "env",
        "--default-signal=INT",
        str(clients / "osb/bin/osb"),
        "sandbox",
        "metrics",
        sandbox,
        "--watch",
        "-o",
        "raw",
    ]
    environment = {"PATH": os.environ["PATH"], "HOME": str(osb.place / "home"), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True) as run:
        assert run.stdout is not None
        assert "cpu" in run.stdout.readline()
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=30)
    assert 0 == terminal.run(f"osb sandbox kill {sandbox}")[0]
