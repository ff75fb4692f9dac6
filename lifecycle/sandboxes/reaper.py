"""Expiry, adoption and observation: the background work of the control plane.

- One task handles all expiries. It sleeps until the next expiry, or until an expiry changes. A bounded number of
  removals run concurrently, so that a slow removal does not delay the others.
- A failed removal is retried without a limit, at growing intervals.
- At start the registry and hostd are compared. Time that passed while the server was down counts. A creation without an
  answer to its caller is undone, a sandbox without a row is removed, and a row without a sandbox becomes Failed.
- At start every gateway gets its policy again. Then the registry's policy is in force and the vault's grants are those
  of that policy, whatever an earlier process left unfinished.
- Then hostd is asked for its sandboxes every few seconds. Lists and gets read the database only. A sandbox that hostd
  does not have becomes Failed. A gateway whose policy is not the registry's gets the registry's. A creation whose row
  could not be written and an interrupted change of a policy are completed.
- An idle member of a pool has no program and denies all. It gets a policy when it is claimed, not from the observer.
- The observer also detects that the system's clock was set, and writes what hostd reports into the histories.
- The reaper also removes histories after the retention.
- An error ends neither task. The task waits and goes on.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import wire
from lifecycle.api.errors import ApiError
from lifecycle.daemon_clients import Hostd, Unreachable, Vaultd
from lifecycle.egress.changes import Egress
from lifecycle.egress.policies import Policies
from lifecycle.sandboxes.clock import Clock
from lifecycle.sandboxes.history import History
from lifecycle.sandboxes.journal import Journal
from lifecycle.sandboxes.locks import Locks
from lifecycle.sandboxes.orchestrator import Orchestrator
from lifecycle.sandboxes.registry import Registry, RegistryError, Sandbox, State
from lifecycle.sandboxes.transaction import Creations
from wire.api.hostd import HostSandboxState
from wire.api.states import HostState

RETRY_FIRST = 1.0
ADOPT_FIRST = 0.1
"""hostd can be starting at the same time."""
RETRY_MOST = 60.0
PURGE_SECONDS = 30.0
"""The least time between two removals of old histories."""
OBSERVE_SECONDS = 2.0
APPLY_SECONDS = 2.0
"""Seconds for which the observer waits for policies to be applied. A slower application continues in the background."""
_APPLYING = 32
_PARALLEL = 4
_SETTLED = (State.RUNNING, State.PAUSING, State.PAUSED, State.TERMINATED, State.FAILED)
"""The states in which a row takes over hostd's. A pause in progress holds the sandbox's lock; else `Pausing` is what an
interrupted one left."""
_LIVE = (State.RUNNING, State.PAUSING, State.PAUSED)

_log = logging.getLogger(__name__)


class Reaper:
    """The removal of expired sandboxes."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        registry: Registry,
        clock: Clock,
        expiry_changed: asyncio.Event,
        retention: float,
    ) -> None:
        self._orchestrator = orchestrator
        self._retention = retention
        self._purge_at = 0.0
        self._registry = registry
        self._clock = clock
        self._wake = expiry_changed
        self._retries: dict[str, tuple[float, float]] = {}
        """For each sandbox: the time of the next try, by the event loop's clock, and the interval in seconds."""
        self._removals: dict[str, asyncio.Task[None]] = {}

    def wake(self) -> None:
        """Look for due removals now."""
        self._wake.set()

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            while True:
                self._wake.clear()
                try:
                    pause = await self._round()
                except RegistryError:  # The database's own log has it.
                    pause = RETRY_FIRST
                except Exception as error:  # noqa: BLE001 - closes: without this task nothing would expire any more
                    _log.error("a round of removals failed: %s", type(error).__name__)
                    pause = RETRY_FIRST
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
        finally:
            for removal in self._removals.values():
                removal.cancel()
            await asyncio.gather(*self._removals.values(), return_exceptions=True)

    async def _round(self) -> float:
        """Start the removals that are due. Return the seconds until the next look."""
        now, running = self._clock(), asyncio.get_running_loop().time()
        over = await self._registry.expired(now)
        known = {row.id for row in over}
        self._retries = {key: value for key, value in self._retries.items() if key in known}
        for row in over:
            due = self._retries.get(row.id, (running, 0))[0] <= running
            if due and row.id not in self._removals and len(self._removals) < _PARALLEL:
                removal = asyncio.create_task(self._remove(row), name=f"removal-{row.id}")
                self._removals[row.id] = removal
                removal.add_done_callback(functools.partial(self._ended, row.id))
        if running >= self._purge_at:
            await self._registry.purge(now - self._retention)
            self._purge_at = running + PURGE_SECONDS
        pauses = [when - running for key, (when, _) in self._retries.items() if key not in self._removals]
        following = await self._registry.next_expiry(now)  # Further sandboxes can have expired in the meantime.
        if following is not None:
            pauses.append(following - self._clock())
        return max(0.05, min([*pauses, RETRY_MOST]))

    def _ended(self, sandbox: str, _removal: asyncio.Task[None]) -> None:
        del self._removals[sandbox]
        self.wake()  # Other removals can be waiting for a place.

    async def _remove(self, row: Sandbox) -> None:
        try:
            over = row.expires_at is not None and row.expires_at <= self._clock()
            current = await self._registry.get(row.id)
            if current is None or (current.expires_at != row.expires_at and over):
                return  # It was removed or renewed in the meantime.
            await self._orchestrator.remove(row.id, "expired" if over else "left over", unless=self._renewed)
        except Exception as error:  # noqa: BLE001 - closes: it is tried again
            if isinstance(error, ApiError) and error.status in (404, 409):
                return
            if not isinstance(error, ApiError):
                _log.error("the removal of %s failed: %s", row.id, type(error).__name__)
            _, last = self._retries.get(row.id, (0.0, 0.0))
            delay = min(max(last * 2, RETRY_FIRST), RETRY_MOST)
            self._retries[row.id] = (asyncio.get_running_loop().time() + delay, delay)
        else:
            self._retries.pop(row.id, None)

    def _renewed(self, row: Sandbox) -> bool:
        over = row.expires_at is not None and row.expires_at <= self._clock()
        return row.state is not State.STOPPING and not over


class Observer:
    """The comparison of the registry with hostd's sandboxes."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        creations: Creations,
        egress: Egress,
        registry: Registry,
        *,
        hostd: Hostd,
        vaultd: Vaultd,
        policies: Policies,
        journal: Journal,
        locks: Locks,
        clock: Clock,
        expiry_changed: asyncio.Event,
    ) -> None:
        self._orchestrator = orchestrator
        self._locks = locks
        self._creations = creations
        self._registry = registry
        self._hostd = hostd
        self._vaultd = vaultd
        self._policies = policies
        self._journal = journal
        self._clock = clock
        self._expiry_changed = expiry_changed
        self._egress = egress
        self._applying: dict[str, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(_APPLYING)
        self._pending = False
        """Return whether there is a document that not every sandbox was compared with."""
        self._alarmed = ""
        """The problem of the policy file that the audit log contains."""
        self._noted: dict[str, tuple[int, bool, int | None]] = {}
        """What of hostd's description is in the history of each sandbox: generation, memory limit, exit code."""

    async def adopt(self) -> None:
        """Reconcile the registry with hostd. The caller retries while hostd does not answer.

        Raises:
            Unreachable, wire.RemoteError: hostd did not list its sandboxes.
        """
        began = self._clock()
        there = {state.sandbox for state in await self._hostd.states()}
        now = self._clock()
        rows = {row.id: row for row in await self._registry.all()}
        for row in rows.values():
            if row.state is State.PENDING:
                await self._abandoned(row, now)
            elif row.id not in there and row.state in _LIVE and row.changed_at < began:
                await self._seen(row.id, HostSandboxState(row.id, HostState.GONE), began, now)
            elif row.state in _LIVE:
                await self._registry.update(row.id, lambda current: replace(current, policy_digest=""))
        for sandbox in there - rows.keys():
            _log.warning("removing %s: the registry has no row of it", sandbox)
            with contextlib.suppress(Unreachable, wire.RemoteError):
                await self._hostd.remove(sandbox)
                await self._vaultd.close_sandbox(sandbox)
        self._expiry_changed.set()

    async def run(self, adopted: Callable[[], None]) -> None:
        """Adopt the sandboxes, report that, then observe until cancelled."""
        try:
            await self._run(adopted)
        finally:
            tasks = list(self._applying.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, adopted: Callable[[], None]) -> None:
        delay = ADOPT_FIRST
        while True:
            try:
                await self.adopt()
                break
            except (Unreachable, wire.RemoteError, RegistryError) as error:
                _log.warning("cannot adopt yet: %s", error)
                await asyncio.sleep(delay)
                delay = min(delay * 2, 10.0)
        adopted()
        while True:  # Look at once: the operator's document can have changed while no server ran.
            try:
                await self._orchestrator.keep_time()
                await self.observe()
            except RegistryError:
                _log.debug("cannot observe without the state database")
            except Exception as error:  # noqa: BLE001 - closes: what is unsettled would stay so without this task
                _log.warning("cannot observe: %s: %s", type(error).__name__, error)
            await asyncio.sleep(OBSERVE_SECONDS)

    async def follow(self) -> None:
        """Read the operator's file if it changed. Put a new document in force for every sandbox, or raise an alarm.

        Raises:
            ApiError, RegistryError: a part of this failed. The next call continues.
        """
        policies = self._policies
        if await policies.reload():
            self._pending = True
        if self._pending:
            await self.recompile()
            self._pending = False
            await self._journal.note("lifecycle.policies", "info", reason="the policy file was read again")
        if (problem := policies.problem) != self._alarmed:
            if problem:
                why = "the policy file cannot be used: the last good document stays in force"
                await self._journal.record("alarm", "deny", rule="policy.file", reason=why, error=problem)
            self._alarmed = problem

    async def recompile(self) -> None:
        """Give every sandbox its policy under the operator's document that is in force now.

        Raises:
            RegistryError: the sandboxes cannot be read.
        """
        live = [row.id for row in await self._registry.all() if row.state in _LIVE and not row.idle]
        for sandbox in live:
            self._egress.mark_outdated(sandbox)
        await self._apply(dict.fromkeys(live, self._egress.reapply))

    async def _apply(self, work: Mapping[str, Callable[[str], Awaitable[None]]]) -> None:
        """Apply policies concurrently, so that a slow sandbox does not delay the others.

        A task that was under way may have begun with the former document. So its sandbox has its turn after it.
        """
        under_way = {sandbox: apply for sandbox, apply in work.items() if sandbox in self._applying}
        for part in (work, under_way):
            for sandbox, apply in part.items():
                if sandbox not in self._applying:
                    task = asyncio.create_task(self._in_turn(apply, sandbox), name=f"apply-{sandbox}")
                    self._applying[sandbox] = task
                    task.add_done_callback(functools.partial(self._applied, sandbox))
            if tasks := [self._applying[sandbox] for sandbox in part if sandbox in self._applying]:
                await asyncio.wait(tasks, timeout=APPLY_SECONDS)

    async def _in_turn(self, apply: Callable[[str], Awaitable[None]], sandbox: str) -> None:
        async with self._turns:
            await apply(sandbox)

    def _applied(self, sandbox: str, _task: asyncio.Task[None]) -> None:
        del self._applying[sandbox]

    async def observe(self) -> None:
        """Take over the states that hostd reports, and complete unfinished work."""
        rows = await self._registry.all()
        unsettled = [row.id for row in rows if row.state in _LIVE and not row.idle and self._egress.unsettled(row)]
        # This is set before hostd asks Docker for the list.
        await self._apply(dict.fromkeys(unsettled, self._egress.reapply))
        began = self._clock()
        there = {state.sandbox: state for state in await self._hostd.states()}
        now = self._clock()
        await self._note(there)
        differing: list[str] = []
        for row in await self._registry.all():
            if row.state is State.PENDING:
                await self._abandoned(row, now)
            elif row.id in there:
                await self._seen(row.id, there[row.id], began, now)
            elif row.state in _LIVE and row.changed_at < began:
                await self._seen(row.id, HostSandboxState(row.id, HostState.GONE), began, now)
            other = row.id in there and there[row.id].policy not in ("", row.policy_digest)
            if row.state in _LIVE and other and not row.idle and not self._egress.unsettled(row):
                differing.append(row.id)
        await self._apply(dict.fromkeys(differing, self._egress.reconcile))

    async def _note(self, there: Mapping[str, HostSandboxState]) -> None:
        """Write what the rows do not have into the histories."""
        self._noted = {sandbox: noted for sandbox, noted in self._noted.items() if sandbox in there}
        for sandbox, described in there.items():
            new = (described.generation, described.oom, described.exit_code)
            if self._noted.get(sandbox, (1, False, None)) == new:
                continue
            change = functools.partial(_observed, described=described, now=self._clock())
            await self._registry.record(sandbox, change)
            self._noted[sandbox] = new

    async def _seen(self, sandbox: str, described: HostSandboxState, began: float, now: float) -> None:
        """Take over a state that hostd was asked for at `began`. A later change of the row is newer than it."""
        seen = condition(described)
        if seen is None:
            return
        state, reason, message = seen
        changing = self._locks.is_held(sandbox)  # possibly a pause or a resume, which writes its result itself

        def change(row: Sandbox) -> Sandbox:
            if row.state not in _SETTLED or row.changed_at >= began or (row.state, row.reason) == (state, reason):
                return row
            if (row.reason, reason) == ("OOM", "CONTAINER_EXITED_ERROR"):  # Docker keeps only its last events
                return row
            if changing and row.state is not state and state in _LIVE:
                return row
            return row.moved(state, reason, message, now)

        await self._registry.update(sandbox, change)

    async def _abandoned(self, row: Sandbox, now: float) -> None:
        """Undo a creation that is no longer in progress and whose failure could not be recorded."""

        def change(current: Sandbox) -> Sandbox:
            if current.state is not State.PENDING or self._creations.is_making(current.id):
                return current
            return current.moved(State.STOPPING, "CLEANUP_PENDING", "Its creation was interrupted.", now)

        if not self._creations.is_making(row.id):
            await self._registry.update(row.id, change)
            self._expiry_changed.set()


def _observed(history: History, *, described: HostSandboxState, now: float) -> History:
    return history.observed(described.generation, described.exit_code, now, oom=described.oom)


def condition(described: HostSandboxState) -> tuple[State, str, str] | None:
    """Translate hostd's state of a sandbox. Return None if it has nothing for the row."""
    reason = described.reason
    match described.state:
        case HostState.RUNNING if described.worker_pid is None:
            return State.RUNNING, "GATEWAY_DOWN", "The gateway is down; the sandbox is cut off until it is back."
        case HostState.RUNNING:
            return State.RUNNING, "CONTAINER_RUNNING", "Sandbox container started successfully."
        case HostState.RESTARTING:
            return State.RUNNING, "CONTAINER_RESTARTING", reason
        case HostState.PAUSED:
            return State.PAUSED, "CONTAINER_PAUSED", reason
        case HostState.ALARM:
            return State.FAILED, "ISOLATION_ALARM", f"Cut off: {reason}"
        case HostState.GONE:
            return State.FAILED, "CONTAINER_LOST", reason or "The sandbox is gone from this host."
        case HostState.EXITED | HostState.DEAD:
            code = described.exit_code
            # The limit can have killed a process of the sandbox, and the sandbox ended for another reason later.
            if code == 0:
                return State.TERMINATED, "CONTAINER_EXITED", "The entrypoint has ended."
            if described.oom:
                return State.FAILED, "OOM", "The sandbox was ended at its memory limit."
            return State.FAILED, "CONTAINER_EXITED_ERROR", reason or f"The entrypoint ended with exit code {code}."
        case _:
            return None
