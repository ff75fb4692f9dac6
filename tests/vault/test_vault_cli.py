"""Properties of `sallyport vault`."""

import asyncio
import base64
import io
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import wire
from tests.client_certificates import DAY, Times, authority, key_pem
from tests.vault.key_sources import Token
from vault.cli import VaultPlaces, main
from vault.client import AdminClient
from vault.conditions import UseLimits
from vault.grants import Grant, SecretBinding
from vault.keyring import Keyring, MasterKeyError, create, next_file, replace, source_of
from vault.secret import Secret
from vault.vaultd import Vault
from vault.wrapping.asking import Wrapping
from vault.wrapping.sources import KeySource, WrappingConfig

CANARY = "canary-0c1e99"


NUMBERS = ("--max-uses", "9", "--max-uses-per-sandbox", "2", "--max-bytes", "5000", "--max-bytes-per-sandbox", "700")


class Console:
    """A console that runs commands against a vault and stores their output."""

    def __init__(self, places: VaultPlaces) -> None:
        self.places = places
        self.printed = ""

    async def run(self, *arguments: str, stdin: bytes = b"") -> int:
        """Return the exit status of one command."""
        out, problems = io.StringIO(), io.StringIO()
        status = await asyncio.to_thread(
            main, arguments, self.places, stdin=io.BytesIO(stdin), stdout=out, stderr=problems
        )
        self.printed = out.getvalue() + problems.getvalue()
        assert CANARY not in self.printed
        return status


@pytest.fixture
def console(vault: Any) -> Console:
    """Return a console for the running vault."""
    return Console(VaultPlaces(vault.directory / "s", vault.directory / "key"))


async def test_a_secret_is_stored_listed_rotated_and_deleted(vault: Any, console: Console) -> None:
    """All operations, with the value from standard input and from a file. It is never printed."""
    assert 0 == await console.run("put", "token", "--host", "API.good.test", "--method", "GET", stdin=CANARY.encode())
    assert Secret(CANARY) == vault.vault.store.value("token")
    assert 0 == await console.run("list")
    assert "token  v1  api.good.test:443  schemes https; methods GET\n" == console.printed
    file = vault.directory / "value"
    file.write_text(CANARY + "-2\n")
    assert 0 == await console.run("rotate", "token", "--file", str(file), "--strip-newline")
    assert Secret(CANARY + "-2") == vault.vault.store.value("token")
    assert 0 == await console.run("list", "--json")
    assert [2] == [item["version"] for item in json.loads(console.printed)]
    assert 0 == await console.run("delete", "token")
    assert 0 == await console.run("list")
    assert "" == console.printed


async def test_the_list_has_the_limits_of_a_secret_and_what_was_used(vault: Any, console: Console) -> None:
    for name, limits in (("both", NUMBERS), ("sent", NUMBERS[6:]), ("used", NUMBERS[:2])):
        assert 0 == await console.run("put", name, "--host", "api.good.test", *limits, stdin=b"one-secret")
    vault.vault.custody.budgets.take("both", "sbx-1", UseLimits(9, 2, 5000, 700), 600)
    assert 0 == await console.run("list")
    assert [
        "used 1 of 9; sent 600 of 5000 bytes; at most 2 uses by each sandbox; at most 700 bytes by each sandbox",
        "sent 0 of any number of bytes; at most 700 bytes by each sandbox",
        "used 0 of 9",
    ] == [line.partition("schemes https; ")[2] for line in console.printed.splitlines()]
    assert 0 == await console.run("list", "--json")
    kept = ("max_uses", "max_uses_per_sandbox", "max_bytes", "max_bytes_per_sandbox", "used", "sent")
    assert [[9, 2, 5000, 700, 1, 600], [None, None, None, 700, None, 0], [9, None, None, None, 0, None]] == [
        [item.get(key) for key in kept] for item in json.loads(console.printed)
    ]


async def test_the_secret_of_database_sessions_is_bound_to_their_port(vault: Any, console: Console) -> None:
    for more, shown in (((), "5432"), (("--port", "6432"), "6432")):
        put = ("put", "login", "--host", "db.good.test", "--scheme", "postgres", *more)
        assert 0 == await console.run(*put, stdin=CANARY.encode())
        assert 0 == await console.run("list")
        assert f"db.good.test:{shown}  schemes postgres" in console.printed
        assert 0 == await console.run("delete", "login")


@pytest.mark.parametrize(
    "value",
    [b"", b"a\n", b" a", b"a\tb\r\n", b"a\0b", b"\xff", b"7-chars", b"x" * 65537],
    ids=["none", "end of line", "space", "tab", "NUL", "not UTF-8", "short", "long"],
)
async def test_values_that_cannot_be_sent_are_refused(vault: Any, console: Console, value: bytes) -> None:
    """Nothing is stored, and the message does not quote the value."""
    assert 2 == await console.run("put", "token", "--host", "good.test", stdin=value)
    assert [] == vault.vault.store.list_infos()


async def test_a_client_certificate_is_stored_and_replaced_only_if_it_can_be_used_now(
    vault: Any, console: Console
) -> None:
    """Key and chain from a file. An expired one, a chain alone and a key of another certificate change nothing."""
    now = datetime.now(UTC)
    root = authority("Root")
    good, other = root.issue("agent"), root.issue("agent")
    file = vault.directory / "client.pem"
    file.write_text(good.value)
    assert 0 == await console.run("put", "partner", "--host", "good.test", "--file", str(file))
    assert "stored partner\n" == console.printed
    refused = {
        "expired at 20": root.issue("agent", times=Times(now - 2 * DAY, now - DAY)).value,
        "not valid before 20": root.issue("agent", times=Times(now + DAY, now + 2 * DAY)).value,
        "one private key, not 0": good.chain_pem,
        "does not belong to the first certificate": key_pem(other.key) + good.chain_pem,
    }
    for reason, value in refused.items():
        assert 2 == await console.run("put", "second", "--host", "good.test", stdin=value.encode())
        assert reason in console.printed
        assert 2 == await console.run("rotate", "partner", stdin=value.encode())
        with pytest.raises(wire.RemoteError, match=reason):
            await vault.admin.rotate("partner", Secret(value))
        with pytest.raises(wire.RemoteError, match=reason):
            await vault.admin.put("second", Secret(value), SecretBinding.make(["good.test"]))
    assert Secret(good.value) == vault.vault.store.value("partner")
    assert 0 == await console.run("rotate", "partner", stdin=other.value.encode())
    assert Secret(other.value) == vault.vault.store.value("partner")
    assert ["partner"] == [info.name for info in vault.vault.store.list_infos()]


@pytest.mark.parametrize("host", ["*.good.test", "*", "10.0.0.1", "a b"])
async def test_a_secret_is_bound_to_exact_names(vault: Any, console: Console, host: str) -> None:
    """Wildcards and addresses are refused."""
    assert 2 == await console.run("put", "token", "--host", host, stdin=b"long-value")
    assert [] == vault.vault.store.list_infos()


@pytest.mark.parametrize("arguments", [("put", "t", CANARY, "--host", "a.test"), ("put", "t", "--value", CANARY)])
async def test_there_is_no_argument_for_a_value(
    console: Console, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line takes no value."""
    with pytest.raises(SystemExit):
        await console.run(*arguments, stdin=b"x")


async def test_refusals_are_reported_by_code(console: Console) -> None:
    """Exit status 1 and vaultd's code."""
    assert 0 == await console.run("put", "token", "--host", "good.test", stdin=b"long-value")
    assert 1 == await console.run("put", "token", "--host", "good.test", stdin=b"long-value")
    assert "(exists)" in console.printed
    assert 1 == await console.run("delete", "absent")
    assert "(unknown_secret)" in console.printed


def test_init_makes_a_key_once(tmp_path: Path) -> None:
    """A second init is refused and changes nothing. Without vaultd there is a plain message."""
    places = VaultPlaces(tmp_path / "absent", tmp_path / "key", (os.geteuid(), os.getegid()))
    out = io.StringIO()
    assert 0 == main(["init"], places, stdout=out, stderr=out)
    before = (tmp_path / "key").read_bytes()
    assert 1 == main(["init"], places, stdout=out, stderr=out)
    assert before == (tmp_path / "key").read_bytes()
    assert 1 == main(["list"], places, stdout=out, stderr=out)
    assert "the server is not running: ./run serve" in out.getvalue()
    assert before.decode().strip() not in out.getvalue()


async def test_the_master_key_is_replaced_while_the_vault_is_in_use(vault: Any) -> None:
    """Secrets, sandboxes and channels continue. The former key is removed and opens nothing, also after a restart."""
    console = Console(VaultPlaces(vault.directory / "s", vault.key))
    former = vault.key.read_bytes()
    grant = Grant.make("token", "good.test", 443, "https")
    await vault.admin.put("token", Secret(CANARY), SecretBinding.make(["good.test"]))
    root = await vault.admin.open_sandbox("sbx-1", "lin-1", [grant])
    worker = await vault.worker("sbx-1", 1)
    assert 0 == await console.run("rekey")
    assert (False, True) == (next_file(vault.key).exists(), former != vault.key.read_bytes())
    assert Secret(CANARY) == (await worker.release("token", "good.test", 443, "https")).value
    await worker.close()
    await vault.stop()
    with pytest.raises(MasterKeyError, match="another master key"):
        Vault(vault.directory / "vault", Keyring(base64.b64decode(former)))
    await vault.start()
    worker = await vault.worker("sbx-1", 2)
    assert Secret(CANARY) == (await worker.release("token", "good.test", 443, "https")).value
    assert (await worker.intermediate()).chain_pem.endswith(root)
    assert 1 == len(vault.log.of("vault.rekey", "info"))
    await worker.close()


async def test_a_change_of_the_master_key_that_was_broken_off_goes_on(vault: Any) -> None:
    """Before the call of the vault, after all was sealed, and across a restart: the same command completes it."""
    console = Console(VaultPlaces(vault.directory / "s", vault.key))
    await vault.admin.put("token", Secret(CANARY), SecretBinding.make(["good.test"]))
    for sealed in (False, True):
        create(next_file(vault.key))
        wanted = next_file(vault.key).read_bytes()
        if sealed:
            await vault.admin.rekey()
        await vault.stop()
        await vault.start()
        assert Secret(CANARY) == vault.vault.store.value("token")
        assert 0 == await console.run("rekey")
        assert wanted == vault.key.read_bytes()
        await vault.stop()
        await vault.start()
        assert Secret(CANARY) == vault.vault.store.value("token")


async def test_a_change_of_the_master_key_waits_for_the_one_before(vault: Any) -> None:
    """Otherwise what the first one has read would be applied last, and the vault would be sealed with a lost key."""
    await vault.admin.put("token", Secret(CANARY), SecretBinding.make(["good.test"]))
    other = await AdminClient.connect(vault.directory / "s", os.geteuid())
    create(next_file(vault.key))
    has_read, held = vault.held_rekey = asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(vault.admin.rekey())
    await has_read.wait()
    replace(vault.key)
    create(next_file(vault.key))
    second = asyncio.create_task(other.rekey())
    await asyncio.wait({second}, timeout=0.5)
    held.set()
    await asyncio.gather(first, second)
    replace(vault.key)
    await other.close()
    await vault.stop()
    await vault.start()
    assert Secret(CANARY) == vault.vault.store.value("token")


async def test_no_new_master_key_is_made_for_a_vault_that_does_not_answer(tmp_path: Path) -> None:
    create(tmp_path / "key")
    console = Console(VaultPlaces(tmp_path / "nothing.sock", tmp_path / "key"))
    assert 1 == await console.run("rekey")
    assert not next_file(tmp_path / "key").exists()


async def test_a_wrapped_key_is_made_once_and_replaced_by_another(tmp_path: Path) -> None:
    """`init` and the first step of `rekey` with a token. An existing key is not asked about."""
    token = Token(tmp_path)
    places = VaultPlaces(tmp_path / "nothing.sock", token.file, None, token.wrapping())
    try:
        assert 0 == await Console(places).run("init")
        assert KeySource.PKCS11 == source_of(token.file)
        first = token.load().purpose("x")
        token.lose()
        console = Console(places)
        assert 1 == await console.run("init")
        assert "exists" in console.printed
        token.file.unlink()
        assert 1 == await console.run("init")
        assert "no master key can be made" in console.printed
        assert (32, False) == (len(first), token.file.exists())
    finally:
        token.close()


@pytest.mark.parametrize("command", ["init", "rekey"])
async def test_a_key_of_systemd_is_made_and_changed_by_systemd(vault: Any, command: str) -> None:
    wrapping = Wrapping(WrappingConfig(KeySource.CREDENTIAL), vault.directory)
    console = Console(VaultPlaces(vault.directory / "s", vault.directory / "key", None, wrapping))
    assert 2 == await console.run(command)
    assert "systemd has the master key" in console.printed
    assert not (vault.directory / "key").exists()


async def test_references_are_limited_with_the_options_of_put(vault: Any, console: Console) -> None:
    limit = ["vault://kv/agents/*", "--host", "API.good.test", "--metadata", "team=a", "--image", "sallyport/base"]
    assert 0 == await console.run("limit", *limit, *NUMBERS)
    assert console.printed == "vault://kv/agents/* is limited; 0 workers have dropped its leases\n"
    assert 0 == await console.run("limit", "env://TOKEN", "--expires", "2031-01-01T00:00:00Z")
    assert 0 == await console.run("list")
    assert (
        "LIMIT env://TOKEN  expires 2031-01-01T00:00:00+00:00\n"
        "LIMIT vault://kv/agents/*  host api.good.test; metadata team=a; image sallyport/base; at most 9 uses; "
        "at most 5000 bytes; at most 2 uses by each sandbox; at most 700 bytes by each sandbox\n"
    ) == console.printed
    for wrong in (["vault://kv/agents/*"], ["token", "--max-uses", "1"], ["env://A", "--max-uses", "0"]):
        assert 2 == await console.run("limit", *wrong)
    assert 0 == await console.run("unlimit", "env://TOKEN")
    assert 1 == await console.run("unlimit", "env://TOKEN")
    assert ["vault://kv/agents/*"] == [one.pattern for one in vault.vault.custody.limits.forms]
    assert 1 == await console.run("reset", "env://TOKEN")
