"""`vault/wrapping/transit.py` in the unwrapper, with a real HashiCorp Vault: each fault has its reason."""

import base64
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from testbed.ports import reserve_port
from tests.conftest import representatives
from tests.vault.key_sources import POLICY, Transit
from tests.vault.stand_in import https, send
from tests.vault.vault_server import Authority
from vault.keyring import MasterKeyError
from vault.stores.hvac.config import Auth, HashicorpServer
from vault.wrapping import transit
from vault.wrapping.sources import KeySource, TransitKey, WrappedKey, WrappingConfig, WrappingError

CONTEXT = b"sallyport/master-key/1/transit/" + b"0" * 32


@pytest.fixture
def source(tmp_path: Path, vault_server: Any) -> Iterator[Transit]:
    made = Transit(tmp_path, vault_server)
    made.make()
    yield made
    made.close()


def at(source: Transit, **changes: Any) -> None:
    """Change the settings of the server or of the key."""
    place = source.config.transit
    assert place is not None
    mine = {key: changes.pop(key) for key in ("engine", "key") if key in changes}
    source.config = WrappingConfig(
        KeySource.TRANSIT, None, replace(place, server=replace(place.server, **changes), **mine)
    )


def limit(source: Transit) -> None:
    """Rotate the key and raise the version that it decrypts with."""
    source.server.ask("POST", "transit/keys/master/rotate")
    source.server.ask("POST", "transit/keys/master/config", min_decryption_version=2)


def deny(source: Transit) -> None:
    source.server.ask("PUT", "sys/policies/acl/master-key", policy=POLICY.replace("decrypt", "other"))


def of_another_purpose(source: Transit) -> None:
    """Put a ciphertext of the same transit key in the place of the key."""
    plain = base64.b64encode(bytes(32)).decode()
    made = source.server.ask("POST", "transit/encrypt/master", plaintext=plain)["data"]["ciphertext"]
    source.store(replace(WrappedKey.parse(source.stored()), wrapped=made).text)


FAULTS: dict[str, tuple[Callable[[Transit], object], str]] = {
    "unreachable": (lambda source: at(source, address=f"https://127.0.0.1:{reserve_port()}"), "cannot be reached"),
    "another authority": (lambda source: at(source, roots="/etc/ssl/certs/ca-certificates.crt"), "certificate is not"),
    "sealed": (lambda source: source.server.seal(), "Vault is sealed"),
    "login": (lambda source: source.credential.write_text("wrong"), "refuses the login"),
    "denied": (deny, "give Sallyport's policy `update` on transit/decrypt/master"),
    "deleted": (lambda source: source.drop(), "no transit key master"),
    "no engine": (lambda source: at(source, engine="elsewhere"), "Vault denies it"),
    "old version": (limit, "lower its min_decryption_version"),
    "another purpose": (of_another_purpose, "was changed, or is of another purpose"),
}


@pytest.mark.system
@pytest.mark.parametrize("name", representatives(FAULTS, "unreachable", "sealed", "denied", "another purpose"))
def test_each_fault_has_its_reason_and_takes_bounded_time(source: Transit, name: str) -> None:
    fault, reason = FAULTS[name]
    source.load()  # the control
    fault(source)
    try:
        began = time.monotonic()
        with pytest.raises(MasterKeyError) as caught:
            source.load()
        assert time.monotonic() - began < 15
    finally:
        source.server.unseal()
    assert reason in str(caught.value)
    assert source.credential.read_text() not in str(caught.value)


@pytest.mark.system
def test_the_token_of_a_login_is_revoked(source: Transit) -> None:
    def tokens() -> set[str]:
        return set(source.server.ask("LIST", "auth/token/accessors")["data"]["keys"])

    before = tokens()
    source.load()
    assert set() == tokens() - before


@pytest.mark.system
def test_the_former_version_of_a_rotated_transit_key_still_opens(source: Transit) -> None:
    """To rotate the transit key is no change of the master key."""
    first = source.load().purpose("x")
    source.server.ask("POST", "transit/keys/master/rotate")
    assert first == source.load().purpose("x")


class Careless:
    """A server that has the logins and the transit engine, and does not look at associated data."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.short = False

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("content-length") or 0)
        body = json.loads(handler.rfile.read(length) or b"{}")
        path = handler.path.removeprefix("/v1/")
        self.asked.append(path)
        if path.startswith("transit/encrypt"):
            data = {"ciphertext": f"vault:v1:{body['plaintext']}"}
        elif path.startswith("transit/decrypt"):
            data = {"plaintext": body["ciphertext"].removeprefix("vault:v1:")[: 8 if self.short else None]}
        else:
            data = {"ttl": 0}
        send(handler, 200, json.dumps({"data": data}).encode(), ("content-type", "application/json"))


@pytest.fixture
def careless(tmp_path: Path) -> Iterator[tuple[Careless, TransitKey, int]]:
    authority, answers, token = Authority(tmp_path, "authority"), Careless(), tmp_path / "token"
    token.write_text(secrets.token_hex(8))
    credential = os.open(token, os.O_RDONLY)
    with https(authority, answers) as port:
        server = HashicorpServer(f"https://127.0.0.1:{port}", str(authority.path), "", Auth.TOKEN, "", "", ())
        yield answers, TransitKey(server, "transit", "master"), credential
    os.close(credential)


def test_a_server_that_ignores_associated_data_is_refused(careless: tuple[Careless, TransitKey, int]) -> None:
    _, place, credential = careless
    with pytest.raises(WrappingError, match="does not look at associated data"):
        transit.wrap(place, credential, bytes(32), CONTEXT)


def test_an_answer_that_is_no_key_is_refused(careless: tuple[Careless, TransitKey, int]) -> None:
    answers, place, credential = careless
    key = WrappedKey(1, "transit", "0" * 32, "vault:v1:" + base64.b64encode(bytes(32)).decode())
    assert [bytes(32)] == transit.unwrap(place, credential, [key])  # the control
    answers.short = True
    with pytest.raises(WrappingError, match="is no key of 32 bytes"):
        transit.unwrap(place, credential, [key])


def test_an_unreachable_server_is_tried_twice(careless: tuple[Careless, TransitKey, int]) -> None:
    _, place, credential = careless
    gone = replace(place, server=replace(place.server, address=f"https://127.0.0.1:{reserve_port()}"))
    began = time.monotonic()
    with pytest.raises(WrappingError, match="cannot be reached"):
        transit.unwrap(gone, credential, [WrappedKey(1, "transit", "0" * 32, "vault:v1:x")])
    assert 0.9 < time.monotonic() - began < 10
