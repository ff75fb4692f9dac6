"""The registry: one row per sandbox and per pool, in the state database (`lifecycle.database`).

- Calls are made in one thread, in their order. So writes are serial, a read-modify-write (`update`) is atomic, a reader
  of all rows finds every earlier write, and no call blocks the event loop.
- Only look-ups (`get`, `page`, `count`, `history`) read beside that thread while no call is in progress there: those
  of SQLite in the caller's thread, mostly from memory, those of PostgreSQL in further threads. They see all committed
  rows, also those of other writers.
- An answered write survives a crash of the process and of the host.
- A PostgreSQL that does not answer costs each call a bounded time. A call that has not begun by then is never made.
- A sandbox has a history (`history`), which stays for some time after its removal.
- The database contains no secret, no token, and of an environment only the names.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from lifecycle.sandboxes.ceilings import Ceilings
from lifecycle.sandboxes.pool import Capacity, SandboxPool

if TYPE_CHECKING:
    from lifecycle.database.table import SandboxTable
    from lifecycle.sandboxes.history import Given, History, Removal


_INTERRUPT_SECONDS = 0.1


class RegistryError(Exception):
    """The database could not be read or written. It is unknown whether a write was done. `str()` has no secret."""


class SchemaError(RegistryError):
    """This release cannot use the database's schema. The database was not changed."""


class State(StrEnum):
    """The states of the lifecycle API."""

    PENDING = "Pending"
    RUNNING = "Running"
    PAUSING = "Pausing"
    PAUSED = "Paused"
    RESUMING = "Resuming"
    STOPPING = "Stopping"
    TERMINATED = "Terminated"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class Sandbox:
    """The row of a sandbox. Times are seconds since the epoch. JSON values are plain lists and dicts."""

    id: str
    state: State
    reason: str
    message: str
    changed_at: float
    created_at: float
    expires_at: float | None
    image: str
    entrypoint: tuple[str, ...]
    runtime: str
    metadata: dict[str, str] = field(default_factory=dict)
    extensions: dict[str, str] = field(default_factory=dict)
    platform: dict[str, str] | None = None
    policy_name: str | None = None
    network_policy: dict[str, Any] | None = None
    """The policy that the caller reads back at `/policy`: `{"egress": [...], "defaultAction": ...}`; None without a
    policy.
    """
    policy_digest: str = ""
    credential_proxy: bool = False
    secure_access: bool = False
    vault: dict[str, Any] | None = None
    """The credential vault without its values; None if there is no vault."""
    lineage: str = ""
    renew_seconds: int | None = None
    """Seconds by which an access moves the expiry; None if an access does not move it."""
    pool: str = ""
    """The pool that the sandbox is or was a member of, or empty."""
    idle: bool = False
    """Whether it waits in its pool for a claim. Then no program runs in it, and no caller sees it."""
    cpu_nanos: int | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    """The share of the sandbox in the ceilings; None at a row of an older release, and for a disk without a limit."""
    key_label: str = ""
    """The label of the API key with which the sandbox was created; empty without one."""
    snapshot: str | None = None
    """The snapshot with whose file system it began; None if it began with that of the image."""

    def moved(self, state: State, reason: str, message: str, now: float) -> "Sandbox":
        """Return the same sandbox in another state."""
        return replace(self, state=state, reason=reason, message=message, changed_at=now)


class Registry:
    """The rows of one server."""

    def __init__(self, table: "SandboxTable") -> None:
        self._table = table
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="registry")
        self._readers: ThreadPoolExecutor | None = None
        if table.readers:
            self._readers = ThreadPoolExecutor(max_workers=table.readers, thread_name_prefix="registry-reader")
        self._calls: list[Future[Any]] = []
        """Calls that the thread has and that can be in progress."""
        self._opened = False

    async def open(self) -> None:
        """Open or create the database, and migrate it.

        Raises:
            SchemaError: a newer release migrated it, or its table does not match its schema.
            RegistryError, OSError: it cannot be used.
        """
        await asyncio.wrap_future(self._thread.submit(self._table.open))
        self._opened = True

    @property
    def remote(self) -> bool:
        """Whether the database is a server, which can be away and come back."""
        return self._readers is not None

    async def close(self) -> None:
        """Close the database after the pending calls."""
        if self._readers is not None:  # first: a connection that is in use meanwhile would stay open
            reading = asyncio.ensure_future(asyncio.to_thread(self._readers.shutdown))
            await asyncio.wait({reading}, timeout=self._table.patience)
            self._table.interrupt()
            await reading
        closing = self._thread.submit(self._table.close)
        await asyncio.wait({asyncio.wrap_future(closing)}, timeout=self._table.patience)
        self._table.interrupt()
        await asyncio.wrap_future(closing)
        self._thread.shutdown()

    async def admit(self, sandbox: Sandbox, most: int, ceilings: Ceilings, given: "Given | None" = None) -> None:
        """Insert a sandbox, unless this server would have more than `most`, or a ceiling would be exceeded.

        `given` is for its history.

        Raises:
            ApiError: it was not inserted.
        """
        await self._run(lambda: self._table.admit(sandbox, most, ceilings, given))

    async def put(self, sandbox: Sandbox, given: "Given | None" = None) -> None:
        """Insert a sandbox or replace its whole row. `given` is for the history of a new one."""
        await self._run(lambda: self._table.put(sandbox, given))

    async def get(self, sandbox: str) -> Sandbox | None:
        """Return the row of one sandbox, or None."""
        return await self._look_up(lambda: self._table.get(sandbox))

    async def update(
        self, sandbox: str, change: Callable[[Sandbox], Sandbox], ceilings: Ceilings | None = None
    ) -> Sandbox | None:
        """Change one row atomically. Return the new row, or None if there is no such row.

        `change` runs in the database's thread. If it raises, the caller gets the exception and nothing is written. So
        it is if the sandbox's new owner would exceed its ceilings.
        """
        return await self._run(lambda: self._table.update(sandbox, change, ceilings))

    async def delete(self, sandbox: str, removal: "Removal | None" = None) -> bool:
        """Remove a row. Return whether it existed. Its history ends with `removal`, or is removed too."""
        return await self._run(lambda: self._table.delete(sandbox, removal))

    async def history(self, sandbox: str) -> "History | None":
        """Return the history of a sandbox, also of one that was removed, or None."""
        return await self._look_up(lambda: self._table.history(sandbox))

    async def record(self, sandbox: str, change: "Callable[[History], History]") -> None:
        """Change the history of a sandbox, if it has one. `change` runs in the database's thread."""
        await self._run(lambda: self._table.record(sandbox, change))

    async def purge(self, before: float) -> None:
        """Remove the histories of sandboxes that were removed by `before`, and the oldest of very many."""
        await self._run(lambda: self._table.purge(before))

    async def shift(self, seconds: float) -> None:
        """Move the expiry and the last change of every sandbox after the clock was set."""
        await self._run(lambda: self._table.shift(seconds))

    async def all(self) -> list[Sandbox]:
        """Return every sandbox, for the comparison with hostd."""
        return await self._run(self._table.all)

    async def expired(self, now: float) -> list[Sandbox]:
        """Return the expired sandboxes, and those whose removal has begun."""
        return await self._run(lambda: self._table.expired(now))

    async def next_expiry(self, after: float) -> float | None:
        """Return the earliest expiry later than `after`."""
        return await self._run(lambda: self._table.next_expiry(after))

    async def page(
        self, states: Sequence[str], metadata: dict[str, str], page: int, size: int
    ) -> tuple[list[Sandbox], int]:
        """Return one page, newest first, and the number of all matches."""
        return await self._look_up(lambda: self._table.page(states, metadata, page, size))

    async def call[T](self, work: Callable[[], T]) -> T:
        """Make a call on another table of the database, in the order of all calls."""
        return await self._run(work)

    async def count(self) -> int:
        """Return the number of rows."""
        return await self._look_up(self._table.count)

    async def idle(self, pool: str, number: int) -> list[str]:
        """Return the ids of at most `number` idle members of a pool that can be claimed, the oldest first."""
        return await self._look_up(lambda: self._table.idle(pool, number))

    async def pools(self) -> list[SandboxPool]:
        """Return every pool, by name."""
        return await self._look_up(self._table.pools)

    async def pool(self, name: str) -> SandboxPool | None:
        """Return one pool, or None."""
        return await self._look_up(lambda: self._table.pool(name))

    async def add_pool(self, pool: SandboxPool) -> bool:
        """Add a pool. Return whether it was added: another one can have its name."""
        return await self._run(lambda: self._table.add_pool(pool))

    async def resize_pool(self, name: str, capacity: Capacity) -> SandboxPool | None:
        """Change the capacity of a pool. Return the pool, or None if there is no such pool."""
        return await self._run(lambda: self._table.resize_pool(name, capacity))

    async def delete_pool(self, name: str) -> bool:
        """Remove a pool's row. Return whether it existed."""
        return await self._run(lambda: self._table.delete_pool(name))

    @property
    def _idle(self) -> bool:
        self._calls = [call for call in self._calls if not call.done()]
        return not self._calls

    def _check_open(self) -> None:
        """Refuse a call on a database whose schema was not compared yet."""
        if not self._opened:
            raise RegistryError("the state database was not reached yet")

    async def _look_up[T](self, work: Callable[[], T]) -> T:
        self._check_open()
        if not self._idle:
            return await self._run(work)
        if self._readers is None:
            return work()
        return await self._bounded(self._readers.submit(work))

    async def _run[T](self, work: Callable[[], T]) -> T:
        self._check_open()
        call = self._thread.submit(work)
        self._calls = [*(earlier for earlier in self._calls if not earlier.done()), call]
        return await self._bounded(call)

    async def _bounded[T](self, call: Future[T]) -> T:
        """Wait for a call. One that has not begun within the bound is withdrawn."""
        try:
            async with asyncio.timeout(self._table.patience):
                return await asyncio.wrap_future(call)
        except TimeoutError:
            call.cancel()
            # Calls that wait behind it for as long are withdrawn first. Otherwise the thread would begin one of them.
            asyncio.get_running_loop().call_later(_INTERRUPT_SECONDS, self._table.interrupt)
            raise RegistryError("the state database does not answer") from None
