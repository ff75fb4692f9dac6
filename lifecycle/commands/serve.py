"""`sallyport serve`: it writes the configuration of all daemons and becomes the watchdog."""

import argparse
import os
import sys
from collections.abc import Sequence

import policy.cli
from lifecycle import console, doctor, running
from lifecycle.commands.common import FAILED, OK, WRONG, given
from lifecycle.config import launch, master_key, settings
from runtimes.process import api_listener
from vault.keyring import MasterKeyError


def add_arguments(parser: argparse.ArgumentParser, _parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the options of the command."""
    parser.add_argument("--write-only", action="store_true", help="write the daemons' configuration and stop there")


def run(options: argparse.Namespace) -> int:
    """Write the configuration of all daemons and become the watchdog; return the exit status if that is impossible."""
    configured, write_only = given(options), options.write_only
    if os.geteuid() != 0 and not write_only:
        print("sallyport: cannot run: not root; run: sallyport doctor", file=sys.stderr)
        return FAILED
    for remark in configured.remarks:
        print(f"sallyport: {remark}", file=sys.stderr)
    if configured.policy_file is None:
        print("sallyport: no sallyport.policy_file: sandboxes without a networkPolicy get deny-all", file=sys.stderr)
    elif policy.cli.check(configured.policy_file) != 0:
        return WRONG
    if not write_only and (problem := launch.database_problem(configured)):
        print(f"sallyport: cannot run: {problem}; run: sallyport doctor", file=sys.stderr)
        return FAILED
    try:
        if not write_only:  # The programs that this process executes inherit it.
            notes = configured.run_dir / "config"
            api_listener.hand_over(api_listener.obtain(configured.host, configured.port, notes))
        keys = launch.api_keys(configured)
        master_key.prepare(configured)
        host = launch.write_all(configured, keys)
        if not write_only:
            running.note(configured)
    except (OSError, MasterKeyError) as error:
        print(f"sallyport: cannot run: {console.reason(error)}; run: sallyport doctor", file=sys.stderr)
        return FAILED
    if configured.insecure:
        print(f"sallyport: {settings.INSECURE}=YES: no API key is asked for", file=sys.stderr)
    print(f"sallyport: address: {launch.address(configured)}", file=sys.stderr)
    print(f"sallyport: policy file: {configured.policy_file or 'none'}", file=sys.stderr)
    for line in launch.exports(configured):
        print(line, flush=True)
    if write_only:
        print(host)
        return OK
    python = str(configured.get("sallyport.python") or sys.executable)
    os.chdir(doctor.PROJECT)  # The modules that `-m` finds must not depend on the operator's working directory.
    console.flush()
    try:
        os.execv(python, [python, "-m", "runtimes.process.watchdog", str(host)])  # noqa: S606 - no shell is meant
    except OSError as error:
        print(f"sallyport: cannot run: {python}: {error.strerror}; run: sallyport doctor", file=sys.stderr)
    return FAILED
