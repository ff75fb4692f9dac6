"""Attacks in exact bytes: sent from a sandbox and, as a control, without a gateway; judged at the far end.

- Every attack writes its mark into the bytes that it sends, so that what arrives can be attributed to it.
- `Verdicts` has both sides of one batch: the answers to each client; and the servers' notes, the frames on the wire
  and the audit records of that time.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lifecycle.posture.capture import Capture, Frame
from testbed import raw_client
from testbed.internet import ADDRESSES, API, DNS_ADDRESS, Internet
from testbed.stack import Stack

MARK = "@@"
SCRIPT = "/tmp/raw_client.py"
_SETTLE_SECONDS = 10.0
_ARRIVES_SECONDS = 5.0
"""For a request after which an answer is expected: if the client closed before the request is forwarded, it would be
lost."""
_STILL_SECONDS, _STILL_AT_MOST = 0.3, 5.0
"""Before a batch begins, this time must pass without a frame, because frames of earlier flows do not belong to the
batch. The wait ends after `_STILL_AT_MOST`, because other flows can continue."""

type Request = tuple[str, int, str, str]
"""Host, port, method and path, without the query."""
_CLOSE_ALERT = re.compile(rb"(?:\x17\x03\x03\x00\x13.{19}|\x15\x03\x03\x00(?:\x12.{18}|\x1a.{26}))?", re.DOTALL)
"""Nothing, or a close alert of TLS 1.3 or 1.2."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One conversation.

    Attributes:
        name: a sentence or a few words, unique in its batch.
        send: texts (latin-1, one write each) and pauses in seconds; `@@` stands for the attack's mark.
        tls: the server name for TLS; None: no TLS.
        arrives: the targets that may arrive at the host, in any order; `@@` as above.
        options: more of `raw_client`'s case: `alpn`, `hello`, `quiet`, `udp`.
    """

    name: str
    send: tuple[str | float, ...]
    tls: str | None = API
    host: str = API
    port: int = 443
    arrives: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def case(self, mark: str) -> dict[str, Any]:
        """Return the case in `raw_client`'s format."""
        send = [part.replace(MARK, mark) if isinstance(part, str) else part for part in self.send]
        address = ADDRESSES.get(self.host, self.host)
        case: dict[str, Any] = {"address": address, "port": self.port, "send": send, **self.options}
        if self.tls is not None:
            case["sni"] = self.tls
        if self.arrives:
            case.setdefault("quiet", _ARRIVES_SECONDS)
        return case


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The results of a batch."""

    marks: dict[str, str]
    answers: dict[str, dict[str, Any]]
    noted: list[dict[str, Any]]
    frames: list[Frame]
    records: list[dict[str, Any]]

    def answer(self, attack: Attack) -> str:
        """Return the bytes that the client received, latin-1."""
        return str(self.answers[attack.name]["received"])

    def arrived(self, attack: Attack) -> list[str]:
        """Return the targets of requests with this attack's mark that any server received."""
        mark = self.marks[attack.name]
        return sorted(str(note["target"]) for note in self.noted if "target" in note and mark in json.dumps(note))

    def heard(self, attack: Attack) -> bool:
        """Return whether any server received bytes with this attack's mark, in a request or not."""
        mark = self.marks[attack.name]
        return any(mark in note.get("heard", "") for note in self.noted)

    def expected(self, attack: Attack) -> list[str]:
        """Return the targets that may arrive."""
        return sorted(target.replace(MARK, self.marks[attack.name]) for target in attack.arrives)

    @property
    def received_requests(self) -> Counter[Request]:
        """Every request that any server received."""
        return Counter(
            (str(note["host"]), int(note["port"]), str(note["method"]), str(note["target"]).partition("?")[0])
            for note in self.noted
            if "target" in note
        )

    @property
    def logged_requests(self) -> Counter[Request]:
        """Every request that the audit log records as allowed."""
        return Counter(
            (str(record["host"]), int(record["port"]), str(record["method"]), str(record["path"]))
            for record in self.records
            if record["kind"] == "request" and record["decision"] == "allow"
        )

    def data_frames(self) -> list[Frame]:
        """Return frames of TCP and UDP that any server except the resolver received."""
        return [frame for frame in self.frames if frame.destination != DNS_ADDRESS and frame.protocol in (6, 17)]


def marks(attacks: Iterable[Attack]) -> dict[str, str]:
    """Return a mark for each attack that occurs nowhere else."""
    prefix = os.urandom(3).hex()
    return {attack.name: f"m{prefix}{number:03d}z" for number, attack in enumerate(attacks)}


def from_sandbox(attacks: tuple[Attack, ...], internet: Internet, stack: Stack, sandbox: str) -> Verdicts:
    """Run a batch inside `sandbox`, with the SDK."""
    client = stack.connect(sandbox)
    try:
        client.files.write_file(SCRIPT, Path(str(raw_client.__file__)).read_text())

        def run(cases: str) -> str:
            client.files.write_file("/tmp/cases.json", cases)
            done = client.commands.run(f"python3 {SCRIPT} </tmp/cases.json >/tmp/results.json")
            if done.exit_code != 0:
                raise RuntimeError("".join(message.text for message in done.logs.stderr))
            return str(client.files.read_file("/tmp/results.json"))

        before = len(_of(stack, sandbox))
        verdicts = _run(attacks, internet, run, lambda: _of(stack, sandbox)[before:])
    finally:
        client.close()
    return verdicts


def from_outside(attacks: tuple[Attack, ...], internet: Internet) -> Verdicts:
    """Run a batch in a place without a gateway, as a control."""

    def run(cases: str) -> str:
        namespace = internet.path(internet.control)
        command = ["nsenter", f"--net={namespace}", sys.executable, str(raw_client.__file__)]
        environment = {"PATH": os.environ["PATH"], "SSL_CERT_FILE": str(internet.roots)}
        done = subprocess.run(command, input=cases, capture_output=True, text=True, check=True, env=environment)
        return done.stdout

    return _run(attacks, internet, run, list)


def _of(stack: Stack, sandbox: str) -> list[dict[str, Any]]:
    return [record for record in stack.audit_records() if record.get("sandbox") == sandbox]


def _run(
    attacks: tuple[Attack, ...],
    internet: Internet,
    run: Callable[[str], str],
    records: Callable[[], list[dict[str, Any]]],
) -> Verdicts:
    named = marks(attacks)
    if len(named) != len(attacks):
        raise ValueError("two attacks have one name")
    with (
        Capture(internet.path(internet.net), "net0") as gated,
        Capture(internet.path(internet.net), "net1") as ungated,
    ):
        _wait_until_still(gated, ungated)
        first, before = (gated.mark(), ungated.mark()), len(internet.notes())
        answers = json.loads(run(json.dumps({attack.name: attack.case(named[attack.name]) for attack in attacks})))
        verdicts = Verdicts(named, answers, [], [], [])
        deadline = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.2)
            noted, logged = [note for note in internet.notes()[before:] if _of_batch(note, named)], records()
            frames = [frame for frame in (*gated.since(first[0]), *ungated.since(first[1])) if not only_ends(frame)]
            verdicts = Verdicts(named, answers, noted, frames, logged)
            if logged:
                complete = verdicts.received_requests == verdicts.logged_requests
                complete &= all(verdicts.expected(one) == verdicts.arrived(one) for one in attacks)
            else:
                complete = all(map(verdicts.heard, attacks))
            if complete:
                break
    return verdicts


def _of_batch(note: Mapping[str, Any], named: Mapping[str, str]) -> bool:
    """Whether a note is of this batch. A server notes what it heard when a connection ends, which can be later."""
    return "heard" not in note or any(mark in note["heard"] for mark in named.values())


def only_ends(frame: Frame) -> bool:
    """Whether a frame only ends or confirms an existing TCP connection. Workers end idle ones of earlier requests."""
    if frame.protocol != 6 or frame.data[12:14] != b"\x08\x00":
        return False
    begin, end = 14 + (frame.data[14] & 15) * 4, 14 + int.from_bytes(frame.data[16:18])
    segment = frame.data[begin:end]
    if len(segment) < 20 or segment[13] & 2:  # SYN
        return False
    return _CLOSE_ALERT.fullmatch(segment[(segment[12] >> 4) * 4 :]) is not None


def _wait_until_still(*wires: Capture) -> None:
    """Wait until no frame has arrived for a moment, or the time is over."""
    deadline = time.monotonic() + _STILL_AT_MOST
    seen, since = [-1], time.monotonic()
    while (now := time.monotonic()) < deadline and now - since < _STILL_SECONDS:
        if (marks := [wire.mark() for wire in wires]) != seen:
            seen, since = marks, now
        time.sleep(0.05)
