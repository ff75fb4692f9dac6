"""The master key in the settings: it is made at the first start, and doctor says what it is and whether it opens."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lifecycle import doctor
from lifecycle.config import master_key
from lifecycle.config.settings import Settings, SettingsError, parse
from tests.vault.tokens import KEY, MODULE, TOKEN, SoftToken, ready
from vault.keyring import MasterKeyError, create, source_of
from vault.wrapping.sources import KeySource


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SoftToken]:
    """A token of this process's user: otherwise the unwrapper would become vaultd's."""
    monkeypatch.setattr(master_key, "own_user", lambda _settings: None)
    return ready(tmp_path / "token")


def settings(token: SoftToken, source: str = "pkcs11") -> Settings:
    text = f"""
[sallyport]
state_dir = "{token.directory.parent}/state"
[sallyport.vault]
key_source = "{source}"
[sallyport.vault.pkcs11]
module = "{MODULE}"
token_label = "{TOKEN}"
key_label = "{KEY}"
pin_file = "{token.pin_file}"
environment = {{SOFTHSM2_CONF = "{token.environment["SOFTHSM2_CONF"]}"}}
"""
    return parse(tomllib.loads(text), "test.toml", {})


def test_the_first_start_makes_a_key_of_the_source_and_the_next_one_keeps_it(token: SoftToken) -> None:
    configured = settings(token)
    assert "pkcs11: the key is made at the first start" == master_key.state(configured)
    master_key.prepare(configured)
    made = configured.master_key_file.read_bytes()
    assert KeySource.PKCS11 == source_of(configured.master_key_file)
    assert f"pkcs11: {configured.master_key_file} opens" == master_key.state(configured)
    token.remove()
    master_key.prepare(configured)  # the token is not asked
    assert made == configured.master_key_file.read_bytes()
    with pytest.raises(MasterKeyError, match="does not open"):
        master_key.state(configured)


def test_without_a_usable_token_no_key_is_made(token: SoftToken) -> None:
    token.destroy()
    with pytest.raises(MasterKeyError, match="no master key can be made: the token sallyport has no secret key"):
        master_key.prepare(settings(token))
    assert not settings(token).master_key_file.exists()
    with pytest.raises(MasterKeyError, match="no secret key"):
        master_key.state(settings(token))


def test_doctor_reports_a_key_of_another_source(token: SoftToken) -> None:
    """The key of a file opens under settings for a token, until it is changed."""
    path = settings(token).master_key_file
    master_key.make_directories(settings(token))
    create(path)
    assert f"file: {path} opens" == master_key.state(settings(token, "file"))
    with pytest.raises(SettingsError, match=r"of the source file, and .* is pkcs11"):
        master_key.state(settings(token))


def test_doctor_has_a_line_for_the_key(token: SoftToken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ask_hostd", lambda _path: [])
    master_key.make_directories(settings(token))
    token.write_pin("905317")
    lines = {check.name: check for check in doctor.diagnose(settings(token))}
    assert not lines["key"].ok
    assert "refuses the PIN" in lines["key"].line()
    assert "docs/guides/wrap-the-master-key.md" in lines["key"].line()
