"""What a DNS query of the sandbox gets: the decision, from bytes to a verdict.

Pure: the clock is an argument, `DnsLimits` is the one value that changes and belongs to one worker.

- A name that policy does not allow is answered here with NXDOMAIN and extended error 15 (Blocked): same answer whether
  it exists or not, and nothing of it goes upstream.
- Only an A question for an allowed name becomes `Resolve`; its `host` is made of the very labels that were judged,
  so the name judged is the name forwarded. Letter case, options and flags of the client are gone by then.
- AAAA, HTTPS and SVCB of an allowed name are NODATA (sandboxes have no IPv6; records could carry hints and ECH).
  Reverse names are never forwarded. Other types and classes are REFUSED, other opcodes NOTIMP.
- Query rate, and below a wildcard the number, length and entropy of labels and the distinct names per hour, are
  bounded: what a sandbox can write into names of an allowed zone is small.
- A query over the rate has its place in it and is judged when that comes; one whose place is too far off is refused.
- Whatever the bytes, `handle` returns a verdict; it never raises.

It opens nothing: the proxy judges name and address again when a connection comes.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import IPv4Address, IPv6Address

from gateway.dns_wire import (
    CLASS_IN,
    EDE_BLOCKED,
    EDE_NETWORK_ERROR,
    EDE_PROHIBITED,
    EDNS_UDP_SIZE,
    Header,
    Labels,
    MalformedMessage,
    QType,
    Query,
    RCode,
    build_answer,
    build_error,
    parse_header,
    parse_query,
)
from gateway.ledger import Ledger
from policy.compiled import CompiledPolicy
from policy.decision import Deny, decide_name
from policy.names import InvalidName, wire_host
from policy.rules import Action, DnsSettings

_LDH = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_")
_ENTROPY_FROM = 24
_MAX_ENTROPY = 4.0
_WINDOW_SECONDS = 3600.0
_MAX_ZONES = 1024
_MAX_NAMES = 50_000
_BY_NAME = frozenset({QType.A, QType.AAAA, QType.HTTPS, QType.SVCB, QType.PTR})
_MAX_QUERY = 1024
PATIENCE = 2.0
"""Seconds a query over the rate waits for its turn: clients ask again after five, or give up."""


class DnsDecision(StrEnum):
    """As the audit log spells it."""

    ALLOW = "allow"
    DENY = "deny"
    OBSERVE = "observe"


@dataclass(slots=True)
class DnsLimits:
    """What was used of the budget. One per worker, changed by `handle` only.

    Of a former worker's names only their number is known: for the rest of their hour it counts against every zone.
    """

    ledger: Ledger = field(default_factory=Ledger.fresh)
    former: int = field(init=False)
    former_since: float = field(init=False)
    tokens: float | None = None
    refilled: float = 0.0
    names: dict[str, tuple[float, set[str]]] = field(default_factory=dict)
    held: int = 0

    def __post_init__(self) -> None:
        self.former, self.former_since = self.ledger.names, self.ledger.names_since

    def take(self, settings: DnsSettings, now: float, patience: float) -> float | None:
        """Take the next place in the rate; in how many seconds it comes, None when that is over `patience`."""
        burst = float(max(1, settings.query_burst))
        if self.tokens is None:
            self.tokens = burst
        else:
            self.tokens = min(burst, self.tokens + max(0.0, now - self.refilled) * settings.query_rate)
        self.refilled = now
        wait = max(0.0, (1 - self.tokens) / settings.query_rate)
        if wait > patience:
            return None
        self.tokens -= 1
        return wait

    def admit(self, zone: str, host: str, settings: DnsSettings, now: float) -> bool:
        """Count `host` among the distinct names below `zone`; False when there were too many this hour.

        Counts are dropped only when their hour is over: many zones cannot push out the count of one.
        """
        if zone not in self.names and (len(self.names) >= _MAX_ZONES or self.held >= _MAX_NAMES):
            self._expire(now)
            if len(self.names) >= _MAX_ZONES:
                return False
        since, seen = self.names.get(zone, (now, set()))
        if now - since >= _WINDOW_SECONDS:
            self.held -= len(seen)
            since, seen = now, set()
        self.names[zone] = (since, seen)
        if host in seen:
            return True
        former = self.former if now - self.former_since < _WINDOW_SECONDS else 0
        if len(seen) + former >= settings.unique_names or self.held >= _MAX_NAMES:
            return False
        self.ledger.name(now, _WINDOW_SECONDS)
        seen.add(host)
        self.held += 1
        return True

    def _expire(self, now: float) -> None:
        for zone, (since, seen) in list(self.names.items()):
            if now - since >= _WINDOW_SECONDS:
                self.held -= len(seen)
                del self.names[zone]


@dataclass(frozen=True, slots=True)
class DnsEvent:
    """What the audit log is told of a verdict; `aggregate` marks those that come in floods and are only counted."""

    decision: DnsDecision
    rule: str
    reason: str
    host: str | None
    qtype: int | None
    aggregate: bool = False
    observed: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Send these bytes back; nothing goes upstream."""

    data: bytes
    event: DnsEvent


@dataclass(frozen=True, slots=True)
class Resolve:
    """Ask the upstream for the addresses of `host`, then answer with `resolved`."""

    host: str
    query: Query
    event: DnsEvent


@dataclass(frozen=True, slots=True)
class Later:
    """Judge it again, as one whose turn it is, in so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Drop:
    """Say nothing: not a query, or too broken to answer."""

    reason: str


type Verdict = Answer | Resolve | Later | Drop


class Outcome(StrEnum):
    """How a resolution ended."""

    ADDRESSES = "addresses"
    NODATA = "nodata"
    NXDOMAIN = "nxdomain"
    REFUSED_ADDRESS = "refused_address"
    FAILED = "failed"


def handle(
    message: bytes,
    policy: CompiledPolicy | None,
    limits: DnsLimits,
    now: float,
    patience: float | None = PATIENCE,
) -> Verdict:
    """Judge one query.

    Args:
        policy: None before the worker was configured: everything is refused.
        now: seconds of a monotonic clock.
        patience: seconds it may wait for its turn; None if it has waited, and is not to be `Later` again.
    """
    try:
        header = parse_header(message)
    except MalformedMessage:
        return Drop("shorter than a header")
    if header.is_response:
        return Drop("a response")
    if policy is None:
        return _refuse_blind(header, RCode.REFUSED, "unconfigured", "no policy is active yet")
    wait = 0.0 if patience is None else limits.take(policy.dns, now, patience)
    if wait is None:
        return _refuse_blind(header, RCode.REFUSED, "dns-rate", "query rate exceeded")
    if wait > 0:
        return Later(wait)
    if header.opcode != 0:
        return _refuse_blind(header, RCode.NOTIMP, "dns-opcode", "only standard queries are answered")
    if len(message) > _MAX_QUERY:
        return _refuse_blind(header, RCode.FORMERR, "dns-format", "query too large")
    try:
        query = parse_query(message)
    except MalformedMessage:
        return _refuse_blind(header, RCode.FORMERR, "dns-format", "query is malformed")
    return _judge(query, policy, limits, now)


def _judge(query: Query, policy: CompiledPolicy, limits: DnsLimits, now: float) -> Verdict:
    question = query.question
    if query.edns_version not in (None, 0):
        return _answer(query, RCode.BADVERS, Deny("dns-edns", "unknown EDNS version"), None)
    if question.qclass != CLASS_IN:
        return _answer(query, RCode.REFUSED, Deny("dns-class", "only class IN is answered"), None)
    if question.qtype not in _BY_NAME:
        denial = Deny("dns-type", "record type is not answered")
        return _answer(query, RCode.REFUSED, denial, _printable(question.labels))
    host = _host(question.labels)
    if host is None:
        return _answer(query, RCode.NXDOMAIN, Deny("dns-name", "not a host name"), _printable(question.labels))
    decision = decide_name(policy, host)
    if isinstance(decision, Deny):
        return _answer(query, RCode.NXDOMAIN, decision, host)
    if question.qtype == QType.PTR:
        return _answer(query, RCode.NXDOMAIN, Deny("dns-reverse", "reverse names are not resolved"), host)
    exceeded = _exceeded(question.labels, host, policy, limits, now)
    if exceeded is not None:
        return _answer(query, RCode.REFUSED, exceeded, host)
    observed = decision.observed
    event = DnsEvent(
        DnsDecision.ALLOW if observed is None else DnsDecision.OBSERVE,
        decision.rule,
        "" if observed is None else observed.reason,
        host,
        question.qtype,
        observed=None if observed is None else observed.rule,
    )
    if question.qtype != QType.A:
        return Answer(build_answer(query, RCode.NOERROR), event)
    return Resolve(host, query, event)


def _host(labels: Labels) -> str | None:
    """The host name these labels spell, or None when they spell none: then nothing can be allowed for them."""
    if not labels or any(not _LDH.issuperset(label) for label in labels):
        return None
    try:
        host = wire_host(b".".join(labels))
    except InvalidName:
        return None
    return host if host.encode("ascii").split(b".") == list(labels) else None


def _printable(labels: Labels) -> str:
    """A text for the log that cannot be mistaken for another name: every odd byte as an escape."""
    return ".".join("".join(chr(byte) if byte in _LDH else f"\\{byte:03d}" for byte in label) for label in labels)[:300]


def entropy(label: bytes) -> float:
    """Shannon entropy of the label's characters, in bits per character."""
    size = len(label)
    return -sum(count / size * math.log2(count / size) for count in Counter(label).values())


def _exceeded(labels: Labels, host: str, policy: CompiledPolicy, limits: DnsLimits, now: float) -> Deny | None:
    """Say which budget this name is over. Names that policy spells out carry nothing and have no budget."""
    zone = _zone(host, policy)
    if zone == host:
        return None
    free = labels[: len(labels) - zone.count(".") - 1]
    settings = policy.dns
    if len(free) > settings.max_labels:
        return Deny("dns-labels", "this name has more labels than allowed")
    for label in free:
        if len(label) > settings.max_label:
            return Deny("dns-label", "a label of this name is longer than allowed")
        if len(label) >= _ENTROPY_FROM and entropy(label) > _MAX_ENTROPY:
            return Deny("dns-entropy", "a label of this name looks like data")
    if not limits.admit(zone, host, settings, now):
        return Deny("dns-names", "too many distinct names in one zone")
    return None


def _zone(host: str, policy: CompiledPolicy) -> str:
    """The part of an allowed host that policy wrote: all of it, a wildcard's suffix, or by default two labels."""
    patterns = [
        *policy.always_allow,
        *(
            pattern.text
            for rules in policy.lists
            for rule in rules.of_host(host)
            if rule.action is Action.ALLOW
            for pattern in rule.hosts
        ),
    ]
    if host in patterns:
        return host
    suffixes = [text[2:] for text in patterns if text.startswith("*.") and host.endswith(text[1:])]
    return max(suffixes, key=len) if suffixes else ".".join(host.split(".")[-2:])


def _refuse_blind(header: Header, rcode: RCode, rule: str, reason: str) -> Answer:
    return Answer(build_error(header, rcode), DnsEvent(DnsDecision.DENY, rule, reason, None, None, aggregate=True))


def _answer(query: Query, rcode: RCode, denial: Deny, host: str | None) -> Answer:
    code = EDE_BLOCKED if rcode == RCode.NXDOMAIN else EDE_PROHIBITED
    data = build_answer(query, rcode, ede=(code, f"blocked by egress policy: {denial.rule}"))
    return Answer(data, DnsEvent(DnsDecision.DENY, denial.rule, denial.reason, host, query.question.qtype))


def reply_limit(query: Query) -> int:
    """Largest UDP answer for this client."""
    return min(query.udp_size, EDNS_UDP_SIZE)


def resolved(
    verdict: Resolve, outcome: Outcome, addresses: tuple[IPv4Address | IPv6Address, ...], ttl: int, limit: int
) -> bytes:
    """The answer to a `Resolve` once its resolution ended; addresses are those the gateway would dial."""
    match outcome:
        case Outcome.ADDRESSES:
            return build_answer(verdict.query, RCode.NOERROR, addresses, ttl=ttl, limit=limit)
        case Outcome.NODATA:
            return build_answer(verdict.query, RCode.NOERROR)
        case Outcome.NXDOMAIN:
            return build_answer(verdict.query, RCode.NXDOMAIN)
        case Outcome.REFUSED_ADDRESS:
            return build_answer(verdict.query, RCode.NOERROR, ede=(EDE_BLOCKED, "addresses are not public"))
        case Outcome.FAILED:
            return build_answer(verdict.query, RCode.SERVFAIL, ede=(EDE_NETWORK_ERROR, "upstream resolver failed"))


def unavailable(verdict: Resolve) -> bytes:
    """The answer when the query could not be recorded or the gateway is full."""
    return build_answer(verdict.query, RCode.SERVFAIL)
