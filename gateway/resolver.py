"""The gateway's own resolver: A records of one name, from the configured upstreams (IPv4 or IPv6) and nobody else.

- Each query leaves from a fresh connected UDP socket with a random port (the kernel's choice) and a random id; an
  answer counts only from that peer, with that id and that very question. Anything else is ignored until the deadline.
- Only the answer section is read, and of it only the CNAME chain that starts at the question (`_MAX_CHAIN`) and the
  addresses at its end: an answer can say nothing about another name.
- A truncated answer is asked again over TCP, once. Everything has a deadline; concurrent questions are bounded and
  equal ones share one resolution.
- No upstream answers: `Outcome.FAILED`. There is no fallback to the host's resolver or name files.

- A name that `may_ask` refuses is refused: no query for it leaves, whichever protocol the name came in. A name that is
  not known yet also needs a place in the rate of names; a DNS question has taken its own before.
- `discard` and a change of upstreams make the lookups under way worthless: nothing of them is cached or answered. Their
  callers are judged again, and ask again if the name may still be asked for.

It does not judge addresses (`gateway.upstream` and `gateway.dns_server` do) and serves one sandbox only: its cache is
never shared.
"""

import asyncio
import secrets
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from gateway.dns_logic import Outcome
from gateway.dns_wire import (
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
from gateway.names import RATE
from policy.decision import Deny
from policy.names import InvalidName, wire_host
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
_ROUNDS = 2
_SOCKET_BUFFER = 4096
_MAX_TCP_ANSWER = 16384
_MAX_DISCARDED = 8


@dataclass(frozen=True, slots=True)
class Resolution:
    """How a name resolved; `ttl` in seconds, already clamped. `denied` says what refused the question itself."""

    outcome: Outcome
    addresses: tuple[IPv4Address, ...] = ()
    ttl: int = 0
    denied: Deny | None = None


@dataclass(frozen=True, slots=True)
class Upstream:
    """Where to ask."""

    address: IPv4Address | IPv6Address
    port: int

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET if self.address.version == 4 else socket.AF_INET6


class _NoAnswer(Exception):
    """This upstream gave nothing usable."""


class Resolver:
    """Resolves names for one worker.

    Args:
        upstreams: asked in order.
        clock: monotonic seconds, for the cache.
        allowed: False forbids any query (the guard is gone): every resolution then fails.
        may_ask: a denial forbids queries for this name.
        turn: takes a place in the rate of names; in how many seconds it comes, None when there is none.
    """

    def __init__(
        self,
        upstreams: tuple[Upstream, ...],
        clock: Callable[[], float],
        allowed: Callable[[], bool] = lambda: True,
        may_ask: Callable[[str], Deny | None] = lambda _host: None,
        turn: Callable[[], float | None] = lambda: 0.0,
    ) -> None:
        self._upstreams = upstreams
        self._clock = clock
        self._allowed = allowed
        self._may_ask = may_ask
        self._turn = turn
        self._cache: OrderedDict[str, tuple[float, Resolution]] = OrderedDict()
        self._running: dict[str, asyncio.Task[Resolution]] = {}
        self._epoch = 0

    def set_upstreams(self, upstreams: tuple[Upstream, ...]) -> None:
        """Ask others from now on, and forget what the former ones said or are about to say."""
        if upstreams != self._upstreams:
            self._upstreams = upstreams
            self._cache.clear()
            self.discard()

    def discard(self) -> None:
        """End all lookups under way; what they would find is neither kept nor answered."""
        self._epoch += 1
        running, self._running = self._running, {}
        for task in running.values():
            task.cancel()

    async def resolve(self, host: str, *, counted: bool = False) -> Resolution:
        """Resolve a checked host name to IPv4 addresses. Never raises but for cancellation.

        Args:
            counted: the caller has taken a place in the rate of names already.
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
                    return Resolution(Outcome.FAILED, denied=Deny(RATE, "The rate of names is exceeded."))
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
                result = await self._follow(host)
        except (TimeoutError, OSError, MalformedMessage, _NoAnswer):
            result = Resolution(Outcome.FAILED, ttl=_FAILURE_TTL)
        if epoch != self._epoch:
            return result
        self._cache[host] = (self._clock() + result.ttl, result)
        self._cache.move_to_end(host)
        while len(self._cache) > _CACHE_SIZE:
            self._cache.popitem(last=False)
        return result

    async def _follow(self, host: str) -> Resolution:
        """Ask for `host`, and again for the end of its CNAME chain where an answer stops there."""
        ttl = MAX_TTL
        seen: set[Labels] = {_labels(host)}
        for _ in range(_MAX_CHAIN):
            answer = await self._ask(host)
            if answer.header.rcode == RCode.NXDOMAIN:
                return Resolution(Outcome.NXDOMAIN, ttl=NEGATIVE_TTL)
            end, addresses, ttl = _chain(answer, ttl, seen)
            if addresses:
                return Resolution(Outcome.ADDRESSES, addresses, max(MIN_TTL, ttl))
            if end == answer.question.labels:
                return Resolution(Outcome.NODATA, ttl=NEGATIVE_TTL)
            try:
                host = wire_host(b".".join(end))
            except InvalidName:
                raise _NoAnswer from None
            if _labels(host) != end:
                raise _NoAnswer
        raise _NoAnswer

    async def _ask(self, host: str) -> UpstreamAnswer:
        for _ in range(_ROUNDS):
            for upstream in self._upstreams:
                if not self._allowed():
                    raise _NoAnswer
                try:
                    async with Patience(_TRY_SECONDS):
                        answer = await _ask_udp(upstream, host)
                        if answer.header.truncated:
                            answer = await _ask_tcp(upstream, host)
                except (TimeoutError, OSError, MalformedMessage):
                    continue
                if answer.header.rcode in (RCode.NOERROR, RCode.NXDOMAIN) and not answer.header.truncated:
                    return answer
        raise _NoAnswer


def _labels(host: str) -> Labels:
    return tuple(host.encode("ascii").split(b"."))


def _chain(answer: UpstreamAnswer, ttl: int, seen: set[Labels]) -> tuple[Labels, tuple[IPv4Address, ...], int]:
    """Walk the CNAMEs from the question to their end; returns the end, its addresses and the smallest TTL."""
    name = answer.question.labels
    aliases = {record.owner: record for record in answer.records if record.target is not None and record.rclass == 1}
    for _ in range(_MAX_CHAIN + 1):
        addresses = [
            record
            for record in answer.records
            if record.owner == name and record.rtype == QType.A and record.rclass == CLASS_IN and len(record.data) == 4
        ]
        if addresses:
            ttl = min([ttl, *(record.ttl for record in addresses)])
            unique = dict.fromkeys(IPv4Address(record.data) for record in addresses)
            return name, tuple(unique)[:_MAX_ADDRESSES], ttl
        alias = aliases.get(name)
        if alias is None or alias.target is None:
            return name, (), ttl
        if alias.target in seen:
            raise _NoAnswer
        seen.add(alias.target)
        ttl = min(ttl, alias.ttl)
        name = alias.target
    raise _NoAnswer


def _matches(data: bytes, ident: int, host: str) -> UpstreamAnswer | None:
    """The answer in `data` if it belongs to our question, else None.

    Raises:
        MalformedMessage: it is ours, but cannot be read.
    """
    try:
        header = parse_header(data)
    except MalformedMessage:
        return None
    if not header.is_response or header.ident != ident or header.opcode != 0:
        return None
    question = encode_name(host) + struct.pack("!HH", QType.A, CLASS_IN)
    if header.questions != 1 or data[12 : 12 + len(question)].lower() != question.lower():
        return None
    return parse_answer(data)


def _udp_socket(upstream: Upstream) -> socket.socket:
    """A connected socket at a random port of the kernel's choice: a worker cannot bind one, and so take another's."""
    sock = socket.socket(upstream.family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.connect((str(upstream.address), upstream.port))
    except BaseException:
        sock.close()
        raise
    return sock


async def _ask_udp(upstream: Upstream, host: str) -> UpstreamAnswer:
    loop = asyncio.get_running_loop()
    ident = secrets.randbelow(65536)
    with _udp_socket(upstream) as sock:
        await loop.sock_sendall(sock, build_query(ident, host, QType.A))
        while True:
            answer = _matches(await loop.sock_recv(sock, _SOCKET_BUFFER), ident, host)
            if answer is not None:
                return answer


async def _ask_tcp(upstream: Upstream, host: str) -> UpstreamAnswer:
    loop = asyncio.get_running_loop()
    ident = secrets.randbelow(65536)
    query = build_query(ident, host, QType.A)
    with socket.socket(upstream.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as sock:
        await loop.sock_connect(sock, (str(upstream.address), upstream.port))
        await loop.sock_sendall(sock, struct.pack("!H", len(query)) + query)
        (length,) = struct.unpack("!H", await _exactly(sock, 2))
        if length > _MAX_TCP_ANSWER:
            raise MalformedMessage("answer too large")
        answer = _matches(await _exactly(sock, length), ident, host)
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
