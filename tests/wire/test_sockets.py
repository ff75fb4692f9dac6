"""Named sockets: the uid of the server is checked, and the name is never free."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import wire
from wire import Client, Code, RequestError, WrongServer, bind_unix, serve_unix
from wire.sockets import LISTEN_FD, connect_unix

OTHER = 65534


async def _echo(_client: Client, op: str, parameters: wire.Message, _fds: list[int]) -> wire.Message:
    if op != "echo":
        raise RequestError(Code.UNKNOWN_OP, op)
    return parameters


def _listen_as(listener: socket.socket, uid: int) -> None:
    former = os.geteuid()
    os.seteuid(uid)
    try:
        listener.listen()
    finally:
        os.seteuid(former)


@pytest.mark.system
async def test_a_server_of_another_user_is_sent_nothing(tmp_path: Path) -> None:
    """Root has bound the name, but another user listens: the listening uid counts."""
    with bind_unix(tmp_path / "s") as listener:
        _listen_as(listener, OTHER)
        with pytest.raises(WrongServer, match=f"served by uid {OTHER}, not by {os.geteuid()}"):
            await Client.connect(tmp_path / "s", os.geteuid())
        accepted, _ = listener.accept()
        with accepted:
            assert b"" == accepted.recv(1)


async def test_clients_see_the_user_that_called_listen_last(tmp_path: Path) -> None:
    with bind_unix(tmp_path / "s") as listener:
        _listen_as(listener, OTHER)
        (await connect_unix(tmp_path / "s", OTHER)).close()
        listener.listen()
        (await connect_unix(tmp_path / "s", os.geteuid())).close()


async def test_a_call_made_while_the_server_is_started_again_is_answered(tmp_path: Path) -> None:
    """The socket outlives its server process. Here a copy of the descriptor outlives the task."""
    uids = frozenset({os.geteuid()})
    with bind_unix(tmp_path / "s") as kept:
        former = await serve_unix(kept.dup(), _echo, allowed_uids=uids)
        first = await Client.connect(tmp_path / "s", os.geteuid())
        assert {} == await first.call("echo")
        await first.close()
        former.cancel()
        await asyncio.gather(former, return_exceptions=True)
        client = await Client.connect(tmp_path / "s", os.geteuid())
        call = asyncio.create_task(client.call("echo", value=1))
        await asyncio.sleep(0)
        server = await serve_unix(kept.dup(), _echo, allowed_uids=uids)
        assert {"value": 1} == await call
        await client.close()
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)


def test_a_name_is_never_free_while_its_socket_is_replaced(tmp_path: Path) -> None:
    bind_unix(tmp_path / "s").close()
    missing, done = [], threading.Event()

    def look() -> None:
        while not done.is_set():
            try:
                os.lstat(tmp_path / "s")
            except FileNotFoundError as error:
                missing.append(error)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(2000):
            bind_unix(tmp_path / "s").close()
    finally:
        done.set()
        looking.join()
    assert [] == missing
    assert ["s"] == os.listdir(tmp_path)


@pytest.mark.system
def test_a_socket_has_its_mode_and_owner_before_it_has_its_name(tmp_path: Path) -> None:
    with bind_unix(tmp_path / "s", 0o660, (0, OTHER)):
        status = (tmp_path / "s").stat()
        assert (0o660, 0, OTHER) == (status.st_mode & 0o777, status.st_uid, status.st_gid)


@pytest.mark.parametrize("number", ["", "2", "-1", "x", "99999", "pipe", "datagram"])
def test_what_is_no_inherited_stream_socket_is_refused(number: str) -> None:
    reading, writing = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram:
        fds = {"pipe": reading, "datagram": datagram.fileno()}
        done = subprocess.run(
            [sys.executable, "-c", "import wire\ntry: wire.inherited_listener()\nexcept ValueError: print('refused')"],
            env=os.environ | {LISTEN_FD: str(fds.get(number, number))},
            pass_fds=tuple(fds.values()),
            capture_output=True,
            text=True,
            check=True,
        )
    os.close(reading)
    os.close(writing)
    assert "refused\n" == done.stdout
