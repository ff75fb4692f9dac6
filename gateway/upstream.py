"""Opens upstream connections. Only this module does.

- A name is resolved at the dial: first in the operator's fixed addresses, then by the gateway's resolver. Earlier DNS
  answers and the address that the sandbox dialled are not used.
- `policy.destination` judges every address before the dial and again after the connection, each time under the policy
  in force. The socket connects to exactly the judged address; no name is resolved in between.
- The host's own addresses, also public ones, are dialled only if the operator has excepted or mapped them. The kernel
  is asked before the dial. After it the socket's own address says the same, also if the host got the address meanwhile.
- Addresses are dialled one after the other, in the order of the resolver (IPv4 and IPv6 alternate) or of the operator.
  Those without a route are passed over. An address that does not answer delays the next one by two seconds.
- The unprivileged worker makes the sockets, so the guard's rules by uid apply to them.
- Without a living guard nothing is dialled. Dials have a limit, a rate per worker and deadlines. A dial above the rate
  waits for its turn. It is refused if the wait would exceed the connection timeout.
- The judgement includes the flow itself (name or literal address). So a caller with a missing or wrong check cannot
  dial a destination that policy does not name.
- The caller's verdict must be in the audit log before the call. Each address, with the verdict of policy, is announced
  to the caller before the dial. The caller records it, and the dial waits for the record.
"""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from ipaddress import IPv4Address, IPv6Address, ip_address

from gateway.config import GatewayConfig
from gateway.described import Announce
from gateway.dns.queries import Outcome
from gateway.dns.resolver import Resolver
from gateway.state import WorkerState
from policy.decision import AllowAddress, AllowFlow, Deny
from policy.destination import decide_answer
from policy.facts import AddressSource, Destination, FlowFacts, Scheme
from wire.dialling import connect
from wire.gateway_limits import GatewayLimits
from wire.patience import Patience
from wire.routes import own_address, source

_MAX_TRIES = 4
_NEXT_SECONDS = 2
"""The longest wait for an address while another one is left: the kernel has then repeated its SYN once."""
_MAX_DIALS = 128
_TOO_MANY = "too many upstream connections are being opened"


class DialFailure(StrEnum):
    """Why a dial failed. The value is the rule id of its audit record."""

    GUARD = "guard"
    UNCONFIGURED = "unconfigured"
    POLICY = "dial-policy"
    RATE = "dial-rate"
    NAME = "resolve"
    ADDRESS = "address"
    CONNECT = "connect"


class DialError(Exception):
    """A dial failed. `rule` is the rule of policy that refused it, otherwise the value of `failure`."""

    def __init__(self, failure: DialFailure, reason: str, rule: str | None = None) -> None:
        super().__init__(reason)
        self.failure = failure
        self.reason = reason
        self.rule = rule or failure.value


@dataclass(frozen=True, slots=True)
class UpstreamConnection:
    """A connected non-blocking socket, and the destination that policy allowed."""

    sock: socket.socket
    destination: Destination

    @property
    def address(self) -> IPv4Address | IPv6Address:
        return self.destination.address


class UpstreamDialler:
    """Opens upstream connections for one worker.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self,
        resolver: Resolver,
        state: WorkerState,
        clock: Callable[[], float],
    ) -> None:
        self._resolver = resolver
        self._state = state
        self._clock = clock
        self._tokens: float | None = None
        self._refilled = 0.0
        self._places = asyncio.Semaphore(_MAX_DIALS)

    async def dial(self, host: str, port: int, scheme: Scheme, announce: Announce) -> UpstreamConnection:
        """Connect to `host`, a canonical name that policy allowed. Exceptions of `announce` propagate.

        Raises:
            DialError: no address of the host is allowed, or none could be connected.
        """
        config = await self._ready()
        mapped = config.constants.host_addresses.get(host)
        source = AddressSource.RESOLVED if mapped is None else AddressSource.MAPPED
        addresses = await self._resolved(host) if mapped is None else mapped
        destinations = [Destination(host, address, port, scheme, source) for address in addresses]
        return await self._connect(destinations, announce)

    async def dial_address(
        self, address: IPv4Address | IPv6Address, port: int, announce: Announce
    ) -> UpstreamConnection:
        """Connect to a literal address that policy allowed.

        Raises:
            DialError: the address is not allowed, or could not be connected.
        """
        await self._ready()
        return await self._connect([literal(address, port)], announce)

    def permits(self, destination: Destination) -> bool:
        """Whether the policy in force still allows an open connection to `destination`."""
        config = self._state.config
        return config is not None and isinstance(judge(config, destination), AllowAddress)

    async def _resolved(self, host: str) -> tuple[IPv4Address | IPv6Address, ...]:
        resolution = await self._resolver.resolve(host)
        match resolution.outcome:
            case Outcome.ADDRESSES:
                return resolution.addresses
            case Outcome.NXDOMAIN | Outcome.NODATA:
                raise DialError(DialFailure.NAME, "the name has no address that the gateway's host can reach")
            case Outcome.FAILED | Outcome.REFUSED_ADDRESS:
                if resolution.denied is not None:
                    raise DialError(DialFailure.POLICY, resolution.denied.reason, resolution.denied.rule)
                raise DialError(DialFailure.NAME, "the resolvers gave no answer for the name that may be used")

    async def _ready(self) -> GatewayConfig:
        """Wait for this dial's turn; return the configuration in force then."""
        config = self._usable()
        wait = self._turn(config.constants.limits)
        if wait > 0:
            await asyncio.sleep(wait)
            config = self._usable()
        return config

    def _usable(self) -> GatewayConfig:
        config = self._state.config
        if config is None:
            raise DialError(DialFailure.UNCONFIGURED, "no policy is active yet")
        if not self._state.guarded:
            raise DialError(DialFailure.GUARD, "the guard of the upstream namespace is not running")
        return config

    def _turn(self, limits: GatewayLimits) -> float:
        """Take one token of the dial rate; return the seconds to wait for it."""
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

    async def _connect(self, destinations: list[Destination], announce: Announce) -> UpstreamConnection:
        """Connect to the first allowed destination that accepts. Those allowed only by observe mode come last."""
        limits = self._usable().constants.limits
        try:
            async with Patience(limits.connect if self._places.locked() else None):
                await self._places.acquire()
        except TimeoutError:
            raise DialError(DialFailure.RATE, _TOO_MANY) from None
        try:
            tried = self._allowed_first(destinations)[:_MAX_TRIES]
            for destination in tried:
                await announce(destination.address, self._judged(destination))
                self._judged(destination)  # policy or guard may have changed during the wait
                last = destination is tried[-1]
                try:
                    async with Patience(limits.connect if last else min(limits.connect, _NEXT_SECONDS)):
                        sock = await _connected(destination.address, destination.port)
                except (OSError, TimeoutError):
                    continue
                try:
                    if is_own(destination.address, ip_address(sock.getsockname()[0])):
                        destination = replace(destination, own=True)
                    self._judged(destination)
                    return UpstreamConnection(sock, destination)
                except BaseException:
                    sock.close()
                    raise
        finally:
            self._places.release()
        raise DialError(DialFailure.CONNECT, "no address of the host accepted a connection")

    def _allowed_first(self, destinations: list[Destination]) -> list[Destination]:
        """Return the allowed destinations that have a route, those with an observed denial last.

        Raises:
            DialError: none is allowed, or none of these has a route.
        """
        config = self._usable()
        sources = {one.address: source(one.address) for one in destinations}
        known = [replace(one, own=True) if is_own(one.address, sources[one.address]) else one for one in destinations]
        answers = [(one, judge(config, one, own=one.own)) for one in known]
        allowed = [(one, answer) for one, answer in answers if isinstance(answer, AllowAddress)]
        for _, refused in answers:
            if not allowed and isinstance(refused, Deny):
                raise _refusal(refused)
        routed = [(one, answer) for one, answer in allowed if sources[one.address] is not None]
        if not routed:
            raise DialError(DialFailure.CONNECT, "the gateway's host has no route to an address of the host")
        return [one for one, answer in sorted(routed, key=lambda pair: pair[1].observed is not None)]

    def _judged(self, destination: Destination) -> AllowAddress:
        """Judge the destination under the present policy and guard; both can change at each wait."""
        answer = judge(self._usable(), destination, own=destination.own)
        if isinstance(answer, Deny):
            raise _refusal(answer)
        return answer


def is_own(address: IPv4Address | IPv6Address, source_address: IPv4Address | IPv6Address | None) -> bool:
    """Return whether an address belongs to this host: packets to it have it as their source."""
    return address == source_address


def literal(address: IPv4Address | IPv6Address, port: int) -> Destination:
    """Return the destination of a TLS flow without a server name."""
    return Destination(None, address, port, Scheme.HTTPS, AddressSource.LITERAL)


def judge(config: GatewayConfig, destination: Destination, *, own: bool | None = None) -> AllowAddress | Deny:
    """Judge `destination` with the operator's exceptions.

    Args:
        own: whether the address is one of this host; None to ask the kernel.
    """
    own = own_address(destination.address) if own is None else own
    return config.address(destination if destination.own is own else replace(destination, own=own))


def judge_flow(config: GatewayConfig, facts: FlowFacts) -> AllowFlow | Deny:
    """Judge a flow with a known server name."""
    return config.flow(facts)


def judge_answer(
    config: GatewayConfig, host: str, address: IPv4Address | IPv6Address, source: AddressSource
) -> AllowAddress | Deny:
    """Judge whether a DNS answer for `host` may contain this address."""
    return decide_answer(
        config.policy, host, address, source, config.constants.allowed_addresses, own=own_address(address)
    )


def _refusal(denied: Deny) -> DialError:
    special = denied.rule.startswith("address-class:")
    return DialError(DialFailure.ADDRESS if special else DialFailure.POLICY, denied.reason, denied.rule)


async def _connected(address: IPv4Address | IPv6Address, port: int) -> socket.socket:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await connect(sock, address, port)
    except BaseException:
        sock.close()
        raise
    return sock
