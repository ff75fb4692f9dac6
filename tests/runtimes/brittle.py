"""The real auditd and vaultd, with a switch: while a file NAME.brittle exists, one ends when a channel is attached to
it.

`python -m tests.runtimes.brittle RUN/config/NAME.json`; the file is expected beside RUN. NAME is auditd or vaultd.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from audit import auditd
from vault import vaultd
from vault.operations import VaultOperations


def main(arguments: list[str]) -> int:
    config = Path(arguments[0])
    service: Any = {"auditd": auditd.Service, "vaultd": VaultOperations}[config.stem]
    service._attach = _ends_while(config.parents[2] / f"{config.stem}.brittle", service._attach)
    return auditd.main(arguments) if config.stem == "auditd" else vaultd.main(arguments)


def _ends_while(there: Path, attach: Callable[..., Any]) -> Callable[..., Any]:
    def attached(*arguments: Any) -> Any:
        if there.exists():
            os._exit(1)
        return attach(*arguments)

    return attached


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
