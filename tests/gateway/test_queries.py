"""The answer to a query follows the policy for exactly the labels on the wire, whatever its other bytes are."""

import struct
from ipaddress import ip_address

import dnslib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dns.names import NameBudget
from gateway.dns.queries import (
    DnsDecision,
    DnsEvent,
    Drop,
    Later,
    Outcome,
    QueryAnswer,
    Resolve,
    handle,
    reply_limit,
    resolved,
    unavailable,
)
from gateway.ledger import Ledger
from policy.compiled import CompiledPolicy
from policy.facts import Scheme
from policy.names import HostPattern
from policy.rules import Action, DnsSettings, Endpoint, Mode, Precedence, Rule, RuleList

NOERROR, FORMERR, NXDOMAIN, NOTIMP, REFUSED = 0, 1, 3, 4, 5


def policy(*hosts: str, dns: DnsSettings | None = None) -> CompiledPolicy:
    rule = Rule("r", Action.ALLOW, tuple(HostPattern(host) for host in hosts), endpoints=(Endpoint(443, Scheme.HTTPS),))
    return CompiledPolicy("p", (RuleList("p", Precedence.DENY_WINS, rules=(rule,)),), dns=dns or DnsSettings())


POLICY = policy("good.example.com", "*.wild.example.com")


def ask(message: bytes, rules: CompiledPolicy | None = POLICY, limits: NameBudget | None = None, now: float = 0.0):  # type: ignore[no-untyped-def]
    return handle(message, rules, limits or NameBudget(Ledger.fresh()), now)


def name(*labels: bytes) -> bytes:
    return b"".join(bytes((len(label),)) + label for label in labels) + b"\0"


def query(raw_name: bytes, qtype: int = 1, qclass: int = 1, *, flags: int = 0x0100, ident: int = 7) -> bytes:
    return struct.pack("!HHHHHH", ident, flags, 1, 0, 0, 0) + raw_name + struct.pack("!HH", qtype, qclass)


GOOD = name(b"good", b"example", b"com")
BAD = name(b"bad", b"example", b"com")


def rcode(verdict: object) -> int:
    assert isinstance(verdict, QueryAnswer)
    return verdict.data[3] & 0xF


def test_an_allowed_name_is_resolved_as_it_was_judged_whatever_its_letter_case() -> None:
    verdict = ask(query(name(b"GoOd", b"eXample", b"COM")))
    assert isinstance(verdict, Resolve)
    assert "good.example.com" == verdict.host


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (query(BAD), NXDOMAIN),
        (query(name(b"wild", b"example", b"com")), NXDOMAIN),
        (query(name(b"xgood", b"example", b"com")), NXDOMAIN),
        (query(name(b"good.example.com")), NXDOMAIN),
        (query(name(b"good.example", b"com")), NXDOMAIN),
        (query(name(b"good\0", b"example", b"com")), NXDOMAIN),
        (query(name(b"x\\.y", b"wild", b"example", b"com")), NXDOMAIN),
        (query(name(b"\xff", b"wild", b"example", b"com")), NXDOMAIN),
        (query(name(b"good", b"example", b"com", b"127", b"0", b"0", b"1")), NXDOMAIN),
        (query(b"\0"), NXDOMAIN),
        (query(name(b"1", b"2", b"0", b"192", b"in-addr", b"arpa"), 12), NXDOMAIN),
        (query(GOOD, 12), NXDOMAIN),
        (query(GOOD, 28), NOERROR),
        (query(GOOD, 65), NOERROR),
        (query(GOOD, 64), NOERROR),
        (query(GOOD, 16), REFUSED),
        (query(GOOD, 255), REFUSED),
        (query(GOOD, 252), REFUSED),
        (query(GOOD, 10), REFUSED),
        (query(GOOD, 65280), REFUSED),
        (query(GOOD, 1, 3), REFUSED),
        (query(GOOD, 1, 255), REFUSED),
        (query(GOOD, flags=0x2800), NOTIMP),
        (query(GOOD, flags=0x1000), NOTIMP),
        (query(GOOD) + b"x", FORMERR),
        (query(GOOD)[:-1], FORMERR),
        (query(b"\xc0\x0c"), FORMERR),
        (query(b"\x40" + b"a" * 64 + b"\0"), FORMERR),
        (query(name(*[b"a" * 63] * 4)), FORMERR),
        (struct.pack("!HHHHHH", 1, 0, 0, 0, 0, 0), FORMERR),
        (struct.pack("!HHHHHH", 1, 0, 2, 0, 0, 0) + (GOOD + b"\0\1\0\1") * 2, FORMERR),
        (struct.pack("!HHHHHH", 1, 0, 65535, 0, 0, 0) + GOOD + b"\0\1\0\1", FORMERR),
        (struct.pack("!HHHHHH", 1, 0, 1, 1, 0, 0) + GOOD + b"\0\1\0\1", FORMERR),
    ],
)
def test_everything_else_is_answered_here(message: bytes, expected: int) -> None:
    assert expected == rcode(ask(message))


@pytest.mark.parametrize("message", [b"", b"x", b"\0" * 11, query(GOOD, flags=0x8000)])
def test_what_is_not_a_query_gets_no_answer(message: bytes) -> None:
    assert isinstance(ask(message), Drop)


def test_before_the_first_policy_everything_is_refused() -> None:
    assert REFUSED == rcode(ask(query(GOOD), None))


def test_a_denied_name_says_blocked_to_a_client_that_speaks_edns() -> None:
    record = dnslib.DNSRecord.question("bad.example.com")
    record.add_ar(dnslib.EDNS0(udp_len=4096, opts=[dnslib.EDNSOption(8, b"secret subnet")]))
    verdict = ask(record.pack())
    answer = dnslib.DNSRecord.parse(verdict.data)
    assert [15] == [option.code for option in answer.ar[0].rdata]
    assert b"\0\x0f" == answer.ar[0].rdata[0].data[:2]


def test_two_opt_records_or_another_additional_are_malformed() -> None:
    opt = b"\0" + struct.pack("!HHIH", 41, 4096, 0, 0)
    head = struct.pack("!HHHHHH", 1, 0, 1, 0, 0, 2)
    assert FORMERR == rcode(ask(head + GOOD + b"\0\1\0\1" + opt + opt))
    tsig = b"\0" + struct.pack("!HHIH", 250, 255, 0, 0)
    assert FORMERR == rcode(ask(struct.pack("!HHHHHH", 1, 0, 1, 0, 0, 1) + GOOD + b"\0\1\0\1" + tsig))


def test_an_unknown_edns_version_is_badvers() -> None:
    opt = b"\0" + struct.pack("!HHIH", 41, 4096, 1 << 16, 0)
    verdict = ask(struct.pack("!HHHHHH", 1, 0, 1, 0, 0, 1) + GOOD + b"\0\1\0\1" + opt)
    assert isinstance(verdict, QueryAnswer)
    answer = dnslib.DNSRecord.parse(verdict.data)
    assert (0, 1) == (answer.header.rcode, answer.ar[0].ttl >> 24)


def test_a_query_over_the_rate_waits_for_its_turn_and_is_refused_when_that_is_far_off() -> None:
    rules, limits = policy("good.example.com", dns=DnsSettings(query_rate=2, query_burst=4)), NameBudget(Ledger.fresh())
    verdicts = [ask(query(GOOD), rules, limits) for _ in range(10)]
    assert [Resolve] * 4 + [Later] * 4 + [QueryAnswer] * 2 == [type(verdict) for verdict in verdicts]
    assert [0.5, 1.0, 1.5, 2.0] == [verdict.seconds for verdict in verdicts if isinstance(verdict, Later)]
    assert [REFUSED] * 2 == [rcode(verdict) for verdict in verdicts if isinstance(verdict, QueryAnswer)]
    assert isinstance(ask(query(GOOD), rules, limits, now=2.0), Later)
    assert isinstance(ask(query(GOOD), rules, limits, now=3.0), Resolve)


def test_a_query_that_has_waited_is_judged_by_what_is_in_force_then() -> None:
    rules, limits = policy("good.example.com", dns=DnsSettings(query_rate=1, query_burst=1)), NameBudget(Ledger.fresh())
    assert isinstance(ask(query(GOOD), rules, limits), Resolve)
    assert isinstance(ask(query(GOOD), rules, limits), Later)
    assert NXDOMAIN == rcode(handle(query(GOOD), policy("other.example.com"), limits, 1.0, None))
    assert isinstance(handle(query(GOOD), rules, limits, 1.0, None), Resolve)
    assert REFUSED == rcode(handle(query(GOOD), rules, limits, 0.5, 0.0))


def wild(*labels: bytes) -> bytes:
    return query(name(*labels, b"wild", b"example", b"com"))


def test_a_name_over_a_bound_is_refused_and_the_rule_names_the_bound() -> None:
    assert isinstance(ask(wild(b"cdn-7")), Resolve)
    verdict = ask(wild(b"mzxw6ytboi7qk3dvnrsx2pj4gh5tc9we8"))
    assert isinstance(verdict, QueryAnswer)
    assert (REFUSED, "dns.entropy") == (rcode(verdict), verdict.event.rule)


def test_a_resolved_answer_carries_the_addresses_and_truncates_over_udp() -> None:
    verdict = ask(query(GOOD, ident=4711))
    assert isinstance(verdict, Resolve)
    few = resolved(verdict, Outcome.ADDRESSES, (ip_address("93.184.216.34"),), 60, reply_limit(verdict.query))
    parsed = dnslib.DNSRecord.parse(few)
    assert (4711, "good.example.com.", 60, "93.184.216.34") == (
        parsed.header.id,
        str(parsed.rr[0].rname),
        parsed.rr[0].ttl,
        str(parsed.rr[0].rdata),
    )
    many = tuple(ip_address(f"93.184.216.{number}") for number in range(1, 60))
    cut = dnslib.DNSRecord.parse(resolved(verdict, Outcome.ADDRESSES, many, 60, reply_limit(verdict.query)))
    assert (1, 0) == (cut.header.tc, len(cut.rr))


@given(st.binary(max_size=600))
@settings(max_examples=400)
def test_any_bytes_have_a_verdict_and_resolve_only_allowed_names(message: bytes) -> None:
    check(message)


LABEL = st.one_of(st.sampled_from([b"good", b"example", b"com", b"wild", b"a", b"GOOD"]), st.binary(max_size=64))


@given(
    st.lists(LABEL, max_size=6),
    st.integers(0, 65535),
    st.integers(0, 65535),
    st.integers(0, 65535),
    st.sampled_from([1, 1, 1, 28, 65, 16, 12, 255]),
    st.sampled_from([1, 1, 3, 255]),
    st.binary(max_size=12),
)
@settings(max_examples=600)
def test_any_question_is_answered_with_its_own_id_and_question(
    labels: list[bytes], ident: int, flags: int, counts: int, qtype: int, qclass: int, tail: bytes
) -> None:
    raw = b"".join(bytes((len(label) & 0x3F,)) + label[: len(label) & 0x3F] for label in labels) + b"\0"
    message = query(raw, qtype, qclass, flags=flags, ident=ident)
    check(message if counts % 2 else message + tail)


def check(message: bytes) -> None:
    match ask(message):
        case QueryAnswer(data, _):
            assert message[:2] == data[:2]
            assert data[2] & 0x80
            if data[5] == 1:
                end = 12
                while message[end]:
                    end += message[end] + 1
                assert message[12 : end + 5] == data[12 : end + 5]
            else:
                assert 12 == len(data)
        case Resolve(host, asked, _):
            assert host == "good.example.com" or host.endswith(".wild.example.com")
            assert ".".join(label.decode("ascii") for label in asked.question.labels) == host
            assert [host] == [str(item.qname).rstrip(".").lower() for item in dnslib.DNSRecord.parse(message).questions]
        case Drop():
            pass


ALLOW, DENY = DnsDecision.ALLOW, DnsDecision.DENY
OPT = b"\0" + struct.pack("!HHIH", 41, 1232, 0, 0)


def with_opt(message: bytes, opt: bytes = OPT) -> bytes:
    return message[:10] + b"\0\1" + message[12:] + opt


def told(rule: str, reason: str, host: str | None = None, qtype: int | None = 1, **more: bool) -> DnsEvent:
    return DnsEvent(DENY, rule, reason, host, qtype, **more)


EVENTS = {
    "another opcode": (
        query(GOOD, flags=0x2800),
        NOTIMP,
        told("dns-opcode", "only standard queries are answered", qtype=None, aggregate=True),
    ),
    "a large query": (
        with_opt(query(GOOD), OPT[:-2] + struct.pack("!H", 984) + b"x" * 984),
        FORMERR,
        told("dns-format", "query too large", qtype=None, aggregate=True),
    ),
    "bytes behind it": (
        query(GOOD) + b"x",
        FORMERR,
        told("dns-format", "query is malformed", qtype=None, aggregate=True),
    ),
    "another class": (query(GOOD, 1, 3), REFUSED, told("dns-class", "only class IN is answered")),
    "another type": (
        query(GOOD, 16),
        REFUSED,
        told("dns-type", "record type is not answered", "good.example.com", 16),
    ),
    "another type of a name with odd bytes": (
        query(name(b"a.b\\", b"\xff"), 16),
        REFUSED,
        told("dns-type", "record type is not answered", "a\\046b\\092.\\255", 16),
    ),
    "a dot in a label": (
        query(name(b"good.example", b"com")),
        NXDOMAIN,
        told("dns-name", "not a host name", "good\\046example.com"),
    ),
    "the root": (query(b"\0"), NXDOMAIN, told("dns-name", "not a host name", "")),
    "a hyphen at the edge": (query(name(b"-a", b"com")), NXDOMAIN, told("dns-name", "not a host name", "-a.com")),
    "a name that no rule allows": (
        query(BAD),
        NXDOMAIN,
        told("default", "No rule of p allows bad.example.com.", "bad.example.com"),
    ),
    "a reverse name": (
        query(GOOD, 12),
        NXDOMAIN,
        told("dns-reverse", "reverse names are not resolved", "good.example.com", 12),
    ),
    "a name over a bound": (
        query(name(b"a", b"b", b"c", b"d", b"e", b"wild", b"example", b"com")),
        REFUSED,
        told(
            "dns.max_labels",
            "This name has more than 4 labels in front of wild.example.com.",
            "a.b.c.d.e.wild.example.com",
        ),
    ),
}


@pytest.mark.parametrize("case", EVENTS)
def test_each_denial_is_reported_with_its_rule_and_name(case: str) -> None:
    """Also to a client with EDNS: Blocked for a name, Prohibited for an unsupported query."""
    message, expected, event = EVENTS[case]
    verdict = ask(message)
    assert isinstance(verdict, QueryAnswer)
    assert (expected, event) == (rcode(verdict), verdict.event)
    if event.aggregate:
        assert 12 == len(verdict.data)
        return
    assert b"" == verdict.data[len(message) :], "no option without EDNS"
    spoken = ask(with_opt(message))
    assert isinstance(spoken, QueryAnswer) and event == spoken.event
    text = f"blocked by egress policy: {event.rule}".encode()
    option = struct.pack("!HHH", 15, len(text) + 2, 15 if expected == NXDOMAIN else 18) + text
    assert spoken.data == (
        struct.pack("!HHHHHH", 7, 0x8180 | expected, 1, 0, 0, 1)
        + message[12:]
        + OPT[:-2]
        + struct.pack("!H", len(option))
        + option
    )


def test_what_gets_no_answer_has_a_reason() -> None:
    assert Drop("shorter than a header") == ask(b"\0" * 11)
    assert Drop("a response") == ask(query(GOOD, flags=0x8000))
    unconfigured = ask(query(GOOD), None)
    assert isinstance(unconfigured, QueryAnswer)
    assert told("unconfigured", "no policy is active yet", qtype=None, aggregate=True) == unconfigured.event


def test_an_unknown_edns_version_is_reported() -> None:
    verdict = ask(with_opt(query(GOOD), OPT[:5] + b"\0\1\0\0" + OPT[9:]))
    assert isinstance(verdict, QueryAnswer)
    assert told("dns-edns", "unknown EDNS version") == verdict.event


def test_a_query_over_the_rate_is_reported_and_only_counted() -> None:
    rules, limits = policy("good.example.com", dns=DnsSettings(query_rate=1, query_burst=1)), NameBudget(Ledger.fresh())
    verdicts = [ask(query(GOOD), rules, limits) for _ in range(4)]
    assert isinstance(verdicts[3], QueryAnswer)
    assert told("dns.query_rate", "query rate exceeded", qtype=None, aggregate=True) == verdicts[3].event


def test_the_largest_query_has_1024_bytes() -> None:
    free = 1024 - len(with_opt(query(GOOD)))
    for more, kind in {0: Resolve, 1: QueryAnswer}.items():
        size = free + more
        assert kind is type(ask(with_opt(query(GOOD), OPT[:-2] + struct.pack("!H", size) + b"x" * size)))


@pytest.mark.parametrize("qtype", [1, 28, 64, 65])
def test_an_allowed_name_is_reported_with_its_type(qtype: int) -> None:
    verdict = ask(query(GOOD, qtype))
    assert isinstance(verdict, Resolve if qtype == 1 else QueryAnswer)
    assert DnsEvent(ALLOW, "r", "", "good.example.com", qtype) == verdict.event


def test_a_name_that_is_only_observed_is_reported_as_observed() -> None:
    watch = CompiledPolicy("p", (RuleList("p", Precedence.DENY_WINS, Mode.OBSERVE),))
    verdict = ask(query(GOOD), watch)
    assert isinstance(verdict, Resolve)
    reason = "No rule of p allows good.example.com."
    expected = DnsEvent(DnsDecision.OBSERVE, "observe:p", reason, "good.example.com", 1, observed="default")
    assert expected == verdict.event


ENDS = {
    Outcome.NODATA: (0, None),
    Outcome.NXDOMAIN: (3, None),
    Outcome.REFUSED_ADDRESS: (0, (15, b"addresses are not public")),
    Outcome.FAILED: (2, (23, b"upstream resolver failed")),
}


@pytest.mark.parametrize("outcome", ENDS)
def test_each_end_of_a_resolution_has_its_answer(outcome: Outcome) -> None:
    """Without addresses, even if some were found."""
    code, extended = ENDS[outcome]
    message = with_opt(query(GOOD))
    verdict = ask(message)
    assert isinstance(verdict, Resolve)
    option = b"" if extended is None else struct.pack("!HHH", 15, len(extended[1]) + 2, extended[0]) + extended[1]
    expected = struct.pack("!HHHHHH", 7, 0x8180 | code, 1, 0, 0, 1) + query(GOOD)[12:] + OPT[:-2]
    expected += struct.pack("!H", len(option)) + option
    assert expected == resolved(verdict, outcome, (ip_address("93.184.216.34"),), 60, 1232)


def test_an_answer_that_is_not_available_is_a_server_failure() -> None:
    verdict = ask(query(GOOD))
    assert isinstance(verdict, Resolve)
    assert struct.pack("!HHHHHH", 7, 0x8182, 1, 0, 0, 0) + query(GOOD)[12:] == unavailable(verdict)


@pytest.mark.parametrize(("offered", "limit"), [(0, 512), (512, 512), (1231, 1231), (1232, 1232), (4096, 1232)])
def test_an_answer_over_udp_is_as_long_as_both_sides_take(offered: int, limit: int) -> None:
    verdict = ask(with_opt(query(GOOD), b"\0" + struct.pack("!HHIH", 41, offered, 0, 0)))
    assert isinstance(verdict, Resolve)
    assert limit == reply_limit(verdict.query)


def test_an_invalid_name_is_reported_in_300_characters() -> None:
    verdict = ask(query(name(b"\xff" * 63, b"\xff" * 63)))
    assert isinstance(verdict, QueryAnswer)
    assert ("\\255" * 63 + "." + "\\255" * 12)[:300] == verdict.event.host
