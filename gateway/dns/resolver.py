"""The gateway's own resolver: A and AAAA records of a name, only from the configured upstreams (IPv4 or IPv6).

- Each query has a new connected UDP socket with a random port (chosen by the kernel) and a random id. An answer is
  accepted only from that upstream, with that id and that question. Other datagrams are ignored until the deadline.
- Only the answer section is read: the CNAME chain from the question (at most `_MAX_CHAIN` links) and the addresses at
  its end. Records of other names are ignored.
- Both types are queried at once, AAAA only if the host can reach IPv6 addresses. If one has addresses, the answer to
  the other has half a second left. Addresses alternate between the families, IPv4 first. An IPv4-mapped address is its
  IPv4 address.
- A truncated answer is repeated once over TCP. Every step has a deadline. The number of concurrent resolutions is
  limited, and equal questions share one resolution.
- If no upstream answers, the outcome is `Outcome.FAILED`. There is no fallback to the host's resolver or hosts file.
- No query is sent for a name that `may_ask` refuses, whether the name came by DNS, TLS or HTTP. An uncached name also
  takes a token of the rate of names; a DNS query has taken its token before.
- `discard` and a change of upstreams invalidate the lookups under way: their results are neither cached nor answered.
  Each caller is then judged again, and resolves again if the name is still allowed.

The resolver serves one sandbox; its cache is never shared. `gateway.upstream` and `gateway.dns.server` judge addresses.
"""

import asyncio
import contextlib
import secrets
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from itertools import chain, zip_longest

from gateway.dns.message import (
    CLASS_IN,
    Labels,
    MalformedMessage,
    QType,
    RCode,
    UpstreamAnswer,
    build_query,
    encode_name,
    parse_answer,
    parse_header,
)
from gateway.dns.names import RATE
from gateway.dns.queries import Outcome, Upstream
from policy.decision import Deny
from policy.names import InvalidName, wire_host
from wire.dialling import connect
from wire.patience import Patience

MIN_TTL = 5
MAX_TTL = 300
NEGATIVE_TTL = 10
_FAILURE_TTL = 2
_MAX_CHAIN = 8
_MAX_ADDRESSES = 16
_CACHE_SIZE = 512
_MAX_IN_FLIGHT = 64
_TRY_SECONDS = 2.0
_TOTAL_SECONDS = 8.0
_OTHER_SECONDS = 0.5
_ROUNDS = 2
_SOCKET_BUFFER = 4096
_MAX_TCP_ANSWER = 16384
_MAX_DISCARDED = 8
_SIZES = {QType.A: 4, QType.AAAA: 16}


@dataclass(frozen=True, slots=True)
class Resolution:
    """The result of a resolution. `ttl` is in seconds, within limits. `denied` is set if the name was refused."""

    outcome: Outcome
    addresses: tuple[IPv4Address | IPv6Address, ...] = ()
    ttl: int = 0
    denied: Deny | None = None


_FAILED = Resolution(Outcome.FAILED, ttl=_FAILURE_TTL)


class Resolver:
    """Resolves names for one worker.

    Args:
        upstreams: resolvers, tried in order.
        clock: monotonic seconds, for the cache.
        allowed: while it returns False (no guard), every resolution fails without a query.
        may_ask: returns a denial for a name that must not be resolved.
        turn: takes a token of the rate of names; returns the seconds to wait for it, None if these are too many.
        ipv6: whether the host can reach IPv6 addresses.
    """

    def __init__(
        self,
        upstreams: tuple[Upstream, ...],
        clock: Callable[[], float],
        allowed: Callable[[], bool] = lambda: True,
        may_ask: Callable[[str], Deny | None] = lambda _host: None,
        turn: Callable[[], float | None] = lambda: 0.0,
        ipv6: Callable[[], bool] = lambda: False,
    ) -> None:
        self._upstreams = upstreams
        self._clock = clock
        self._allowed = allowed
        self._may_ask = may_ask
        self._turn = turn
        self._ipv6 = ipv6
        self._cache: OrderedDict[str, tuple[float, Resolution]] = OrderedDict()
        self._running: dict[str, asyncio.Task[Resolution]] = {}
        self._epoch = 0

    def set_upstreams(self, upstreams: tuple[Upstream, ...]) -> None:
        """Use other upstreams from now on; drop cached results and lookups under way."""
        if upstreams != self._upstreams:
            self._upstreams = upstreams
            self._cache.clear()
            self.discard()

    def discard(self) -> None:
        """Cancel all lookups under way; their results are neither cached nor answered."""
        self._epoch += 1
        running, self._running = self._running, {}
        for task in running.values():
            task.cancel()

    async def resolve(self, host: str, *, counted: bool = False) -> Resolution:
        """Resolve a canonical host name. Raises only if cancelled.

        Args:
            counted: the caller has already taken a token of the rate of names.
        """
        for _ in range(_MAX_DISCARDED):
            epoch = self._epoch
            denied = self._may_ask(host)
            if denied is not None:
                return Resolution(Outcome.FAILED, denied=denied)
            known = self._known(host)
            if known is not None:
                return known
            if host not in self._running and not counted:
                wait = self._turn()
                if wait is None:
                    return Resolution(Outcome.FAILED, denied=Deny(RATE, "The sandbox exceeds its rate of names."))
                counted = True
                if wait > 0:
                    await asyncio.sleep(wait)
                    continue
            task = self._running.get(host) or self._begin(host)
            if task is None:
                return Resolution(Outcome.FAILED)
            await asyncio.wait([task])
            if epoch == self._epoch:
                return task.result()
        return Resolution(Outcome.FAILED)

    def _known(self, host: str) -> Resolution | None:
        cached = self._cache.get(host)
        if cached is None or cached[0] <= self._clock():
            return None
        left = max(1, int(cached[0] - self._clock()))
        return Resolution(cached[1].outcome, cached[1].addresses, min(cached[1].ttl, left))

    def _begin(self, host: str) -> asyncio.Task[Resolution] | None:
        if len(self._running) >= _MAX_IN_FLIGHT or not self._allowed():
            return None
        task = asyncio.get_running_loop().create_task(self._fresh(host), name="resolve")
        self._running[host] = task
        task.add_done_callback(lambda done: self._ended(host, done))
        return task

    def _ended(self, host: str, task: asyncio.Task[Resolution]) -> None:
        if self._running.get(host) is task:
            del self._running[host]

    async def _fresh(self, host: str) -> Resolution:
        epoch = self._epoch
        try:
            async with Patience(_TOTAL_SECONDS):
                result = await (self._both(host) if self._ipv6() else self._one(host, QType.A))
        except TimeoutError:
            result = _FAILED
        if epoch != self._epoch:
            return result
        self._cache[host] = (self._clock() + result.ttl, result)
        self._cache.move_to_end(host)
        while len(self._cache) > _CACHE_SIZE:
            self._cache.popitem(last=False)
        return result

    async def _both(self, host: str) -> Resolution:
        """Query both types. Once one has addresses or the name does not exist, wait `_OTHER_SECONDS` for the other."""
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._one(host, qtype), name="resolve") for qtype in (QType.A, QType.AAAA)]
        try:
            ended, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            enough = any(task.result().outcome in (Outcome.ADDRESSES, Outcome.NXDOMAIN) for task in ended)
            with contextlib.suppress(TimeoutError):
                async with Patience(_OTHER_SECONDS if enough else None):
                    await asyncio.gather(*others)
            return _joined(*(task.result() if task.done() and not task.cancelled() else _FAILED for task in tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, host: str, qtype: QType) -> Resolution:
        try:
            return await self._follow(host, qtype)
        except (OSError, MalformedMessage):
            return _FAILED

    async def _follow(self, host: str, qtype: QType) -> Resolution:
        """Query `host`. If the answer ends with a CNAME without addresses, query its target too."""
        ttl = MAX_TTL
        seen: set[Labels] = {_labels(host)}
        for _ in range(_MAX_CHAIN):
            answer = await self._ask(host, qtype)
            if answer.header.rcode == RCode.NXDOMAIN:
                return Resolution(Outcome.NXDOMAIN, ttl=NEGATIVE_TTL)
            end, addresses, ttl = _chain(answer, qtype, ttl, seen)
            if addresses:
                return Resolution(Outcome.ADDRESSES, addresses, max(MIN_TTL, ttl))
            if end == answer.question.labels:
                return Resolution(Outcome.NODATA, ttl=NEGATIVE_TTL)
            try:
                host = wire_host(b".".join(end))
            except InvalidName:
                raise MalformedMessage("an alias is no host name") from None
            if _labels(host) != end:
                raise MalformedMessage("an alias is no canonical host name")
        raise MalformedMessage("the chain of aliases is too long")

    async def _ask(self, host: str, qtype: QType) -> UpstreamAnswer:
        for _ in range(_ROUNDS):
            for upstream in self._upstreams:
                if not self._allowed():
                    raise ConnectionError("the guard of the upstream namespace is not running")
                try:
                    async with Patience(_TRY_SECONDS):
                        answer = await _ask_udp(upstream, host, qtype)
                        if answer.header.truncated:
                            answer = await _ask_tcp(upstream, host, qtype)
                except (TimeoutError, OSError, MalformedMessage):
                    continue
                if answer.header.rcode in (RCode.NOERROR, RCode.NXDOMAIN) and not answer.header.truncated:
                    return answer
        raise ConnectionError("no upstream gave a usable answer")


def _labels(host: str) -> Labels:
    return tuple(host.encode("ascii").split(b"."))


def _joined(four: Resolution, six: Resolution) -> Resolution:
    """Return one resolution of both types: the addresses of both, otherwise the most that is known of the name."""
    found = [one for one in (four, six) if one.outcome is Outcome.ADDRESSES]
    if found:
        pairs = zip_longest(four.addresses, six.addresses)
        addresses = dict.fromkeys(address for address in chain.from_iterable(pairs) if address is not None)
        return Resolution(Outcome.ADDRESSES, tuple(addresses)[:_MAX_ADDRESSES], min(one.ttl for one in found))
    known = (Outcome.NXDOMAIN, Outcome.FAILED, Outcome.NODATA)
    return min(four, six, key=lambda one: known.index(one.outcome))


def _address(data: bytes) -> IPv4Address | IPv6Address:
    if len(data) == _SIZES[QType.A]:
        return IPv4Address(data)
    address = IPv6Address(data)
    return address.ipv4_mapped or address


def _chain(
    answer: UpstreamAnswer, qtype: QType, ttl: int, seen: set[Labels]
) -> tuple[Labels, tuple[IPv4Address | IPv6Address, ...], int]:
    """Follow the CNAMEs from the question; return the last name, its addresses and the smallest TTL."""
    name = answer.question.labels
    aliases = {record.owner: record for record in answer.records if record.target is not None and record.rclass == 1}
    for _ in range(_MAX_CHAIN + 1):
        addresses = [
            record
            for record in answer.records
            if (record.owner, record.rtype, record.rclass) == (name, qtype, CLASS_IN)
            and len(record.data) == _SIZES[qtype]
        ]
        if addresses:
            ttl = min([ttl, *(record.ttl for record in addresses)])
            unique = dict.fromkeys(_address(record.data) for record in addresses)
            return name, tuple(unique)[:_MAX_ADDRESSES], ttl
        alias = aliases.get(name)
        if alias is None or alias.target is None:
            return name, (), ttl
        if alias.target in seen:
            raise MalformedMessage("the chain of aliases has a loop")
        seen.add(alias.target)
        ttl = min(ttl, alias.ttl)
        name = alias.target
    raise MalformedMessage("the chain of aliases is too long")


def _matches(data: bytes, ident: int, host: str, qtype: QType) -> UpstreamAnswer | None:
    """Return the answer in `data`, None if it does not belong to this query.

    Raises:
        MalformedMessage: the answer belongs to this query, but is malformed.
    """
    try:
        header = parse_header(data)
    except MalformedMessage:
        return None
    if not header.is_response or header.ident != ident or header.opcode != 0:
        return None
    question = encode_name(host) + struct.pack("!HH", qtype, CLASS_IN)
    if header.questions != 1 or data[12 : 12 + len(question)].lower() != question.lower():
        return None
    return parse_answer(data)


def _family(upstream: Upstream) -> socket.AddressFamily:
    return socket.AF_INET if upstream.address.version == 4 else socket.AF_INET6


def _udp_socket(upstream: Upstream) -> socket.socket:
    """Return a connected socket at a port of the kernel's choice: a worker cannot bind to a port."""
    sock = socket.socket(_family(upstream), socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.connect((str(upstream.address), upstream.port))
    except BaseException:
        sock.close()
        raise
    return sock


async def _ask_udp(upstream: Upstream, host: str, qtype: QType) -> UpstreamAnswer:
    loop = asyncio.get_running_loop()
    ident = secrets.randbelow(65536)
    with _udp_socket(upstream) as sock:
        await loop.sock_sendall(sock, build_query(ident, host, qtype))
        while True:
            answer = _matches(await loop.sock_recv(sock, _SOCKET_BUFFER), ident, host, qtype)
            if answer is not None:
                return answer


async def _ask_tcp(upstream: Upstream, host: str, qtype: QType) -> UpstreamAnswer:
    loop = asyncio.get_running_loop()
    ident = secrets.randbelow(65536)
    query = build_query(ident, host, qtype)
    with socket.socket(_family(upstream), socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as sock:
        await connect(sock, upstream.address, upstream.port)
        await loop.sock_sendall(sock, struct.pack("!H", len(query)) + query)
        (length,) = struct.unpack("!H", await _exactly(sock, 2))
        if length > _MAX_TCP_ANSWER:
            raise MalformedMessage("the answer is too large")
        answer = _matches(await _exactly(sock, length), ident, host, qtype)
    if answer is None:
        raise MalformedMessage("answer to another question")
    return answer


async def _exactly(sock: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < count:
        part = await loop.sock_recv(sock, count - len(data))
        if not part:
            raise MalformedMessage("stream ended inside an answer")
        data += part
    return bytes(data)
