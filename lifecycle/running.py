"""The note with the files of the running server. `serve` writes it, and commands without given settings read it.

- `serve` becomes the watchdog, which keeps its process id. A note is ignored if its process has ended, or has another
  start time.
- A note is accepted only if root or the reader owns it and its directory, and no other user can write to it or replace
  it.
- It contains paths, numbers of users and addresses: no key and no part of one. Every user of the host can read it.
"""

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lifecycle.config import launch, master_key
from lifecycle.config.settings import Settings, SettingsError, parse
from runtimes.process.predecessor import lock, start_time

NAME = "serving.json"
_MAX_BYTES = 65536


def note(settings: Settings) -> None:
    """Write the note for this process. While another server runs, its note stays, because this one will not start.

    Raises:
        OSError: it cannot be written.
    """
    try:
        os.close(lock(settings.run_dir))
    except BlockingIOError:
        return
    known = {
        "server": {"host": settings.host, "port": settings.port},
        "sallyport": {
            "state_dir": str(settings.state_dir),
            "run_dir": str(settings.run_dir),
            "policy_file": str(settings.policy_file or ""),
            "vault": {"master_key_file": str(settings.master_key_file), **master_key.note(settings)},
            "uids": launch.uids(settings),
            "allowed_addresses": list(settings.get("sallyport.allowed_addresses")),
            "host_addresses": {host: list(found) for host, found in settings.get("sallyport.host_addresses").items()},
        },
    }
    document = {"pid": os.getpid(), "started": start_time(os.getpid()), "origin": settings.origin, "settings": known}
    temporary = settings.run_dir / f".{NAME}.new"
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        os.fchmod(fd, 0o644)
        json.dump(document, file)
    temporary.rename(settings.run_dir / NAME)


def settings_of(base: Settings) -> Settings:
    """Return the settings of the server that runs in the run directory of `base`; `base` without such a server."""
    found = _read(base.run_dir)
    if found is None:
        return base
    try:
        return parse(found["settings"], f"the running server, {found['origin']}", {}, base)
    except (SettingsError, AttributeError):  # Another release wrote it.
        return base


def _read(run_dir: Path) -> Mapping[str, Any] | None:
    try:
        directory = os.open(run_dir, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fd = os.open(NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
        with os.fdopen(fd, "rb") as file:
            if not (_trusted_directory(os.fstat(directory)) and _trusted_file(os.fstat(fd))):
                return None
            found = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError):
        return None
    finally:
        os.close(directory)
    if not isinstance(found, dict) or not {"pid", "started", "origin", "settings"} <= found.keys():
        return None
    pid = found["pid"]
    return found if type(pid) is int and found["started"] == start_time(pid) is not None else None


def _trusted_directory(status: os.stat_result) -> bool:
    return not status.st_mode & 0o022 and status.st_uid in (0, os.geteuid())


def _trusted_file(status: os.stat_result) -> bool:
    plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    return plain and status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022
