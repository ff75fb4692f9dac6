"""Expiry, adoption and observation: the work that no request asks for.

- One task for all expiries, however many sandboxes: it sleeps until the next one, or until one changed. A few removals
  go on beside it, so that a slow one holds up no other.
- What could not be removed is tried again, later and later, for as long as it takes.
- At start the registry and hostd are compared: time that passed while the server was down counts, a creation whose
  caller never got an answer is undone, a sandbox without a row is removed, one that is gone is shown as Failed.
- At start every gateway is given its policy again: whatever was under way when an earlier process ended, and whatever
  changed meanwhile, afterwards the registry's policy is in force and the vault's grants are those of that policy.
- Afterwards hostd is asked every few seconds how its sandboxes are; lists and gets read the database only. A sandbox
  that hostd no longer has is Failed; a gateway with another policy than the registry's is given that one; a creation
  whose row could not be written, or a policy change that broke off, is finished.
- The observer also notices that the system's clock was set.
- Neither task ends by an error: it waits and goes on.
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
from lifecycle.sandboxes.journal import Journal
from lifecycle.sandboxes.orchestrator import Orchestrator
from lifecycle.sandboxes.registry import Registry, RegistryError, Sandbox, State
from lifecycle.sandboxes.transaction import Creations
from wire.api.hostd import HostSandboxState
from wire.api.states import HostState

RETRY_FIRST = 1.0
ADOPT_FIRST = 0.1
"""hostd may be starting beside us."""
RETRY_MOST = 60.0
OBSERVE_SECONDS = 2.0
APPLY_SECONDS = 2.0
"""How long the observer waits for policies to be applied; what takes longer goes on beside it."""
_APPLYING = 32
_PARALLEL = 4
_LIVE = (State.RUNNING, State.PAUSED)

_log = logging.getLogger(__name__)


class Reaper:
    """Removes what is over."""

    def __init__(
        self, orchestrator: Orchestrator, registry: Registry, clock: Clock, expiry_changed: asyncio.Event
    ) -> None:
        self._orchestrator = orchestrator
        self._registry = registry
        self._clock = clock
        self._wake = expiry_changed
        self._retries: dict[str, tuple[float, float]] = {}
        """When to try again, by the event loop's clock, and the seconds between, by sandbox."""
        self._removals: dict[str, asyncio.Task[None]] = {}

    def wake(self) -> None:
        """Look again now."""
        self._wake.set()

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            while True:
                self._wake.clear()
                try:
                    pause = await self._round()
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
        """Begin the removals that are due; return when to look again, in seconds."""
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
        pauses = [when - running for key, (when, _) in self._retries.items() if key not in self._removals]
        following = await self._registry.next_expiry(now)  # whatever has expired since, too
        if following is not None:
            pauses.append(following - self._clock())
        return max(0.05, min([*pauses, RETRY_MOST]))

    def _ended(self, sandbox: str, _removal: asyncio.Task[None]) -> None:
        del self._removals[sandbox]
        self.wake()  # others may be waiting for their turn

    async def _remove(self, row: Sandbox) -> None:
        try:
            over = row.expires_at is not None and row.expires_at <= self._clock()
            current = await self._registry.get(row.id)
            if current is None or (current.expires_at != row.expires_at and over):
                return  # removed or renewed meanwhile
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
    """Compares what we wrote down with what hostd has."""

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
        clock: Clock,
        expiry_changed: asyncio.Event,
    ) -> None:
        self._orchestrator = orchestrator
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
        """Whether there is a document that not every sandbox was compared with."""
        self._alarmed = ""
        """The problem of the policy file that is in the audit log."""

    async def adopt(self) -> None:
        """Bring registry and hostd together; retried by the caller while hostd is away.

        Raises:
            Unreachable, wire.RemoteError: hostd cannot say what it has.
        """
        began = self._clock()
        there = {state.sandbox for state in await self._hostd.states()}
        now = self._clock()
        rows = {row.id: row for row in await self._registry.all()}
        for row in rows.values():
            if row.state is State.PENDING:
                await self._abandoned(row, now)
            elif row.id not in there and row.state in _LIVE and row.changed_at < began:
                await self._seen(row.id, HostSandboxState(row.id, HostState.GONE), now)
            elif row.state in _LIVE:
                await self._registry.update(row.id, lambda current: replace(current, policy_digest=""))
        for sandbox in there - rows.keys():
            _log.warning("removing %s: the registry has no row of it", sandbox)
            with contextlib.suppress(Unreachable, wire.RemoteError):
                await self._hostd.remove(sandbox)
                await self._vaultd.close_sandbox(sandbox)
        self._expiry_changed.set()

    async def run(self, adopted: Callable[[], None]) -> None:
        """Adopt, say so, then observe until cancelled."""
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
        while True:  # at once: the operator's document may have changed while there was no server
            try:
                await self._orchestrator.keep_time()
                await self.observe()
            except Exception as error:  # noqa: BLE001 - closes: what is unsettled would stay so without this task
                _log.warning("cannot observe: %s: %s", type(error).__name__, error)
            await asyncio.sleep(OBSERVE_SECONDS)

    async def follow(self) -> None:
        """Read the operator's file if it changed; put a new document in force for every sandbox, or raise an alarm.

        Raises:
            ApiError, RegistryError: not all of it could be done; the next call goes on.
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
        """The operator's document may have changed: give every sandbox its policy under the one in force.

        Raises:
            RegistryError: the sandboxes cannot be read.
        """
        live = [row.id for row in await self._registry.all() if row.state in _LIVE]
        for sandbox in live:
            self._egress.doubt(sandbox)
        await self._apply(dict.fromkeys(live, self._egress.reapply))

    async def _apply(self, work: Mapping[str, Callable[[str], Awaitable[None]]]) -> None:
        """Apply policies side by side: a sandbox that takes long keeps no other from its own."""
        for sandbox, apply in work.items():
            if sandbox not in self._applying:
                task = asyncio.create_task(self._in_turn(apply, sandbox), name=f"apply-{sandbox}")
                self._applying[sandbox] = task
                task.add_done_callback(functools.partial(self._applied, sandbox))
        if tasks := [self._applying[sandbox] for sandbox in work if sandbox in self._applying]:
            await asyncio.wait(tasks, timeout=APPLY_SECONDS)

    async def _in_turn(self, apply: Callable[[str], Awaitable[None]], sandbox: str) -> None:
        async with self._turns:
            await apply(sandbox)

    def _applied(self, sandbox: str, _task: asyncio.Task[None]) -> None:
        del self._applying[sandbox]

    async def observe(self) -> None:
        """Take over what hostd says of its sandboxes, and finish what was left unfinished."""
        rows = await self._registry.all()
        unsettled = [row.id for row in rows if row.state in _LIVE and self._egress.unsettled(row)]
        await self._apply(dict.fromkeys(unsettled, self._egress.reapply))  # before hostd asks Docker for the list
        began = self._clock()
        there = {state.sandbox: state for state in await self._hostd.states()}
        now = self._clock()
        differing: list[str] = []
        for row in await self._registry.all():
            if row.state is State.PENDING:
                await self._abandoned(row, now)
            elif row.id in there:
                await self._seen(row.id, there[row.id], now)
            elif row.state in _LIVE and row.changed_at < began:
                await self._seen(row.id, HostSandboxState(row.id, HostState.GONE), now)
            other = row.id in there and there[row.id].policy not in ("", row.policy_digest)
            if row.state is State.RUNNING and other and not self._egress.unsettled(row):
                differing.append(row.id)
        await self._apply(dict.fromkeys(differing, self._egress.reconcile))

    async def _seen(self, sandbox: str, described: HostSandboxState, now: float) -> None:
        seen = condition(described)
        if seen is None:
            return
        state, reason, message = seen

        def change(row: Sandbox) -> Sandbox:
            settled = (State.RUNNING, State.PAUSED, State.TERMINATED, State.FAILED)
            if row.state not in settled or (row.state, row.reason) == (state, reason):
                return row
            return row.moved(state, reason, message, now)

        await self._registry.update(sandbox, change)

    async def _abandoned(self, row: Sandbox, now: float) -> None:
        """A creation that is not under way any more, and could not say so: undo it."""

        def change(current: Sandbox) -> Sandbox:
            if current.state is not State.PENDING or self._creations.is_making(current.id):
                return current
            return current.moved(State.STOPPING, "CLEANUP_PENDING", "Its creation was interrupted.", now)

        if not self._creations.is_making(row.id):
            await self._registry.update(row.id, change)
            self._expiry_changed.set()


def condition(described: HostSandboxState) -> tuple[State, str, str] | None:
    """Translate hostd's description of a sandbox; None if it says nothing the row should take over."""
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
            if code == 0:  # it may have outlived a process of its own that was killed at the limit
                return State.TERMINATED, "CONTAINER_EXITED", "The entrypoint has ended."
            if described.oom:
                return State.FAILED, "OOM", "The sandbox was ended at its memory limit."
            return State.FAILED, "CONTAINER_EXITED_ERROR", reason or f"The entrypoint ended with exit code {code}."
        case _:
            return None
