"""Reads what other processes hold: their writable memory, as a core file would have it, and sparse files."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

_CHUNK = 4 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PRESENT = re.compile(rb"[\x40-\xff]+", re.DOTALL)  # the high bytes of pages in memory or in swap (pagemap)


def memory_of(pid: int) -> Iterator[bytes]:
    """Yield the writable memory of a process, each run of pages that it has used.

    Memory that it shares through a file of tmpfs, as gVisor's sandboxes keep theirs, is read from that file.

    Raises:
        OSError: there is no such process, or this one cannot read it.
    """
    shared: dict[tuple[str, int], str] = {}
    with open(f"/proc/{pid}/mem", "rb", 0) as memory, open(f"/proc/{pid}/pagemap", "rb", 0) as pages:
        for area, fields, present in _areas(pid):
            if "w" not in fields[1] or not present:
                continue
            device, inode = fields[3], int(fields[4])
            if inode and fields[1].endswith("s"):
                shared[(device, inode)] = area
                continue
            start, end = (int(part, 16) for part in area.split("-"))
            entries = os.pread(pages.fileno(), (end - start) // _PAGE * 8, start // _PAGE * 8)
            for run in _PRESENT.finditer(entries[7::8]):
                yield from _pieces(memory.fileno(), start + run.start() * _PAGE, start + run.end() * _PAGE)
    for area in shared.values():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/map_files/{area}", "rb", 0) as file:
            yield from data_of(file.fileno())


def _areas(pid: int) -> Iterator[tuple[str, list[str], bool]]:
    """Yield each area's addresses and fields, and whether it has a page in memory or in swap."""
    area, fields, present = "", list[str](), False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            if area:
                yield area, fields, present
            area, fields, present = words[0], words, False
        elif words[0] in ("Rss:", "Swap:"):
            present = present or words[1] != "0"
    if area:
        yield area, fields, present


def _pieces(fd: int, start: int, end: int) -> Iterator[bytes]:
    with contextlib.suppress(OSError, OverflowError):  # an area that was removed, or that the kernel keeps to itself
        while start < end and (data := os.pread(fd, min(end - start, _CHUNK), start)):
            yield data
            start += len(data)


def data_of(fd: int) -> Iterator[bytes]:
    """Yield the content of an open file, without its holes. Raises OSError."""
    start, size = 0, os.fstat(fd).st_size
    while start < size:
        try:
            start = os.lseek(fd, start, os.SEEK_DATA)
            end = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError:  # no data follows, or the file system has no such call
            return
        yield from _pieces(fd, start, end)
        start = end
