"""The guard: a process that owns the upstream namespace's rules for worker uids; and the floor below it.

- The guard's table has `flags owner`: `nft flush ruleset` of another process does not remove it, and the kernel
  removes it when its owner ends.
- Without the guard's table no packet of a worker leaves: the floor, a table without owner, drops each packet that the
  guard has not accepted. The floor is loaded before the first worker starts and stays when guard and hostd end. The
  next hostd replaces it in one transaction; it is removed when no worker is left (`remove_floor`). A flush removes
  the floor: then only the guard's table restricts workers until the watch has seen the difference. The floor is
  loaded again before the guard is renewed.
- Workers hold a pidfd of the owner too, and refuse to dial once it has ended; they are notified of a new guard.
- The guard's standard input is a pipe from hostd. When hostd ends, nft reads the end of input and ends too.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from runtimes.net import netns, netstate, nft
from runtimes.process import predecessor

_READY_SECONDS = 10.0
_BACKOFF = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0)
_CALM_SECONDS = 10.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_log = logging.getLogger(__name__)


class GuardError(Exception):
    """The guard's table is not in force."""


class NetGuard:
    """Keeps one guard process running.

    `pidfd` is the pidfd of the current process; `lives` is the number of guards so far, with the current one.
    `tables` is the listing of guard and floor when they first came into force. The tables of each later guard must be
    the same.
    `in_force` is true from then until the process is seen to have ended.
    """

    def __init__(self, rules_file: Path, upstream: Path | None, changed: Callable[[int], Awaitable[None]]) -> None:
        """Store the parameters; notes about processes are files beside `rules_file`."""
        self.rules_file = rules_file
        self._floor_note = rules_file.with_name("floor")
        self._upstream = upstream
        self._owner = secrets.token_hex(8)
        self._changed = changed
        self._process: asyncio.subprocess.Process | None = None
        self._monitor: asyncio.Task[None] | None = None
        self.pidfd = -1
        self.lives = 0
        self.restarts = 0
        self.tables = ""
        self._floor = ""
        self.in_force = False

    async def start(self, plan: nft.GuardPlan) -> None:
        """Write the rules, start the guard and wait until its table is in force.

        Raises:
            GuardError: it is not in force in time.
        """
        # The guard of a former hostd ends with that hostd. Until it has ended, it owns the table.
        await asyncio.to_thread(predecessor.end, self.rules_file.parent, "guard")
        self.rules_file.write_text(nft.render_guard(plan, self._owner))
        self._floor = nft.render_floor(plan)
        await self._spawn()
        self._monitor = asyncio.create_task(self._keep(), name="guard")

    async def _spawn(self) -> None:
        command = ["nft", "-i"]
        if self._upstream is not None:
            command = ["nsenter", f"--net={self._upstream}", "--", *command]
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        if process.stdin is None:
            raise GuardError("no standard input")
        self._process = process
        predecessor.note(self.rules_file.parent, "guard", process.pid)
        process.stdin.write(f'include "{self.rules_file}"\n'.encode())
        try:
            async with asyncio.timeout(_READY_SECONDS):
                await process.stdin.drain()
                while not await self._has_table():
                    if process.returncode is not None:
                        raise GuardError("nft ended")
                    await asyncio.sleep(0.02)
                # After the guard's table, which only this hostd can own now. So no other server's floor is replaced
                # here.
                await self._lay_floor()
                await self._compare()
        except (TimeoutError, OSError, netns.NftError) as error:
            await self._end(process)
            raise GuardError(
                "the guard's table is not in force; has another server the same upstream namespace?"
            ) from error
        pidfd = os.pidfd_open(process.pid)
        previous, self.pidfd = self.pidfd, pidfd
        self.lives += 1
        self.in_force = True
        if previous >= 0:
            os.close(previous)

    async def _has_table(self) -> bool:
        try:
            listed = await self._list(nft.GUARD_TABLE)
        except netns.NftError:
            return False
        return all(part in listed for part in (f'comment "{self._owner}"', "flags owner", "chain output"))

    async def _compare(self) -> None:
        listed = await self.listed()
        self.tables = self.tables or listed
        if listed != self.tables:
            raise OSError("the tables differ from those that the guard made")

    async def _lay_floor(self) -> None:
        await asyncio.to_thread(netns.load_rules, self._upstream, self._floor)
        try:
            await asyncio.to_thread(self._note_floor)
        except (OSError, netns.NftError) as error:  # only `./run clean` reads the note; without it the floor stays
            _log.warning("the floor is not noted: %s", error)

    def _note_floor(self) -> None:
        """Write a note that identifies this table, because `./run clean` removes no other.

        The note has the boot, the number of the namespace and the table's handle. A namespace never reuses a handle.
        """
        listed = netns.list_rules(self._upstream, "-a", "-t", "table", "inet", nft.FLOOR_TABLE)
        handle = listed.partition("# handle ")[2].partition("\n")[0]
        self._floor_note.write_text(f"{_BOOT_ID.read_text().strip()} {netns.inode(self._upstream)} {handle}\n")

    async def remove_floor(self) -> None:
        """Remove the floor, if this hostd has loaded it. No worker may be left.

        Raises:
            netns.NftError: it is still there.
        """
        if self.lives:
            rules = f"table inet {nft.FLOOR_TABLE} {{\n}}\ndelete table inet {nft.FLOOR_TABLE}\n"
            await asyncio.to_thread(netns.load_rules, self._upstream, rules)
            with contextlib.suppress(OSError):
                self._floor_note.unlink(missing_ok=True)

    async def _list(self, table: str) -> str:
        return await asyncio.to_thread(netns.list_rules, self._upstream, "-t", "table", "inet", table)

    async def listed(self) -> str:
        """Return both tables as they are now, without the elements of their sets.

        Raises:
            netns.NftError: a table is missing.
        """
        return await self._list(nft.GUARD_TABLE) + await self._list(nft.FLOOR_TABLE)

    async def generation(self) -> int:
        """Return the generation of nft's rules in the upstream namespace: it grows with each change."""
        return await asyncio.to_thread(netstate.generation, self._upstream)

    async def renew(self) -> None:
        """Load the floor again and end the guard. Workers stop dialling at once, and continue with the next guard."""
        self.in_force = False
        try:
            await self._lay_floor()
        except netns.NftError as error:
            _log.error("the floor could not be laid: %s", error)
        if self._process is not None:
            await self._end(self._process)

    async def _keep(self) -> None:
        attempt = 0
        while True:
            process, began = self._process, time.monotonic()
            if process is not None:
                await process.wait()
            self.in_force = False
            attempt = 0 if time.monotonic() - began > _CALM_SECONDS else attempt
            self.restarts += 1
            await asyncio.sleep(_BACKOFF[min(attempt, len(_BACKOFF) - 1)])
            attempt += 1
            try:
                await self._spawn()
            except (GuardError, OSError):
                continue
            await self._changed(self.pidfd)

    @property
    def pid(self) -> int:
        """The current guard's process id, 0 if there is none."""
        return 0 if self._process is None or self._process.returncode is not None else self._process.pid

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()

    async def stop(self) -> None:
        """End the guard. The kernel removes its table; the floor stays."""
        if self._monitor is not None:
            self._monitor.cancel()
            await asyncio.gather(self._monitor, return_exceptions=True)
        if self._process is not None:
            await self._end(self._process)
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
            self.rules_file.unlink(missing_ok=True)
