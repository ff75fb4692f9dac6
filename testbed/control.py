"""Control runs: the same probes in a place without a gateway. A row whose control does not arrive proves nothing."""

import subprocess

from lifecycle.posture.attempts import ATTEMPTS, Attempt, Evidence, FarEnd, arrived, refused
from lifecycle.posture.capture import Capture
from testbed.far_end import GATEWAY_CANARY_PORTS, control_targets, end, wait_for
from testbed.internet import DNS_ADDRESS, Internet
from testbed.privileged import PrivilegedContainer

_CANARY = "control-gateway"
_CLOSED = "table ip control { chain out { type filter hook output priority 0; policy drop; }; }"
"""Drops all packets that leave a namespace until its rules are flushed."""


def run_controls(internet: Internet, runtime: str) -> dict[str, int]:
    """Run every probe from the namespace without a gateway, in a privileged container of `runtime`.

    Returns:
        For each probe, how much arrived at its far end (frames or connections). The neighbour's frames are counted on
        the control's own wire, because it shares that segment.
    """
    net = internet.path(internet.net)
    canary = internet.start_canary(net, _CANARY, *GATEWAY_CANARY_PORTS)
    try:
        with (
            Capture(net, "net1") as wire,
            PrivilegedContainer(internet.path(internet.control), control_targets(), DNS_ADDRESS, runtime) as container,
        ):
            found = {}
            for attempt in ATTEMPTS:
                if attempt.probe == "nft-flush":
                    _rule(internet, _CLOSED)
                found[attempt.probe] = _arrives(internet, wire, container, attempt)
            return found
    finally:
        end(canary)
        _rule(internet, "flush ruleset")
        internet.connect_control()


def _rule(internet: Internet, command: str) -> None:
    subprocess.run(["nsenter", f"--net={internet.path(internet.control)}", "nft", command], check=True)


def _arrives(internet: Internet, wire: Capture, container: PrivilegedContainer, attempt: Attempt) -> int:
    """Run one probe, wait for its traffic, and return how much has arrived."""
    mark, host, gateway = wire.mark(), internet.canary_hits("host"), internet.canary_hits(_CANARY)
    report = container.attempt(attempt.probe)

    def count() -> int:
        frames = wire.since(mark)
        evidence = Evidence(
            frames,
            frames if attempt.far_end is FarEnd.NEIGHBOUR else [],
            internet.canary_hits("host") - host,
            internet.canary_hits(_CANARY) - gateway,
            report,
        )
        return arrived(attempt.far_end, evidence)

    return 0 if refused(report) else wait_for(count)
