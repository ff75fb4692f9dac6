"""A slot: the namespaces, the link and the rules that isolate one sandbox. It is made completely and used once.

- To make a slot is a transaction: a step that fails undoes the earlier ones.
- To destroy a slot ends every process inside. The result is checked by inode and mount, not by a command's success.
- The kernel can give the inode of a removed namespace to the next one. So the namespaces are held open while a slot
  is destroyed, and a namespace that is no longer at its path is not searched for by its inode.
"""

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from runtimes.net import netns, nft
from runtimes.net.plan import NetworkPlan

_SETTLE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot that exists. The inodes identify it as long as it exists; paths and index are used again after it."""

    index: int
    sandbox: Path
    gateway: Path
    sandbox_inode: int
    gateway_inode: int

    @property
    def inodes(self) -> frozenset[int]:
        """The inodes of both namespaces."""
        return frozenset((self.sandbox_inode, self.gateway_inode))


def paths(directory: Path, index: int) -> tuple[Path, Path]:
    """Return the paths at which the namespaces of slot `index` are mounted: the sandbox's and the gateway's."""
    return directory / f"{index}-sbx", directory / f"{index}-gw"


def make(directory: Path, index: int, plan: NetworkPlan) -> Slot:
    """Make slot `index` below `directory`. Blocks for some tens of milliseconds.

    Raises:
        OSError, netns.NftError: a step failed, FileExistsError included; nothing of this slot is left.
    """
    sandbox, gateway = paths(directory, index)
    made: list[Path] = []
    try:
        gateway_inode = netns.create_gateway(gateway)
        made.append(gateway)
        sandbox_inode = netns.create_sandbox(sandbox)
        made.append(sandbox)
        # The link is made before the rules, which name its interface. No process runs on either side yet.
        netns.link(sandbox, gateway, plan)
        netns.load_rules(gateway, nft.render_gateway(plan))
    except BaseException:
        for path in made:
            netns.delete(path)
        raise
    return Slot(index, sandbox, gateway, sandbox_inode, gateway_inode)


def sever(slot: Slot) -> None:
    """Remove the links of `slot`, so that no more traffic passes, whatever else remains. Blocks for milliseconds."""
    for path, inode in ((slot.gateway, slot.gateway_inode), (slot.sandbox, slot.sandbox_inode)):
        with contextlib.suppress(netns.WrongNamespaceError, OSError):
            netns.sever(path, inode)


def destroy(slot: Slot) -> tuple[str, ...]:
    """End everything inside `slot` and destroy it; return what is left, nothing after a success.

    Namespaces with a process that cannot be ended stay mounted, so that a later call still finds it.
    """
    deadline = time.monotonic() + _SETTLE_SECONDS
    with contextlib.ExitStack() as stack:
        inodes = frozenset(
            inode
            for path, inode in ((slot.sandbox, slot.sandbox_inode), (slot.gateway, slot.gateway_inode))
            if _hold(stack, path) == inode
        )
        while (left := _kill(inodes)) and time.monotonic() < deadline:
            time.sleep(0.02)
        if not left:
            netns.delete(slot.sandbox)
            netns.delete(slot.gateway)
        return (
            *(f"process {pid} in a namespace of slot {slot.index}" for pid in left),
            *(f"mount {path}" for path in netns.mounted(inodes)),
            *(f"file {path}" for path in (slot.sandbox, slot.gateway) if os.path.lexists(path)),
        )


def _hold(stack: contextlib.ExitStack, path: Path) -> int | None:
    """Hold the file at `path` open, and return its inode; None if there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    stack.callback(os.close, fd)
    return os.fstat(fd).st_ino


def _kill(inodes: frozenset[int]) -> tuple[int, ...]:
    pids = tuple(pid for pid in netns.processes(inodes) if pid != os.getpid())
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return pids


def sweep(directory: Path, kept: frozenset[int] = frozenset()) -> tuple[str, ...]:
    """Remove from `directory` what a killed hostd has left, with processes, except slots `kept`; return the residue."""
    residue: list[str] = []
    spared = {path for index in kept for path in paths(directory, index)}
    for path in sorted(set(directory.iterdir()) - spared):
        inode = path.stat().st_ino
        if path.name.endswith(("-sbx", "-gw")) and inode != netns.inode(None):
            residue += destroy(Slot(-1, path, path, inode, inode))
        else:
            residue.append(f"foreign file {path}")
    return tuple(residue)
