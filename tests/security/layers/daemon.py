"""`python -m tests.security.layers.daemon CONFIG.json`: a daemon of the product with substituted functions.

The name of the configuration file, which hostd passes, selects the daemon.
"""

import importlib
import sys
from pathlib import Path

from tests.security.layers import state, substitutes
from tests.security.mains import MAINS


def main() -> int:
    config = Path(sys.argv[1])
    state.STATE.path = config.parent.parent / state.NAME
    install = {
        "host": substitutes.in_hostd,
        "auditd": substitutes.in_auditd,
        "vaultd": substitutes.in_vaultd,
        "zygote": substitutes.in_workers,
    }.get(config.stem)
    if install is not None:
        install()
    result: int = importlib.import_module(MAINS[config.stem]).main([str(config)])
    return result


if __name__ == "__main__":
    sys.exit(main())
