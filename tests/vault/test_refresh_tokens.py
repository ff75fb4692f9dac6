"""`token://` with refresh tokens that rotate, against a stand-in and against a real authorization server.

Both revoke a login if a refresh token is used twice. So each case that obtains tokens twice fails if a new refresh
token is lost. The properties that it shares with other backends are in `test_backends.py`.
"""

import asyncio
import base64
import errno
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import wire
from tests.vault.backends import SANDBOX, RefreshWorld
from tests.vault.rotating_issuer import Issuer
from vault import kept_tokens
from vault.fetching import BackendError
from vault.stores import refresh_tokens
from vault.stores.directory import SealedDirectory
from wire.api import fetcher, vaultd
from wire.api.fetcher import MOST_KEPT_BYTES, Fault, KeptToken, Problem
from wire.api.vaultd import Value

ORIGIN = "0" * 64


@pytest.fixture(scope="session", name="server")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Issuer]:
    from tests.vault.authorization_server import AuthorizationServer  # only system tests have its program

    server = AuthorizationServer(tmp_path_factory.mktemp("issuer"))
    yield server
    server.kill()


@pytest.fixture(
    name="world",
    params=[
        "stand-in confidential",
        "stand-in public",
        pytest.param("real confidential", marks=pytest.mark.system),
        pytest.param("real public", marks=pytest.mark.system),
    ],
)
async def _world(request: pytest.FixtureRequest, short_path: Path) -> AsyncIterator[RefreshWorld]:
    kind, client = request.param.split()
    world = RefreshWorld(short_path, client, request.getfixturevalue("server") if kind == "real" else None)
    await world.start()
    yield world
    await world.stop()


@pytest.fixture(name="local")
async def _local(short_path: Path) -> AsyncIterator[RefreshWorld]:
    """Run a world with the stand-in, which a test can slow down and change."""
    world = RefreshWorld(short_path)
    await world.start()
    yield world
    await world.stop()


def full(*_: object) -> None:
    """Fail like a write to a full disk."""
    raise OSError(errno.ENOSPC, "No space left on device")


async def problem(world: RefreshWorld) -> Problem:
    """Return why no access token is obtained."""
    with pytest.raises(BackendError) as caught:
        await world.obtained()
    assert "canary" not in str(caught.value)
    return caught.value.problem


async def until(condition: Callable[[], bool]) -> None:
    """Return when a condition holds."""
    async with asyncio.timeout(10):
        for _ in itertools.count():
            if condition():
                return
            await asyncio.sleep(0.01)


async def test_each_renewal_uses_the_last_refresh_token(world: RefreshWorld, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    tokens = [await world.obtained() for _ in range(3)]
    assert [True, 3] == [world.issuer.active(tokens[-1]), len(set(tokens))]
    kept = world.vault.vault.kept_tokens.recall("api")
    assert kept is not None
    records = world.vault.log.of("vault.keep", "info")
    assert ["token://api"] * 3 == [record["secret"] for record in records]
    for secret in (*tokens, kept.token.text, (world.mount / "login").read_text().strip(), world.issuer.secret):
        assert secret not in caplog.text
        assert secret not in str(world.vault.log.records)


async def test_the_next_fetcher_and_the_next_vaultd_have_the_last_refresh_token(world: RefreshWorld) -> None:
    """The control is the operator's credential, which the issuer has replaced."""
    await world.obtained()
    await world.restart_fetcher()
    assert world.issuer.active(await world.obtained())
    await world.vault.stop()
    await world.vault.start()
    await world.restart_fetcher()
    last = await world.obtained()
    assert world.issuer.active(last)
    assert world.vault.vault.kept_tokens._directory.remove("api")
    await world.restart_fetcher()
    assert Fault.LOGIN == (await problem(world)).fault
    assert not world.issuer.active(last)


async def test_a_refused_refresh_token_says_what_to_do_and_a_new_login_wins(world: RefreshWorld) -> None:
    former = (world.mount / "login").read_text()
    await world.obtained()
    stale = world.vault.vault.kept_tokens.recall("api")
    await world.obtained()
    assert stale is not None
    world.vault.vault.kept_tokens.keep("api", stale)  # as after a fetcher that died before vaultd had the last one
    await world.restart_fetcher()
    found = await problem(world)
    assert Fault.LOGIN == found.fault
    assert "(invalid_grant)" in found.reason
    assert "Log in again, and store the new refresh token in file://login" in found.reason
    ((line,),) = ((await world.vault.admin.ask(vaultd.ListBackends())).backends,)
    assert "the credential of api: the issuer refuses the refresh token" in line.problem
    assert former != world.log_in()
    ((line,),) = ((await world.vault.admin.ask(vaultd.ListBackends())).backends,)
    assert "" == line.problem
    assert world.issuer.active(await world.obtained())
    await world.restart_fetcher()
    assert world.issuer.active(await world.obtained())


async def test_without_a_place_for_the_new_refresh_token_no_access_token_is_used(
    world: RefreshWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.obtained()
    with monkeypatch.context() as patch:
        patch.setattr(SealedDirectory, "write", full)
        for _ in range(2):
            found = await problem(world)
            assert Fault.FAILED == found.fault
            assert "vaultd cannot keep the issuer's new refresh token" in found.reason
            assert "No space left on device" in found.reason
    denied = world.vault.log.of("vault.keep", "deny")
    assert ["storage"] * 2 == [record["code"] for record in denied]
    assert world.issuer.active(await world.obtained())
    await world.restart_fetcher()
    assert world.issuer.active(await world.obtained())


async def test_a_new_refresh_token_is_kept_also_if_no_caller_waits_for_it(local: RefreshWorld) -> None:
    """The issuer answers after the time of a read, and again after the end of the fetcher has begun."""
    local.backends._seconds = 0.2
    local.stand_in.pass_on.clear()
    assert Fault.TIMEOUT == (await problem(local)).fault
    local.stand_in.pass_on.set()
    local.backends._seconds = 5
    assert local.issuer.active(await local.obtained())
    local.stand_in.pass_on.clear()
    local.backends._seconds = 0.2
    local.forget()
    assert Fault.TIMEOUT == (await problem(local)).fault
    closing = asyncio.create_task(local.backends.close())
    await asyncio.sleep(0)
    local.stand_in.pass_on.set()
    await closing
    await local.restart_fetcher()
    assert local.issuer.active(await local.obtained())


async def test_at_its_end_the_fetcher_has_the_last_refresh_token_kept(
    local: RefreshWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(SealedDirectory, "write", full)
        await problem(local)
    await local.backends.close()
    await local.restart_fetcher()
    assert local.issuer.active(await local.obtained())


async def test_while_vaultd_is_away_a_new_refresh_token_waits_in_memory(local: RefreshWorld) -> None:
    await local.obtained()
    local.stand_in.pass_on.clear()
    local.forget()
    asking = asyncio.create_task(local.vault.fetcher.fetch(local.reference, SANDBOX))
    await until(lambda: len(local.stand_in.forms) == 2)
    await local.vault.fetcher.close()
    local.stand_in.pass_on.set()
    with pytest.raises(BackendError):
        await asking
    await until(lambda: not local.tokens._renewals)
    assert 1 == len(local.vault.log.of("vault.keep", "info"))
    assert local.issuer.active(await local.obtained())
    assert 3 == len(local.vault.log.of("vault.keep", "info"))


async def test_a_refused_refresh_token_is_not_sent_again_for_a_minute(
    local: RefreshWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = refresh_tokens.time.monotonic()
    monkeypatch.setattr(refresh_tokens.time, "monotonic", lambda: now)
    (local.mount / "login").write_text("canary-no-token")
    for _ in range(3):
        assert "invalid_grant" in (await problem(local)).reason
    assert 1 == len(local.stand_in.forms)
    now += refresh_tokens.PAUSE
    await problem(local)
    assert 2 == len(local.stand_in.forms)


@pytest.mark.parametrize("change", [{"client": "another"}, {"url": "https://127.0.0.1:1/token"}])
async def test_a_kept_refresh_token_goes_to_no_other_client_and_issuer(
    local: RefreshWorld, change: dict[str, str]
) -> None:
    """The control is the same token of the settings without the change."""
    await local.obtained()
    (source,) = local.config.tokens.values()
    tokens = refresh_tokens.RefreshTokens(local.keeper)
    credential = (local.mount / "login").read_text().strip()
    assert local.vault.vault.kept_tokens.recall("api") == await tokens.present("api", source, credential)
    tokens = refresh_tokens.RefreshTokens(local.keeper)
    assert Value(credential) == (await tokens.present("api", replace(source, **change), credential)).token


@pytest.mark.parametrize(
    "token", [1, ["a"], "x" * (MOST_KEPT_BYTES + 1), "with\nline break", "\ud800"], ids=lambda token: repr(token)[:20]
)
async def test_a_new_refresh_token_that_cannot_be_kept_is_a_fault(local: RefreshWorld, token: object) -> None:
    local.stand_in.answer["refresh_token"] = token
    assert Fault.UNFIT == (await problem(local)).fault
    assert "the issuer's new refresh token is no text" in (await problem(local)).reason
    assert 1 == len(local.stand_in.forms)


@pytest.mark.parametrize("answer", [{"token_type": "mac"}, {"access_token": None}, {"expires_in": 1}], ids=repr)
async def test_a_new_refresh_token_is_kept_also_if_its_access_token_is_no_good(
    local: RefreshWorld, answer: dict[str, object]
) -> None:
    former = dict(local.stand_in.answer)
    local.stand_in.answer |= answer
    await problem(local)
    local.stand_in.answer = former
    await local.restart_fetcher()
    assert local.issuer.active(await local.obtained())


@pytest.mark.parametrize("token", [None, ""])
async def test_an_issuer_that_does_not_rotate_gets_the_same_refresh_token(
    local: RefreshWorld, token: str | None
) -> None:
    local.stand_in.answer["refresh_token"] = token
    await local.obtained()
    await problem(local)  # the stand-in has replaced it
    assert local.stand_in.forms[0] == local.stand_in.forms[1]
    assert [] == local.vault.log.of("vault.keep", "info")


@pytest.mark.parametrize("content", ["", "\n", "x" * (MOST_KEPT_BYTES + 1)], ids=["nothing", "a line", "too long"])
async def test_a_credential_that_is_no_refresh_token_is_not_sent(local: RefreshWorld, content: str) -> None:
    (local.mount / "login").write_text(content)
    assert Fault.UNFIT == (await problem(local)).fault
    assert [] == local.stand_in.forms


async def test_a_client_with_a_wrong_secret_is_told_so(local: RefreshWorld) -> None:
    """The refresh token is not refused: the next attempt with the right secret uses it."""
    secret = (local.mount / "client-secret").read_text()
    (local.mount / "client-secret").write_text("another-secret")
    assert "answers 401 (invalid_client): check client and credential" in (await problem(local)).reason
    (local.mount / "client-secret").write_text(secret)
    assert local.issuer.active(await local.obtained())


async def test_the_kept_tokens_are_sealed_bounded_and_absent_if_damaged(
    local: RefreshWorld, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_tokens, "MOST_KEPT", 3)
    kept = local.vault.vault.kept_tokens
    for number in range(3):
        kept.keep(f"t{number}", KeptToken(ORIGIN, Value(f"canary-{number}")))
    found = await problem(local)
    assert "vaultd keeps 3 refresh tokens, its limit" in found.reason
    kept.keep("t0", KeptToken(ORIGIN, Value("canary-again")))
    assert KeptToken(ORIGIN, Value("canary-again")) == kept.recall("t0")
    place = local.directory / "vault" / "tokens"
    assert not any(b"canary" in path.read_bytes() for path in place.iterdir())
    former = (place / "=t1.sealed").read_bytes()
    kept.keep("t1", KeptToken(ORIGIN, Value("canary-newer")))
    (place / "=t1.sealed").write_bytes(former)
    assert None is kept.recall("t1")
    assert "token://t1 cannot be read and counts as absent" in caplog.text
    assert "canary" not in caplog.text


async def test_the_fetcher_can_ask_vaultd_for_refresh_tokens_only(local: RefreshWorld) -> None:
    await local.obtained()
    client = local.keeper._client
    assert client is not None
    assert (await client.ask(fetcher.Recall("api"))).kept is not None
    for request in (vaultd.List(), vaultd.Refer(()), vaultd.Rekey(), fetcher.Examine()):
        with pytest.raises(wire.RemoteError) as caught:
            await client.ask(request)
        assert wire.Code.UNKNOWN_OP == caught.value.code


async def test_a_new_master_key_seals_the_kept_tokens(local: RefreshWorld) -> None:
    await local.obtained()
    kept = local.vault.vault.kept_tokens.recall("api")
    following = local.vault.key.with_name("master.next")
    following.touch(0o600)
    following.write_bytes(base64.b64encode(bytes(range(32, 64))))
    await local.vault.admin.ask(vaultd.Rekey())
    following.rename(local.vault.key)
    await local.vault.stop()
    await local.vault.start()
    assert kept == local.vault.vault.kept_tokens.recall("api")
    await local.restart_fetcher()
    assert local.issuer.active(await local.obtained())
