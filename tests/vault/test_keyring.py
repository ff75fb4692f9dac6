"""Properties of `vault.keyring`."""

import base64
import os
import stat
from pathlib import Path

import pytest

from vault.keyring import (
    CREDENTIAL,
    ENVIRONMENT,
    NEXT_ENVIRONMENT,
    Keyring,
    MasterKeyError,
    create,
    load,
    next_file,
)

KEY = bytes(range(32))
TEXT = base64.b64encode(KEY).decode()


def test_a_created_key_file_is_private_and_loads(tmp_path: Path) -> None:
    """`create` makes a file with mode 0600 that `load` accepts, with another key each time."""
    keys = []
    for name in ("a", "b"):
        create(tmp_path / name)
        assert 0o600 == stat.S_IMODE((tmp_path / name).stat().st_mode)
        keys.append(load(tmp_path / name, {}).purpose("x"))
    assert keys[0] != keys[1]


def test_an_existing_key_is_never_overwritten(tmp_path: Path) -> None:
    """A second `create` is refused and changes nothing; through a dangling symlink too."""
    path = tmp_path / "key"
    create(path)
    before = path.read_bytes()
    with pytest.raises(MasterKeyError, match="exists"):
        create(path)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MasterKeyError):
        create(tmp_path / "link")
    assert before == path.read_bytes()
    assert not (tmp_path / "elsewhere").exists()


def test_a_key_whose_creation_was_broken_off_is_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half of a key in its place would keep vaultd from its next start."""

    def fail(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(MasterKeyError, match="No space left"):
            create(tmp_path / "key")
    assert not (tmp_path / "key").exists()
    create(tmp_path / "key")
    assert ["key"] == [path.name for path in tmp_path.iterdir()]
    load(tmp_path / "key", {})


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o700])
def test_a_key_file_others_could_read_is_refused(tmp_path: Path, mode: int) -> None:
    """Any bit beyond owner read and write is refused."""
    path = tmp_path / "key"
    create(path)
    path.chmod(mode)
    with pytest.raises(MasterKeyError, match="mode"):
        load(path, {})


def test_a_link_to_a_key_is_refused(tmp_path: Path) -> None:
    """Neither a symlink nor a second hard link is followed."""
    path = tmp_path / "key"
    create(path)
    (tmp_path / "soft").symlink_to(path)
    with pytest.raises(MasterKeyError):
        load(tmp_path / "soft", {})
    (tmp_path / "hard").hardlink_to(path)
    with pytest.raises(MasterKeyError, match="one name"):
        load(path, {})


@pytest.mark.system  # a change of the owner needs root
def test_a_key_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """The owner must be this process's user or root."""
    path = tmp_path / "key"
    create(path, (700000009, 700000009))
    with pytest.raises(MasterKeyError, match="owned by uid 700000009"):
        load(path, {})


@pytest.mark.parametrize("text", ["", "x", TEXT[:-4], TEXT + "AAAA", "!" * 44, TEXT.replace("=", "")])
def test_a_malformed_key_is_refused_without_being_quoted(tmp_path: Path, text: str) -> None:
    """Only the base64 form of exactly 32 bytes is a key."""
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(MasterKeyError) as caught:
        load(path, {})
    assert not text or text not in str(caught.value).replace(str(path), "")


def test_sources_have_an_order(tmp_path: Path) -> None:
    """The file precedes the credential, which precedes the variable. Without any of them there is an error."""
    create(tmp_path / "file")
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    create(credentials / CREDENTIAL)
    environment = {"CREDENTIALS_DIRECTORY": str(credentials), ENVIRONMENT: TEXT}
    by_file = load(tmp_path / "file", environment).purpose("x")
    by_credential = load(None, environment).purpose("x")
    by_variable = load(None, {ENVIRONMENT: TEXT}).purpose("x")
    assert Keyring(KEY).purpose("x") == by_variable
    assert 3 == len({by_file, by_credential, by_variable})
    with pytest.raises(MasterKeyError, match="no master key"):
        load(None, {})


def test_a_bad_file_is_not_skipped(tmp_path: Path) -> None:
    """A missing configured file is an error even if the variable is set."""
    with pytest.raises(MasterKeyError):
        load(tmp_path / "missing", {ENVIRONMENT: TEXT})


def test_a_successor_comes_from_beside_the_key(tmp_path: Path) -> None:
    """Beside the file, the credential, the variable. A malformed one is an error."""
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    create(tmp_path / "file")
    create(credentials / CREDENTIAL)
    places = {
        next_file(tmp_path / "file"): (tmp_path / "file", {}),
        credentials / f"{CREDENTIAL}-next": (None, {"CREDENTIALS_DIRECTORY": str(credentials)}),
    }
    for following, (path, environment) in places.items():
        assert load(path, environment).successor is None
        create(following)
        found = load(path, environment).successor
        assert found is not None
        assert load(following, {}).purpose("x") == found.purpose("x")
        following.write_text("x")
        with pytest.raises(MasterKeyError):
            load(path, environment)
    found = load(None, {ENVIRONMENT: base64.b64encode(bytes(32)).decode(), NEXT_ENVIRONMENT: TEXT}).successor
    assert found is not None
    assert Keyring(KEY).purpose("x") == found.purpose("x")
