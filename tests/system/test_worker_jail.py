"""A process in the empty root opens no path, as root or as a worker. Before it did, and outside of it nothing changed.

It tests `gateway/confine.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
PROBE = """
import os, sys, threading
from gateway import confine
from gateway import spawn
spawn.preload()
PATHS = ["/", ".", "..", "/.", "/..", "/proc", "/proc/self/status", "/proc/self/root/etc", "/dev", "/dev/null"]
PATHS += ["/etc/passwd", "/sys", "/tmp", "/run", "etc/passwd", "../etc/passwd", sys.executable, confine.__file__]
def opened():
    done = []
    for path in PATHS:
        try:
            os.close(os.open(path, os.O_RDONLY))
            done.append(path)
        except OSError:
            pass
    return done
def made():
    try:
        os.close(os.open("/made", os.O_CREAT | os.O_WRONLY))
        return True
    except OSError:
        return False
def say(who, value):
    os.write(1, f"{who}={value}\\n".encode())
say("control", sorted(set(PATHS) - set(opened())))
say("mounts", len(open("/proc/self/mountinfo").readlines()) > 1)
held = os.open("/dev/null", os.O_RDONLY)
if sys.argv[1] == "jailed":
    confine.empty_root()
    say("root", opened())
    say("root-names", os.listdir("/"))
    say("root-made", made())
    spawn._drop_privileges(700003999, 700003999)
    say("worker", opened())
    say("worker-made", made())
    said = []
    thread = threading.Thread(target=lambda: said.append(opened()))
    thread.start()
    thread.join()
    say("thread", said[0])
    try:
        os.fchdir(held)
    except OSError:
        say("fchdir", "refused")
os._exit(0)
"""


def probe(mode: str) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, mode], cwd="/", env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def test_no_path_leads_anywhere_from_the_empty_root() -> None:
    """Root can still open only the empty directory itself. The worker's user cannot open even that."""
    expected = {
        "control": "[]",
        "mounts": "True",
        "root": str(["/", ".", "..", "/.", "/.."]),
        "root-names": "[]",
        "root-made": "False",
        "worker": "[]",
        "worker-made": "False",
        "thread": "[]",
        "fchdir": "refused",
    }
    assert expected == probe("jailed")
    assert " - tmpfs empty " not in Path("/proc/self/mountinfo").read_text()


def test_without_it_the_same_paths_open() -> None:
    assert {"control": "[]", "mounts": "True"} == probe("free")
