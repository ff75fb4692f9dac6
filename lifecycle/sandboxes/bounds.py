"""The operator's bounds of creations. The settings have them, and commands that only read settings import no more."""

from collections.abc import Mapping
from dataclasses import dataclass

from lifecycle.sandboxes.ceilings import Ceilings
from lifecycle.sandboxes.quantities import Resources


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """The operator's limits for a create call."""

    runtimes: tuple[str, ...]
    default_runtime: str
    defaults: Resources
    maxima: Resources
    max_timeout: int | None
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CreationBounds:
    """The limits of concurrent creations, the time that a caller waits for its answer, and the ceilings.

    Attributes:
        queue_seconds: the longest wait of a creation for its launch.
    """

    launches: int
    pending: int
    sandboxes: int
    answer_seconds: float
    queue_seconds: float
    ceilings: Ceilings
