"""One lock for each sandbox, which serializes all writes to it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Locks:
    """The locks of all sandboxes. A lock exists only while a task holds it or waits for it."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    def is_held(self, sandbox: str) -> bool:
        """Return whether a task holds the lock of a sandbox or waits for it."""
        return sandbox in self._locks

    @contextlib.asynccontextmanager
    async def hold(self, sandbox: str) -> AsyncIterator[None]:
        """Hold the lock of a sandbox. Every change of the sandbox needs it."""
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
