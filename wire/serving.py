"""Serves a connection with typed requests. A handler receives only messages of its set of operations."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from wire.errors import RequestError
from wire.frames import close_all
from wire.operations import Done, Message, Operations, Ping, Request, answer_type, parameters
from wire.rpc import Client
from wire.rpc import Handler as Untyped

type Handler[Taken: Message] = Callable[[Client, Taken, list[int]], Awaitable[object]]
"""`handler(connection, message, fds) -> answer`: an answer of the request's type, None for `Done` and notifications.
The handler owns `fds`."""


def handler(operations: Operations, handle: Handler[Any]) -> Untyped:
    """Return a handler for `rpc` that passes messages of `operations` to `handle`, and answers `Ping`."""

    async def serve(client: Client, op: str, given: Mapping[str, Any], fds: list[int]) -> dict[str, Any]:
        try:
            message = operations.read(op, given)
        except RequestError:
            close_all(fds)
            raise
        if isinstance(message, Ping):
            close_all(fds)
            return {}
        answer = await handle(client, message, fds)
        if not isinstance(message, Request):
            return {}
        kind = answer_type(message)
        if answer is None and kind is Done:
            return {}
        if not isinstance(answer, kind):
            raise TypeError(f"{op} was answered with a {type(answer).__name__}")
        return parameters(answer)

    return serve
