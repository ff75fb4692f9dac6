"""Work that must run to its end once it has begun, because a cancellation would leave what it has made so far.

- A part of a transaction is never cancelled before its end, because a thread or Docker could still complete a step
  that is not recorded: `finished`, `both`, `ShieldedTasks`. Work that can be cancelled is awaited: `together`.
- Nothing here undoes a step or sets a time limit; each piece of work has its own limits.
"""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any

_log = logging.getLogger(__name__)


async def finished[T](work: Awaitable[T]) -> T:
    """Wait until `work` has ended, even if the caller is cancelled meanwhile; then raise the cancellation."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                continue
        if not task.cancelled():
            task.exception()  # the caller receives the cancellation
        raise


async def both[A, B](one: Coroutine[Any, Any, A], other: Coroutine[Any, Any, B]) -> tuple[A, B]:
    """Run both to their ends and return their results, even if one fails or the caller is cancelled meanwhile.

    Raises:
        asyncio.CancelledError: the caller was cancelled.
        Exception: the exception of a step; if both failed, the first one's.
    """
    first, second = await finished(asyncio.gather(one, other, return_exceptions=True))
    if isinstance(first, BaseException):
        raise first
    if isinstance(second, BaseException):
        raise second
    return first, second


async def together(*works: Coroutine[Any, Any, Any]) -> None:
    """Run `works` concurrently. If one fails, cancel the others, wait for them, and raise its exception."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def taken(what: str, step: Awaitable[Sequence[str]]) -> list[str]:
    """Run one step of a removal. If it fails, return this as residue, so that the caller can continue."""
    try:
        return list(await step)
    except Exception as error:  # noqa: BLE001 - reported as residue: it is tried again
        return [f"{what}: {type(error).__name__}: {error}"[:200]]


class ShieldedTasks:
    """Work that continues after its caller is cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def whole[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end; return its result unless the caller was cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.info("%s: %s", type(error).__name__, error)
