"""What a DNS query of the sandbox gets: the decision, from bytes to a verdict.

Pure: the clock is an argument; `NameBudget` is the one value that changes and belongs to one worker.

- A name that policy does not allow is answered here with NXDOMAIN and extended error 15 (Blocked): same answer whether
  it exists or not, and nothing of it goes upstream.
- Only an A question for an allowed name becomes `Resolve`; its `host` is made of the very labels that were judged,
  so the name judged is the name forwarded. Letter case, options and flags of the client are gone by then.
- AAAA, HTTPS and SVCB of an allowed name are NODATA (sandboxes have no IPv6; records could carry hints and ECH).
  Reverse names are never forwarded. Other types and classes are REFUSED, other opcodes NOTIMP.
- Query rate and names are bounded by `gateway.names`: what a sandbox can write into names of an allowed zone is small.
- A query over the rate has its place in it and is judged when that comes; one whose place is too far off is refused.
- Whatever the bytes, `handle` returns a verdict; it never raises.

It opens nothing: the proxy judges name and address again when a connection comes.
"""

from dataclasses import dataclass
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
from gateway.names import PATIENCE, RATE, NameBudget
from policy.compiled import CompiledPolicy
from policy.decision import Deny, decide_name
from policy.names import InvalidName, wire_host

_LDH = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_")
_BY_NAME = frozenset({QType.A, QType.AAAA, QType.HTTPS, QType.SVCB, QType.PTR})
_MAX_QUERY = 1024


class DnsDecision(StrEnum):
    """As the audit log spells it."""

    ALLOW = "allow"
    DENY = "deny"
    OBSERVE = "observe"


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
    names: NameBudget,
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
    wait = 0.0 if patience is None else names.take(policy.dns, now, patience)
    if wait is None:
        return _refuse_blind(header, RCode.REFUSED, RATE, "query rate exceeded")
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
    return _judge(query, policy, names, now)


def _judge(query: Query, policy: CompiledPolicy, names: NameBudget, now: float) -> Verdict:
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
    exceeded = names.admit(policy, host, now)
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
