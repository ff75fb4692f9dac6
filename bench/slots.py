"""Slots without containers: the time to make and to remove one, the kernel's memory, and the time to judge one.

The product's own code makes, judges and removes them.
"""

import asyncio
import shutil
import tempfile
import time
from pathlib import Path

from bench.figures import Figure
from bench.fixture import BenchError
from runtimes.checks.examiner import Examiner, Item, Seen
from runtimes.net import slots
from runtimes.net.plan import PLAN

_COUNTED = ("Slab", "Percpu", "KernelStack", "PageTables")
_KERNEL_SECONDS = 60.0


def measure(number: int) -> list[Figure]:
    """Make `number` slots, read each as the watch does, remove them.

    Raises:
        BenchError: something is left after the removal.
    """
    directory = Path(tempfile.mkdtemp(prefix="sallyport-slots-"))
    made: list[slots.Slot] = []
    making, removing = [], []
    before = kernel_kib(Path("/proc/meminfo").read_text())
    try:
        for index in range(number):
            began = time.perf_counter()
            made.append(slots.make(directory, index, PLAN))
            making.append(1000 * (time.perf_counter() - began))
        held = kernel_kib(Path("/proc/meminfo").read_text())
        judging = asyncio.run(_judge(made))
    finally:
        left: list[str] = []
        for slot in made:
            began = time.perf_counter()
            left += slots.destroy(slot)
            removing.append(1000 * (time.perf_counter() - began))
        left += [str(path) for path in directory.iterdir()]
        mounts = (line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
        left += [point for point in mounts if point.startswith(f"{directory}/")]
        if not left:
            shutil.rmtree(directory)
    if left:
        raise BenchError(f"slots left: {left}"[:2000])
    deadline = time.monotonic() + _KERNEL_SECONDS  # the kernel removes namespaces in the background
    while (after := kernel_kib(Path("/proc/meminfo").read_text())) > (
        before + held
    ) / 2 and time.monotonic() < deadline:
        time.sleep(0.5)
    return [
        Figure("slots: number", "", [number]),
        Figure("slots: make one", "ms", making),
        Figure("slots: processor time to read one, with settings", "ms", [judging[0]]),
        Figure("slots: processor time to read one, as in each round", "ms", [judging[1]]),
        Figure("slots: remove one", "ms", removing),
        Figure("slots: memory of the kernel for one", "KiB", [(held - before) / number]),
        Figure("slots: of it after the removal", "KiB", [(after - before) / number]),
    ]


async def _judge(made: list[slots.Slot]) -> tuple[float, float]:
    """Return the milliseconds of processor time in which the watch reads a slot: all of it, and the usual part."""
    examiner = Examiner()
    first = await examiner.read([Item(slot) for slot in made])
    known = [one.state for one in first if isinstance(one, Seen)]
    if len(known) != len(made):
        raise BenchError("a slot cannot be read")
    took = []
    for full in (True, False):
        began = time.process_time()
        await examiner.read([Item(slot, state, full) for slot, state in zip(made, known, strict=True)])
        took.append(1000 * (time.process_time() - began) / len(made))
    return took[0], took[1]


def kernel_kib(meminfo: str) -> int:
    """Return the memory of the kernel's own objects, in KiB, of the text of /proc/meminfo."""
    found = dict(line.split(":", 1) for line in meminfo.splitlines())
    return sum(int(found[name].split()[0]) for name in _COUNTED)
