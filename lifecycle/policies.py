"""From what a caller asked for to what a gateway enforces.

- The operator's file is read at start and again when it changes; a file that can no longer be read keeps the last good
  document in force and is reported, never replaced by something weaker. At start it is fatal.
- A call that brings neither a network policy nor the name of an operator policy gets the operator's default.
- Naming an operator policy *and* bringing a network policy narrows: both must allow.
- Two questions, two answers. What a caller asks for is *admitted* (`admit`) or refused. What was admitted once is
  *enforced* (`enforce`) under each later document: a part that the document refuses is left out, and the rest of the
  policy and the whole document are in force.

The rules themselves are `policy`'s; this module only chooses and combines.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policy.api import ApiPolicy
from policy.bindings import ApiBinding
from policy.compile import (
    CompiledPolicy,
    Dropped,
    enforce,
    secrets_of,
)
from policy.document import PolicyDocument
from policy.load import PolicyError, load

_log = logging.getLogger(__name__)


type Stamp = tuple[int, int, int, int]
"""By what a changed file is told."""


class Refused(ValueError):
    """The policy cannot be had; the text is for the caller."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A policy for one sandbox, what it needs from the vault, and the parts that are not in force."""

    policy: CompiledPolicy
    grants: tuple[Mapping[str, Any], ...]
    dropped: tuple[Dropped, ...] = ()

    @property
    def digest(self) -> str:
        """Identity of the policy."""
        return self.policy.digest


class Policies:
    """The operator's document, and compilation under it."""

    def __init__(self, document: PolicyDocument, path: Path | None = None, seen: "Stamp | None" = None) -> None:
        self._document = document
        self._path = path
        self._seen = seen
        self.version = 0
        """Grows with each document that was read."""
        self.problem = ""
        """Why the file as it is now is not in force; empty if it is."""

    @classmethod
    def read(cls, path: Path) -> "Policies":
        """Load the operator's file.

        Raises:
            PolicyError, OSError: it cannot be read.
        """
        seen = _stamp(path)  # before the file is read: a change meanwhile is seen at the next look
        return cls(load(path), path, seen)

    async def admit(self, name: str | None, network_policy: ApiPolicy | None) -> Compiled:
        """Compile what the caller of a create asks for.

        Raises:
            Refused: the operator has no such policy.
        """
        compiled = await self.enforce(name, network_policy, ())
        if compiled.dropped:
            raise Refused(f"extensions: sallyport.policy: {compiled.dropped[0].reason}")
        return compiled

    async def enforce(
        self, name: str | None, network_policy: ApiPolicy | None, bindings: tuple[ApiBinding, ...]
    ) -> Compiled:
        """Compile what a sandbox has, without the parts that the operator's document refuses."""
        return await asyncio.to_thread(_enforce, self._document, name, network_policy, bindings)

    async def reload(self) -> bool:
        """Read the file again if it changed, or could not be read; tells whether there is a new document."""
        if self._path is None:
            return False
        stamp = await asyncio.to_thread(_stamp, self._path)
        if stamp is not None and stamp == self._seen:
            return False
        try:
            document = await asyncio.to_thread(load, self._path)
        except Exception as error:  # noqa: BLE001 - closes: the last good document stays in force
            # A file that cannot be opened may be readable later without a change that its stamp shows.
            unreadable = isinstance(error, OSError) or isinstance(error.__cause__, OSError)
            self._seen = None if unreadable else stamp
            problem = str(error) if isinstance(error, PolicyError | OSError) else type(error).__name__
            if problem != self.problem:
                _log.error("the policy file is not in force, the last good one is: %s", problem)
            self.problem = problem
            return False
        self._seen, self._document, self.problem = stamp, document, ""
        self.version += 1
        _log.info("policy file reloaded")
        return True


def _enforce(
    document: PolicyDocument, name: str | None, network_policy: ApiPolicy | None, bindings: tuple[ApiBinding, ...]
) -> Compiled:
    policy, dropped = enforce(document, name, network_policy, bindings)
    grants = {
        (use.secret, use.host, use.port, str(use.scheme)): {
            "secret": use.secret,
            "host": use.host,
            "port": use.port,
            "scheme": str(use.scheme),
        }
        for use in secrets_of(policy)
    }
    return Compiled(policy, tuple(grants.values()), dropped)


def _stamp(path: Path) -> Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino
