"""A sandbox of runsc whose processes are killed, other processes with their numbers, and the removal of the sandbox.

`python -m tests.system.reused_numbers RUNSC DIRECTORY COMMAND...` runs in a pid namespace of its own: there it chooses
the number of each next process. RUNSC makes the sandbox and COMMAND, which takes runsc's arguments, deletes it.
It prints the exit status of the deletion, the signal that ended each of the other processes as a negative number
(SIGTERM is the program's own), and whether the state of the sandbox is still there, as JSON.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ID = "a" * 64
_SPEC = {
    "ociVersion": "1.0.0",
    "process": {"args": ["/bin/sleep", "600"], "cwd": "/", "user": {"uid": 0, "gid": 0}},
    "root": {"path": "rootfs", "readonly": True},
    "linux": {"namespaces": [{"type": name} for name in ("pid", "mount", "network")]},
}


def _create(runsc: str, directory: Path) -> tuple[int, int]:
    """Make a sandbox and return the numbers of its two processes."""
    bundle = directory / "bundle"
    (bundle / "rootfs").mkdir(parents=True)
    subprocess.run(["tar", "-C", bundle / "rootfs", "-xf", os.environ["SALLYPORT_SMALL_IMAGE"]], check=True)
    (bundle / "config.json").write_text(json.dumps(_SPEC))
    options = ("--root", str(directory / "root"), "--network=none", "--ignore-cgroups")
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([runsc, *options, "create", "--bundle", bundle, ID], check=True, **quiet)
    state = json.loads(_state(directory).read_text())
    return state["sandbox"]["pid"], state["goferPid"]


def _state(directory: Path) -> Path:
    return directory / "root" / f"{ID}_sandbox:{ID}.state"


def _end(pid: int) -> None:
    """Kill a process whose parent is this one by now, as the first of the namespace."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _with_number(number: int) -> "subprocess.Popen[bytes]":
    """Start a process that gets this number."""
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(number - 1))
    process = subprocess.Popen(["sleep", "600"])
    assert process.pid == number
    return process


def main(runsc: str, directory: str, *command: str) -> None:
    """Run the program."""
    place = Path(directory)
    numbers = _create(runsc, place)
    for number in numbers:
        _end(number)
    others = [_with_number(number) for number in numbers]
    deleted = subprocess.run(
        [*command, "--root", str(place / "root"), "delete", "--force", ID], stderr=subprocess.DEVNULL, check=False
    )
    for other in others:
        other.terminate()  # a SIGKILL that was sent before comes first
    print(json.dumps([deleted.returncode, [other.wait() for other in others], _state(place).exists()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
