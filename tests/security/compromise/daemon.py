"""`python -m tests.security.compromise.daemon CONFIG.json`: a daemon of the product with an agent in it.

The name of the configuration file selects the daemon. Each worker that the zygote forks has an agent, too: it connects
while the worker is being confined and starts when the confinement is complete. The zygote has no agent, because it must
have no threads.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from tests.security.compromise.agent import Agent
from tests.security.mains import MAINS


def main() -> int:
    config = Path(sys.argv[1])
    run = config.parent.parent
    if config.stem == "zygote":
        _in_workers(run)
    else:
        Agent(run, config.stem).obey()
    result: int = importlib.import_module(MAINS[config.stem]).main([str(config)])
    return result


def _in_workers(run: Path) -> None:
    from gateway import confine, spawn, worker  # only the zygote needs them

    become, enter, compose = spawn.become_worker, confine.empty_root, worker.Worker.__init__
    born: dict[str, Any] = {}

    def becomes(order: spawn.Order) -> int:
        born["name"] = order.sandbox
        return become(order)

    def enters() -> None:
        born["agent"] = Agent(run, born["name"])
        enter()

    def composed(self: worker.Worker, *arguments: Any) -> None:
        compose(self, *arguments)
        born["agent"].obey(process=self)

    spawn.become_worker = becomes
    confine.empty_root = enters
    worker.Worker.__init__ = composed  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
