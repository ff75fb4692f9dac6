"""A Sallyport whose daemons have the substitutes, with its own internet."""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

from testbed.internet import ADDRESSES, API, ATTACKER
from testbed.stack import IMAGE, Stack
from tests.security.layers import state
from tests.security.layers.substitutes import PLANTED
from tests.security.substituted import SubstitutedStack

POLICY = "hostile-names"


class LayeredStack(SubstitutedStack):
    """A server as `sallyport serve` starts it, except for the daemons' modules and without the empty image."""

    module = "tests.security.layers.daemon"

    def prepare(self) -> None:
        self.planted = self.directory / "planted"
        self.planted.touch(mode=0o600)
        self.planted.write_text(PLANTED)
        self.switch()

    @property
    def images(self) -> dict[str, str]:
        return {IMAGE: os.environ["SALLYPORT_BASE_IMAGE"]}

    def switch(self, off: tuple[str, ...] = (), provoked: tuple[str, ...] = ()) -> None:
        """Set which defences are off for slots, workers and containers that are made later."""
        places = {
            "net": self.internet.path(self.internet.net),
            "attacker": ADDRESSES[ATTACKER],
            "planted": str(self.planted),
        }
        state.write(self.run, off, provoked, places)

    def new_guard(self) -> None:
        """Kill the guard, so that hostd starts another one with the rules of the present switches."""
        former = self._guards()
        for pid in former:
            os.kill(pid, 9)

        def renewed() -> bool:
            return bool(self._guards()) and not self._guards() & former

        wait_until(renewed)
        wait_until(lambda: self.guard_table() != "")

    def _guards(self) -> set[int]:
        assert self._process is not None
        found = set()
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if parent == self._process.pid and words[:2] == [b"nft", b"-i"]:
                found.add(int(name))
        return found

    def guard_table(self) -> str:
        """Return the guard's rules as the kernel lists them, or an empty text if there are none."""
        netns = self.internet.path(self.internet.up)
        command = ["nsenter", f"--net={netns}", "nft", "list", "table", "inet", "sallyport_guard"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def rules(self, sandbox: str) -> str:
        """Return the rules of a sandbox's gateway namespace, with their counters."""
        command = ["nsenter", f"--net={self.netns(sandbox, 'gw')}", "nft", "list", "ruleset"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def worker_status(self, sandbox: str) -> dict[str, str]:
        """Return the kernel's status fields of a sandbox's worker."""
        pid = self.worker_pid(sandbox)
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        return fields | {"mounts": str(len(Path(f"/proc/{pid}/mountinfo").read_text().splitlines()))}

    def records_of(self, sandbox: str) -> list[dict[str, Any]]:
        return [record for record in self.audit_records() if record.get("sandbox") == sandbox]


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("a condition did not come true in time")
        time.sleep(0.05)


def store_secret(stack: Stack, value: str) -> None:
    """Store the only secret. It is bound to one host, two methods and one tree of paths."""
    limits = ("--path", "/v1/*", "--method", "GET", "--method", "POST")
    stack.sallyport("vault", "put", "api-token", "--host", API, *limits, stdin=value)
