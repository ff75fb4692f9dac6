"""The first init of an execd that waits for it: execd then starts hooks and entrypoint.

An idle member of a pool gets its owner so. A new sandbox gets the variables and files of its policy so: they are in no
description of its container, and on disk only as the sandbox's own files.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence

from lifecycle.api.credentials import EXECD_HEADER
from lifecycle.api.models import HOOKS_VARIABLE
from lifecycle.proxy.exchange import BrokenExchangeError, Connection
from lifecycle.proxy.headers import EXECD_PORT
from lifecycle.proxy.ingress import WayIn, dial
from wire.api.provided import ProvidedFile

_ANSWER_SECONDS = 10.0
_GENERATION = 1


class NotHandedOver(Exception):
    """execd did not take the init. It is unknown whether the entrypoint starts, except if it was `refused`."""

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


async def hand_over(
    way: WayIn,
    sandbox: str,
    token: str,
    entrypoint: Sequence[str],
    env: Mapping[str, str],
    files: Sequence[ProvidedFile],
) -> None:
    """Name variables, files, hooks and entrypoint to an execd. Its token stays the same.

    Args:
        env: its `HOOKS_VARIABLE` has the hooks.
        files: execd writes them first.

    Raises:
        NotHandedOver: also if a program runs in the sandbox already.
    """
    body = json.dumps(
        {
            "sandboxId": sandbox,
            "generation": _GENERATION,
            "accessTokenHash": f"sha256:{hashlib.sha256(token.encode()).hexdigest()}",
            "envs": {name: value for name, value in env.items() if name != HOOKS_VARIABLE},
            "lifecycle": json.loads(env.get(HOOKS_VARIABLE, "null")),
            "entrypoint": list(entrypoint),
            "files": [{"path": file.path, "content": file.content} for file in files],
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
        raise NotHandedOver(f"status {status}", refused=status == 422)


async def _whole(body: bytes) -> AsyncIterator[bytes]:
    yield body
