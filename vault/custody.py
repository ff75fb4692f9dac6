"""What vaultd knows: stored secrets, sandboxes with their grants and inline secrets, lineage roots. And its decision.

- Every change is on disk, sealed, before it counts, so a restarted vaultd continues where the former one ended. When
  a change to a sandbox cannot be written, that sandbox has no grants until one can.
- A release needs a grant of the sandbox *and*, for a stored secret, the consent of the secret's own binding; both are
  looked at anew each time. An inline secret belongs to its one sandbox and cannot take a stored secret's name.
- An inline secret is bound to destinations when its value is given (`bounds`). A later change can take destinations
  away; it adds one only together with the value itself.
- A generation only grows; a channel of an older one is refused, after a restart too.
- Closing removes the sandbox's record and, with the last sandbox of a lineage, the root's; success means it was looked
  for and is gone.

Every method is synchronous and never yields: between a check and what follows from it nothing else can happen. It does
no auditing; `broker` does, in the right order.
"""

import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from vault.authority import ANY, AuthorityError, Issued, Root
from vault.grants import MAX_GRANTS, Grant, GrantError, Refusal, RequestScope, check, inline_name, within
from vault.sealed_directory import SealedDirectory, SealedRecordError
from vault.secret import Secret, text_problem
from vault.store import (
    Clock,
    DamagedSecretError,
    Former,
    Store,
    StoreError,
    UnknownSecretError,
    still_former,
    with_former,
)
from wire import Code
from wire.ids import SANDBOX_ID

MAX_SANDBOXES = 8192
MAX_LEASE = timedelta(seconds=300)
MAX_FORMER_INLINE = 16
"""Replaced or removed inline secrets of a sandbox that are still looked for, at each host."""
_LINEAGE = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)

_log = logging.getLogger(__name__)


class CustodyError(Exception):
    """A change that is refused; `code` is what the client is told."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class SandboxState:
    """What one sandbox has; `generation` 0 means that no worker was ever attached."""

    sandbox: str
    lineage: str
    generation: int
    grants: frozenset[Grant]
    inline: Mapping[str, Secret] = field(repr=False)
    former: Mapping[str, tuple[Former, ...]] = field(repr=False, default_factory=dict)
    """Inline secrets it had, by the host (or pattern) they were granted for."""
    bounds: frozenset[Grant] = frozenset()
    """Where its inline secrets may be granted: the destinations that their values were given for, or fewer."""
    names: frozenset[str] = frozenset({ANY})
    """What its worker's authority may sign, as `authority.permitted` takes it."""


@dataclass(frozen=True, slots=True)
class Consent:
    """A release may happen: for how long, and limited to what."""

    lease: timedelta
    scope: RequestScope


class Custody:
    """All of vaultd's state. One process, one thread."""

    def __init__(
        self,
        store: Store,
        sandboxes: SealedDirectory,
        lineages: SealedDirectory,
        clock: Clock = lambda: datetime.now(UTC),
    ) -> None:
        """Read back what a former process left; roots that no sandbox uses are deleted."""
        self.store = store
        self._files = sandboxes
        self._lineages = lineages
        self._clock = clock
        self._sandboxes: dict[str, SandboxState] = {}
        damaged = 0
        for name in sandboxes.names():
            try:
                self._sandboxes[name] = _state(name, *sandboxes.read(name))
            except (SealedRecordError, GrantError):
                damaged += 1
                _log.error("the record of sandbox %s is damaged: nothing is released to it", name)
        if not damaged:  # a damaged record does not say which lineage it needs
            used = {state.lineage for state in self._sandboxes.values()}
            for lineage in lineages.names():
                if lineage not in used:
                    lineages.remove(lineage)

    def known(self, sandbox: str) -> bool:
        """Whether `sandbox` is open."""
        return sandbox in self._sandboxes

    def names(self) -> list[str]:
        """All open sandboxes."""
        return sorted(self._sandboxes)

    def plan(
        self,
        sandbox: str,
        lineage: str,
        grants: Iterable[Grant],
        inline: Mapping[str, Secret],
        bounds: Iterable[Grant] | None = None,
        names: Iterable[str] | None = None,
    ) -> SandboxState:
        """Check that a sandbox could be opened like this, and return its state; nothing changes.

        Args:
            bounds: the destinations of its inline secrets; None: those of `grants`.
            names: what its worker's authority may sign, as `authority.permitted` takes it; None: any.

        Raises:
            CustodyError: bad_request, exists, full, unknown_secret, not_bound, expired, name_taken.
        """
        if not SANDBOX_ID.fullmatch(sandbox) or not _LINEAGE.fullmatch(lineage):
            raise CustodyError(Code.INVALID, "not a sandbox's or lineage's name")
        if sandbox in self._sandboxes or self._files.exists(sandbox):
            raise CustodyError(Code.EXISTS, "the sandbox is open already")
        if len(self._sandboxes) >= MAX_SANDBOXES:
            raise CustodyError(Code.FULL, f"{MAX_SANDBOXES} sandboxes are open, the limit")
        granted = frozenset(grants)
        bound = _given(inline, granted if bounds is None else bounds)
        signed = frozenset({ANY}) if names is None else frozenset(names)
        state = SandboxState(sandbox, lineage, 0, granted, dict(inline), bounds=bound, names=signed)
        self._check(state)
        return state

    def open(self, planned: SandboxState) -> str:
        """Open a sandbox as planned; return its root certificate (PEM). Raises as `plan`."""
        state = self.plan(
            planned.sandbox, planned.lineage, planned.grants, planned.inline, planned.bounds, planned.names
        )
        root = self._root(state.lineage)
        if root is None:
            root = Root.create(self._clock())
            key = root.key_pem.reveal().encode("ascii")
            self._lineages.write(state.lineage, root.certificate_pem.encode("ascii"), key)
        self._write(state)
        return root.certificate_pem

    def replan(
        self,
        sandbox: str,
        grants: Iterable[Grant],
        inline: Mapping[str, Secret] | None,
        keep: Iterable[str] | None = None,
        bounds: Iterable[Grant] | None = None,
        names: Iterable[str] | None = None,
    ) -> SandboxState:
        """Check that a sandbox's grants could be replaced, and return its state then; nothing changes.

        Args:
            inline: its inline secrets then; None leaves them as they are, unless `keep` is given.
            keep: names of inline secrets it has now that stay beside `inline`; one in both has the value of `inline`.
            bounds: the destinations of its inline secrets. A secret in `inline` gets those named here, any other one
                keeps those of them that it had. None: those of `grants` for a secret in `inline`, else as before.
            names: what the next authority of its worker may sign; None: as before.

        Raises:
            CustodyError: unknown_sandbox, unknown_secret (a kept name it does not have), or as `plan`.
        """
        state = self._get(sandbox)
        granted, new = frozenset(grants), inline or {}
        secrets = state.inline if inline is None and keep is None else {**_kept(state, keep or ()), **new}
        old = _left(state, secrets.keys() - new.keys(), bounds)
        bound = _given(new, granted if bounds is None else bounds) | old
        signed = state.names if names is None else frozenset(names)
        planned = replace(state, grants=granted, inline=secrets, bounds=bound, names=signed)
        self._check(planned, state)
        return planned

    def narrowed(
        self,
        sandbox: str,
        grants: Iterable[Grant],
        keep: Iterable[str] | None,
        bounds: Iterable[Grant] | None = None,
    ) -> SandboxState:
        """Return what is left of a sandbox's grants and inline secrets without all that is not in `grants` and `keep`.

        Nothing changes, and `regrant` takes it at any time: it asks for nothing that the sandbox does not have.

        Args:
            keep: names of inline secrets; None keeps all.
            bounds: destinations of inline secrets; None keeps all.

        Raises:
            CustodyError: unknown_sandbox.
        """
        state = self._get(sandbox)
        names = state.inline.keys() if keep is None else state.inline.keys() & set(keep)
        inline = {name: state.inline[name] for name in names}
        gone = state.inline.keys() - names
        bound = _left(state, names, bounds)
        kept = frozenset(grant for grant in state.grants & frozenset(grants) if grant.secret not in gone)
        outside = {grant for grant in kept if grant.secret in inline} - within(kept, bound)
        return replace(state, grants=kept - outside, inline=inline, bounds=bound)

    def narrows(self, planned: SandboxState) -> bool:
        """Whether `planned` only takes away: such a change is never held up."""
        state = self._get(planned.sandbox)
        kept = all(name in state.inline and state.inline[name] == value for name, value in planned.inline.items())
        same = all((grant.secret in planned.inline) == (grant.secret in state.inline) for grant in planned.grants)
        bound = planned.bounds <= within(planned.bounds, state.bounds)
        signed = ANY in state.names or planned.names <= state.names
        return kept and same and bound and signed and planned.grants <= state.grants

    def regrant(self, planned: SandboxState) -> frozenset[str]:
        """Replace grants and inline secrets as planned; return the names whose leases end.

        Raises:
            CustodyError: as `replan`.
            OSError: it could not be written; the sandbox has no grants now.
        """
        state = self._get(planned.sandbox)
        self._check(planned, state)
        ended = {grant.secret for grant in state.grants - planned.grants}
        ended |= {name for name, value in state.inline.items() if planned.inline.get(name) != value}
        try:
            former = _former(state, planned.inline, self._clock())
            self._write(replace(planned, generation=state.generation, former=former))
        except OSError:
            self._sandboxes[state.sandbox] = replace(state, grants=frozenset())
            raise
        return frozenset(ended)

    def close(self, sandbox: str) -> None:
        """Forget a sandbox, known or not; its lineage's root too if it was the last.

        Raises:
            CustodyError: bad_request; residue: something is still there, call again.
        """
        if not SANDBOX_ID.fullmatch(sandbox):
            raise CustodyError(Code.INVALID, "not a sandbox's name")
        state = self._sandboxes.get(sandbox)
        if state is not None:
            self._sandboxes[sandbox] = replace(state, grants=frozenset(), inline={}, former={}, bounds=frozenset())
        self._files.remove(sandbox)
        if state is not None and not any(
            other.lineage == state.lineage for name, other in self._sandboxes.items() if name != sandbox
        ):
            self._lineages.remove(state.lineage)
            if self._lineages.exists(state.lineage):
                raise CustodyError(Code.RESIDUE, "the lineage's root is still there")
        if self._files.exists(sandbox):
            raise CustodyError(Code.RESIDUE, "the sandbox's record is still there")
        self._sandboxes.pop(sandbox, None)

    def advance(self, sandbox: str, generation: int) -> None:
        """Take note that a worker of `generation` speaks for `sandbox` now.

        Raises:
            CustodyError: unknown_sandbox, stale_generation.
        """
        state = self._get(sandbox)
        if generation < max(state.generation, 1):
            raise CustodyError(Code.STALE_GENERATION, "a newer worker has been attached")
        if generation > state.generation:
            self._write(replace(state, generation=generation))

    def decide(
        self, sandbox: str, wanted: Grant, method: str | None, path: str | None, *, scrub: bool = False
    ) -> Consent | Refusal:
        """Say whether a secret may go to a sandbox's worker for this destination (and request, where it matters).

        Args:
            scrub: it is to be looked for in responses of that destination, whichever request they answer.
        """
        state = self._sandboxes.get(sandbox)
        if state is None:
            return Refusal(Code.UNKNOWN_SANDBOX, "the sandbox is not open")
        if not any(grant.covers(wanted) for grant in state.grants):
            return Refusal(Code.NOT_GRANTED, "the sandbox was not granted this secret for this destination")
        if wanted.secret in state.inline:
            return Consent(MAX_LEASE, RequestScope())
        try:
            binding = self.store.info(wanted.secret).binding
        except StoreError as error:
            return Refusal(error.code, str(error))
        now = self._clock()
        refusal = check(binding, wanted, now)
        if refusal is None and not scrub:
            refusal = binding.scope.check(method, path)
        if refusal is not None:
            return refusal
        lease = MAX_LEASE if binding.expires is None else min(MAX_LEASE, binding.expires - now)
        return Consent(lease, binding.scope)

    def value(self, sandbox: str, secret: str) -> Secret:
        """The value of a secret that `decide` consented to just before. Raises StoreError."""
        inline = self._get(sandbox).inline.get(secret)
        return self.store.value(secret) if inline is None else inline

    def former(self, sandbox: str, wanted: Grant) -> tuple[Secret, ...]:
        """The values before it that its host may still send back. Raises StoreError."""
        state = self._get(sandbox)
        now = self._clock()
        found = [
            value
            for host, former in state.former.items()
            if Grant(wanted.secret, host, wanted.port, wanted.scheme).covers(wanted)
            for value in still_former(former, now)
        ]
        if wanted.secret not in state.inline:
            found += self.store.former(wanted.secret)
        return tuple(found)

    def issue(self, sandbox: str) -> Issued:
        """Issue an intermediate below the root of the sandbox's lineage, for the names of the sandbox.

        Raises:
            CustodyError: unknown_sandbox, or damaged: the root cannot be read.
        """
        state = self._get(sandbox)
        root = self._root(state.lineage)
        if root is None:
            raise CustodyError(Code.DAMAGED, "the lineage's root is missing")
        try:
            return root.issue_intermediate(self._clock(), state.names)
        except AuthorityError as error:
            raise CustodyError(Code.EXPIRED, str(error)) from None

    def users(self, secret: str) -> list[str]:
        """The sandboxes for which `secret` means the stored one."""
        return [
            state.sandbox
            for state in self._sandboxes.values()
            if secret not in state.inline and any(grant.secret == secret for grant in state.grants)
        ]

    def _get(self, sandbox: str) -> SandboxState:
        try:
            return self._sandboxes[sandbox]
        except KeyError:
            raise CustodyError(Code.UNKNOWN_SANDBOX, "the sandbox is not open") from None

    def _check(self, state: SandboxState, former: SandboxState | None = None) -> None:
        """Check `state`; grants that `former` had are not asked for again, so that taking others away always works."""
        if max(len(state.grants), len(state.inline), len(state.bounds)) > MAX_GRANTS:
            raise CustodyError(Code.FULL, f"a sandbox has at most {MAX_GRANTS} grants, inline secrets and their places")
        for name, value in state.inline.items():
            if problem := text_problem(inline_name(name) and value.reveal()):
                raise CustodyError(Code.INVALID, problem)
            if self._stored(name):
                raise CustodyError(Code.EXISTS, "an inline secret may not have a stored secret's name")
        bound = within(state.grants, state.bounds)
        for grant in state.grants:
            if grant.secret in state.inline:
                if grant not in bound:
                    raise CustodyError(Code.NOT_BOUND, f"{grant.secret}: its value was not given for {grant.host}")
                continue
            if former is not None and grant in former.grants and grant.secret not in former.inline:
                continue
            try:
                binding = self.store.info(grant.secret).binding
            except StoreError as error:
                raise CustodyError(error.code, f"{grant.secret}: {error}") from None
            if refusal := check(binding, grant, self._clock()):
                raise CustodyError(refusal.code, f"{grant.secret}: {refusal.reason}")

    def _stored(self, name: str) -> bool:
        try:
            self.store.info(name)
        except UnknownSecretError:
            return False
        except DamagedSecretError:
            return True
        return True

    def _root(self, lineage: str) -> Root | None:
        try:
            certificate, key = self._lineages.read(lineage)
        except FileNotFoundError:
            return None
        except SealedRecordError:
            raise CustodyError(Code.DAMAGED, "the lineage's root cannot be read") from None
        try:
            return Root.load(certificate.decode("ascii"), Secret(key.decode("ascii")))
        except AuthorityError as error:
            raise CustodyError(Code.DAMAGED, str(error)) from None

    def _write(self, state: SandboxState) -> None:
        metadata = {"sandbox": state.sandbox, "lineage": state.lineage, "generation": state.generation}
        body = {
            "grants": [grant.to_json() for grant in state.grants],
            "inline": {name: value.reveal() for name, value in state.inline.items()},
            "former": {host: [one.to_json() for one in former] for host, former in state.former.items()},
            "bounds": [bound.to_json() for bound in state.bounds],
            "names": sorted(state.names),
        }
        self._files.write(state.sandbox, json.dumps(metadata).encode(), json.dumps(body).encode())
        self._sandboxes[state.sandbox] = state


def _former(state: SandboxState, inline: Mapping[str, Secret], now: datetime) -> Mapping[str, tuple[Former, ...]]:
    """What is kept of a sandbox's inline secrets once it has `inline`."""
    former = {host: tuple(one for one in values if one.until > now) for host, values in state.former.items()}
    for name, value in state.inline.items():
        if inline.get(name) == value:
            continue
        for host in {grant.host for grant in state.grants if grant.secret == name}:
            former[host] = with_former(former.get(host, ()), value, now, MAX_FORMER_INLINE)
    return {host: values for host, values in former.items() if values}


def _given(inline: Mapping[str, Secret], bounds: Iterable[Grant]) -> frozenset[Grant]:
    """The destinations of inline secrets whose values are given with them."""
    return frozenset(bound for bound in bounds if bound.secret in inline)


def _left(state: SandboxState, names: Collection[str], bounds: Iterable[Grant] | None) -> frozenset[Grant]:
    """What a sandbox has left of the destinations of some of its inline secrets."""
    old = frozenset(bound for bound in state.bounds if bound.secret in names)
    return old if bounds is None else within(bounds, old)


def _kept(state: SandboxState, keep: Iterable[str]) -> dict[str, Secret]:
    try:
        return {name: state.inline[name] for name in keep}
    except KeyError:
        raise CustodyError(Code.UNKNOWN_SECRET, "a name to be kept is of no inline secret") from None


def _state(name: str, metadata: bytes, body: bytes) -> SandboxState:
    about: dict[str, Any] = json.loads(metadata)
    content: dict[str, Any] = json.loads(body)
    if about["sandbox"] != name:
        raise SealedRecordError("a sandbox's record under another's name")
    grants = frozenset(Grant.from_json(item) for item in content["grants"])
    inline = {str(key): Secret(value) for key, value in content["inline"].items()}
    bounds = content.get("bounds")  # a record from before there were any: its grants are what is known
    return SandboxState(
        name,
        str(about["lineage"]),
        int(about["generation"]),
        grants,
        inline,
        {host: tuple(map(Former.from_json, values)) for host, values in content.get("former", {}).items()},
        _given(inline, grants if bounds is None else map(Grant.from_json, bounds)),
        frozenset(content.get("names", [ANY])),
    )
