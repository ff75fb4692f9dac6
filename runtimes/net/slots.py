"""A slot: the namespaces, the link and the rules that one sandbox lives behind; made whole, used once.

- Making is a transaction: a step that fails takes the earlier ones back.
- Destroying ends every process inside, and is judged by inode and mount, not by a command's success.
- The kernel gives the inode of a namespace that is gone to the next one made. So the namespaces are held open while a
  slot is destroyed, and one that is not at its path any more is not looked for by its number.
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
    """A slot that exists. The inodes identify it for ever; paths and index are used again after it."""

    index: int
    sandbox: Path
    gateway: Path
    sandbox_inode: int
    gateway_inode: int

    @property
    def inodes(self) -> frozenset[int]:
        """Both namespaces."""
        return frozenset((self.sandbox_inode, self.gateway_inode))


def paths(directory: Path, index: int) -> tuple[Path, Path]:
    """Return where the namespaces of slot `index` are mounted: the sandbox's and the gateway's."""
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
        # Rules pin an interface, so the link comes first; there is no process on either side yet.
        netns.link(sandbox, gateway, plan)
        netns.load_rules(gateway, nft.render_gateway(plan))
    except BaseException:
        for path in made:
            netns.delete(path)
        raise
    return Slot(index, sandbox, gateway, sandbox_inode, gateway_inode)


def sever(slot: Slot) -> None:
    """Take the links of `slot` away: nothing passes from now on, whatever still stands. Blocks for milliseconds."""
    for path, inode in ((slot.gateway, slot.gateway_inode), (slot.sandbox, slot.sandbox_inode)):
        with contextlib.suppress(netns.Elsewhere, OSError):
            netns.sever(path, inode)


def destroy(slot: Slot) -> tuple[str, ...]:
    """End everything inside `slot` and unmake it; return what is left, nothing if all went well.

    Namespaces with a process that cannot be ended stay mounted, so that it is still found the next time.
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
    """Hold what is at `path` open, and return its inode; None if nothing is there."""
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
    """Remove what a killed predecessor left in `directory`, processes included, but slots `kept`; return the
    residue."""
    residue: list[str] = []
    spared = {path for index in kept for path in paths(directory, index)}
    for path in sorted(set(directory.iterdir()) - spared):
        inode = path.stat().st_ino
        if path.name.endswith(("-sbx", "-gw")) and inode != netns.inode(None):
            residue += destroy(Slot(-1, path, path, inode, inode))
        else:
            residue.append(f"foreign file {path}")
    return tuple(residue)
