"""A server with an agent in each of its daemons and workers, and the client side of these agents."""

import json
import queue
import socket
import threading
from typing import Any

from tests.security.compromise.agent import SOCKET
from tests.security.substituted import SubstitutedStack

_SECONDS = 60.0


class Refused(Exception):
    """An error that ended the hostile code: its type, its errno (None if it has none) and its text."""

    def __init__(self, kind: str, number: int | None, text: str) -> None:
        super().__init__(f"{kind} {number}: {text}")
        self.kind, self.number, self.text = kind, number, text


class Hostile:
    """A compromised process in which a test runs code. `pid` and `uid` are those that the kernel reports."""

    def __init__(self, sock: socket.socket, pid: int, uid: int) -> None:
        self._sock, self.pid, self.uid = sock, pid, uid
        self._file = sock.makefile("rb")

    def run(self, code: str, seconds: float = _SECONDS) -> Any:
        """Run `code` in the process and return its `value`.

        Raises:
            Refused: the code ended with an exception.
            TimeoutError: the code did not end in time.
            ConnectionError: the process has ended.
        """
        self.begin(code)
        return self.finish(seconds)

    def begin(self, code: str) -> None:
        """Start `code` in the process without waiting for its end."""
        self._sock.sendall(json.dumps(code).encode() + b"\n")

    def finish(self, seconds: float = _SECONDS) -> Any:
        """Wait for the end of the code that `begin` started. Return and raise as `run` does."""
        self._sock.settimeout(seconds)
        line = self._file.readline()
        if not line:
            raise ConnectionError("the process has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise Refused(*answer["error"])
        return answer["value"]

    def close(self) -> None:
        """Close the connection; the process continues."""
        self._file.close()
        self._sock.close()


class CompromisedStack(SubstitutedStack):
    """A server in which every daemon but the zygote, and every worker, runs the code of the test."""

    module = "tests.security.compromise.daemon"
    _listener: socket.socket | None = None

    def prepare(self) -> None:
        self._forget()  # closes what an earlier start of this stack opened
        path = self.run / SOCKET
        path.unlink(missing_ok=True)
        self._listener = listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(64)
        self._agents: dict[str, queue.Queue[Hostile]] = {}
        self._introduced: list[str] = []
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept, args=(listener,), name="agents", daemon=True)
        self._thread.start()

    def hostile(self, name: str, seconds: float = _SECONDS) -> Hostile:
        """Return the next process of this name that was not returned yet.

        `name` is that of a daemon, or the id of the sandbox of a worker.

        Raises:
            TimeoutError: no such process was started in time. The text lists the started processes and the end of the
                log.
        """
        try:
            return self._of(name).get(timeout=seconds)
        except queue.Empty:
            with self._lock:
                seen = ", ".join(self._introduced)
            raise TimeoutError(f"no agent of {name}; introduced: {seen}\n{self.tail()}") from None

    def stop(self) -> None:
        super().stop()
        self._forget()

    def _forget(self) -> None:
        """Close the listener and the agents for which no test has asked."""
        if self._listener is None:
            return
        # A thread that stays in `accept` could later accept from the socket that gets the same descriptor.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self._listener = None
        with self._lock:
            for waiting in self._agents.values():
                while not waiting.empty():
                    waiting.get().close()

    def _of(self, name: str) -> "queue.Queue[Hostile]":
        with self._lock:
            return self._agents.setdefault(name, queue.Queue())

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            try:
                name = _introduction(sock)
            except (OSError, ValueError) as error:
                name = f"({error!r})"
            agents = self._of(name)
            with self._lock:
                pid, uid, _ = _credentials(sock)
                self._introduced.append(f"{name} {pid}")
                agents.put(Hostile(sock, pid, uid))


def _introduction(sock: socket.socket) -> str:
    """Return the name that a process sends.

    Raises:
        ValueError: the connection ended before the name was complete.
        OSError: the process did not send its name in time.
    """
    sock.settimeout(_SECONDS / 4)
    name = b""
    while part := sock.recv(1):
        if part == b"\n":
            return name.decode()
        name += part
    raise ValueError("ended")


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, gid = (int.from_bytes(data[start : start + 4], "little") for start in (0, 4, 8))
    return pid, uid, gid
