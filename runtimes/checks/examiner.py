"""Reads the state of slots for the watch, many in one call, in a thread of its own. It judges nothing.

- The thread moves from namespace to namespace. It leaves the last one before a call returns, so that it keeps none
  alive.
- What costs most is read only if it is asked for (`Item.full`), or if the gateway's side has changed: the settings, and
  the counts of dropped packets. The kernel's description of a link has the link's own IPv4 settings. So a change of
  these, also by `ip_forward`, is a change of that side.
- The thread is named `watch`, so that its processor time can be seen.
"""

import asyncio
import ctypes
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from runtimes.net import netns, netstate, slots
from runtimes.net.plan import SANDBOX_SYSCTLS, WATCHED_SYSCTLS

_PR_SET_NAME = 15
_HOME = Path("/proc/self/ns/net")


@dataclass(frozen=True, slots=True)
class Known:
    """A slot as it was when it was last found to be right: digests of both sides, and the generation of its rules."""

    gateway: bytes
    sandbox: bytes
    generation: int


@dataclass(frozen=True, slots=True)
class Item:
    """A slot to read. `pid` is the first process of its container, 0 if there is none. `known` None: read all facts."""

    slot: slots.Slot
    known: Known | None = None
    full: bool = True
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of a slot.

    Attributes:
        state: of the slot now.
        gateway, sandbox: the facts of each side without settings, None if they are the known ones.
        gateway_settings, sandbox_settings, counters: None if they were not read.
        process: the inode of the network namespace of the process, None if there is none.
    """

    state: Known
    gateway: frozenset[str] | None
    sandbox: frozenset[str] | None
    gateway_settings: frozenset[str] | None
    sandbox_settings: frozenset[str] | None
    counters: Mapping[str, int] | None
    process: int | None


class Examiner:
    """Owns the thread, which ends with the process."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="watch", initializer=_name)

    async def read(self, items: Sequence[Item]) -> list[Seen | Exception]:
        """Return the state of each slot, or why it cannot be read."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, _read_all, tuple(items))


def _name() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"watch", 0, 0, 0)


def _read_all(items: tuple[Item, ...]) -> list[Seen | Exception]:
    found: list[Seen | Exception] = []
    try:
        for item in items:
            try:
                found.append(_read(item))
            except (netns.WrongNamespaceError, OSError) as error:
                found.append(error)
    finally:
        netns.enter(_HOME)  # that of the process's first thread
    return found


def _read(item: Item) -> Seen:
    slot, known = item.slot, item.known
    netns.enter(slot.gateway, slot.gateway_inode)
    outer, gateway = netstate.look(netstate.DUMPS, None if known is None else known.gateway)
    generation = netstate.current_generation()
    full = item.full or gateway is not None
    gateway_settings = netstate.settings(WATCHED_SYSCTLS) if full else None
    counters = netstate.counters() if full else None
    netns.enter(slot.sandbox, slot.sandbox_inode)
    inner, sandbox = netstate.look(netstate.SANDBOX_DUMPS, None if known is None else known.sandbox)
    sandbox_settings = netstate.settings(tuple(SANDBOX_SYSCTLS)) if full else None
    state = Known(outer, inner, generation)
    return Seen(state, gateway, sandbox, gateway_settings, sandbox_settings, counters, _of_process(item.pid))


def _of_process(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino if pid else None
    except OSError:
        return None
