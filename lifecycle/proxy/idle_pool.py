"""Idle connections to the execd of sandboxes, kept for the next request.

A call to execd is short. A new connection (two sockets, two audit records) would be most of its cost. execd is our own
program and keeps an idle connection for ten minutes, so it closes none under a request within `IDLE_SECONDS`. A process
that replaces execd in a sandbox gains nothing, because it gets each of these requests in any case.

- A connection is used again for the same sandbox only, while the sandbox's state is unchanged, and if it is `reusable`
  at that moment.
- It is kept for `IDLE_SECONDS`, and not at all after an age of `AGE_SECONDS`, because the audit log has one record for
  each connection.
- It keeps no data of a caller: tokens are headers of each request, and were checked before the request got here.
- At most `IDLE_LIMIT` connections of one sandbox are kept. An idle connection never prevents a new one.
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
        """Return a usable connection. The caller then owns it."""
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
        """Take over a connection and keep or close it. `sandbox` is its state when the request was admitted."""
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
        """Close the oldest connections of a sandbox until at most `limit` are kept."""
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
        self.trim(sandbox, IDLE_LIMIT)  # The sandbox's entry is removed with its last connection.
