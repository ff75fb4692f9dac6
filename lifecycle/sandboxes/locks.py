"""One lock for each sandbox: all writes to one sandbox are serial."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Locks:
    """The locks of all sandboxes; one exists only while it is held or waited for."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    @contextlib.asynccontextmanager
    async def hold(self, sandbox: str) -> AsyncIterator[None]:
        """Hold the sandbox's lock: all that changes it does."""
        lock, users = self._locks.get(sandbox, (asyncio.Lock(), 0))
        self._locks[sandbox] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[sandbox]
            if users == 1:
                del self._locks[sandbox]
            else:
                self._locks[sandbox] = (lock, users - 1)
