"""Commands that run as an unprivileged user: without root, groups, a home or a directory of the project.

The interpreter of a development machine can be below a closed directory, such as /root. In that case the command runs
in a mount namespace in which that directory is open and contains only the interpreter.
"""

import os
import subprocess
import sys
from pathlib import Path

UID = 65534
_MOVE = """
set -e
mount --bind "$1" /mnt
mount -t tmpfs -o mode=755 none "$2"
mkdir -p "$1"
mount --bind /mnt "$1"
shift 2
exec "$@"
"""


def as_anyone(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command with PATH and the given variables as its whole environment."""
    interpreter = Path(sys.base_prefix)
    words = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--", *map(str, command)]
    closed = [str(parent) for parent in interpreter.parents if not parent.stat().st_mode & 0o001]
    if closed:
        move = ["sh", "-c", _MOVE, "sh", str(interpreter), closed[-1]]
        words = ["unshare", "--mount", "--propagation", "private", *move, *words]
    return subprocess.run(
        words,
        env={"PATH": f"/usr/sbin:/usr/bin:/sbin:/bin:{interpreter}/bin"} | environment,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )


def own_directory(parent: Path, name: str) -> Path:
    """Make a directory to which this user can write."""
    path = parent / name
    path.mkdir()
    os.chown(path, UID, UID)
    return path
