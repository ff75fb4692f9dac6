"""Each side receives what the other one sent, and a relay always ends."""

import asyncio
import gc
import os
import random
import socket
import struct
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any
from unittest.mock import Mock, patch

import pytest
import uvloop

from gateway.splice import End, Traffic, relay

type Pair = tuple[socket.socket, socket.socket]
type Sockets = tuple[socket.socket, socket.socket, socket.socket, socket.socket]


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    client, inner = socket.socketpair()
    outer, server = socket.socketpair()
    every = (client, inner, outer, server)
    for sock in every:
        sock.setblocking(False)
    yield every
    for sock in every:
        sock.close()


def connected(buffer: int | None = None) -> Pair:
    """Return both ends of a TCP connection; `buffer` is the size of the kernel's buffers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = (socket.create_connection(listener.getsockname()), listener.accept()[0])
    for sock in made:
        sock.setblocking(False)
        for option in () if buffer is None else (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, buffer)
    return made


async def everything(sock: socket.socket) -> bytes:
    data = b""
    while part := await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
        data += part
    return data


async def test_both_directions_arrive_whole_and_end_separately(sockets: Sockets) -> None:
    client, inner, outer, server = sockets
    loop, traffic = asyncio.get_running_loop(), Traffic()
    up, down = os.urandom(1_000_000), os.urandom(500_000)
    task = asyncio.create_task(relay(inner, outer, traffic, idle=5, total=5))
    sending = asyncio.create_task(loop.sock_sendall(client, up))
    received = asyncio.create_task(everything(server))
    await sending
    client.shutdown(socket.SHUT_WR)
    assert up == await received
    answered = asyncio.create_task(everything(client))
    await loop.sock_sendall(server, down)
    server.shutdown(socket.SHUT_WR)
    assert down == await answered
    assert End.CLOSED == await task
    assert (len(up), len(down)) == (traffic.up, traffic.down)


async def test_silence_ends_at_the_idle_limit_and_noise_at_the_total_limit(sockets: Sockets) -> None:
    client, inner, outer, server = sockets
    assert End.IDLE == await relay(inner, outer, Traffic(), idle=0.05, total=5)

    async def chatter() -> None:
        while True:
            await asyncio.get_running_loop().sock_sendall(client, b"x")
            await asyncio.get_running_loop().sock_recv(server, 10)

    noise = asyncio.create_task(chatter())
    assert End.TOTAL == await relay(inner, outer, Traffic(), idle=5, total=0.1)
    noise.cancel()


async def test_a_refused_chunk_is_not_sent_and_ends_both_directions(sockets: Sockets) -> None:
    client, inner, outer, server = sockets
    loop, traffic, asked = asyncio.get_running_loop(), Traffic(), list[int]()

    def may_send(count: int) -> bool:
        asked.append(count)
        return sum(asked) <= 10

    task = asyncio.create_task(relay(inner, outer, traffic, idle=5, total=5, may_send=may_send))
    await loop.sock_sendall(server, bytes(100))  # downloads need no permission
    await loop.sock_sendall(client, b"0123456789")
    assert b"0123456789" == await loop.sock_recv(server, 100)
    await loop.sock_sendall(client, b"X")
    assert End.LIMITS == await task
    inner.close()
    outer.close()
    assert b"" == await everything(server)
    assert ([10, 1], 10) == (asked, traffic.up)


async def test_a_half_closed_flow_has_the_idle_limit_too(sockets: Sockets) -> None:
    client, inner, outer, _ = sockets
    client.shutdown(socket.SHUT_WR)
    assert End.IDLE == await relay(inner, outer, Traffic(), idle=0.05, total=5)


async def test_a_broken_side_ends_the_other(sockets: Sockets) -> None:
    client, inner, outer, server = sockets
    server.close()
    await asyncio.get_running_loop().sock_sendall(client, b"x" * 10)
    assert End.RESET == await relay(inner, outer, Traffic(), idle=5, total=5)


async def test_a_cancelled_relay_has_counted_what_it_moved(sockets: Sockets) -> None:
    client, inner, outer, server = sockets
    traffic = Traffic()
    task = asyncio.create_task(relay(inner, outer, traffic, idle=None, total=None))
    await asyncio.get_running_loop().sock_sendall(client, b"four")
    assert b"four" == await asyncio.get_running_loop().sock_recv(server, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert 4 == traffic.up
    client.send(b"later")
    await asyncio.sleep(0.01)
    assert b"later" == inner.recv(10)


async def test_what_was_read_first_goes_ahead_and_is_counted_and_asked_for(sockets: Sockets) -> None:
    client, inner, outer, server = sockets
    loop, traffic, asked = asyncio.get_running_loop(), Traffic(), list[int]()

    def may_send(count: int) -> bool:
        asked.append(count)
        return True

    task = asyncio.create_task(relay(inner, outer, traffic, first=b"hello ", idle=5, total=5, may_send=may_send))
    await loop.sock_sendall(client, b"world")
    client.shutdown(socket.SHUT_WR)
    server.shutdown(socket.SHUT_WR)
    assert b"hello world" == await everything(server)
    assert End.CLOSED == await task
    assert (11, [6, 5]) == (traffic.up, asked)


async def test_a_receiver_that_does_not_read_stops_the_sender_and_the_idle_limit_ends_it(sockets: Sockets) -> None:
    """Only bytes that the kernel took are counted, with those of `first`. The receiver gets exactly these."""
    client, inner, outer, server = sockets
    traffic = Traffic()
    sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(client, bytes(64 << 20)))
    end = await relay(inner, outer, traffic, first=bytes(8 << 20), idle=0.3, total=20)
    outer.close()
    sending.cancel()
    inner.close()

    assert End.IDLE == end
    assert 0 < traffic.up < 8 << 20
    assert traffic.up == len(await everything(server))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_bytes_before_a_reset_arrive_and_the_reset_ends_the_relay(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    """The loop sees both at once. The other side is reset, too."""

    async def relayed() -> None:
        client, inner = connected()
        outer, server = connected()
        with inner, outer, server:
            task = asyncio.create_task(relay(inner, outer, Traffic(), idle=None, total=None))
            await asyncio.sleep(0.05)
            client.sendall(b"last")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            assert b"last" == await asyncio.get_running_loop().sock_recv(server, 10)
            async with asyncio.timeout(10):
                assert End.RESET == await task
            with pytest.raises(ConnectionResetError):
                await asyncio.get_running_loop().sock_recv(server, 10)

    run(relayed())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_all_bytes_pass_through_small_buffers(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    """The kernel takes a part of a chunk, or nothing, again and again. A pause in the middle changes no byte."""

    async def slowly(sock: socket.socket) -> bytes:
        data, sizes = b"", random.Random(5)
        while part := await asyncio.get_running_loop().sock_recv(sock, sizes.randrange(1, 20_000)):
            data += part
        return data

    async def sent(sock: socket.socket, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(sock, data)
        sock.shutdown(socket.SHUT_WR)

    async def relayed() -> None:
        traffic, moving = Traffic(), asyncio.Event()
        moving.set()
        up, down = os.urandom(900_000), os.urandom(600_000)
        (client, inner), (outer, server) = connected(32_768), connected(32_768)
        with client, inner, outer, server:
            task = asyncio.create_task(relay(inner, outer, traffic, idle=60, total=60, moving=moving))
            ends = (sent(client, up), sent(server, down), slowly(server), slowly(client))
            all_ends = asyncio.gather(*ends)
            while traffic.up < 300_000:  # noqa: ASYNC110 - it waits for work of this loop
                await asyncio.sleep(0)
            moving.clear()
            await asyncio.sleep(0)
            before, spent = (traffic.up, traffic.down), time.process_time()
            await asyncio.sleep(0.3)
            assert before == (traffic.up, traffic.down)
            assert time.process_time() - spent < 0.15, "the relay does not rest"
            moving.set()
            assert [up, down] == (await all_ends)[2:]
            assert End.CLOSED == await task
        assert (len(up), len(down)) == (traffic.up, traffic.down)

    run(relayed())


async def test_nothing_is_sent_before_a_paused_relay_may_move(sockets: Sockets) -> None:
    client, inner, outer, server = sockets
    moving = asyncio.Event()
    task = asyncio.create_task(relay(inner, outer, Traffic(), first=b"first ", idle=5, total=5, moving=moving))
    client.send(b"later")
    client.shutdown(socket.SHUT_WR)
    server.shutdown(socket.SHUT_WR)
    spent = time.process_time()
    await asyncio.sleep(0.2)
    assert time.process_time() - spent < 0.1, "the relay does not rest"
    with pytest.raises(BlockingIOError):
        server.recv(10)
    moving.set()
    assert b"first later" == await everything(server)
    assert End.CLOSED == await task


@pytest.mark.parametrize("upwards", [True, False])
async def test_a_byte_of_either_direction_is_a_sign_of_life(upwards: bool, sockets: Sockets) -> None:
    client, inner, outer, server = sockets
    source, target = (client, server) if upwards else (server, client)
    traffic = Traffic()
    task = asyncio.create_task(relay(inner, outer, traffic, idle=60, total=None))
    await asyncio.sleep(0)
    began = traffic.moved
    source.send(b"x")
    assert b"x" == await asyncio.get_running_loop().sock_recv(target, 10)
    assert began < traffic.moved
    task.cancel()


async def test_the_idle_limit_counts_from_the_last_byte(sockets: Sockets) -> None:
    _, inner, outer, _ = sockets
    loop, traffic = asyncio.get_running_loop(), Traffic()
    task = asyncio.create_task(relay(inner, outer, traffic, idle=0.05, total=None))
    await asyncio.sleep(0)
    traffic.moved = last = loop.time() + 0.4  # as if a byte came then
    assert End.IDLE == await task
    assert loop.time() >= last + 0.04


async def test_a_failure_after_a_pause_ends_the_relay(sockets: Sockets) -> None:
    _, inner, outer, _ = sockets
    moving = asyncio.Event()
    task = asyncio.create_task(relay(inner, outer, Traffic(), idle=None, total=None, moving=moving))
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    with patch.object(loop, "add_reader", side_effect=OSError("no watches are left")):
        moving.set()
        async with asyncio.timeout(10):
            assert End.RESET == await task


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_relay_that_has_ended_is_freed_at_once(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    """No timer, and no reference in a circle, keeps what it used."""

    async def relayed() -> None:
        (client, inner), (outer, server) = connected(), connected()
        with client, inner, outer, server:
            may_send, moving = Mock(return_value=True), asyncio.Event()
            moving.set()
            task = asyncio.create_task(
                relay(inner, outer, Traffic(), idle=60, total=60, may_send=may_send, moving=moving)
            )
            await asyncio.sleep(0)
            client.shutdown(socket.SHUT_WR)
            server.shutdown(socket.SHUT_WR)
            assert End.CLOSED == await task
            kept = [weakref.ref(one) for one in (may_send, moving)]
            del task, may_send, moving
            await asyncio.sleep(0)
            assert [None, None] == [one() for one in kept]

    gc.disable()
    try:
        run(relayed())
    finally:
        gc.enable()
