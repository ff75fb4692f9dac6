"""Judges a DNS query of the sandbox: from bytes to a verdict.

Pure: the clock is an argument. Only the worker's `NameBudget` changes.

- A name that policy does not allow is answered with NXDOMAIN and extended error 15 (Blocked). The answer does not
  depend on whether the name exists, and nothing is sent upstream.
- Only an A question for an allowed name becomes `Resolve`. Its `host` is made of the judged labels, so the forwarded
  name equals the judged name. Letter case, options and flags of the client are not forwarded.
- AAAA, HTTPS and SVCB of an allowed name get NODATA: sandboxes have no IPv6, and HTTPS records can carry address hints
  and ECH keys. Reverse names are never forwarded. Other types and classes get REFUSED, other opcodes NOTIMP.
- `gateway.dns.names` limits the query rate, and how much data names of an allowed zone can carry.
- A query above the rate waits for its turn, and is judged then. It is refused if the wait would be too long.
- For any bytes `handle` returns a verdict. It never raises.

A verdict permits no connection: the acceptor judges name and address again.
"""

from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv6Address

from gateway.dns.message import (
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
from gateway.dns.names import PATIENCE, RATE, NameBudget
from policy.compiled import CompiledPolicy
from policy.decision import Deny, decide_name
from policy.names import InvalidName, wire_host

_LDH = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_")
_BY_NAME = frozenset({QType.A, QType.AAAA, QType.HTTPS, QType.SVCB, QType.PTR})
_MAX_QUERY = 1024


class DnsDecision(StrEnum):
    """The decision, as in the audit log."""

    ALLOW = "allow"
    DENY = "deny"
    OBSERVE = "observe"


@dataclass(frozen=True, slots=True)
class DnsEvent:
    """The content of a verdict's audit record. Verdicts with `aggregate` can come in floods and are only counted."""

    decision: DnsDecision
    rule: str
    reason: str
    host: str | None
    qtype: int | None
    aggregate: bool = False
    observed: str | None = None


@dataclass(frozen=True, slots=True)
class QueryAnswer:
    """Send these bytes to the client; send nothing upstream."""

    data: bytes
    event: DnsEvent


@dataclass(frozen=True, slots=True)
class Upstream:
    """A resolver of the operator's configuration, which resolves allowed names."""

    address: IPv4Address | IPv6Address
    port: int


@dataclass(frozen=True, slots=True)
class Resolve:
    """Resolve the addresses of `host`, then answer with `resolved`."""

    host: str
    query: Query
    event: DnsEvent


@dataclass(frozen=True, slots=True)
class Later:
    """Judge the query again after this many seconds, without the rate."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Drop:
    """Send no answer: the bytes are no query, or have no readable header."""

    reason: str


type Verdict = QueryAnswer | Resolve | Later | Drop


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
        policy: None before the first configuration; every query is refused then.
        now: seconds of a monotonic clock.
        patience: the longest wait for its turn, in seconds; None if the query has waited already.
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
        return QueryAnswer(build_answer(query, RCode.NOERROR), event)
    return Resolve(host, query, event)


def _host(labels: Labels) -> str | None:
    """Return the host name of these labels. None if they are no host name; policy can then allow nothing."""
    if not labels or any(not _LDH.issuperset(label) for label in labels):
        return None
    try:
        host = wire_host(b".".join(labels))
    except InvalidName:
        return None
    return host if host.encode("ascii").split(b".") == list(labels) else None


def _printable(labels: Labels) -> str:
    """Return an unambiguous text for the log: every byte that host names do not have is escaped."""
    return ".".join("".join(chr(byte) if byte in _LDH else f"\\{byte:03d}" for byte in label) for label in labels)[:300]


def _refuse_blind(header: Header, rcode: RCode, rule: str, reason: str) -> QueryAnswer:
    return QueryAnswer(build_error(header, rcode), DnsEvent(DnsDecision.DENY, rule, reason, None, None, aggregate=True))


def _answer(query: Query, rcode: RCode, denial: Deny, host: str | None) -> QueryAnswer:
    code = EDE_BLOCKED if rcode == RCode.NXDOMAIN else EDE_PROHIBITED
    data = build_answer(query, rcode, ede=(code, f"blocked by egress policy: {denial.rule}"))
    return QueryAnswer(data, DnsEvent(DnsDecision.DENY, denial.rule, denial.reason, host, query.question.qtype))


def reply_limit(query: Query) -> int:
    """Return the size of the largest UDP answer for this client, in bytes."""
    return min(query.udp_size, EDNS_UDP_SIZE)


def resolved(verdict: Resolve, outcome: Outcome, addresses: tuple[IPv4Address, ...], ttl: int, limit: int) -> bytes:
    """Return the answer to a `Resolve` after its resolution. `addresses` are those that the client gets."""
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
    """Return the answer to a query that could not be recorded, or for which the gateway has no capacity."""
    return build_answer(verdict.query, RCode.SERVFAIL)
