"""The same cases over each source of the master key: file, credential, variable, PKCS#11 token, transit engine.

The token is SoftHSM, and the transit engine is that of a real HashiCorp Vault.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vault.key_sources import Credential, Source, Token, Transit, Variable, copied
from vault.grants import SecretBinding
from vault.keyring import MasterKeyError, create, load, next_file, replace, source_of
from vault.secret import Secret
from vault.vaultd import Vault
from vault.wrapping.asking import Wrapping
from vault.wrapping.sources import KeySource, WrappedKey, WrappingConfig

BINDING = SecretBinding.make(["api.good.test"])
CANARY = "canary-4be1907c35"
PLAIN = {"file": Source, "credential": Credential, "variable": Variable}


@pytest.fixture(params=[*PLAIN, "pkcs11", pytest.param("transit", marks=pytest.mark.system)])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Source]:
    match request.param:
        case "pkcs11":
            made: Source = Token(tmp_path)
        case "transit":
            made = Transit(tmp_path, request.getfixturevalue("vault_server"))
        case name:
            made = PLAIN[name](tmp_path)
    yield made
    made.close()


def test_a_key_is_the_same_at_each_start_and_another_for_each_vault(source: Source) -> None:
    source.make()
    first = source.load().purpose("x")
    assert first == source.load().purpose("x")
    (source.directory / "other").mkdir()
    other = Source(source.directory / "other")
    other.make()
    assert other.load().purpose("x") != first


def test_the_place_of_a_wrapped_key_has_no_key(source: Source) -> None:
    """The control: a plain key opens with nothing but the file."""
    source.make()
    (source.directory / "copy").touch(0o600)
    copy = source.directory / "copy"
    copy.write_bytes(source.stored())
    if source.wraps:
        with pytest.raises(MasterKeyError, match="wrapped"):
            load(copy, {})
    else:
        assert load(copy, {}).purpose("x") == source.load().purpose("x")


def test_a_changed_key_is_refused_without_a_byte_of_it(source: Source) -> None:
    source.make()
    content = source.stored()
    if source.wraps:
        wrapped = WrappedKey.parse(content)
        flipped = wrapped.wrapped[:-6] + ("A" if wrapped.wrapped[-6] != "A" else "B") + wrapped.wrapped[-5:]
        changed = [
            content[:-20],
            content.replace(wrapped.id.encode(), b"0" * 32),
            content.replace(wrapped.wrapped.encode(), flipped.encode()),
            content.replace(b'"version":1', b'"version":2'),
            content.replace(b'"version":1', b'"version":1,"more":1'),
        ]
    else:
        changed = [content.strip()[:-4], b"", b"{}"]
    for each in changed:
        source.store(each)
        with pytest.raises(MasterKeyError) as caught:
            source.load()
        assert content.decode().strip() not in str(caught.value)
    source.store(content)
    source.load()


def stored(source: Source) -> str:
    """Return the secret of the vault, which is opened as vaultd opens it."""
    vault = Vault(source.state / "sealed", source.load())
    try:
        return vault.store.value("token").reveal()
    finally:
        vault.close()


def fill(source: Source) -> None:
    source.make()
    vault = Vault(source.state / "sealed", source.load())
    vault.store.put("token", Secret(CANARY), BINDING)
    vault.close()


def test_a_change_of_the_key_is_complete_or_goes_on_at_each_step(source: Source) -> None:
    """Before, between and after the steps: successor made, everything sealed with it, successor in its place."""
    fill(source)
    former = source.load()
    assert CANARY == stored(source)
    source.follow()
    successor = source.load().successor
    assert successor is not None
    copied(source.state / "sealed", source.directory / "before")
    assert CANARY == stored(source)  # sealed with the successor when it is opened
    assert CANARY == stored(source)
    source.succeed()
    assert source.load().successor is None
    assert successor.purpose("x") == source.load().purpose("x")
    assert CANARY == stored(source)
    with pytest.raises(MasterKeyError, match="another master key"):
        Vault(source.state / "sealed", former)
    Vault(source.directory / "before", former).close()  # the control


def test_a_copy_of_the_files_opens_only_where_the_wrapping_key_is(source: Source) -> None:
    fill(source)
    assert CANARY == stored(source)
    source.lose()
    if source.wraps:
        with pytest.raises(MasterKeyError, match="does not open"):
            stored(source)
        kept = [path.read_bytes() for path in source.directory.rglob("*") if path.is_file()]
        assert not any(CANARY.encode() in each for each in kept)
    else:
        assert CANARY == stored(source)


@pytest.fixture
def both(tmp_path: Path, vault_server: object) -> Iterator[tuple[Token, Transit]]:
    for name in ("token", "transit"):
        (tmp_path / name).mkdir()
    token, transit = Token(tmp_path / "token"), Transit(tmp_path / "transit", vault_server)
    yield token, transit
    token.close()
    transit.close()


@pytest.mark.system
def test_the_key_moves_between_the_sources_and_back(both: tuple[Token, Transit], tmp_path: Path) -> None:
    """File, token, transit engine, file: the settings have both tables, and `key_source` says what a new key is."""
    token, transit = both
    path, sealed = tmp_path / "master-key", tmp_path / "sealed"
    create(path)
    vault = Vault(sealed, load(path, {}))
    vault.store.put("token", Secret(CANARY), BINDING)
    vault.close()
    credentials = {
        KeySource.PKCS11: os.open(token.token.pin_file, os.O_RDONLY),
        KeySource.TRANSIT: os.open(transit.credential, os.O_RDONLY),
    }
    try:
        for wanted in (KeySource.PKCS11, KeySource.TRANSIT, KeySource.FILE, KeySource.PKCS11):
            config = WrappingConfig(wanted, token.config.pkcs11, transit.config.transit)
            wraps = Wrapping(config, tmp_path, credentials)
            former = load(path, {}, wraps)
            create(next_file(path), None, wraps)
            Vault(sealed, load(path, {}, wraps)).close()
            replace(path)
            assert (wanted if wanted is not KeySource.FILE else None) == source_of(path)
            opened = Vault(sealed, load(path, {}, wraps))
            assert CANARY == opened.store.value("token").reveal()
            opened.close()
            with pytest.raises(MasterKeyError, match="another master key"):
                Vault(sealed, former)
    finally:
        for fd in credentials.values():
            os.close(fd)


def test_a_plain_key_beside_a_wrapped_one_does_not_replace_it(tmp_path: Path) -> None:
    """Otherwise a file that appears would have everything sealed with a key that its writer knows."""
    token = Token(tmp_path)
    try:
        token.make()
        create(next_file(token.file))
        with pytest.raises(MasterKeyError, match="key_source is pkcs11"):
            token.load()
        next_file(token.file).unlink()
        token.follow()
        token.config = WrappingConfig(KeySource.FILE, token.config.pkcs11)
        with pytest.raises(MasterKeyError, match=r"of the source pkcs11, and .* is plain"):
            token.load()
    finally:
        token.close()
