"""The process that captures one sandbox: `python -IS capture.py <json>`, a child of hostd.

It is a process of its own, so that hostd's loop does not wait for it, hostd does not parse what a sandbox wrote, and
it can be ended at any time.

1. It opens what it needs. On runsc it then gives up root: it becomes a user that no other process has.
2. It reads one line from its standard input. hostd has frozen the sandbox by then.
3. It writes the layer, and one line of JSON to its standard output: `{"digest", "bytes", "holes"}`, or
   `{"refused", "too_large"}`.

The JSON of the argument has `kind` (`upper` or `checkpoint`), `source` (the upper directory, or the file in which runsc
keeps the overlay), `checkpoint` (the checkpoint's directory), `out` (the file of the layer), `base` (the first uid of
the sandbox's range), `most` (bytes), `left_out` (paths in the sandbox) and `parent` (hostd's process).

It ends with its parent. Standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys

sys.path.append(os.path.abspath(f"{__file__}/../../.."))  # last: it replaces no standard module
from runtimes.snapshots import checkpoint, upper
from runtimes.snapshots.layer import CaptureRefused, Layer, TooLarge

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing is slow to import, and this starts for each snapshot
    from collections.abc import Callable
    from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_MEMORY = 1 << 30
_MANIFEST, _ARCHIVE, _BEGINNING = "fscheckpoint.pb", "multitar.img", 16
ALWAYS_LEFT_OUT = ("/dev", "/proc", "/sys", "/.dockerenv", "/opt/opensandbox")
"""Mounts of every container, and the directory of Sallyport's own files."""


def chosen(left_out: list[str]) -> Callable[[bytes], bool]:
    """Return whether a path is one of `left_out`. What is below them is reached only through them."""
    paths = frozenset(os.fsencode(path).strip(b"/") for path in (*ALWAYS_LEFT_OUT, *left_out))

    def is_left_out(path: bytes) -> bool:
        if path in paths:
            return True
        return any(path.startswith(known + b"/") for known in paths)

    return is_left_out


def _become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def run(plan: dict[str, Any]) -> dict[str, Any]:
    """Capture as the plan says, and return the answer."""
    out = os.open(plan["out"], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    layer = Layer(out, plan["most"])
    left_out = chosen(plan["left_out"])
    if plan["kind"] == "upper":
        root = os.open(plan["source"], os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        sys.stdin.readline()
        upper.capture(root, layer, plan["base"], left_out)
    else:
        store = os.open(plan["source"], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        sys.stdin.readline()  # runsc has written the checkpoint
        manifest, archive = (
            os.open(os.path.join(plan["checkpoint"], name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            for name in (_MANIFEST, _ARCHIVE)
        )
        _become(plan["base"])
        checkpoint.check_manifest(os.read(manifest, _BEGINNING))
        with open(archive, "rb", buffering=1 << 20) as source:
            checkpoint.capture(source, store, layer, left_out)
    digest = layer.close()
    holes = {os.fsdecode(path): found for path, found in layer.holes.items()}
    return {"digest": digest, "bytes": layer.bytes, "holes": holes}


def main(arguments: list[str]) -> int:
    """Run the process; return its exit status."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    plan = json.loads(arguments[0])
    if os.getppid() != plan["parent"]:
        return 1  # it ended before the request above
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    try:
        answer = run(plan)
    except CaptureRefused as refusal:
        answer = {"refused": str(refusal), "too_large": isinstance(refusal, TooLarge)}
    except MemoryError:
        answer = {"refused": "it has too many files", "too_large": True}
    except OSError as error:
        answer = {"refused": f"the host could not do it: {error.strerror}", "too_large": False}
    print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
