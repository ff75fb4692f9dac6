"""The verdict on a chaos run. Pure: facts in, findings out.

- Nothing escapes: no frame, no byte and no name of a forbidden kind, and the watch may have missed no frame.
- Wire and log agree one to one. What arrived has exactly one allow record, of the right host, method, path and
  sandbox. What is recorded as allowed did arrive, or its flow was aborted (see `_cut`).
- A secret that arrived has exactly one record of its use.
- A denial that a client received is recorded, unless auditd was down or the worker was killed.
- Clients never receive a secret, their trust never fails, and they never get an answer that policy forbids.
- After each kill all clients are served again in time, and under the same policy.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from demo.chaos.facts import FORBIDDEN, Arrival, Asked, Facts, Kill, Record
from testbed.internet import DNS_ADDRESS, STATUS

BOUND = 5.0
"""The seconds in which everything must have recovered after a kill."""
AFTERMATH = 1.0
"""Seconds after a complete recovery in which a failure, or a record, can still be caused by the kill."""
_CLOCKS = 0.05
"""The maximal difference between the clocks of a sandbox and of the host, in seconds."""
_SHOWN = 8
_AT_HOST = frozenset({"secret", "plain"})


@dataclass(frozen=True, slots=True)
class Outage:
    """The durations of one kill's effects."""

    parts: tuple[str, ...]
    served: float | None
    """Seconds until the last sandbox was served again; 0: none of them noticed the kill; None: never."""
    api: float | None
    whole: float | None
    created: float | None

    @property
    def all(self) -> float | None:
        """Seconds until sandboxes were served, the API answered and every process ran; None: never."""
        times = (self.served, self.api, self.whole)
        return None if None in times else max(time for time in times if time is not None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The findings, by the name of the check, and the counts."""

    findings: dict[str, list[str]]
    counts: dict[str, int]
    outages: tuple[Outage, ...]

    @property
    def good(self) -> bool:
        """Whether there is no finding."""
        return not any(self.findings.values())


def judge(facts: Facts, bound: float = BOUND) -> Verdict:
    """Judge all facts; after a kill everything must have recovered within `bound` seconds."""
    questions = _questions(facts)
    stories = [_Story(kill, questions) for kill in facts.kills]
    outages = [
        Outage(kill.parts, story.served, kill.api, kill.whole, kill.created)
        for kill, story in zip(facts.kills, stories, strict=True)
    ]
    troubles = [
        (kill.at, max(story.end, kill.at + max(kill.api or 0.0, kill.whole or 0.0)) + AFTERMATH)
        for kill, story in zip(facts.kills, stories, strict=True)
    ]
    findings = {
        "nothing escapes": [*_escapes(facts)],
        "what arrived is on record": [*_unrecorded(facts)],
        "what is on record arrived": [*_unarrived(facts, troubles)],
        "uses of secrets are on record": [*_uses(facts)],
        "denials are on record": [*_denials(facts, troubles)],
        "names that were asked": [*_names(facts)],
        "the log verifies": [facts.verified] if facts.verified else [],
        "no secret in any answer": [*_leaks(facts)],
        "clients' trust survives": [*_trust(facts)],
        "the same policy": [*_policies(facts)],
        "all is back in time": [*_late(facts, outages, bound)],
        "nothing fails without a cause": [*_without_cause(facts, troubles)],
        "nothing is left over": [f"{kind}: {what}" for kind, what in facts.census.items()],
    }
    kinds = Counter(item.kind for item in facts.asked)
    counts = {
        "kills": len(facts.kills),
        "questions": len(facts.asked),
        **{f"questions, {kind}": count for kind, count in sorted(kinds.items())},
        "failures": sum(1 for item in facts.asked if not item.good),
        "arrivals at the far end": len(facts.arrivals),
        "arrivals with a secret": sum(1 for arrival in facts.arrivals if arrival.secret),
        "records": len(facts.records),
        "allowed but cut before they arrived": len(_missing(facts)),
        "denials told but not on record (log or worker gone)": len([*_unrecorded_denials(facts)]),
        "frames to allowed places": facts.wire.allowed,
    }
    return Verdict(findings, counts, tuple(outages))


# Frames and requests that left.


def _escapes(facts: Facts) -> Iterator[str]:
    kinds = {asked.ident: asked.kind for asked in facts.asked}
    yield from _some(facts.wire.escaped)
    yield from _some(
        f"{arrival.ident} ({kinds[arrival.ident]}) arrived at {arrival.host}"
        for arrival in facts.arrivals
        if kinds.get(arrival.ident) in FORBIDDEN
    )
    if facts.wire.control < 1:
        yield "the watch does not see a control frame: it proves nothing"
    if facts.wire.missed:
        yield f"the watch missed {facts.wire.missed} frames"
    if not facts.wire.allowed:
        yield "the watch saw no allowed frame either: it proves nothing"


# Wire and log.


def _allows(facts: Facts) -> dict[str, list[Record]]:
    """Return the allow records of questions: of requests, of names, and of spliced flows.

    The record of a flow has no id. It belongs to the one question that was open when it was written.
    """
    found: dict[str, list[Record]] = defaultdict(list)
    flows: dict[str, list[Record]] = defaultdict(list)
    for record in facts.records:
        if record.ident and record.decision == "allow" and record.kind in ("request", "dns"):
            found[record.ident].append(record)
        elif record.kind == "flow" and record.decision == "allow" and record.host == STATUS:
            flows[record.sandbox].append(record)
    for item in facts.asked:
        if _spliced(facts, item):
            found[item.ident] += [
                flow for flow in flows[item.sandbox] if item.began - _CLOCKS <= flow.at <= item.ended + _CLOCKS
            ]
    return found


def _spliced(facts: Facts, item: Asked) -> bool:
    return item.kind == "plain" and item.sandbox in facts.spliced


def _unrecorded(facts: Facts) -> Iterator[str]:
    allows = _allows(facts)
    yield from _some(_disagreement(facts, arrival, allows.get(arrival.ident, [])) for arrival in facts.arrivals)
    times = Counter(arrival.ident for arrival in facts.arrivals if arrival.whole and arrival.host != DNS_ADDRESS)
    yield from _some(f"{ident} arrived {count} times" for ident, count in times.items() if count > 1)
    yield from _some(
        f"{ident} has {len(records)} allow records" for ident, records in allows.items() if len(records) > 1
    )


def _disagreement(facts: Facts, arrival: Arrival, records: list[Record]) -> str:
    if not records:
        return f"{arrival.ident} arrived at {arrival.host} without an allow record"
    record, expected = records[0], facts.sandboxes.get(arrival.ident[1])
    if record.kind == "flow":  # matched by its sandbox and its time
        return "" if record.host == arrival.host else f"{arrival.ident} was relayed to {arrival.host}"
    if record.sandbox != expected:
        return f"{arrival.ident} of {expected} is recorded as of {record.sandbox}"
    if arrival.host == DNS_ADDRESS:
        same = record.kind == "dns" and record.host == arrival.path
    elif arrival.whole:
        there = (arrival.host, arrival.method, arrival.path)
        same = record.kind == "request" and (record.host, record.method, record.path) == there
    else:
        same = record.kind == "request" and record.host == arrival.host
    return "" if same else f"{arrival.ident}: arrived {arrival}, recorded {record}"


def _missing(facts: Facts) -> dict[str, Record]:
    """Return what was allowed and never arrived, by id."""
    arrived = {arrival.ident for arrival in facts.arrivals}
    return {ident: records[0] for ident, records in _allows(facts).items() if records and ident not in arrived}


def _unarrived(facts: Facts, troubles: list[tuple[float, float]]) -> Iterator[str]:
    asked = {item.ident: item for item in facts.asked}
    yield from _some(
        f"{ident}: allowed at {record.at:.2f}, never arrived and was not cut ({asked.get(ident)})"
        for ident, record in _missing(facts).items()
        if not _cut(asked.get(ident), record, troubles)
    )
    arrived = {arrival.ident for arrival in facts.arrivals}
    yield from _some(
        f"{record.ident}: the log claims status {record.status}, but nothing arrived"
        for record in facts.records
        if record.kind == "request" and record.decision == "info" and record.status is not None and record.ident
        if record.ident not in arrived
    )
    yield from _some(
        f"{item.ident}: answered with {item.saw}, but nothing arrived"
        for item in facts.asked
        if item.good and item.kind in (*_AT_HOST, "dns") and item.ident not in arrived
    )


def _cut(asked: Asked | None, record: Record, troubles: list[tuple[float, float]]) -> bool:
    """Return whether a flow was aborted between record and first byte: while a part was down its client got nothing."""
    return asked is not None and not asked.good and _within(record.at, troubles)


def _uses(facts: Facts) -> Iterator[str]:
    uses = Counter(r.ident for r in facts.records if r.kind == "secret.use" and r.decision == "allow")
    yield from _some(
        f"{arrival.ident} arrived with a secret and {uses[arrival.ident]} records of its use"
        for arrival in facts.arrivals
        if arrival.secret and uses[arrival.ident] != 1
    )
    kinds = {asked.ident: asked for asked in facts.asked}
    yield from _some(
        f"{arrival.ident} ({kinds[arrival.ident].kind}) arrived {'with' if arrival.secret else 'without'} a secret"
        for arrival in facts.arrivals
        if arrival.whole and arrival.ident in kinds and arrival.host != DNS_ADDRESS
        if arrival.secret != (kinds[arrival.ident].kind == "secret")
    )


def _unrecorded_denials(facts: Facts) -> Iterator[Asked]:
    denied = Counter(r.ident for r in facts.records if r.decision == "deny" and r.ident)
    for item in facts.asked:
        if item.good and item.kind in ("path", "name", "sni", "nodns") and not denied[item.ident]:
            yield item


def _denials(facts: Facts, troubles: list[tuple[float, float]]) -> Iterator[str]:
    yield from _some(
        f"{item.ident} ({item.kind}) was denied at {item.ended:.2f} without a record"
        for item in _unrecorded_denials(facts)
        if not _within(item.began, troubles) and not _within(item.ended, troubles)
    )
    kinds = {asked.ident: asked for asked in facts.asked}
    doubled = Counter((r.ident, r.kind) for r in facts.records if r.decision == "deny" and r.ident)
    # A killed auditd can have written a record without confirming it: then the denial is recorded twice.
    yield from _some(
        f"{ident} ({kinds[ident].kind}) has {count} records of its denial"
        for (ident, _), count in doubled.items()
        if count > 1 and ident in kinds and not _within(kinds[ident].ended, troubles)
    )


def _names(facts: Facts) -> Iterator[str]:
    for name in sorted(set(facts.stray_names) - facts.allowed_names):
        yield f"the internet was asked for {name}"


# Clients.


def _leaks(facts: Facts) -> Iterator[str]:
    yield from _some(
        f"{item.ident} ({item.kind}) was told a secret"
        for item in facts.asked
        if any(form in item.got for form in facts.secret_forms)
    )


def _trust(facts: Facts) -> Iterator[str]:
    yield from _some(
        f"{item.ident} ({item.kind}): {item.saw}" for item in facts.asked if "CERTIFICATE_VERIFY" in item.saw.upper()
    )
    yield from _some(
        f"{item.ident} ({item.kind}) was answered {item.saw}"
        for item in facts.asked
        if item.kind in FORBIDDEN and (item.saw == "talks" or item.saw.startswith("2"))
    )


def _policies(facts: Facts) -> Iterator[str]:
    digests: dict[str, set[str]] = defaultdict(set)
    for record in facts.records:
        if record.policy is not None and record.kind in ("request", "flow", "dns", "gateway.configure"):
            digests[record.sandbox].add(record.policy)
    for sandbox in facts.sandboxes.values():
        if len(digests[sandbox]) != 1:
            yield f"{sandbox} was under {len(digests[sandbox])} policies: {sorted(digests[sandbox])}"


# Time.


def _within(moment: float, troubles: list[tuple[float, float]]) -> bool:
    return any(begin - AFTERMATH <= moment <= end for begin, end in troubles)


class _Story:
    """The outcomes for the clients after one kill, by sandbox and kind of question."""

    def __init__(self, kill: Kill, questions: dict[tuple[str, str], list[Asked]]) -> None:
        self.end = kill.at
        """The end of the last failure that this kill caused."""
        self.served: float | None = 0.0
        """Seconds after the kill until the last client was served again; None: it was not."""
        horizon = kill.at + max(kill.api or 0.0, kill.whole or 0.0) + AFTERMATH
        for asked in questions.values():
            self._follow(kill, horizon, asked[bisect_left(asked, kill.at, key=lambda item: item.ended) :])

    def _follow(self, kill: Kill, horizon: float, asked: list[Asked]) -> None:
        """Follow the questions of one kind.

        A failure is caused by this kill if it began before the recovery was complete, or if it directly follows such
        a failure.
        """
        failed = False
        for item in asked:
            if item.began > horizon and not failed:
                return
            if not item.good and item.began < kill.until:
                failed = True
                self.end = max(self.end, item.ended)
            elif failed and item.good:
                if self.served is not None:
                    self.served = max(self.served, item.ended - kill.at)
                failed = False
        if failed:
            self.served = None


def _questions(facts: Facts) -> dict[tuple[str, str], list[Asked]]:
    """Return the questions of each kind and sandbox, in order: one thread asks those of a kind one by one."""
    found: dict[tuple[str, str], list[Asked]] = defaultdict(list)
    for item in facts.asked:
        found[item.sandbox, item.kind].append(item)
    for items in found.values():
        items.sort(key=lambda item: item.ended)
    return found


def _late(facts: Facts, outages: list[Outage], bound: float) -> Iterator[str]:
    for kill, outage in zip(facts.kills, outages, strict=True):
        name = " and ".join(kill.parts)
        if kill.victims != len(kill.parts):
            yield f"{name}: {kill.victims} processes were found to kill"
        for what, seconds in (("sandboxes served", outage.served), ("API", kill.api), ("processes", kill.whole)):
            if seconds is None:
                yield f"{name} at {kill.at:.2f}: {what} did not come back"
            elif seconds > bound:
                yield f"{name} at {kill.at:.2f}: {what} back after {seconds:.2f} s"
        if kill.create_failed:
            yield f"{name} at {kill.at:.2f}: no new sandbox afterwards: {kill.create_failed}"
    good = Counter((item.sandbox, item.kind) for item in facts.asked if item.good)
    for sandbox in facts.sandboxes.values():
        for kind in ("secret", "plain", "name", "sni", "dns", "nodns"):
            if not good[sandbox, kind]:
                yield f"{sandbox}: not one {kind} question went well: its silence proves nothing"


def _without_cause(facts: Facts, troubles: list[tuple[float, float]]) -> Iterator[str]:
    """Yield failures while nothing was down: a single one can be caused by the host's load, three in a row cannot."""
    for (sandbox, kind), items in _questions(facts).items():
        row = 0
        for item in items:
            row = 0 if item.good or _within(item.began, troubles) or _within(item.ended, troubles) else row + 1
            if row == 3:
                yield f"{sandbox}: {kind} failed three times in a row at {item.ended:.2f} ({item.saw})"


def _some(findings: Iterable[str]) -> list[str]:
    """Return the findings that are not empty, the first few in full."""
    real = [text for text in findings if text]
    return real if len(real) <= _SHOWN else [*real[:_SHOWN], f"... and {len(real) - _SHOWN} more of these"]
