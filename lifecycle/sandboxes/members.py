"""The idle members of pools, as create calls claim them.

- A claim converts the row of one idle member in one transaction of the database. So two claims never get the same
  member, and none gets a member whose removal has begun.
- A member whose image was removed or replaced is given to no claim. hostd compares the images.
- Without an idle member a claim waits for a bounded time, and is then refused with 429. A full pool refuses at once.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableSet, Sequence

from lifecycle.api.errors import ApiError
from lifecycle.sandboxes.ceilings import Ceilings
from lifecycle.sandboxes.registry import Registry, Sandbox, State

WAIT_SECONDS = 10.0
"""The limit of a claim's wait, below the clients' own time-out."""
_CANDIDATES = 16
_LOOK_SECONDS = 0.5
_RETRY_SECONDS = 2
REFILL_SECONDS = 0.3
"""The rest between a claim and the launch of the next member, which would take the claimed one's processor time."""

type Convert = Callable[[Sandbox], Sandbox]
type ClaimableOf = Callable[[Sequence[str]], Awaitable[frozenset[str]]]
"""Returns those of the members whose image may still be started."""


class _Taken(Exception):
    """Another claim has the member, or it is being removed."""


class Members:
    """The hand-out of idle members.

    Attributes:
        wanted: set a moment after each claim, and while one waits. The filler of the pools waits for it.
        full: the pools that make no further member now.
    """

    def __init__(self, registry: Registry, seconds: float = WAIT_SECONDS) -> None:
        self._registry = registry
        self._seconds = seconds
        self.wanted = asyncio.Event()
        self.full: frozenset[str] = frozenset()
        self._arrived = asyncio.Event()

    def arrived(self) -> None:
        """Report that a member became idle, or that `full` changed."""
        self._arrived.set()
        self._arrived = asyncio.Event()

    async def claim(
        self, pool: str, claimable: ClaimableOf, convert: Convert, making: MutableSet[str], ceilings: Ceilings
    ) -> Sandbox:
        """Convert an idle member of a pool to the row of its new owner, and return that row.

        Args:
            claimable: raises what the caller gets if no member can be claimed.
            making: gets the member's id before its row is converted.
            ceilings: for the owner's sandboxes. The member counts in the total already.

        Raises:
            ApiError: 429, no member became idle in time, or a ceiling is reached.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._seconds
        while True:
            arrived = self._arrived
            idle = await self._registry.idle(pool, _CANDIDATES)
            fit = await claimable(idle)
            for member in (one for one in idle if one in fit):
                if member not in making and (row := await self._convert(member, convert, making, ceilings)):
                    loop.call_later(REFILL_SECONDS, self.wanted.set)
                    return row
            self.wanted.set()
            left = deadline - loop.time()
            if left <= 0 or pool in self.full:
                raise exhausted(pool)
            await _set_within(arrived, min(left, _LOOK_SECONDS))

    async def _convert(
        self, member: str, convert: Convert, making: MutableSet[str], ceilings: Ceilings
    ) -> Sandbox | None:
        def change(current: Sandbox) -> Sandbox:
            if not current.idle or current.state is not State.RUNNING:
                raise _Taken
            return convert(current)

        making.add(member)
        try:
            row = await self._registry.update(member, change, ceilings)
        except _Taken:
            row = None
        except BaseException:
            making.discard(member)
            raise
        if row is None:
            making.discard(member)
        return row


def exhausted(pool: str) -> ApiError:
    """Return the error for a pool without an idle member."""
    return ApiError(
        429,
        "KUBERNETES::POOL_CAPACITY_EXHAUSTED",
        f"Pool {pool[:253]} has no idle sandbox now.",
        {"Retry-After": str(_RETRY_SECONDS)},
    )


def unknown_pool(pool: str) -> ApiError:
    """Return the error for a pool that does not exist."""
    return ApiError(404, "KUBERNETES::POOL_NOT_FOUND", f"Pool {pool[:253]!r} not found.")


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
