"""The login of a registry leaves the vault into a pipe only, within its binding, after a record of it."""

import base64
import json
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

import wire
from vault.grants import SecretBinding
from vault.operations import registry_login
from vault.secret import Secret
from wire.api.vaultd import WriteLogin

HOST, LOGIN = "registry.good.test", "builder:canary-71c04e"


@pytest.fixture(name="pipe")
def _pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    yield reading, writing
    for fd in (reading, writing):
        os.close(fd)


async def _ask(vault: Any, request: WriteLogin, *fds: int) -> None:
    client = await wire.Client.connect(vault.directory / "s", os.geteuid())
    try:
        await client.ask(request, fds=list(fds))
    finally:
        await client.close()


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 20)
    except BlockingIOError:
        return b""


async def test_a_login_is_written_in_the_form_of_container_tools(vault: Any, pipe: tuple[int, int]) -> None:
    vault.vault.store.put("login", Secret(LOGIN), SecretBinding.make([HOST]))
    await _ask(vault, WriteLogin("login", HOST, 443), pipe[1])
    found = json.loads(_read(pipe[0]))
    assert LOGIN.encode() == base64.b64decode(found["auths"][HOST]["auth"])
    (record,) = vault.log.of("secret.release", "allow")
    assert ("login", "login", HOST, 443, True) == tuple(
        record[key] for key in ("action", "secret", "host", "port", "durable")
    )
    assert "canary" not in json.dumps(vault.log.records)


@pytest.mark.parametrize(
    ("binding", "code"),
    [
        (SecretBinding.make(["other.good.test"]), "not_bound"),
        (SecretBinding.make([HOST], ports=[444]), "not_bound"),
        (SecretBinding.make([HOST], schemes=["http"]), "not_bound"),
        (SecretBinding.make([HOST], paths=["/v1/*"]), "not_bound"),
        (SecretBinding.make([HOST], methods=["POST"]), "not_bound"),
        (SecretBinding.make([HOST], expires="2020-01-01T00:00:00Z"), "expired"),
    ],
)
async def test_outside_of_its_binding_nothing_is_written(
    vault: Any, pipe: tuple[int, int], binding: SecretBinding, code: str
) -> None:
    vault.vault.store.put("login", Secret(LOGIN), binding)
    with pytest.raises(wire.RemoteError) as refused:
        await _ask(vault, WriteLogin("login", HOST, 443), pipe[1])
    assert (code, b"") == (refused.value.code, _read(pipe[0]))
    assert [] == vault.log.of("secret.release", "allow")


async def test_a_frozen_login_is_not_written(vault: Any, pipe: tuple[int, int]) -> None:
    vault.vault.store.put("login", Secret(LOGIN), SecretBinding.make([HOST]))
    await vault.admin.freeze(secret="login")
    with pytest.raises(wire.RemoteError) as refused:
        await _ask(vault, WriteLogin("login", HOST, 443), pipe[1])
    assert ("frozen", b"") == (refused.value.code, _read(pipe[0]))
    await vault.admin.unfreeze(secret="login")
    await _ask(vault, WriteLogin("login", HOST, 443), pipe[1])
    assert b"auths" in _read(pipe[0])


async def test_an_unknown_secret_and_one_that_is_no_login_are_refused(vault: Any, pipe: tuple[int, int]) -> None:
    vault.vault.store.put("token", Secret("canary-71c04e-without-a-colon"), SecretBinding.make([HOST]))
    for name, code in (("token", "invalid"), ("none", "unknown_secret")):
        with pytest.raises(wire.RemoteError) as refused:
            await _ask(vault, WriteLogin(name, HOST, 443), pipe[1])
        assert (code, b"") == (refused.value.code, _read(pipe[0]))
        assert "canary" not in str(refused.value)


async def test_a_login_goes_into_one_pipe(vault: Any, pipe: tuple[int, int]) -> None:
    vault.vault.store.put("login", Secret(LOGIN), SecretBinding.make([HOST]))
    near, far = socket.socketpair()
    with near, far:
        for fds in ((), (pipe[1], pipe[1]), (far.fileno(),)):
            with pytest.raises(wire.RemoteError, match="one pipe"):
                await _ask(vault, WriteLogin("login", HOST, 443), *fds)


async def test_without_a_record_nothing_is_written(vault: Any, pipe: tuple[int, int]) -> None:
    vault.vault.store.put("login", Secret(LOGIN), SecretBinding.make([HOST]))
    await vault.audit.close(0)
    with pytest.raises(wire.RemoteError) as refused:
        await _ask(vault, WriteLogin("login", HOST, 443), pipe[1])
    assert ("audit_unavailable", b"") == (refused.value.code, _read(pipe[0]))


@pytest.mark.parametrize("value", ["", ":", "a", "a:", ":b"])
def test_a_login_has_a_user_and_a_password(value: str) -> None:
    assert registry_login(HOST, 443, value) is None


def test_another_port_is_part_of_the_registry_s_name() -> None:
    found = registry_login(HOST, 5000, "a:b")
    assert found is not None
    assert [f"{HOST}:5000"] == list(json.loads(found)["auths"])
