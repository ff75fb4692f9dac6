"""Hands an idle member of a pool to its owner: the first init of its execd, which then starts the entrypoint."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence

from lifecycle.api.credentials import EXECD_HEADER
from lifecycle.proxy.exchange import BrokenExchangeError, Connection
from lifecycle.proxy.headers import EXECD_PORT
from lifecycle.proxy.ingress import WayIn, dial

_ANSWER_SECONDS = 10.0
_GENERATION = 1


class NotHandedOver(Exception):
    """execd did not take the init. It is unknown whether the entrypoint starts."""


async def hand_over(way: WayIn, sandbox: str, token: str, entrypoint: Sequence[str], env: Mapping[str, str]) -> None:
    """Name the variables and the entrypoint of a member. Its token stays the same.

    Raises:
        NotHandedOver: also if a program runs in the sandbox already.
    """
    body = json.dumps(
        {
            "sandboxId": sandbox,
            "generation": _GENERATION,
            "accessTokenHash": f"sha256:{hashlib.sha256(token.encode()).hexdigest()}",
            "envs": dict(env),
            "entrypoint": list(entrypoint),
        }
    ).encode()
    headers = (
        (b"host", b"127.0.0.1"),
        (EXECD_HEADER.encode(), token.encode()),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    )
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            connection = Connection(await dial(way, sandbox, EXECD_PORT))
            try:
                await connection.request("POST", b"/internal/init", headers, _whole(body))
                status = (await connection.response()).status_code
            finally:
                connection.close()
    except (OSError, TimeoutError, BrokenExchangeError) as error:
        raise NotHandedOver(type(error).__name__) from None
    if status != 200:
        raise NotHandedOver(f"status {status}")


async def _whole(body: bytes) -> AsyncIterator[bytes]:
    yield body
