"""Work that must come to its end once it has begun: in the middle it has made what nobody would take back."""

import asyncio
from collections.abc import Awaitable


async def finished[T](work: Awaitable[T]) -> T:
    """Wait for `work`, to its end even when the caller is cancelled meanwhile; then the cancellation goes on."""
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
            task.exception()  # the cancellation is what the caller hears of
        raise
