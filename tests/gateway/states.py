"""The state of a worker, for tests of parts that read it."""

from dataclasses import dataclass
from typing import Any, cast

from gateway.config import GatewayConfig
from gateway.state import Guard, WorkerState
from policy.rules import Limits


@dataclass
class Standing:
    """A guard whose state the test sets."""

    alive: bool = True


@dataclass
class Bound:
    """Limits that are in force."""

    limits: Limits | None


def in_force(config: GatewayConfig | None = None, *, vault: Any = None, alive: bool = True) -> WorkerState:
    """Return a worker's state with `config`; only the test changes it."""
    return WorkerState(cast(Guard, Standing(alive)), vault, config)
