"""The results of a chaos run, as plain values: from the clients, the far end, the log, the wire and the kills.

Pure: the `read_*` functions parse text that was recorded.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from testbed.internet import DNS_ADDRESS

IDENT = re.compile(r"q[a-d][0-9a-f]{22}")
"""The id of one question: its load, its number, and sixteen random digits."""

FORBIDDEN = frozenset({"path", "name", "sni", "nodns", "spam"})
"""Kinds of questions of which nothing may ever arrive at any far end."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One question as its client observed it. Times are those of the host's clock."""

    ident: str
    sandbox: str
    kind: str
    began: float
    ended: float
    good: bool
    saw: str
    got: bytes


@dataclass(frozen=True, slots=True)
class Arrival:
    """One question at the far end. `whole` is False for bytes that never became a request."""

    ident: str
    host: str
    method: str = ""
    path: str = ""
    secret: bool = False
    """Whether it contained the right secret."""
    whole: bool = True
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Record:
    """One record of the audit log, with the fields that are used here."""

    kind: str
    decision: str
    sandbox: str
    ident: str
    host: str
    method: str
    path: str
    status: int | None
    policy: str | None
    at: float


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: the parts, its time, and the end of its observation (the next kill, or the end)."""

    parts: tuple[str, ...]
    at: float
    until: float
    victims: int
    api: float | None = None
    """Seconds until /health answered again; None: never."""
    whole: float | None = None
    """Seconds until every part was a new process and every sandbox had a worker; None: never."""
    created: float | None = None
    """Seconds that a whole life of a sandbox took afterwards; None: not tried."""
    create_failed: str = ""


@dataclass(frozen=True, slots=True)
class Wire:
    """The frames on the wire towards the internet."""

    escaped: tuple[str, ...]
    """Descriptions of the frames that no policy allows."""
    allowed: int
    control: int
    """Control frames from the upstream namespace to the attacker: they show that the watch records such a frame."""
    missed: int
    """Frames that the watch was too late to record."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The input of the judge."""

    asked: tuple[Asked, ...]
    arrivals: tuple[Arrival, ...]
    records: tuple[Record, ...]
    kills: tuple[Kill, ...]
    wire: Wire
    sandboxes: Mapping[str, str]
    """The sandbox of each load, by tag."""
    spliced: frozenset[str]
    """Sandboxes whose questions to the host without a secret are spliced: each of these questions is a separate
    flow."""
    secret_forms: tuple[bytes, ...]
    stray_names: tuple[str, ...]
    """Names without an id for which the internet's DNS was asked."""
    allowed_names: frozenset[str]
    verified: str
    """The faults that `sallyport audit verify` has found; empty if the log is intact."""
    census: Mapping[str, object]
    """The resources on the host in addition to those before the first kill."""


def read_asked(lines: Iterable[str], sandbox: str) -> list[Asked]:
    """Parse the results of one client."""
    items = (json.loads(line) for line in lines if line.strip())
    return [
        Asked(
            item["id"],
            sandbox,
            item["kind"],
            item["began"],
            item["ended"],
            item["good"],
            item["saw"],
            item["got"].encode("latin-1"),
        )
        for item in items
    ]


def read_far_end(lines: Iterable[str], authorization: str) -> tuple[list[Arrival], list[str]]:
    """Parse what the internet's servers received; return the arrivals, and the queried names without an id."""
    arrivals: list[Arrival] = []
    raw: list[tuple[str, str, float]] = []
    strays: list[str] = []
    for item in map(json.loads, lines):
        host, at = str(item["host"]), float(item.get("at", 0.0))
        if "question" in item:
            if (match := IDENT.search(item["question"])) is not None:
                arrivals.append(Arrival(match[0], DNS_ADDRESS, "DNS", item["question"], at=at))
            else:
                strays.append(str(item["question"]))
        elif "target" in item and (match := IDENT.search(item["target"])) is not None:
            secret = ["authorization", authorization] in [[name.lower(), value] for name, value in item["headers"]]
            arrivals.append(Arrival(match[0], host, item["method"], item["target"], secret, at=at))
        else:
            raw += [(found, host, at) for found in IDENT.findall(str(item.get("heard", item.get("body", ""))))]
    whole = {(arrival.ident, arrival.host) for arrival in arrivals}
    arrivals += [Arrival(ident, host, whole=False, at=at) for ident, host, at in raw if (ident, host) not in whole]
    return arrivals, strays


def read_log(records: Iterable[Mapping[str, Any]]) -> list[Record]:
    """Return the records of the audit log with the fields that are used here."""
    found = []
    for item in records:
        host, path = str(item.get("host", "")), str(item.get("path", ""))
        match = IDENT.search(path) or IDENT.search(host)
        found.append(
            Record(
                str(item["kind"]),
                str(item["decision"]),
                str(item.get("sandbox", "")),
                "" if match is None else match[0],
                host,
                str(item.get("method", "")),
                path,
                item.get("status"),
                item.get("policy"),
                datetime.fromisoformat(str(item.get("accepted", item["ts"]))).timestamp(),
            )
        )
    return found
