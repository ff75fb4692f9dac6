"""The client without an event loop, with a real socket."""

import asyncio
import json
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import wire
from wire import frames, serving
from wire.blocking import BlockingClient
from wire.errors import Code


@dataclass(frozen=True, slots=True)
class Doubled:
    number: int


@dataclass(frozen=True, slots=True)
class DoubleIt(wire.Request[Doubled]):
    number: int

    def __post_init__(self) -> None:
        if self.number > 100:
            raise ValueError("a number up to 100")


async def _double(_client: wire.Client, request: DoubleIt, fds: list[int]) -> Doubled:
    assert not fds
    if request.number < 0:
        raise wire.RequestError(Code.FULL, "no room")
    return Doubled(2 * request.number)


@pytest.fixture(name="path")
async def _path(tmp_path: Path) -> AsyncIterator[Path]:
    """Return the socket of a server that doubles numbers."""
    handler = serving.handler(wire.Operations(DoubleIt), _double)
    path = tmp_path / "s"
    server = await wire.serve_unix(wire.bind_unix(path), handler, allowed_uids=frozenset({os.geteuid()}))
    yield path
    server.cancel()
    await asyncio.gather(server, return_exceptions=True)


async def test_requests_are_answered_one_after_another(path: Path) -> None:
    def ask() -> list[object]:
        with BlockingClient(path, os.geteuid(), timeout=30) as client:
            return [client.ask(DoubleIt(3)), client.ask(wire.Ping()), client.ask(DoubleIt(4))]

    assert [Doubled(6), wire.Done(), Doubled(8)] == await asyncio.to_thread(ask)


async def test_a_refusal_has_its_code_and_the_connection_stays(path: Path) -> None:
    def ask() -> Doubled:
        with BlockingClient(path, os.geteuid(), timeout=30) as client:
            with pytest.raises(wire.RemoteError, match="no room") as refused:
                client.ask(DoubleIt(-1))
            assert Code.FULL is refused.value.code
            return client.ask(DoubleIt(1))

    assert Doubled(2) == await asyncio.to_thread(ask)


async def test_the_server_of_another_user_is_sent_nothing(path: Path) -> None:
    with pytest.raises(wire.WrongServer):
        await asyncio.to_thread(BlockingClient, path, os.geteuid() + 1, 30)


def test_where_nothing_listens_there_is_no_client(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        BlockingClient(tmp_path / "none", os.geteuid(), timeout=30)


@contextmanager
def _answering(path: Path, answer: Callable[[socket.socket], object]) -> Iterator[None]:
    """Run a server that reads one request and then calls `answer`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                assert frames.receive(sock) is not None
                answer(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            thread.join(30)


def _raw(message: object) -> Callable[[socket.socket], object]:
    body = json.dumps(message).encode()
    return lambda sock: sock.sendall(len(body).to_bytes(4, "big") + body)


@pytest.mark.parametrize(
    "answer",
    [
        lambda _sock: None,
        lambda sock: sock.sendall(b"\0\0\0\x10{"),
        lambda sock: sock.sendall(b"\xff\xff\xff\xff"),
        _raw([]),
        _raw({"id": 2, "ok": {"number": 6}}),
        _raw({"id": 1, "ok": {"number": "6"}}),
        _raw({"id": 1, "ok": {"number": 6, "more": 1}}),
        _raw({"id": 1, "ok": None}),
    ],
    ids=["an end", "half", "too long", "no object", "another id", "another type", "a key more", "no answer"],
)
def test_what_is_no_answer_is_an_error(tmp_path: Path, answer: Callable[[socket.socket], object]) -> None:
    with (
        _answering(tmp_path / "s", answer),
        BlockingClient(tmp_path / "s", os.geteuid(), timeout=30) as client,
        pytest.raises(ConnectionError),
    ):
        client.ask(DoubleIt(3))


@pytest.mark.parametrize("error", [None, {}, {"code": "unheard", "message": 1}, {"code": [], "message": "x"}])
def test_a_refusal_without_a_code_of_the_list_is_malformed(tmp_path: Path, error: object) -> None:
    with (
        _answering(tmp_path / "s", _raw({"id": 1, "error": error})),
        BlockingClient(tmp_path / "s", os.geteuid(), timeout=30) as client,
        pytest.raises(wire.RemoteError) as refused,
    ):
        client.ask(DoubleIt(3))
    assert Code.MALFORMED is refused.value.code


def test_a_server_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    waiting = threading.Event()
    with _answering(tmp_path / "s", lambda _sock: waiting.wait(30)):
        with BlockingClient(tmp_path / "s", os.geteuid(), timeout=0.1) as client, pytest.raises(TimeoutError):
            client.ask(DoubleIt(3))
        waiting.set()
