"""Changes of one sandbox's egress: its network policy and its credential vault.

Both are compiled together and written under the sandbox's one lock, so that neither can slip past the check of the
other. The order of a change: check -> audit -> the registry marks the sandbox as unsettled -> vaultd has new values and
grants beside the old ones -> the gateway confirms the new policy -> the registry has it -> vaultd drops what is no
longer used -> the mark is taken off -> answer.

- What the registry says is what shall be in force. Wherever a change ends, by an error, a crash or a kill, the mark
  stays, and the observer puts the registry's policy and grants in force everywhere: the former ones before the
  registry has the new ones, the new ones after. What cannot be put in force yet stays *closed* (a secret without a
  grant), never open.
- A change runs to its end, whether or not its caller waits for it.
- A revocation is only ever carried forward, and does not depend on the gateway: it is written down, cut at vaultd, and
  the gateway's new policy is applied later if it cannot be now (R8).
- Values of credentials pass through to vaultd and are in no row, log or answer.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import wire
from lifecycle import credential_vault
from lifecycle.credential_vault import Change, Vault, VaultText
from lifecycle.errors import ApiError
from lifecycle.orchestrator import Orchestrator
from lifecycle.peers import TOO_LARGE, Unreachable, explained
from lifecycle.policies import Compiled, Refused
from lifecycle.registry import RegistryError, Sandbox, State
from policy.api import ApiPolicy, ApiPolicyError, NetworkRule, delete_targets, merge_patch, parse_network_policy
from policy.rules import Action

CLOSE_SECONDS = 8.0

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
        self._unsettled: set[str] = set()  # beside the mark in the registry, for when that cannot be written
        self._writes: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Let the writes under way come to their end; one that takes too long is left to the next start."""
        writes = set(self._writes)
        if writes:
            await asyncio.wait(writes, timeout=CLOSE_SECONDS)
        for write in writes:
            write.cancel()
        await asyncio.gather(*writes, return_exceptions=True)

    async def forget(self, sandbox: str) -> None:
        """Drop what is kept for a sandbox that is gone."""
        self._unsettled.discard(sandbox)

    def unsettled(self, row: Sandbox) -> bool:
        """Whether what the registry says may not be in force everywhere."""
        return not row.policy_digest or row.id in self._unsettled

    async def _whole[T](self, sandbox: str, write: Callable[[], Awaitable[T]]) -> T:
        """Run `write` under the sandbox's lock, to its end even when the caller is cancelled."""

        async def locked() -> T:
            async with self._orchestrator.lock(sandbox):
                return await write()

        task = asyncio.get_running_loop().create_task(locked(), name=f"egress:{sandbox}")
        self._writes.add(task)
        task.add_done_callback(self._written)
        return await asyncio.shield(task)

    def _written(self, task: asyncio.Task[Any]) -> None:
        self._writes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.info("%s ended with %s", task.get_name(), type(error).__name__)

    # -- network policy

    async def replace(self, sandbox: str, policy: ApiPolicy, *, force: bool = False) -> Sandbox:
        """Set the whole policy.

        Raises:
            EgressError: it was not set.
        """

        async def write() -> Sandbox:
            return await self._write_policy(await self._row(sandbox), policy, force=force)

        return await self._whole(sandbox, write)

    async def patch(self, sandbox: str, rules: Sequence[NetworkRule], *, force: bool = False) -> Sandbox:
        """Put rules in front."""

        async def write() -> Sandbox:
            row = await self._row(sandbox)
            try:
                merged = merge_patch(user_policy(row), rules)
            except ApiPolicyError as error:
                raise EgressError(error.status, str(error)) from None
            return await self._write_policy(row, merged, force=force)

        return await self._whole(sandbox, write)

    async def delete(self, sandbox: str, targets: Sequence[str], *, force: bool = False) -> tuple[Sandbox, bool]:
        """Remove the rules of targets; the second value tells whether there were any."""

        async def write() -> tuple[Sandbox, bool]:
            row = await self._row(sandbox)
            before = user_policy(row)
            after = delete_targets(before, targets)
            if after == before:
                return row, False
            return await self._write_policy(row, after, force=force), True

        return await self._whole(sandbox, write)

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
            if _too_large(error):
                raise EgressError(413, "egress policy is too large") from None
            raise EgressError(500, f"failed to apply nftables policy: {explained(error)}") from None

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

        async def write() -> Vault:
            row = await self._row(sandbox)
            change = await asyncio.to_thread(credential_vault.create, body)  # its checks may take a while
            if row.vault is not None:
                raise VaultText(409, "credential vault already exists")
            return await self._write_vault(row, change)

        return await self._whole(sandbox, write)

    async def patch_vault(self, sandbox: str, body: object) -> Vault:
        """Change the vault, all or nothing."""

        async def write() -> Vault:
            row = await self._row(sandbox)
            vault = vault_of(row)
            if vault is None:
                raise VaultText(404, "credential vault not found")
            return await self._write_vault(row, await asyncio.to_thread(credential_vault.mutate, vault, body))

        return await self._whole(sandbox, write)

    async def delete_vault(self, sandbox: str) -> None:
        """Remove the vault and cut what used its values."""

        async def write() -> None:
            row = await self._row(sandbox)
            if row.vault is not None:
                await self._revoke(row, replace(row, vault=None))
                return
            if self.unsettled(row):  # an earlier removal may not have reached vaultd: "not found" would be a lie
                await self._cut(row, await self._compile(row))
            raise VaultText(404, "credential vault not found")

        await self._whole(sandbox, write)

    async def _write_vault(self, row: Sandbox, change: Change) -> Vault:
        changed = replace(row, vault=change.vault.to_json())
        compiled = await self._compile(changed, prefix="")
        if len(compiled.grants) > credential_vault.MAX_GRANTS:
            raise VaultText(400, f"at most {credential_vault.MAX_GRANTS} pairs of a credential and a host")
        if change.only_deletes:
            await self._revoke(row, changed)
            return change.vault
        try:
            await self._apply(row, changed, "vault.bind", change)
        except (Unreachable, wire.RemoteError) as error:
            if _too_large(error):
                raise VaultText(413, "credential vault is too large") from None
            _log.warning("credential vault of %s not activated: %s", row.id, _brief(error))
            raise VaultText(412, "credential proxy is not ready") from None
        return change.vault

    # -- carrying a change out

    async def reapply(self, sandbox: str, *, anew: bool = False) -> None:
        """Put in force what the registry says, if it may not be; `anew`: also if the document changed."""

        async def write() -> None:
            row = await self._row(sandbox)
            if not self.unsettled(row) and not (anew and (await self._compile(row)).digest != row.policy_digest):
                return
            await self._mark(row)
            await self._settle(row)

        await self._afterwards(sandbox, write)

    async def _afterwards(self, sandbox: str, write: Callable[[], Awaitable[None]]) -> None:
        try:
            await self._whole(sandbox, write)
        except (EgressError, ApiError, Unreachable, wire.RemoteError, RegistryError) as error:
            _log.warning("policy of %s still not applied: %s", sandbox, _brief(error))

    async def reconcile(self, sandbox: str) -> None:
        """Put in force what the registry says if the gateway has another policy: somebody died in the middle."""

        async def write() -> None:
            row = await self._row(sandbox)
            if await self._orchestrator.hostd.policy(sandbox) not in ("", row.policy_digest):
                await self._mark(row)
                await self._settle(row)

        await self._afterwards(sandbox, write)

    async def _apply(self, row: Sandbox, changed: Sandbox, kind: str, change: Change | None) -> Sandbox:
        compiled = await self._compile(changed)
        if self.unsettled(row):
            row = await self._settle(row)
        former = await self._compile(row)
        await self._record(kind, changed, compiled)
        vaultd = self._orchestrator.vaultd
        values = {} if change is None else change.values
        both = _union(former, compiled)
        stale = set(_names(row)) - set(_names(changed))
        narrowed = bool(stale) or set(map(_key, both)) != set(map(_key, compiled.grants))
        await self._mark(row)
        try:
            if values or set(map(_key, both)) != set(map(_key, former.grants)):
                await vaultd.regrant(row.id, both, values or None, _names(row))
            await self._configure(changed, compiled)
            changed = await self._persist(changed, "" if narrowed else compiled.digest)
        except Exception:
            await self._roll_back(row)
            raise
        if narrowed:
            try:
                await vaultd.regrant(row.id, compiled.grants, {} if stale else None, _names(changed))
                changed = await self._persist(changed, compiled.digest)
            except (Unreachable, wire.RemoteError, RegistryError) as error:
                _log.warning("grants of %s are not yet narrowed: %s", row.id, _brief(error))
                return changed
        self._unsettled.discard(row.id)
        return changed

    async def _revoke(self, row: Sandbox, changed: Sandbox) -> None:
        compiled = await self._compile(changed)
        self._unsettled.add(row.id)
        await self._persist(changed, "")
        await self._cut(changed, compiled)
        await self._note("vault.revoke", changed, compiled)
        try:
            await self._configure(changed, compiled)
            await self._persist(changed, compiled.digest)
        except (Unreachable, wire.RemoteError, RegistryError) as error:
            _log.warning("gateway of %s is to be told later: %s", row.id, _brief(error))
            return
        self._unsettled.discard(row.id)

    async def _cut(self, row: Sandbox, compiled: Compiled) -> None:
        try:
            await self._orchestrator.vaultd.regrant(row.id, compiled.grants, {}, _names(row))
        except (Unreachable, wire.RemoteError) as error:
            raise EgressError(500, f"internal error: {explained(error)}") from None

    async def _mark(self, row: Sandbox) -> None:
        """Write down that a change is under way, before its first step."""
        self._unsettled.add(row.id)
        await self._orchestrator.registry.update(row.id, lambda current: replace(current, policy_digest=""))

    async def _settle(self, row: Sandbox) -> Sandbox:
        """Put in force what `row` says. The gateway gets its policy even when vaultd cannot be told: that may close."""
        compiled = await self._compile(row)
        failure: Exception | None = None
        try:
            await self._orchestrator.vaultd.regrant(row.id, compiled.grants, {}, _names(row))
        except (Unreachable, wire.RemoteError) as error:
            failure = error
        await self._configure(row, compiled)
        if failure is not None:
            raise failure
        settled = await self._persist(row, compiled.digest)
        self._unsettled.discard(row.id)
        return settled

    async def _roll_back(self, row: Sandbox) -> None:
        """Best effort: what was in the registry before is there again and in force; else the observer sees to it."""
        try:
            await self._persist(row, "")
            await self._settle(row)
        except Exception as error:  # noqa: BLE001 - closes: the mark stays, and the caller is told of the first failure
            _log.warning("rollback of %s is left to the observer: %s", row.id, _brief(error))

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

    async def _persist(self, changed: Sandbox, digest: str) -> Sandbox:
        """Write policy and vault of `changed`; an empty digest is the mark that they may not be in force."""

        def change(current: Sandbox) -> Sandbox:
            return replace(current, network_policy=changed.network_policy, vault=changed.vault, policy_digest=digest)

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


def _too_large(error: Exception) -> bool:
    return isinstance(error, wire.RemoteError) and error.code == TOO_LARGE


def _brief(error: Exception) -> str:
    if isinstance(error, wire.RemoteError):
        return error.code
    return str(error) if isinstance(error, EgressError | ApiError | Unreachable) else type(error).__name__
