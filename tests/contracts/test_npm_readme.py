"""Each TypeScript example in the README of the published npm SDK, as it is written there, on both runtimes.

Replaced are the address and the key. Imports stand at the begin of a program; an example that continues an earlier one
is in a block after it. The image names are aliases that an operator adds. OSSFS is refused, as Docker has none.

It tests `lifecycle/serve.py` and `lifecycle/api/routes/`.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.stack import IMAGE, Stack
from tests.stacks import beside

pytestmark = [pytest.mark.system, pytest.mark.extended]

_PACKAGE = "node_modules/@alibaba-group/opensandbox"
_EXAMPLES = 13
_ALIASES = ("ubuntu", "nginx:latest", "python:3.11")
_IMPORTS = 'import { ConnectionConfig, Sandbox, SandboxException, SandboxManager } from "@alibaba-group/opensandbox";\n'
_CONFIG = 'const config = new ConnectionConfig({ domain: "api.opensandbox.io", apiKey: "your-api-key" });\n'
_TYPE = 'import type { ExecutionHandlers } from "@alibaba-group/opensandbox";\n'
_END = "await sandbox.kill();\nawait sandbox.close();\n"


@pytest.fixture(scope="module", name="clients")
def _clients() -> Path:
    return Path(os.environ["SALLYPORT_CLIENTS"])


@pytest.fixture(scope="module", name="server")
def _server() -> Iterator[Stack]:
    with beside(Stack, "npm") as server:
        for name in _ALIASES:
            server.sallyport("image", "alias", IMAGE, name)
        yield server


class Examples:
    """The examples, and a Node that runs programs of them."""

    def __init__(self, clients: Path, server: Stack, place: Path) -> None:
        self._clients, self._server, self._place = clients, server, place
        readme = (clients / "npm" / _PACKAGE / "README.md").read_text()
        self.all = re.findall(r"```ts\n(.*?)```", readme, re.DOTALL)

    def named(self, part: str) -> str:
        """Return the only example with a text, without its imports."""
        (found,) = [code for code in self.all if part in code]
        return re.sub(r"^import [^;]*;\n", "", found, flags=re.MULTILINE)

    def run(self, *parts: str) -> list[str]:
        """Run a program of these parts; return the lines that it printed."""
        program = "".join((_IMPORTS, _TYPE, *parts))
        for written, own in (
            ("api.opensandbox.io", f"127.0.0.1:{self._server.port}"),
            ("your-api-key", self._server.api_key),
            ("your-key", self._server.api_key),
            ("<token>", "token-of-the-example"),
        ):
            program = program.replace(written, own)
        (self._place / "program.ts").write_text(program)
        (self._place / "node_modules").symlink_to(self._clients / "npm/node_modules")
        done = subprocess.run(
            [self._clients / "node/bin/node", "--disable-warning=ExperimentalWarning", "program.ts"],
            cwd=self._place,
            env={"PATH": os.environ["PATH"], "HOME": str(self._place)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (0, "") == (done.returncode, done.stderr), done.stdout + done.stderr
        return done.stdout.splitlines()


@pytest.fixture(name="examples")
def _examples(clients: Path, server: Stack, tmp_path: Path) -> Examples:
    return Examples(clients, server, tmp_path)


def test_the_examples_are_those_that_this_module_runs(examples: Examples) -> None:
    assert _EXAMPLES == len(examples.all)


def test_the_quick_start_runs_as_written(examples: Examples) -> None:
    assert ["Hello Sandbox!"] == [line for line in examples.run(examples.named("Optional but recommended")) if line]


def test_the_usage_examples_work_on_one_sandbox(examples: Examples, runtime: str) -> None:
    """State, renewal, commands with handlers, files, endpoints, and a policy that changes."""
    create = f"""
const first = await Sandbox.create({{
  connectionConfig: config, image: "ubuntu", timeoutSeconds: 600, extensions: {{ "sallyport.runtime": "{runtime}" }},
  networkPolicy: {{ defaultAction: "deny", egress: [{{ action: "allow", target: "pypi.org" }}] }},
}});
let sandbox = first;
"""
    parts = [f"{{\n{examples.named('await sandbox.pause()')}sandbox = resumed;\n}}\n"]
    parts += [
        f"{{\n{examples.named(part)}}}\n" for part in ("onExecutionComplete", "createDirectories", "getEndpointUrl")
    ]
    parts.append(
        f"{{\n{examples.named('getEgressPolicy')}"
        "console.log(policy.egress?.length, (await sandbox.getEgressPolicy()).egress?.length);\n}\n"
    )
    printed = examples.run(_CONFIG, create, *parts, _END)
    assert "State: Running" == printed[0]
    assert ["STDOUT: Count 1", "STDOUT: Count 2", "STDOUT: Count 3"] == [line for line in printed if "Count" in line]
    assert "Content: Hello World" in printed
    assert "[ '/tmp/demo/hello.txt' ]" in printed
    assert "1 2" == printed[-1]


def test_the_examples_of_creation_work(examples: Examples) -> None:
    """A health check of the caller, a policy, a credential vault, and the list of a manager."""
    list_ = f"{{\n{examples.named('listSandboxInfos')}}}\n"
    manual = examples.named("const manual").replace("const manual", "const sandbox")
    blocks = [
        f"{{\n{code}{more}{_END}}}\n"
        for code, more in (
            (manual, "console.log((await sandbox.getInfo()).expiresAt);\n"),
            (examples.named("healthCheck"), f"console.log(sandbox.id);\n{list_}"),
            (examples.named('egress: [{ action: "allow", target: "pypi.org" }]'), ""),
            (
                examples.named("credentialVault.create"),
                "console.log((await sandbox.credentialVault.get()).bindings.map((one) => one.name));\n",
            ),
        )
    ]
    printed = examples.run(_CONFIG, *blocks)
    assert ("null", f"[ '{printed[1]}' ]", "[ 'api-token' ]") == (printed[0], printed[2], printed[3])


def test_the_examples_of_configuration_make_connections(examples: Examples) -> None:
    code = examples.named("2. Advanced: custom headers")
    more = (
        'const sandbox = await Sandbox.create({ connectionConfig: config2, image: "ubuntu" });\nconsole.log("made");\n'
    )
    assert ["made"] == examples.run(code, more, _END)


def test_a_volume_of_ossfs_is_refused_with_the_contracts_code(examples: Examples) -> None:
    code = examples.named("oss-data")
    caught = f"try {{\n{code}}} catch (error) {{\n  console.log((error as SandboxException).error.code);\n}}\n"
    assert ["VOLUME::UNSUPPORTED_BACKEND"] == examples.run(
        'process.env.OSS_ACCESS_KEY_ID = "id"; process.env.OSS_ACCESS_KEY_SECRET = "secret";\n', _CONFIG, caught
    )
