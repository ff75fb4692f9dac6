"""Ceilings: the most that all sandboxes together, and those of one API key together, may have. Pure.

A sandbox has its share from the moment its creation is accepted until it is removed, also while it is paused or after
its program has ended. A sandbox of which nothing is left has none (`GONE`). The shares are read from the rows of all
servers of a database, in the transaction that writes the new row (`lifecycle.database.table`). So the ceilings hold
over restarts, and concurrent calls cannot exceed them.
"""

from dataclasses import dataclass, fields

from lifecycle.api.errors import ApiError, invalid

GONE = ("CREATE_FAILED", "CONTAINER_LOST", "ISOLATION_ALARM")
"""The reasons of a `Failed` sandbox of which nothing is left."""
RETRY_SECONDS = 5


@dataclass(frozen=True, slots=True)
class Held:
    """What one sandbox has, or several have. `disk_bytes` is 0 where disks have no limit."""

    sandboxes: int
    cpu_nanos: int
    memory_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class SandboxCeiling:
    """The most of each resource; None is no ceiling."""

    sandboxes: int | None = None
    cpu_nanos: int | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None

    @property
    def limits(self) -> bool:
        """Return whether there is a ceiling for any resource."""
        return any(getattr(self, item.name) is not None for item in fields(self))

    def exceeded(self, used: Held, more: Held) -> str | None:
        """Return the first resource of which there is not enough for `more`; None if there is enough of each."""
        for item in fields(self):
            most = getattr(self, item.name)
            if most is not None and getattr(used, item.name) + getattr(more, item.name) > most:
                return item.name
        return None


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The ceilings of a server: for all sandboxes of its database, and for those of each API key."""

    total: SandboxCeiling = SandboxCeiling()
    per_key: SandboxCeiling = SandboxCeiling()

    @property
    def limits(self) -> bool:
        """Return whether there is any ceiling."""
        return self.total.limits or self.per_key.limits


NO_SHARE = Held(0, 0, 0, 0)
_WORDS = {"sandboxes": "sandboxes", "cpu_nanos": "cpu", "memory_bytes": "memory", "disk_bytes": "disk"}


def check(share: Held, used: Held, ceiling: SandboxCeiling, of: str) -> None:
    """Refuse a sandbox that would exceed a ceiling.

    Args:
        of: the sandboxes whose shares are `used`, in words.

    Raises:
        ApiError: 429; 400 if the sandbox alone exceeds it, because a later call would be refused, too.
    """
    if (name := ceiling.exceeded(NO_SHARE, share)) is not None:
        raise invalid(f"resourceLimits.{_WORDS[name]}: over the ceiling for {of}.")
    if (name := ceiling.exceeded(used, share)) is not None:
        message = f"The ceiling of {_WORDS[name]} for {of} is reached."
        raise ApiError(429, "SANDBOX::QUOTA_EXCEEDED", message, {"Retry-After": str(RETRY_SECONDS)})
