"""The only place that opens connections to the outside.

- A name is resolved here and now: the operator's own map first, else the gateway's resolver. What the sandbox was
  told in DNS, or which address it dialled, does not matter.
- Every address, wherever it comes from, is judged by `policy.destination` before it is dialled, by what is in force
  then, and again once it is connected. The socket is connected to that very address: nothing resolves again in between.
- The host's own addresses, public ones too, are not dialled unless the operator opened or mapped them.
- Sockets are made by the unprivileged worker, so the guard's rules by user id bind them.
- While the guard is gone nothing is dialled. Dials are counted and rate-limited per worker and have deadlines. One that
  is too early waits for its turn, and is refused when that would take longer than a connection may.
- The judgement includes the flow of the name or the literal address itself: a caller that forgot to ask, or asked about
  another name, dials nothing that policy names nowhere.
- A caller's verdict must be in the audit log before it calls. Each address is announced to the caller before it is
  dialled, with what policy says of it; the caller records that, and the dial waits for the record.
"""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from ipaddress import IPv4Address, IPv6Address

from gateway.config import GatewayConfig, GatewayLimits
from gateway.described import Announce
from gateway.dns_logic import Outcome
from gateway.resolver import Resolver
from policy.decision import AllowAddress, Deny
from policy.destination import decide_address, decide_answer
from policy.facts import AddressSource, Destination, Scheme
from wire.patience import Patience

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

    `destination` is what policy allowed.
    """

    sock: socket.socket
    destination: Destination

    @property
    def address(self) -> IPv4Address | IPv6Address:
        return self.destination.address


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

    async def dial(self, host: str, port: int, scheme: Scheme, announce: Announce) -> Connection:
        """Connect to `host`, a checked name that policy allowed. What `announce` raises is raised here.

        Raises:
            DialError: no address of it could or may be reached.
        """
        config = await self._ready()
        mapped = config.host_addresses.get(host)
        source = AddressSource.RESOLVED if mapped is None else AddressSource.MAPPED
        addresses = await self._resolved(host) if mapped is None else mapped
        destinations = [Destination(host, address, port, scheme, source) for address in addresses]
        return await self._connect(destinations, announce)

    async def dial_address(self, address: IPv4Address | IPv6Address, port: int, announce: Announce) -> Connection:
        """Connect to an address that policy allowed literally.

        Raises:
            DialError: it may not or cannot be reached.
        """
        await self._ready()
        return await self._connect([literal(address, port)], announce)

    def permits(self, destination: Destination) -> bool:
        """Whether an open connection to `destination` may stay, by what is in force now."""
        config = self._config()
        return config is not None and isinstance(judge(config, destination), AllowAddress)

    async def _resolved(self, host: str) -> tuple[IPv4Address, ...]:
        resolution = await self._resolver.resolve(host)
        match resolution.outcome:
            case Outcome.ADDRESSES:
                return resolution.addresses
            case Outcome.NXDOMAIN | Outcome.NODATA:
                raise DialError(DialFailure.NAME, "name has no address")
            case Outcome.FAILED | Outcome.REFUSED_ADDRESS:
                if resolution.denied is not None:
                    raise DialError(DialFailure.POLICY, resolution.denied.reason, resolution.denied.rule)
                raise DialError(DialFailure.NAME, "name could not be resolved")

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

    async def _connect(self, destinations: list[Destination], announce: Announce) -> Connection:
        """Connect to the first destination that is allowed and answers; what is only observed is tried last."""
        limits = self._usable().limits
        try:
            async with Patience(limits.connect):
                await self._places.acquire()
        except TimeoutError:
            raise DialError(DialFailure.RATE, _TOO_MANY) from None
        try:
            for destination in self._allowed_first(destinations)[:_MAX_TRIES]:
                await announce(destination.address, self._judged(destination))
                self._judged(destination)  # time has passed
                try:
                    async with Patience(limits.connect):
                        sock = await _connected(destination.address, destination.port)
                except (OSError, TimeoutError):
                    continue
                try:
                    self._judged(destination)
                    return Connection(sock, destination)
                except BaseException:
                    sock.close()
                    raise
        finally:
            self._places.release()
        raise DialError(DialFailure.CONNECT, "no address of the host could be reached")

    def _allowed_first(self, destinations: list[Destination]) -> list[Destination]:
        """The destinations that may be dialled, those without an observed denial first.

        Raises:
            DialError: there is none.
        """
        config = self._usable()
        answers = [(one, judge(config, one)) for one in destinations]
        allowed = [(one, answer) for one, answer in answers if isinstance(answer, AllowAddress)]
        for _, refused in answers:
            if not allowed and isinstance(refused, Deny):
                raise _refusal(refused)
        return [one for one, answer in sorted(allowed, key=lambda pair: pair[1].observed is not None)]

    def _judged(self, destination: Destination) -> AllowAddress:
        """Policy's word as of now: it may have been replaced, and the guard may be gone, since the last wait."""
        answer = judge(self._usable(), destination)
        if isinstance(answer, Deny):
            raise _refusal(answer)
        return answer


def literal(address: IPv4Address | IPv6Address, port: int) -> Destination:
    """The destination of a TLS flow without a server name."""
    return Destination(None, address, port, Scheme.HTTPS, AddressSource.LITERAL)


def judge(config: GatewayConfig, destination: Destination) -> AllowAddress | Deny:
    """Whether a flow may be opened to `destination`: brings the operator's exceptions and what this kernel knows."""
    own = own_address(destination.address)
    return decide_address(config.policy, replace(destination, own=own), config.allowed_addresses)


def judge_answer(
    config: GatewayConfig, host: str, address: IPv4Address | IPv6Address, source: AddressSource
) -> AllowAddress | Deny:
    """Whether a DNS answer for `host` may show this address."""
    return decide_answer(config.policy, host, address, source, config.allowed_addresses, own=own_address(address))


def own_address(address: IPv4Address | IPv6Address) -> bool:
    """Whether this is an address of the host itself, be it a public one.

    Asked of the kernel's routing: to reach itself it takes the very same address as source. Nothing is sent.
    """
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect((str(address), 9))
        except OSError:
            return False  # no way there, for a dial neither
        return bool(probe.getsockname()[0] == str(address))


def _refusal(denied: Deny) -> DialError:
    special = denied.rule.startswith("address-class:")
    return DialError(DialFailure.ADDRESS if special else DialFailure.POLICY, denied.reason, denied.rule)


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
