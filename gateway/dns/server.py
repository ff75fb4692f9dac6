"""Serves DNS to the sandbox over the sockets in its gateway namespace. `gateway.dns.queries` judges the queries.

- The audit log accepts a record of each allowed query before anything is sent upstream. Without the log the answer is
  SERVFAIL. A denial is recorded before its answer, or later if the log is away. Floods (rate, malformed) are counted in
  one record per second.
- An answer contains only IPv4 addresses that the gateway may dial. If it may dial only IPv6 addresses of a name, the
  answer is `STAND_IN`. The record has every address of the name that may be dialled.
- A UDP query above the rate waits for its turn, and is judged under the policy in force then.
- The numbers of queries under way, of TCP connections and of queries per connection are limited, and all waits have
  deadlines. Above a limit a UDP query is dropped and a TCP connection is closed. A TCP connection is also closed after
  the answer to a query of a flood.
- While the sandbox is paused, UDP queries are dropped, and TCP queries wait for the resume.
- A malformed query or a failing socket does not end the service.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address
from typing import Any, Final

from audit.client import AuditClient, AuditUnavailable
from gateway.config import GatewayConfig
from gateway.described import of_policy
from gateway.dns.message import QType
from gateway.dns.names import PATIENCE, NameBudget
from gateway.dns.queries import (
    DnsEvent,
    Drop,
    Later,
    Outcome,
    QueryAnswer,
    Resolve,
    Verdict,
    handle,
    reply_limit,
    resolved,
    unavailable,
)
from gateway.dns.resolver import MAX_TTL, Resolver
from gateway.state import WorkerState
from gateway.upstream import judge_answer
from policy.decision import AllowAddress, Deny
from policy.facts import AddressSource

STAND_IN: Final = IPv4Address("192.0.0.8")
"""The answer for a name with IPv6 addresses only: the IPv4 dummy address of RFC 7600, which no host has.

The sandbox's TCP packets to any address arrive at the worker, which dials addresses of the name that the client sends.
Without a name the dial of this address is denied: it is in a reserved range.
"""
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
        state: while it has no configuration, every query is refused.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        resolver: Resolver,
        audit: AuditClient,
        state: WorkerState,
        clock: Callable[[], float],
        names: NameBudget,
    ) -> None:
        self._resolver = resolver
        self._audit = audit
        self._state = state
        self._clock = clock
        self._names = names
        self._in_flight: set[asyncio.Task[None]] = set()
        self._connections: set[asyncio.Task[None]] = set()

    def start_udp(self, sock: socket.socket) -> None:
        """Serve the datagrams of `sock` from now on. Returns at once."""
        sock.setblocking(False)
        asyncio.get_running_loop().add_reader(sock.fileno(), self._readable, sock)

    async def serve_tcp(self, listener: socket.socket) -> None:
        """Accept connections until cancelled."""
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
                _log.warning("cannot read from the DNS socket: %s", type(error).__name__)
                return
            if not self._state.moving.is_set():
                continue
            verdict = self._judge(data, PATIENCE)
            if isinstance(verdict, Drop) or len(self._in_flight) >= _MAX_IN_FLIGHT:
                continue
            if isinstance(verdict, QueryAnswer) and self._counted(verdict.event):
                _reply(sock, verdict.data, peer)
                continue
            task = asyncio.get_running_loop().create_task(self._datagram(sock, data, verdict, peer), name="dns-udp")
            self._in_flight.add(task)
            task.add_done_callback(self._in_flight.discard)

    def _judge(self, data: bytes, patience: float | None) -> Verdict:
        config = self._state.config
        policy = config.policy if config is not None else None
        return handle(data, policy, self._names, self._clock(), patience)

    async def _datagram(self, sock: socket.socket, data: bytes, verdict: Verdict, peer: tuple[str, int]) -> None:
        if isinstance(verdict, Later):
            await asyncio.sleep(verdict.seconds)
            verdict = self._judge(data, None)
        if not self._state.moving.is_set():
            return  # the client repeats its query
        if not isinstance(verdict, QueryAnswer | Resolve):
            return
        if isinstance(verdict, QueryAnswer) and self._counted(verdict.event):
            _reply(sock, verdict.data, peer)
            return
        limit = reply_limit(verdict.query) if isinstance(verdict, Resolve) else _MAX_DATAGRAM
        _reply(sock, await self._carry_out(verdict, limit), peer)

    async def _carry_out(self, verdict: QueryAnswer | Resolve, limit: int) -> bytes:
        """Record the verdict, carry it out, return the answer. Raises only if cancelled."""
        try:
            await self._accept(verdict.event)
        except AuditUnavailable:
            if isinstance(verdict, Resolve):
                return unavailable(verdict)
            self._note(verdict.event)  # denied anyway; the record is sent when the log is back
            return verdict.data
        if isinstance(verdict, QueryAnswer):
            return verdict.data
        return await self._resolve(verdict, limit)

    async def _resolve(self, verdict: Resolve, limit: int) -> bytes:
        config = self._state.config
        if config is None:
            return unavailable(verdict)
        mapped = config.constants.host_addresses.get(verdict.host)
        source = AddressSource.RESOLVED if mapped is None else AddressSource.MAPPED
        outcome, addresses, ttl = Outcome.ADDRESSES, mapped or (), MAX_TTL
        if mapped is None:
            resolution = await self._resolver.resolve(verdict.host, counted=True)
            outcome, addresses, ttl = resolution.outcome, resolution.addresses, resolution.ttl
            config = self._state.config  # it may have been replaced during the wait
            if resolution.denied is not None:
                denied = resolution.denied
                self._audit.note("dns", "deny", host=verdict.host, rule=denied.rule, reason=denied.reason)
            if config is None or resolution.denied is not None:
                return unavailable(verdict)
        shown, refused = _dialable(config, verdict.host, addresses, source)
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
        answer = tuple(item for item in shown if isinstance(item, IPv4Address)) or (STAND_IN,)
        return resolved(verdict, outcome, answer, ttl, limit)

    async def _accept(self, event: DnsEvent) -> None:
        await self._audit.accept("dns", event.decision.value, **self._fields(event))

    def _counted(self, event: DnsEvent) -> bool:
        """Count a verdict that can come in floods. True if it was counted and needs no record of its own."""
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
            **of_policy(self._state.config, event.rule),
        }

    async def _connection(self, peer: socket.socket) -> None:
        with peer:
            try:
                for _ in range(_MAX_TCP_QUERIES):
                    async with asyncio.timeout(_TCP_IDLE_SECONDS):
                        data = await _message(peer)
                    if data is None:
                        return
                    await self._state.moving.wait()
                    verdict = self._judge(data, 0.0)
                    if not isinstance(verdict, QueryAnswer | Resolve):
                        return
                    if isinstance(verdict, QueryAnswer) and self._counted(verdict.event):
                        await _send(peer, verdict.data)
                        return
                    await _send(peer, await self._carry_out(verdict, 65535))
            except (OSError, TimeoutError):
                return


def _dialable(
    config: GatewayConfig, host: str, addresses: tuple[IPv4Address | IPv6Address, ...], source: AddressSource
) -> tuple[tuple[IPv4Address | IPv6Address, ...], Deny | None]:
    """Return the addresses that the gateway may dial, and the denial of a refused one."""
    answers = {item: judge_answer(config, host, item, source) for item in addresses}
    refused = next((answer for answer in answers.values() if isinstance(answer, Deny)), None)
    return tuple(item for item, answer in answers.items() if isinstance(answer, AllowAddress)), refused


def _reply(sock: socket.socket, data: bytes, peer: tuple[str, int]) -> None:
    try:
        sock.sendto(data, peer)
    except OSError as error:  # full buffer or invalid address: the client repeats its query
        _log.debug("cannot send a DNS answer: %s", type(error).__name__)


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
    """Read one framed message. None at the end of the stream, or for a length that no query has."""
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
