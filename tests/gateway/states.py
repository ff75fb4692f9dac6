"""The state of a worker, for tests of a part that reads it."""

from dataclasses import dataclass
from typing import Any, cast

from gateway.config import GatewayConfig
from gateway.state import Guard, WorkerState
from policy.rules import Limits


@dataclass
class Standing:
    """A guard that is as the test says."""

    alive: bool = True


@dataclass
class Bound:
    """Limits that are in force."""

    limits: Limits | None


def in_force(config: GatewayConfig | None = None, *, vault: Any = None, alive: bool = True) -> WorkerState:
    """A worker's state with `config`; the test is its writer."""
    return WorkerState(cast(Guard, Standing(alive)), vault, config)
