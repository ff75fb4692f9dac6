"""A connection to an address: complete, refused or given up, and never a thread."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address

import pytest
import uvloop

from wire.dialling import connect

LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
type MakeLoop = Callable[[], asyncio.AbstractEventLoop]


@contextmanager
def _client(family: int = socket.AF_INET) -> Iterator[socket.socket]:
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as sock:
        yield sock


@contextmanager
def _port(address: str = "127.0.0.1", *, listens: bool = True) -> Iterator[int]:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
        server.bind((address, 0))
        if listens:
            server.listen(0)
        yield server.getsockname()[1]


@LOOPS
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_it_connects_without_a_thread(loop: MakeLoop, address: str) -> None:
    async def main() -> None:
        with _port(address) as port, _client(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
            before = len(os.listdir("/proc/self/task"))
            await connect(sock, ip_address(address), port)
            assert (address, port) == sock.getpeername()[:2]
            assert before == len(os.listdir("/proc/self/task"))

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


@LOOPS
def test_a_refusal_is_an_error(loop: MakeLoop) -> None:
    async def main() -> None:
        with _port(listens=False) as port, _client() as sock, pytest.raises(ConnectionRefusedError):
            await connect(sock, ip_address("127.0.0.1"), port)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


@LOOPS
def test_a_connection_that_is_given_up_is_no_longer_watched(loop: MakeLoop) -> None:
    """A full backlog answers nothing. After the end of the attempt the loop watches the descriptor no longer."""

    async def main() -> None:
        with _port() as port, contextlib.ExitStack() as stack:
            clients = [stack.enter_context(_client()) for _ in range(4)]
            waiting = [asyncio.create_task(connect(sock, ip_address("127.0.0.1"), port)) for sock in clients]
            _, left = await asyncio.wait(waiting, timeout=0.3)
            assert left
            for task in left:
                task.cancel()
            await asyncio.wait(left)
            for sock in clients:
                assert not asyncio.get_running_loop().remove_writer(sock.fileno())

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())
