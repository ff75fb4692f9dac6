"""Pools of idle sandboxes: their rows, and the task that keeps the number of members.

- A member is a launched sandbox whose execd starts no program before its claim (`transaction`). It denies all,
  belongs to no caller and does not expire.
- One task compares each pool with its capacity, after each change and every few seconds. It makes and removes members.
  A pool whose members cannot be made is tried again at growing intervals, and says why.
- After the deletion of a pool its idle members are removed. Claimed sandboxes stay: they are their callers'.
- A member that has ended, is older than a day, or whose image was removed or replaced, is replaced.

This module does not use HTTP. Refusals are `ApiError`s because the contract defines their codes.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import wire
from lifecycle.api.errors import ApiError, invalid
from lifecycle.daemon_clients import Hostd, Unreachable
from lifecycle.sandboxes.bounds import SandboxLimits
from lifecycle.sandboxes.clock import Clock
from lifecycle.sandboxes.creation import idle_member
from lifecycle.sandboxes.journal import Journal
from lifecycle.sandboxes.members import Members, unknown_pool
from lifecycle.sandboxes.orchestrator import Orchestrator
from lifecycle.sandboxes.pool import Capacity, Count, SandboxPool
from lifecycle.sandboxes.registry import Registry, RegistryError, Sandbox, State
from lifecycle.sandboxes.transaction import Creations

MOST_POOLS = 64
OLDEST_SECONDS = 86400.0
ROUND_SECONDS = 2.0
_RETRY_FIRST, _RETRY_MOST = 1.0, 60.0
_PARALLEL = 2
"""Members of a pool that are made at once, and members of all that are removed at once."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Member:
    """A member that is being made. Its id is empty until it has a row."""

    sandbox: str = ""
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _State:
    """The filling of one pool."""

    filling: bool = False
    problem: str = ""
    delay: float = 0.0
    due: float = 0.0
    making: set[_Member] = field(default_factory=set)


class Pools:
    """All pools of one server."""

    def __init__(
        self,
        registry: Registry,
        creations: Creations,
        orchestrator: Orchestrator,
        members: Members,
        hostd: Hostd,
        *,
        journal: Journal,
        clock: Clock,
        limits: SandboxLimits,
    ) -> None:
        self._registry = registry
        self._creations = creations
        self._orchestrator = orchestrator
        self._members = members
        self._hostd = hostd
        self._journal = journal
        self._clock = clock
        self._limits = limits
        self._states: dict[str, _State] = {}
        self._removals: dict[str, asyncio.Task[None]] = {}

    # -- what callers ask for

    async def create(self, pool: SandboxPool) -> SandboxPool:
        """Add a pool. Its members are made afterwards.

        Raises:
            ApiError: 400 if its image does not exist or there are too many pools, 409 if its name is taken, 503 without
                the audit log.
        """
        if await self._registry.pool(pool.name) is not None:
            raise _taken(pool.name)
        await self._creations.check_image(pool.image)
        if len(await self._registry.pools()) >= MOST_POOLS:
            raise invalid(f"There are {MOST_POOLS} pools already.")
        await self._journal.record("lifecycle.pool", "info", pool=pool.name, image=pool.image, reason="created")
        if not await self._registry.add_pool(pool):
            raise _taken(pool.name)
        self._members.wanted.set()
        return pool

    async def get(self, name: str) -> tuple[SandboxPool, Count]:
        """Return a pool and the number of its members.

        Raises:
            ApiError: 404.
        """
        pool = await self._registry.pool(name)
        if pool is None:
            raise unknown_pool(name)
        return pool, self._count(pool, await self._registry.all())

    async def all(self) -> list[tuple[SandboxPool, Count]]:
        """Return every pool and the number of its members, by name."""
        rows = await self._registry.all()
        return [(pool, self._count(pool, rows)) for pool in await self._registry.pools()]

    async def resize(self, name: str, capacity: Capacity) -> tuple[SandboxPool, Count]:
        """Change the capacity of a pool. Its members follow.

        Raises:
            ApiError: 404, 503 without the audit log.
        """
        await self.get(name)
        await self._journal.record("lifecycle.pool", "info", pool=name, reason="resized")
        pool = await self._registry.resize_pool(name, capacity)
        if pool is None:
            raise unknown_pool(name)
        self._members.wanted.set()
        return pool, self._count(pool, await self._registry.all())

    async def delete(self, name: str) -> None:
        """Remove a pool. Its idle members are removed afterwards.

        Raises:
            ApiError: 404, 503 without the audit log.
        """
        await self.get(name)
        await self._journal.record("lifecycle.pool", "info", pool=name, reason="deleted")
        if not await self._registry.delete_pool(name):
            raise unknown_pool(name)
        self._members.wanted.set()

    def _count(self, pool: SandboxPool, rows: Sequence[Sandbox]) -> Count:
        own = [row for row in rows if row.pool == pool.key]
        return Count(
            idle=sum(row.idle and row.state is State.RUNNING for row in own),
            making=sum(row.idle and row.state is State.PENDING for row in own),
            claimed=sum(not row.idle and row.state is not State.STOPPING for row in own),
            problem=self._states[pool.key].problem if pool.key in self._states else "",
        )

    # -- the task

    async def run(self) -> None:
        """Keep the number of members until cancelled."""
        try:
            while True:
                self._members.wanted.clear()
                try:
                    await self._round()
                except RegistryError:
                    _log.debug("pools wait for the state database")
                except Exception as error:  # noqa: BLE001 - closes: without this task no pool would be filled any more
                    _log.error("a round of the pools failed: %s", type(error).__name__)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ROUND_SECONDS):
                        await self._members.wanted.wait()
        finally:
            making = (member.task for state in self._states.values() for member in state.making)
            tasks = [task for task in (*making, *self._removals.values()) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _round(self) -> None:
        """Compare each pool with its capacity. Begin to make and to remove members."""
        # Taken before the rows are read: a member whose launch ends meanwhile is in one of the two.
        begun = {key: tuple(state.making) for key, state in self._states.items()}
        pools, rows = await self._registry.pools(), await self._registry.all()
        known = {row.id for row in rows}
        keys = {pool.key for pool in pools}
        for key in self._states.keys() - keys:
            if not self._states[key].making:
                del self._states[key]
        for row in rows:
            if row.idle and (row.pool not in keys or self._is_over(row)):
                self._remove(row.id, "its pool is gone" if row.pool not in keys else "a member is replaced")
        for member in await self._outdated([row.id for row in rows if row.idle and row.state is State.RUNNING]):
            self._remove(member, "its image was removed or replaced")
        full = set()
        for pool in pools:
            state = self._states.setdefault(pool.key, _State())
            count = self._count(pool, rows)
            without_row = sum(member.sandbox not in known for member in begun.get(pool.key, ()))
            made = count.idle + count.making + without_row
            missing = pool.capacity.missing(made, count.claimed, filling=state.filling)
            state.filling = missing > 0
            for _ in range(min(missing, _PARALLEL - len(state.making))):
                self._make(pool, state)
            if not count.idle and not state.making and (not missing or state.problem):
                full.add(pool.key)
            surplus = pool.capacity.surplus(count.idle, count.claimed)
            idle = sorted((row for row in rows if self._is_ready(row, pool)), key=lambda row: -row.created_at)
            for row in idle[:surplus]:
                self._remove(row.id, "its pool has too many members")
        if full != self._members.full:
            self._members.full = frozenset(full)
            self._members.arrived()

    def _is_ready(self, row: Sandbox, pool: SandboxPool) -> bool:
        return row.idle and row.pool == pool.key and row.state is State.RUNNING

    def _is_over(self, row: Sandbox) -> bool:
        """Return whether an idle member has ended or is old. The reaper removes one whose removal has begun."""
        if row.state is State.RUNNING:
            return row.created_at + OLDEST_SECONDS < self._clock()
        return row.state not in (State.PENDING, State.STOPPING)

    async def _outdated(self, idle: Sequence[str]) -> list[str]:
        """Return the idle members whose image may not be started any more; none while hostd does not answer."""
        if not idle:
            return []
        try:
            fit = await self._hostd.claimable(idle)
        except (Unreachable, wire.RemoteError):
            return []
        return [member for member in idle if member not in fit]

    def _make(self, pool: SandboxPool, state: _State) -> None:
        if asyncio.get_running_loop().time() < state.due:
            return
        member = _Member()
        state.making.add(member)
        member.task = asyncio.create_task(self._launch(pool, state, member), name=f"pool-{pool.name}")
        member.task.add_done_callback(lambda _: state.making.discard(member))

    async def _launch(self, pool: SandboxPool, state: _State, member: _Member) -> None:
        try:
            creation = await self._creations.begin(idle_member(pool, self._limits))
            member.sandbox = creation.sandbox
            await asyncio.shield(creation.task)
        except (ApiError, RegistryError) as error:
            state.problem = error.message if isinstance(error, ApiError) else "The state database does not answer."
            state.delay = min(max(2 * state.delay, _RETRY_FIRST), _RETRY_MOST)
            state.due = asyncio.get_running_loop().time() + state.delay
            _log.warning("pool %s: no member was made: %s", pool.name, state.problem)
        else:
            state.problem, state.delay, state.due = "", 0.0, 0.0
            self._members.arrived()
        self._members.wanted.set()

    def _remove(self, sandbox: str, why: str) -> None:
        if sandbox in self._removals or len(self._removals) >= _PARALLEL:
            return
        task = asyncio.create_task(self._take_away(sandbox, why), name=f"pool-removal-{sandbox}")
        self._removals[sandbox] = task
        task.add_done_callback(lambda _: self._removals.pop(sandbox, None))

    async def _take_away(self, sandbox: str, why: str) -> None:
        with contextlib.suppress(ApiError, RegistryError):  # claimed, or left as Stopping for the reaper
            await self._orchestrator.remove(sandbox, why, unless=lambda row: not row.idle)
            self._members.wanted.set()


def _taken(name: str) -> ApiError:
    return ApiError(409, "KUBERNETES::POOL_ALREADY_EXISTS", f"Pool {name!r} already exists.")
