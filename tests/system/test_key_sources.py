"""A whole server whose master key is wrapped: by a key in a PKCS#11 token (SoftHSM), and by a real HashiCorp Vault.

It tests `vault/wrapping/asking.py` in vaultd and in the command line, and `lifecycle/config/master_key.py`.
"""

import os
import secrets
import signal
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from opensandbox.sync.sandbox import SandboxSync

from demo.sandboxes import Secrets
from testbed.census import daemons
from testbed.internet import API
from testbed.stack import Stack, StackError
from tests.stacks import VAULTD, beside, removed
from tests.system.test_create_and_delete import until
from tests.vault.key_sources import Transit
from tests.vault.tokens import MODULE, SoftToken, ready
from tests.vault.vault_server import VaultServer
from vault.keyring import source_of
from vault.wrapping.sources import KeySource

pytestmark = [pytest.mark.system, pytest.mark.faults, pytest.mark.extended]

POLICY = f"""
version: 1
policies:
  agents:
    rules:
      - {{id: api, host: {API}, inject: {{secret: api-token, as: bearer}}}}
"""


class WithWrappedKey(Stack):
    """A Sallyport with the tables of both sources; new keys are of `source`."""

    source, tables = KeySource.PKCS11, ""

    @property
    def settings(self) -> str:
        self.policy = self.directory / "policies.yaml"
        self.policy.write_text(POLICY)
        self.policy.chmod(0o644)
        return f'{super().settings}\n[sallyport.vault]\nkey_source = "{self.source}"\n{self.tables}'

    @property
    def key(self) -> Path:
        return self.state / "vault" / "master-key"

    def vaultd(self) -> int:
        return daemons(self)["vault.vaultd"]


@dataclass
class Setup:
    """The server, and what wraps its key."""

    stack: WithWrappedKey
    token: SoftToken
    server: VaultServer


@pytest.fixture(name="setup")
def _setup() -> Iterator[Setup]:
    value = secrets.token_urlsafe(30)
    with (
        tempfile.TemporaryDirectory(prefix="sallyport-key-") as name,
        pytest.MonkeyPatch.context() as patch,
        ExitStack() as ends,
    ):
        place = Path(name)
        place.chmod(0o711)
        token = ready(place / "token", VAULTD)
        server = VaultServer(place)
        ends.callback(server.kill)
        server.start()
        (place / "source").mkdir()
        transit = Transit(place / "source", server)
        at = transit.config.transit
        assert at is not None
        environment = ", ".join(f'{key} = "{text}"' for key, text in token.environment.items())
        patch.setattr(
            WithWrappedKey,
            "tables",
            f"""
[sallyport.vault.pkcs11]
module = "{MODULE}"
token_label = "{token.place.token}"
key_label = "{token.place.key}"
pin_file = "{token.pin_file}"
environment = {{{environment}}}

[sallyport.vault.transit]
address = "{server.address}"
ca_file = "{server.authority.path}"
role = "{at.server.role}"
credential_file = "{transit.credential}"
key = "{at.key}"
""",
        )
        with beside(WithWrappedKey, "keys", Secrets(git="a:b", index="a:b", api=value)) as stack:
            assert isinstance(stack, WithWrappedKey)
            stack.sallyport("vault", "put", "api-token", "--host", API, stdin=value)
            yield Setup(stack, token, server)


def answers(sandbox: SandboxSync) -> bool:
    """Whether a request of the sandbox has the secret."""
    done = sandbox.commands.run(f"curl -sS --max-time 20 -o /dev/null -w '%{{http_code}}' https://{API}/v1/me 2>&1")
    return done.text.strip() == "200"


def sandbox_of(stack: Stack, runtime: str) -> AbstractContextManager[SandboxSync]:
    return removed(stack.create(runtime))


def check_without(stack: WithWrappedKey, sandbox: SandboxSync, reason: str) -> None:
    """The server that runs goes on without what wraps its key; the key is not changed."""
    before = stack.key.read_bytes()
    assert answers(sandbox)
    with pytest.raises(StackError, match=reason):
        stack.sallyport("vault", "rekey")
    assert [before] == [path.read_bytes() for path in stack.key.parent.glob("master-key*")]
    assert answers(sandbox)


def check_files_alone_start_nothing(stack: WithWrappedKey, reason: str) -> None:
    with pytest.raises(StackError):
        stack.start()
    assert f"the master key does not open: {reason}" in stack.tail()


def check_change(stack: WithWrappedKey, sandbox: SandboxSync, source: KeySource) -> None:
    """The key is replaced under a sandbox that uses a secret, and a new vaultd opens the new one."""
    before, former = stack.key.read_bytes(), stack.vaultd()
    assert answers(sandbox)
    stack.sallyport("vault", "rekey")
    assert (source, True) == (source_of(stack.key, VAULTD), before != stack.key.read_bytes())
    assert answers(sandbox)
    os.kill(former, signal.SIGKILL)
    assert until(lambda: daemons(stack).get("vault.vaultd", former) != former, 20)
    assert until(lambda: answers(sandbox), 30)


def test_a_server_with_a_wrapped_key_serves_changes_the_key_and_starts_again(setup: Setup) -> None:
    """With a token, then moved to Vault. Without them what runs goes on, and its files start no other server."""
    stack, away = setup.stack, setup.token.tokens.with_name("away")
    assert KeySource.PKCS11 == source_of(stack.key, VAULTD)
    assert f"ok    key: pkcs11: {stack.key} opens" in stack.sallyport("doctor")
    loaded = Path(f"/proc/{stack.vaultd()}/maps").read_text()
    assert [False, False] == [each in loaded for each in ("softhsm", "_pkcs11")]
    with sandbox_of(stack, "runc") as sandbox:
        check_change(stack, sandbox, KeySource.PKCS11)
        setup.token.tokens.rename(away)
        check_without(stack, sandbox, "no master key can be made")
    stack.stop()
    check_files_alone_start_nothing(stack, f"{MODULE} is no usable PKCS#11 module")  # SoftHSM without its directory
    away.rename(setup.token.tokens)

    stack.source = KeySource.TRANSIT
    stack.start()
    with sandbox_of(stack, "runsc") as sandbox:
        check_change(stack, sandbox, KeySource.TRANSIT)
        setup.token.remove()
        setup.server.seal()
        check_without(stack, sandbox, "Vault is sealed")
    stack.stop()
    check_files_alone_start_nothing(stack, f"{setup.server.address}: Vault is sealed")
    setup.server.unseal()
    stack.start()
    with sandbox_of(stack, "runc") as sandbox:
        assert answers(sandbox)
    assert 2 == [each["kind"] for each in stack.audit_records()].count("vault.rekey")
