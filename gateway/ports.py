"""The ports of `gateway.effects` and `gateway.engines.port`, bound to the channels of one sandbox.

- A lease is used only while `VaultClient.current` says so, and is asked for again when it is over; nothing is kept
  beyond that. Concurrent requests for one secret share one release, and each is held against the lease's methods and
  paths before it gets the value.
- A request takes one of the uses that a lease permits, and its bytes. A lease that has too few is asked for again.
  Until its end it still says what to search for.
- A dial goes through the worker's `UpstreamDialler`; its refusals are recorded and become `ConnectionError` with the
  reason, and each address is recorded (`connect`) before it is dialled. A connection ends when policy no longer
  allows its address. What is written to it is counted first: the write that goes beyond the sandbox's bytes ends it
  instead.
- The decider reads the policy in force at each call.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address, IPv6Address
from typing import Any
from weakref import WeakKeyDictionary

from audit.client import AuditClient
from audit.line import Form
from gateway.budget import Budget
from gateway.config import GatewayConfig
from gateway.described import of_address, of_policy
from gateway.effects import Recorder, SecretRefused, SecretsSuspended
from gateway.placeholders import NONE, Placeholders
from gateway.state import WorkerState
from gateway.upstream import DialError, UpstreamDialler
from policy.compiled import CompiledPolicy, SecretAt, secrets_to
from policy.decision import AllowAddress, AllowRequest, Deny, Judged, decide_request, judged
from policy.facts import Destination, RequestFacts, Scheme, SessionFacts
from policy.injection import SecretPlan
from policy.logins import LoginPlan
from policy.sessions import AllowSession, decide_session
from vault.client import Lease, ReleaseRefusedError, VaultClient
from vault.conditions import Amount
from vault.secret import Secret
from wire import Code
from wire.api.vaultd import ReleasePurpose

_STREAM_LIMIT = 64 * 1024
_ABSENT_SECONDS = 10.0
_KEPT = 256
_MAX_KEPT_PATH = 1024
# Where vaultd judged the request; its other codes are failures.
_JUDGED = frozenset(
    {Code.NOT_BOUND, Code.NOT_GRANTED, Code.EXPIRED, Code.EXHAUSTED, Code.UNKNOWN_SECRET, Code.FORBIDDEN}
)
_SUSPENDED = frozenset({Code.FROZEN, Code.BACKEND})

type _Key = tuple[str, str, int, Scheme]


class PolicyDecider:
    """`gateway.effects.Decider` over the active configuration.

    A decision depends on the policy and `policy.decision.judged` only. So decisions are kept, up to `_KEPT` of them,
    until the policy changes.
    """

    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self._policy: CompiledPolicy | None = None
        self._kept: dict[Judged, AllowRequest | Deny] = {}
        self._last: tuple[RequestFacts, AllowRequest | Deny] | None = None
        self._secrets: dict[str, tuple[SecretAt, ...]] = {}

    def decide_request(self, facts: RequestFacts) -> AllowRequest | Deny:
        """Judge one request under the policy in force."""
        config = self._state.config
        if config is None:
            return Deny("unconfigured", "no policy is active yet")
        if config.resolved is not self._policy:
            self._begin(config.resolved)
        if self._last is not None and self._last[0] is facts:
            return self._last[1]
        key = judged(config.resolved, facts)
        decision = self._kept.get(key)
        if decision is None:
            decision = decide_request(config.resolved, facts)
            if len(facts.path) <= _MAX_KEPT_PATH:
                if len(self._kept) >= _KEPT:
                    self._kept.clear()
                self._kept[key] = decision
        self._last = facts, decision
        return decision

    def secrets_to(self, host: str) -> tuple[SecretAt, ...]:
        """Every use of a secret that the policy in force can make at a host."""
        config = self._state.config
        if config is None:
            return ()
        if config.resolved is not self._policy:
            self._begin(config.resolved)
        found = self._secrets.get(host)
        if found is None:
            if len(self._secrets) >= _KEPT:
                self._secrets.clear()
            found = self._secrets[host] = secrets_to(config.resolved, host)
        return found

    def placeholders(self) -> Placeholders:
        """Return the placeholders of the sandbox."""
        return NONE if self._state.config is None else self._state.config.known

    def _begin(self, policy: CompiledPolicy) -> None:
        """Forget what another policy said."""
        self._policy, self._kept, self._secrets, self._last = policy, {}, {}, None


class AuditRecorder:
    """`gateway.effects.Recorder` over the worker's audit channel; adds to decisions what policy made them."""

    def __init__(self, audit: AuditClient, state: WorkerState) -> None:
        self._audit = audit
        self._state = state
        self._config: GatewayConfig | None = None
        self._policy: dict[object, dict[str, Any]] = {}

    def _of_policy(self, rule: object) -> dict[str, Any]:
        """Return `of_policy`'s fields; they are kept while the configuration is in force."""
        config = self._state.config
        if config is not self._config or len(self._policy) >= _KEPT:
            self._config, self._policy = config, {}
        found = self._policy.get(rule)
        if found is None:
            found = self._policy[rule] = of_policy(config, rule)
        return found

    async def accept(self, kind: str, decision: str, **fields: Any) -> None:
        """Return once the record is accepted.

        Raises:
            AuditUnavailable: it was not.
        """
        await self._audit.accept(kind, decision, **self._of_policy(fields.get("rule")), **fields)

    def note(self, kind: str, decision: str, **fields: object) -> None:
        """Record an outcome, or a denial that waits for nothing, best effort."""
        policy = {} if decision == "info" else self._of_policy(fields.get("rule"))
        self._audit.note(kind, decision, **policy, **fields)

    def form(self, kind: str, decision: str, varying: tuple[str, ...], **fields: Any) -> "PolicyForm":
        """Return a form of records with these fields, and with `varying` others."""
        return PolicyForm(self._audit, self._state, kind, decision, varying, fields)


class PolicyForm:
    """`gateway.effects.RecordForm` over the worker's audit channel. Records have the fields of the policy in force."""

    def __init__(
        self,
        audit: AuditClient,
        state: WorkerState,
        kind: str,
        decision: str,
        varying: tuple[str, ...],
        fields: dict[str, Any],
    ) -> None:
        self._audit = audit
        self._state = state
        self._of = (kind, decision, varying, fields)
        self._config: GatewayConfig | None = None
        self._form: Form | None = None

    def _now(self) -> Form:
        """Return the form under the configuration in force."""
        config = self._state.config
        if self._form is None or config is not self._config:
            kind, decision, varying, fields = self._of
            policy = {} if decision == "info" else of_policy(config, fields.get("rule"))
            self._config, self._form = config, Form(kind, decision, varying, {**policy, **fields})
        return self._form

    async def accept(self, *values: int | str) -> None:
        """See `AuditRecorder.accept`."""
        await self._audit.accept_form(self._now(), values)

    def note(self, *values: int | str) -> None:
        """See `AuditRecorder.note`."""
        self._audit.note_form(self._now(), values)


class LeasedSecrets:
    """`gateway.effects.Secrets` over the worker's vault channel."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self._leases: dict[_Key, Lease] = {}
        self._left: dict[_Key, Amount] = {}
        """What is left of a limited lease. Bytes that were left of those before it count, too: vaultd gave them."""
        self._sought: dict[_Key, Lease] = {}
        self._absent: dict[_Key, tuple[float, str]] = {}
        self._locks: dict[_Key, asyncio.Lock] = {}

    async def lease(self, plan: SecretPlan, facts: RequestFacts, size: int | None) -> Secret:
        """The secret of `plan` for this request, which takes one use of it, and `size` bytes.

        Raises:
            SecretRefused: it must not go into this request.
            SecretsSuspended: it is frozen, or its backend gives no value now.
            VaultError: it was not released for another reason.
        """
        key = (plan.secret, facts.host, facts.port, facts.scheme)
        return await self._lease(key, facts.method, facts.path, size)

    async def login(self, plan: LoginPlan, facts: SessionFacts) -> Secret:
        """The secret of `plan` for a login. A secret that is limited to methods, paths or bytes is refused.

        Raises:
            SecretRefused, SecretsSuspended, VaultError: see `lease`.
        """
        return await self._lease((plan.secret, facts.host, facts.port, Scheme.POSTGRES), None, None, None)

    async def _lease(self, key: _Key, method: str | None, path: str | None, size: int | None) -> Secret:
        held = self._usable(key, size) or await self._renewed(key, method, path, size)
        refusal = held.check(method, path)
        if refusal is not None:
            raise SecretRefused(f"{key[0]}: {refusal.reason}")
        if (left := self._left.get(key)) is not None:  # without a wait since it was looked at
            self._left[key] = left.less(size)
        return held.value

    def _usable(self, key: _Key, size: int | None) -> Lease | None:
        """Return the lease that one more request may use, if there is one."""
        held, left = self._leases.get(key), self._left.get(key)
        if held is None or not self._state.vault.current(held) or (left is not None and not left.covers(size)):
            return None
        return held

    async def _renewed(self, key: _Key, method: str | None, path: str | None, size: int | None) -> Lease:
        """Return the lease that another request got meanwhile, or ask for one."""
        async with self._locks.setdefault(key, asyncio.Lock()):
            held = self._usable(key, size)
            if held is None:
                vault, former = self._state.vault, self._leases.get(key)
                if former is not None and not vault.current(former):
                    del self._leases[key]
                held = await self._release(vault, *key, method=method, path=path, size=size)
                self._leases[key] = held
                self._absent.pop(key, None)
                before = self._left.pop(key, Amount())
                if held.permits.limited:
                    self._left[key] = held.permits.with_bytes(before.sent)
            return held

    async def searched(self, use: SecretAt) -> tuple[Secret, ...]:
        """What is looked for in responses of the host of `use`.

        A lease for looking is no lease for sending: vaultd did not judge it by methods and paths.

        Raises:
            SecretRefused: the sandbox has no such secret there. It is asked for again after `_ABSENT_SECONDS`, or once
                it was sent.
            VaultError: it is not known.
        """
        key = (use.plan.secret, use.host, use.endpoint.port, use.endpoint.scheme)
        async with self._locks.setdefault(key, asyncio.Lock()):
            vault = self._state.vault
            for held in (self._leases.get(key), self._sought.get(key)):
                if held is not None and vault.current(held):
                    return (held.value, *held.former)
            until, reason = self._absent.get(key, (0.0, ""))
            if time.monotonic() < until:
                raise SecretRefused(reason)
            try:
                held = await self._release(vault, *key, purpose=ReleasePurpose.SCRUB)
            except SecretRefused as refused:
                self._absent[key] = (time.monotonic() + _ABSENT_SECONDS, refused.reason)
                raise
            self._sought[key] = held
            return (held.value, *held.former)

    async def _release(
        self,
        vault: VaultClient,
        secret: str,
        host: str,
        port: int,
        scheme: Scheme,
        *,
        method: str | None = None,
        path: str | None = None,
        purpose: ReleasePurpose | None = None,
        size: int | None = None,
    ) -> Lease:
        try:
            return await vault.release(
                secret, host, port, scheme.value, method=method, path=path, purpose=purpose, size=size
            )
        except ReleaseRefusedError as error:
            if error.code in _JUDGED:
                raise SecretRefused(error.reason) from None
            if error.code in _SUSPENDED:
                raise SecretsSuspended(error.reason) from None
            raise

    def drop(self, secrets: frozenset[str] | None) -> None:
        """Forget the leases of these secrets, or all."""
        for kept in (self._leases, self._left, self._sought, self._absent):
            for key in [key for key in kept if secrets is None or key[0] in secrets]:
                del kept[key]


class DatabaseSessions:
    """`gateway.effects.Sessions` over the active configuration and the worker's leases."""

    def __init__(self, state: WorkerState, secrets: LeasedSecrets) -> None:
        self._state = state
        self._secrets = secrets

    def decide_session(self, facts: SessionFacts) -> AllowSession | Deny:
        """Judge one session under the policy in force."""
        config = self._state.config
        return (
            Deny("unconfigured", "no policy is active yet") if config is None else decide_session(config.policy, facts)
        )

    async def login(self, plan: LoginPlan, facts: SessionFacts) -> Secret:
        """See `LeasedSecrets.login`."""
        return await self._secrets.login(plan, facts)


class StreamDialler:
    """`gateway.engines.port.UpstreamDialler` over the worker's dialler and its budget."""

    def __init__(self, dialler: UpstreamDialler, budget: Budget, recorder: Recorder) -> None:
        self._dialler = dialler
        self._budget = budget
        self._recorder = recorder
        self._open: WeakKeyDictionary[asyncio.StreamWriter, Destination] = WeakKeyDictionary()

    async def dial(
        self, host: str, port: int, scheme: Scheme, flow: Mapping[str, object]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
        """Connect to `host`; `flow` is what records say of the flow it is for.

        Raises:
            ConnectionError: refused or failed; the text is the reason.
            AuditUnavailable: the log did not accept the record of an address.
        """

        async def announce(address: IPv4Address | IPv6Address, allowed: AllowAddress | None) -> None:
            decision, verdict = of_address(allowed)
            await self._recorder.accept("connect", decision, address=str(address), **verdict, **flow)

        try:
            connection = await self._dialler.dial(host, port, scheme, announce)
        except DialError as error:
            self._recorder.note("flow", "deny", rule=error.rule, reason=error.reason, **flow)
            raise ConnectionError(error.reason) from None
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_STREAM_LIMIT, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            transport, _ = await loop.create_connection(lambda: protocol, sock=connection.sock)
        except BaseException:
            connection.sock.close()
            raise
        writer = _MeteredWriter(transport, protocol, reader, loop, self._budget)
        if not self._dialler.permits(connection.destination):
            transport.abort()
            raise ConnectionError("the policy changed while the connection was made")
        self._open[writer] = connection.destination
        return reader, writer, str(connection.address)

    def recheck(self) -> int:
        """Cut the connections to addresses that policy, as it is now, does not allow; returns how many."""
        refused = [
            writer
            for writer, destination in list(self._open.items())
            if not writer.is_closing() and not self._dialler.permits(destination)
        ]
        for writer in refused:
            writer.transport.abort()
        return len(refused)


class _MeteredWriter(asyncio.StreamWriter):
    """Writes what the budget lets pass."""

    def __init__(
        self,
        transport: asyncio.WriteTransport,
        protocol: asyncio.StreamReaderProtocol,
        reader: asyncio.StreamReader,
        loop: asyncio.AbstractEventLoop,
        budget: Budget,
    ) -> None:
        super().__init__(transport, protocol, reader, loop)
        self._budget = budget

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._budget.send(len(data)):
            super().write(data)
        else:
            self.transport.abort()

    def writelines(self, data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(data))
