"""What a worker gives its engines: the ports of `gateway.engine`, bound to this sandbox's channels.

- A lease is used only while `VaultClient.current` says so, and is asked for again when it is over; nothing is kept
  beyond that. Concurrent requests for one secret share one release.
- A dial goes through the worker's `Dialler`; its refusals become `ConnectionError` with the reason.
- The decider reads the policy in force at each call.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from audit.client import AuditClient
from gateway.config import GatewayConfig
from gateway.upstream import DialError, Dialler
from policy.decision import AllowRequest, Deny, decide_request
from policy.facts import RequestFacts, Scheme
from policy.injection import InjectionPlan
from vault.client import Lease, VaultClient
from vault.secret import Secret

_STREAM_LIMIT = 64 * 1024

type _Key = tuple[str, str, int, Scheme]


class PolicyDecider:
    """`gateway.engine.Decider` over the active configuration."""

    def __init__(self, config: Callable[[], GatewayConfig | None]) -> None:
        self._config = config

    def decide_request(self, facts: RequestFacts) -> AllowRequest | Deny:
        """Judge one request under the policy in force."""
        config = self._config()
        if config is None:
            return Deny("unconfigured", "no policy is active yet")
        return decide_request(config.policy, facts)


class AuditRecorder:
    """`gateway.engine.Recorder` over the worker's audit channel; adds the policy's digest to decisions."""

    def __init__(self, audit: AuditClient, config: Callable[[], GatewayConfig | None]) -> None:
        self._audit = audit
        self._config = config

    async def accept(self, kind: str, decision: str, **fields: Any) -> None:
        """Return once the record is accepted.

        Raises:
            AuditUnavailable: it was not.
        """
        config = self._config()
        if config is not None:
            fields.setdefault("policy", config.policy.digest)
        await self._audit.accept(kind, decision, **fields)

    def note(self, kind: str, decision: str, **fields: object) -> None:
        """Record an outcome, best effort."""
        self._audit.note(kind, decision, **fields)


class LeasedSecrets:
    """`gateway.engine.Secrets` over the worker's vault channel."""

    def __init__(self, vault: Callable[[], VaultClient]) -> None:
        self._vault = vault
        self._leases: dict[_Key, Lease] = {}
        self._locks: dict[_Key, asyncio.Lock] = {}

    async def lease(self, plan: InjectionPlan, host: str, port: int, scheme: Scheme) -> Secret:
        """The secret of `plan` for this destination.

        Raises:
            VaultError: it was not released.
        """
        key = (plan.secret, host, port, scheme)
        async with self._locks.setdefault(key, asyncio.Lock()):
            vault = self._vault()
            held = self._leases.get(key)
            if held is None or not vault.current(held):
                self._leases.pop(key, None)
                held = await vault.release(plan.secret, host, port, scheme.value)
                self._leases[key] = held
            return held.value

    def drop(self, secrets: frozenset[str] | None) -> None:
        """Forget the leases of these secrets, or all."""
        for key in [key for key in self._leases if secrets is None or key[0] in secrets]:
            del self._leases[key]


class StreamDialler:
    """`gateway.engine.Dialler` over the worker's dialler."""

    def __init__(self, dialler: Dialler) -> None:
        self._dialler = dialler

    async def dial(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
        """Connect to `host`.

        Raises:
            ConnectionError: refused or failed; the text is the reason.
        """
        try:
            connection = await self._dialler.dial(host, port)
        except DialError as error:
            raise ConnectionError(error.reason) from None
        try:
            reader, writer = await asyncio.open_connection(sock=connection.sock, limit=_STREAM_LIMIT)
        except BaseException:
            connection.sock.close()
            raise
        return reader, writer, str(connection.address)
