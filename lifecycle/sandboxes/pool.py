"""A pool: what its members are made from, and how many of them there are. Pure.

The template is a part of Kubernetes' PodTemplateSpec: one container with an image, a command and resource limits, and
the name of a runtime. Each other member of it is refused, because it would have no effect.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from lifecycle.sandboxes.quantities import Resources


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many members a pool has.

    Attributes:
        buffer_min: fewer idle members than this are filled up.
        buffer_max: the number of idle members after that.
        pool_min: the least number of members, idle and claimed.
        pool_max: the most. No member is made beyond it.
    """

    buffer_min: int
    buffer_max: int
    pool_min: int
    pool_max: int

    def missing(self, idle: int, claimed: int, *, filling: bool) -> int:
        """Return how many idle members are to be made. `filling`: the last call asked for some."""
        low = idle < self.buffer_min or idle + claimed < self.pool_min
        if not low and not (filling and idle < self.buffer_max):
            return 0
        wanted = max(self.buffer_max - idle, self.pool_min - idle - claimed)
        return max(0, min(wanted, self.pool_max - idle - claimed))

    def surplus(self, idle: int, claimed: int) -> int:
        """Return how many idle members are to be removed."""
        kept = max(self.buffer_max, self.pool_min - claimed)
        return max(0, idle - max(0, min(kept, self.pool_max - claimed)))


@dataclass(frozen=True, slots=True)
class SandboxPool:
    """A pool. A caller of a claim can replace `entrypoint`, and nothing else of this.

    Attributes:
        mark: differs from that of each former pool of this name. Members of a former pool are not members of this one.
    """

    name: str
    mark: str
    image: str
    entrypoint: tuple[str, ...]
    runtime: str
    resources: Resources
    capacity: Capacity
    created_at: float

    @property
    def key(self) -> str:
        """Return what its members' rows have as their pool."""
        return f"{self.name}@{self.mark}"

    @property
    def revision(self) -> str:
        """Return the identity of what the members are made from."""
        made_from = (self.image, self.entrypoint, self.runtime, asdict(self.resources))
        return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:12]

    def resized(self, capacity: Capacity) -> "SandboxPool":
        """Return the pool with another capacity."""
        return replace(self, capacity=capacity)

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return asdict(self)

    @staticmethod
    def named_by(key: str) -> str:
        """Return the name in a key."""
        return key.partition("@")[0]

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "SandboxPool":
        """Read the stored form."""
        given = dict(document)
        given["entrypoint"] = tuple(given["entrypoint"])
        given["resources"] = Resources(**given["resources"])
        given["capacity"] = Capacity(**given["capacity"])
        return cls(**given)


@dataclass(frozen=True, slots=True)
class Count:
    """The members of a pool now.

    Attributes:
        idle: ready for a claim.
        making: idle members whose launch has not ended.
        claimed: sandboxes of callers.
        problem: why the last member could not be made, or empty.
    """

    idle: int = 0
    making: int = 0
    claimed: int = 0
    problem: str = ""
