"""The row of a snapshot, and the limits of snapshots."""

from dataclasses import dataclass, replace
from enum import StrEnum


class SnapshotState(StrEnum):
    """The states of the lifecycle API."""

    CREATING = "Creating"
    READY = "Ready"
    FAILED = "Failed"
    DELETING = "Deleting"


@dataclass(frozen=True, slots=True)
class SnapshotBounds:
    """The limits of all snapshots: their number, and their bytes."""

    count: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The row of a snapshot. Times are seconds since the epoch.

    Attributes:
        sandbox: the source. It can be removed by now.
        image: the name of the image that the source began with.
        bytes: of its layer; 0 until it is ready.
    """

    id: str
    sandbox: str
    name: str | None
    state: SnapshotState
    reason: str
    message: str
    changed_at: float
    created_at: float
    image: str
    bytes: int = 0

    def moved(self, state: SnapshotState, reason: str, message: str, now: float) -> "Snapshot":
        """Return the same snapshot in another state."""
        return replace(self, state=state, reason=reason, message=message, changed_at=now)
