"""`sallyport serve` whose hostd does not watch: for tests that take a sandbox's layers away and look what gets out.

python -m tests.unwatched CONFIG.toml
"""

import subprocess
import sys
from typing import Any

from runtimes import hostd
from runtimes.net import slot_pool


class Unwatched:
    """Stands where `runtimes.checks.watch.Watch` stands. It judges no slots, so none are made ahead."""

    def __init__(self, *_: Any) -> None:
        slot_pool.AHEAD = 0

    async def start(self, index: int) -> None:
        """Watch nothing."""

    async def judge_idle(self, *_: Any) -> None:
        """Vouch for no slot."""

    async def stop(self) -> None:
        """Nothing to stop."""


def main(config: str) -> int:
    """Write what `serve` writes, and become its hostd; with hostd's own configuration (JSON) at once."""
    hostd.Watch = Unwatched  # type: ignore[assignment,misc]
    if config.endswith(".json"):
        return hostd.main([config])
    command = [sys.executable, "-m", "lifecycle.cli", "--config", config, "serve", "--write-only"]
    written = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return hostd.main([written.splitlines()[-1]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
