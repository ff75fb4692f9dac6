"""The judge of the chaos run detects faults: each finding is provoked by one fabricated disagreement."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from demo.chaos.facts import Arrival, Asked, Facts, Kill, Record, Wire, read_asked, read_far_end, read_log
from demo.chaos.judge import Outage, Verdict, judge
from demo.chaos.main import arguments, recoveries
from testbed.internet import API, ATTACKER, DNS_ADDRESS, STATUS

SANDBOXES = {"a": "sbx-a", "c": "sbx-c"}
KINDS = ("secret", "plain", "name", "sni", "dns", "nodns")
POLICY = {"sbx-a": "digest-a", "sbx-c": "digest-c"}


def ident(tag: str, number: int) -> str:
    return f"q{tag}{number:06x}{number:016x}"


def question(tag: str, number: int, kind: str, began: float, good: bool = True) -> Asked:
    saw = "200" if kind in ("secret", "plain") else "403"
    return Asked(ident(tag, number), SANDBOXES[tag], kind, began, began + 0.1, good, saw if good else "reset", b"")


def told(item: Asked) -> tuple[list[Arrival], list[Record]]:
    """Return the arrivals and the records of a question that was answered."""

    def record(kind: str, decision: str, host: str, path: str = "", status: int | None = None) -> Record:
        method = "GET" if path else ""
        at, policy = item.began + 0.05, POLICY[item.sandbox]
        return Record(kind, decision, item.sandbox, item.ident, host, method, path, status, policy, at)

    match item.kind:
        case "secret":
            path = f"/v1/{item.ident}"
            uses = [record("request", "allow", API, path), record("secret.use", "allow", API, path)]
            return [Arrival(item.ident, API, "GET", path, True)], [*uses, record("request", "info", API, path, 200)]
        case "plain" if item.sandbox == "sbx-c":  # relayed unread
            flow = replace(record("flow", "allow", STATUS), ident="")
            return [Arrival(item.ident, STATUS, "GET", f"/{item.ident}")], [flow]
        case "plain":
            path = f"/{item.ident}"
            return [Arrival(item.ident, STATUS, "GET", path)], [record("request", "allow", STATUS, path)]
        case "dns":
            name = f"{item.ident}.cdn.bank.example"
            return [Arrival(item.ident, DNS_ADDRESS, "DNS", name)], [record("dns", "allow", name)]
        case "nodns":
            return [], [record("dns", "deny", f"{item.ident}.{ATTACKER}")]
        case _:
            return [], [record("flow", "deny", f"{item.ident}.{ATTACKER}")]


def agreeing() -> Facts:
    """Return a run without faults: a kill at 100, two failures of each kind, all working again after 2 s."""
    asked, arrivals, records = [], [], []
    number = 0
    for tag in SANDBOXES:
        for kind in KINDS:
            for began in (95.0, 97.0, 99.0, 100.1, 101.0, 101.9, 103.0, 105.0):
                number += 1
                item = question(tag, number, kind, began, good=not 100 < began < 101.5)
                asked.append(item)
                if item.good:
                    arrived, written = told(item)
                    arrivals += arrived
                    records += written
    return Facts(
        asked=tuple(asked),
        arrivals=tuple(arrivals),
        records=tuple(records),
        kills=(Kill(("auditd",), 100.0, 110.0, 1, api=0.3, whole=1.2),),
        wire=Wire((), allowed=1000, control=1, missed=0),
        sandboxes=SANDBOXES,
        spliced=frozenset({"sbx-c"}),
        secret_forms=(b"the-secret",),
        stray_names=(API, STATUS),
        allowed_names=frozenset({API, STATUS}),
        verified="",
        census={},
    )


def wrong(verdict: Verdict) -> list[str]:
    return [name for name, found in verdict.findings.items() if found]


def first(facts: Facts, kind: str, tag: str = "a") -> Asked:
    return next(item for item in facts.asked if item.kind == kind and item.sandbox == SANDBOXES[tag])


def of(facts: Facts, kind: str, decision: str, item: Asked) -> Record:
    return next(r for r in facts.records if (r.kind, r.decision, r.ident) == (kind, decision, item.ident))


def edited(facts: Facts, old: Record, *new: Record) -> Facts:
    at = facts.records.index(old)
    return replace(facts, records=(*facts.records[:at], *new, *facts.records[at + 1 :]))


def test_a_run_in_which_everything_agrees_is_good() -> None:
    verdict = judge(agreeing())

    assert [] == wrong(verdict)
    assert verdict.outages[0].served == pytest.approx(2.0)


def _missing_record(facts: Facts) -> Facts:
    return edited(facts, of(facts, "request", "allow", first(facts, "secret")))


def _doubled_record(facts: Facts) -> Facts:
    record = of(facts, "request", "allow", first(facts, "secret"))
    return edited(facts, record, record, record)


def _wrong_path(facts: Facts) -> Facts:
    record = of(facts, "request", "allow", first(facts, "secret"))
    return edited(facts, record, replace(record, path=record.path + "/other"))


def _wrong_sandbox(facts: Facts) -> Facts:
    record = of(facts, "request", "allow", first(facts, "secret"))
    return edited(facts, record, replace(record, sandbox="sbx-c", policy="digest-c"))


def _missing_flow(facts: Facts) -> Facts:
    item = first(facts, "plain", "c")
    record = next(
        r for r in facts.records if r.kind == "flow" and item.began <= r.at <= item.ended and r.host == STATUS
    )
    return edited(facts, record)


def _arrived_twice(facts: Facts) -> Facts:
    arrival = next(a for a in facts.arrivals if a.secret)
    return replace(facts, arrivals=(*facts.arrivals, arrival))


def _arrived_in_pieces(facts: Facts) -> Facts:
    return replace(facts, arrivals=(*facts.arrivals, Arrival(ident("a", 0xABC), API, whole=False)))


def _name_without_record(facts: Facts) -> Facts:
    return edited(facts, of(facts, "dns", "allow", first(facts, "dns")))


def _record_without_arrival(facts: Facts) -> Facts:
    item = first(facts, "plain")
    return replace(facts, arrivals=tuple(a for a in facts.arrivals if a.ident != item.ident))


def _outcome_without_arrival(facts: Facts) -> Facts:
    """Add an aborted flow with a record that it was answered."""
    item = next(a for a in facts.asked if a.kind == "secret" and not a.good)
    path = f"/v1/{item.ident}"
    allow = Record("request", "allow", "sbx-a", item.ident, API, "GET", path, None, "digest-a", item.began)
    return replace(facts, records=(*facts.records, allow, replace(allow, decision="info", status=200)))


def _use_without_record(facts: Facts) -> Facts:
    return edited(facts, of(facts, "secret.use", "allow", first(facts, "secret")))


def _secret_elsewhere(facts: Facts) -> Facts:
    arrival = next(a for a in facts.arrivals if a.host == STATUS)
    return replace(facts, arrivals=tuple(replace(a, secret=a.secret or a is arrival) for a in facts.arrivals))


def _denial_without_record(facts: Facts) -> Facts:
    return edited(facts, of(facts, "dns", "deny", first(facts, "nodns")))


def _escaped_frame(facts: Facts) -> Facts:
    return replace(facts, wire=replace(facts.wire, escaped=("93.184.217.1 to 93.184.216.66, protocol 6, port 22",)))


def _escaped_bytes(facts: Facts) -> Facts:
    return replace(facts, arrivals=(*facts.arrivals, Arrival(first(facts, "name").ident, ATTACKER, whole=False)))


def _blind_watch(facts: Facts) -> Facts:
    return replace(facts, wire=replace(facts.wire, control=0))


def _overrun_watch(facts: Facts) -> Facts:
    return replace(facts, wire=replace(facts.wire, missed=3))


def _strange_name(facts: Facts) -> Facts:
    return replace(facts, stray_names=(*facts.stray_names, "git.bank.example"))


def _broken_chain(facts: Facts) -> Facts:
    return replace(facts, verified="line 7: hash does not match")


def _asked(facts: Facts, old: Asked, new: Asked) -> Facts:
    return replace(facts, asked=tuple(new if item is old else item for item in facts.asked))


def _leak(facts: Facts) -> Facts:
    item = first(facts, "secret")
    return _asked(facts, item, replace(item, got=b"X-Echo: Bearer the-secret"))


def _lost_trust(facts: Facts) -> Facts:
    item = next(a for a in facts.asked if a.kind == "secret" and not a.good)
    return _asked(facts, item, replace(item, saw="SSLCertVerificationError: [SSL: CERTIFICATE_VERIFY_FAILED]"))


def _forbidden_answer(facts: Facts) -> Facts:
    item = first(facts, "sni")
    return _asked(facts, item, replace(item, saw="talks"))


def _another_policy(facts: Facts) -> Facts:
    item = next(a for a in reversed(facts.asked) if a.kind == "plain" and a.sandbox == "sbx-a")
    record = of(facts, "request", "allow", item)
    return edited(facts, record, replace(record, policy="another"))


def _kill(facts: Facts, **changes: object) -> Facts:
    return replace(facts, kills=(replace(facts.kills[0], **changes),))  # type: ignore[arg-type]


def _never_served(facts: Facts) -> Facts:
    kept = tuple(a for a in facts.asked if not (a.kind == "secret" and a.sandbox == "sbx-a" and a.began > 101.5))
    ids = {a.ident for a in kept}
    return replace(
        facts,
        asked=kept,
        arrivals=tuple(a for a in facts.arrivals if a.ident in ids),
        records=tuple(r for r in facts.records if not r.ident or r.ident in ids),
    )


def _served_late(facts: Facts) -> Facts:
    """Let failures continue until 106 in one sandbox."""
    lasting = tuple(question("a", 0x900 + n, "secret", 101.1 + n / 2, good=False) for n in range(10))
    late = question("a", 0x990, "secret", 106.2)
    arrived, written = told(late)
    kept = tuple(a for a in facts.asked if not (a.kind == "secret" and a.sandbox == "sbx-a" and a.began > 101.5))
    gone = {a.ident for a in facts.asked} - {a.ident for a in kept}
    return replace(
        facts,
        asked=(*kept, *lasting, late),
        arrivals=(*(a for a in facts.arrivals if a.ident not in gone), *arrived),
        records=(*(r for r in facts.records if r.ident not in gone), *written),
    )


def _failing_later(facts: Facts) -> Facts:
    """Add three consecutive failures long after all worked again."""
    later = tuple(question("a", 0x900 + n, "plain", 120.0 + n, good=False) for n in range(3))
    return replace(facts, asked=(*facts.asked, *later))


@pytest.mark.parametrize(
    ("forge", "finding"),
    [
        (_missing_record, "what arrived is on record"),
        (_doubled_record, "what arrived is on record"),
        (_wrong_path, "what arrived is on record"),
        (_wrong_sandbox, "what arrived is on record"),
        (_missing_flow, "what arrived is on record"),
        (_arrived_twice, "what arrived is on record"),
        (_arrived_in_pieces, "what arrived is on record"),
        (_name_without_record, "what arrived is on record"),
        (_record_without_arrival, "what is on record arrived"),
        (_outcome_without_arrival, "what is on record arrived"),
        (_use_without_record, "uses of secrets are on record"),
        (_secret_elsewhere, "uses of secrets are on record"),
        (_denial_without_record, "denials are on record"),
        (_escaped_frame, "nothing escapes"),
        (_escaped_bytes, "nothing escapes"),
        (_blind_watch, "nothing escapes"),
        (_overrun_watch, "nothing escapes"),
        (_strange_name, "names that were asked"),
        (_broken_chain, "the log verifies"),
        (_leak, "no secret in any answer"),
        (_lost_trust, "clients' trust survives"),
        (_forbidden_answer, "clients' trust survives"),
        (_another_policy, "the same policy"),
        (_never_served, "all is back in time"),
        (_served_late, "all is back in time"),
        (lambda facts: _kill(facts, api=None), "all is back in time"),
        (lambda facts: _kill(facts, whole=7.0), "all is back in time"),
        (lambda facts: _kill(facts, create_failed="503"), "all is back in time"),
        (lambda facts: _kill(facts, victims=0), "all is back in time"),
        (_failing_later, "nothing fails without a cause"),
        (lambda facts: replace(facts, census={"mounts": "one more"}), "nothing is left over"),
    ],
)
def test_each_disagreement_is_found(forge: Callable[[Facts], Facts], finding: str) -> None:
    assert finding in wrong(judge(forge(agreeing())))


def test_a_flow_that_was_cut_is_no_disagreement() -> None:
    """It is on record, never arrived, and its client got no answer during the outage."""
    facts = agreeing()
    item = next(a for a in facts.asked if a.kind == "secret" and not a.good)
    allow = Record(
        "request", "allow", "sbx-a", item.ident, API, "GET", f"/v1/{item.ident}", None, "digest-a", item.began
    )

    assert [] == wrong(judge(replace(facts, records=(*facts.records, allow))))


def test_a_cut_flow_while_nothing_was_gone_is_one() -> None:
    facts = agreeing()
    item = question("a", 0x800, "secret", 120.0, good=False)
    allow = Record(
        "request", "allow", "sbx-a", item.ident, API, "GET", f"/v1/{item.ident}", None, "digest-a", item.began
    )
    forged = replace(facts, asked=(*facts.asked, item), records=(*facts.records, allow))

    assert ["what is on record arrived"] == wrong(judge(forged))


def test_one_that_is_late_within_a_wider_bound_is_good() -> None:
    assert [] == wrong(judge(_served_late(agreeing()), bound=60.0))


def test_what_was_written_down_is_read_back() -> None:
    """A client's line, the servers' notes (a request, bytes without a request, a name) and a record of the log."""
    one, two = ident("a", 1), ident("c", 2)
    line = f'{{"id": "{one}", "kind": "secret", "began": 1, "ended": 2, "good": true, "saw": "200", "got": "\\u00ff"}}'
    headers = '[["Authorization", "Bearer x"]]'
    notes = [
        f'{{"host": "{API}", "at": 5, "method": "GET", "target": "/v1/{one}", "headers": {headers}}}',
        f'{{"host": "{API}", "at": 6, "port": 443, "heard": "GET /v1/{one} HTTP/1.1"}}',
        f'{{"host": "{ATTACKER}", "at": 7, "port": 22, "body": "{two} {one}"}}',
        f'{{"host": "{DNS_ADDRESS}", "at": 8, "question": "{two}.cdn.bank.example", "type": "A"}}',
        f'{{"host": "{DNS_ADDRESS}", "at": 8, "question": "{API}", "type": "A"}}',
    ]
    record = {"kind": "request", "decision": "allow", "sandbox": "sbx-a", "host": API, "path": f"/v1/{one}"}

    assert [Asked(one, "sbx-a", "secret", 1, 2, True, "200", b"\xff")] == read_asked([line], "sbx-a")
    assert (
        [
            Arrival(one, API, "GET", f"/v1/{one}", True, at=5.0),
            Arrival(two, DNS_ADDRESS, "DNS", f"{two}.cdn.bank.example", at=8.0),
        ],
        [API],
    ) == read_far_end([notes[0], notes[1], notes[3], notes[4]], "Bearer x")
    strange = [Arrival(two, ATTACKER, whole=False, at=7.0), Arrival(one, ATTACKER, whole=False, at=7.0)]
    assert strange == read_far_end([notes[0], notes[2]], "Bearer x")[0][1:]
    assert one == read_log([{**record, "ts": "2026-01-01T00:00:00.000Z"}])[0].ident


def test_the_table_has_each_part_each_pair_and_all_of_both() -> None:
    slow = Outage(("serve", "hostd"), served=3.0, api=4.5, whole=2.0, created=1.0)
    lost = Outage(("hostd", "serve"), served=None, api=1.0, whole=2.0, created=None)
    table = recoveries([slow, lost, Outage(("serve",), served=0.0, api=1.5, whole=1.0, created=None)])

    assert ["alone", "in pairs", "serve", "hostd and serve"] == list(table)
    assert {"median": 1.5, "p95": 1.5, "worst": 1.5} == table["serve"]["all"]
    assert {"median": 4.5, "p95": None, "worst": None} == table["hostd and serve"]["all"]
    assert {"kills": 2, "api": {"median": 1.0, "p95": 4.5, "worst": 4.5}}.items() <= table["in pairs"].items()


@pytest.mark.parametrize("minutes", ["0", "-1", "15.1", "nan", "inf"])
def test_a_run_is_not_longer_than_the_gateway_permits_new_names(
    minutes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments([f"--minutes={minutes}"])
    assert "more names in an hour than the gateway permits" in capsys.readouterr().err
    assert 15 == arguments(["--minutes=15"]).minutes
