"""Properties of `vault.custody`, without a socket or a log: its decision, its changes, and failing writes."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from vault import custody
from vault.authority import ANY, ROOT_LIFETIME
from vault.custody import MAX_FORMER_INLINE, MAX_LEASE, Consent, Custody, CustodyError, SandboxState
from vault.grants import MAX_GRANTS, Grant, GrantError, Refusal, RequestScope, SecretBinding
from vault.keyring import Keyring
from vault.secret import Secret
from vault.stores.directory import SealedDirectory
from vault.stores.port import FORMER_FOR, DamagedSecretError, MemoryStore, SecretInfo

KEYRING = Keyring(bytes(range(32)))
NOW = datetime(2026, 3, 1, tzinfo=UTC)
BINDING = SecretBinding.make(["api.good.test"])
STORED = Grant.make("token", "api.good.test", 443, "https")
MINE = Grant.make("inline:a", "mine.test", 443, "https")
OTHER = Grant.make("inline:a", "other.test", 443, "https")
SECOND = Grant.make("inline:b", "mine.test", 443, "https")
ONE, TWO = Secret("value-no-1"), Secret("value-no-2")
SANDBOX = "sbx-1"


class Place:
    """A custody with its own files, and a clock that the test sets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = NOW
        self.store = MemoryStore(lambda: self.now)
        self.store.put("token", Secret("value-of-token"), BINDING)
        self._opened: list[SealedDirectory] = []
        self.custody = self.again()

    def again(self) -> Custody:
        """Return the custody that a restarted vaultd would read, beside the same stored secrets."""
        self.close()
        self._opened = [SealedDirectory(self.path / part, KEYRING, part) for part in ("sandboxes", "lineages")]
        self.custody = Custody(self.store, *self._opened, lambda: self.now)
        return self.custody

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()

    def open(self, *grants: Grant, sandbox: str = SANDBOX, lineage: str = "lin-1", **inline: Any) -> str:
        values = {f"inline:{name}": value for name, value in inline.items()}
        return self.custody.open(self.custody.plan(sandbox, lineage, grants, values))

    def file(self, part: str, name: str, prefix: str = "=") -> Path:
        return self.path / part / f"{prefix}{name}.sealed"

    def files(self) -> list[str]:
        """Return the names of the records on disk."""
        return sorted(path.name[1:-7] for path in self.path.glob("*/=*"))

    @contextlib.contextmanager
    def no_room(self, part: str, name: str) -> Iterator[None]:
        """Prevent writes under `name`: a directory has the name of its new file."""
        self.file(part, name, "+").mkdir()
        with pytest.raises(OSError):
            yield
        self.file(part, name, "+").rmdir()

    def state(self, sandbox: str = SANDBOX) -> SandboxState:
        return self.custody._sandboxes[sandbox]

    def may(self, grant: Grant, sandbox: str = SANDBOX) -> str:
        """Return the code with which a release is refused; an empty text if it is not."""
        found = self.custody.decide(sandbox, grant, "GET", "/")
        return found.code if isinstance(found, Refusal) else ""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Make an empty custody whose store has `token`."""
    made = Place(tmp_path)
    yield made
    made.close()


def refused(code: str, call: Callable[..., object], *arguments: Any, **named: Any) -> str:
    """Check the code with which a call is refused. Return the message."""
    with pytest.raises(CustodyError) as caught:
        call(*arguments, **named)
    assert code == caught.value.code
    return str(caught.value)


# -- writes, and writes that fail


def test_all_of_a_sandbox_is_read_back(place: Place) -> None:
    place.custody.open(place.custody.plan(SANDBOX, "lin-1", [STORED, MINE], {"inline:a": ONE}, None, ["a.test"]))
    place.custody.advance(SANDBOX, 3)
    place.custody.regrant(place.custody.replan(SANDBOX, [STORED, MINE], {"inline:a": TWO}, bounds=[MINE, OTHER]))
    place.open(sandbox="sbx-2", lineage="lin-2")
    before = {name: place.state(name) for name in place.custody.names()}
    place.again()
    assert before == {name: place.state(name) for name in place.custody.names()}
    state = place.state()
    assert (SANDBOX, "lin-1", 3) == (state.sandbox, state.lineage, state.generation)
    assert (frozenset({STORED, MINE}), {"inline:a": TWO}) == (state.grants, state.inline)
    assert (frozenset({MINE, OTHER}), frozenset({"a.test"})) == (state.bounds, state.names)
    assert {"mine.test": (ONE,)} == {host: tuple(one.value for one in former) for host, former in state.former.items()}


def test_a_sandbox_that_cannot_be_written_is_not_open(place: Place) -> None:
    """Neither now nor after a restart of vaultd, which deletes the root that no sandbox uses."""
    with place.no_room("sandboxes", SANDBOX):
        place.open(STORED, MINE, a=ONE)
    assert ([], False) == (place.custody.names(), place.custody.known(SANDBOX))
    assert "unknown_sandbox" == place.may(STORED)
    refused("unknown_sandbox", place.custody.value, SANDBOX, "inline:a")
    refused("unknown_sandbox", place.custody.issue, SANDBOX)
    assert [] == place.again().names()
    assert [] == place.files()
    place.open(STORED)
    assert "" == place.may(STORED)


def test_a_lineage_that_cannot_be_written_opens_no_sandbox(place: Place) -> None:
    with place.no_room("lineages", "lin-1"):
        place.open(STORED)
    assert ([], []) == (place.custody.names(), place.files())
    place.open(STORED)
    assert [SANDBOX] == place.custody.names()


def test_a_change_that_cannot_be_written_leaves_no_grant_until_one_can(place: Place) -> None:
    """Neither the former nor the new grants count, and no new value is stored. On disk the former state stays."""
    place.open(STORED, MINE, a=ONE)
    place.custody.advance(SANDBOX, 2)
    before = place.state()
    wanted = place.custody.replan(SANDBOX, [STORED, MINE, SECOND], {"inline:a": TWO, "inline:b": TWO})
    with place.no_room("sandboxes", SANDBOX):
        place.custody.regrant(wanted)
    assert replace(before, grants=frozenset()) == place.state()
    assert ["not_granted"] * 3 == [place.may(grant) for grant in (STORED, MINE, SECOND)]
    assert [] == place.custody.users("token")
    assert place.custody.known(SANDBOX)
    refused("stale_generation", place.custody.advance, SANDBOX, 1)
    place.custody.regrant(wanted)
    assert ["", "", ""] == [place.may(grant) for grant in (STORED, MINE, SECOND)]
    assert TWO == place.custody.value(SANDBOX, "inline:a")


def test_after_a_change_that_could_not_be_written_the_next_vaultd_has_the_former_state(place: Place) -> None:
    place.open(STORED, MINE, a=ONE)
    before = place.state()
    with place.no_room("sandboxes", SANDBOX):
        place.custody.regrant(place.custody.replan(SANDBOX, [MINE], {"inline:a": TWO}))
    place.again()
    assert before == place.state()
    assert ONE == place.custody.value(SANDBOX, "inline:a")


def test_a_generation_that_cannot_be_written_does_not_count(place: Place) -> None:
    place.open()
    with place.no_room("sandboxes", SANDBOX):
        place.custody.advance(SANDBOX, 2)
    assert 0 == place.state().generation
    place.custody.advance(SANDBOX, 2)
    place.again()
    assert 2 == place.state().generation


def test_what_cannot_be_removed_gets_nothing_and_is_still_known(place: Place) -> None:
    place.open(STORED, MINE, a=ONE)
    path = place.file("sandboxes", SANDBOX)
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError):
        place.custody.close(SANDBOX)
    assert ["not_granted", "not_granted"] == [place.may(grant) for grant in (STORED, MINE)]
    state = place.state()
    assert ({}, {}, frozenset(), frozenset()) == (state.inline, state.former, state.bounds, state.grants)
    refused("exists", place.custody.plan, SANDBOX, "lin-1", [], {})
    path.rmdir()
    place.custody.close(SANDBOX)
    assert ([], []) == (place.custody.names(), place.files())


def test_a_root_that_cannot_be_removed_keeps_its_last_sandbox_known(place: Place) -> None:
    place.open(STORED)
    path = place.file("lineages", "lin-1")
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError):
        place.custody.close(SANDBOX)
    assert [SANDBOX] == place.custody.names()
    path.rmdir()
    place.custody.close(SANDBOX)
    assert ([], []) == (place.custody.names(), place.files())


def test_a_record_that_is_there_again_after_its_removal_is_residue(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` succeeds only after a check that the record and the root are absent."""
    place.open()
    kept = {part: place.file(part, name) for part, name in (("sandboxes", SANDBOX), ("lineages", "lin-1"))}
    content = {part: path.read_bytes() for part, path in kept.items()}
    remove = SealedDirectory.remove
    putting: list[str] = []

    def put_back(directory: SealedDirectory, name: str) -> bool:
        found = remove(directory, name)
        if directory._purpose in putting:
            kept[directory._purpose].write_bytes(content[directory._purpose])
        return found

    monkeypatch.setattr(SealedDirectory, "remove", put_back)
    for part in kept:
        putting[:] = [part]
        refused("residue", place.custody.close, SANDBOX)
        assert [SANDBOX] == place.custody.names()
    putting.clear()
    place.custody.close(SANDBOX)
    assert ([], []) == (place.custody.names(), place.files())


def test_closing_keeps_the_root_of_a_lineage_in_use(place: Place) -> None:
    root = place.open()
    place.open(sandbox="sbx-2")
    place.custody.close(SANDBOX)
    assert ["lin-1", "sbx-2"] == place.files()
    assert root == place.open()
    place.custody.close("sbx-2")
    place.custody.close(SANDBOX)
    place.custody.close(SANDBOX)
    assert [] == place.files()
    refused("invalid", place.custody.close, "../x")


def test_roots_that_no_sandbox_uses_go_at_the_start_and_others_stay(place: Place) -> None:
    place.open()
    place.open(sandbox="sbx-2", lineage="lin-2")
    place.close()
    with contextlib.closing(SealedDirectory(place.path / "sandboxes", KEYRING, "sandboxes")) as files:
        files.remove("sbx-2")
    place.again()
    assert ["lin-1", SANDBOX] == place.files()


@pytest.mark.parametrize("damage", ["bytes", "name", "grant"])
def test_a_damaged_record_gets_nothing_and_its_root_stays(place: Place, damage: str) -> None:
    """The record does not show which root it needs. Its name stays in use until it is closed."""
    place.open(STORED)
    place.open(sandbox="sbx-2", lineage="lin-2")
    place.close()
    with contextlib.closing(SealedDirectory(place.path / "sandboxes", KEYRING, "sandboxes")) as files:
        metadata, body = files.read(SANDBOX)
        if damage == "name":
            files.write(SANDBOX, *files.read("sbx-2"))
        if damage == "grant":
            files.write(SANDBOX, metadata, body.replace(b'"port": 443', b'"port": 0'))
    if damage == "bytes":
        place.file("sandboxes", SANDBOX).write_bytes(b"SPV1")
    place.again()
    assert ["sbx-2"] == place.custody.names()
    assert "unknown_sandbox" == place.may(STORED)
    assert ["lin-1", "lin-2"] == sorted(set(place.files()) - {SANDBOX, "sbx-2"})
    refused("exists", place.custody.plan, SANDBOX, "lin-1", [], {})
    place.custody.close(SANDBOX)
    place.open(STORED)


def test_a_record_from_before_there_were_bounds_has_its_grants_for_bounds(place: Place) -> None:
    place.open(STORED, MINE, a=ONE)
    place.close()
    with contextlib.closing(SealedDirectory(place.path / "sandboxes", KEYRING, "sandboxes")) as files:
        metadata, body = files.read(SANDBOX)
        content = custody.json.loads(body)
        kept = {name: content[name] for name in ("grants", "inline")}
        files.write(SANDBOX, metadata, custody.json.dumps(kept).encode())
    place.again()
    assert SandboxState(SANDBOX, "lin-1", 0, frozenset({STORED, MINE}), {"inline:a": ONE}, {}, frozenset({MINE})) == (
        place.state()
    )


# -- inline and stored secrets


def test_a_grant_of_an_inline_secret_does_not_become_one_of_a_stored_secret_unasked(place: Place) -> None:
    """The stored secret came later, with the same name. Its own binding decides, as for a new grant."""
    evil = Grant.make("shared", "evil.test", 443, "https")
    place.custody.open(place.custody.plan(SANDBOX, "lin-1", [evil], {"shared": ONE}))
    place.store.put("shared", TWO, BINDING)
    assert ("", ONE) == (place.may(evil), place.custody.value(SANDBOX, "shared"))
    assert ([], ()) == (place.custody.users("shared"), place.custody.former(SANDBOX, evil))
    refused("not_bound", place.custody.replan, SANDBOX, [evil], {})
    refused("not_bound", place.custody.regrant, replace(place.state(), inline={}, bounds=frozenset()))
    refused("exists", place.custody.replan, SANDBOX, [evil], None)
    assert ("", ONE) == (place.may(evil), place.custody.value(SANDBOX, "shared"))
    narrowed = place.custody.narrowed(SANDBOX, [evil], [])
    assert (frozenset(), {}) == (narrowed.grants, narrowed.inline)
    place.custody.regrant(narrowed)
    assert "not_granted" == place.may(evil)


def test_a_grant_that_becomes_one_of_a_stored_secret_is_no_narrowing(place: Place) -> None:
    good = Grant.make("shared", "api.good.test", 443, "https")
    place.custody.open(place.custody.plan(SANDBOX, "lin-1", [good], {"shared": ONE}))
    place.store.put("shared", TWO, BINDING)
    planned = place.custody.replan(SANDBOX, [good], {})
    assert not place.custody.narrows(planned)
    assert {"shared"} == place.custody.regrant(planned)
    assert (TWO, [SANDBOX]) == (place.custody.value(SANDBOX, "shared"), place.custody.users("shared"))


def test_a_stored_secret_that_was_granted_keeps_its_name(place: Place) -> None:
    place.open(STORED)
    message = refused("exists", place.custody.replan, SANDBOX, [STORED], {"token": ONE})
    assert "stored secret" in message
    refused("exists", place.custody.plan, "sbx-2", "lin-1", [], {"token": ONE})


def test_a_damaged_stored_secret_keeps_its_name(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(_name: str) -> SecretInfo:
        raise DamagedSecretError("damaged")

    monkeypatch.setattr(place.store, "info", damaged)
    refused("exists", place.custody.plan, SANDBOX, "lin-1", [], {"any": ONE})
    place.open(STORED)  # as with a missing one, only what uses it is affected
    assert "damaged" == place.may(STORED)


def test_grants_that_it_had_are_not_asked_for_again(place: Place) -> None:
    """Other grants can therefore be removed even if the stored secret was deleted. A release still fails."""
    second = Grant.make("second", "api.good.test", 443, "https")
    place.store.put("second", TWO, BINDING)
    place.open(STORED, second)
    place.store.delete("token")
    place.custody.regrant(place.custody.replan(SANDBOX, [STORED], None))
    assert ("unknown_secret", "not_granted") == (place.may(STORED), place.may(second))
    place.custody.regrant(place.custody.replan(SANDBOX, [], None))
    place.custody.regrant(place.custody.replan(SANDBOX, [STORED], None))
    assert "unknown_secret" == place.may(STORED)


def test_grants_that_it_had_do_not_let_others_in(place: Place) -> None:
    """Each new grant is checked, at any position among the existing ones."""
    hosts = [f"h{number}.test" for number in range(40)]
    place.store.put("many", TWO, SecretBinding.make(hosts))
    old = [Grant.make("many", host, 443, "https") for host in hosts]
    place.open(*old)
    for host in ("other.test", "more.test", "third.test"):
        message = refused(
            "not_bound", place.custody.replan, SANDBOX, [*old, Grant.make("many", host, 443, "https")], None
        )
        assert "many: the secret is not bound to this host" == message


# -- planning


@pytest.mark.parametrize(
    ("sandbox", "lineage"),
    [
        ("", "lin-1"),
        ("Sbx", "lin-1"),
        ("-sbx", "lin-1"),
        ("sbx/1", "lin-1"),
        ("sbx-1\n", "lin-1"),
        ("s" * 64, "lin-1"),
        ("sbx-é", "lin-1"),
        (SANDBOX, ""),
        (SANDBOX, "lin/1"),
        (SANDBOX, "lin-1\n"),
        (SANDBOX, "l" * 65),
        (SANDBOX, "é"),
    ],
)
def test_names_of_sandboxes_and_lineages_are_plain(place: Place, sandbox: str, lineage: str) -> None:
    refused("invalid", place.custody.plan, sandbox, lineage, [], {})


def test_the_longest_names_are_taken(place: Place) -> None:
    assert SandboxState("s" * 63, "A._-" * 16, 0, frozenset(), {}) == place.custody.plan("s" * 63, "A._-" * 16, [], {})


def test_planning_changes_nothing_and_opening_plans_again(place: Place) -> None:
    planned = place.custody.plan(SANDBOX, "lin-1", [STORED], {})
    assert ([], []) == (place.custody.names(), place.files())
    place.store.delete("token")
    place.store.put("token", ONE, SecretBinding.make(["other.test"]))
    refused("not_bound", place.custody.open, planned)
    refused("unknown_sandbox", place.custody.replan, SANDBOX, [], None)
    refused("unknown_sandbox", place.custody.narrowed, SANDBOX, [], None)
    refused("unknown_sandbox", place.custody.narrows, planned)
    refused("unknown_sandbox", place.custody.regrant, planned)
    refused("unknown_sandbox", place.custody.advance, SANDBOX, 1)
    refused("unknown_sandbox", place.custody.former, SANDBOX, STORED)


def test_the_number_of_sandboxes_is_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custody, "MAX_SANDBOXES", 2)
    place.open()
    place.open(sandbox="sbx-2")
    refused("full", place.open, sandbox="sbx-3")
    refused("exists", place.open)
    place.custody.close("sbx-2")
    place.open(sandbox="sbx-3")
    assert [SANDBOX, "sbx-3"] == place.custody.names()


def many(count: int) -> list[Grant]:
    return [Grant.make("inline:a", f"h{number}.many.test", 443, "https") for number in range(count)]


def test_grants_inline_secrets_and_bounds_are_bounded(place: Place) -> None:
    """The limit itself is accepted. One more of each kind is refused."""
    value = {"inline:a": ONE}
    values = {f"i{number}": ONE for number in range(MAX_GRANTS + 1)}
    plan = place.custody.plan
    assert MAX_GRANTS == len(plan(SANDBOX, "lin-1", many(MAX_GRANTS), value).grants)
    assert MAX_GRANTS == len(plan(SANDBOX, "lin-1", [], dict(list(values.items())[:-1])).inline)
    assert MAX_GRANTS == len(plan(SANDBOX, "lin-1", [], value, many(MAX_GRANTS)).bounds)
    wildcard = [Grant.make("inline:a", "*.many.test", 443, "https")]
    refused("full", plan, SANDBOX, "lin-1", many(MAX_GRANTS + 1), value, wildcard)
    refused("full", plan, SANDBOX, "lin-1", [], values)
    refused("full", plan, SANDBOX, "lin-1", [], value, many(MAX_GRANTS + 1))


@pytest.mark.parametrize(
    ("inline", "code"),
    [({"a": Secret("")}, "invalid"), ({"a": Secret("x" * 65537)}, "invalid"), ({"a": Secret("x")}, "")],
)
def test_an_inline_value_must_be_a_text_that_can_be_kept(place: Place, inline: Mapping[str, Secret], code: str) -> None:
    place.open(sandbox="sbx-2")
    if code:
        refused(code, place.custody.plan, SANDBOX, "lin-1", [], inline)
        refused(code, place.custody.replan, "sbx-2", [], inline)
    else:
        assert inline == place.custody.plan(SANDBOX, "lin-1", [], inline).inline


def test_an_inline_name_must_be_printable(place: Place) -> None:
    with pytest.raises(GrantError):
        place.custody.plan(SANDBOX, "lin-1", [], {"a\n": ONE})


@pytest.mark.parametrize(
    ("grants", "bounds", "bound"),
    [
        ([MINE, STORED], None, {MINE}),
        ([MINE], [MINE, OTHER], {MINE, OTHER}),
        ([], [MINE, STORED, SECOND], {MINE}),  # there are no others
        ([MINE], [], None),
        ([MINE], [OTHER], None),
        ([MINE, OTHER], [MINE], None),
    ],
)
def test_an_inline_secret_goes_where_its_value_was_given_for(
    place: Place, grants: list[Grant], bounds: list[Grant] | None, bound: set[Grant] | None
) -> None:
    place.open(sandbox="sbx-2")
    if bound is None:
        refused("not_bound", place.custody.plan, SANDBOX, "lin-1", grants, {"inline:a": ONE}, bounds)
        refused("not_bound", place.custody.replan, "sbx-2", grants, {"inline:a": ONE}, None, bounds)
    else:
        assert bound == place.custody.plan(SANDBOX, "lin-1", grants, {"inline:a": ONE}, bounds).bounds
        assert bound == place.custody.replan("sbx-2", grants, {"inline:a": ONE}, None, bounds).bounds


def test_an_expired_secret_is_granted_without_effect(place: Place) -> None:
    place.store.put("old", ONE, SecretBinding.make(["api.good.test"], expires=NOW + timedelta(hours=1)))
    grant = Grant.make("old", "api.good.test", 443, "https")
    place.now += timedelta(hours=1)
    place.open(grant, STORED)
    assert ("expired", "") == (place.may(grant), place.may(STORED))


# -- replanning, narrowing


def test_replanning_keeps_what_it_is_not_given(place: Place) -> None:
    place.custody.open(place.custody.plan(SANDBOX, "lin-1", [MINE], {"inline:a": ONE}, [MINE, OTHER], ["a.test"]))
    state = place.state()
    assert state == place.custody.replan(SANDBOX, [MINE], None)
    assert replace(state, grants=frozenset()) == place.custody.replan(SANDBOX, [], None)
    assert replace(state, names=frozenset()) == place.custody.replan(SANDBOX, [MINE], None, names=[])
    assert replace(state, grants=frozenset(), inline={}, bounds=frozenset()) == place.custody.replan(SANDBOX, [], {})
    assert replace(state, bounds=frozenset({MINE})) == place.custody.replan(SANDBOX, [MINE], None, bounds=[MINE])
    assert replace(state, inline={"inline:a": TWO}, bounds=frozenset({MINE})) == place.custody.replan(
        SANDBOX, [MINE], {"inline:a": TWO}
    )
    both = {"inline:a": ONE, "inline:b": TWO}
    assert replace(
        state, grants=frozenset({MINE, SECOND}), inline=both, bounds=frozenset({MINE, OTHER, SECOND})
    ) == place.custody.replan(SANDBOX, [MINE, SECOND], {"inline:b": TWO}, ["inline:a"])
    assert replace(state, inline={"inline:a": TWO}, bounds=frozenset({MINE})) == place.custody.replan(
        SANDBOX, [MINE], {"inline:a": TWO}, ["inline:a"]
    )
    assert state == place.custody.replan(SANDBOX, [MINE], None, ["inline:a"])
    refused("unknown_secret", place.custody.replan, SANDBOX, [MINE], None, ["inline:b"])
    assert state == place.state()


def test_a_destination_comes_only_with_the_value(place: Place) -> None:
    place.open(MINE, a=ONE)
    refused("not_bound", place.custody.replan, SANDBOX, [MINE, OTHER], None, None, [MINE, OTHER])
    refused("not_bound", place.custody.replan, SANDBOX, [OTHER], None, ["inline:a"], [OTHER])
    given = place.custody.replan(SANDBOX, [MINE, OTHER], {"inline:a": ONE})
    assert {MINE, OTHER} == given.bounds


def test_narrowing_takes_away_and_adds_nothing(place: Place) -> None:
    place.open(STORED, MINE, OTHER, SECOND, a=ONE, b=TWO)
    state = place.state()
    everything = [STORED, MINE, OTHER, SECOND, Grant.make("x", "x.test", 443, "https")]
    assert state == place.custody.narrowed(SANDBOX, everything, None)
    assert state == place.custody.narrowed(SANDBOX, everything, ["inline:a", "inline:b", "inline:c"], everything)
    assert replace(state, grants=frozenset({MINE})) == place.custody.narrowed(SANDBOX, [MINE], None)
    assert replace(
        state, grants=frozenset({STORED, SECOND}), inline={"inline:b": TWO}, bounds=frozenset({SECOND})
    ) == place.custody.narrowed(SANDBOX, everything, ["inline:b"])
    assert replace(state, grants=frozenset({STORED, MINE}), bounds=frozenset({MINE})) == place.custody.narrowed(
        SANDBOX, everything, None, [MINE]
    )


@pytest.mark.parametrize(
    ("change", "narrows"),
    [
        ({}, True),
        ({"grants": frozenset({MINE})}, True),
        ({"grants": frozenset({STORED, MINE, SECOND})}, False),
        ({"grants": frozenset({STORED}), "inline": {}, "bounds": frozenset()}, True),
        ({"inline": {"inline:a": TWO}}, False),
        ({"inline": {"inline:a": ONE, "inline:b": ONE}}, False),
        ({"bounds": frozenset({MINE, OTHER})}, False),
        ({"inline": {}, "bounds": frozenset()}, False),  # its grant would be one of a stored secret
        ({"names": frozenset({"a.test"})}, True),
        ({"names": frozenset({"a.test", "c.test"})}, False),
        ({"names": frozenset({ANY})}, False),
        ({"names": frozenset()}, True),
        ({"metadata": {"team": "b"}}, False),
        ({"grants": frozenset({STORED}), "metadata": {}}, False),
    ],
)
def test_what_only_takes_away_is_known_as_such(place: Place, change: Mapping[str, Any], narrows: bool) -> None:
    place.custody.open(
        place.custody.plan(
            SANDBOX, "lin-1", [STORED, MINE], {"inline:a": ONE}, None, ["a.test", "b.test"], {"team": "a"}
        )
    )
    assert narrows == place.custody.narrows(replace(place.state(), **change))


def test_a_change_keeps_the_image_that_was_reported_after_its_plan(place: Place) -> None:
    place.open(STORED)
    planned = place.custody.replan(SANDBOX, [STORED], None)
    place.custody.advance(SANDBOX, 1, ["base", "sha256:1"])
    place.custody.regrant(planned)
    assert ({"base", "sha256:1"}, 1) == (place.state().images, place.state().generation)


def test_any_names_are_less_than_all_names(place: Place) -> None:
    place.open()
    assert place.custody.narrows(replace(place.state(), names=frozenset({"a.test"})))


@pytest.mark.parametrize(
    ("grants", "inline", "keep", "ended"),
    [
        ([STORED, MINE, SECOND], None, None, set()),
        ([STORED, MINE], None, None, {"inline:b"}),
        ([MINE, SECOND], None, None, {"token"}),
        ([STORED, MINE, SECOND], {"inline:a": TWO}, ["inline:b"], {"inline:a"}),
        ([STORED, MINE, SECOND], {"inline:a": ONE}, ["inline:b"], set()),
        ([STORED, MINE], None, ["inline:a"], {"inline:b"}),
        ([], {}, None, {"token", "inline:a", "inline:b"}),
    ],
)
def test_leases_end_of_what_was_taken_away_or_changed(
    place: Place, grants: list[Grant], inline: Mapping[str, Secret] | None, keep: Iterable[str] | None, ended: set[str]
) -> None:
    place.open(STORED, MINE, SECOND, a=ONE, b=TWO)
    assert ended == place.custody.regrant(place.custody.replan(SANDBOX, grants, inline, keep))


def test_a_regrant_is_judged_when_it_is_made_and_keeps_the_generation(place: Place) -> None:
    place.open()
    planned = place.custody.replan(SANDBOX, [STORED], None)
    place.custody.advance(SANDBOX, 4)
    place.custody.regrant(planned)
    assert 4 == place.state().generation
    place.custody.regrant(place.custody.replan(SANDBOX, [], None))
    place.store.delete("token")
    place.store.put("token", ONE, SecretBinding.make(["other.test"]))
    refused("not_bound", place.custody.regrant, planned)
    assert "not_granted" == place.may(STORED)


# -- generations


def test_a_generation_only_grows(place: Place) -> None:
    place.open()
    for generation in (0, -1):
        refused("stale_generation", place.custody.advance, SANDBOX, generation)
    for generation in (1, 1, 3):
        place.custody.advance(SANDBOX, generation)
    for generation in (2, 1, 0):
        refused("stale_generation", place.custody.advance, SANDBOX, generation)
    place.again()
    refused("stale_generation", place.custody.advance, SANDBOX, 2)
    place.custody.advance(SANDBOX, 3)
    assert 3 == place.state().generation


def test_a_generation_that_is_known_is_not_written_again(place: Place) -> None:
    place.open()
    place.custody.advance(SANDBOX, 2)
    before = place.file("sandboxes", SANDBOX).read_bytes()
    place.custody.advance(SANDBOX, 2)
    assert before == place.file("sandboxes", SANDBOX).read_bytes()


# -- the decision


def test_the_decision_over_an_inline_secret(place: Place) -> None:
    """A grant is enough. It has no scope and the longest lease."""
    place.open(MINE, a=ONE)
    for method, path in ((None, None), ("GET", "/")):
        assert Consent(MAX_LEASE, RequestScope()) == place.custody.decide(SANDBOX, MINE, method, path)
    assert "not_granted" == place.may(OTHER)
    assert "unknown_sandbox" == place.may(MINE, "sbx-2")
    assert timedelta(minutes=5) == MAX_LEASE


def test_the_refusal_of_a_missing_secret_has_the_command_for_each_host_of_the_sandbox(place: Place) -> None:
    grants = [Grant.make("put", host, 443, "https") for host in ("api.good.test", "files.good.test")]
    place.open(*grants, Grant.make("other", "elsewhere.test", 443, "https"))
    found = place.custody.decide(SANDBOX, grants[1], "GET", "/")
    assert isinstance(found, Refusal)
    assert found.reason.endswith(": sallyport vault put put --host files.good.test --host api.good.test")


def test_the_decision_over_a_stored_secret(place: Place) -> None:
    """Both grant and binding are checked each time, and a release for a request is within its scope."""
    scope = RequestScope(frozenset({"GET"}), ("/v1/*",))
    place.store.put("put", ONE, SecretBinding.make(["api.good.test"], methods=["GET"], paths=["/v1/*"]))
    grant = Grant.make("put", "api.good.test", 443, "https")
    place.open(grant)

    def decided(method: str | None, path: str | None, *, scrub: bool = False) -> Consent | Refusal:
        return place.custody.decide(SANDBOX, grant, method, path, scrub=scrub)

    assert Consent(MAX_LEASE, scope) == decided("GET", "/v1/x")
    for method, path in (("PUT", "/v1/x"), ("GET", "/v2"), (None, None)):
        found = decided(method, path)
        assert isinstance(found, Refusal)
        assert "not_bound" == found.code
        assert Consent(MAX_LEASE, scope) == decided(method, path, scrub=True)
    place.store.delete("put")
    add = "sallyport vault put put --host api.good.test"
    assert Refusal("unknown_secret", f"the vault has no secret put; the operator adds it: {add}") == decided("GET", "/")
    place.store.put("put", ONE, SecretBinding.make(["other.test"]))
    for scrub in (False, True):
        assert Refusal("not_bound", "put: the secret is not bound to this host") == decided("GET", "/v1/x", scrub=scrub)


def test_a_lease_is_not_longer_than_its_secret(place: Place) -> None:
    end = NOW + timedelta(minutes=10)
    place.store.put("short", ONE, SecretBinding.make(["api.good.test"], expires=end))
    grant = Grant.make("short", "api.good.test", 443, "https")
    place.open(grant)
    for left, lease in ((600, 300), (300, 300), (299, 299), (1, 1)):
        place.now = end - timedelta(seconds=left)
        assert Consent(timedelta(seconds=lease), RequestScope()) == place.custody.decide(SANDBOX, grant, None, None)
    place.now = end
    assert "expired" == place.may(grant)


def test_values_are_of_the_sandbox_before_the_store(place: Place) -> None:
    place.open(STORED, MINE, a=ONE)
    place.open(STORED, SECOND, sandbox="sbx-2", b=TWO)
    assert (ONE, Secret("value-of-token")) == (
        place.custody.value(SANDBOX, "inline:a"),
        place.custody.value(SANDBOX, "token"),
    )
    assert [SANDBOX, "sbx-2"] == place.custody.users("token")
    assert [] == place.custody.users("inline:a")
    place.custody.regrant(place.custody.replan("sbx-2", [SECOND], None))
    assert [SANDBOX] == place.custody.users("token")


# -- former values


def test_former_values_are_looked_for_where_they_went(place: Place) -> None:
    """For a stored secret those of the store.

    For inline ones the last few that were granted for the host, for a day.
    """
    place.open(STORED, MINE, SECOND, a=ONE, b=TWO)
    assert ((), ()) == (place.custody.former(SANDBOX, MINE), place.custody.former(SANDBOX, STORED))
    place.custody.regrant(place.custody.replan(SANDBOX, [STORED, OTHER], {"inline:a": TWO}))
    assert (ONE, TWO) == place.custody.former(SANDBOX, MINE)
    assert () == place.custody.former(SANDBOX, OTHER)
    place.store.rotate("token", TWO)
    assert (Secret("value-of-token"),) == place.custody.former(SANDBOX, STORED)
    place.now += FORMER_FOR - timedelta(seconds=1)
    assert (ONE, TWO) == place.custody.former(SANDBOX, MINE)
    place.now += timedelta(seconds=1)
    assert () == place.custody.former(SANDBOX, MINE)
    place.custody.regrant(place.custody.replan(SANDBOX, [], {}))
    assert ["other.test"] == list(place.state().former)  # expired values are removed with the next change


def test_a_former_value_of_a_pattern_is_looked_for_below_it(place: Place) -> None:
    place.open(Grant.make("inline:a", "*.mine.test", 443, "https"), a=ONE)
    place.custody.regrant(place.custody.replan(SANDBOX, [], {}))
    below, beside = (Grant.make("inline:z", host, 443, "https") for host in ("x.mine.test", "x.other.test"))
    assert (ONE,) == place.custody.former(SANDBOX, replace(below, secret="token"))
    assert () == place.custody.former(SANDBOX, replace(beside, secret="token"))


def test_only_the_last_inline_values_are_kept(place: Place) -> None:
    values = [Secret(f"value-no-{number}") for number in range(MAX_FORMER_INLINE + 2)]
    place.open(MINE, a=values[0])
    for value in values[1:]:
        place.custody.regrant(place.custody.replan(SANDBOX, [MINE], {"inline:a": value}))
    assert tuple(values[1:-1]) == place.custody.former(SANDBOX, MINE)
    place.custody.regrant(place.custody.replan(SANDBOX, [MINE], {"inline:a": values[-1]}))
    assert tuple(values[1:-1]) == place.custody.former(SANDBOX, MINE)


# -- intermediates


def test_an_intermediate_needs_its_sandbox_and_a_root_that_can_be_read(place: Place) -> None:
    root = place.open()
    assert place.custody.issue(SANDBOX).chain_pem.endswith(root)
    path = place.file("lineages", "lin-1")
    content = path.read_bytes()
    path.write_bytes(b"SPV1")
    assert "the lineage's root cannot be read" == refused("damaged", place.custody.issue, SANDBOX)
    refused("damaged", place.open, sandbox="sbx-2")
    path.write_bytes(content)
    place.now += ROOT_LIFETIME
    refused("expired", place.custody.issue, SANDBOX)
    place.custody._lineages.write("lin-1", root.encode(), b"no key")
    refused("damaged", place.custody.issue, SANDBOX)
    os.unlink(path)
    place.custody._lineages.remove("lin-1")
    assert "the lineage's root is missing" == refused("damaged", place.custody.issue, SANDBOX)
    refused("unknown_sandbox", place.custody.issue, "sbx-2")
