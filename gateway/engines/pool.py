"""Idle upstream connections of one sandbox, which later requests of its flows use again.

- A connection is kept only after a complete request and a complete response, with no byte left in either direction.
- A request gets a connection to the same host, port and scheme, verified under the same roots, that carried exactly the
  secrets that the request carries: the same plans, and the same values.
- A connection with an `owner` is used only by that flow, and ends with it.
- An idle connection ends at once if a byte arrives on it or its server ends it. Otherwise it ends after a time, or if
  others exceed the limits: the one that was idle for longest ends first.
- After `drop` or `revoke`, a connection that was in use then is not kept.

A worker has one pool. So no connection is shared between sandboxes.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from gateway.engines.port import EngineLimits
from gateway.tls.contexts import UpstreamContext
from gateway.verdicts import Injected, Route
from policy.facts import Scheme
from policy.injection import SecretPlan
from vault.secret import Secret

type Carried = frozenset[tuple[SecretPlan, bytes]]
"""The secrets of a request: each plan, with a keyed identity of the value."""


class Poolable(Protocol):
    """What the pool needs of a connection."""

    @property
    def unsent(self) -> int:
        """Written bytes that the kernel has not taken yet."""
        ...

    def rest(self, stirred: Callable[[], None]) -> bool:
        """Call `stirred` when a byte arrives or the connection ends. False if that has happened, or bytes are left."""
        ...

    def close(self) -> None:
        """End the connection in order."""
        ...

    def abort(self) -> None:
        """End the connection now."""
        ...

    def discard(self) -> None:
        """End the connection now with a reset; bytes in the kernel's buffer are not sent either."""
        ...


class Place(NamedTuple):
    """A destination, and the roots that its certificate is verified against."""

    host: str
    port: int
    scheme: Scheme
    trust: UpstreamContext


@dataclass(eq=False, slots=True)
class Pooled[C: Poolable]:
    """A connection that can be kept.

    Attributes:
        revision: the pool's, when the connection was dialled, or taken from the pool.
        expires: the loop's time after which it carries no other request.
        carried: the secrets of its requests.
        owner: the only flow that may use it, None if any flow may.
        used: it has carried a request.
    """

    connection: C
    route: Route
    place: Place
    revision: int
    expires: float
    carried: Carried = frozenset()
    owner: object | None = None
    used: bool = False
    fit: tuple[Carried, frozenset[SecretPlan]] = (frozenset(), frozenset())
    """The plans of `carried`, and for which value of it."""


type _Fit = tuple[Place, frozenset[SecretPlan], object | None]
"""What `take` looks for: the place, the plans of the secrets, and the owner."""


class Pool[C: Poolable]:
    """The idle connections of one sandbox.

    Args:
        limits: can be replaced.
        flows: returns the number of live flows. Each may have one idle connection in addition to the limits.
    """

    def __init__(self, limits: EngineLimits, flows: Callable[[], int] = lambda: 0) -> None:
        self.limits = limits
        self.revision = 0
        """Changes when the connections that exist must not be kept any more."""
        self._flows = flows
        self._key = secrets.token_bytes(32)
        self._last: tuple[Injected, Carried] = ((), frozenset())
        # Each of these has all idle connections, the one that was idle for longest first.
        self._idle: dict[Pooled[C], float] = {}
        self._fitting: dict[_Fit, dict[Pooled[C], None]] = {}
        self._places: dict[Place, dict[Pooled[C], None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._idle)

    def carried(self, injected: Injected) -> Carried:
        """Return what a connection carries after a request with these secrets. The result contains no value."""
        last, result = self._last
        if len(last) == len(injected) and all(map(_same, last, injected)):
            return result
        result = frozenset((plan, value.identity(self._key)) for plan, value in injected)
        self._last = injected, result
        return result

    def made(self, connection: C, route: Route, place: Place, revision: int) -> Pooled[C]:
        """Return a new connection. `revision` is the pool's before its dial."""
        expires = asyncio.get_running_loop().time() + self.limits.connection_age_seconds
        return Pooled(connection, route, place, revision, expires)

    def take(self, place: Place, plans: frozenset[SecretPlan], owner: object) -> Pooled[C] | None:
        """Take a connection for a request with the secrets of `plans`; None if there is none.

        The caller compares the values, which are not known yet, with `carried`.
        """
        fitting = self._fitting.get((place, plans, owner)) or self._fitting.get((place, plans, None))
        if not fitting:
            return None
        one = next(reversed(fitting))
        self._remove(one)
        one.revision = self.revision
        return one

    def keep(self, one: Pooled[C]) -> None:
        """Keep a connection after a complete exchange, or close it if it must not be used again."""
        now = asyncio.get_running_loop().time()
        ends = min(now + self.limits.connection_idle_seconds, one.expires)
        if one.revision != self.revision or ends <= now or not one.connection.rest(partial(self._end, one)):
            _close(one.connection)
            return
        self._idle[one] = ends
        self._fitting.setdefault(_fit(one), {})[one] = None
        self._places.setdefault(one.place, {})[one] = None
        self._limit(one.place)
        if self._timer is None or ends < self._timer.when():
            self._wake_at(ends)

    def _wake_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._end_old)

    def _end_old(self) -> None:
        """End the connections that were idle for the longest time, or are too old."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        for one in [one for one, ends in self._idle.items() if ends <= now]:
            self._end(one)
        if self._idle:
            self._wake_at(min(self._idle.values()))

    def trim(self) -> None:
        """End the connections above the limits: a flow has ended."""
        for place in list(self._places):
            self._limit(place)

    def drop(self) -> None:
        """End all idle connections. Those in use are not kept either."""
        self._discard(list(self._idle))

    def revoke(self, names: frozenset[str] | None) -> None:
        """End the idle connections that carried one of these secrets (None: any). Those in use are not kept."""
        self._discard(
            [one for one in self._idle if any(names is None or plan.secret in names for plan, _ in one.carried)]
        )

    def leave(self, owner: object) -> None:
        """End the idle connections that only `owner` may use."""
        for one in [one for one in self._idle if one.owner is owner]:
            self._end(one)

    def _limit(self, place: Place) -> None:
        limits, flows = self.limits, self._flows()
        while len(same := self._places.get(place, {})) > limits.idle_per_destination + flows:
            self._end(next(iter(same)))
        while len(self._idle) > limits.idle_connections + flows:
            self._end(next(iter(self._idle)))

    def _remove(self, one: Pooled[C]) -> None:
        del self._idle[one]
        _drop(self._fitting, _fit(one), one)
        _drop(self._places, one.place, one)

    def _discard(self, ones: list[Pooled[C]]) -> None:
        # With a reset: the kernel may still hold bytes of a request that the server answered early.
        self.revision += 1
        self._last = (), frozenset()
        for one in ones:
            self._remove(one)
            one.connection.discard()

    def _end(self, one: Pooled[C]) -> None:
        if one in self._idle:
            self._remove(one)
            _close(one.connection)


def _fit(one: Pooled[Any]) -> _Fit:
    if one.fit[0] is not one.carried:
        one.fit = one.carried, frozenset(plan for plan, _ in one.carried)
    return one.place, one.fit[1], one.owner


def _drop[Key](index: dict[Key, dict[Pooled[Any], None]], key: Key, one: Pooled[Any]) -> None:
    del index[key][one]
    if not index[key]:
        del index[key]


def _same(one: tuple[SecretPlan, Secret], other: tuple[SecretPlan, Secret]) -> bool:
    return one[0] is other[0] and one[1] is other[1]


def _close(connection: Poolable) -> None:
    connection.close()
    if connection.unsent:  # no flow waits for the end of this connection
        connection.abort()
