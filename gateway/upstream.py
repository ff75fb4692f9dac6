"""The only place that opens connections to the outside.

- A name is resolved here and now: the operator's own map first, else the gateway's resolver. What the sandbox was
  told in DNS, or which address it dialled, does not matter.
- Every address is classified before it is dialled, and the socket is connected to that very address: nothing
  resolves again in between. Pairs of the operator's map are exempt; they are the operator's word.
- The host's own addresses, public ones too, are not dialled.
- Sockets are made by the unprivileged worker, so the guard's rules by user id bind them.
- While the guard is gone nothing is dialled. Dials are counted and rate-limited per worker and have deadlines. One that
  is too early waits for its turn, and is refused when that would take longer than a connection may.
- Policy is asked once more, about the name or the literal address itself: a caller that forgot to ask, or asked about
  another name, dials nothing that policy names nowhere.
- A caller's verdict must be in the audit log before it calls; the dialler records nothing. What policy's mode observe
  let pass is handed to the caller (`Connection.allowed`), who records it before the first byte.
"""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv6Address

from gateway.config import GatewayConfig, GatewayLimits
from gateway.dns_logic import Outcome
from gateway.resolver import Resolver
from policy.addresses import dialable
from policy.decision import AllowAddress, Deny, decide_address, decide_name, decide_resolved

_MAX_TRIES = 4
_MAX_DIALS = 128
_TOO_MANY = "too many upstream connections are being opened"


class DialFailure(StrEnum):
    """Why there is no connection; the value is the rule id of its audit record."""

    GUARD = "guard"
    UNCONFIGURED = "unconfigured"
    POLICY = "dial-policy"
    RATE = "dial-rate"
    NAME = "resolve"
    ADDRESS = "address"
    CONNECT = "connect"


class DialError(Exception):
    """No connection was made. `rule` is what refused it: one of policy's, or the failure's own."""

    def __init__(self, failure: DialFailure, reason: str, rule: str | None = None) -> None:
        super().__init__(reason)
        self.failure = failure
        self.reason = reason
        self.rule = rule or failure.value


@dataclass(frozen=True, slots=True)
class Connection:
    """A connected non-blocking socket and the address it is connected to.

    `allowed` is policy's word on an address that a name resolved to.
    """

    sock: socket.socket
    address: IPv4Address | IPv6Address
    port: int
    allowed: AllowAddress | None = None


type _Candidates = tuple[tuple[IPv4Address | IPv6Address, AllowAddress | None], ...]


class Dialler:
    """Opens upstream connections for one worker.

    Args:
        config: the active configuration, None before the first one.
        guarded: False while the guard of the upstream namespace is gone.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        resolver: Resolver,
        config: Callable[[], GatewayConfig | None],
        guarded: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._resolver = resolver
        self._config = config
        self._guarded = guarded
        self._clock = clock
        self._tokens: float | None = None
        self._refilled = 0.0
        self._places = asyncio.Semaphore(_MAX_DIALS)

    async def dial(self, host: str, port: int) -> Connection:
        """Connect to `host`, a checked name that policy allowed.

        Raises:
            DialError: no address of it could or may be reached.
        """
        config = await self._ready()
        unnamed = not_named(config, host)
        if unnamed is not None:
            raise DialError(DialFailure.POLICY, unnamed)
        candidates = await self._candidates(host, port, config)
        return await self._connect(candidates, port, config)

    async def dial_address(self, address: IPv4Address | IPv6Address, port: int) -> Connection:
        """Connect to an address that policy allowed literally; it must be dialable all the same.

        Raises:
            DialError: it may not or cannot be reached.
        """
        config = await self._ready()
        refused = dialable(address, config.allowed_addresses)
        if refused is not None:
            raise DialError(DialFailure.ADDRESS, f"address is {refused.value}")
        if own_address(config, address):
            raise DialError(DialFailure.ADDRESS, "address is one of this host's own")
        decision = decide_address(config.policy, address, port, config.allowed_addresses)
        if isinstance(decision, Deny):
            raise DialError(DialFailure.POLICY, decision.reason)
        return await self._connect(((address, None),), port, config)

    async def _candidates(self, host: str, port: int, config: GatewayConfig) -> _Candidates:
        """The addresses of `host` that may be dialled, IPv4 only unless the operator named others."""
        mapped = config.host_addresses.get(host)
        if mapped is not None:
            return tuple((address, None) for address in mapped)
        resolution = await self._resolver.resolve(host)
        match resolution.outcome:
            case Outcome.ADDRESSES:
                pass
            case Outcome.NXDOMAIN | Outcome.NODATA:
                raise DialError(DialFailure.NAME, "name has no address")
            case Outcome.FAILED | Outcome.REFUSED_ADDRESS:
                raise DialError(DialFailure.NAME, "name could not be resolved")
        answers = {item: permitted(config, host, item, port) for item in resolution.addresses}
        allowed = [(item, answer) for item, answer in answers.items() if isinstance(answer, AllowAddress)]
        open_ones = [(item, answer) for item, answer in allowed if not own_address(config, item)]
        if open_ones:
            # What is allowed goes ahead of what is only observed.
            return tuple(sorted(open_ones, key=lambda one: one[1].observed is not None))
        for refused in answers.values():
            if isinstance(refused, Deny):
                raise DialError(DialFailure.ADDRESS, refused.reason, refused.rule)
        raise DialError(DialFailure.ADDRESS, f"{host} resolves to an address of this host's own")

    async def _ready(self) -> GatewayConfig:
        """The configuration in force, once it is this dial's turn."""
        config = self._usable()
        wait = self._turn(config.limits)
        if wait > 0:
            await asyncio.sleep(wait)
            config = self._usable()
        return config

    def _usable(self) -> GatewayConfig:
        config = self._config()
        if config is None:
            raise DialError(DialFailure.UNCONFIGURED, "no policy is active yet")
        if not self._guarded():
            raise DialError(DialFailure.GUARD, "the guard of the upstream namespace is not running")
        return config

    def _turn(self, limits: GatewayLimits) -> float:
        """Take the next place in the rate; returns in how many seconds it comes."""
        rate = limits.dial_rate
        now = self._clock()
        held = 2.0 * rate if self._tokens is None else self._tokens + (now - self._refilled) * rate
        self._tokens = min(2.0 * rate, held)
        self._refilled = now
        wait = max(0.0, (1 - self._tokens) / rate)
        if wait > limits.connect:
            raise DialError(DialFailure.RATE, _TOO_MANY)
        self._tokens -= 1
        return wait

    async def _connect(self, candidates: _Candidates, port: int, config: GatewayConfig) -> Connection:
        try:
            async with asyncio.timeout(config.limits.connect):
                await self._places.acquire()
        except TimeoutError:
            raise DialError(DialFailure.RATE, _TOO_MANY) from None
        try:
            for address, allowed in candidates[:_MAX_TRIES]:
                if not self._guarded():
                    raise DialError(DialFailure.GUARD, "the guard of the upstream namespace is not running")
                try:
                    async with asyncio.timeout(config.limits.connect):
                        return Connection(await _connected(address, port), address, port, allowed)
                except (OSError, TimeoutError):
                    continue
        finally:
            self._places.release()
        raise DialError(DialFailure.CONNECT, "no address of the host could be reached")


def not_named(config: GatewayConfig, host: str) -> str | None:
    """None when policy could allow some flow to `host`, else why not. For whoever asks or dials, beside the verdict."""
    decision = decide_name(config.policy, host)
    return decision.reason if isinstance(decision, Deny) else None


def permitted(
    config: GatewayConfig, host: str, address: IPv4Address | IPv6Address, port: int = 443
) -> AllowAddress | Deny:
    """Whether `host` may be dialled at this address it resolved to."""
    refused = dialable(address, config.allowed_addresses)
    if refused is not None:
        return Deny(DialFailure.ADDRESS.value, f"{host} resolves to a {refused.value} address")
    return decide_resolved(config.policy, host, address, port)


def own_address(config: GatewayConfig, address: IPv4Address | IPv6Address) -> bool:
    """Whether this is an address of the host itself, be it a public one, that the operator has not opened.

    Asked of the kernel's routing: to reach itself it takes the very same address as source. Nothing is sent.
    """
    if any(address in network for network in config.allowed_addresses):
        return False
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect((str(address), 9))
        except OSError:
            return False  # no way there, for a dial neither
        return bool(probe.getsockname()[0] == str(address))


async def _connected(address: IPv4Address | IPv6Address, port: int) -> socket.socket:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, (str(address), port))
    except BaseException:
        sock.close()
        raise
    return sock
