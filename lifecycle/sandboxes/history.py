"""The history of a sandbox: what happened to it, also after it was removed. Pure.

- A change of state and its event are written together (`lifecycle.database`), so each state that a row had is there.
- It is bounded: of many events the first and the last ones stay. The output is that of the removal, shortened.
- It has no value of the environment, only names. hostd has removed the caller's values from the output. No output of a
  sandbox that never ran is kept.
- A member of a pool has a history from its claim on. Its output is `withheld` until hostd has the variables of the
  claim, whose values it removes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from audit.records import escape
from lifecycle.sandboxes.quantities import Resources
from lifecycle.sandboxes.registry import Sandbox, State

MOST_EVENTS = 200
MOST_OUTPUT = 32 * 1024
"""Bytes of the output that are kept of a removed sandbox."""
OUTPUT_LINES = 1000
_MOST_MESSAGE = 1000
_MOST_NAMES = 100
_SHOWN_DIGEST = 16
_NETWORK = frozenset({"GATEWAY_DOWN", "GATEWAY_REPLACED", "ISOLATION_ALARM", "POLICY_CHANGED"})
REMOVED = "REMOVED"


class EventKind(StrEnum):
    """The kinds of events."""

    LIFECYCLE = "lifecycle"
    """Creation and removal, and what the server does for them."""
    RUNTIME = "runtime"
    """The container."""
    NETWORK = "network"
    """The gateway and its policy."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `state` is the sandbox's after it; `message` has no control characters."""

    at: float
    state: str
    reason: str
    message: str

    @property
    def scope(self) -> EventKind:
        """The kind of the event."""
        if self.reason in _NETWORK:
            return EventKind.NETWORK
        return EventKind.RUNTIME if self.reason.startswith(("CONTAINER_", "OOM")) else EventKind.LIFECYCLE


@dataclass(frozen=True, slots=True)
class Given:
    """What the create call has given, and the row does not have.

    Attributes:
        variables: the names of the environment, without a value. Of very many, some.
    """

    cpu_nanos: int
    memory_bytes: int
    pids: int
    disk_bytes: int | None
    variables: tuple[str, ...]
    more_variables: int = 0

    @classmethod
    def of(cls, resources: Resources, env: Mapping[str, str]) -> "Given":
        """Return what is kept of a plan."""
        made = cls(resources.cpu_nanos, resources.memory_bytes, resources.pids, resources.disk_bytes, ())
        return made.with_variables(env)

    def with_variables(self, names: Iterable[str]) -> "Given":
        """Return the same with other names of variables."""
        known = sorted(set(names))
        return replace(self, variables=tuple(known[:_MOST_NAMES]), more_variables=max(0, len(known) - _MOST_NAMES))


@dataclass(frozen=True, slots=True)
class Removal:
    """The end of a sandbox. `cause` is a sentence's part; `output` is what hostd has read, without values."""

    at: float
    cause: str
    output: str = ""
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class History:
    """The history of one sandbox.

    Attributes:
        state, reason: of the row, as the last event has them.
        dropped: how many events are missing after the first one.
        generation: of its gateway's worker, as hostd counts.
        idle: whether it is an idle member of a pool, which no call has claimed.
        withheld: whether its output is not shown and not kept.
        ran: whether it was ever seen running. Else its output is not kept.
        oom: whether the kernel ended a process of it at its memory limit.
        output: kept at the removal, escaped.
        removed_at: None while there is a row.
    """

    id: str
    created_at: float
    image: str
    entrypoint: tuple[str, ...]
    runtime: str
    policy_name: str | None
    policy_digest: str
    given: Given | None = None
    state: str = ""
    reason: str = ""
    events: tuple[Event, ...] = ()
    dropped: int = 0
    generation: int = 1
    idle: bool = False
    withheld: bool = False
    ran: bool = False
    oom: bool = False
    exit_code: int | None = None
    output: str = field(default="", repr=False)
    output_truncated: bool = False
    removed_at: float | None = None

    @classmethod
    def begun(cls, row: Sandbox, given: Given | None) -> "History":
        """Return the history of a new row."""
        made = cls(
            id=row.id,
            created_at=row.created_at,
            image=row.image,
            entrypoint=row.entrypoint,
            runtime=row.runtime,
            policy_name=row.policy_name,
            policy_digest=row.policy_digest,
            given=given,
            idle=row.idle,
            withheld=bool(row.pool),
        )
        return made.followed(row, row.changed_at)

    def followed(self, row: Sandbox, now: float) -> "History":
        """Return the history after a write of the row at `now`. Without a new state or policy it is the same."""
        if self.idle and not row.idle:
            return replace(History.begun(row, self.given), generation=self.generation)
        history = self
        if (row.state, row.reason) != (self.state, self.reason):
            history = history.after(Event(row.changed_at, row.state, row.reason, row.message))
            history = replace(
                history, state=str(row.state), reason=row.reason, ran=history.ran or row.state is State.RUNNING
            )
        if row.policy_digest and row.policy_digest != self.policy_digest:
            what = f"The gateway has policy {row.policy_digest[:_SHOWN_DIGEST]}."
            history = history.after(Event(now, str(row.state), "POLICY_CHANGED", what))
            history = replace(history, policy_digest=row.policy_digest)
        return history

    def handed_over(self, names: Iterable[str]) -> "History":
        """Return the history of a claimed member that gets variables of these names. hostd has their values."""
        given = None if self.given is None else self.given.with_variables(names)
        return replace(self, given=given, withheld=False)

    def observed(self, generation: int, exit_code: int | None, now: float, *, oom: bool) -> "History":
        """Return the history after hostd has described the sandbox."""
        history = self
        if generation > self.generation:
            times = generation - self.generation
            what = "The gateway was replaced" + (f" {times} times." if times > 1 else ".")
            history = history.after(Event(now, self.state, "GATEWAY_REPLACED", what))
        if oom and not self.oom:
            what = "A process was ended at the memory limit."
            history = history.after(Event(now, self.state, "OOM_KILL", what))
        code = self.exit_code if exit_code is None else exit_code
        return replace(history, generation=max(generation, self.generation), oom=oom or self.oom, exit_code=code)

    def ended(self, removal: Removal) -> "History":
        """Return the history after the removal."""
        history = self.after(Event(removal.at, "Removed", REMOVED, f"Removed: {removal.cause}."))
        output, truncated = kept(removal.output) if self.ran and not self.withheld else ("", False)
        return replace(history, output=output, output_truncated=truncated or removal.truncated, removed_at=removal.at)

    def after(self, event: Event) -> "History":
        """Return the history with one more event. Of too many the second one is dropped."""
        event = replace(event, state=str(event.state), message=escape(event.message[:_MOST_MESSAGE]))
        events = (*self.events, event)
        if len(events) <= MOST_EVENTS:
            return replace(self, events=events)
        return replace(self, events=(events[0], *events[2:]), dropped=self.dropped + 1)


def kept(output: str) -> tuple[str, bool]:
    """Return the part of an output that is kept, escaped and in whole lines, and whether lines are missing."""
    data = printable(output).encode()
    if len(data) <= MOST_OUTPUT:
        return data.decode(), False
    data = data[-MOST_OUTPUT:]
    return data[data.find(b"\n", 0, -1) + 1 :].decode("utf-8", "ignore"), True


def printable(output: str) -> str:
    """Return an output in which every character that is invisible or controls a terminal is escaped.

    Line feeds and tabs stay. A carriage return before a line feed is dropped.
    """
    lines = output.replace("\r\n", "\n").split("\n")
    return "\n".join("\t".join(escape(part) for part in line.split("\t")) for line in lines)
