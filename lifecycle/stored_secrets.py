"""What the vault of the running server says about the secrets of a policy: for `sallyport policy check` and `explain`.

- Only root gets an answer, and only while the server runs. Otherwise nothing is known, and the reason is said.
- Names and bindings are asked for, never a value.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import wire
from lifecycle.config import launch
from lifecycle.config.settings import Settings
from policy.compile import SecretUse
from policy.references import is_reference
from vault.client import AdminClient
from vault.freeze import Extent
from vault.grants import Grant, check, missing
from vault.stores.port import SecretInfo
from wire.api.vaultd import Listed

_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class StoredSecrets:
    """The secrets of a vault; `unknown` says why they are not known, empty if they are."""

    secrets: Mapping[str, SecretInfo]
    frozen: tuple[Extent, ...] = ()
    unknown: str = ""

    def remark(self, use: SecretUse, uses: Iterable[SecretUse] = ()) -> str:
        """Say what keeps the vault from releasing a secret for a use; empty if nothing that is known here does.

        Args:
            uses: every use of the policy.
        """
        if self.unknown:
            return "not checked"
        if is_reference(use.secret):
            return self._frozen(use.secret)
        if use.host.startswith("*.") or ":" in use.secret:
            return ""
        wanted = Grant(use.secret, use.host, use.port, use.scheme)
        info = self.secrets.get(use.secret)
        if info is None:
            return missing(wanted, (Grant(one.secret, one.host, one.port, one.scheme) for one in uses))
        if (refused := check(info.binding, wanted, datetime.now(UTC))) is not None:
            return refused.reason
        return self._frozen(use.secret)

    def _frozen(self, secret: str) -> str:
        covered = any(extent.sandbox is None and extent.covers(None, secret) for extent in self.frozen)
        return "the secret is frozen" if covered else ""


def read(configured: Settings | None) -> StoredSecrets:
    """Ask the vault of the server with these settings."""
    if configured is None:
        return StoredSecrets({}, unknown="there are no settings of a server")
    try:
        listed = asyncio.run(_listed(configured))
    except (FileNotFoundError, ConnectionRefusedError):
        return StoredSecrets({}, unknown="the server does not run")
    except (OSError, wire.RemoteError):  # it answers root only, and hangs up on others
        return StoredSecrets({}, unknown="the vault answers root only, or does not answer")
    infos = map(SecretInfo.of, listed.secrets)
    return StoredSecrets(
        {info.name: info for info in infos}, tuple(Extent(one.sandbox, one.secret) for one in listed.frozen)
    )


async def _listed(configured: Settings) -> Listed:
    async with asyncio.timeout(_SECONDS):
        client = await AdminClient.connect(configured.run_dir / "vault.sock", launch.uids(configured)["vaultd"])
        try:
            return await client.listed()
        finally:
            await client.close()
