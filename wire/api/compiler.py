"""What hostd asks the compiler (`CONTROL`), and what the compiler reports (`REPORTS`)."""

from dataclasses import dataclass, field
from typing import Final

from wire.api.provided import NOTHING, Provided
from wire.api.vaultd import GrantForm
from wire.operations import Notification, Operations, Request


@dataclass(frozen=True, slots=True)
class CompiledText:
    """A compiled policy, as a JSON text, and what it provides to the sandbox."""

    policy: str = field(repr=False)
    provided: Provided = NOTHING


@dataclass(frozen=True, slots=True)
class Compile(Request[CompiledText]):
    """Compile a selection, which is a JSON text, under the operator's document as it is now.

    `seed` is that of the sandbox's placeholders. Without one the answer provides nothing.
    """

    selection: str = field(repr=False)
    seed: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Referenced:
    """Each reference to a backend's secret in the operator's document, with each exact host of its rules."""

    uses: tuple[GrantForm, ...]


@dataclass(frozen=True, slots=True)
class References(Request[Referenced]):
    """Ask for the references of the operator's document as it is now."""


@dataclass(frozen=True, slots=True)
class Changed(Notification):
    """Another document is in force."""


CONTROL: Final = Operations(Compile, References)
REPORTS: Final = Operations(Changed)
