"""The compilation of policies in `serve`: from a caller's request to the policy of a gateway.

hostd's compiler compiles the policies in force, from the same file and the same selection (`policy.compiler`). No
policy that is compiled here reaches a gateway. `serve` compiles for its answers to callers, for the vault's grants, and
to detect whether a sandbox has a policy of an older document.

- A call without a network policy and without the name of an operator policy gets the operator's default.
- An operator policy *and* a network policy are combined: both must allow.
- A request of a caller is *admitted* (`admit`) or refused. An admitted policy is *enforced* (`enforce`) under each
  later document: a part that the document refuses is left out, and the rest of the policy and the whole document are in
  force.

Package `policy` contains the rules themselves. This module only selects and combines.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from policy.api import ApiPolicy
from policy.compile import CompiledPolicy, Dropped, inspected, secrets_of
from policy.decision import Deny, decide_name
from policy.document import PolicyDocument
from policy.operator_file import OperatorFile
from policy.placeholders import provisions_of, variables_of
from policy.selection import NOTHING, Selection
from vault.grants import Grant

MAX_NAMES = 512
"""vaultd's limit is twice this, because old and new grants exist beside each other during a change."""


class PolicyRefused(ValueError):
    """The policy is not available. The text is for the caller."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A policy for one sandbox: its selection, its grants at the vault, and the parts that are not in force."""

    policy: CompiledPolicy
    selection: Selection
    grants: tuple[Grant, ...]
    dropped: tuple[Dropped, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names for which the gateway needs certificates, or `*` for more than the vault's limit."""
        names = inspected(self.policy)
        return names if len(names) <= MAX_NAMES else ("*",)

    @property
    def provides(self) -> bool:
        """Return whether the policy provides variables or files to the sandbox."""
        return bool(provisions_of(self.policy))

    @property
    def variables(self) -> frozenset[str]:
        """Return the names of the variables that the policy provides."""
        return variables_of(self.policy)

    @property
    def digest(self) -> str:
        """Return the identity of the policy."""
        return self.policy.digest


class Policies:
    """The operator's document, and compilation under it."""

    def __init__(self, file: OperatorFile) -> None:
        self._file = file
        self.version = 0
        """Increases with each document that was read."""

    @classmethod
    def read(cls, path: Path | None) -> "Policies":
        """Load the operator's file. Without one the shipped default is in force.

        Raises:
            PolicyError: it cannot be read.
        """
        return cls(OperatorFile(PolicyDocument()) if path is None else OperatorFile.read(path))

    @property
    def problem(self) -> str:
        """Return why the present file is not in force; empty if it is in force."""
        return self._file.problem

    async def admit(self, name: str | None, network_policy: ApiPolicy | None) -> Compiled:
        """Compile the policy that the caller of a create requests.

        Raises:
            Refused: the operator has no such policy.
        """
        compiled = await self.enforce(Selection(name, network_policy))
        if compiled.dropped:
            raise PolicyRefused(f"extensions: sallyport.policy: {compiled.dropped[0].reason}")
        return compiled

    async def enforce(self, selection: Selection) -> Compiled:
        """Compile the policy of a sandbox, without the parts that the operator's document refuses."""
        return await asyncio.to_thread(_enforce, self._file.document, selection)

    async def always_allowed(self) -> Compiled:
        """Compile the policy of a sandbox that gets no access of its own: only what the operator always allows."""
        return await self.enforce(NOTHING)

    async def reload(self) -> bool:
        """Read the file again if it changed or could not be read. Return whether there is a new document."""
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
    """Return whether any flow to a host, or to some host of a pattern, can be allowed. If not, nothing is granted
    there.
    """
    return host.startswith("*.") or not isinstance(decide_name(policy, host), Deny)
