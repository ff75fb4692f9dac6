"""`./run soak --creates 1000`: sandboxes made and removed in a loop, and what the machine holds before and after.

Processes, namespaces, mounts, control groups, files, containers and rows must be exactly as before; descriptors but for
connections that are kept; memory of the daemons may grow by a bounded amount, whatever the number of creates.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from testbed.census import Census, daemons, descriptors, take
from testbed.internet import PREFIX, Internet
from testbed.stack import EMPTY_IMAGE, Stack

PARALLEL = 4
WARM = 24
RUNTIMES = ("runc", "runsc")
SLACK = 8
"""The number of additional descriptors that a daemon may hold: connections kept for the next call, such as
one per thread for Docker."""
GROWTH_KIB = 12 * 1024
"""The growth of a daemon's own memory that is permitted after the warm-up. A leak of 12 KiB per create exceeds it at
the thousandth."""
SETTLE_SECONDS = 30.0
_LOG = ("audit",)
"""The directory that grows by design: the audit log."""


@dataclass(frozen=True, slots=True)
class Holding:
    """The resources of a running Sallyport.

    `memory` is anonymous resident memory in KiB, `inodes` the number of entries in run and state directories.
    """

    census: Census
    descriptors: dict[str, int]
    memory: dict[str, int]
    inodes: int


def hold(stack: Stack) -> Holding:
    """Count the present resources of `stack`."""
    return Holding(take(stack), descriptors(stack), memory(stack), inodes(stack))


def memory(stack: Stack) -> dict[str, int]:
    """Return the anonymous resident memory of each daemon, in KiB."""
    found = {}
    for name, pid in daemons(stack).items():
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        found[name] = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
    return found


def inodes(stack: Stack) -> int:
    """Return the number of entries below the run and state directories, without the audit log's and Docker's own."""
    number = 0
    for top, left_out in ((stack.run, "docker"), (stack.state, *_LOG)):
        for directory, names, files in os.walk(top):
            if directory == str(top):
                names[:] = [name for name in names if name != left_out]
            number += len(names) + len(files)
    return number


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a soak. `millis` are those of each create call, in order of their ends.

    `memory` is that of the daemons after each quarter of the creates, because a leak grows evenly.
    """

    before: Holding
    after: Holding
    millis: list[float]
    seconds: float
    memory: list[dict[str, int]]

    @property
    def grown(self) -> list[str]:
        """The resources that have grown or changed."""
        found = [f"{kind}: {what}" for kind, what in self.after.census.beyond(self.before.census).items()]
        for name, count in self.after.descriptors.items():
            if count > self.before.descriptors.get(name, 0) + SLACK:
                found.append(f"{name}: {count} descriptors, before {self.before.descriptors.get(name)}")
        for name, size in self.after.memory.items():
            if size > self.before.memory.get(name, 0) + GROWTH_KIB:
                found.append(f"{name}: {size} KiB, before {self.before.memory.get(name)}")
        if self.after.inodes != self.before.inodes:
            found.append(f"{self.after.inodes} files and directories, before {self.before.inodes}")
        return found

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        a, b = self.before, self.after
        first, last = self.millis[: len(self.millis) // 4], self.millis[-(len(self.millis) // 4) :]
        quarter = f"first quarter {statistics.median(first):.0f}, last quarter {statistics.median(last):.0f}"
        top = statistics.quantiles(self.millis, n=20)[-1]
        lines = [
            f"{len(self.millis)} creates and deletes, {PARALLEL} at once, in {self.seconds:.0f} s",
            f"create: median {statistics.median(self.millis):.0f} ms, 95 % within {top:.0f} ms; {quarter}",
        ]
        for kind in ("processes", "mounts", "cgroups", "files", "containers"):
            lines.append(f"{kind:12} {len(getattr(a.census, kind)):6} before {len(getattr(b.census, kind)):6} after")
        lines.append(f"{'namespaces':12} {a.census.namespaces:6} before {b.census.namespaces:6} after")
        lines.append(f"{'rows':12} {a.census.rows:6} before {b.census.rows:6} after")
        lines.append(f"{'inodes':12} {a.inodes:6} before {b.inodes:6} after")
        for name in b.memory:
            grown = " ".join(str(sample.get(name)) for sample in self.memory)
            lines.append(
                f"{name:16} descriptors {a.descriptors.get(name)} before {b.descriptors.get(name)} after, "
                f"memory {a.memory.get(name)} KiB before {b.memory[name]} KiB after (on the way: {grown})"
            )
        return lines


def body(runtime: str) -> dict[str, Any]:
    """Return a create call: the empty image, no policy."""
    return {
        "image": {"uri": EMPTY_IMAGE},
        "resourceLimits": {"memory": "256Mi"},
        "entrypoint": ["tail", "-f", "/dev/null"],
        "timeout": 600,
        "extensions": {"sallyport.runtime": runtime},
    }


async def _loop(stack: Stack, creates: int) -> list[float]:
    """Make and remove `creates` sandboxes, the runtimes in turn; return the duration of each create call."""
    headers = {"OPEN-SANDBOX-API-KEY": stack.api_key}
    numbers, millis = iter(range(creates)), []
    async with httpx.AsyncClient(base_url=f"{stack.base}/v1", headers=headers, timeout=180, trust_env=False) as http:

        async def lives() -> None:
            for number in numbers:
                began = time.monotonic()
                answer = await http.post("/sandboxes", json=body(RUNTIMES[number % len(RUNTIMES)]))
                answer.raise_for_status()
                millis.append((time.monotonic() - began) * 1000)
                (await http.delete(f"/sandboxes/{answer.json()['id']}")).raise_for_status()

        async with asyncio.TaskGroup() as group:
            for _ in range(PARALLEL):
                group.create_task(lives())
    return millis


def soak(stack: Stack, creates: int, warm: int = WARM) -> Report:
    """Warm up, count, run the loop, wait until the counts are as before or the time is over, and report."""
    asyncio.run(_loop(stack, warm))
    before = hold(stack)
    began = time.monotonic()
    millis: list[float] = []
    samples = []
    for quarter in range(1, 5):
        millis += asyncio.run(_loop(stack, creates * quarter // 4 - len(millis)))
        samples.append(memory(stack))
    seconds = time.monotonic() - began
    deadline = time.monotonic() + SETTLE_SECONDS
    while (report := Report(before, hold(stack), millis, seconds, samples)).grown and time.monotonic() < deadline:
        time.sleep(0.2)
    return report


def main(arguments: list[str]) -> int:
    """Run a soak on a separate Sallyport; return 0 if nothing has grown."""
    parser = argparse.ArgumentParser(prog="./run soak", description=__doc__, allow_abbrev=False)
    parser.add_argument("--creates", type=int, default=1000)
    creates = parser.parse_args(arguments).creates
    accounts = {"git": "a:b", "index": "a:b", "api": "c"}
    with tempfile.TemporaryDirectory(prefix="sallyport-soak-") as name:
        place = Path(name)
        place.chmod(0o711)
        with (
            Internet(PREFIX, place / "internet", accounts) as internet,
            Stack(internet, place / "sallyport") as stack,
        ):
            report = soak(stack, creates)
    print("\n".join(report.lines()))
    for item in report.grown:
        print(f"grown: {item}"[:400])
    print(f"soak: {'FAILED' if report.grown else 'ok, nothing has grown'}")
    return 1 if report.grown else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
