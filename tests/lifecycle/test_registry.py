"""The state database: results of look-ups, one owner's rows, on SQLite and PostgreSQL."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from backends import OWNER, table
from sqlalchemy import Connection

from lifecycle.config.serve import DatabaseConfig
from lifecycle.sandboxes.registry import Registry, RegistryError, Sandbox, State

ROW = Sandbox("one", State.RUNNING, "", "", 1795569600.123456, 1.0, None, "image", ("true", "é\0"), "runc")
OTHER = "srv-000000000000000000000002"


class Databases:
    """Registries of several servers on one database."""

    def __init__(self, config: DatabaseConfig | None, path: Path) -> None:
        self._config = config
        self._path = path
        self._open: list[Registry] = []

    async def of(self, owner: str = OWNER) -> Registry:
        registry = Registry(table(self._config, self._path, owner))
        await registry.open()
        self._open.append(registry)
        return registry

    async def close(self) -> None:
        for registry in self._open:
            await registry.close()


@pytest.fixture
async def databases(backend: DatabaseConfig | None, tmp_path: Path) -> AsyncIterator[Databases]:
    made = Databases(backend, tmp_path / "state.db")
    yield made
    await made.close()


@pytest.fixture
async def registry(databases: Databases) -> Registry:
    """Open a database with one row."""
    made = await databases.of()
    await made.put(ROW)
    return made


async def test_what_another_process_has_committed_is_found_at_once(registry: Registry, databases: Databases) -> None:
    """Between two look-ups, without a call by this process."""
    assert ROW == await registry.get("one")
    other = await databases.of()
    await other.update("one", lambda row: replace(row, secure_access=True))
    assert replace(ROW, secure_access=True) == await registry.get("one")
    await other.delete("one")
    assert await registry.get("one") is None


async def test_a_look_up_waits_for_a_write_without_a_waiting_caller(registry: Registry) -> None:
    """The write has begun and its caller was cancelled. A later look-up still finds the written row."""
    begun, may_end = threading.Event(), threading.Event()

    def change(row: Sandbox) -> Sandbox:
        begun.set()
        may_end.wait(30)
        return replace(row, secure_access=True)

    write = asyncio.create_task(registry.update("one", change))
    await asyncio.to_thread(begun.wait, 30)
    write.cancel()
    await asyncio.gather(write, return_exceptions=True)
    look_up = asyncio.create_task(registry.get("one"))
    await asyncio.sleep(0)  # the look-up has begun
    may_end.set()
    assert replace(ROW, secure_access=True) == await look_up


async def test_every_value_of_a_row_comes_back(registry: Registry, databases: Databases) -> None:
    """Also NUL and characters beyond ASCII in JSON, and times to the microsecond."""
    full = Sandbox(
        id="two",
        state=State.PENDING,
        reason="r",
        message='it\'s "quoted" ünd % :x',
        changed_at=1795569600.000001,
        created_at=1795569601.5,
        expires_at=1795569602.25,
        image="image",
        entrypoint=("sh", "-c", "printf '\0'"),
        runtime="runsc",
        metadata={"team": "a", "größe": "b"},
        extensions={"sallyport.policy": "agents"},
        platform={"os": "linux"},
        policy_name="agents",
        network_policy={"defaultAction": "deny", "egress": []},
        policy_digest="d",
        credential_proxy=True,
        secure_access=True,
        vault={"revision": 1},
        lineage="two",
        renew_seconds=86400,
        cpu_nanos=1 << 62,
        memory_bytes=1 << 62,
        disk_bytes=1 << 62,
        key_label="0123456789abcdef",
    )
    await registry.put(full)
    assert full == await registry.get("two") == await (await databases.of()).get("two")
    moved = full.moved(State.STOPPING, "x", "y", 2.0)
    await registry.put(moved)
    assert moved == await registry.get("two")
    assert 2 == await registry.count()
    assert [moved] == await registry.expired(0.0)
    assert 1795569602.25 == await registry.next_expiry(0.0)
    assert await registry.next_expiry(1795569602.25) is None


async def test_after_a_write_without_an_answer_the_rows_are_those_of_the_database(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database has committed, and its answer is lost."""
    database = registry._table._database
    transaction = database.transaction

    @contextlib.contextmanager
    def broken() -> Iterator[Connection]:
        with transaction() as connection:
            yield connection
        raise RegistryError("no answer")

    monkeypatch.setattr(database, "transaction", broken)
    with pytest.raises(RegistryError):
        await registry.put(replace(ROW, id="two", created_at=2.0))
    with pytest.raises(RegistryError):
        await registry.update("one", lambda row: replace(row, reason="changed"))
    assert ["two", "one"] == [row.id for row in (await registry.page([], {}, 1, 10))[0]]
    assert replace(ROW, reason="changed") == await registry.get("one")
    with pytest.raises(RegistryError):
        await registry.delete("two")
    assert (None, 1) == (await registry.get("two"), await registry.count())


async def test_an_exception_in_a_change_writes_nothing(registry: Registry) -> None:
    def change(row: Sandbox) -> Sandbox:
        raise LookupError

    with pytest.raises(LookupError):
        await registry.update("one", change)
    assert ROW == await registry.get("one")
    assert await registry.update("none", change) is None


async def test_filters_and_pages(registry: Registry) -> None:
    """States in any case, labels by exact key and value; nothing in a filter is SQL or a pattern."""
    for number in range(5):
        labels = {"team": "a" if number % 2 else "b", "n%": str(number)}
        await registry.put(replace(ROW, id=f"row{number}", created_at=float(number), metadata=labels))
    names = [row.id for row in (await registry.page([], {}, 1, 3))[0]]
    assert ["row4", "row3", "row2"] == names
    rows, total = await registry.page(["RUNNING", "nothing"], {"team": "b"}, 2, 2)
    assert (["row0"], 3) == ([row.id for row in rows], total)
    for metadata in ({"team": "%"}, {"team": "a' OR '1'='1"}, {"$.team": "a"}, {"te\0am": "a"}, {"team": "a\0"}):
        assert ([], 0) == await registry.page([], metadata, 1, 10)
    assert (1, 0) == ((await registry.page([], {"n%": "3"}, 1, 10))[1], (await registry.page(["' OR"], {}, 1, 10))[1])
    assert ([], 6) == await registry.page([], {}, 1 << 40, 200)


async def test_a_server_has_its_own_rows_only(registry: Registry, databases: Databases) -> None:
    """Another server on the same database can neither see nor change them, in no call."""
    other = await databases.of(OTHER)
    theirs = replace(ROW, id="two", expires_at=5.0)
    await other.put(theirs)
    assert (None, None) == (await registry.get("two"), await other.get("one"))
    assert ([ROW], [theirs]) == (await registry.all(), await other.all())
    assert (1, 1) == (await registry.count(), await other.count())
    assert ([ROW], 1) == await registry.page([], {}, 1, 10)
    assert ([], [theirs]) == (await registry.expired(9.0), await other.expired(9.0))
    assert (None, 5.0) == (await registry.next_expiry(0.0), await other.next_expiry(0.0))
    assert await registry.update("two", lambda row: replace(row, reason="changed")) is None
    assert not await registry.delete("two")
    await registry.shift(100.0)
    with pytest.raises(RegistryError, match="belongs to another server"):
        await registry.put(replace(theirs, reason="taken"))
    assert [theirs] == await other.all()
    assert ROW.changed_at + 100.0 == pytest.approx((await registry.all())[0].changed_at)


async def test_concurrent_changes_of_two_processes_are_not_lost(registry: Registry, databases: Databases) -> None:
    other = await databases.of()
    await registry.update("one", lambda row: replace(row, renew_seconds=0))

    def more(row: Sandbox) -> Sandbox:
        return replace(row, renew_seconds=(row.renew_seconds or 0) + 1)

    await asyncio.gather(*(one.update("one", more) for _ in range(20) for one in (registry, other)))
    assert 40 == (await registry.all())[0].renew_seconds


async def test_servers_that_start_together_migrate_once(databases: Databases) -> None:
    made = await asyncio.gather(*(databases.of(f"srv-{number:024x}") for number in range(4)))
    await asyncio.gather(*(one.put(replace(ROW, id=f"row{number}")) for number, one in enumerate(made)))
    assert [1, 1, 1, 1] == [await one.count() for one in made]
