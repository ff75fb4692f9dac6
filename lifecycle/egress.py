"""Changes of one sandbox's egress: its network policy and its credential vault.

Both are compiled together and written under the sandbox's one lock, so that neither can slip past the check of the
other. The order of a change: check -> audit -> vaultd has new values and grants beside the old ones -> the gateway
confirms the new policy -> the registry has it -> vaultd drops what is no longer used -> answer.

- On any failure the former policy is in force and in the registry; what cannot be rolled back at once stays *closed*
  (a secret without a grant), never open.
- Revocation does not depend on the gateway: a change that only takes away is cut at vaultd first, and the gateway's
  new policy is applied later if it cannot be now (R8).
- Values of credentials pass through to vaultd and are in no row, log or answer.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import wire
from lifecycle import credential_vault
from lifecycle.credential_vault import Change, Vault, VaultText
from lifecycle.errors import ApiError
from lifecycle.orchestrator import Orchestrator
from lifecycle.peers import Unreachable
from lifecycle.policies import Compiled, Refused
from lifecycle.registry import Sandbox, State
from policy.api import ApiPolicy, ApiPolicyError, NetworkRule, delete_targets, merge_patch, parse_network_policy
from policy.rules import Action

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class EgressError(Exception):
    """A refusal with the contract's status and text."""

    status: int
    text: str

    def __str__(self) -> str:
        return self.text


def user_policy(row: Sandbox) -> ApiPolicy:
    """The policy the caller may read and patch.

    Without one of his own he sees what his patches would be merged into: under a named operator policy "allow"
    (he narrows it), otherwise "deny".
    """
    if row.network_policy is not None:
        return parse_network_policy(row.network_policy)
    return ApiPolicy(default_action=Action.ALLOW if row.policy_name else Action.DENY)


def vault_of(row: Sandbox) -> Vault | None:
    """The credential vault of a row."""
    return None if row.vault is None else Vault.from_json(row.vault)


class Egress:
    """Writes policies and vaults."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator

    # -- network policy

    async def replace(self, sandbox: str, policy: ApiPolicy, *, force: bool = False) -> Sandbox:
        """Set the whole policy.

        Raises:
            EgressError: it was not set.
        """
        async with self._orchestrator.lock(sandbox):
            return await self._write_policy(await self._row(sandbox), policy, force=force)

    async def patch(self, sandbox: str, rules: Sequence[NetworkRule], *, force: bool = False) -> Sandbox:
        """Put rules in front."""
        async with self._orchestrator.lock(sandbox):
            row = await self._row(sandbox)
            try:
                merged = merge_patch(user_policy(row), rules)
            except ApiPolicyError as error:
                raise EgressError(error.status, str(error)) from None
            return await self._write_policy(row, merged, force=force)

    async def delete(self, sandbox: str, targets: Sequence[str], *, force: bool = False) -> tuple[Sandbox, bool]:
        """Remove the rules of targets; the second value tells whether there were any."""
        async with self._orchestrator.lock(sandbox):
            row = await self._row(sandbox)
            before = user_policy(row)
            after = delete_targets(before, targets)
            if after == before:
                return row, False
            return await self._write_policy(row, after, force=force), True

    async def _write_policy(self, row: Sandbox, policy: ApiPolicy, *, force: bool) -> Sandbox:
        changed = replace(row, network_policy=policy.to_wire())
        vault, change = vault_of(row), None
        if vault is not None:
            uncovered = await self._uncovered(changed, vault)
            if uncovered and not force:
                raise EgressError(400, f"credential vault policy validation: {next(iter(uncovered.values()))}")
            if uncovered:
                kept = tuple(binding for binding in vault.bindings if binding.name not in uncovered)
                vault = replace(vault, revision=vault.revision + 1, bindings=kept)
                changed, change = replace(changed, vault=vault.to_json()), Change(vault, {})
        try:
            return await self._apply(row, changed, "gateway.policy", change)
        except (Unreachable, wire.RemoteError) as error:
            raise EgressError(500, f"failed to apply nftables policy: {_brief(error)}") from None

    async def _uncovered(self, row: Sandbox, vault: Vault) -> dict[str, str]:
        """Return the bindings that the policy of `row` does not cover, and why."""
        refused = {}
        for binding in vault.bindings:
            try:
                await self._compile(replace(row, vault=replace(vault, bindings=(binding,)).to_json()), prefix="")
            except EgressError as error:
                refused[binding.name] = error.text
        return refused

    # -- credential vault

    async def create_vault(self, sandbox: str, body: object) -> Vault:
        """Make the vault.

        Raises:
            VaultText, EgressError: it was not made.
        """
        async with self._orchestrator.lock(sandbox):
            row = await self._row(sandbox)
            change = credential_vault.create(body)
            if row.vault is not None:
                raise VaultText(409, "credential vault already exists")
            return await self._write_vault(row, change)

    async def patch_vault(self, sandbox: str, body: object) -> Vault:
        """Change the vault, all or nothing."""
        async with self._orchestrator.lock(sandbox):
            row = await self._row(sandbox)
            vault = vault_of(row)
            if vault is None:
                raise VaultText(404, "credential vault not found")
            return await self._write_vault(row, credential_vault.mutate(vault, body))

    async def delete_vault(self, sandbox: str) -> None:
        """Remove the vault and cut what used its values."""
        async with self._orchestrator.lock(sandbox):
            row = await self._row(sandbox)
            if row.vault is None:
                raise VaultText(404, "credential vault not found")
            await self._revoke(row, replace(row, vault=None))

    async def _write_vault(self, row: Sandbox, change: Change) -> Vault:
        changed = replace(row, vault=change.vault.to_json())
        await self._compile(changed, prefix="")
        if change.only_deletes:
            await self._revoke(row, changed)
            return change.vault
        try:
            await self._apply(row, changed, "vault.bind", change)
        except (Unreachable, wire.RemoteError) as error:
            _log.warning("credential vault of %s not activated: %s", row.id, _brief(error))
            raise VaultText(412, "credential proxy is not ready") from None
        return change.vault

    # -- carrying a change out

    async def reapply(self, sandbox: str) -> None:
        """Apply what the registry says once more, for a gateway that could not be reached when it changed."""
        async with self._orchestrator.lock(sandbox):
            try:
                row = await self._row(sandbox)
                if row.policy_digest:
                    return
                compiled = await self._compile(row)
                await self._configure(row, compiled)
                # A change that was cut short may have left grants and values beside those of the registry.
                await self._orchestrator.vaultd.regrant(row.id, compiled.grants, {}, _names(row))
            except (EgressError, ApiError, Unreachable, wire.RemoteError) as error:
                _log.warning("policy of %s still not applied: %s", sandbox, _brief(error))
                return
            await self._orchestrator.registry.update(
                sandbox, lambda current: replace(current, policy_digest=compiled.digest)
            )

    async def reconcile(self, sandbox: str) -> None:
        """Apply what the registry says if the gateway has another policy: somebody died in the middle of a change."""
        async with self._orchestrator.lock(sandbox):
            try:
                row = await self._row(sandbox)
                there = await self._orchestrator.hostd.policy(sandbox)
            except (EgressError, ApiError, Unreachable, wire.RemoteError) as error:
                _log.warning("policy of %s cannot be compared: %s", sandbox, type(error).__name__)
                return
            if there in ("", row.policy_digest):
                return
            await self._orchestrator.registry.update(row.id, lambda current: replace(current, policy_digest=""))
        await self.reapply(sandbox)

    async def _apply(self, row: Sandbox, changed: Sandbox, kind: str, change: Change | None) -> Sandbox:
        compiled = await self._compile(changed)
        former = await self._compile(row)
        await self._record(kind, changed, compiled)
        vaultd = self._orchestrator.vaultd
        values = {} if change is None else change.values
        both = _union(former, compiled)
        if values or set(map(_key, both)) != set(map(_key, former.grants)):
            await vaultd.regrant(row.id, both, values or None, _names(row))
        try:
            await self._configure(changed, compiled)
            try:
                changed = await self._persist(changed, compiled)
            except Exception:
                await self._configure(row, former)
                raise
        except Exception:
            await self._settle(row, former, with_values=bool(values))
            raise
        stale = set(_names(row)) - set(_names(changed))
        if stale or set(map(_key, both)) != set(map(_key, compiled.grants)):
            try:
                await vaultd.regrant(row.id, compiled.grants, {} if stale else None, _names(changed))
            except (Unreachable, wire.RemoteError) as error:
                _log.warning("grants of %s are not yet narrowed: %s", row.id, _brief(error))
                await self._orchestrator.registry.update(row.id, lambda current: replace(current, policy_digest=""))
        return changed

    async def _revoke(self, row: Sandbox, changed: Sandbox) -> None:
        compiled = await self._compile(changed)
        try:
            await self._orchestrator.vaultd.regrant(row.id, compiled.grants, {}, _names(changed))
        except (Unreachable, wire.RemoteError) as error:
            raise EgressError(500, f"internal error: {_brief(error)}") from None
        await self._note("vault.revoke", changed, compiled)
        try:
            await self._configure(changed, compiled)
            await self._persist(changed, compiled)
        except (Unreachable, wire.RemoteError) as error:
            _log.warning("gateway of %s is to be told later: %s", row.id, _brief(error))
            await self._orchestrator.registry.update(
                row.id, lambda current: replace(current, vault=changed.vault, policy_digest="")
            )

    async def _settle(self, row: Sandbox, former: Compiled, *, with_values: bool) -> None:
        """Best effort: take back what was granted, and make sure that the gateway has the former policy."""
        try:
            await self._orchestrator.vaultd.regrant(row.id, former.grants, {} if with_values else None, _names(row))
            await self._configure(row, former)
        except (Unreachable, wire.RemoteError) as error:
            _log.warning("rollback of %s is left to the observer: %s", row.id, _brief(error))
            await self._orchestrator.registry.update(row.id, lambda current: replace(current, policy_digest=""))

    async def _compile(self, row: Sandbox, prefix: str = "invalid policy: ") -> Compiled:
        policy = None if row.network_policy is None else parse_network_policy(row.network_policy)
        try:
            return await self._orchestrator.policies.compile(row.policy_name, policy, vault_of(row))
        except Refused as error:
            raise EgressError(400, f"{prefix}{error}") from None

    async def _configure(self, row: Sandbox, compiled: Compiled) -> None:
        generation = await self._orchestrator.hostd.generation(row.id)
        await self._orchestrator.hostd.configure(
            row.id, self._orchestrator.gateway.configuration(row.id, generation, compiled)
        )

    async def _persist(self, changed: Sandbox, compiled: Compiled) -> Sandbox:
        def change(current: Sandbox) -> Sandbox:
            return replace(
                current,
                network_policy=changed.network_policy,
                vault=changed.vault,
                policy_digest=compiled.digest,
            )

        row = await self._orchestrator.registry.update(changed.id, change)
        if row is None:
            raise EgressError(404, "sandbox not found")
        return row

    async def _record(self, kind: str, row: Sandbox, compiled: Compiled) -> None:
        try:
            await self._orchestrator.record(kind, "info", sandbox=row.id, policy=compiled.digest)
        except ApiError as error:
            raise EgressError(500, f"internal error: {error.message}") from None

    async def _note(self, kind: str, row: Sandbox, compiled: Compiled) -> None:
        try:
            await self._orchestrator.record(kind, "info", sandbox=row.id, policy=compiled.digest)
        except ApiError as error:
            _log.warning("%s of %s is not in the audit log: %s", kind, row.id, error.message)

    async def _row(self, sandbox: str) -> Sandbox:
        row = await self._orchestrator.get(sandbox)
        if row.state in (State.STOPPING, State.FAILED, State.TERMINATED):
            raise EgressError(409, f"sandbox is {row.state}")
        return row


def _names(row: Sandbox) -> list[str]:
    vault = vault_of(row)
    return [] if vault is None else vault.secrets()


def _key(grant: Any) -> tuple[str, str, int, str]:
    return (str(grant["secret"]), str(grant["host"]), int(grant["port"]), str(grant["scheme"]))


def _union(one: Compiled, two: Compiled) -> list[Any]:
    return list({_key(grant): grant for grant in (*one.grants, *two.grants)}.values())


def _brief(error: Exception) -> str:
    return error.code if isinstance(error, wire.RemoteError) else str(error)
