"""Collects what a sandbox can read: environments, command lines, process memory and all files not from the image.

    python3 collect.py OUTPUT SINCE        files changed at or after SINCE (seconds of the epoch)

Standard library only; it runs inside sandboxes. It does not search, because the secrets must never enter the sandbox,
not even for a search. The collection is searched outside.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from typing import BinaryIO

MAX_FILE = 8 << 20
MAX_MEMORY = 32 << 20
SKIPPED = ("/proc", "/sys", "/dev")


def mounts() -> set[str]:
    """Return all mount points, among them those of Sallyport's files, which are older than the sandbox."""
    with open("/proc/mounts") as table:
        return {line.split()[1] for line in table}


def files(since: float) -> Iterator[str]:
    """Yield regular files that have changed since then, and those that are mount points."""
    mounted = mounts()
    for directory, names, leaves in os.walk("/", followlinks=False):
        names[:] = [name for name in names if os.path.join(directory, name) not in SKIPPED]
        for leaf in leaves:
            path = os.path.join(directory, leaf)
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                recent = status.st_mtime >= since  # not ctime: gVisor reports the present time for the image's files
                if stat.S_ISREG(status.st_mode) and (recent or path in mounted):
                    yield path


def memory(pid: str) -> Iterator[bytes]:
    """Yield the writable memory of a process, if this one is allowed to read it."""
    left = MAX_MEMORY
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as mem:
        for line in maps:
            fields = line.split()
            if "w" not in fields[1] or left <= 0:
                continue
            start, end = (int(part, 16) for part in fields[0].split("-"))
            with contextlib.suppress(OSError, ValueError, OverflowError):
                mem.seek(start)
                data = mem.read(min(end - start, left))
                left -= len(data)
                yield data


def main() -> None:
    """Write everything to OUTPUT."""
    output, since = sys.argv[1], float(sys.argv[2])
    with open(output, "wb") as sink:
        for pid in filter(str.isdigit, os.listdir("/proc")):
            for name in ("environ", "cmdline"):
                copy(sink, f"/proc/{pid}/{name}")
            if pid != str(os.getpid()):
                with contextlib.suppress(OSError):
                    for data in memory(pid):
                        sink.write(data)
        for path in files(since):
            if path != output:
                sink.write(path.encode("utf-8", "surrogateescape") + b"\n")
                copy(sink, path)
    print("collected", os.path.getsize(output))


def copy(sink: BinaryIO, path: str) -> None:
    """Append the file at `path`, if it can be read."""
    with contextlib.suppress(OSError), open(path, "rb") as source:
        sink.write(source.read(MAX_FILE) + b"\n")


if __name__ == "__main__":
    main()
