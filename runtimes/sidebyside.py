"""Two steps at once, as part of a transaction: both end before anybody takes back what they made.

- A step is never cancelled in its middle, where a thread or Docker might still finish what nobody then knows of.
- It undoes nothing and sets no time limit; each step has limits of its own.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def both[A, B](one: Coroutine[Any, Any, A], other: Coroutine[Any, Any, B]) -> tuple[A, B]:
    """Run both to their ends and return their results, even if one fails or the caller is cancelled meanwhile.

    Raises:
        asyncio.CancelledError: the caller was cancelled.
        Exception: what a step raised; if both did, the first one's.
    """
    tasks = asyncio.create_task(one), asyncio.create_task(other)
    cancelled = False
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)  # leaves the tasks alone when it is cancelled
        except asyncio.CancelledError:
            cancelled = True
    failures = [error for task in tasks if (error := task.exception()) is not None]
    if cancelled:
        raise asyncio.CancelledError
    if failures:
        raise failures[0]
    return tasks[0].result(), tasks[1].result()
