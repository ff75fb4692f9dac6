"""The table of attempts: the probes, and how the far end shows whether one succeeded.

Each attempt is one probe, run from three places: the workload, a privileged container in the sandbox's network
namespace, and a place without a gate (the control). From the first two nothing may arrive. From the control something
must arrive, otherwise the row proves nothing. The probe must report from each place that it ran to its end.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from lifecycle.posture.capture import Frame
from lifecycle.posture.ways_out import MARKER, labels

ATTACKER_ADDRESS, ATTACKER_V6 = "93.184.216.66", "2606:2800:220::66"
METADATA_ADDRESS = "169.254.169.254"
QUIC_INITIAL = Path(__file__).with_name("quic_initial.b64")


class FarEnd(StrEnum):
    """The place where an attempt is judged."""

    ATTACKER = "frames at the attacker"
    TUNNEL = "frames at the attacker, or tunnelled queries at any DNS server"
    METADATA = "frames at the metadata service"
    HOST = "connections to the host's own services"
    GATEWAY = "connections to services in the gateway's namespace"
    NEIGHBOUR = "frames in the other sandbox's namespace"
    KERNEL = "kernel interfaces opened"


class Control(StrEnum):
    """The place from which an attempt arrives on one runtime if there is no gate."""

    WORKLOAD = "arrives from the workload"
    PRIVILEGED = "refused to the workload, arrives with every capability"
    ABSENT = "refused with every capability, too: the kernel has no such interface"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One row: the probe's name, its description, where it is judged, and the places where it makes sense."""

    probe: str
    title: str
    far_end: FarEnd
    privileged: bool = True
    noticed: bool = False
    """From a privileged container it changes the sandbox's namespace, so the watch disconnects the sandbox."""
    runc: Control = Control.WORKLOAD
    runsc: Control = Control.WORKLOAD

    def control(self, runtime: str) -> Control:
        """Return the place from which it arrives on `runtime` without a gate."""
        return {"runc": self.runc, "runsc": self.runsc}[runtime]


_PRIVILEGED: dict[str, Any] = {"runc": Control.PRIVILEGED, "runsc": Control.PRIVILEGED}
_ON_RUNC: dict[str, Any] = {"runc": Control.PRIVILEGED, "runsc": Control.ABSENT}

ATTEMPTS = (
    Attempt("by-name", "HTTPS to the attacker by name", FarEnd.ATTACKER),
    Attempt("by-address", "TLS to the attacker's address, with and without SNI", FarEnd.ATTACKER),
    Attempt("by-port", "TCP to the attacker's ports 22, 80, 8443", FarEnd.ATTACKER),
    Attempt("forged-host", "HTTP to the attacker with an allowed Host", FarEnd.ATTACKER),
    Attempt("forged-sni", "TLS to the attacker with an allowed SNI", FarEnd.ATTACKER),
    Attempt("udp", "UDP to the attacker", FarEnd.ATTACKER),
    Attempt("quic", "a recorded QUIC Initial", FarEnd.ATTACKER),
    Attempt("icmp", "ICMP echo with a payload", FarEnd.ATTACKER, runc=Control.PRIVILEGED),
    Attempt("ipv6", "IPv6, with addresses and routes of its own", FarEnd.ATTACKER, noticed=True, **_PRIVILEGED),
    Attempt("dns-over-tls", "DNS over TLS to the attacker's resolver", FarEnd.ATTACKER),
    Attempt("dns-tunnel", "data in DNS names, by every resolver", FarEnd.TUNNEL),
    Attempt("metadata", "the metadata address, also by an allowed Host", FarEnd.METADATA),
    Attempt("host-ports", "the host's ports, on loopback and its public address", FarEnd.HOST),
    Attempt("gateway-ports", "the gateway's own ports", FarEnd.GATEWAY),
    Attempt("neighbour", "the other sandbox", FarEnd.NEIGHBOUR),
    Attempt("so-mark", "SO_MARK on a socket", FarEnd.ATTACKER, **_PRIVILEGED),
    Attempt("af-packet", "hand-made Ethernet frames", FarEnd.ATTACKER, **_PRIVILEGED),
    Attempt("nft-flush", "flushing nft rules as root", FarEnd.ATTACKER, **_ON_RUNC),
    Attempt("af-vsock", "a vsock socket", FarEnd.KERNEL, privileged=False, **_ON_RUNC),
    Attempt("io-uring", "an io_uring", FarEnd.KERNEL, privileged=False, **_ON_RUNC),
)


class ProbeError(Exception):
    """A probe did not run to its end: it crashed, was killed or does not exist. The message has the evidence."""


Report = dict[str, str]
"""The result of each try of a probe, as the probe itself reported it."""
_BY_THE_KERNEL = frozenset(
    (
        *("EPERM", "EACCES", "EROFS", "ENOENT", "ENOSYS", "EAFNOSUPPORT", "EPROTONOSUPPORT"),
        *("ENETUNREACH", "EADDRNOTAVAIL"),
    )
)
_OUTCOME = re.compile(r"(sent|done|opened)(, .+)?|refused \S.*")


def report(probe: str, status: int | None, printed: str) -> Report:
    """Return the report of a probe that ended with `status` and printed `printed`.

    Raises:
        ProbeError: it did not run to its end.
    """
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    said = f": {lines[-1][-120:]}" if lines else ""
    if status != 0:
        raise ProbeError(f"probe {probe} ended with {status}{said}")
    try:
        (found,) = (json.loads(line.removeprefix("report ")) for line in lines if line.startswith("report "))
    except ValueError:
        raise ProbeError(f"probe {probe} made no report{said}") from None
    if not isinstance(found, dict) or list(found) != labels(probe):
        raise ProbeError(f"probe {probe} reported other tries than it has")
    if not all(isinstance(outcome, str) and _OUTCOME.fullmatch(outcome) for outcome in found.values()):
        raise ProbeError(f"probe {probe} reported a try without an outcome")
    return found


def refused(report: Report) -> bool:
    """Return whether the probe's kernel refused each try, so that nothing of it can have left."""
    return bool(report) and all(outcome.removeprefix("refused ") in _BY_THE_KERNEL for outcome in report.values())


@dataclass(frozen=True, slots=True)
class Evidence:
    """The traffic that was seen outside during a probe."""

    frames: list[Frame]
    """Frames that left for, or came from, the internet's servers."""
    neighbour_frames: list[Frame]
    host_hits: int
    gateway_hits: int
    report: Report


_AT_ATTACKER = frozenset({ATTACKER_ADDRESS, ATTACKER_V6})
_TUNNEL_LABEL = MARKER.hex()[:40].encode()


def arrived(far_end: FarEnd, evidence: Evidence) -> int:
    """Return how much arrived at `far_end`: frames, connections or opened interfaces."""
    match far_end:
        case FarEnd.ATTACKER:
            return _count(evidence.frames, lambda frame: frame.destination in _AT_ATTACKER)
        case FarEnd.TUNNEL:
            return _count(
                evidence.frames,
                lambda frame: frame.destination in _AT_ATTACKER or _TUNNEL_LABEL in frame.data.lower(),
            )
        case FarEnd.METADATA:
            return _count(evidence.frames, lambda frame: frame.destination == METADATA_ADDRESS)
        case FarEnd.HOST:
            return evidence.host_hits
        case FarEnd.GATEWAY:
            return evidence.gateway_hits
        case FarEnd.NEIGHBOUR:
            return _count(evidence.neighbour_frames, lambda frame: MARKER in frame.data)
        case FarEnd.KERNEL:
            return sum(1 for outcome in evidence.report.values() if outcome.startswith("opened"))


def _count(frames: list[Frame], matches: Callable[[Frame], bool]) -> int:
    return sum(1 for frame in frames if matches(frame))
