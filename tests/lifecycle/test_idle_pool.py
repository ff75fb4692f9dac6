"""Connections to execd are kept for the next request, and only for requests that they may carry."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable

import pytest
from standins import IMAGE, StandInHostd, World, world

from lifecycle.proxy import idle_pool
from lifecycle.sandboxes.registry import State

EXECD = 44772
BODY = {"image": {"uri": IMAGE}, "entrypoint": ["sleep", "1"], "resourceLimits": {}}
END = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nend"


class Listener:
    """A server on execd's port. It answers with the path of the request, or with the answer that the test sets."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.seen: list[str] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split()[1].decode()
                if length := re.search(rb"content-length: (\d+)", head.lower()):
                    await reader.readexactly(int(length[1]))
                self.seen.append(path)
                said = f"to {path}".encode()
                plain = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(said), said)
                writer.write(self.answers.get(path, plain))
                if self.answers.get(path) == b"":
                    break
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()

    def say(self, unasked: bytes) -> None:
        """Send these bytes on every connection; with empty bytes close the connections."""
        for writer in self._writers:
            writer.write(unasked) if unasked else writer.close()

    async def end(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a time limit so long that it ends no connection in these tests."""
    monkeypatch.setattr(idle_pool, "IDLE_SECONDS", 60.0)


@pytest.fixture
async def listener(server: World) -> AsyncIterator[Listener]:
    """Run a test's listener instead of execd in every sandbox of `server`."""
    made = Listener()
    tcp = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    server.hostd.backend = tcp.sockets[0].getsockname()[1]
    yield made
    tcp.close()
    await made.end()


async def create(server: World) -> str:
    async with server.client() as client:
        return str((await client.post("/v1/sandboxes", json=BODY)).json()["id"])


async def call(server: World, sandbox: str, path: str = "/x", port: int = EXECD, **options: str) -> tuple[int, str]:
    async with server.client() as client:
        answer = await client.post(f"/v1/sandboxes/{sandbox}/proxy/{port}{path}", **options)  # type: ignore[arg-type]
        return answer.status_code, answer.text


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.005)


def ways(hostd: StandInHostd) -> int:
    """Return the number of connections into sandboxes."""
    return len(hostd._relays)


def idle_ones(server: World) -> int:
    assert server.server is not None
    return len(server.server.edge.proxy._idle._idle)


async def test_requests_to_execd_share_a_connection_and_others_do_not(server: World, listener: Listener) -> None:
    """Each caller gets the answer to its own request. A second sandbox and another port have their own connections."""
    first, second = await create(server), await create(server)
    for path in ("/1", "/2", "/3"):
        assert (200, f"to {path}") == await call(server, first, path, content="body")
    assert [EXECD] == server.hostd.ports
    await call(server, second)
    for _ in range(2):
        await call(server, first, port=8000)
    assert [EXECD, EXECD, 8000, 8000] == server.hostd.ports
    await until(lambda: ways(server.hostd) == 2)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        pytest.param(END + b"x", 200, id="surplus bytes"),
        pytest.param(END + END, 200, id="two answers"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nend", 200, id="close"),
        pytest.param(b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nend", 200, id="HTTP/1.0"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nend\r\n0\r\n\r\n0\r\n\r\n", 200, id="two ends"
        ),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nend", 502, id="two lengths"),
        pytest.param(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n" + END, 502, id="another protocol"),
        pytest.param(b"HTTP/1.1 204 No Content\r\n\r\n" + END, 204, id="a body where there is none"),
    ],
)
async def test_a_hostile_answer_ends_the_connection(
    server: World, listener: Listener, answer: bytes, status: int
) -> None:
    """Bytes after an answer are not taken for the next answer, because the next request has a new connection."""
    sandbox = await create(server)
    listener.answers["/hostile"] = answer
    assert status == (await call(server, sandbox, "/hostile"))[0]
    assert (200, "to /next") == await call(server, sandbox, "/next")
    assert [EXECD, EXECD] == server.hostd.ports


@pytest.mark.parametrize("late", [b"", END], ids=["the end", "an answer"])
async def test_what_comes_while_idle_ends_the_connection(server: World, listener: Listener, late: bytes) -> None:
    """The next request is neither lost on a closed connection nor answered with an unrequested response."""
    sandbox = await create(server)
    await call(server, sandbox)
    assert server.server is not None
    (idle,) = server.server.edge.proxy._idle._idle[sandbox]
    assert idle.connection.reusable
    listener.say(late)
    await until(lambda: not idle.connection.reusable)
    assert (200, "to /next") == await call(server, sandbox, "/next")
    assert [EXECD, EXECD] == server.hostd.ports


async def test_a_request_that_is_lost_is_not_sent_again(server: World, listener: Listener) -> None:
    """It is unknown whether the request was carried out, so the caller gets an error."""
    sandbox = await create(server)
    await call(server, sandbox)
    listener.answers["/lost"] = b""
    assert 502 == (await call(server, sandbox, "/lost"))[0]
    assert (200, "to /next") == await call(server, sandbox, "/next")
    assert ["/x", "/lost", "/next"] == listener.seen
    assert [EXECD, EXECD] == server.hostd.ports


async def test_a_body_that_was_not_sent_whole_ends_the_connection(server: World, listener: Listener) -> None:
    """Otherwise the next caller's request could become the rest of the body."""
    sandbox = await create(server)
    await call(server, sandbox)
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST /v1/sandboxes/{sandbox}/proxy/{EXECD}/cut HTTP/1.1\r\nHost: {server.domain}\r\nContent-Length: 99\r\n"
    writer.write(head.encode() + b"\r\npart")
    await until(lambda: not idle_ones(server))
    writer.close()
    await writer.wait_closed()
    await until(lambda: ways(server.hostd) == 0)
    assert (200, "to /next") == await call(server, sandbox, "/next")
    assert ["/x", "/next"] == listener.seen


async def test_idle_connections_end_by_themselves(
    server: World, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection ends after its idle time; one above the age limit ends at once."""
    sandbox = await create(server)
    monkeypatch.setattr(idle_pool, "IDLE_SECONDS", 0.05)
    await call(server, sandbox)
    await until(lambda: ways(server.hostd) == 0)
    assert not idle_ones(server)
    monkeypatch.setattr(idle_pool, "AGE_SECONDS", 0.0)
    monkeypatch.setattr(idle_pool, "IDLE_SECONDS", 60.0)
    await call(server, sandbox)
    await until(lambda: ways(server.hostd) == 0)
    assert [EXECD, EXECD] == server.hostd.ports


async def test_a_sandbox_that_is_removed_or_changed_state_keeps_none(server: World, listener: Listener) -> None:
    """A connection from before the change is not used after it."""
    sandbox = await create(server)
    await call(server, sandbox)
    async with server.client() as client:
        await client.delete(f"/v1/sandboxes/{sandbox}")
    await until(lambda: ways(server.hostd) == 0)
    sandbox = await create(server)
    await call(server, sandbox)
    assert server.server is not None
    await server.server.registry.update(sandbox, lambda row: row.moved(State.RUNNING, "", "", row.changed_at + 1))
    await call(server, sandbox)
    assert [EXECD] * 3 == server.hostd.ports


async def test_idle_connections_are_few_and_make_room() -> None:
    """They never exceed their limit, and together with the used ones never the sandbox's limit."""
    async with world(proxy_connections=6) as described, described.serving() as server, server.client() as client:
        sandbox = await create(server)
        program = server.hostd.program  # type: ignore[attr-defined]

        async def waiting(port: int) -> None:
            await client.get(f"/v1/sandboxes/{sandbox}/proxy/{port}/wait")

        async with asyncio.TaskGroup() as group:
            for _ in range(6):
                group.create_task(waiting(EXECD))
            await until(lambda: ways(server.hostd) == 6)
            program.release.set()
        await until(lambda: ways(server.hostd) == idle_pool.IDLE_LIMIT)
        program.release.clear()
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(waiting(8000))
            await until(lambda: server.hostd.ports.count(8000) == 5)
            await until(lambda: ways(server.hostd) == 6)
            program.release.set()
