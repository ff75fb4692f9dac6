"""What a chaos run found out, as plain values: from the clients, the far end, the log, the wire and the kills.

Pure but for `read_*`, which parse what was written down.
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
"""Kinds of questions of which nothing may ever arrive anywhere."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One question as its client saw it. Times are the host's clock."""

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
    """Whether the right secret was in it."""
    whole: bool = True
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Record:
    """One record of the audit log, as far as it matters here."""

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
    """One kill: what, when, and until when its consequences were looked at (the next kill, or the end)."""

    parts: tuple[str, ...]
    at: float
    until: float
    victims: int
    api: float | None = None
    """Seconds until /health answered again; None: never."""
    whole: float | None = None
    """Seconds until every part was a new process and every sandbox had a worker; None: never."""
    created: float | None = None
    """Seconds a create and delete took after that; None: not tried."""
    create_failed: str = ""


@dataclass(frozen=True, slots=True)
class Wire:
    """What was on the wire towards the internet."""

    escaped: tuple[str, ...]
    """Frames that no policy allows, in words."""
    allowed: int
    control: int
    """Frames that the control namespace sent to the attacker: they show that the watch sees such a frame."""
    missed: int
    """Frames the watch could not take in time."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything the judge gets."""

    asked: tuple[Asked, ...]
    arrivals: tuple[Arrival, ...]
    records: tuple[Record, ...]
    kills: tuple[Kill, ...]
    wire: Wire
    sandboxes: Mapping[str, str]
    """The tag of each load, and its sandbox."""
    spliced: frozenset[str]
    """Sandboxes whose questions to the host without a secret are spliced: each is a flow of its own."""
    secret_forms: tuple[bytes, ...]
    stray_names: tuple[str, ...]
    """Names that the internet's DNS was asked for and that carry no id."""
    allowed_names: frozenset[str]
    verified: str
    """What `sallyport audit verify` found wrong; empty when the log is whole."""
    census: Mapping[str, object]
    """What is on the machine beyond what was there before the first kill."""


def read_asked(lines: Iterable[str], sandbox: str) -> list[Asked]:
    """Parse what one client wrote."""
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
    """Parse what the internet's servers received; returns the arrivals and the names asked for without an id."""
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
    """Keep of the audit log what belongs to sandboxes."""
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
                datetime.fromisoformat(str(item["ts"])).timestamp(),
            )
        )
    return found
