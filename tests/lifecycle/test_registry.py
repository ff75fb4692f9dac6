"""The state database: results of look-ups."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from lifecycle.sandboxes.registry import Registry, Sandbox, State

ROW = Sandbox("one", State.RUNNING, "", "", 1.0, 1.0, None, "image", ("true",), "runc")


@pytest.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    """Open a database with one row."""
    made = Registry(tmp_path / "state.db")
    await made.open()
    await made.put(ROW)
    yield made
    await made.close()


async def test_what_another_process_has_committed_is_found_at_once(registry: Registry, tmp_path: Path) -> None:
    """Between two look-ups, without a call by this process."""
    assert ROW == await registry.get("one")
    with closing(sqlite3.connect(tmp_path / "state.db")) as database, database:
        database.execute("UPDATE sandboxes SET secure_access = 1")
    assert replace(ROW, secure_access=True) == await registry.get("one")
    with closing(sqlite3.connect(tmp_path / "state.db")) as database, database:
        database.execute("DELETE FROM sandboxes")
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
