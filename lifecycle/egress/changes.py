"""Changes of one sandbox's egress: its network policy and its credential vault.

Both are compiled together and written under the sandbox's lock, so that neither can pass the check of the other unseen.
The order of a change: check -> audit record -> the registry marks the sandbox as unsettled -> vaultd gets new values
and grants beside the old ones -> the gateway confirms the new policy -> the registry gets it -> vaultd drops unused
values -> the mark is removed -> answer.

- The registry contains the wanted state. If a change ends early, by an error, a crash or a kill, the mark stays. The
  observer then puts the registry's policy and grants in force everywhere: the former ones if the registry does not have
  the new ones yet, else the new ones. A part that cannot be put in force yet stays *closed* (a secret without a grant),
  never open.
- A change runs to its end, even if its caller does not wait for it.
- A revocation is never undone, and does not depend on the gateway. It is written to the registry and applied at vaultd.
  The gateway gets its new policy later if it cannot get it now.
- Values of credentials go through to vaultd. No row, log or answer contains them.
- A write is refused only for its own content, not for existing parts that the operator's document now refuses. A
  binding or a named policy that the document in force refuses is not in force (without the named policy: deny-all). It
  stays in the row, and is in force again when the operator reverts the change. The audit log names each such part.
- A tighter policy reaches the gateway whether or not vaultd, auditd or the registry answers.

This module is longer than the usual limit: all writes to one sandbox's egress share one lock, one order and one
recovery of interrupted changes, and are easier to read together.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import wire
from lifecycle.api.errors import ApiError
from lifecycle.daemon_clients import TOO_LARGE, Hostd, Unreachable, Vaultd, explained
from lifecycle.egress import credential_vault
from lifecycle.egress.credential_vault import Change, CredentialVault, VaultText
from lifecycle.egress.policies import Compiled, Policies
from lifecycle.egress.shortfall import Shortfall
from lifecycle.sandboxes.journal import Journal
from lifecycle.sandboxes.locks import Locks
from lifecycle.sandboxes.registry import Registry, RegistryError, Sandbox, State
from lifecycle.sandboxes.rows import Rows
from lifecycle.sandboxes.stored import places, secrets, stored
from policy.api import ApiPolicy, ApiPolicyError, NetworkRule, delete_targets, merge_patch, parse_network_policy
from policy.bindings import ApiBinding
from policy.compile import Dropped, Part
from policy.rules import Action
from policy.selection import Selection
from vault.grants import Grant

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
    """Return the policy that the caller can read and patch.

    A caller without its own policy gets the policy that its patches would be merged into: under a named operator policy
    "allow" (patches narrow it), otherwise "deny".

    Raises:
        EgressError: it cannot be read.
    """
    if row.network_policy is not None:
        try:
            return parse_network_policy(row.network_policy)
        except ApiPolicyError:
            raise EgressError(500, "the stored policy cannot be read and allows nothing; set it again") from None
    return ApiPolicy(default_action=Action.ALLOW if row.policy_name else Action.DENY)


def vault_of(row: Sandbox) -> CredentialVault | None:
    """Return the credential vault of a row.

    Raises:
        EgressError: it cannot be read.
    """
    try:
        return None if row.vault is None else CredentialVault.from_json(row.vault)
    except (ApiPolicyError, AttributeError, KeyError, TypeError, ValueError):
        raise EgressError(500, "the stored credential vault cannot be read; delete it and create it again") from None


class Egress:
    """The writer of policies and vaults."""

    def __init__(
        self,
        registry: Registry,
        rows: Rows,
        hostd: Hostd,
        vaultd: Vaultd,
        *,
        policies: Policies,
        journal: Journal,
        locks: Locks,
    ) -> None:
        self._registry = registry
        self._rows = rows
        self._hostd = hostd
        self._vaultd = vaultd
        self._policies = policies
        self._journal = journal
        self._locks = locks
        # This duplicates the mark in the registry, for the case that the mark cannot be written.
        self._unsettled: set[str] = set()
        # These sandboxes may have a policy that was compiled under an earlier document.
        self._doubted: set[str] = set()
        self.shortfall = Shortfall(journal)
        self._writes: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Wait until the current writes end. The next start completes a write that takes too long."""
        writes = set(self._writes)
        if writes:
            await asyncio.wait(writes, timeout=CLOSE_SECONDS)
        for write in writes:
            write.cancel()
        await asyncio.gather(*writes, return_exceptions=True)

    async def forget(self, sandbox: str) -> None:
        """Drop all data about a removed sandbox."""
        self._unsettled.discard(sandbox)
        self._doubted.discard(sandbox)
        self.shortfall.forget(sandbox)

    def unsettled(self, row: Sandbox) -> bool:
        """Return whether a part of the registry's state is possibly not in force everywhere."""
        return not row.policy_digest or row.id in self._unsettled or row.id in self._doubted

    def mark_outdated(self, sandbox: str) -> None:
        """Note that the operator's document changed, so that policies in force can differ from their rows."""
        self._doubted.add(sandbox)

    async def _whole[T](self, sandbox: str, write: Callable[[], Awaitable[T]]) -> T:
        """Run `write` under the sandbox's lock, to its end even when the caller is cancelled."""

        async def locked() -> T:
            async with self._locks.hold(sandbox):
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
        """Insert rules before the existing ones."""

        async def write() -> Sandbox:
            row = await self._row(sandbox)
            try:
                merged = merge_patch(user_policy(row), rules)
            except ApiPolicyError as error:
                raise EgressError(error.status, str(error)) from None
            return await self._write_policy(row, merged, force=force)

        return await self._whole(sandbox, write)

    async def delete(self, sandbox: str, targets: Sequence[str], *, force: bool = False) -> tuple[Sandbox, bool]:
        """Remove the rules of targets. The second value is whether there were any."""

        async def write() -> tuple[Sandbox, bool]:
            row = await self._row(sandbox)
            before = user_policy(row)
            after = delete_targets(before, targets)
            if after == before:
                return row, False
            return await self._write_policy(row, after, force=force), True

        return await self._whole(sandbox, write)

    async def _write_policy(self, row: Sandbox, policy: ApiPolicy, *, force: bool) -> Sandbox:
        changed, change = replace(row, network_policy=policy.to_wire()), None
        compiled = await self._enforced(changed)
        if not force:
            if refused := _newly_dropped(row, changed, await self._enforced(row), compiled):
                raise EgressError(400, f"credential vault policy validation: {refused[0].reason}")
        elif uncovered := {item.name for item in compiled.dropped if item.part is Part.BINDING}:
            vault = stored(row).vault
            if vault is not None:
                kept = tuple(binding for binding in vault.bindings if binding.name not in uncovered)
                vault = replace(vault, revision=vault.revision + 1, bindings=kept)
                changed, change = replace(changed, vault=vault.to_json()), Change(vault, {})
        try:
            return await self._apply(row, changed, "gateway.policy", change)
        except (Unreachable, wire.RemoteError) as error:
            if _too_large(error):
                raise EgressError(413, "egress policy is too large") from None
            raise EgressError(500, f"failed to apply nftables policy: {explained(error)}") from None

    # -- credential vault

    async def create_vault(self, sandbox: str, body: object) -> CredentialVault:
        """Create the vault.

        Raises:
            VaultText, EgressError: it was not created.
        """

        async def write() -> CredentialVault:
            row = await self._row(sandbox)
            change = await asyncio.to_thread(credential_vault.create, body)  # These checks can take a while.
            if row.vault is not None:
                raise VaultText(409, "credential vault already exists")
            return await self._write_vault(row, change)

        return await self._whole(sandbox, write)

    async def patch_vault(self, sandbox: str, body: object) -> CredentialVault:
        """Change the vault. All parts of the change are made, or none."""

        async def write() -> CredentialVault:
            row = await self._row(sandbox)
            vault = vault_of(row)
            if vault is None:
                raise VaultText(404, "credential vault not found")
            return await self._write_vault(row, await asyncio.to_thread(credential_vault.mutate, vault, body))

        return await self._whole(sandbox, write)

    async def delete_vault(self, sandbox: str) -> None:
        """Remove the vault and abort the flows that used its values."""

        async def write() -> None:
            row = await self._row(sandbox)
            if row.vault is not None:
                await self._revoke(row, replace(row, vault=None))
                return
            # An earlier removal may not have reached vaultd. Then the answer "not found" would be wrong.
            if self.unsettled(row):
                await self._cut(row, await self._enforced(row))
            raise VaultText(404, "credential vault not found")

        await self._whole(sandbox, write)

    async def _write_vault(self, row: Sandbox, change: Change) -> CredentialVault:
        changed = replace(row, vault=change.vault.to_json())
        if change.only_deletes:
            await self._revoke(row, changed)
            return change.vault
        compiled = await self._enforced(changed)
        if refused := _newly_dropped(row, changed, await self._enforced(row), compiled):
            raise VaultText(400, refused[0].reason)
        if max(len(compiled.grants), len(change.vault.places())) > credential_vault.MAX_GRANTS:
            raise VaultText(400, f"at most {credential_vault.MAX_GRANTS} pairs of a credential and a host")
        try:
            await self._apply(row, changed, "vault.bind", change)
        except (Unreachable, wire.RemoteError) as error:
            if _too_large(error):
                raise VaultText(413, "credential vault is too large") from None
            if isinstance(error, wire.RemoteError) and error.code == wire.Code.NOT_BOUND:
                raise VaultText(400, f"give the value again in the same request: {error.message}") from None
            _log.warning("credential vault of %s not activated: %s", row.id, _brief(error))
            raise VaultText(412, "credential proxy is not ready") from None
        return change.vault

    # -- carrying a change out

    async def reapply(self, sandbox: str) -> None:
        """Put the registry's state in force under the operator's document, if it may not be in force. It does not
        raise.
        """

        async def write() -> None:
            row = await self._row(sandbox)
            settled = bool(row.policy_digest) and row.id not in self._unsettled
            if settled and row.id not in self._doubted:
                return
            self._unsettled.add(row.id)
            self._doubted.discard(row.id)  # The document at this moment. A later document marks the sandbox again.
            if settled and (await self._enforced(row)).digest == row.policy_digest:
                self._unsettled.discard(row.id)
                return
            try:
                await self._mark(row)
            except RegistryError as error:
                _log.warning("%s is not marked in the registry: %s", row.id, type(error).__name__)
            await self._settle(row)

        await self._afterwards(sandbox, write)

    async def _afterwards(self, sandbox: str, write: Callable[[], Awaitable[None]]) -> None:
        try:
            await self._whole(sandbox, write)
        except Exception as error:  # noqa: BLE001 - closes: the mark stays, and other sandboxes get their policies
            if isinstance(error, ApiError) and error.status == 404:
                await self.forget(sandbox)
            _log.warning("policy of %s still not applied: %s", sandbox, _brief(error))

    async def reconcile(self, sandbox: str) -> None:
        """Put the registry's state in force if the gateway has another policy: a process ended during a change."""

        async def write() -> None:
            row = await self._row(sandbox)
            if await self._hostd.policy(sandbox) not in ("", row.policy_digest):
                await self._mark(row)
                await self._settle(row)

        await self._afterwards(sandbox, write)

    async def _apply(self, row: Sandbox, changed: Sandbox, kind: str, change: Change | None) -> Sandbox:
        compiled, former = await self._enforced(changed), await self._enforced(row)
        await self._record(kind, changed, compiled)
        values = {} if change is None else change.values
        both = _union(former, compiled)
        # The state of vaultd and the log is unknown for an unsettled row. So both get the whole of it.
        unsure = self.unsettled(row) or not self.shortfall.is_recorded(row.id, compiled.dropped)
        stale = unsure or bool(set(secrets(row) or ()) - set(secrets(changed) or ()))
        before, after = places(row), places(changed)
        stale = stale or not set(before or ()) <= set(after or ())
        names = sorted({*former.names, *compiled.names})
        narrowed = stale or set(both) != set(compiled.grants) or names != [*compiled.names]
        await self._mark(row)
        try:
            if values or names != [*former.names] or set(both) != set(former.grants):
                bounds = None if before is None or after is None else list({*before, *after})
                await self._vaultd.regrant(row.id, both, names, values or None, secrets(row) or (), bounds)
            settled = compiled.digest if await self._configure(changed, compiled, decided=False) else ""
            changed = await self._persist(changed, "" if narrowed else settled)
        except Exception:
            await self._roll_back(row)
            raise
        if narrowed:
            try:
                await self._grant(changed, compiled, all_values=not stale)
                await self.shortfall.record(changed, compiled)
                changed = await self._persist(changed, settled)
            except (ApiError, Unreachable, wire.RemoteError, RegistryError) as error:
                _log.warning("the change of %s is not yet complete: %s", row.id, _brief(error))
                return changed
        if settled:
            self._unsettled.discard(row.id)
        return changed

    async def _revoke(self, row: Sandbox, changed: Sandbox) -> None:
        self._unsettled.add(row.id)
        changed = await self._persist(changed, "")
        compiled = await self._enforced(changed)
        await self._cut(changed, compiled)
        await self._note("vault.revoke", changed, compiled)
        try:
            await self._settle(changed)
        except (ApiError, Unreachable, wire.RemoteError, RegistryError) as error:
            _log.warning("the revocation of %s is cut at vaultd and not yet complete: %s", row.id, _brief(error))

    async def _cut(self, row: Sandbox, compiled: Compiled) -> None:
        try:
            await self._narrow(row, compiled)
        except (Unreachable, wire.RemoteError) as error:
            raise EgressError(500, f"internal error: {explained(error)}") from None

    async def _mark(self, row: Sandbox) -> None:
        """Mark the start of a change in the registry, before its first step."""
        self._unsettled.add(row.id)
        await self._registry.update(row.id, lambda current: replace(current, policy_digest=""))

    async def _settle(self, row: Sandbox) -> None:
        """Put `row` in force. Gateway and vault do not wait for each other: each of them alone can only deny."""
        compiled = await self._enforced(row)
        try:
            agreed = await self._put_in_force(row, compiled)
        except wire.RemoteError as error:
            if not _too_large(error):
                raise
            too_large = Dropped(Part.POLICY, row.policy_name or "", "the policy is too large for a gateway")
            compiled = replace(await self._policies.always_allowed(), dropped=(too_large,))
            agreed = await self._put_in_force(row, compiled)
        await self.shortfall.record(row, compiled)
        if agreed:
            await self._persist(row, compiled.digest)
            self._unsettled.discard(row.id)

    async def _put_in_force(self, row: Sandbox, compiled: Compiled) -> bool:
        """Put a policy in force at gateway and vault. Return the result of `_configure`."""
        agreed, granted = await asyncio.gather(
            self._configure(row, compiled, decided=True), self._grant(row, compiled), return_exceptions=True
        )
        if isinstance(agreed, BaseException):
            raise agreed
        if isinstance(granted, BaseException):
            raise granted
        return agreed

    async def _grant(self, row: Sandbox, compiled: Compiled, *, all_values: bool = False) -> None:
        """Give vaultd the grants of a row, and let it drop all values but the row's (not with `all_values`).

        If vaultd refuses one of them, at least those that the row no longer has are removed.
        """
        names = secrets(row)
        inline: dict[str, str] | None = None if all_values or names is None else {}
        try:
            await self._vaultd.regrant(row.id, compiled.grants, compiled.names, inline, names or (), places(row))
        except wire.RemoteError:
            await self._narrow(row, compiled)
            raise

    async def _narrow(self, row: Sandbox, compiled: Compiled) -> None:
        """Let vaultd remove everything that a row no longer has. That is always possible."""
        known = compiled.grants if len(compiled.grants) <= 2 * credential_vault.MAX_GRANTS else ()
        await self._vaultd.narrow(row.id, known, secrets(row), places(row))

    async def _roll_back(self, row: Sandbox) -> None:
        """Try to put the former state back into the registry and in force. If that fails, the observer does it."""
        try:
            await self._persist(row, "")
            await self._settle(row)
        except Exception as error:  # noqa: BLE001 - closes: the mark stays, and the caller gets the first failure
            _log.warning("rollback of %s is left to the observer: %s", row.id, _brief(error))

    async def _enforced(self, row: Sandbox) -> Compiled:
        """Compile a row under the document in force, without the parts that cannot be read or are refused."""
        read = await asyncio.to_thread(stored, row)
        selection = Selection(row.policy_name, read.network_policy, read.bindings)
        compiled = await self._policies.enforce(selection)
        return replace(compiled, dropped=(*read.dropped, *compiled.dropped))

    async def _configure(self, row: Sandbox, compiled: Compiled, *, decided: bool) -> bool:
        """Let hostd put a row's policy in force. Return whether it is the policy that was compiled here.

        hostd reads the operator's file itself, at another moment, so its document can differ from ours. Then the
        sandbox stays unsettled until both documents are the same.
        """
        digest = (await self._hostd.configure(row.id, compiled.selection, decided=decided)).digest
        if digest != compiled.digest:
            _log.info("the gateway of %s is under another document than ours; it is settled again", row.id)
        return digest == compiled.digest

    async def _persist(self, changed: Sandbox, digest: str) -> Sandbox:
        """Write policy and vault of `changed`. An empty digest marks them as possibly not in force."""

        def change(current: Sandbox) -> Sandbox:
            return replace(current, network_policy=changed.network_policy, vault=changed.vault, policy_digest=digest)

        row = await self._registry.update(changed.id, change)
        if row is None:
            raise EgressError(404, "sandbox not found")
        return row

    async def _record(self, kind: str, row: Sandbox, compiled: Compiled) -> None:
        try:
            await self._journal.record(kind, "info", sandbox=row.id, policy=compiled.digest)
        except ApiError as error:
            raise EgressError(500, f"internal error: {error.message}") from None

    async def _note(self, kind: str, row: Sandbox, compiled: Compiled) -> None:
        try:
            await self._journal.record(kind, "info", sandbox=row.id, policy=compiled.digest)
        except ApiError as error:
            _log.warning("%s of %s is not in the audit log: %s", kind, row.id, error.message)

    async def _row(self, sandbox: str) -> Sandbox:
        row = await self._rows.get(sandbox)
        if row.state in (State.STOPPING, State.FAILED, State.TERMINATED):
            raise EgressError(409, f"sandbox is {row.state}")
        return row


def _newly_dropped(row: Sandbox, changed: Sandbox, before: Compiled, after: Compiled) -> list[Dropped]:
    """Return the parts that the change would put out of force, but not unchanged parts that already are."""
    old, new = _bindings(row), _bindings(changed)
    known = {
        (item.part, item.name)
        for item in before.dropped
        if item.part is not Part.BINDING or old.get(item.name) == new.get(item.name)
    }
    return [item for item in after.dropped if (item.part, item.name) not in known]


def _bindings(row: Sandbox) -> dict[str, ApiBinding]:
    vault = stored(row).vault
    return {} if vault is None else {binding.name: binding for binding in vault.bindings}


def _union(one: Compiled, two: Compiled) -> list[Grant]:
    return list(dict.fromkeys((*one.grants, *two.grants)))


def _too_large(error: Exception) -> bool:
    return isinstance(error, wire.RemoteError) and error.code == TOO_LARGE


def _brief(error: Exception) -> str:
    if isinstance(error, wire.RemoteError):
        return error.code
    return str(error) if isinstance(error, EgressError | ApiError | Unreachable) else type(error).__name__
