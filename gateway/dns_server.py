"""Serves DNS to the sandbox over the sockets in its gateway namespace.

- Each allowed query is accepted into the audit log before anything of it goes upstream; without the log the answer is
  SERVFAIL. Denials are accepted before they are answered, or noted for later while there is no log; floods (rate,
  malformed) are counted, a record for each second.
- Only addresses the gateway itself would dial are answered.
- A UDP query over the rate waits for its turn, and is judged by what is in force then.
- Queries in flight, TCP connections, queries per connection and all waiting times are bounded; beyond them a UDP
  query is dropped and a TCP connection closed. So is, after its answer, one that brings a query of a flood.
- One bad query, or a failing socket, never ends the service.

What a query gets is decided in `gateway.dns_logic`.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address
from typing import Any

from audit.client import AuditClient, AuditUnavailable
from gateway.config import GatewayConfig
from gateway.described import of_policy
from gateway.dns_logic import (
    Answer,
    DnsEvent,
    Drop,
    Later,
    Outcome,
    Resolve,
    Verdict,
    handle,
    reply_limit,
    resolved,
    unavailable,
)
from gateway.dns_wire import QType
from gateway.names import PATIENCE, NameBudget
from gateway.resolver import MAX_TTL, Resolver
from gateway.upstream import judge_answer
from policy.decision import AllowAddress, Deny
from policy.facts import AddressSource

_MAX_IN_FLIGHT = 256
_MAX_DATAGRAM = 4096
_PER_WAKE = 64
_MAX_TCP = 32
_MAX_TCP_QUERIES = 100
_TCP_IDLE_SECONDS = 10.0
_MAX_TCP_QUERY = 1024

_log = logging.getLogger(__name__)


class DnsServer:
    """The DNS service of one worker.

    Args:
        config: the active configuration, None before the first one: every query is refused then.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        resolver: Resolver,
        audit: AuditClient,
        config: Callable[[], GatewayConfig | None],
        clock: Callable[[], float],
        names: NameBudget,
    ) -> None:
        self._resolver = resolver
        self._audit = audit
        self._config = config
        self._clock = clock
        self._names = names
        self._in_flight: set[asyncio.Task[None]] = set()
        self._connections: set[asyncio.Task[None]] = set()

    def start_udp(self, sock: socket.socket) -> None:
        """Serve datagrams of `sock` from now on."""
        sock.setblocking(False)
        asyncio.get_running_loop().add_reader(sock.fileno(), self._readable, sock)

    async def serve_tcp(self, listener: socket.socket) -> None:
        """Accept connections for ever."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            if len(self._connections) >= _MAX_TCP:
                peer.close()
                continue
            task = loop.create_task(self._connection(peer), name="dns-tcp")
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    def _readable(self, sock: socket.socket) -> None:
        for _ in range(_PER_WAKE):
            try:
                data, peer = sock.recvfrom(_MAX_DATAGRAM)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                _log.warning("dns socket: %s", type(error).__name__)
                return
            verdict = self._judge(data, PATIENCE)
            if isinstance(verdict, Drop) or len(self._in_flight) >= _MAX_IN_FLIGHT:
                continue
            if isinstance(verdict, Answer) and self._counted(verdict.event):
                _reply(sock, verdict.data, peer)
                continue
            task = asyncio.get_running_loop().create_task(self._datagram(sock, data, verdict, peer), name="dns-udp")
            self._in_flight.add(task)
            task.add_done_callback(self._in_flight.discard)

    def _judge(self, data: bytes, patience: float | None) -> Verdict:
        config = self._config()
        policy = config.policy if config is not None else None
        return handle(data, policy, self._names, self._clock(), patience)

    async def _datagram(self, sock: socket.socket, data: bytes, verdict: Verdict, peer: tuple[str, int]) -> None:
        if isinstance(verdict, Later):
            await asyncio.sleep(verdict.seconds)
            verdict = self._judge(data, None)
        if not isinstance(verdict, Answer | Resolve):
            return
        if isinstance(verdict, Answer) and self._counted(verdict.event):
            _reply(sock, verdict.data, peer)
            return
        limit = reply_limit(verdict.query) if isinstance(verdict, Resolve) else _MAX_DATAGRAM
        _reply(sock, await self._carry_out(verdict, limit), peer)

    async def _carry_out(self, verdict: Answer | Resolve, limit: int) -> bytes:
        """Record the verdict, do what it says, return the answer. Never raises but for cancellation."""
        try:
            await self._accept(verdict.event)
        except AuditUnavailable:
            if isinstance(verdict, Resolve):
                return unavailable(verdict)
            self._note(verdict.event)  # it is denied all the same; the log is told when it is back
            return verdict.data
        if isinstance(verdict, Answer):
            return verdict.data
        return await self._resolve(verdict, limit)

    async def _resolve(self, verdict: Resolve, limit: int) -> bytes:
        config = self._config()
        if config is None:
            return unavailable(verdict)
        mapped = config.host_addresses.get(verdict.host)
        source = AddressSource.RESOLVED if mapped is None else AddressSource.MAPPED
        outcome, addresses, ttl = Outcome.ADDRESSES, mapped or (), MAX_TTL
        if mapped is None:
            resolution = await self._resolver.resolve(verdict.host, counted=True)
            outcome, addresses, ttl = resolution.outcome, resolution.addresses, resolution.ttl
            config = self._config()  # the one in force now: it may have been replaced meanwhile
            if resolution.denied is not None:
                denied = resolution.denied
                self._audit.note("dns", "deny", host=verdict.host, rule=denied.rule, reason=denied.reason)
            if config is None or resolution.denied is not None:
                return unavailable(verdict)
        shown, refused = _shown(config, verdict.host, addresses, source)
        if outcome is Outcome.ADDRESSES and not shown:
            outcome = Outcome.NODATA if refused is None else Outcome.REFUSED_ADDRESS
        self._audit.note(
            "dns",
            "deny" if outcome is Outcome.REFUSED_ADDRESS else "info",
            host=verdict.host,
            rule=refused.rule if outcome is Outcome.REFUSED_ADDRESS and refused is not None else None,
            reason=outcome.value,
            addresses=[str(item) for item in shown],
        )
        return resolved(verdict, outcome, shown, ttl, limit)

    async def _accept(self, event: DnsEvent) -> None:
        await self._audit.accept("dns", event.decision.value, **self._fields(event))

    def _counted(self, event: DnsEvent) -> bool:
        """Whether it is one of a flood; then it has been counted and needs no other record."""
        if event.aggregate:
            self._audit.count("dns", event.decision.value, **self._fields(event))
        return event.aggregate

    def _note(self, event: DnsEvent) -> None:
        self._audit.note("dns", event.decision.value, **self._fields(event))

    def _fields(self, event: DnsEvent) -> dict[str, Any]:
        return {
            "rule": event.rule,
            "reason": event.reason or None,
            "observed": event.observed,
            "host": event.host,
            "qtype": _qtype(event.qtype),
            **of_policy(self._config(), event.rule),
        }

    async def _connection(self, peer: socket.socket) -> None:
        with peer:
            try:
                for _ in range(_MAX_TCP_QUERIES):
                    async with asyncio.timeout(_TCP_IDLE_SECONDS):
                        data = await _message(peer)
                    if data is None:
                        return
                    verdict = self._judge(data, 0.0)
                    if not isinstance(verdict, Answer | Resolve):
                        return
                    if isinstance(verdict, Answer) and self._counted(verdict.event):
                        await _send(peer, verdict.data)
                        return
                    await _send(peer, await self._carry_out(verdict, 65535))
            except (OSError, TimeoutError):
                return


def _shown(
    config: GatewayConfig, host: str, addresses: tuple[IPv4Address | IPv6Address, ...], source: AddressSource
) -> tuple[tuple[IPv4Address | IPv6Address, ...], Deny | None]:
    """The IPv4 addresses that may be shown, and the denial of one that may not."""
    answers = {item: judge_answer(config, host, item, source) for item in addresses if item.version == 4}
    refused = next((answer for answer in answers.values() if isinstance(answer, Deny)), None)
    return tuple(item for item, answer in answers.items() if isinstance(answer, AllowAddress)), refused


def _reply(sock: socket.socket, data: bytes, peer: tuple[str, int]) -> None:
    try:
        sock.sendto(data, peer)
    except OSError as error:  # a full buffer or an impossible peer: the client asks again
        _log.debug("dns answer not sent: %s", type(error).__name__)


async def _send(peer: socket.socket, answer: bytes) -> None:
    async with asyncio.timeout(_TCP_IDLE_SECONDS):
        await asyncio.get_running_loop().sock_sendall(peer, len(answer).to_bytes(2, "big") + answer)


def _qtype(value: int | None) -> str | None:
    if value is None:
        return None
    try:
        return QType(value).name
    except ValueError:
        return f"TYPE{value}"


async def _message(peer: socket.socket) -> bytes | None:
    """One framed message, or None when the client ended or sent a length that no query has."""
    prefix = await _exactly(peer, 2)
    if prefix is None:
        return None
    length = int.from_bytes(prefix, "big")
    return await _exactly(peer, length) if 0 < length <= _MAX_TCP_QUERY else None


async def _exactly(peer: socket.socket, count: int) -> bytes | None:
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < count:
        part = await loop.sock_recv(peer, count - len(data))
        if not part:
            return None
        data += part
    return bytes(data)
