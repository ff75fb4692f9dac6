"""The contract of `vault.stores.port.Store`, for every store."""

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from vault.envelope import unseal
from vault.grants import GrantError, SecretBinding
from vault.keyring import Keyring
from vault.secret import Secret
from vault.stores.directory import SealedDirectory, SealedRecordError
from vault.stores.port import (
    FORMER_FOR,
    MAX_FORMER,
    MAX_SECRETS,
    DamagedSecretError,
    MemoryStore,
    SecretExistsError,
    Store,
    UnfitSecretError,
    UnknownSecretError,
)
from vault.stores.sealed import FileStore

KEYRING = Keyring(bytes(range(32)))
BINDING = SecretBinding.make(["good.test"], methods=["GET"])
CANARY = "canary-77aa01bd"


class Ticks:
    """A clock that advances by one second at each read."""

    def __init__(self) -> None:
        self.now = datetime(2026, 3, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        self.now += timedelta(seconds=1)
        return self.now


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """Return each kind of store, empty."""
    if request.param == "memory":
        yield MemoryStore(Ticks())
        return
    files = FileStore(tmp_path / "secrets", KEYRING, Ticks())
    yield files
    files.close()


def test_a_stored_secret_is_given_back(store: Store) -> None:
    """With value, binding and version 1."""
    info = store.put("a", Secret("value-no-1"), BINDING)
    assert (1, BINDING) == (info.version, info.binding)
    assert info == store.info("a")
    assert Secret("value-no-1") == store.value("a")


def test_put_never_replaces(store: Store) -> None:
    """A second put of a name is refused, and the first value stays."""
    store.put("a", Secret("value-no-1"), BINDING)
    with pytest.raises(SecretExistsError):
        store.put("a", Secret("value-no-2"), BINDING)
    assert Secret("value-no-1") == store.value("a")


def test_rotation_changes_the_value_and_the_version_only(store: Store) -> None:
    """Binding and creation time stay."""
    before = store.put("a", Secret("value-no-1"), BINDING)
    after = store.rotate("a", Secret("value-no-2"))
    assert (2, before.created, BINDING) == (after.version, after.created, after.binding)
    assert after.updated > before.updated
    assert Secret("value-no-2") == store.value("a")


def test_what_was_deleted_is_unknown(store: Store) -> None:
    """Every operation except put refuses an unknown name."""
    store.put("a", Secret("value-no-1"), BINDING)
    store.delete("a")
    for call in (store.info, store.value, store.delete):
        with pytest.raises(UnknownSecretError):
            call("a")
    with pytest.raises(UnknownSecretError):
        store.rotate("a", Secret("value-no-2"))
    assert 1 == store.put("a", Secret("value-no-3"), BINDING).version


def test_the_list_is_sorted_and_has_no_values(store: Store) -> None:
    """Listing shows metadata."""
    for name in ("b", "a", "..", "c"):
        store.put(name, Secret(CANARY), BINDING)
    infos = store.list_infos()
    assert ["..", "a", "b", "c"] == [info.name for info in infos]
    assert CANARY not in repr(infos)


@pytest.mark.parametrize("name", ["", "a/b", "../a", "a\0", "x" * 129])
def test_bad_names_are_refused(store: Store, name: str) -> None:
    """A name is never a path."""
    with pytest.raises(GrantError):
        store.put(name, Secret("value-no-1"), BINDING)


@pytest.mark.parametrize("value", ["", "a\r\nb", " a", "x" * 65537])
def test_bad_values_are_refused_by_put_and_rotate(store: Store, value: str) -> None:
    """The former value stays."""
    store.put("a", Secret("value-no-1"), BINDING)
    with pytest.raises(UnfitSecretError):
        store.put("b", Secret(value), BINDING)
    with pytest.raises(UnfitSecretError):
        store.rotate("a", Secret(value))
    assert Secret("value-no-1") == store.value("a")


def test_the_number_of_secrets_is_bounded() -> None:
    """One more than the limit is refused."""
    store = MemoryStore()
    for number in range(MAX_SECRETS):
        store.put(f"s{number}", Secret("value-no-1"), BINDING)
    with pytest.raises(UnfitSecretError):
        store.put("more", Secret("value-no-1"), BINDING)


def test_a_file_store_comes_back(tmp_path: Path) -> None:
    """A second open with the same key gives the same secrets."""
    first = FileStore(tmp_path / "secrets", KEYRING)
    info = first.put("a", Secret("value-no-1"), BINDING)
    first.close()
    second = FileStore(tmp_path / "secrets", KEYRING)
    assert [info] == second.list_infos()
    assert Secret("value-no-1") == second.value("a")
    second.close()


def test_another_key_opens_nothing(tmp_path: Path) -> None:
    """A store does not open with a wrong key, and is not changed."""
    first = FileStore(tmp_path / "secrets", KEYRING)
    first.put("a", Secret("value-no-1"), BINDING)
    first.close()
    with pytest.raises(SealedRecordError, match="another master key"):
        FileStore(tmp_path / "secrets", Keyring(bytes(32)))
    again = FileStore(tmp_path / "secrets", KEYRING)
    assert Secret("value-no-1") == again.value("a")
    again.close()


def test_a_damaged_record_can_only_be_deleted(tmp_path: Path) -> None:
    first = FileStore(tmp_path / "secrets", KEYRING)
    first.put("a", Secret("value-no-1"), BINDING)
    first.close()
    (path,) = (tmp_path / "secrets").glob("=*")
    path.write_bytes(b"SPV1")
    other = FileStore(tmp_path / "secrets", KEYRING)
    assert (["a"], []) == (other.damaged, other.list_infos())
    with pytest.raises(DamagedSecretError):
        other.value("a")
    with pytest.raises(SecretExistsError):
        other.put("a", Secret("value-no-2"), BINDING)
    other.delete("a")
    assert [] == other.damaged
    other.close()


def test_every_flipped_bit_of_a_file_is_detected(tmp_path: Path) -> None:
    """A changed file gives no value, neither in the open store nor after it was opened again."""
    store = FileStore(tmp_path / "secrets", KEYRING)
    store.put("a", Secret(CANARY), BINDING)
    (path,) = (tmp_path / "secrets").glob("=*")
    content = path.read_bytes()
    for index in range(len(content)):
        changed = bytearray(content)
        changed[index] ^= 1 << index % 8
        path.write_bytes(changed)
        with pytest.raises(DamagedSecretError):
            store.value("a")
    path.write_bytes(content)
    assert Secret(CANARY) == store.value("a")
    store.close()


def test_records_cannot_be_exchanged_or_put_back(tmp_path: Path) -> None:
    """A file with another's name, a body with other metadata, and an older file are each detected."""
    store = FileStore(tmp_path / "secrets", KEYRING)
    for name in ("a", "b"):
        store.put(name, Secret("value-no-1"), BINDING)
    first, second = sorted((tmp_path / "secrets").glob("=*"))
    old = first.read_bytes()
    store.rotate("a", Secret("value-no-2"))
    new = first.read_bytes()
    end = 8 + int.from_bytes(old[4:8])  # the end of the sealed metadata
    for content in (second.read_bytes(), old, old[:end] + new[8 + int.from_bytes(new[4:8]) :]):
        first.write_bytes(content)
        with pytest.raises(DamagedSecretError):
            store.value("a")
    store.close()


def test_files_are_private_and_hold_no_plaintext(tmp_path: Path) -> None:
    """Mode 0600 below 0700. Neither value nor binding is readable."""
    store = FileStore(tmp_path / "secrets", KEYRING)
    store.put("a", Secret(CANARY), BINDING)
    (path,) = (tmp_path / "secrets").glob("=*")
    assert (0o700, 0o600) == ((tmp_path / "secrets").stat().st_mode & 0o777, path.stat().st_mode & 0o777)
    assert not any(part in path.read_bytes() for part in (CANARY.encode(), b"good.test"))
    store.close()


def test_links_are_not_followed(tmp_path: Path) -> None:
    """Neither a record nor the directory may be a symlink. Other users cannot enter the directory."""
    store = FileStore(tmp_path / "secrets", KEYRING)
    store.put("a", Secret("value-no-1"), BINDING)
    (path,) = (tmp_path / "secrets").glob("=*")
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    with pytest.raises(DamagedSecretError):
        store.value("a")
    store.rotate("a", Secret("value-no-2"))  # replaces the link itself, not its target
    assert Secret("value-no-2") == store.value("a")
    assert not path.is_symlink()
    store.close()
    (tmp_path / "link").symlink_to(tmp_path / "secrets")
    with pytest.raises(OSError):
        FileStore(tmp_path / "link", KEYRING)
    (tmp_path / "secrets").chmod(0o750)
    with pytest.raises(PermissionError):
        FileStore(tmp_path / "secrets", KEYRING)


def test_a_record_that_is_a_pipe_is_damaged_and_waits_for_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "secrets", KEYRING)
    store.put("a", Secret("value-no-1"), BINDING)
    (path,) = (tmp_path / "secrets").glob("=*")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DamagedSecretError):
        store.value("a")
    store.close()


def test_a_link_that_leads_nowhere_takes_the_name_of_a_record(tmp_path: Path) -> None:
    files = SealedDirectory(tmp_path / "v", KEYRING, "p")
    assert not files.exists("a")
    (tmp_path / "v" / "=a.sealed").symlink_to(tmp_path / "nowhere")
    assert files.exists("a")
    files.close()


def test_an_index_that_cannot_be_replaced_leaves_no_file(tmp_path: Path) -> None:
    files = SealedDirectory(tmp_path / "v", KEYRING, "p")
    (tmp_path / "v" / ".index").mkdir()
    with pytest.raises(IsADirectoryError):
        files.write("a", b"", b"")
    assert [] == list((tmp_path / "v").glob(".new-*"))
    files.close()


def test_the_index_is_sealed_for_its_purpose_and_place(tmp_path: Path) -> None:
    """The context is part of the format: with another one no vault of an earlier version would open."""
    files = SealedDirectory(tmp_path / "v", KEYRING, "p")
    files.write("a", b"m", b"b")
    files.close()
    opened = unseal(KEYRING.purpose("p"), b"p\0\0index", (tmp_path / "v" / ".index").read_bytes())
    assert ["a"] == list(json.loads(opened)["digests"])


def test_an_index_is_adopted_once(tmp_path: Path) -> None:
    files = SealedDirectory(tmp_path / "v", KEYRING, "p")
    files.write("a", b"m", b"b")
    files.close()
    index = tmp_path / "v" / ".index"
    index.unlink()
    files = SealedDirectory(tmp_path / "v", KEYRING, "p", adopt=True)
    assert not files.indexed
    files.adopt()
    assert files.indexed
    written = index.read_bytes()
    files.adopt()
    assert written == index.read_bytes()
    files.close()


def test_a_half_written_file_is_removed(tmp_path: Path) -> None:
    """A file that a crash left before its rename is not a record, and is removed."""
    (tmp_path / "secrets").mkdir(mode=0o700)
    (tmp_path / "secrets" / ".new-0011").write_bytes(b"x")
    store = FileStore(tmp_path / "secrets", KEYRING)
    assert [] == list((tmp_path / "secrets").iterdir())
    store.close()


def test_replaced_values_are_kept_for_a_while_and_never_for_long(store: Store) -> None:
    """The last few are kept for a day, and not longer than the secret."""
    store.put("a", Secret("value-no-0"), BINDING)
    assert () == store.former("a")
    for number in range(1, 8):
        store.rotate("a", Secret(f"value-no-{number}"))
    assert tuple(Secret(f"value-no-{number}") for number in range(7 - MAX_FORMER, 7)) == store.former("a")
    assert Secret("value-no-7") == store.value("a")
    store._clock.now += FORMER_FOR  # type: ignore[attr-defined]
    assert () == store.former("a")
    store.rotate("a", Secret("value-no-8"))
    assert (Secret("value-no-7"),) == store.former("a")
    store.delete("a")
    store.put("a", Secret("value-no-9"), BINDING)
    assert () == store.former("a")


def test_former_values_are_sealed_and_read_back(tmp_path: Path) -> None:
    files = FileStore(tmp_path / "secrets", KEYRING)
    files.put("a", Secret(CANARY), BINDING)
    files.rotate("a", Secret("value-no-2"))
    files.close()
    assert all(CANARY.encode() not in path.read_bytes() for path in (tmp_path / "secrets").iterdir())
    again = FileStore(tmp_path / "secrets", KEYRING)
    assert ((Secret(CANARY),), Secret("value-no-2")) == (again.former("a"), again.value("a"))
    again.close()


def test_a_record_from_before_there_were_former_values_is_read(tmp_path: Path) -> None:
    files = FileStore(tmp_path / "secrets", KEYRING)
    info = files.put("a", Secret("value-no-1"), BINDING)
    files.directory.write("a", json.dumps(info.to_json()).encode(), b"value-no-1")
    assert (Secret("value-no-1"), ()) == (files.value("a"), files.former("a"))
    files.rotate("a", Secret("value-no-2"))
    assert (Secret("value-no-1"),) == files.former("a")
    files.close()
