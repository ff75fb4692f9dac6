"""Idle connections to sandboxes' execd, kept for the next request.

A call to execd is short, and the way to it (two sockets, two audit records) would be most of what it costs. execd is
our own program: it keeps an idle connection for ten minutes, so within `IDLE_SECONDS` none is closed under a request. A
process that takes execd's place in a sandbox gains nothing: it answers each of these requests anyhow, whatever carries
them.

- A connection is used again for the same sandbox only, while its state is as it was, and if it is `reusable` right now.
- It is kept for `IDLE_SECONDS`, and not at all once it is `AGE_SECONDS` old: the audit log has one record for each.
- Nothing of a caller stays with it: tokens are headers of each request, and were asked for before it got here.
- At most `IDLE_LIMIT` of one sandbox are kept; one that is idle never keeps a new one from being made.
"""

import asyncio
from dataclasses import dataclass

from lifecycle.proxy.exchange import Connection
from lifecycle.sandboxes.registry import Sandbox, State

IDLE_LIMIT = 4
IDLE_SECONDS = 5.0
AGE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Idle:
    connection: Connection
    changed_at: float
    expiry: asyncio.TimerHandle

    def end(self) -> Connection:
        self.expiry.cancel()
        return self.connection


class IdlePool:
    """The idle connections of one server, by sandbox."""

    def __init__(self) -> None:
        self._idle: dict[str, list[_Idle]] = {}

    def take(self, sandbox: Sandbox) -> Connection | None:
        """Return a connection that may be used now, the caller's from then on."""
        idle = self._idle.pop(sandbox.id, [])
        while idle:
            last = idle.pop()
            connection = last.end()
            if last.changed_at == sandbox.changed_at and connection.reusable:
                if idle:
                    self._idle[sandbox.id] = idle
                return connection
            connection.close()
        return None

    def give(self, sandbox: Sandbox, connection: Connection) -> None:
        """Take over a connection: it is kept or closed. `sandbox` is as it was when the request was let through."""
        loop = asyncio.get_running_loop()
        young = loop.time() - connection.made_at < AGE_SECONDS
        if not (young and sandbox.state is State.RUNNING and connection.reusable):
            connection.close()
            return
        idle = self._idle.setdefault(sandbox.id, [])
        expiry = loop.call_later(IDLE_SECONDS, self._expire, sandbox.id, connection)
        idle.append(_Idle(connection, sandbox.changed_at, expiry))
        self.trim(sandbox.id, IDLE_LIMIT)

    def trim(self, sandbox: str, limit: int) -> None:
        """Close the oldest of a sandbox's connections, until no more than `limit` are kept."""
        idle = self._idle.get(sandbox, [])
        while len(idle) > max(0, limit):
            idle.pop(0).end().close()
        if not idle:
            self._idle.pop(sandbox, None)

    def close(self) -> None:
        """Close all."""
        for sandbox in list(self._idle):
            self.trim(sandbox, 0)

    def _expire(self, sandbox: str, connection: Connection) -> None:
        idle = self._idle[sandbox]
        idle[:] = [item for item in idle if item.connection is not connection]
        connection.close()
        self.trim(sandbox, IDLE_LIMIT)  # forgets the sandbox with its last one
