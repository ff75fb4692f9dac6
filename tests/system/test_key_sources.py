"""A whole server whose master key is wrapped: by a key in a PKCS#11 token (SoftHSM), and by a real HashiCorp Vault.

It tests `vault/wrapping/asking.py` in vaultd and in the command line, and `lifecycle/config/master_key.py`.
"""

import os
import secrets
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from opensandbox.sync.sandbox import SandboxSync

from demo.sandboxes import Secrets
from testbed.census import daemons
from testbed.internet import API
from testbed.stack import Stack, StackError
from tests.stacks import beside
from tests.system.test_create_and_delete import until
from tests.vault.key_sources import Transit
from tests.vault.tokens import MODULE, ready
from tests.vault.vault_server import VaultServer
from vault.keyring import source_of
from vault.wrapping.sources import KeySource

pytestmark = pytest.mark.system

VAULTD = 700000002
POLICY = f"""
version: 1
policies:
  agents:
    rules:
      - {{id: api, host: {API}, inject: {{secret: api-token, as: bearer}}}}
"""


class WithWrappedKey(Stack):
    """A Sallyport with `more` in its settings file."""

    more = ""

    @property
    def settings(self) -> str:
        self.policy = self.directory / "policies.yaml"
        self.policy.write_text(POLICY)
        self.policy.chmod(0o644)
        return super().settings + self.more


class Served:
    """A running server, and the actions on what wraps its key."""

    def __init__(self, stack: Stack, source: KeySource, lose: Callable[[], None], regain: Callable[[], None]) -> None:
        self.stack, self.source, self.lose, self.regain = stack, source, lose, regain
        self.key = stack.state / "vault" / "master-key"

    def pid(self) -> int:
        return daemons(self.stack)["vault.vaultd"]


@contextmanager
def with_token(place: Path) -> Iterator[tuple[str, Callable[[], None], Callable[[], None]]]:
    token = ready(place / "token", VAULTD)
    away = place / "away"
    environment = ", ".join(f'{name} = "{value}"' for name, value in token.environment.items())
    yield (
        f"""
[sallyport.vault]
key_source = "pkcs11"
[sallyport.vault.pkcs11]
module = "{MODULE}"
token_label = "sallyport"
key_label = "master"
pin_file = "{token.pin_file}"
environment = {{{environment}}}
""",
        lambda: token.tokens.rename(away),
        lambda: away.rename(token.tokens),
    )


@contextmanager
def with_transit(place: Path) -> Iterator[tuple[str, Callable[[], None], Callable[[], None]]]:
    server = VaultServer(place)
    try:
        server.start()
        (place / "source").mkdir()
        transit = Transit(place / "source", server).config.transit
        assert transit is not None
        yield (
            f"""
[sallyport.vault]
key_source = "transit"
[sallyport.vault.transit]
address = "{server.address}"
ca_file = "{server.authority.path}"
role = "{transit.server.role}"
credential_file = "{place / "source" / "secret-id"}"
key = "master"
""",
            server.seal,
            server.unseal,
        )
    finally:
        server.kill()


@pytest.fixture(params=[with_token, with_transit], ids=["pkcs11", "transit"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with (
        tempfile.TemporaryDirectory(prefix="sallyport-key-") as name,
        pytest.MonkeyPatch.context() as patch,
    ):
        place = Path(name)
        place.chmod(0o711)
        value = secrets.token_urlsafe(30)
        with request.param(place) as (more, lose, regain):
            patch.setattr(WithWrappedKey, "more", more)
            with beside(WithWrappedKey, "keys", Secrets(git="a:b", index="a:b", api=value)) as stack:
                stack.sallyport("vault", "put", "api-token", "--host", API, stdin=value)
                yield Served(stack, KeySource(more.split('"')[1]), lose, regain)


def answers(sandbox: SandboxSync) -> bool:
    """Whether a request of the sandbox has the secret."""
    done = sandbox.commands.run(f"curl -sS --max-time 20 -o /dev/null -w '%{{http_code}}' https://{API}/v1/me 2>&1")
    return done.text.strip() == "200"


def test_a_server_with_a_wrapped_key_serves_changes_the_key_and_starts_again(served: Served) -> None:
    """Without the token, or with a sealed Vault, the server that runs goes on, and its files start no other one."""
    stack = served.stack
    assert served.source == source_of(served.key, VAULTD)
    first = served.key.read_bytes()
    assert f"ok    master key: {served.source}: {served.key} opens" in stack.sallyport("doctor")
    loaded = Path(f"/proc/{served.pid()}/maps").read_text()
    assert "softhsm" not in loaded
    assert "pkcs11" not in loaded
    sandbox = stack.create("runc")
    assert answers(sandbox)
    stack.sallyport("vault", "rekey")
    assert served.source == source_of(served.key, VAULTD)
    assert first != served.key.read_bytes()
    assert answers(sandbox)
    assert ["vault.rekey"] == [each["kind"] for each in stack.audit_records() if each["kind"] == "vault.rekey"]
    former = served.pid()
    os.kill(former, signal.SIGKILL)
    assert until(lambda: daemons(stack).get("vault.vaultd", former) != former, 20)
    assert until(lambda: answers(sandbox), 30)
    served.lose()
    try:
        assert answers(sandbox)
        second = served.key.read_bytes()
        with pytest.raises(StackError, match="no master key can be made"):
            stack.sallyport("vault", "rekey")
        assert second == served.key.read_bytes()
        assert not served.key.with_name("master-key.next").exists()
        assert answers(sandbox)
        sandbox.kill()
        stack.stop()
        with pytest.raises(StackError):
            stack.start()
        assert "the master key does not open" in stack.log.read_text()
    finally:
        served.regain()
    stack.start()
    again = stack.create("runsc")
    assert answers(again)
    again.kill()
