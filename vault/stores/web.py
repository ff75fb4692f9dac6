"""The bounds of an answer over HTTP, for each backend that reads one."""

import json
import time
from typing import Any, Final

import requests

from vault.stores.backend import NoValueError
from wire.api.fetcher import Fault

MOST_BYTES: Final = 1024 * 1024


def content_of(response: requests.Response, until: float) -> bytes:
    """Read the body of a streamed response.

    Raises:
        NoValueError: it is over `MOST_BYTES`.
        TimeoutError: the time `until` (`time.monotonic()`) has come, also if the server sends byte by byte.
    """
    content = bytearray()
    while part := response.raw.read1(16384, decode_content=True):  # it does not wait until the part is full
        content += part
        if len(content) > MOST_BYTES:
            raise NoValueError(Fault.UNFIT, f"the answer is over {MOST_BYTES} bytes")
        if time.monotonic() > until:
            raise TimeoutError
    return bytes(content)


def object_of(content: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; empty if it is none."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
