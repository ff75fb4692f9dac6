"""The watch: compares every running sandbox with a reference every few seconds.

- The reference is not recorded from the sandbox that is judged. All slots are equal, so the watch makes a slot only
  for this purpose, reads it and destroys it.
- If a slot differs from the reference, or cannot be read, its sandbox is cut off: links first, then worker and
  container. If the guard's table or the floor differs, both are renewed. If the plan directory or the wrappers have
  changed, nothing is launched.
- Every difference causes an alarm record. The reaction never waits for the record: what auditd cannot accept now it
  gets later.
- Each round also reads the counts of the packets that the kernel has dropped of each sandbox, for the log (`drops`).
- Rules are listed only if nft has counted a change in the namespace. Those of each slot are listed anyway in every
  `_LIST_EVERY`th round, later if these would be more than `_LISTED` in a round.
- Links, addresses, routes, rules and the settings of the gateway's link are compared in each round. Other settings, and
  the counts, are read of at most `_FULL` slots in each round, in turn: the kernel takes several times as long for them.
  So with more than `_FULL` sandboxes a change of another setting is found some rounds later.

The watch does not look into the sandbox: if runsc removes addresses and routes on its side, this is no difference. A
change that is undone between two rounds can be missed; the slot itself ensures that nothing leaves meanwhile.
"""

import asyncio
import logging
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from runtimes.alarms import Alarms, Breach
from runtimes.checks.examiner import Examiner, Item, Known, Seen
from runtimes.engine.docker import Docker, DockerError
from runtimes.net import netns, netstate, slots
from runtimes.net.drops import Drops
from runtimes.net.guard import NetGuard
from runtimes.net.plan import SANDBOX_SYSCTLS, WATCHED_SYSCTLS, NetworkPlan
from runtimes.process import predecessor
from runtimes.process.owned_files import OwnedFiles
from runtimes.sandboxes import Sandboxes

_ROUND_SECONDS = 3.0
_JITTER = 0.2
_CHUNK = 16
"""The number of slots that are read in one call. Launches wait for the interpreter while one is read."""
_FULL = 24
_LISTED = 2
_LIST_EVERY = 20
_UNREADABLE = 2
"""The number of consecutive rounds in which a slot cannot be read, from which it counts as changed."""
_ORDER = ("link", "address", "route", "policy", "neighbour", "queue", "setting")
_NEEDED = ("link ", "queue tbf ")
_NEVER = -1

type Watched = tuple[str, slots.Slot, str]
"""Id, slot and container of a running sandbox."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SlotReference:
    """The reference for all slots: facts of both namespaces, and the gateway's rules as nft lists them."""

    gateway: frozenset[str]
    sandbox: frozenset[str]
    rules: str

    def of_gateway(self, *, state: bool, settings: bool) -> frozenset[str]:
        """Return the facts of the gateway's side: its settings, or everything else, or both."""
        return frozenset(fact for fact in self.gateway if (settings if _kind(fact) == "setting" else state))


def reference(directory: Path, index: int, plan: NetworkPlan) -> SlotReference:
    """Make a slot, read it, destroy it. Blocks for some hundred milliseconds.

    Raises:
        OSError, netns.NftError: it cannot be made or read.
    """
    slot = slots.make(directory, index, plan)
    try:
        return SlotReference(
            netstate.facts(slot.gateway, slot.gateway_inode, WATCHED_SYSCTLS),
            netstate.facts(slot.sandbox, slot.sandbox_inode, tuple(SANDBOX_SYSCTLS)),
            netns.list_rules(slot.gateway, "ruleset"),
        )
    finally:
        if left := slots.destroy(slot):
            _log.error("the reference slot left: %s", "; ".join(left))


def compare_gateway(expected: SlotReference, seen: frozenset[str]) -> Breach | None:
    """Judge the gateway's side: it must equal the reference."""
    return _breach("gateway", seen - expected.gateway, expected.gateway - seen)


def compare_sandbox(expected: SlotReference, seen: frozenset[str]) -> Breach | None:
    """Judge the sandbox's side as the host sees it: nothing may be added, and no link and no limit may be missing.

    Neighbours, other queues and the loss of addresses and routes are ignored, because the workload and runsc may change
    them.
    """
    came = {fact for fact in seen - expected.sandbox if _kind(fact) not in ("neighbour", "queue")}
    return _breach("sandbox", came, {fact for fact in expected.sandbox - seen if fact.startswith(_NEEDED)})


def _kind(fact: str) -> str:
    return fact.split(" ", 1)[0]


def _breach(side: str, came: Iterable[str], gone: Iterable[str]) -> Breach | None:
    """Return a breach that names the most important change first, because the others are often its consequences."""
    changes = sorted(
        [(_ORDER.index(_kind(fact)), 0, fact) for fact in came]
        + [(_ORDER.index(_kind(fact)), 1, fact) for fact in gone]
    )
    if not changes:
        return None
    words = [f"{'missing' if missing else 'unexpected'} {fact}" for _, missing, fact in changes[:3]]
    more = f"; {len(changes) - 3} more" if len(changes) > 3 else ""
    return Breach(f"isolation.{_kind(changes[0][2])}", f"{side} side: {'; '.join(words)}{more}"[:400])


def in_turn(turn: float, number: int, most: int, every: int = 1) -> tuple[frozenset[int], float]:
    """Return the places of those of `number` slots whose turn it is in this round, and the turn of the next round.

    Each slot has its turn once in `every` rounds. If these would be more than `most` slots in a round, it is later.
    """
    begin = turn % max(1, number)
    end = begin + min(most, number / every)
    return frozenset(place % number for place in range(int(begin), int(end))), end


class Watch:
    """Watches from `start` to `stop`. It makes slots in `directory`. A change of `files` prevents launches."""

    def __init__(
        self,
        directory: Path,
        sandboxes: Sandboxes,
        docker: Docker,
        guard: NetGuard,
        alarms: Alarms,
        drops: Drops,
        files: OwnedFiles,
    ) -> None:
        self._directory = directory
        self._sandboxes = sandboxes
        self._docker = docker
        self._guard = guard
        self._alarms = alarms
        self._drops = drops
        self._files = files
        self._golden: SlotReference | None = None
        self._rounds = 0
        self._known: dict[int, Known] = {}
        self._full_turn = self._listed_turn = 0.0
        self._examiner = Examiner()
        self._parts: dict[tuple[bool, bool], SlotReference] = {}
        self._pids: dict[str, tuple[int, str | None]] = {}
        self._unreadable: dict[str, int] = {}
        self._standing: frozenset[Breach] = frozenset()
        self._guard_generation = _NEVER
        self._guard_restarts = guard.restarts
        self._task: asyncio.Task[None] | None = None
        self._cuts: set[asyncio.Task[None]] = set()

    async def start(self, index: int, plan: NetworkPlan) -> None:
        """Make the reference, by the plan of all slots, with number `index`, which no sandbox uses, and begin.

        Raises:
            OSError, netns.NftError: the reference could not be made.
        """
        golden = self._golden = await asyncio.to_thread(reference, self._directory, index, plan)
        self._parts = {
            (state, settings): replace(golden, gateway=golden.of_gateway(state=state, settings=settings))
            for state in (False, True)
            for settings in (False, True)
        }
        self._sandboxes.refusal = self.refusal
        self._task = asyncio.create_task(self._run(), name="watch")

    async def stop(self) -> None:
        """Stop watching; complete the cuts that have begun."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, *self._cuts, return_exceptions=True)

    def refusal(self) -> str:
        """Return why no launch is allowed now, or an empty text."""
        return self._sandboxes.plans.directory_changed() or ", ".join(
            f"{name} was changed" for name in self._files.changed()
        )

    async def _run(self) -> None:
        while True:
            try:
                await self._round()
            except Exception:  # noqa: BLE001 - whatever failed, the next round comes
                _log.exception("a round of the watch failed")
            await asyncio.sleep(_ROUND_SECONDS * random.uniform(1 - _JITTER, 1))  # noqa: S311 - spreads load

    async def _round(self) -> None:
        self._rounds += 1
        watched = self._sandboxes.watched()
        self._forget(watched)
        self._check_files(watched)
        for result in await asyncio.gather(self._check_guard(), self._check_all(watched), return_exceptions=True):
            if isinstance(result, BaseException):
                _log.error("a check of the watch failed", exc_info=result)
        await self._drops.report()

    def _forget(self, watched: Iterable[Watched]) -> None:
        items = tuple(watched)
        names, containers = {item[0] for item in items}, {item[2] for item in items}
        inodes = {item[1].gateway_inode for item in items}
        self._unreadable = {name: count for name, count in self._unreadable.items() if name in names}
        self._drops.forget(names)
        self._pids = {container: pid for container, pid in self._pids.items() if container in containers}
        self._known = {inode: known for inode, known in self._known.items() if inode in inodes}

    # -- files of hostd

    def _check_files(self, watched: Iterable[Watched]) -> None:
        """Judge wrappers and plans. A difference that persists is reported once."""
        by_container = {container: (name, slot) for name, slot, container in watched}
        standing = {Breach("isolation.file", f"{name} was changed") for name in self._files.changed()}
        for deviation in self._sandboxes.plans.deviations():
            finding = Breach("isolation.plan", deviation.reason)
            if deviation.container is None:
                standing.add(finding)
            elif (found := by_container.get(deviation.container)) is not None:
                self._cut(*found, finding)
        for finding in sorted(standing - self._standing, key=lambda item: item.reason):
            self._alarms.report(finding)
        self._standing = frozenset(standing)

    # -- the guard

    async def _check_guard(self) -> None:
        guard = self._guard
        if guard.restarts != self._guard_restarts:
            self._guard_restarts = guard.restarts
            self._guard_generation = _NEVER
            self._alarms.report(Breach("isolation.guard", "the guard's process ended; workers do not dial without one"))
        if not guard.in_force:
            return
        restarts = guard.restarts
        generation = await guard.generation()
        if generation == self._guard_generation and self._rounds % _LIST_EVERY:
            return
        try:
            wrong = "" if await guard.listed() == guard.tables else "was changed"
        except netns.NftError:
            wrong = "is gone"
        if guard.restarts != restarts or not guard.in_force:
            return  # the guard ended meanwhile: the next round reports it
        if not wrong:
            self._guard_generation = generation
            return
        self._alarms.report(Breach("isolation.guard", f"the guard's table or the floor {wrong}; both are renewed"))
        self._guard_restarts = guard.restarts + 1
        self._guard_generation = _NEVER
        await guard.renew()

    # -- slots

    async def _check_all(self, watched: Sequence[Watched]) -> None:
        """Check all slots, in chunks."""
        number = len(watched)
        full, self._full_turn = in_turn(self._full_turn, number, _FULL)
        listed, self._listed_turn = in_turn(self._listed_turn, number, _LISTED, _LIST_EVERY)
        for begin in range(0, number, _CHUNK):
            chunk = range(begin, min(begin + _CHUNK, number))
            items = [
                Item(slot, self._known.get(slot.gateway_inode), place in full, await self._pid(container))
                for place, (_, slot, container) in ((place, watched[place]) for place in chunk)
            ]
            for place, seen in zip(chunk, await self._examiner.read(items), strict=True):
                await self._check(watched[place], seen, listed=place in listed)

    async def _check(self, one: Watched, seen: Seen | Exception, *, listed: bool) -> None:
        """Judge one sandbox, and cut it off if it differs. `listed`: list the rules of its slot in any case."""
        name, slot, container = one
        try:
            if isinstance(seen, Exception):
                raise seen
            if seen.counters is not None:
                self._drops.seen(name, seen.counters)
            known = self._known.get(slot.gateway_inode)
            trusted = None if listed or known is None else known.generation
            finding = await self._judge(slot, seen, trusted) or self._first_process(slot, container, seen.process)
        except netns.WrongNamespaceError as error:
            finding = Breach("isolation.namespace", str(error))
        except (OSError, netns.NftError) as error:
            count = self._unreadable[name] = self._unreadable.get(name, 0) + 1
            if count < _UNREADABLE:
                return
            finding = Breach("isolation.unreadable", f"the slot cannot be read: {type(error).__name__}: {error}"[:300])
        else:
            self._unreadable.pop(name, None)
        if finding is not None:
            self._known.pop(slot.gateway_inode, None)
            self._cut(name, slot, finding)
        elif not isinstance(seen, Exception):
            self._known[slot.gateway_inode] = seen.state

    async def _judge(self, slot: slots.Slot, seen: Seen, known: int | None) -> Breach | None:
        """Judge the state of a slot. List its rules unless their generation is `known`.

        Raises:
            OSError, netns.NftError: its rules cannot be listed.
        """
        if self._golden is None:
            raise OSError("there is nothing to compare with")
        expected = self._parts[seen.gateway is not None, seen.gateway_settings is not None]
        outer = (seen.gateway or frozenset()) | (seen.gateway_settings or frozenset())
        if (finding := compare_gateway(expected, outer)) is not None:
            return finding
        if seen.sandbox is not None and (finding := compare_sandbox(expected, seen.sandbox)) is not None:
            return finding
        if seen.sandbox_settings is not None and (came := seen.sandbox_settings - expected.sandbox):
            return _breach("sandbox", came, ())
        if known == seen.state.generation or await self._has_its_rules(slot, expected):
            return None
        return Breach("isolation.ruleset", "gateway side: the rules are not those of every slot")

    @staticmethod
    async def _has_its_rules(slot: slots.Slot, expected: SlotReference) -> bool:
        return await asyncio.to_thread(netns.list_rules, slot.gateway, "ruleset") == expected.rules

    async def judge_idle(self, slot: slots.Slot, known: int | None) -> int | None:
        """Judge a slot that no sandbox uses yet, as `slot_pool.Judge`. A slot that cannot be read counts as changed."""
        try:
            (seen,) = await self._examiner.read([Item(slot)])
            if isinstance(seen, Exception):
                raise seen
            finding = await self._judge(slot, seen, known)
        except netns.WrongNamespaceError as error:
            finding = Breach("isolation.namespace", str(error))
        except (OSError, netns.NftError) as error:
            _log.warning("a slot made ahead cannot be read: %s: %s", type(error).__name__, error)
            return None
        else:
            if finding is None:
                return seen.state.generation
        self._alarms.report(Breach(finding.rule, f"a slot made ahead is not used: {finding.reason}"[:400]))
        return None

    async def _pid(self, container: str) -> int:
        """Return the first process of a container, 0 if it is not known."""
        if container not in self._pids:
            try:
                state = await self._docker.state(container)
            except DockerError:  # an outage of Docker is no change of the slot; the next round asks again
                return 0
            pid = 0 if state is None else state.pid
            self._pids[container] = (pid, predecessor.start_time(pid) if pid else None)
        pid, started = self._pids[container]
        return pid if started is not None else 0

    def _first_process(self, slot: slots.Slot, container: str, inode: int | None) -> Breach | None:
        """Judge the namespace of the container's first process. A process that has ended is not judged."""
        if inode is None or inode == slot.sandbox_inode or container not in self._pids:
            return None
        pid, started = self._pids[container]
        if predecessor.start_time(pid) != started:
            return None
        return Breach("isolation.namespace", "the container's first process is in another network namespace")

    # -- reactions

    def _cut(self, name: str, slot: slots.Slot, finding: Breach) -> None:
        """Cut the sandbox off and raise an alarm, if it is still the one that was judged."""
        if not any(item[0] == name and item[1] is slot for item in self._sandboxes.watched()):
            return
        task = asyncio.create_task(self._sandboxes.cut(name, slot, f"{finding.rule}: {finding.reason}"))
        self._cuts.add(task)
        task.add_done_callback(self._cuts.discard)
        self._alarms.report(finding, name)
