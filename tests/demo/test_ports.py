"""A port that a test reserves stays free for its server."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# In a namespace with few ports, so that the kernel must give away each that it may.
PROBE = """
import errno, socket
from contextlib import ExitStack
from pathlib import Path
from testbed.ports import HOST, reserved_port

Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40007")

def given(ask):
    \"\"\"Return the ports that the kernel gives until it has none.\"\"\"
    with ExitStack() as held:
        ports = set()
        try:
            while True:
                ports.add(held.enter_context(ask(held)).getsockname()[1])
        except OSError as error:
            assert error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL), error
        return ports

def bound(_held):
    sock = socket.socket()
    sock.bind((HOST, 0))
    return sock

def connected(held):
    sock = socket.create_connection((HOST, 80))
    held.enter_context(server.accept()[0])
    return sock

server = socket.create_server((HOST, 80))
asks = {"bind": bound, "listen": lambda held: socket.create_server((HOST, 0)), "connect": connected}
everything = set(range(40000, 40008))
with reserved_port() as port:
    reserved = {name: everything - given(ask) for name, ask in asks.items()}
    assert dict.fromkeys(asks, {port}) == reserved, reserved
    for _ in range(2):
        try:
            socket.create_connection((HOST, port))
        except ConnectionRefusedError:
            socket.create_server((HOST, port)).close()
        else:
            raise AssertionError("something listens")
for name, ask in asks.items():
    assert port in given(ask), name
"""


@pytest.mark.system
def test_the_kernel_gives_a_reserved_port_to_nothing_else() -> None:
    """Its server can listen on it again and again. The control: the kernel gives the port away afterwards."""
    namespace = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    done = subprocess.run(
        [*namespace, sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert (0, "") == (done.returncode, done.stderr)
