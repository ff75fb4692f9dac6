"""What vaultd is asked."""

from dataclasses import dataclass

from wire.ids import check_generation, check_sandbox
from wire.operations import Done, Request


@dataclass(frozen=True, slots=True)
class Attach(Request[Done]):
    """Make the one descriptor that comes with it the channel of a sandbox's worker."""

    sandbox: str
    generation: int

    def __post_init__(self) -> None:
        check_sandbox(self.sandbox)
        check_generation(self.generation)
