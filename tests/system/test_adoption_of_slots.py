"""A sandbox is adopted only if it is exactly as recorded: with a real slot, and a process in it."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runtimes.adoption import Unfit, examine
from runtimes.engine.docker import ContainerState
from runtimes.net import netns, slots
from runtimes.net.nft import rules_digest
from runtimes.net.plan import PLAN
from runtimes.records import SandboxRecord
from tests.runtimes.test_spec import UIDS

pytestmark = pytest.mark.system

INDEX = 7
RULES = rules_digest(PLAN)


@dataclass(frozen=True, slots=True)
class Place:
    """A run directory with the slot of one sandbox, and a process in the sandbox's namespace."""

    run: Path
    slot: slots.Slot
    pid: int

    def record(self, **changes: Any) -> SandboxRecord:
        plain: dict[str, Any] = {
            "sandbox": "sbx-1",
            "runtime": "runc",
            "phase": "running",
            "generation": 3,
            "uid": UIDS.worker_base + INDEX,
            "slot": INDEX,
            "sandbox_inode": self.slot.sandbox_inode,
            "gateway_inode": self.slot.gateway_inode,
            "rules": RULES,
            "container": "c" * 64,
            "policy": "digest",
            "selection": '{"policy_name": "agents"}',
            "compiled": {"digest": "d"},
            "seed": "5eed" * 16,
        }
        return SandboxRecord(**(plain | changes))

    def state(self, **changes: Any) -> ContainerState:
        plain: dict[str, Any] = {"exit_code": 0, "oom": False, "started_at": "", "error": ""}
        return ContainerState(**(plain | {"status": "running", "pid": self.pid} | changes))


@pytest.fixture(scope="module", name="place")
def _place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    run = tmp_path_factory.mktemp("run")
    (run / "sandboxes" / "sbx-1").mkdir(parents=True)
    (run / "netns").mkdir()
    slot = slots.make(run / "netns", INDEX, PLAN)
    try:
        with subprocess.Popen(["nsenter", f"--net={slot.sandbox}", "cat"], stdin=subprocess.PIPE) as process:
            while netns.of_process(process.pid) != slot.sandbox_inode:
                assert process.poll() is None
            yield Place(run, slot, process.pid)
            process.kill()
    finally:
        slots.destroy(slot)


@pytest.mark.parametrize("status", ["running", "paused"])
def test_a_sandbox_as_it_was_written_down_is_adopted(place: Place, status: str) -> None:
    """Also one that Docker has paused."""
    assert place.slot == examine(place.record(), place.state(status=status), place.run, UIDS, RULES)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"phase": "launching"}, "half made"),
        ({"phase": "removing"}, "half made"),
        ({"slot": None}, "half made"),
        ({"sandbox_inode": None}, "half made"),
        ({"gateway_inode": None}, "half made"),
        ({"slot": 8}, "uid is another's"),
        ({"slot": -1}, "uid is another's"),
        ({"slot": UIDS.workers, "uid": UIDS.worker_base + UIDS.workers}, "uid is another's"),
        ({"uid": UIDS.worker_base}, "uid is another's"),
        ({"uid": None}, "uid is another's"),
        ({"sandbox_inode": 1}, "namespaces"),
        ({"gateway_inode": 1}, "namespaces"),
        ({"sandbox": "sbx-2"}, "files are gone"),
        ({"rules": "0" * 64}, "rules of a slot are different"),
    ],
)
def test_a_record_that_does_not_match_adopts_nothing(place: Place, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unfit, match=reason):
        examine(place.record(**changes), place.state(), place.run, UIDS, RULES)


@pytest.mark.parametrize("changes", [None, {"status": "exited"}, {"pid": 0}, {"status": "created"}])
def test_a_container_that_does_not_run_is_not_adopted(place: Place, changes: dict[str, Any] | None) -> None:
    now = None if changes is None else place.state(**changes)
    with pytest.raises(Unfit, match="does not run"):
        examine(place.record(), now, place.run, UIDS, RULES)


def test_a_container_in_another_namespace_is_not_adopted(place: Place) -> None:
    with pytest.raises(Unfit, match="another namespace"):
        examine(place.record(), place.state(pid=os.getpid()), place.run, UIDS, RULES)


def test_a_namespace_that_is_not_mounted_is_not_adopted(place: Place, tmp_path: Path) -> None:
    """The same namespaces, by links to those of the process."""
    (tmp_path / "netns").mkdir()
    for path in slots.paths(tmp_path / "netns", INDEX):
        path.symlink_to(f"/proc/{place.pid}/ns/net")
    inode = place.slot.sandbox_inode
    with pytest.raises(Unfit, match="namespaces"):
        examine(place.record(gateway_inode=inode), place.state(), tmp_path, UIDS, RULES)
