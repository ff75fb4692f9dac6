"""What `policy check` and `explain` learn from the vault: names and bindings, or why nothing is known."""

import os
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from lifecycle import stored_secrets
from lifecycle.config.settings import Settings, parse
from lifecycle.stored_secrets import StoredSecrets
from policy.compiled import SecretUse
from policy.facts import Scheme
from vault.freeze import ALL, Extent
from vault.grants import SecretBinding
from vault.stores.port import SecretInfo

NOW = datetime.now(UTC)


def use(name: str = "token", host: str = "a.test", port: int = 443) -> SecretUse:
    return SecretUse(name, host, port, Scheme.HTTPS, "bearer", "authorization", "r")


def info(name: str, expires: datetime | None = None) -> SecretInfo:
    return SecretInfo(name, 1, NOW, NOW, SecretBinding.make(["a.test"], expires=expires))


PUT = "sallyport vault put"
STORED = {"token": info("token"), "old": info("old", NOW - timedelta(hours=1))}


@pytest.mark.parametrize(
    ("asked", "remark"),
    [
        (use(), ""),
        (
            use("absent"),
            "the vault has no secret absent; the operator adds it: sallyport vault put absent --host a.test",
        ),
        (use(host="b.test"), "the secret is not bound to this host"),
        (use(port=8443), "the secret is not bound to this port"),
        (use("old"), "the secret has expired"),
        (use("inline:1/a"), ""),  # a caller's own value
        (use("vault://kv/a#b"), ""),  # `sallyport vault check` asks its backend
    ],
)
def test_what_the_vault_would_not_release_is_said(asked: SecretUse, remark: str) -> None:
    assert remark == StoredSecrets(STORED).remark(asked)


def test_the_command_for_a_missing_secret_has_each_host_of_the_policy() -> None:
    """Those of the same port. A secret of this name is bound to hosts when it is stored."""
    asked = [use("absent", host) for host in ("b.test", "a.test")]
    others = [use("other", "c.test"), use("absent", "d.test", 8443), use("absent", "*.e.test")]
    said = StoredSecrets(STORED).remark(asked[0], [*asked, *others])
    assert said.endswith(": sallyport vault put absent --host b.test --host a.test")


def test_a_freeze_of_every_sandbox_is_said_and_that_of_one_is_not() -> None:
    said = [StoredSecrets(STORED, (extent,)).remark(use()) for extent in (ALL, Extent(None, "token"))]
    assert ["the secret is frozen"] * 2 == said
    reference = use("vault://kv/a#b")
    said = [StoredSecrets(STORED, (extent,)).remark(reference) for extent in (ALL, Extent(None, reference.secret))]
    assert ["the secret is frozen"] * 2 == said
    for extent in (Extent("sbx-1"), Extent(None, "old")):
        assert "" == StoredSecrets(STORED, (extent,)).remark(use())


def settings(tmp_path: Path) -> Settings:
    return parse({"sallyport": {"run_dir": str(tmp_path)}}, "test", {})


def test_without_an_answer_of_the_vault_nothing_is_checked(tmp_path: Path) -> None:
    for configured in (None, settings(tmp_path)):
        found = stored_secrets.read(configured)
        assert found.unknown
        assert "not checked" == found.remark(use())


def test_a_server_of_another_user_is_told_nothing(tmp_path: Path) -> None:
    """Its socket is not the vault's."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(tmp_path / "vault.sock"))
        listener.listen()
        assert stored_secrets.read(settings(tmp_path)).unknown
