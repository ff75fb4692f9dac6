"""The diagnostics of a sandbox: its output, its events, and a description, also within a time after its removal.

- The output of a sandbox that exists is read by hostd, which removes the values of its environment. What it is after
  the removal is in its history.
- No line has a value of the environment, a token or a label. A description has names of variables only.
- Every character that is invisible or controls a terminal is escaped.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import wire
from audit.records import escape
from lifecycle.api.errors import ApiError, unknown_sandbox
from lifecycle.daemon_clients import Hostd, Unreachable, explained
from lifecycle.sandboxes.clock import Clock
from lifecycle.sandboxes.history import Event, EventKind, Given, History, printable
from lifecycle.sandboxes.moments import timestamp
from lifecycle.sandboxes.registry import Registry, Sandbox
from wire.api.hostd import HostSandboxState
from wire.ids import SANDBOX_ID

MOST_LINES = 10_000
_SHOWN_DIGEST, _SHOWN_CONTAINER = 16, 12
_LABEL_WIDTH = 18
_RULE = "=" * 60
_WITHHELD = "The output is not shown, because it is not known which values of variables it must not show."


@dataclass(frozen=True, slots=True)
class Content:
    """A text, whether lines before it are missing, and what a reader has to know about it."""

    text: str
    truncated: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Subject:
    """A sandbox that exists, or one that was removed: then there is no row."""

    history: History
    row: Sandbox | None


class Diagnostics:
    """The diagnostics of all sandboxes of this server.

    Args:
        retention: seconds for which those of a removed sandbox can be read.
    """

    def __init__(self, registry: Registry, hostd: Hostd, clock: Clock, retention: float) -> None:
        self._registry = registry
        self._hostd = hostd
        self._clock = clock
        self._retention = retention

    async def logs(self, sandbox: str, lines: int, since: int | None = None) -> Content:
        """Return the last lines of the output.

        Args:
            since: only lines of the last so many seconds. Of a removed sandbox it is not known when it wrote a line.

        Raises:
            ApiError: 404, or 500 if the output cannot be read now.
        """
        return await self._logs(await self._subject(sandbox), lines, since)

    async def events(self, sandbox: str, limit: int, scope: EventKind | None = None) -> Content:
        """Return the newest events, or those of one kind, in their order.

        Raises:
            ApiError: 404.
        """
        return _events((await self._subject(sandbox)).history, limit, scope)

    async def inspect(self, sandbox: str) -> str:
        """Return a description of the sandbox.

        Raises:
            ApiError: 404.
        """
        return await self._described(await self._subject(sandbox))

    async def summary(self, sandbox: str, lines: int, limit: int) -> str:
        """Return all three. An output that cannot be read does not make the others fail.

        Raises:
            ApiError: 404.
        """
        subject = await self._subject(sandbox)
        try:
            logs = (await self._logs(subject, lines, None)).text or "(no logs)"
        except ApiError as error:
            logs = f"({error.message})"
        parts = {
            "INSPECT": await self._described(subject),
            "EVENTS": _events(subject.history, limit, None).text,
            "LOGS": logs,
        }
        banner = f"{_RULE}\nSANDBOX DIAGNOSTICS: {subject.history.id}\n{_RULE}\n"
        return banner + "\n".join(f"\n{name}\n{'-' * len(name)}\n{text}\n" for name, text in parts.items())

    async def _subject(self, sandbox: str) -> _Subject:
        row = await self._registry.get(sandbox) if SANDBOX_ID.fullmatch(sandbox) else None
        history = await self._registry.history(sandbox) if SANDBOX_ID.fullmatch(sandbox) else None
        if row is not None and row.idle:
            raise unknown_sandbox(sandbox)
        if history is None:
            if row is None:
                raise unknown_sandbox(sandbox)
            return _Subject(History.begun(row, None), row)
        if history.removed_at is None:
            return _Subject(history, row)
        if history.removed_at + self._retention <= self._clock():
            raise unknown_sandbox(sandbox)
        return _Subject(history, None)

    async def _logs(self, subject: _Subject, lines: int, since: int | None) -> Content:
        if subject.history.removed_at is not None:
            return _kept(subject.history, lines)
        if subject.history.withheld:
            return Content("", False, (_WITHHELD,))
        sandbox = subject.history.id
        begin = None if since is None else max(0, int(self._clock()) - since)
        try:
            printed = await self._hostd.output(sandbox, min(lines + 1, MOST_LINES), begin)
        except wire.RemoteError as error:
            if error.code != wire.Code.UNKNOWN_SANDBOX:
                raise _unread(error) from None
            history = await self._registry.history(sandbox)
            if history is not None and history.removed_at is not None:  # in the meantime
                return _kept(history, lines)
            return Content("", False, ("There is no container of this sandbox, and so no output.",))
        except Unreachable as error:
            raise _unread(error) from None
        return _last(printable(printed.text), lines, printed.truncated)

    async def _described(self, subject: _Subject) -> str:
        history, row = subject.history, subject.row
        facts = [
            ("Id", history.id),
            ("State", _state(history, row)),
            ("Created", timestamp(history.created_at)),
            ("Removed" if row is None else "Expires", _end(history, row)),
            ("Image", history.image),
            ("Entrypoint", shlex.join(history.entrypoint)),
            ("Runtime", history.runtime),
            *_given(history.given),
            *_network(history, row),
            *([] if row is None else await self._on_host(history.id)),
            ("Exit code", "none" if history.exit_code is None else str(history.exit_code)),
            ("Memory limit", "a process was ended at it" if history.oom else "not reached"),
            ("Events", str(len(history.events) + history.dropped)),
        ]
        return "\n".join(f"{label + ':':<{_LABEL_WIDTH}}{escape(value)}" for label, value in facts)

    async def _on_host(self, sandbox: str) -> list[tuple[str, str]]:
        try:
            found = await self._hostd.state(sandbox)
        except (Unreachable, wire.RemoteError) as error:
            gone = isinstance(error, wire.RemoteError) and error.code == wire.Code.UNKNOWN_SANDBOX
            return [("Container", "none" if gone else f"not known now: {explained(error)}")]
        return [("Container", _container(found)), ("Gateway", _gateway(found))]


def _unread(error: Unreachable | wire.RemoteError) -> ApiError:
    return ApiError(500, "DOCKER::SANDBOX_QUERY_FAILED", f"The output cannot be read now: {explained(error)}.")


def _kept(history: History, lines: int) -> Content:
    when = timestamp(history.removed_at or 0.0)
    warning = f"The sandbox was removed at {when}. This is the end of its output at that time."
    if history.withheld:
        warning = f"The sandbox was removed at {when}. {_WITHHELD}"
    elif not history.ran:
        warning = f"The sandbox was removed at {when} and has not run. Its output was not kept."
    kept = _last(history.output, lines, history.output_truncated)
    return Content(kept.text, kept.truncated, (warning,))


def _last(text: str, lines: int, truncated: bool) -> Content:
    written = text.removesuffix("\n").split("\n")
    return Content("\n".join(written[-lines:]), truncated or len(written) > lines)


def _events(history: History, limit: int, scope: EventKind | None) -> Content:
    lines = [_line(event) for event in history.events if scope in (None, event.scope)]
    if history.dropped:
        lines.insert(min(1, len(lines)), f"... {history.dropped} events are not kept ...")
    return Content("\n".join(lines[-limit:]) or "(no events)", bool(history.dropped) or len(lines) > limit)


def _line(event: Event) -> str:
    return f"{timestamp(event.at)} {event.state:<8} {event.reason}: {event.message or '-'}"


def _state(history: History, row: Sandbox | None) -> str:
    if row is None:
        return history.events[-1].message
    return f"{row.state} ({row.reason or '-'}) since {timestamp(row.changed_at)}: {row.message or '-'}"


def _end(history: History, row: Sandbox | None) -> str:
    if row is None:
        return timestamp(history.removed_at or 0.0)
    return "never" if row.expires_at is None else timestamp(row.expires_at)


def _given(given: Given | None) -> Sequence[tuple[str, str]]:
    if given is None:
        return [("Limits", "not known: the sandbox is older than its history")]
    more = f" and {given.more_variables} more" if given.more_variables else ""
    disk = "no disk limit" if given.disk_bytes is None else f"disk {_size(given.disk_bytes)}"
    cores = (Decimal(given.cpu_nanos) / 10**9).normalize()
    return [
        ("Limits", f"cpu {cores:f}, memory {_size(given.memory_bytes)}, {given.pids} processes, {disk}"),
        ("Environment", (", ".join(given.variables) or "none") + more + " (values are not shown)"),
    ]


def _network(history: History, row: Sandbox | None) -> Sequence[tuple[str, str]]:
    digest = history.policy_digest[:_SHOWN_DIGEST] or "none"
    facts = [("Policy", f"{history.policy_name or 'none by name'}, digest {digest}")]
    if row is not None:
        facts += [
            ("Caller's policy", _caller_policy(row.network_policy)),
            ("Credential vault", "on" if row.credential_proxy else "off"),
            ("Secure access", "on" if row.secure_access else "off"),
        ]
    return facts


def _caller_policy(policy: dict[str, Any] | None) -> str:
    if policy is None:
        return "none"
    rules = policy.get("egress")
    return f"default {policy.get('defaultAction')}, {len(rules) if isinstance(rules, list) else 0} rules"


def _container(found: HostSandboxState) -> str:
    ident = "none" if found.container is None else found.container[:_SHOWN_CONTAINER]
    return f"{ident}, {found.state}" + (f": {found.reason}" if found.reason else "")


def _gateway(found: HostSandboxState) -> str:
    if found.worker_pid is None:
        return "down: the sandbox is cut off"
    return f"up, number {found.generation}"


def _size(count: int) -> str:
    return f"{count // (1 << 20)}Mi" if count % (1 << 20) == 0 else f"{count} bytes"
