"""From what a caller asked for to what a gateway shall enforce, as `serve` sees it.

What is in force is compiled by hostd's compiler from the same file and the same selection (`policy.compiler`): nothing
that is compiled here reaches a gateway. It is compiled for the answers to callers, for the vault's grants, and to know
whether a sandbox is behind the document.

- A call that brings neither a network policy nor the name of an operator policy gets the operator's default.
- Naming an operator policy *and* bringing a network policy narrows: both must allow.
- Two questions, two answers. What a caller asks for is *admitted* (`admit`) or refused. What was admitted once is
  *enforced* (`enforce`) under each later document: a part that the document refuses is left out, and the rest of the
  policy and the whole document are in force.

The rules themselves are `policy`'s; this module only chooses and combines.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from policy.api import ApiPolicy
from policy.compile import CompiledPolicy, Dropped, inspected, secrets_of
from policy.decision import Deny, decide_name
from policy.document import PolicyDocument
from policy.operator_file import OperatorFile
from policy.selection import NOTHING, Selection
from vault.grants import Grant

MAX_NAMES = 512
"""vaultd keeps twice as many: during a change old and new ones."""


class PolicyRefused(ValueError):
    """The policy cannot be had; the text is for the caller."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A policy for one sandbox, its selection, what it needs from the vault, and the parts that are not in force."""

    policy: CompiledPolicy
    selection: Selection
    grants: tuple[Grant, ...]
    dropped: tuple[Dropped, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """What the sandbox's gateway needs certificates for, or `*` if that is more than the vault takes."""
        names = inspected(self.policy)
        return names if len(names) <= MAX_NAMES else ("*",)

    @property
    def digest(self) -> str:
        """Identity of the policy."""
        return self.policy.digest


class Policies:
    """The operator's document, and compilation under it."""

    def __init__(self, file: OperatorFile) -> None:
        self._file = file
        self.version = 0
        """Grows with each document that was read."""

    @classmethod
    def read(cls, path: Path | None) -> "Policies":
        """Load the operator's file; without one the shipped default is in force.

        Raises:
            PolicyError: it cannot be read.
        """
        return cls(OperatorFile(PolicyDocument()) if path is None else OperatorFile.read(path))

    @property
    def problem(self) -> str:
        """Why the file as it is now is not in force; empty if it is."""
        return self._file.problem

    async def admit(self, name: str | None, network_policy: ApiPolicy | None) -> Compiled:
        """Compile what the caller of a create asks for.

        Raises:
            Refused: the operator has no such policy.
        """
        compiled = await self.enforce(Selection(name, network_policy))
        if compiled.dropped:
            raise PolicyRefused(f"extensions: sallyport.policy: {compiled.dropped[0].reason}")
        return compiled

    async def enforce(self, selection: Selection) -> Compiled:
        """Compile what a sandbox has, without the parts that the operator's document refuses."""
        return await asyncio.to_thread(_enforce, self._file.document, selection)

    async def nothing(self) -> Compiled:
        """Compile what a sandbox keeps that is to have nothing: what the operator always allows."""
        return await self.enforce(NOTHING)

    async def reload(self) -> bool:
        """Read the file again if it changed, or could not be read; tells whether there is a new document."""
        if not await asyncio.to_thread(self._file.reload):
            return False
        self.version += 1
        return True


def _enforce(document: PolicyDocument, selection: Selection) -> Compiled:
    policy, dropped = selection.compiled(document)
    uses = (use for use in secrets_of(policy) if _reachable(policy, use.host))
    grants = dict.fromkeys(Grant(use.secret, use.host, use.port, use.scheme) for use in uses)
    return Compiled(policy, selection, tuple(grants), dropped)


def _reachable(policy: CompiledPolicy, host: str) -> bool:
    """Whether any flow to a host, or to some host of a pattern, could be allowed: else nothing is granted there."""
    return host.startswith("*.") or not isinstance(decide_name(policy, host), Deny)
