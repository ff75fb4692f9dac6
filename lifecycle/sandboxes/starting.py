"""The wait for the entrypoint of a new sandbox.

Without it the caller would get an id, and a program that does not exist would show itself as a time-out of the SDK. The
wait costs a caller nothing: its next step is to wait for execd itself.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from enum import Enum

import wire
from audit.records import escape
from lifecycle.api.errors import ApiError
from lifecycle.daemon_clients import Hostd, Unreachable
from wire.api.states import HostState

SECONDS = 5.0
"""The limit of the wait. After it the sandbox counts as running."""
_LOOK_SECONDS = 0.1
_FIRST_PAUSE, _LATER_PAUSE = 0.005, 0.015
"""A question costs some milliseconds of processor time. runc's execd serves with the first ones, runsc's later."""
_QUICK_SECONDS, _LONGEST_PAUSE = 1.0, 0.1
_SHOWN_LINES, _SHOWN_CHARACTERS = 10, 1000

_log = logging.getLogger(__name__)


class Reached(Enum):
    """What the execd of a sandbox has answered."""

    NOTHING = "nothing"
    SERVING = "serving"
    """It serves, and has not started the entrypoint yet."""
    STARTED = "started"


class Starting:
    """Waits for the entrypoints of new sandboxes.

    Args:
        reached: asks the execd of a sandbox once.
        seconds: the limit of one wait.
    """

    def __init__(self, hostd: Hostd, reached: Callable[[str], Awaitable[Reached]], seconds: float = SECONDS) -> None:
        self._hostd = hostd
        self._reached = reached
        self._seconds = seconds

    async def wait(self, sandbox: str, *, started: bool, seconds: float | None = None) -> None:
        """Wait until the entrypoint was started, or only until execd serves: hooks before it can take hours.

        Args:
            seconds: another limit of this wait.

        Raises:
            ApiError: the entrypoint has ended with an error.
        """
        enough = {Reached.STARTED} if started else {Reached.STARTED, Reached.SERVING}
        loop = asyncio.get_running_loop()
        began = loop.time()
        look, pause = began + _LOOK_SECONDS, _FIRST_PAUSE
        while loop.time() < began + (self._seconds if seconds is None else seconds):
            if await self._reached(sandbox) in enough:
                return
            if loop.time() >= look:
                if await self._has_ended(sandbox):
                    return
                look = loop.time() + _LOOK_SECONDS
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _LATER_PAUSE if loop.time() < began + _QUICK_SECONDS else _LONGEST_PAUSE)

    async def _has_ended(self, sandbox: str) -> bool:
        """Return whether the entrypoint has ended without an error, or hostd does not know.

        Raises:
            ApiError: it has ended with an error.
        """
        try:
            state = await self._hostd.state(sandbox)
            if state.state not in (HostState.EXITED, HostState.DEAD):
                return False
        except (Unreachable, wire.RemoteError) as error:  # The observer finds out later.
            _log.info("it is not known whether %s has started: %s", sandbox, error)
            return True
        if state.exit_code == 0:
            return True
        how = "was ended at its memory limit" if state.oom else f"ended with exit code {state.exit_code}"
        message = f"The entrypoint {how}; {await self._said(sandbox)}"
        raise ApiError(500, "DOCKER::SANDBOX_START_FAILED", message, stored=f"The entrypoint {how}.")

    async def _said(self, sandbox: str) -> str:
        """Describe the output of an entrypoint."""
        try:
            printed = await self._hostd.output(sandbox, _SHOWN_LINES)
        except (Unreachable, wire.RemoteError) as error:
            _log.info("the output of %s cannot be read: %s", sandbox, error)
            return "its output cannot be read"
        text = " ".join(printed.text.split())[-_SHOWN_CHARACTERS:]
        return f"the end of its output: {escape(text)}" if text else "it has written nothing"
