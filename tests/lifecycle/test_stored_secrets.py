"""What `policy check` and `explain` learn from the vault: names and bindings, or why nothing is known."""

import os
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lifecycle import stored_secrets
from lifecycle.config.settings import Settings, parse
from lifecycle.stored_secrets import StoredSecrets
from policy.compiled import SecretUse
from policy.facts import Scheme
from policy.references import SecretReference
from vault.conditions import Selectors, UseLimits
from vault.freeze import ALL, Extent
from vault.grants import SecretBinding
from vault.limits import ReferenceLimit
from vault.stores.port import SecretInfo
from wire.api.vaultd import Listed, Used

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
        (use("vault://kv/a#b"), ""),
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
    assert ["the secret is frozen: sallyport vault unfreeze"] * 2 == said
    reference = use("vault://kv/a#b")
    said = [StoredSecrets(STORED, (extent,)).remark(reference) for extent in (ALL, Extent(None, reference.secret))]
    assert ["the secret is frozen: sallyport vault unfreeze"] * 2 == said
    for extent in (Extent("sbx-1"), Extent(None, "old")):
        assert "" == StoredSecrets(STORED, (extent,)).remark(use())


def settings(tmp_path: Path) -> Settings:
    return parse({"sallyport": {"run_dir": str(tmp_path)}}, "test", {})


def test_without_an_answer_of_the_vault_its_secrets_are_not_checked(tmp_path: Path) -> None:
    """The settings are known nevertheless."""
    for configured in (None, settings(tmp_path)):
        found = stored_secrets.read(configured)
        assert found.unknown
        assert "" == found.remark(use())
    assert found.remark(use("env://A")).startswith("sallyport.vault.environment does not have A")


CONFIGURED = {
    "environment": ["A"],
    "file_directories": ["/etc/a"],
    "commands": [{"name": "a", "argv": ["/bin/true"]}],
    "tokens": [{"name": "a", "kind": "jwt", "client": "c", "audience": "d", "credential": "file://k"}],
    "hashicorp": {
        "address": "https://vault.test:8200",
        "role": "r",
        "credential_file": "/etc/vault",
        "allowed": ["kv/agents/*", "kv/one"],
    },
}


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("env://A", ""),
        ("env://B", "sallyport.vault.environment does not have B: add it"),
        ("file://a", ""),
        ("command://a", ""),
        ("command://b", "sallyport.vault.commands has no command b: add it"),
        ("token://a", ""),
        ("token://b", "sallyport.vault.tokens has no token b: add it"),
        ("vault://kv/agents/a/b#t", ""),
        ("vault://kv/one#t", ""),
        ("vault://kv/other#t", "sallyport.vault.hashicorp.allowed does not have kv/other: add it"),
    ],
)
def test_what_the_settings_lack_for_a_reference_is_said(reference: str, said: str) -> None:
    configured = parse({"sallyport": {"vault": CONFIGURED}}, "test", {})
    found = stored_secrets.unconfigured(configured, SecretReference.parse(reference))
    assert found.startswith(said) if said else not found


@pytest.mark.parametrize("reference", ["env://A", "file://a", "command://a", "token://a", "vault://kv/a#t"])
def test_a_backend_that_is_not_configured_is_said_for_each_reference(reference: str) -> None:
    assert stored_secrets.unconfigured(parse({}, "test", {}), SecretReference.parse(reference)).startswith(
        "sallyport.vault."
    )


REFERENCE = "vault://kv/a#b"


@pytest.mark.parametrize(
    ("pattern", "parts", "used", "remark"),
    [
        ("vault://kv/*", {"hosts": ["a.test"]}, 0, ""),
        (
            "vault://kv/*",
            {"hosts": ["b.test"]},
            0,
            "the secret is not bound to this host: `sallyport vault list`",
        ),
        ("vault://other/*", {"hosts": ["b.test"]}, 0, ""),
        (REFERENCE, {"expires": "2020-01-01T00:00:00Z"}, 0, "the secret has expired: `sallyport vault list`"),
        (REFERENCE, {"limits": UseLimits(3)}, 2, ""),
        (REFERENCE, {"limits": UseLimits(sent=30)}, 2, ""),
        (REFERENCE, {"limits": UseLimits(sent=30)}, 3, "used as often as its limits allow: sallyport vault reset"),
        (REFERENCE, {"limits": UseLimits(3)}, 3, "used as often as its limits allow: sallyport vault reset"),
        (
            "*",
            {"selectors": Selectors.make({"team": "a"}, ["i"])},
            0,
            "only for sandboxes with metadata team=a, image i",
        ),
    ],
)
def test_what_a_limit_excludes_is_said(pattern: str, parts: dict[str, Any], used: int, remark: str) -> None:
    limits = (ReferenceLimit.make(pattern, **parts),)
    found = StoredSecrets(STORED, limits=limits, used={REFERENCE: Used(used, 10 * used)}).remark(use(REFERENCE))
    assert remark in found if remark else not found


def test_the_first_thing_to_do_is_said() -> None:
    """What the settings lack, then what the vault refuses, then what the backend says. A sealed secret has none."""
    limits = (ReferenceLimit.make(REFERENCE, expires="2020-01-01T00:00:00Z"),)
    asked: list[str] = []

    def probe(reference: str) -> str:
        asked.append(reference)
        return "missing: write it"

    said = [
        StoredSecrets(STORED, limits=limits, unconfigured=lambda _: "add it", probe=probe).remark(use(REFERENCE)),
        StoredSecrets(STORED, limits=limits, probe=probe).remark(use(REFERENCE)),
        StoredSecrets(STORED, probe=probe).remark(use(REFERENCE)),
        StoredSecrets(STORED, unconfigured=lambda _: "add it", probe=probe).remark(use()),
    ]
    assert ["add it", "the secret has expired: `sallyport vault list`", "missing: write it", ""] == said
    assert [REFERENCE] == asked


def test_no_more_backends_are_asked_after_some_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy can name many references of a backend that hangs."""
    asked: list[str] = []

    async def listed(_settings: Settings) -> Listed:
        return Listed((), {}, (), ())

    async def probed(_settings: Settings, reference: str) -> str:
        asked.append(reference)
        return "timeout"

    monkeypatch.setattr(stored_secrets, "_listed", listed)
    monkeypatch.setattr(stored_secrets, "_probed", probed)
    for seconds, said in ((30.0, "timeout"), (-1.0, "its backend is not asked: those before it took too long")):
        monkeypatch.setattr(stored_secrets, "PROBES_SECONDS", seconds)
        assert said == stored_secrets.read(settings(tmp_path)).probe(REFERENCE)
    assert [REFERENCE] == asked


def test_a_server_of_another_user_is_told_nothing(tmp_path: Path) -> None:
    """Its socket is not the vault's."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(tmp_path / "vault.sock"))
        listener.listen()
        assert stored_secrets.read(settings(tmp_path)).unknown
