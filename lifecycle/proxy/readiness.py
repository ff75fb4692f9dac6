"""Asks the execd of a new sandbox whether the entrypoint runs."""

import asyncio

from lifecycle.proxy.exchange import BrokenExchangeError, Connection
from lifecycle.proxy.headers import EXECD_PORT
from lifecycle.proxy.ingress import WayIn, dial
from lifecycle.sandboxes.starting import Reached

_ANSWER_SECONDS = 2.0
_HEADERS = ((b"host", b"127.0.0.1"),)


async def reached(way: WayIn, sandbox: str) -> Reached:
    """Ask once. No answer in time is `NOTHING`."""
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            connection = Connection(await dial(way, sandbox, EXECD_PORT))
            try:
                await connection.request("GET", b"/ready", _HEADERS, None)
                answer = await connection.response()
            finally:
                connection.close()
    except (OSError, TimeoutError, BrokenExchangeError):
        return Reached.NOTHING
    return Reached.STARTED if answer.status_code == 200 else Reached.SERVING
