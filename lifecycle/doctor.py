"""`sallyport doctor`: what this machine lacks, and how to provide it. It works with and without a running server.

- A running hostd runs its checks itself, because it has its own configuration. Otherwise the checks run in a
  separate process, on the files that `serve` would write, but in a temporary directory.
- The checks that only the control plane can make (the policy file, the listening address) are added here.

`runtimes.checks.doctor` contains the checks of the host. Nothing is changed.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import wire
from lifecycle import console
from lifecycle.config import launch, master_key
from lifecycle.config.settings import Settings, SettingsError
from policy.load import PolicyError, load
from runtimes.process import api_listener
from vault.keyring import MasterKeyError
from wire import codec
from wire.api.hostd import Check, Diagnosis, Doctor
from wire.blocking import BlockingClient
from wire.sockets import ROOT

PROJECT = Path(__file__).resolve().parent.parent
_ASK_SECONDS = 60.0
_CHECK_SECONDS = 300.0


def diagnose(settings: Settings) -> list[Check]:
    """Run every check."""
    try:
        running = _ask_hostd(settings.run_dir / "hostd.sock")
    except PermissionError:
        running = [Check("host", False, "the running server answers root only", "run this command as root")]
    except wire.WrongServer as error:
        running = [Check("host", False, str(error), "find out which program has made that socket")]
    own = [
        _attempt("policy", "correct the policy file; `sallyport policy check` says where", lambda: _policy(settings))
    ]
    remedy = "start PostgreSQL, or correct the DSN"
    own.append(_attempt("database", remedy, lambda: _database(settings)))
    remedy = "see docs/guides/wrap-the-master-key.md"
    own.append(_attempt("key", remedy, lambda: master_key.state(settings)))
    if running is not None:
        return [Check("server", True, "running"), *running, *own]
    remedy = "end the program that listens there, or set server.host and server.port"
    return [*ask_process(settings), *own, _attempt("listen", remedy, lambda: _listen(settings))]


def _ask_hostd(path: Path) -> list[Check] | None:
    """Ask the running hostd; None if there is none.

    Raises:
        PermissionError: there is one, and it answers other users only.
        wire.WrongServer: a process of another user listens on its socket.
    """
    try:
        client = BlockingClient(path, ROOT, _ASK_SECONDS)
    except (PermissionError, wire.WrongServer):
        raise
    except OSError:
        return None
    with client:
        try:
            return list(client.ask(Doctor()).checks)
        except (wire.RemoteError, OSError) as error:  # ConnectionError and TimeoutError are OSErrors.
            return [Check("host", False, f"the running server cannot say: {console.reason(error)}", "start it again")]


def ask_process(settings: Settings) -> list[Check]:
    """Run the host's checks in a separate process, for a server with these settings."""
    remedy = "run it with the Python environment that Sallyport is installed in"
    with tempfile.TemporaryDirectory(prefix="sallyport-doctor-") as directory:
        host = launch.write_host(settings, Path(directory))
        command = [sys.executable, "-m", "runtimes.checks.doctor", "--json", str(host)]
        try:
            done = subprocess.run(
                command, cwd=PROJECT, capture_output=True, text=True, timeout=_CHECK_SECONDS, check=False
            )
            return list(codec.decode(Diagnosis, json.loads(done.stdout)).checks)
        except subprocess.TimeoutExpired:
            return [Check("host", False, f"the checks did not end within {_CHECK_SECONDS:.0f} s", remedy)]
        except ValueError:
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            return [Check("host", False, f"the checks could not run: {said[:200]}", remedy)]


def _attempt(name: str, remedy: str, probe: Callable[[], str]) -> Check:
    try:
        return Check(name, True, probe())
    except (SettingsError, PolicyError, MasterKeyError, OSError) as error:
        return Check(name, False, console.reason(error), remedy)


def _policy(settings: Settings) -> str:
    path = settings.policy_file
    if path is None:
        return "no file: a sandbox without a networkPolicy of its own gets deny-all"
    launch.check_readable(path)
    return f"{path}: good, {len(load(path).policies)} policies"


def _database(settings: Settings) -> str:
    if problem := launch.database_problem(settings):
        raise OSError(problem)
    return "SQLite" if launch.database(settings) is None else "the user of serve reaches PostgreSQL"


def _listen(settings: Settings) -> str:
    api_listener.bind(settings.host, settings.port).close()
    return f"{settings.host}:{settings.port} is free"


def needs_root() -> bool:
    """Return whether most checks would fail only because they are not run by root."""
    return os.geteuid() != 0
