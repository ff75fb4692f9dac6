"""Watches all far ends concurrently while an attempt runs, and converts what arrived into evidence."""

import json
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lifecycle.posture.attempts import QUIC_INITIAL, Evidence, Report
from lifecycle.posture.capture import Capture
from testbed.internet import (
    ADDRESSES,
    API,
    ATTACKER,
    ATTACKER_V6,
    CONTROL_ADDRESS,
    CONTROL_GATEWAY,
    CONTROL_INTERFACE,
    DNS_ADDRESS,
    METADATA_ADDRESS,
    TUNNEL_ZONE,
    UP_ADDRESS,
    Internet,
)
from testbed.stack import Stack

GATEWAY_CANARY_PORTS = (8080, 15002)
SETTLE_SECONDS = 0.15
"""The time that a frame can need from one namespace to the next. The control runs show that it suffices."""


def wait_for(count: Callable[[], int], seconds: float = 20.0) -> int:
    """Call `count` until it is positive or `seconds` have passed; return its last result."""
    deadline = time.monotonic() + seconds
    while (result := count()) == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    return result


def targets(**places: object) -> dict[str, Any]:
    """Return the probes' input: the far ends, which are equal for all places, and `places` of the probe's start."""
    return {
        "attacker_name": ATTACKER,
        "attacker": ADDRESSES[ATTACKER],
        "attacker_v6": ATTACKER_V6,
        "allowed_name": API,
        "quic_initial": QUIC_INITIAL.read_text(),
        "tunnel_zone": TUNNEL_ZONE,
        "dns": DNS_ADDRESS,
        "metadata": METADATA_ADDRESS,
        "host": UP_ADDRESS,
        **places,
    }


def sandbox_targets() -> dict[str, Any]:
    """Return the targets for any sandbox: every slot has the same addresses."""
    return targets(
        resolver="192.0.2.1", gateway="192.0.2.1", inside="192.0.2.2", interface="eth0", gateway_mac="02:53:50:00:00:01"
    )


def control_targets() -> dict[str, Any]:
    """Return the targets for the place without a gateway."""
    return targets(
        resolver=DNS_ADDRESS,
        gateway=CONTROL_GATEWAY,
        inside=CONTROL_ADDRESS,
        interface=CONTROL_INTERFACE,
        gateway_mac="",
    )


class FarEndWatch:
    """The far ends during one sandbox's attempts. Use as a context manager."""

    def __init__(self, internet: Internet, stack: Stack, sandbox: Any, other: Any) -> None:
        self._internet, self._stack = internet, stack
        self._gateway_netns = stack.netns(sandbox.id, "gw")
        self._other_netns = stack.netns(other.id, "sbx")
        self._canary_name = f"gateway-{sandbox.id}"
        self._resources = ExitStack()

    def __enter__(self) -> "FarEndWatch":
        with ExitStack() as resources:
            internet = self._internet
            self._wire = resources.enter_context(Capture(internet.path(internet.net), "net0"))
            self._neighbour = resources.enter_context(Capture(self._other_netns, "eth0"))
            canary = internet.start_canary(self._gateway_netns, self._canary_name, *GATEWAY_CANARY_PORTS)
            resources.callback(end, canary)
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def mark(self) -> tuple[int, int, int, int]:
        """Return the present state of every far end."""
        host, gateway = self._internet.canary_hits("host"), self._internet.canary_hits(self._canary_name)
        return self._wire.mark(), self._neighbour.mark(), host, gateway

    def since(self, mark: tuple[int, int, int, int], report: Report) -> Evidence:
        """Return the evidence of what has arrived since `mark`, after a pause for late frames."""
        time.sleep(SETTLE_SECONDS)
        wire, neighbour, host, gateway = mark
        return Evidence(
            self._wire.since(wire),
            self._neighbour.since(neighbour),
            self._internet.canary_hits("host") - host,
            self._internet.canary_hits(self._canary_name) - gateway,
            report,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """End a canary that this demo has started."""
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def probe_environment(values: dict[str, Any]) -> str:
    """Return the environment value from which the probes read their targets."""
    return json.dumps(values)
