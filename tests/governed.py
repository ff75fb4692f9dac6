"""`sallyport serve` whose hostd takes compiled policies and limits from root: for tests of what workers do with them.

python -m tests.governed CONFIG.toml

A selection `{"given": POLICY, "limits": LIMITS}` is not compiled. The product has no such way: there a policy is
compiled from the operator's file, and the limits are those of the settings.
"""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

from runtimes import hostd, operator
from wire.api.worker import Configuration


class Governed(operator.Operator):
    """Stands where `runtimes.operator.Operator` stands."""

    async def compile(self, selection: str) -> operator.Policy:
        """Return what was given, its limits beside it."""
        given: dict[str, Any] = json.loads(selection)
        if "given" in given:
            return {**given["given"], "limits of the gateway": given["limits"]}
        return await super().compile(selection)

    def configuration(self, policy: operator.Policy) -> Configuration:
        """As the product's, with the limits that were given."""
        policy = dict(policy)
        limits = policy.pop("limits of the gateway", None)
        made = super().configuration(policy)
        return made if limits is None else replace(made, limits=limits)


def main(config: str) -> int:
    """Write what `serve` writes, and become its hostd; with hostd's own configuration (JSON) at once."""
    hostd.Operator = Governed  # type: ignore[misc]
    if config.endswith(".json"):
        return hostd.main([config])
    command = [sys.executable, "-m", "lifecycle.cli", "--config", config, "serve", "--write-only"]
    written = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return hostd.main([written.splitlines()[-1]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
