"""Decides which sandboxes of a killed hostd are adopted, and removes everything else that it left.

A sandbox is adopted only if all of it matches its record: its launch was complete, its container runs, both
namespaces are mounted at their paths with the recorded inodes, and the container's first process is in that sandbox
namespace. It gets a new worker with its stored configuration. Until then it stays closed. A paused sandbox stays
paused: the kernel has the state of its processes.

Everything else (incomplete, partly removed, unknown, not matching) is removed. The removal is checked by process,
inode and mount.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtimes.engine import containers
from runtimes.engine.disk import Disks
from runtimes.engine.disk_rate import DiskRate
from runtimes.engine.docker import ContainerState, Docker, DockerError
from runtimes.ledgers import Ledgers
from runtimes.net import netns, slots
from runtimes.process.cgroups import Cgroups, remove_container_groups
from runtimes.process.freezer import Freezer
from runtimes.records import RecordStore, SandboxRecord
from runtimes.spec import Uids
from runtimes.volumes import Volumes

_REMOVE_SECONDS = 10.0
_PAUSE_SECONDS = 0.2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Leftovers:
    """The resources of a killed hostd besides Docker's and the run directory."""

    cgroups: Cgroups
    freezer: Freezer
    disks: Disks
    disk_rate: DiskRate
    ledgers: Ledgers
    records: RecordStore
    volumes: Volumes


class Unfit(Exception):
    """The sandbox does not match its record; the text says how."""


async def adopt_or_remove(
    run: Path, uids: Uids, rules: str, docker: Docker, leftovers: Leftovers
) -> list[tuple[SandboxRecord, slots.Slot]]:
    """Return the sandboxes to adopt, with their slots. Remove all others, and log what could not be removed.

    `rules` is the digest of the rules that this hostd gives a slot.

    Raises:
        docker.DockerError: Docker cannot list its containers; nothing was adopted.
    """
    present = dict(await docker.ours())
    fit: list[tuple[SandboxRecord, slots.Slot]] = []
    taken: set[int] = set()
    for record in leftovers.records.read_all():
        try:
            if present.get(record.container or "") != record.sandbox:
                raise Unfit("its container is not there")
            slot = await asyncio.to_thread(
                examine, record, await docker.state(record.container or ""), run, uids, rules
            )
            if slot.index in taken:
                raise Unfit("its slot is another's")
        except (Unfit, OSError) as reason:
            _log.warning("%s cannot be adopted and is removed: %s", record.sandbox, reason)
            continue
        taken.add(slot.index)
        fit.append((record, slot))
    residue = await _sweep(run, docker, leftovers, fit, tuple(present))
    if residue:
        _log.warning("left by a predecessor: %s", "; ".join(residue))
    return fit


def examine(record: SandboxRecord, state: ContainerState | None, run: Path, uids: Uids, rules: str) -> slots.Slot:
    """Return the slot of a sandbox that can be adopted. Blocks for milliseconds.

    Raises:
        Unfit: it cannot be adopted.
        OSError: a part of it cannot be read.
    """
    index, inodes = record.slot, (record.sandbox_inode, record.gateway_inode)
    if record.phase != "running" or index is None or inodes[0] is None or inodes[1] is None:
        raise Unfit("it was half made or half removed")
    if not 0 <= index < uids.workers or record.uid != uids.worker_base + index:
        raise Unfit("its worker's uid is another's now")
    if record.rules != rules:
        raise Unfit("the rules of a slot are different now: by a setting, or by another release")
    if state is None or state.status not in ("running", "paused") or state.pid <= 0:
        raise Unfit("its container does not run")
    slot = slots.Slot(index, *slots.paths(run / "netns", index), inodes[0], inodes[1])
    for path, inode in ((slot.sandbox, slot.sandbox_inode), (slot.gateway, slot.gateway_inode)):
        if path.stat().st_ino != inode or str(path) not in netns.mounted(frozenset((inode,))):
            raise Unfit("its namespaces are not those that were made for it")
    if netns.of_process(state.pid) != slot.sandbox_inode:
        raise Unfit("its container is in another namespace")
    if not (run / "sandboxes" / record.sandbox).is_dir():
        raise Unfit("its files are gone")
    return slot


async def _sweep(
    run: Path,
    docker: Docker,
    leftovers: Leftovers,
    kept: Sequence[tuple[SandboxRecord, slots.Slot]],
    present: Sequence[str],
) -> list[str]:
    """Remove everything except what is kept; return what is left."""
    names = frozenset(record.sandbox for record, _ in kept)
    alive = {record.container for record, _ in kept}
    gone = [container for container in present if container not in alive]
    written = {path.stem for path in (run / "plans").iterdir()} - alive
    # Plans first, so that no start that Docker has begun can succeed. Then traffic: without its worker a slot leads
    # nowhere, and its processes end with it.
    for path in (run / "plans").iterdir():
        if path.stem not in alive:
            path.unlink(missing_ok=True)
    residue = await asyncio.to_thread(leftovers.cgroups.sweep)
    for container in {*gone, *written}:
        await asyncio.to_thread(leftovers.freezer.end, container)
    # Disk limits before containers, whose removal writes what is left in their page cache.
    kept_disks = await asyncio.to_thread(leftovers.disks.numbers, names)
    residue += await asyncio.to_thread(leftovers.disk_rate.sweep, kept_disks)
    residue += await _remove_containers(docker, alive)
    residue += await asyncio.to_thread(slots.sweep, run / "netns", frozenset(slot.index for _, slot in kept))
    for container in {*gone, *written}:
        residue += await asyncio.to_thread(containers.end_processes, container)
        residue += await asyncio.to_thread(remove_container_groups, container)
    residue += await asyncio.to_thread(leftovers.disks.sweep, names)
    residue += await leftovers.volumes.sweep(names)
    residue += leftovers.ledgers.sweep(names)
    for path in (run / "plans").iterdir():  # plans that a start has claimed meanwhile
        if path.stem not in alive:
            path.unlink(missing_ok=True)
    for path in (run / "ingress").iterdir():
        path.unlink(missing_ok=True)
    for path in (run / "sandboxes").iterdir():
        if path.name not in names:
            shutil.rmtree(path, ignore_errors=True)
    leftovers.records.keep(names)
    return list(residue)


async def _remove_containers(docker: Docker, alive: Collection[str | None]) -> tuple[str, ...]:
    """Remove all containers of this server except `alive`; return those that are left.

    Docker can still execute a start that the killed hostd requested. It refuses a removal meanwhile.
    """
    deadline = time.monotonic() + _REMOVE_SECONDS
    while True:
        gone = [container for container, _ in await docker.ours() if container not in alive]
        if not gone:
            return ()
        results = await asyncio.gather(*(docker.remove(container) for container in gone), return_exceptions=True)
        refused = [result for result in results if isinstance(result, DockerError)]
        if time.monotonic() > deadline:
            return tuple(f"container {container}" for container in gone)
        await asyncio.sleep(_PAUSE_SECONDS if refused else 0)
