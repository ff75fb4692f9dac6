"""From what a caller asked for to what a gateway enforces.

- The operator's file is read at start and again when it changes; a file that can no longer be read keeps the last good
  document in force and is reported, never replaced by something weaker. At start it is fatal.
- A call that brings neither a network policy nor the name of an operator policy gets the operator's default.
- Naming an operator policy *and* bringing a network policy narrows: both must allow.

The rules themselves are `policy`'s; this module only chooses and combines.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lifecycle.credential_vault import Vault
from policy.api import ApiPolicy, ApiPolicyError
from policy.compile import (
    CompiledPolicy,
    UnknownPolicy,
    compile_api,
    compile_default,
    compile_named,
    narrow,
    secrets_of,
)
from policy.document import PolicyDocument
from policy.load import PolicyError, load

_log = logging.getLogger(__name__)


class Refused(ValueError):
    """The policy cannot be had; the text is for the caller."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A policy for one sandbox and what it needs from the vault."""

    policy: CompiledPolicy
    grants: tuple[Mapping[str, Any], ...]

    @property
    def digest(self) -> str:
        """Identity of the policy."""
        return self.policy.digest


class Policies:
    """The operator's document, and compilation under it."""

    def __init__(self, document: PolicyDocument, path: Path | None = None) -> None:
        self._document = document
        self._path = path
        self._seen = None if path is None else _stamp(path)
        self.version = 0
        """Grows with each document that was read."""

    @classmethod
    def read(cls, path: Path) -> "Policies":
        """Load the operator's file.

        Raises:
            PolicyError, OSError: it cannot be read.
        """
        return cls(load(path), path)

    async def compile(self, name: str | None, network_policy: ApiPolicy | None, vault: Vault | None = None) -> Compiled:
        """Compile what one sandbox asked for.

        Raises:
            Refused: the operator has no such policy, or does not allow what was asked.
        """
        return await asyncio.to_thread(self._compile, name, network_policy, vault)

    def _compile(self, name: str | None, network_policy: ApiPolicy | None, vault: Vault | None) -> Compiled:
        document = self._document
        try:
            policy = compile_default(document) if name is None else compile_named(document, name)
            if network_policy is not None:
                asked = compile_api(document, network_policy, () if vault is None else vault.compiled_bindings())
                policy = asked if name is None else narrow(policy, asked)
        except UnknownPolicy as error:
            raise Refused(f"extensions: sallyport.policy: {error}") from None
        except ApiPolicyError as error:
            raise Refused(str(error)) from None
        grants = {
            (use.secret, use.host, use.port, str(use.scheme)): {
                "secret": use.secret,
                "host": use.host,
                "port": use.port,
                "scheme": str(use.scheme),
            }
            for use in secrets_of(policy)
        }
        return Compiled(policy, tuple(grants.values()))

    async def reload(self) -> bool:
        """Read the file again if it changed; tells whether there is a new document."""
        if self._path is None:
            return False
        stamp = await asyncio.to_thread(_stamp, self._path)
        if stamp == self._seen:
            return False
        self._seen = stamp
        try:
            self._document = await asyncio.to_thread(load, self._path)
            self.version += 1
        except (PolicyError, OSError) as error:
            _log.error("policy file not reloaded, the former one stays in force: %s", error)
            return False
        _log.info("policy file reloaded")
        return True


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
