"""The API's socket: a port that is taken, and one that the `serve` of a killed server still has."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtimes.process import api_listener, predecessor
from wire.sockets import LISTEN_FD

HOST = "127.0.0.1"


@contextmanager
def left(notes: Path, sock: socket.socket) -> Iterator[None]:
    """A `serve` of a killed server that was given `sock`, which this process then closes."""
    with sock:
        process = subprocess.Popen(
            ["sh", "-c", "echo; read line"],
            pass_fds=[sock.fileno()],
            env=os.environ | {LISTEN_FD: str(sock.fileno())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()  # Its environment cannot be read before its program has started.
    predecessor.note(notes, "serve", process.pid)
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"^.*cannot listen on {HOST}:{port}: it is in use$"):
            api_listener.obtain(HOST, port, tmp_path)


@pytest.mark.parametrize("host", [HOST, "localhost", "::1"])
def test_the_socket_of_a_serve_that_was_left_is_taken_over(tmp_path: Path, host: str) -> None:
    """A connection that waits in it is not lost, and the port is free at no moment."""
    listener = api_listener.bind(host, 0)
    port = listener.getsockname()[1]
    with left(tmp_path, listener), socket.create_connection((host, port)) as waiting:
        taken = api_listener.obtain(host, port, tmp_path)
        accepted, address = taken.accept()
        accepted.close()
        taken.close()
        assert waiting.getsockname() == address


@pytest.mark.parametrize("kind", ["another port", "not listening", "no socket"])
def test_what_does_not_listen_at_the_address_is_not_taken_over(tmp_path: Path, kind: str) -> None:
    """A compromised `serve` can have replaced it with any object."""
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        match kind:
            case "another port":
                other = socket.create_server((HOST, 0))
            case "not listening":
                other = socket.create_connection((HOST, port))
            case _:
                other = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with left(tmp_path, other), pytest.raises(OSError, match="it is in use"):
            api_listener.obtain(HOST, port, tmp_path)


def test_it_is_handed_to_the_program_that_is_executed_next() -> None:
    """`sallyport serve` becomes the watchdog in this way. The program that hostd starts after that does not get the
    descriptor.
    """
    then = (
        "import socket; from runtimes.process import api_listener as a; s = a.inherited(); print(s.getsockname()[1], "
    )
    then += "s.get_inheritable(), a.inherited())"
    first = "import os, sys; from runtimes.process import api_listener as a; s = a.bind('127.0.0.1', 0); "
    first += "print(s.getsockname()[1], flush=True); a.hand_over(s); os.execv(sys.executable, sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", first, sys.executable, "-c", then], capture_output=True, text=True, check=True
    )
    made, found = done.stdout.splitlines()
    assert f"{made} False None" == found


def test_after_the_end_connections_are_refused_whichever_process_has_it() -> None:
    listener = api_listener.bind(HOST, 0)
    address = listener.getsockname()
    with listener.dup():
        socket.create_connection(address).close()
        api_listener.end(listener)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
