"""The state of vaultd (stored secrets, sandboxes with grants and inline secrets, lineage roots), and its decision.

- A change takes effect after it is sealed on disk. So a restarted vaultd has the state of the former one. If a change
  to a sandbox cannot be written, the sandbox has no grants until a later change is written.
- A release needs a grant of the sandbox. For a stored secret it also needs the consent of the secret's own binding: its
  destinations, its selectors and its limits. No freeze may cover it. All of it is checked at each release.
- A grant of a stored secret that does not exist, has expired, or is for other sandboxes can be given. It has no effect
  while that is so, and the other grants are not affected.
- A reference to a backend's secret has no binding of its own. The operator's policy file is the statement where it may
  go, and hostd passes that on (`refer`). It is checked at each release. It is not on disk: until hostd has passed it
  on, no reference is released. The operator's limits (`vault.limits`) are checked like bindings.
- An inline secret belongs to one sandbox. It cannot have the name of a stored secret.
- An inline secret is bound to destinations when its value is given (`bounds`). A later change can remove destinations.
  It can add one only together with the value.
- A generation only grows. A channel of an older generation is refused, also after a restart.
- Closing removes the sandbox's record, and with the last sandbox of a lineage the root's record. It succeeds only if
  both are verified to be absent.

Every method is synchronous, so no other code runs between a check and its effect. The module writes no audit records;
`channels` and `operations` do.
"""

import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from policy.references import is_reference
from vault.authority import ANY, AuthorityError, Issued, Root
from vault.budgets import Budgets
from vault.conditions import UNLIMITED, Amount, UseLimits
from vault.freeze import Freezes
from vault.grants import (
    MAX_GRANTS,
    Grant,
    GrantError,
    Refusal,
    RequestScope,
    SecretBinding,
    check,
    inline_name,
    missing,
    secret_name,
    within,
)
from vault.limit_record import ReferenceLimits
from vault.secret import Secret, text_problem
from vault.stores.directory import SealedDirectory, SealedRecordError
from vault.stores.port import (
    FORMER_FOR,
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
"""The limit of former values of inline secrets that are still searched for, per host."""
_LINEAGE = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)

_log = logging.getLogger(__name__)


class CustodyError(Exception):
    """A change is refused. The client receives `code`."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class SandboxState:
    """The state of one sandbox. `generation` 0 means that no worker was ever attached."""

    sandbox: str
    lineage: str
    generation: int
    grants: frozenset[Grant]
    inline: Mapping[str, Secret] = field(repr=False)
    former: Mapping[str, tuple[Former, ...]] = field(repr=False, default_factory=dict)
    """Former values of inline secrets, by the host (or pattern) of their grants."""
    bounds: frozenset[Grant] = frozenset()
    """The destinations at which inline secrets may be granted: those given with their values, or fewer."""
    names: frozenset[str] = frozenset({ANY})
    """The names that its worker may sign, in the form of `authority.permitted`."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """That of its create call, as `serve` reported it."""
    images: frozenset[str] = frozenset()
    """Name and id of the image that it was started from, as hostd reported them."""


@dataclass(frozen=True, slots=True)
class Consent:
    """Consent to a release: its duration and scope."""

    lease: timedelta
    scope: RequestScope


class Custody:
    """The whole state of vaultd, for one process and one thread."""

    def __init__(
        self,
        store: Store,
        sandboxes: SealedDirectory,
        lineages: SealedDirectory,
        clock: Clock = lambda: datetime.now(UTC),
        freezes: Freezes | None = None,
        budgets: Budgets | None = None,
        limits: ReferenceLimits | None = None,
    ) -> None:
        """Read the state of the former process, and delete roots that no sandbox uses."""
        self.store = store
        self.freezes = freezes or Freezes()
        self.budgets = budgets or Budgets()
        self.limits = limits or ReferenceLimits()
        self._files = sandboxes
        self._lineages = lineages
        self._clock = clock
        self._sandboxes: dict[str, SandboxState] = {}
        self._referred: frozenset[Grant] | None = None
        damaged = 0
        for name in sandboxes.names():
            try:
                self._sandboxes[name] = _state(name, *sandboxes.read(name))
            except (SealedRecordError, GrantError):
                damaged += 1
                _log.error("the record of sandbox %s is damaged, so it gets no secret: delete the sandbox", name)
        if not damaged:  # the lineage of a damaged record is unknown
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
        metadata: Mapping[str, str] | None = None,
    ) -> SandboxState:
        """Check whether a sandbox can be opened with these values, and return its state. Nothing is changed.

        Args:
            bounds: the destinations of its inline secrets; None: those of `grants`.
            names: the names that its worker may sign, in the form of `authority.permitted`; None: any.
            metadata: that of its create call.

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
        state = SandboxState(
            sandbox, lineage, 0, granted, dict(inline), bounds=bound, names=signed, metadata=dict(metadata or {})
        )
        self._check(state)
        return state

    def open(self, planned: SandboxState) -> str:
        """Open a sandbox; return its root certificate (PEM). Raises like `plan`."""
        state = self.plan(
            planned.sandbox,
            planned.lineage,
            planned.grants,
            planned.inline,
            planned.bounds,
            planned.names,
            planned.metadata,
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
        metadata: Mapping[str, str] | None = None,
    ) -> SandboxState:
        """Check whether a sandbox's grants can be replaced, and return the new state. Nothing is changed.

        Args:
            inline: the new inline secrets; None leaves them unchanged, unless `keep` is given.
            keep: names of present inline secrets that stay beside `inline`. A name in both has the value of `inline`.
            bounds: the destinations of the inline secrets. A secret in `inline` gets these; another one keeps those of
                its destinations that are among them. None: a secret in `inline` gets those of `grants`, others keep
                theirs.
            names: the names that the worker's next certificate may sign; None: as before.
            metadata: that of the create call; None: as before.

        Raises:
            CustodyError: unknown_sandbox, unknown_secret (a name in `keep` does not exist), or as `plan`.
        """
        state = self._get(sandbox)
        granted, new = frozenset(grants), inline or {}
        secrets = state.inline if inline is None and keep is None else {**_kept(state, keep or ()), **new}
        old = _left(state, secrets.keys() - new.keys(), bounds)
        bound = _given(new, granted if bounds is None else bounds) | old
        signed = state.names if names is None else frozenset(names)
        known = state.metadata if metadata is None else dict(metadata)
        planned = replace(state, grants=granted, inline=secrets, bounds=bound, names=signed, metadata=known)
        self._check(planned, state)
        return planned

    def narrowed(
        self,
        sandbox: str,
        grants: Iterable[Grant],
        keep: Iterable[str] | None,
        bounds: Iterable[Grant] | None = None,
    ) -> SandboxState:
        """Return a sandbox's state with only those grants and inline secrets that are in `grants` and `keep`.

        Nothing is changed. `regrant` accepts the result at any time, because it adds nothing.

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
        """Whether `planned` only removes: such a change is never delayed."""
        state = self._get(planned.sandbox)
        kept = all(name in state.inline and state.inline[name] == value for name, value in planned.inline.items())
        same = all((grant.secret in planned.inline) == (grant.secret in state.inline) for grant in planned.grants)
        bound = planned.bounds <= within(planned.bounds, state.bounds)
        signed = ANY in state.names or planned.names <= state.names
        unchanged = planned.metadata == state.metadata
        return kept and same and bound and signed and unchanged and planned.grants <= state.grants

    def regrant(self, planned: SandboxState) -> frozenset[str]:
        """Replace grants and inline secrets as planned; return the names whose leases end.

        Raises:
            CustodyError: as `replan`.
            OSError: the change could not be written; the sandbox has no grants now.
        """
        state = self._get(planned.sandbox)
        self._check(planned, state)
        ended = {grant.secret for grant in state.grants - planned.grants}
        ended |= {name for name, value in state.inline.items() if planned.inline.get(name) != value}
        try:
            former = _former(state, planned.inline, self._clock())
            self._write(replace(planned, generation=state.generation, former=former, images=state.images))
        except OSError:
            self._sandboxes[state.sandbox] = replace(state, grants=frozenset())
            raise
        return frozenset(ended)

    def close(self, sandbox: str) -> None:
        """Remove a sandbox, known or not, and the root of its lineage if it was the last one.

        Raises:
            CustodyError: bad_request, or residue: a file still exists; call again.
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
        self.budgets.forget(sandbox)
        self.freezes.forget(sandbox)
        self._sandboxes.pop(sandbox, None)

    def advance(self, sandbox: str, generation: int, images: Iterable[str] | None = None) -> None:
        """Set the generation of the sandbox's worker, and the names of the sandbox's image (None: as before).

        Raises:
            CustodyError: unknown_sandbox, stale_generation.
        """
        state = self._get(sandbox)
        if generation < max(state.generation, 1):
            raise CustodyError(Code.STALE_GENERATION, "a newer worker has been attached")
        known = state.images if images is None else frozenset(images)
        if (generation, known) != (state.generation, state.images):
            self._write(replace(state, generation=generation, images=known))

    def decide(
        self,
        sandbox: str,
        wanted: Grant,
        method: str | None,
        path: str | None,
        *,
        size: int | None = None,
        scrub: bool = False,
    ) -> Consent | Refusal:
        """Decide whether a secret may go to a sandbox's worker for this destination (and request, if that matters).

        Args:
            size: the bytes of the request; None: unknown.
            scrub: the value is only for the search in responses of that destination, for any request. A host can send
                back a secret that has expired. It is looked for as long as one that was replaced.
        """
        state = self._sandboxes.get(sandbox)
        if state is None:
            return Refusal(Code.UNKNOWN_SANDBOX, "the sandbox is not open")
        if not any(grant.covers(wanted) for grant in state.grants):
            return Refusal(Code.NOT_GRANTED, "the sandbox was not granted this secret for this destination")
        if (frozen := self.freezes.refusal(sandbox, wanted.secret)) is not None:
            return frozen
        if wanted.secret in state.inline:
            return Consent(MAX_LEASE, RequestScope())
        found = self._bindings(wanted, state.grants)
        if isinstance(found, Refusal):
            return found
        now, lease = self._clock(), MAX_LEASE
        for binding in found:
            refusal = check(binding, wanted, now - FORMER_FOR if scrub else now)
            if refusal is None and (reason := binding.selectors.refusal(state.metadata, state.images)) is not None:
                refusal = Refusal(Code.NOT_GRANTED, reason)
            if refusal is None and not scrub:
                refusal = binding.scope.check(method, path)
            if refusal is not None:
                return Refusal(refusal.code, f"{wanted.secret}: {refusal.reason}")
            if not scrub and binding.expires is not None:
                lease = min(lease, binding.expires - now)
        if not scrub and (spent := self.budgets.refusal(wanted.secret, sandbox, _limits(found), size)) is not None:
            return Refusal(Code.EXHAUSTED, f"{wanted.secret}: {spent}")
        scope = RequestScope() if is_reference(wanted.secret) else found[0].scope  # a limit has no scope
        return Consent(lease, scope)

    def take(self, sandbox: str, wanted: Grant, size: int | None) -> Amount:
        """Count a lease for a request of `size` bytes directly after the consent of `decide`; return what it permits.

        Raises:
            StoreError: the secret is unknown or damaged.
            OSError: it could not be counted; nothing was taken.
        """
        if wanted.secret in self._get(sandbox).inline:
            return Amount()
        found = self._bindings(wanted, self._get(sandbox).grants)
        if isinstance(found, Refusal):
            raise UnknownSecretError(found.reason)
        return self.budgets.take(wanted.secret, sandbox, _limits(found), size)

    def _bindings(self, wanted: Grant, grants: frozenset[Grant]) -> tuple[SecretBinding, ...] | Refusal:
        """Return what all must permit the use of a stored secret, or of a reference."""
        if is_reference(wanted.secret):
            limits = self.limits.of(wanted.secret)
            return self._refusal_of_reference(wanted) or tuple(limit.binding(wanted) for limit in limits)
        try:
            return (self.store.info(wanted.secret).binding,)
        except UnknownSecretError:
            return Refusal(Code.UNKNOWN_SECRET, missing(wanted, grants))
        except StoreError as error:
            return Refusal(error.code, f"{wanted.secret}: {error}")

    def value(self, sandbox: str, secret: str) -> Secret:
        """Return the value of a secret, directly after the consent of `decide`. Raises StoreError."""
        inline = self._get(sandbox).inline.get(secret)
        return self.store.value(secret) if inline is None else inline

    def former(self, sandbox: str, wanted: Grant) -> tuple[Secret, ...]:
        """Return the former values, which a host may still send back. Raises StoreError."""
        state = self._get(sandbox)
        now = self._clock()
        found = [
            value
            for host, former in state.former.items()
            if Grant(wanted.secret, host, wanted.port, wanted.scheme).covers(wanted)
            for value in still_former(former, now)
        ]
        if wanted.secret not in state.inline and not is_reference(wanted.secret):
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

    def mentions(self, secret: str) -> bool:
        """Whether a stored secret has this name, or a sandbox is granted one of this name."""
        granted = (grant.secret for state in self._sandboxes.values() for grant in state.grants)
        return self._stored(secret) or secret in granted

    @property
    def referred(self) -> frozenset[Grant] | None:
        """The references of the operator's document, each with each of its destinations; None: not known yet."""
        return self._referred

    def refer(self, uses: frozenset[Grant]) -> frozenset[str]:
        """Replace the references of the operator's document; return those that lose a destination.

        Raises:
            CustodyError: invalid: one is no reference, or for no exact host. Nothing is changed.
        """
        if any(use.wildcard or not is_reference(use.secret) for use in uses):
            raise CustodyError(Code.INVALID, "what the operator's document names is a reference for exact hosts")
        lost = (self._referred or frozenset()) - uses
        self._referred = uses
        return frozenset(use.secret for use in lost)

    def referring(self) -> dict[str, list[str]]:
        """Return the sandboxes that may have each reference now. One that is frozen for a sandbox is not among them."""
        found: dict[str, list[str]] = {}
        for name, state in self._sandboxes.items():
            for secret in {grant.secret for grant in state.grants & (self._referred or frozenset())}:
                if self.freezes.refusal(name, secret) is None:
                    found.setdefault(secret, []).append(name)
        return found

    def _refusal_of_reference(self, wanted: Grant) -> Refusal | None:
        if self._referred is None:
            return Refusal(Code.UNAVAILABLE, "the references of the operator's policy file are not known yet")
        if wanted not in self._referred:
            reason = f"no rule of the operator's policy file names {wanted.secret} for {wanted.host}:{wanted.port}"
            return Refusal(Code.NOT_BOUND, reason)
        return None

    def users(self, secret: str) -> list[str]:
        """Return the sandboxes in which the name `secret` means the stored secret."""
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
        """Check `state`. Grants of `former` are not checked again, so that a removal of others always succeeds."""
        if max(len(state.grants), len(state.inline), len(state.bounds)) > MAX_GRANTS:
            raise CustodyError(Code.FULL, f"a sandbox has at most {MAX_GRANTS} grants, inline secrets and their places")
        for name, value in state.inline.items():
            if problem := text_problem(inline_name(name) and value.reveal()):
                raise CustodyError(Code.INVALID, problem)
            if is_reference(name):
                raise CustodyError(Code.INVALID, "an inline secret may not have the name of a backend's secret")
            if self._stored(name):
                raise CustodyError(Code.EXISTS, "an inline secret may not have a stored secret's name")
        bound = within(state.grants, state.bounds)
        for grant in state.grants:
            if grant.secret in state.inline:
                if grant not in bound:
                    raise CustodyError(Code.NOT_BOUND, f"{grant.secret}: its value was not given for {grant.host}")
                continue
            if is_reference(grant.secret):  # judged at each release: `serve` can have read a newer file than hostd
                continue
            if former is not None and grant in former.grants and grant.secret not in former.inline:
                continue
            try:
                binding = self.store.info(grant.secret).binding
            except UnknownSecretError as error:
                if grant.wildcard or not _storable(grant.secret):
                    raise CustodyError(error.code, f"{grant.secret}: {error}") from None
                continue
            except StoreError:
                continue  # a release says why
            refusal = check(binding, grant, self._clock())
            if refusal is not None and refusal.code is not Code.EXPIRED:
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
            "metadata": dict(state.metadata),
            "images": sorted(state.images),
        }
        self._files.write(state.sandbox, json.dumps(metadata).encode(), json.dumps(body).encode())
        self._sandboxes[state.sandbox] = state


def _limits(bindings: Iterable[SecretBinding]) -> UseLimits:
    """Return the numbers of uses and bytes that all bindings permit."""
    limits = UNLIMITED
    for binding in bindings:
        limits = limits.both(binding.limits)
    return limits


def _storable(name: str) -> bool:
    try:
        secret_name(name)
    except GrantError:
        return False
    return True


def _former(state: SandboxState, inline: Mapping[str, Secret], now: datetime) -> Mapping[str, tuple[Former, ...]]:
    """Return the kept former values of a sandbox's inline secrets after a change to `inline`."""
    former = {host: tuple(one for one in values if one.until > now) for host, values in state.former.items()}
    for name, value in state.inline.items():
        if inline.get(name) == value:
            continue
        for host in {grant.host for grant in state.grants if grant.secret == name}:
            former[host] = with_former(former.get(host, ()), value, now, MAX_FORMER_INLINE)
    return {host: values for host, values in former.items() if values}


def _given(inline: Mapping[str, Secret], bounds: Iterable[Grant]) -> frozenset[Grant]:
    """Return the destinations of inline secrets that are given with their values."""
    return frozenset(bound for bound in bounds if bound.secret in inline)


def _left(state: SandboxState, names: Collection[str], bounds: Iterable[Grant] | None) -> frozenset[Grant]:
    """Return the remaining destinations of inline secrets whose values are kept."""
    old = frozenset(bound for bound in state.bounds if bound.secret in names)
    return old if bounds is None else within(bounds, old)


def _kept(state: SandboxState, keep: Iterable[str]) -> dict[str, Secret]:
    try:
        return {name: state.inline[name] for name in keep}
    except KeyError:
        raise CustodyError(Code.UNKNOWN_SECRET, "a name in `keep` is no inline secret of the sandbox") from None


def _state(name: str, metadata: bytes, body: bytes) -> SandboxState:
    about: dict[str, Any] = json.loads(metadata)
    content: dict[str, Any] = json.loads(body)
    if about["sandbox"] != name:
        raise SealedRecordError("a sandbox's record under another's name")
    grants = frozenset(Grant.from_json(item) for item in content["grants"])
    inline = {str(key): Secret(value) for key, value in content["inline"].items()}
    bounds = content.get("bounds")  # an old record has no bounds: its grants are the bounds
    return SandboxState(
        name,
        str(about["lineage"]),
        int(about["generation"]),
        grants,
        inline,
        {host: tuple(map(Former.from_json, values)) for host, values in content.get("former", {}).items()},
        _given(inline, grants if bounds is None else map(Grant.from_json, bounds)),
        frozenset(content.get("names", [ANY])),
        {str(key): str(value) for key, value in content.get("metadata", {}).items()},
        frozenset(content.get("images", [])),
    )
