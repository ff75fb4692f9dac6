"""Each call gets its own answer or a clear refusal, and never waits without end."""

import asyncio
import contextlib
import gc
import math
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from wire import MAX_FRAME, Client, Code, FrameError, RemoteError, RequestError, bind_unix, serve_connection, serve_unix
from wire.frames import Message


async def _handler(_client: Client, op: str, parameters: Message, fds: list[int]) -> Message | None:
    for fd in fds:
        os.close(fd)
    match op:
        case "echo":
            await asyncio.sleep(parameters.get("after", 0))
            return {"value": parameters["value"]}
        case "length":
            return {"length": len(parameters["value"]), "again": parameters["value"] * parameters.get("times", 0)}
        case "refuse":
            raise RequestError(Code.UNKNOWN_SANDBOX, "there is no such thing")
        case "fail":
            raise ValueError("a secret: hunter2")
        case "hang":
            await asyncio.Event().wait()
    raise RequestError(Code.UNKNOWN_OP, op)


async def _pair() -> tuple[Client, Client]:
    left, right = socket.socketpair()
    server = await serve_connection(right, _handler)
    client = await serve_connection(left, _handler)
    return client, server


async def test_concurrent_calls_each_get_their_own_answer_whatever_the_order() -> None:
    client, server = await _pair()
    results = await asyncio.gather(*(client.call("echo", value=n, after=0.02 - n / 1000) for n in range(20)))

    assert [{"value": n} for n in range(20)] == results
    await client.close()
    await server.close()


async def test_a_refusal_carries_its_code() -> None:
    client, server = await _pair()
    with pytest.raises(RemoteError) as refused:
        await client.call("refuse")

    assert Code.UNKNOWN_SANDBOX == refused.value.code
    await client.close()
    await server.close()


async def test_the_text_of_an_unforeseen_error_stays_on_its_side() -> None:
    client, server = await _pair()
    with pytest.raises(RemoteError) as failed:
        await client.call("fail")

    assert "internal" == failed.value.code
    assert "hunter2" not in str(failed.value)
    await client.close()
    await server.close()


async def test_a_call_fails_when_the_peer_goes_away() -> None:
    client, server = await _pair()
    call: asyncio.Task[Any] = asyncio.ensure_future(client.call("hang"))
    await client.call("echo", value=1)
    await server.close()
    with pytest.raises(ConnectionError):
        await call
    with pytest.raises(ConnectionError):
        await client.call("echo", value=1)
    await client.close()


async def test_a_call_without_an_answer_times_out() -> None:
    client, server = await _pair()
    with pytest.raises(TimeoutError):
        await client.call("hang", timeout=0.05)

    assert {"value": 1} == await client.call("echo", value=1)
    await client.close()
    await server.close()


async def test_a_connection_can_be_ended_once_its_calls_have_their_answers() -> None:
    client, server = await _pair()
    await client.answered(0)
    call = asyncio.create_task(client.call("echo", value=1, after=0.05))
    await asyncio.sleep(0)
    hanging = asyncio.create_task(client.call("hang"))
    await client.answered(0.2)
    await client.close()

    assert {"value": 1} == await call
    with pytest.raises(ConnectionError):
        await hanging
    await server.close()


async def test_garbage_ends_the_connection(tmp_path: Path) -> None:
    accepting = await serve_unix(bind_unix(tmp_path / "s"), _handler, allowed_uids=frozenset({os.getuid()}))
    reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    await writer.drain()

    with contextlib.suppress(ConnectionResetError):
        assert b"" == await asyncio.wait_for(reader.read(), 5)
    writer.close()
    with contextlib.suppress(ConnectionResetError):
        await writer.wait_closed()
    accepting.cancel()
    await asyncio.gather(accepting, return_exceptions=True)


async def test_a_peer_of_another_user_is_turned_away(tmp_path: Path) -> None:
    accepting = await serve_unix(bind_unix(tmp_path / "s"), _handler, allowed_uids=frozenset({os.getuid() + 1}))
    client = await Client.connect(tmp_path / "s", os.getuid())
    with pytest.raises(ConnectionError):
        await client.call("echo", value=1)
    await client.close()
    accepting.cancel()
    await asyncio.gather(accepting, return_exceptions=True)


async def test_a_connection_over_the_limit_is_closed(tmp_path: Path) -> None:
    uids = frozenset({os.getuid()})
    accepting = await serve_unix(bind_unix(tmp_path / "s"), _handler, allowed_uids=uids, max_connections=1)
    first = await Client.connect(tmp_path / "s", os.getuid())
    await first.call("echo", value=1)
    second = await Client.connect(tmp_path / "s", os.getuid())
    with pytest.raises(ConnectionError):
        await second.call("echo", value=1)

    assert {"value": 2} == await first.call("echo", value=2)
    await first.close()
    await second.close()
    accepting.cancel()
    await asyncio.gather(accepting, return_exceptions=True)


async def test_a_call_that_cannot_be_sent_fails_once_and_leaves_no_other_failure_behind() -> None:
    """The peer closes before anything was sent. The caller gets an error, and the event loop reports none."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
    left, right = socket.socketpair()
    client = await serve_connection(left, _handler)
    right.close()

    with pytest.raises(ConnectionError):
        await client.call("echo", value=1)
    await asyncio.sleep(0)
    gc.collect()

    assert [] == complaints
    await client.close()


@pytest.mark.parametrize("parameters", [{"value": "\x7f" * (MAX_FRAME // 6)}, {"value": math.nan}])
async def test_a_request_that_is_no_frame_fails_alone(parameters: dict[str, Any]) -> None:
    """Other callers' calls on the connection get their answers."""
    client, server = await _pair()
    other = asyncio.ensure_future(client.call("echo", value=1, after=0.05))
    await asyncio.sleep(0)

    with pytest.raises(FrameError):
        await client.call("length", **parameters)

    assert {"value": 1} == await other
    assert {"value": 2} == await client.call("echo", value=2)
    await client.close()
    await server.close()


async def test_an_answer_that_is_no_frame_is_a_refusal() -> None:
    """A valid request whose answer would be too large. The other calls continue."""
    client, server = await _pair()
    other = asyncio.ensure_future(client.call("echo", value=1, after=0.05))

    with pytest.raises(RemoteError) as refused:
        await client.call("length", value="x" * (MAX_FRAME // 8), times=9)

    assert Code.TOO_LARGE == refused.value.code
    assert {"value": 1} == await other
    await client.close()
    await server.close()
