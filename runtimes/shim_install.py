"""Writes what Docker needs to call the shim: one executable wrapper per runtime, and their `runtimes` entries.

- A wrapper fixes interpreter, shim, real runtime, plan directory and runtime flags: nothing comes from the environment.
- It calls the shim when any of its words is a subcommand that the shim checks, wherever that word stands; only without
  one does it go straight to the real runtime (Docker makes several such calls for each container).
- Wrappers belong to root and are replaced as a whole.
"""

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtimes.oci_shim import CHECKED
from runtimes.spec import RUNTIMES, Runtime

RUNSC_FLAGS = (
    "--network=sandbox",
    "--net-raw=false",
    "--allow-packet-socket-write=false",
    "--host-uds=none",
    "--host-fifo=none",
    "--allow-flag-override=false",
    "--debug=false",
    "--strace=false",
    "--log-packets=false",
    "--profile=false",
    "--overlay2=root:self",
    "--file-access=exclusive",
    "--nvproxy=false",
    "--iouring=false",
)
"""Stated even where they are the default today: a changed default must not open anything."""

_PATTERN = "|".join(f'*" {name} "*' for name in sorted(CHECKED))
_WRAPPER = """\
#!/bin/sh
case " $* " in
{checked}) exec {shim} "$@" ;;
*) exec {real} "$@" ;;
esac
"""


def runtime_name(runtime: Runtime) -> str:
    """Return the name that Docker knows the shimmed runtime by."""
    return f"sallyport-{runtime}"


def write_wrappers(directory: Path, plans: Path, python: str, runc: str, runsc: str) -> dict[str, Any]:
    """Write the wrappers into `directory`; return the `runtimes` entries for Docker's configuration."""
    shim = str(Path(__file__).with_name("oci_shim.py"))
    real: dict[Runtime, tuple[str, tuple[str, ...]]] = {"runc": (runc, ()), "runsc": (runsc, RUNSC_FLAGS)}
    for runtime in RUNTIMES:
        program, flags = real[runtime]
        words = shlex.join([python, "-IS", shim, runtime, program, str(plans), *flags, "--"])
        path = directory / runtime_name(runtime)
        temporary = path.with_suffix(".new")
        temporary.write_text(_WRAPPER.format(checked=_PATTERN, shim=words, real=shlex.join([program, *flags])))
        os.chmod(temporary, 0o755)  # noqa: S103 - Docker executes it; only root can write it
        temporary.rename(path)
    return entries(directory, RUNTIMES)


def entries(directory: Path, runtimes: Sequence[Runtime]) -> dict[str, dict[str, str]]:
    """Return the `runtimes` entries of Docker's configuration for the wrappers in `directory`."""
    return {runtime_name(runtime): {"path": str(directory / runtime_name(runtime))} for runtime in runtimes}


def write_daemon_json(path: Path, runtimes: dict[str, Any]) -> None:
    """Write a configuration file for our own dockerd. Its containers outlive it: whoever adopts it finds them."""
    path.write_text(json.dumps({"live-restore": True, "runtimes": runtimes}, indent=2) + "\n")
    os.chmod(path, 0o644)
