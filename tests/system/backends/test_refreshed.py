"""Access tokens of a refresh token that its issuer replaces, in sandboxes of a whole server. Judged at the far end.

The issuer is oidc-provider, which revokes a login if a refresh token is used twice.

It tests `vault/stores/refresh_tokens.py` and `vault/kept_tokens.py` with the processes of a server.
"""

import os
import secrets
import signal

import pytest
from opensandbox.sync.sandbox import SandboxSync

from testbed.census import daemons
from testbed.internet import REGISTRY
from tests.conftest import ON_RUNC
from tests.system.backends.world import LOGIN, Setup, asked, sandbox_of
from tests.system.test_create_and_delete import until

pytestmark = pytest.mark.system


def tokens(setup: Setup, sandbox: SandboxSync, number: int, seconds: float = 40) -> list[str]:
    """Have requests sent until the server has received `number` access tokens; return them in order.

    The server returns each request. The sandbox gets that without the token.
    """
    mark, found = secrets.token_hex(8), list[str]()

    def enough() -> bool:
        shown = asked(sandbox, REGISTRY, f"/refreshed/{mark}")
        if shown.endswith("200"):
            received = [one.value("authorization").removeprefix("Bearer ") for one in setup.mirror.of(mark)]
            found[:] = dict.fromkeys(received)
            assert f"/refreshed/{mark}" in shown
            assert [] == [token for token in found if token in shown]
        return len(found) >= number

    assert until(enough, seconds)
    return list(found)


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_request_gets_the_access_token_of_a_refresh_token_that_its_issuer_replaces(
    setup: Setup, runtime: str
) -> None:
    stack = setup.stack
    with sandbox_of(stack, runtime, "refreshed") as sandbox:
        found = tokens(setup, sandbox, 2)
        assert setup.issuer.active(found[-1])
    logs = [stack.log, *(stack.run / "launch").iterdir(), *(stack.state / "audit").rglob("*.jsonl")]
    written = "".join(path.read_text(errors="replace") for path in logs if path.is_file())
    hidden = (*found, setup.issuer.secret, setup.file.with_name("login").read_text().strip())
    assert [] == [secret for secret in hidden if secret in written]
    kept = [record for record in stack.audit_records() if record["kind"] == "vault.keep"]
    assert {("info", LOGIN)} == {(record["decision"], record["secret"]) for record in kept}


def test_a_refresh_token_outlives_fetcher_and_vaultd_and_a_new_login_replaces_a_revoked_one(setup: Setup) -> None:
    stack, login = setup.stack, setup.file.with_name("login")
    with sandbox_of(stack, "runc", "refreshed") as sandbox:
        former = tokens(setup, sandbox, 1)
        for killed in ("vault.fetcher", "vault.vaultd"):
            pid = daemons(stack)[killed]
            os.kill(pid, signal.SIGKILL)
            assert until(lambda killed=killed, pid=pid: daemons(stack).get(killed, pid) != pid, 30)  # type: ignore[misc]
            former += tokens(setup, sandbox, 2)
        assert setup.issuer.active(former[-1])
        setup.issuer.revoke(former[-1])
        assert until(lambda: "invalid_grant" in asked(sandbox, REGISTRY, "/refreshed/revoked"), 40)
        assert "store the new refresh token in file://login" in stack.sallyport("vault", "backends")
        login.write_text(setup.issuer.log_in("confidential") + "\n")
        assert setup.issuer.active(tokens(setup, sandbox, 1)[-1])
