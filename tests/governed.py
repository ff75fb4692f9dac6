"""`sallyport serve` with a hostd that accepts compiled policies and limits from root, for tests of the workers.

python -m tests.governed CONFIG.toml

A selection `{"given": POLICY, "limits": LIMITS}` is not compiled. The product has no such input: it compiles a policy
from the operator's file, and takes the limits from the settings.

python -m tests.governed zygote.json

This command is the server's zygote. Its workers take the limits from the policy.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway import worker, zygote
from gateway.config import GatewayConfig, WorkerConstants
from runtimes import hostd, operator
from wire.api.provided import NOTHING, Provided
from wire.api.worker import Configure

LIMITS = "limits of the gateway"
"""The member of a policy in which this module passes the limits."""


class Governed(operator.Operator):
    """A replacement for `runtimes.operator.Operator` that accepts compiled policies."""

    async def compile(self, selection: str, seed: str) -> tuple[operator.Policy, Provided]:
        """Return the given policy with its limits as a member; compile any other selection."""
        given: dict[str, Any] = json.loads(selection)
        if "given" in given:
            return {**given["given"], LIMITS: given["limits"]}, NOTHING
        return await super().compile(selection, seed)


class Limited(GatewayConfig):
    """A replacement for `gateway.config.GatewayConfig` that takes limits from the policy."""

    __slots__ = ()

    @classmethod
    def of(cls, request: Configure, constants: WorkerConstants) -> GatewayConfig:
        """Return the product's configuration, with the limits of the policy if it has any."""
        policy = json.loads(request.policy)
        limits = policy.pop(LIMITS, None)
        if limits is not None:
            constants = replace(constants, limits=replace(constants.limits, **limits))
        return GatewayConfig.of(replace(request, policy=json.dumps(policy)), constants)


def main(config: str) -> int:
    """Write the files that `serve` writes, and become its hostd.

    With the configuration file of hostd or of the zygote, become that process.
    """
    if Path(config).name == "zygote.json":
        worker.GatewayConfig = Limited  # type: ignore[misc]
        return zygote.main([config])
    hostd.Operator = Governed  # type: ignore[misc]
    if config.endswith(".json"):
        return hostd.main([config])
    command = [sys.executable, "-m", "lifecycle.cli", "--config", config, "serve", "--write-only"]
    written = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    host = Path(written.splitlines()[-1])
    document = json.loads(host.read_text())
    for process in document["processes"]:
        if process["name"] == "zygote":
            process["module"] = "tests.governed"
    host.write_text(json.dumps(document))
    return hostd.main([str(host)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
