"""`sallyport serve` with a hostd that does not watch.

Tests use it to remove layers of a sandbox and to examine what the sandbox can then reach.

python -m tests.unwatched CONFIG.toml
"""

import subprocess
import sys
from typing import Any

from runtimes import hostd
from runtimes.net import slot_pool


class Unwatched:
    """A replacement for `runtimes.checks.watch.Watch`. It judges no slots, so no idle slots are made."""

    def __init__(self, *_: Any) -> None:
        slot_pool.AHEAD = 0

    async def start(self, *_: Any) -> None:
        """Do nothing: there is no watch to start."""

    async def judge_idle(self, *_: Any) -> None:
        """Judge no slot."""

    async def stop(self) -> None:
        """Do nothing: there is no watch to stop."""


def main(config: str) -> int:
    """Write the files that `serve` writes, and become its hostd.

    With hostd's own configuration (JSON), become it at once.
    """
    hostd.Watch = Unwatched  # type: ignore[assignment,misc]
    if config.endswith(".json"):
        return hostd.main([config])
    command = [sys.executable, "-m", "lifecycle.cli", "--config", config, "serve", "--write-only"]
    written = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return hostd.main([written.splitlines()[-1]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
