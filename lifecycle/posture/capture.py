"""A packet capture that answers one question: what arrived there?

A denial is never judged by the sandbox's own view, only by the frames that reached the other end.
"""

import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

_ALL = 0x0003
_MAX_FRAMES = 200_000
_SO_RCVBUFFORCE = 33
_SOL_PACKET, _PACKET_STATISTICS = 263, 6


def in_namespace[T](path: str, action: Callable[[], T]) -> T:
    """Run `action` on a thread in the network namespace at `path`, and return its result."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.setns(fd, os.CLONE_NEWNET)
            finally:
                os.close(fd)
            outcome.append(action())
        except BaseException as error:  # noqa: BLE001 - carried to the caller's thread
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


@dataclass(frozen=True, slots=True)
class Frame:
    """One received frame: its addresses and ports, if it has them, and all of its bytes."""

    source: str
    destination: str
    protocol: int
    destination_port: int
    data: bytes


def parse(data: bytes) -> Frame | None:
    """Parse an Ethernet frame's IPv4 or IPv6 header. Return None for another protocol, for example ARP."""
    if len(data) < 34:
        return None
    ethertype = struct.unpack_from("!H", data, 12)[0]
    if ethertype == 0x0800:
        header_length = (data[14] & 15) * 4
        protocol = data[23]
        source, destination = str(IPv4Address(data[26:30])), str(IPv4Address(data[30:34]))
        offset = 14 + header_length
    elif ethertype == 0x86DD and len(data) >= 54:
        protocol = data[20]
        source, destination = str(IPv6Address(data[22:38])), str(IPv6Address(data[38:54]))
        offset = 54
    else:
        return None
    port = struct.unpack_from("!H", data, offset + 2)[0] if protocol in (6, 17) and len(data) >= offset + 4 else 0
    return Frame(source, destination, protocol, port, data)


class Capture:
    """Every frame that arrives on one interface (None: on any) after the capture's creation. Use as a context manager.

    Args:
        keep: selects the frames to keep; all by default. It runs on the capture's own thread.
    """

    def __init__(self, netns: str, interface: str | None, keep: Callable[[Frame], bool] = lambda _frame: True) -> None:
        self._keep = keep
        self._socket = in_namespace(
            netns,
            lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL)),
        )
        if interface is not None:
            self._socket.bind((interface, _ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 8 << 20)
        self._frames: deque[Frame] = deque(maxlen=_MAX_FRAMES)
        self._seen = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"capture:{interface}")

    def __enter__(self) -> "Capture":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not select.select([self._socket], [], [], 0.05)[0]:
                continue
            data, origin = self._socket.recvfrom(65535)
            if origin[2] == socket.PACKET_OUTGOING:
                continue
            frame = parse(data)
            if frame is not None and self._keep(frame):
                with self._lock:
                    self._frames.append(frame)
                    self._seen += 1

    def missed(self) -> int:
        """Return the number of frames that were lost because they came too fast, since the last call."""
        return int(struct.unpack("II", self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))[1])

    def mark(self) -> int:
        """Return a position in the stream of frames, for `since`."""
        with self._lock:
            return self._seen

    def since(self, mark: int) -> list[Frame]:
        """Return the frames that arrived after `mark`."""
        with self._lock:
            count = min(self._seen - mark, len(self._frames))
            return list(self._frames)[len(self._frames) - count :] if count else []
