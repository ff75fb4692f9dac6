"""`sallyport serve` whose hostd takes compiled policies and limits from root: for tests of what workers do with them.

python -m tests.governed CONFIG.toml

A selection `{"given": POLICY, "limits": LIMITS}` is not compiled. The product has no such way: there a policy is
compiled from the operator's file, and the limits are those of the settings.

python -m tests.governed zygote.json          its zygote, whose workers take limits out of a policy
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
from wire.api.worker import Configure

LIMITS = "limits of the gateway"
"""A member of a policy, here."""


class Governed(operator.Operator):
    """Stands where `runtimes.operator.Operator` stands."""

    async def compile(self, selection: str) -> operator.Policy:
        """Return what was given, its limits beside it."""
        given: dict[str, Any] = json.loads(selection)
        if "given" in given:
            return {**given["given"], LIMITS: given["limits"]}
        return await super().compile(selection)


class Limited(GatewayConfig):
    """Stands where `gateway.config.GatewayConfig` stands."""

    __slots__ = ()

    @classmethod
    def of(cls, request: Configure, constants: WorkerConstants) -> GatewayConfig:
        """As the product's, with the limits that were given."""
        policy = json.loads(request.policy)
        limits = policy.pop(LIMITS, None)
        if limits is not None:
            constants = replace(constants, limits=replace(constants.limits, **limits))
        return GatewayConfig.of(replace(request, policy=json.dumps(policy)), constants)


def main(config: str) -> int:
    """Write what `serve` writes, and become its hostd; with a configuration of hostd or of the zygote, that one."""
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
