"""Restored old files are refused, and no crash loses a record or restores an old one."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import vault.stores.directory
from vault.custody import CustodyError
from vault.grants import Grant, SecretBinding
from vault.head import HeadError, StoreHead
from vault.keyring import Keyring
from vault.secret import Secret
from vault.stores.directory import SealedDirectory, SealedRecordError
from vault.stores.port import DamagedSecretError, UnknownSecretError
from vault.vaultd import Vault

OLD, NEW = Keyring(bytes(range(32))), Keyring(bytes(range(1, 33)))
BOTH = Keyring(bytes(range(32)), NEW)
BINDING = SecretBinding.make(["good.test"])
MINE = Grant.make("inline:1/a", "mine.test", 443, "https")


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Callable[[], StoreHead]]:
    """Return a function that opens the head like hostd, for another vaultd each time."""
    fds: list[int] = []

    def opened() -> StoreHead:
        fds.append(os.open(tmp_path / "head", os.O_RDWR | os.O_CREAT, 0o600))
        return StoreHead(fds[-1])

    yield opened
    for fd in fds:
        os.close(fd)


def record(path: Path, part: str, name: str) -> Path:
    return path / part / f"={name}.sealed"


def filled(path: Path, keyring: Keyring = OLD, head: StoreHead | None = None) -> Vault:
    """Return a vault with two secrets and a sandbox."""
    opened = Vault(path, keyring, head)
    for name in ("a", "b"):
        opened.store.put(name, Secret(f"value-of-{name}"), BINDING)
    opened.custody.open(opened.custody.plan("sbx-1", "lin-1", [MINE], {"inline:1/a": Secret("one")}))
    return opened


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("change", ["rotate", "delete"])
def test_a_rotated_or_deleted_secret_does_not_come_back_with_its_file(
    tmp_path: Path, change: str, restart: bool
) -> None:
    opened = filled(tmp_path / "v")
    kept = record(tmp_path / "v", "secrets", "a").read_bytes()
    if change == "rotate":
        opened.store.rotate("a", Secret("value-no-2"))
    else:
        opened.store.delete("a")
    record(tmp_path / "v", "secrets", "a").write_bytes(kept)
    if restart:
        opened.close()
        opened = Vault(tmp_path / "v", OLD)
        assert ["a"] == opened.store.damaged
    with pytest.raises((DamagedSecretError, UnknownSecretError)):
        opened.store.value("a")
    assert Secret("value-of-b") == opened.store.value("b")
    if restart:
        opened.store.delete("a")
        opened.store.put("a", Secret("value-no-3"), BINDING)
        assert Secret("value-no-3") == opened.store.value("a")
    opened.close()


@pytest.mark.parametrize("closed", [False, True])
def test_a_sandbox_does_not_come_back_with_its_files(tmp_path: Path, closed: bool) -> None:
    """Neither a closed sandbox, nor grants and generation from before a change."""
    opened = filled(tmp_path / "v")
    paths = [record(tmp_path / "v", "sandboxes", "sbx-1"), record(tmp_path / "v", "lineages", "lin-1")]
    kept = [path.read_bytes() for path in paths]
    if closed:
        opened.custody.close("sbx-1")
    else:
        opened.custody.regrant(opened.custody.replan("sbx-1", [], {}))
    opened.close()
    for path, content in zip(paths, kept, strict=True):
        path.write_bytes(content)
    opened = Vault(tmp_path / "v", OLD)
    assert [] == opened.custody.names()
    for call in (lambda: opened.custody.advance("sbx-1", 1), lambda: opened.custody.value("sbx-1", "inline:1/a")):
        with pytest.raises(CustodyError):
            call()
    opened.custody.close("sbx-1")
    assert not paths[0].exists()
    opened.close()


def test_a_lineages_root_does_not_come_back_with_its_file(tmp_path: Path) -> None:
    opened = filled(tmp_path / "v")
    path = record(tmp_path / "v", "lineages", "lin-1")
    kept = path.read_bytes()
    opened.custody.close("sbx-1")
    opened.custody.open(opened.custody.plan("sbx-2", "lin-1", [], {}))
    path.write_bytes(kept)
    with pytest.raises(CustodyError, match="cannot be read"):
        opened.custody.issue("sbx-2")
    opened.close()


def test_an_older_index_opens_no_newer_record_and_loses_none(tmp_path: Path) -> None:
    opened = filled(tmp_path / "v")
    index = tmp_path / "v" / "secrets" / ".index"
    older = index.read_bytes()
    opened.store.rotate("a", Secret("value-no-2"))
    opened.store.put("c", Secret("value-of-c"), BINDING)
    newer = index.read_bytes()
    opened.close()
    index.write_bytes(older)
    opened = Vault(tmp_path / "v", OLD)
    assert ["a", "c"] == opened.store.damaged
    opened.close()
    index.write_bytes(newer)
    opened = Vault(tmp_path / "v", OLD)
    assert [Secret("value-no-2"), Secret("value-of-c")] == [opened.store.value(name) for name in "ac"]
    opened.close()


@pytest.mark.parametrize("part", ["secrets", "sandboxes", "lineages", ""])
def test_an_older_copy_of_the_whole_is_refused(tmp_path: Path, head: Callable[[], StoreHead], part: str) -> None:
    """The control is the same copy without a head. A part that was empty before cannot be emptied either."""
    opened = filled(tmp_path / "v", head=head())
    shutil.copytree(tmp_path / "v" / part, tmp_path / "copy")
    opened.store.rotate("a", Secret("value-no-2"))
    opened.custody.open(opened.custody.plan("sbx-2", "lin-2", [], {}))
    opened.close()
    Vault(tmp_path / "v", OLD, head()).close()
    shutil.rmtree(tmp_path / "v" / part)
    shutil.copytree(tmp_path / "copy", tmp_path / "v" / part)
    with pytest.raises(HeadError, match="older copy"):
        Vault(tmp_path / "v", OLD, head())
    Vault(tmp_path / "v", OLD).close()
    shutil.rmtree(tmp_path / "v" / part)
    with pytest.raises(HeadError, match="older copy"):
        Vault(tmp_path / "v", OLD, head())


def test_records_without_an_index_are_refused(tmp_path: Path) -> None:
    filled(tmp_path / "v").close()
    for part in ("secrets", "sandboxes", "lineages", "."):
        index = tmp_path / "v" / part / ".index"
        content = index.read_bytes()
        for changed in (None, content[:-1], b""):
            index.unlink() if changed is None else index.write_bytes(changed)
            with pytest.raises(Exception, match=r"index|another master key"):
                Vault(tmp_path / "v", OLD)
        index.write_bytes(content)
    Vault(tmp_path / "v", OLD).close()


def test_a_vault_from_before_there_was_an_index_is_taken_over_once(
    tmp_path: Path, head: Callable[[], StoreHead]
) -> None:
    opened = filled(tmp_path / "v")
    opened._root.write("keycheck", b"", b"")
    opened.close()
    shutil.copytree(tmp_path / "v", tmp_path / "new")
    for path in (tmp_path / "v").rglob(".index"):
        path.unlink()
    shutil.copytree(tmp_path / "v", tmp_path / "copy")
    opened = Vault(tmp_path / "v", OLD, head())
    assert Secret("value-of-a") == opened.store.value("a")
    assert ["sbx-1"] == opened.custody.names()
    opened.store.rotate("a", Secret("value-no-2"))
    opened.close()
    with pytest.raises(HeadError):
        Vault(tmp_path / "copy", OLD, head())
    with pytest.raises(SealedRecordError):
        Vault(tmp_path / "new", OLD)


def test_a_torn_head_is_the_one_before_it_and_a_foreign_one_is_refused(tmp_path: Path, head: Any) -> None:
    first = head()
    for counter in (1, 2, 3):
        first.record("secrets", counter)
    content = (tmp_path / "head").read_bytes()
    (tmp_path / "head").write_bytes(content[:520] + b"?" + content[521:])
    head().check("secrets", 2)
    with pytest.raises(HeadError):
        head().check("secrets", 1)
    (tmp_path / "head").write_bytes(b"?" * 1024)
    with pytest.raises(HeadError):
        head()


def _die_after(left: int) -> None:
    """Make this process exit at once at its first system call after `left` of them."""
    count = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count > left:
                os._exit(9)
            return call(*arguments, **named)

        return instead

    for name in ("open", "rename", "fsync", "unlink"):
        setattr(vault.stores.directory.os, name, counted(getattr(os, name)))


def steps(path: Path, operation: Callable[[], None]) -> Iterator[None]:
    """Run `operation` on a copy at `path`, killed before its first system call, its second, and so on."""
    shutil.copytree(path, path.with_name("before"))
    left = 0
    while True:
        if (pid := os.fork()) == 0:
            _die_after(left)
            try:
                operation()
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, 9)
        killed = status == 9
        yield
        if not killed:
            break
        left += 1
        shutil.rmtree(path)
        shutil.copytree(path.with_name("before"), path)
    shutil.rmtree(path.with_name("before"))
    assert left > 4


def contents(path: Path, keyring: Keyring) -> dict[str, bytes | None]:
    directory = SealedDirectory(path, keyring, "p")
    found: dict[str, bytes | None] = {}
    for name in directory.names():
        try:
            found[name] = directory.read(name)[1]
        except SealedRecordError:
            found[name] = None
    left = sorted(os.listdir(path))
    directory.close()
    assert not [entry for entry in left if not entry.startswith(("=", ".index"))]
    return found


@pytest.mark.parametrize(
    ("change", "outcomes"),
    [
        ("replace", [{"a": b"1", "b": b"1"}, {"a": b"2", "b": b"1"}]),
        ("add", [{"a": b"1", "b": b"1"}, {"a": b"1", "b": b"1", "c": b"1"}]),
        ("remove", [{"a": b"1", "b": b"1"}, {"a": None, "b": b"1"}, {"b": b"1"}]),
        ("reseal", [{"a": b"1", "b": b"1"}, {"a": b"1", "b": b"1"}]),
    ],
)
def test_a_kill_at_any_step_leaves_the_former_record_or_the_new_one(
    tmp_path: Path, change: str, outcomes: list[dict[str, bytes | None]]
) -> None:
    """In this order: after the new record is visible it stays. A deletion can leave a name that no longer opens."""
    path = tmp_path / "p"
    first = SealedDirectory(path, OLD, "p")
    for name in ("a", "b"):
        first.write(name, b"", b"1")
    first.close()

    def operation() -> None:
        directory = SealedDirectory(path, OLD, "p")
        match change:
            case "replace":
                directory.write("a", b"", b"2")
            case "add":
                directory.write("c", b"", b"1")
            case "remove":
                directory.remove("a")
            case "reseal":
                directory.reseal(NEW)

    seen = [outcomes.index(contents(path, BOTH)) for _ in steps(path, operation)]
    assert sorted(seen) == seen
    if change != "reseal":
        assert len(outcomes) - 1 == seen[-1]


def test_after_a_change_of_the_master_key_the_former_one_opens_nothing(tmp_path: Path) -> None:
    """Interrupted after any directory, it continues there. With only the new key everything opens."""
    filled(tmp_path / "v").close()
    for done in range(4):
        opened = Vault(tmp_path / "v", OLD)
        for part in opened._parts[:done]:
            part.reseal(NEW)
        opened.close()
        if done:
            with pytest.raises(Exception, match="another master key"):
                Vault(tmp_path / "v", NEW)
        opened = Vault(tmp_path / "v", BOTH)
        assert [Secret("value-of-a"), Secret("one")] == [
            opened.store.value("a"),
            opened.custody.value("sbx-1", "inline:1/a"),
        ]
        opened.close()
        opened = Vault(tmp_path / "v", NEW)
        opened.custody.issue("sbx-1")
        assert Secret("value-of-b") == opened.store.value("b")
        opened.close()
        with pytest.raises(Exception, match="another master key"):
            Vault(tmp_path / "v", OLD)
        for part in ("secrets", "sandboxes", "lineages"):
            with pytest.raises(SealedRecordError):
                SealedDirectory(tmp_path / "v" / part, OLD, part)
        shutil.rmtree(tmp_path / "v")
        filled(tmp_path / "v").close()
