"""Watches the wire towards the demo internet for frames that no policy allows, and reads the far end's file."""

import socket
from pathlib import Path

from demo.chaos.facts import Wire
from lifecycle.posture.capture import Capture, Frame
from testbed.far_end import wait_for
from testbed.internet import ADDRESSES, API, ATTACKER, DNS_ADDRESS, STATUS, Internet

_TCP, _UDP, _ICMP, _ICMP6 = 6, 17, 1, 58
_UNREACHABLE = 3
_HOSTS = frozenset({ADDRESSES[API], ADDRESSES[STATUS]})
_CONTROL_PORT = 9
"""No service listens there: the kernel would reject an answer, and that rejection is also a frame."""


def permitted(frame: Frame) -> bool:
    """Return whether this run's policies allow such a frame, or the kernel sends it by itself."""
    if frame.destination in _HOSTS and (frame.protocol, frame.destination_port) == (_TCP, 443):
        return True
    if frame.destination == DNS_ADDRESS and (frame.protocol, frame.destination_port) == (_UDP, 53):
        return True
    if frame.protocol == _ICMP and frame.destination in (*_HOSTS, DNS_ADDRESS):
        return frame.data[34] == _UNREACHABLE  # for an answer to a process that was killed
    # The neighbour discovery of the namespace itself; workers get no IPv6 here.
    return frame.destination.startswith("ff02:") and frame.protocol in (0, _ICMP6)


class WireWatch:
    """Counts permitted frames and records all others. Use as a context manager."""

    def __init__(self, internet: Internet) -> None:
        self._internet = internet
        self._allowed = 0
        self._control = 0
        self._from = 0
        self._capture = Capture(internet.path(internet.net), "net0", self._strange)

    def _strange(self, frame: Frame) -> bool:
        if permitted(frame):
            self._allowed += 1
            return False
        return True

    def __enter__(self) -> "WireWatch":
        self._capture.__enter__()
        with self._internet.open_socket(self._internet.up, socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"control", (ADDRESSES[ATTACKER], _CONTROL_PORT))
        self._control = wait_for(lambda: len(self._capture.since(0)))
        self._from = self._capture.mark()
        return self

    def __exit__(self, *_: object) -> None:
        self._capture.__exit__()

    def found(self) -> Wire:
        """Return what was recorded until now."""
        escaped = [
            f"{f.source} to {f.destination}, protocol {f.protocol}, port {f.destination_port}"
            for f in self._capture.since(self._from)
        ]
        return Wire(tuple(escaped), self._allowed, self._control, self._capture.missed())


class Tail:
    """Reads the lines that are appended to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size

    def lines(self) -> list[str]:
        """Return the complete lines that are new since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode().splitlines()
