"""The table of attempts: what is tried, and how the far end tells whether it worked.

Each attempt is one probe, run from three places: the workload, a privileged container in the sandbox's network
namespace, and a place without any gate (the control). From the first two nothing may arrive; from the control
something must, or the row proves nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from lifecycle.posture.capture import Frame
from lifecycle.posture.ways_out import MARKER

ATTACKER_ADDRESS, ATTACKER_V6 = "93.184.216.66", "2606:2800:220::66"
METADATA_ADDRESS = "169.254.169.254"
QUIC_INITIAL = Path(__file__).with_name("quic_initial.b64")


class FarEnd(StrEnum):
    """Where an attempt is judged."""

    ATTACKER = "frames at the attacker"
    TUNNEL = "frames at the attacker, or tunnelled queries at any DNS server"
    METADATA = "frames at the metadata service"
    HOST = "connections to the host's own services"
    GATEWAY = "connections to services in the gateway's namespace"
    NEIGHBOUR = "frames in the other sandbox's namespace"
    KERNEL = "kernel interfaces opened"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One row: the probe's name, what a reader is told, where it is judged, and from where it makes sense."""

    probe: str
    title: str
    far_end: FarEnd
    privileged: bool = True
    noticed: bool = False
    """From a privileged container it changes the sandbox's namespace: the sandbox is cut off for it."""


ATTEMPTS = (
    Attempt("by-name", "HTTPS to the attacker by name", FarEnd.ATTACKER),
    Attempt("by-address", "TLS to the attacker's address, with and without SNI", FarEnd.ATTACKER),
    Attempt("by-port", "TCP to the attacker's ports 22, 80, 8443", FarEnd.ATTACKER),
    Attempt("forged-host", "HTTP to the attacker with an allowed Host", FarEnd.ATTACKER),
    Attempt("forged-sni", "TLS to the attacker with an allowed SNI", FarEnd.ATTACKER),
    Attempt("udp", "UDP to the attacker", FarEnd.ATTACKER),
    Attempt("quic", "a recorded QUIC Initial", FarEnd.ATTACKER),
    Attempt("icmp", "ICMP echo with a payload", FarEnd.ATTACKER),
    Attempt("ipv6", "IPv6, with addresses and routes of its own", FarEnd.ATTACKER, noticed=True),
    Attempt("dns-over-tls", "DNS over TLS to the attacker's resolver", FarEnd.ATTACKER),
    Attempt("dns-tunnel", "data in DNS names, by every resolver", FarEnd.TUNNEL),
    Attempt("metadata", "the metadata address, also by an allowed Host", FarEnd.METADATA),
    Attempt("host-ports", "the host's ports, on loopback and its public address", FarEnd.HOST),
    Attempt("gateway-ports", "the gateway's own ports", FarEnd.GATEWAY),
    Attempt("neighbour", "the other sandbox", FarEnd.NEIGHBOUR),
    Attempt("so-mark", "SO_MARK on a socket", FarEnd.ATTACKER),
    Attempt("af-packet", "hand-made Ethernet frames", FarEnd.ATTACKER),
    Attempt("nft-flush", "flushing nft rules as root", FarEnd.ATTACKER),
    Attempt("af-vsock", "a vsock socket", FarEnd.KERNEL, privileged=False),
    Attempt("io-uring", "an io_uring", FarEnd.KERNEL, privileged=False),
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was seen outside while a probe ran."""

    frames: list[Frame]
    """Frames that left for, or came in at, the internet's servers."""
    neighbour_frames: list[Frame]
    host_hits: int
    gateway_hits: int
    result: str
    """What the probe itself printed."""


_AT_ATTACKER = frozenset({ATTACKER_ADDRESS, ATTACKER_V6})
_TUNNEL_LABEL = MARKER.hex()[:40].encode()


def arrived(far_end: FarEnd, evidence: Evidence) -> int:
    """How much arrived at `far_end`: frames, connections or opened interfaces."""
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
            return evidence.result.count("opened")


def _count(frames: list[Frame], matches: Callable[[Frame], bool]) -> int:
    return sum(1 for frame in frames if matches(frame))
