"""Writes the files by which Docker calls the shim: one executable wrapper per runtime, and their `runtimes` entries.

- A wrapper fixes interpreter, shim, real runtime, plan directory and runtime flags: nothing comes from the
  environment.
- It calls the shim if any of its arguments is a subcommand that the shim handles, at any position. Otherwise it
  executes the real runtime directly (Docker makes several such calls for each container).
- Wrappers belong to root. A new version replaces the whole file.
"""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtimes.engine.profile import PROFILES
from runtimes.engine.shim import handled
from wire.api.hostd import Runtime

_WRAPPER = """\
#!/bin/sh
case " $* " in
{checked}) exec {shim} "$@" ;;
*) exec {real} "$@" ;;
esac
"""


def runtime_name(runtime: Runtime) -> str:
    """Return the name of the shimmed runtime in Docker's configuration."""
    return f"sallyport-{runtime}"


def write_wrappers(directory: Path, plans: Path, python: str, programs: Mapping[Runtime, str]) -> dict[str, Any]:
    """Write a wrapper into `directory` for each of `programs`; return their entries for Docker's configuration."""
    shim = str(Path(__file__).with_name("shim.py"))
    for runtime, program in programs.items():
        flags = PROFILES[runtime].flags
        words = shlex.join([python, "-IS", shim, runtime, program, str(plans), *flags, "--"])
        path = directory / runtime_name(runtime)
        temporary = path.with_suffix(".new")
        checked = "|".join(f'*" {name} "*' for name in sorted(handled(runtime)))
        temporary.write_text(_WRAPPER.format(checked=checked, shim=words, real=shlex.join([program, *flags])))
        os.chmod(temporary, 0o755)  # noqa: S103 - Docker executes it; only root can write it
        temporary.rename(path)
    return entries(directory, tuple(programs))


def entries(directory: Path, runtimes: Sequence[Runtime]) -> dict[str, dict[str, str]]:
    """Return the `runtimes` entries of Docker's configuration for the wrappers in `directory`."""
    return {runtime_name(runtime): {"path": str(directory / runtime_name(runtime))} for runtime in runtimes}


def write_daemon_json(path: Path, runtimes: dict[str, Any]) -> None:
    """Write a configuration file for the dockerd of hostd. Containers outlive it, and the next dockerd finds them."""
    path.write_text(json.dumps({"live-restore": True, "runtimes": runtimes}, indent=2) + "\n")
    os.chmod(path, 0o644)
