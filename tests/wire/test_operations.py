"""A handler gets exactly the messages of its set. A caller gets exactly the answer to its request."""

import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from wire import Client, Code, Done, Notification, Operations, Ping, RemoteError, Request, serve_connection
from wire.errors import RequestError
from wire.frames import close_all
from wire.operations import parameters
from wire.serving import handler


@dataclass(frozen=True, slots=True)
class Doubled:
    number: int


@dataclass(frozen=True, slots=True)
class DoubleIt(Request[Doubled]):
    number: int

    def __post_init__(self) -> None:
        if self.number > 100:
            raise ValueError("a number up to 100")


@dataclass(frozen=True, slots=True)
class Forget(Request[Done]):
    name: str


@dataclass(frozen=True, slots=True)
class Seen(Notification):
    name: str


@dataclass(frozen=True, slots=True)
class NotTaken(Request[Done]):
    pass


class Far:
    """The far end: the requests of its handler, and its answer."""

    def __init__(self) -> None:
        self.taken: list[object] = []
        self.answer: object = None

    async def handle(self, _client: Client, message: DoubleIt | Forget | Seen, fds: list[int]) -> object:
        close_all(fds)
        self.taken.append(message)
        if self.answer is not None:
            return self.answer
        return Doubled(2 * message.number) if isinstance(message, DoubleIt) else None


@pytest.fixture(name="far")
def _far() -> Far:
    return Far()


@pytest.fixture(name="near")
async def _near(far: Far) -> AsyncIterator[Client]:
    ours, theirs = socket.socketpair()
    there = await serve_connection(theirs, handler(Operations(DoubleIt, Forget, Seen), far.handle), descriptors=True)
    near = Client(ours)
    near.start()
    yield near
    await near.close()
    await there.close()


async def test_a_request_arrives_as_its_value_and_is_answered_with_one(near: Client, far: Far) -> None:
    assert Doubled(8) == await near.ask(DoubleIt(4))
    assert Done() == await near.ask(Forget("a"))
    await near.tell(Seen("b"))
    assert Done() == await near.ask(Ping())
    assert [DoubleIt(4), Forget("a"), Seen("b")] == far.taken


@pytest.mark.parametrize(
    ("op", "parameters", "code"),
    [
        ("double_it", {}, Code.INVALID),
        ("double_it", {"number": "4"}, Code.INVALID),
        ("double_it", {"number": True}, Code.INVALID),
        ("double_it", {"number": 101}, Code.INVALID),
        ("double_it", {"number": 4, "more": 1}, Code.INVALID),
        ("ping", {"more": 1}, Code.INVALID),
        ("not_taken", {}, Code.UNKNOWN_OP),
        ("DoubleIt", {"number": 4}, Code.UNKNOWN_OP),
        ("", {}, Code.UNKNOWN_OP),
    ],
)
async def test_no_handler_sees_what_is_not_a_message_of_its_set(
    near: Client, far: Far, op: str, parameters: dict[str, Any], code: Code
) -> None:
    reading, writing = os.pipe()
    with pytest.raises(RemoteError) as refused:
        await near.call(op, fds=[writing], **parameters)
    os.close(writing)
    assert b"" == os.read(reading, 1)  # the descriptor that was sent was closed there
    os.close(reading)
    assert code is refused.value.code
    assert [] == far.taken


@pytest.mark.parametrize(
    ("op", "given", "problem"),
    [
        ("double_it", {"number": "4"}, "double_it.number: expected int"),
        ("double_it", {"number": 101}, "double_it: a number up to 100"),
        ("double_it", {"x" * 64 + str(n): 1 for n in range(9)}, "double_it: missing or unknown keys: 'number', 'xx"),
        ("x" * 70, {}, f"unknown operation '{'x' * 64}'"),
    ],
)
def test_a_refusal_names_the_place_and_is_short(op: str, given: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError) as refused:
        Operations(DoubleIt).read(op, given)
    assert str(refused.value).startswith(problem)
    assert len(str(refused.value)) <= 300


@dataclass(frozen=True, slots=True)
class _Text:
    text: str


def test_a_message_that_is_only_a_text_has_no_members() -> None:
    with pytest.raises(TypeError, match=r"^_Text has no members$"):
        parameters(_Text("x"))


@pytest.mark.parametrize("answer", [Done(), Forget("x"), "text", {"number": 4}])
async def test_an_answer_of_another_type_is_none(near: Client, far: Far, answer: object) -> None:
    far.answer = answer
    with pytest.raises(RemoteError) as refused:
        await near.ask(DoubleIt(4))
    assert Code.INTERNAL is refused.value.code


@pytest.mark.parametrize("answer", [{}, {"number": "8"}, {"number": 8, "more": 1}, {"number": None}])
async def test_an_answer_that_is_not_exactly_one_counts_as_no_answer(answer: dict[str, Any]) -> None:
    async def handle(_client: Client, _op: str, _parameters: dict[str, Any], _fds: list[int]) -> dict[str, Any]:
        return answer

    ours, theirs = socket.socketpair()
    there = await serve_connection(theirs, handle)
    near = Client(ours)
    near.start()
    with pytest.raises(ConnectionError, match="the answer to 'double_it' is none"):
        await near.ask(DoubleIt(4))
    await near.close()
    await there.close()


@dataclass(frozen=True, slots=True)
class _Overwrites(Request[Done]):
    id: int


@dataclass(frozen=True, slots=True)
class _Renames(Notification):
    op: str


@pytest.mark.parametrize("kind", [_Overwrites, _Renames])
def test_no_field_takes_the_place_of_a_part_of_the_frame(kind: type[Any]) -> None:
    with pytest.raises(TypeError, match="reserved"):
        Operations(kind)


async def test_a_code_that_is_not_in_the_list_is_malformed() -> None:
    async def handle(_client: Client, _op: str, _parameters: dict[str, Any], _fds: list[int]) -> dict[str, Any]:
        raise NotImplementedError

    ours, theirs = socket.socketpair()
    near = Client(ours)
    near.start()
    answer = b'{"id":1,"error":{"code":"no_such_code","message":"x"}}'
    theirs.sendall(len(answer).to_bytes(4, "big") + answer)
    with pytest.raises(RemoteError) as refused:
        await near.ask(DoubleIt(4))
    assert Code.MALFORMED is refused.value.code
    await near.close()
    theirs.close()
