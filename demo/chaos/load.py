"""The four sandboxes of a chaos run and their clients: two on runsc, two on runc, with both sources of a secret."""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.sandboxes import CredentialProxyConfig, NetworkPolicy, NetworkRule
from opensandbox.sync.sandbox import SandboxSync

from demo.chaos.facts import Asked, read_asked
from testbed.internet import ADDRESSES, API, ATTACKER, STATUS
from testbed.stack import Stack

ZONE = "cdn.bank.example"
_RESULTS = "/tmp/chaos.jsonl"
_END_SECONDS = 15

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Load:
    """One sandbox and the client in it."""

    tag: str
    runtime: str
    operator: bool
    """True: under a policy of the operator. False: under the call's own policy, with a credential vault."""
    sandbox: SandboxSync

    @property
    def id(self) -> str:
        return str(self.sandbox.id)

    def begin(self) -> None:
        """Start the client."""
        plan = {
            "tag": self.tag,
            "api": API,
            "status": STATUS,
            "attacker": ADDRESSES[ATTACKER],
            "attacker_name": ATTACKER,
            "zone": ZONE,
            "paths": self.operator,
            "spliced": not self.operator,
        }
        self.sandbox.files.write_file("/tmp/client.py", Path(__file__).with_name("client.py").read_text())
        self.sandbox.files.write_file("/tmp/plan.json", json.dumps(plan))
        self._run(
            f"nohup python3 /tmp/client.py /tmp/plan.json {_RESULTS} >/tmp/client.log 2>&1 </dev/null & "
            "echo $! >/tmp/client.pid"
        )

    def finish(self) -> list[Asked]:
        """End the client and fetch its results."""
        said = self._run(
            f"kill -TERM $(cat /tmp/client.pid); for i in $(seq {_END_SECONDS * 10}); do "
            "kill -0 $(cat /tmp/client.pid) 2>/dev/null || break; sleep 0.1; done; cat /tmp/client.log"
        )
        if said.strip():
            _log.warning("the client in %s said: %s", self.id, said[-500:])
        return read_asked(self.sandbox.files.read_bytes(_RESULTS).decode().splitlines(), self.id)

    def _run(self, command: str) -> str:
        done = self.sandbox.commands.run(command, opts=RunCommandOpts(timeout=timedelta(seconds=60)))
        return "".join(message.text for message in (*done.logs.stdout, *done.logs.stderr))


@contextmanager
def loads(stack: Stack, token: str) -> Iterator[list[Load]]:
    """Yield four sandboxes, and delete them at the end."""
    made: list[Load] = []
    try:
        for tag, runtime, operator in (
            ("a", "runsc", True),
            ("b", "runc", True),
            ("c", "runsc", False),
            ("d", "runc", False),
        ):
            made.append(
                Load(tag, runtime, operator, _operator(stack, runtime) if operator else _api(stack, runtime, token))
            )
        yield made
    finally:
        for load in made:
            _remove(load.sandbox)


def _operator(stack: Stack, runtime: str) -> SandboxSync:
    return stack.create(runtime)


def _api(stack: Stack, runtime: str, token: str) -> SandboxSync:
    """Return a sandbox under the call's own network policy, with its secret in its credential vault."""
    rules = [NetworkRule(action="allow", target=target) for target in (API, STATUS, f"*.{ZONE}")]
    sandbox = stack.create(
        runtime,
        policy=None,
        network_policy=NetworkPolicy(defaultAction="deny", egress=rules),
        credential_proxy=CredentialProxyConfig(enabled=True),
    )
    try:
        credential: Any = {"name": "token", "source": {"type": "inline", "value": token}}
        binding: Any = {
            "name": "api",
            "match": {"hosts": [API], "paths": ["/v1/*"]},
            "auth": {"type": "bearer", "credential": "token"},
        }
        sandbox.credential_vault.create(credentials=[credential], bindings=[binding])
    except BaseException:
        _remove(sandbox)
        raise
    return sandbox


def _remove(sandbox: SandboxSync) -> None:
    for _ in range(3):
        with suppress(Exception):
            sandbox.kill()
            break
        time.sleep(1)
    sandbox.close()
