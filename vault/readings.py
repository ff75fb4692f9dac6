"""The values that backends gave to vaultd: fetched before a release, held in memory, used within their time.

- A value is never on disk, and leaves this module only while it is valid. No failure extends its time.
- While a value is valid and not fresh, a release takes it at once, and the backend is asked beside that. So a slow or
  absent backend delays no request that has a valid value.
- A value that a backend made for one sandbox goes to that sandbox only. It is given back when the sandbox has no grant
  of the reference any more.
- Another value replaces the former one: `changed` ends the leases of the former one. A definite refusal
  (`wire.api.fetcher.DEFINITE`) ends the value at once.
- `withdraw` forgets values at an operator's call. Their backends end what they made, and forget what they keep. No
  later release has a value from before the call.
- Former values are kept for as long as those of sealed secrets (`vault.stores.port`), in memory: workers look for them
  in responses and never send them.
- At most one request per reference and sandbox is under way, and a failure counts for `PAUSE` seconds.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

import wire
from vault.fetching import BackendError, FetcherPort
from vault.freeze import Extent
from vault.secret import Secret
from vault.stores.port import Clock, Former, StoreError, still_former, with_former
from wire.api.fetcher import DEFINITE, BackendState, Fault, Problem, Reading

MAX_READINGS = 4096
PAUSE = 1.0
_EVERY_SANDBOX = "all"
"""The sandbox of a value that is the same for all, where the backend is asked to forget it. No sandbox has this id."""
_ATTEMPTS = 3
RETRY = 5.0
"""Seconds between attempts to refresh a value that is valid, while the backend fails."""
LOOK = 1.0
_LEAST_SECONDS = 2.0
"""A value with less time than this is fetched again before it is released."""

_log = logging.getLogger(__name__)

type _Key = tuple[str, str | None]
"""A reference, and the sandbox for which its value was made; None: it is the same for all."""
type Changed = Callable[[str, Collection[str]], Coroutine[Any, Any, None]]
"""Called with a secret and the sandboxes whose leases of it end."""


class NoReadingError(StoreError):
    """There is no valid value now."""

    code = wire.Code.BACKEND


class Users(Protocol):
    """The part of `vault.custody.Custody` that says which sandboxes may have a secret."""

    def referring(self) -> Mapping[str, Collection[str]]:
        """Return the sandboxes that may have each reference now."""
        ...


@dataclass(slots=True, eq=False)
class _Held:
    value: Secret = field(repr=False)
    fresh_until: float
    valid_until: float
    retry_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Current:
    """A valid value, the former ones that are still looked for, and the seconds that are left."""

    value: Secret
    former: tuple[Secret, ...]
    seconds: float


class Readings:
    """All values of backends in vaultd."""

    def __init__(
        self,
        fetcher: FetcherPort,
        users: Users,
        monotonic: Callable[[], float],
        clock: Clock = lambda: datetime.now(UTC),
    ) -> None:
        self._fetcher = fetcher
        self._users = users
        self._now = monotonic
        self._clock = clock
        self._held: dict[_Key, _Held] = {}
        self._former: dict[_Key, tuple[Former, ...]] = {}
        self._failed: dict[tuple[str, str], tuple[float, BackendError]] = {}
        self._fetching: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._returned: dict[tuple[str, str], float] = {}
        self._giving_back = False
        self._withdrawals = 0
        self._forgetting: dict[_Key, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.changed: Changed | None = None

    async def obtain(self, reference: str, sandbox: str) -> None:
        """Return when there is a valid value for this sandbox.

        Raises:
            StoreError: there is none; the message has the reason.
        """
        now = self._now()
        found = self._find(reference, sandbox)
        if found is not None and found.valid_until - now >= _LEAST_SECONDS:
            if found.fresh_until <= now and found.retry_at <= now:
                self._begin(reference, sandbox)
            return
        until, failure = self._failed.get((reference, sandbox), (0.0, None))
        if failure is not None and now < until:
            raise BackendError(failure.problem)
        if found is None and len(self._held) + len(self._fetching) >= MAX_READINGS:
            raise NoReadingError(f"vaultd holds {MAX_READINGS} values of backends, its limit")
        await asyncio.shield(self._begin(reference, sandbox))

    def current(self, reference: str, sandbox: str) -> Current:
        """Return the valid value for this sandbox. It does not wait.

        Raises:
            NoReadingError: there is none any more.
        """
        found = self._find(reference, sandbox)
        left = 0.0 if found is None else found.valid_until - self._now()
        if found is None or left < 1:
            raise NoReadingError("the value of the backend is not valid any more")
        moment = self._clock()
        keys: tuple[_Key, ...] = ((reference, None), (reference, sandbox))
        former = [one for key in keys for one in still_former(self._former.get(key, ()), moment)]
        return Current(found.value, tuple(former), left)

    async def check(self, reference: str, sandbox: str) -> tuple[int, int]:
        """Read a reference, and forget its value; return its seconds (fresh, valid).

        Raises:
            BackendError: it cannot be read.
        """
        reading = await self._fetcher.fetch(reference, sandbox)
        if not reading.shared:
            await self._fetcher.release(reference, sandbox)
        return reading.fresh_seconds, reading.valid_seconds

    async def probe(self, reference: str) -> None:
        """Say whether there is such a secret, without making one. Raises BackendError."""
        await self._fetcher.probe(reference)

    async def examine(self) -> tuple[BackendState, ...]:
        """Return the state of each backend. Raises BackendError."""
        return await self._fetcher.examine()

    async def maintain(self) -> None:
        """Refresh values in use and end others, until cancelled."""
        while True:
            await asyncio.sleep(LOOK)
            self.settle()

    def settle(self) -> None:
        """End values that are not valid or not granted any more, and begin to refresh the others if they are due."""
        now = self._now()
        users = self._users.referring() if self._held else {}
        for (reference, holder), held in list(self._held.items()):
            granted = users.get(reference, ())
            used = next(iter(granted), None) if holder is None else holder if holder in granted else None
            if used is None and holder is not None:
                self._end((reference, holder))
                del self._former[(reference, holder)]
                self._returned[(reference, holder)] = held.valid_until
            elif used is None or held.valid_until <= now:
                self._end((reference, holder))
            elif held.fresh_until <= now and held.retry_at <= now:
                self._begin(reference, used)
        moment = self._clock()
        self._former = {key: kept for key, kept in self._former.items() if any(one.until > moment for one in kept)}
        self._failed = {key: failed for key, failed in self._failed.items() if failed[0] > now}
        self._returned = {key: end for key, end in self._returned.items() if end > now}
        if self._returned and not self._giving_back:
            self._giving_back = True
            self._run(self._give_back(), "give-back")

    def withdraw(self, extent: Extent) -> None:
        """Forget the values of an extent: those that were made for its sandbox, or those of every sandbox.

        It does not wait. A later request for such a value waits until the backend has forgotten the former one.
        """
        self._withdrawals += 1
        for key, held in list(self._held.items()):
            if extent.secret not in (None, key[0]) or extent.sandbox not in (None, key[1]):
                continue
            self._end(key)
            forgetting = self._forget(key, held.valid_until)
            self._forgetting[key] = asyncio.get_running_loop().create_task(forgetting, name="forget-secret")

    async def _forget(self, key: _Key, until: float) -> None:
        reference, holder = key
        try:
            await self._fetcher.release(reference, holder or _EVERY_SANDBOX)
        except BackendError as error:
            _log.warning("a backend has not revoked %s yet: %s", reference, error)
            if holder is not None:
                self._returned[(reference, holder)] = until
        finally:
            if self._forgetting.get(key) is asyncio.current_task():
                del self._forgetting[key]

    async def close(self) -> None:
        """End all requests and forget all values."""
        tasks = [*self._fetching.values(), *self._forgetting.values(), *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._held.clear()
        self._former.clear()

    def _find(self, reference: str, sandbox: str) -> _Held | None:
        return self._held.get((reference, None)) or self._held.get((reference, sandbox))

    def _begin(self, reference: str, sandbox: str) -> asyncio.Task[None]:
        """Return the request for a reference that is under way, or begin it."""
        key = (reference, sandbox)
        self._returned.pop(key, None)
        task = self._fetching.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._fetch(reference, sandbox), name="fetch-secret")
            self._fetching[key] = task
            task.add_done_callback(lambda done: self._fetched(key, done))
        return task

    def _fetched(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        self._fetching.pop(key, None)
        if not task.cancelled():
            task.exception()  # a refresh has no caller that waits

    async def _fetch(self, reference: str, sandbox: str) -> None:
        try:
            asked, reading = await self._read(reference, sandbox)
        except BackendError as error:
            self._refused(reference, sandbox, error)
            raise
        self._failed.pop((reference, sandbox), None)
        value = Secret(reading.value.text)
        held = _Held(value, asked + reading.fresh_seconds, asked + reading.valid_seconds)
        key: _Key = (reference, None if reading.shared else sandbox)
        for other in ((reference, None), (reference, sandbox)):
            former = self._held.get(other)
            if former is not None and (other != key or former.value != value):
                _log.info("a backend has another value of %s", reference)
                self._withdraw(other)
        self._held[key] = held

    async def _read(self, reference: str, sandbox: str) -> tuple[float, Reading]:
        """Return a value that no withdrawal concerns, and when it was asked for.

        Raises:
            BackendError: there is none.
        """
        for _ in range(_ATTEMPTS):
            for key in ((reference, None), (reference, sandbox)):
                if (pending := self._forgetting.get(key)) is not None:
                    await asyncio.wait({pending})
            asked, withdrawals = self._now(), self._withdrawals
            reading = await self._fetcher.fetch(reference, sandbox)
            if withdrawals == self._withdrawals:
                return asked, reading
            await self._fetcher.release(reference, sandbox)
        raise BackendError(Problem(Fault.BUSY, "secrets are revoked again and again: try later"))

    def _refused(self, reference: str, sandbox: str, error: BackendError) -> None:
        now = self._now()
        _log.warning("no value of %s: %s", reference, error)
        self._failed[(reference, sandbox)] = (now + PAUSE, error)
        for key in ((reference, None), (reference, sandbox)):
            if (held := self._held.get(key)) is None:
                continue
            if error.problem.fault in DEFINITE:
                self._withdraw(key)
            else:
                held.retry_at = now + RETRY

    def _withdraw(self, key: _Key) -> None:
        """Stop using a value, and end its leases. No request waits for the workers."""
        self._end(key)
        reference, holder = key
        if self.changed is not None:
            used = self._users.referring().get(reference, ()) if holder is None else (holder,)
            self._run(self.changed(reference, used), "withdraw-secret")

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self, key: _Key) -> None:
        """Stop using a value. It counts as a former one from now on."""
        if (held := self._held.pop(key, None)) is not None:
            self._former[key] = with_former(self._former.get(key, ()), held.value, self._clock())

    async def _give_back(self) -> None:
        """Have the backend revoke what was made for sandboxes that use it no more. What fails is tried again."""
        try:
            for key in list(self._returned):
                if key in self._held or self._returned.pop(key, None) is None:
                    continue
                until = self._now() + RETRY
                try:
                    await self._fetcher.release(*key)
                except BackendError as error:
                    _log.warning("a backend has not revoked %s yet: %s", key[0], error)
                    self._returned.setdefault(key, until)
                    return
        finally:
            self._giving_back = False
