"""A dockerd that hostd starts, in its own network namespace.

- It has no bridge, no iptables, no forwarding and no network but loopback, so it cannot change the host's network. A
  second dockerd in the host's own network namespace would delete the first one's bridge.
- It is stopped by its process id, never by name, and its containerd with it.
- It binds its data directory over itself. A dockerd that is killed leaves this mount, and the next one does not treat
  it as its own, so `stop` removes it.
- Containers and their shims outlive it, so that sandboxes continue while it is restarted. No container can be started
  meanwhile, or again afterwards, because its launch plan was for one start only.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from runtimes.net import netns
from runtimes.process import predecessor
from runtimes.process.adopted import Adopted, AdoptedProcess
from runtimes.process.supervisor import NotReady
from runtimes.spec import DockerdConfig

_READY_SECONDS = 60.0
_STOP_SECONDS = 20.0
_ADOPT_SECONDS = 3.0
_CALM_SECONDS = 10.0
_BACKOFF = (0.0, 0.2, 0.5, 1.0, 2.0)
_NAME = "dockerd"

_log = logging.getLogger(__name__)


def arguments(config: DockerdConfig, socket: str, daemon_json: Path) -> list[str]:
    """Return the command line, `unshare` first."""
    return [
        "unshare",
        "-n",
        config.binary,
        f"--config-file={daemon_json}",
        f"--host=unix://{socket}",
        f"--data-root={config.data_root}",
        f"--exec-root={config.exec_root}",
        f"--pidfile={config.pidfile}",
        "--bridge=none",
        "--iptables=false",
        "--ip6tables=false",
        "--ip-forward=false",
        "--ip-masq=false",
        "--exec-opt=native.cgroupdriver=cgroupfs",
        "--group=root",
        "--log-level=warn",
    ]


class Dockerd:
    """Keeps one dockerd running, from `start` to `stop`.

    After a crash it is started again, with its child containerd. If only containerd has ended, dockerd is ended too,
    because it would need many seconds to start another one. Containers run on meanwhile (live-restore).
    """

    def __init__(self, config: DockerdConfig, socket: str, daemon_json: Path) -> None:
        """Store the parameters; notes about processes are files beside `daemon_json`."""
        self._config = config
        self._socket = socket
        self._daemon_json = daemon_json
        self._process: AdoptedProcess | None = None
        self._monitor: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Adopt a dockerd that runs with the same configuration, otherwise start one; wait until it answers.

        Raises:
            NotReady: it ended, or does not answer in time.
        """
        config = self._config
        parents = (Path(self._socket).parent, Path(config.pidfile).parent, Path(config.log).parent)
        for directory in (config.data_root, config.exec_root, *parents):
            Path(directory).mkdir(mode=0o711, parents=True, exist_ok=True)
        if not netns.is_mount_point(Path(config.data_root)):
            self._unmount_note.touch(mode=0o600)
        if not await self._adopt():
            await self._launch()
        self._monitor = asyncio.create_task(self._keep(), name="dockerd")

    async def _adopt(self) -> bool:
        """Adopt the running dockerd if its configuration is the same and it answers; else end it and return False."""
        left = await asyncio.to_thread(predecessor.take, self._notes, _NAME, self._identity())
        if left is not None and await asyncio.to_thread(self._lost_containerd, left.pid):
            _log.error("containerd ended: dockerd is started again with a new one")
            left.kill()
        elif left is not None:
            with contextlib.suppress(NotReady, TimeoutError):
                async with asyncio.timeout(_ADOPT_SECONDS):
                    await self._answering(left)
                _log.info("dockerd was adopted (process %d)", left.pid)
                self._process = left
                return True
        await asyncio.to_thread(predecessor.end, self._notes, _NAME)
        return False

    def _identity(self) -> str:
        command = arguments(self._config, self._socket, self._daemon_json)
        return predecessor.digest(command, self._daemon_json.read_bytes())

    async def _launch(self) -> None:
        stale = Path(self._config.exec_root, "containerd")
        for path in (Path(self._config.pidfile), *stale.glob("containerd*.pid"), *stale.glob("containerd*.sock*")):
            path.unlink(missing_ok=True)
        log = os.open(self._config.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            process = await asyncio.create_subprocess_exec(
                *arguments(self._config, self._socket, self._daemon_json),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)
        self._process = process
        predecessor.note(self._notes, _NAME, process.pid, self._identity())
        try:
            async with asyncio.timeout(_READY_SECONDS):
                await self._answering(process)
        except TimeoutError as error:
            await self._end(process)
            raise NotReady(f"dockerd does not answer; see {self._config.log}") from error

    async def _answering(self, process: AdoptedProcess) -> None:
        while True:
            if process.returncode is not None:
                raise NotReady(f"dockerd ended with status {process.returncode}; see {self._config.log}")
            try:
                reader, writer = await asyncio.open_unix_connection(self._socket)
            except OSError:
                await asyncio.sleep(0.02)
                continue
            try:
                writer.write(b"GET /_ping HTTP/1.0\r\n\r\n")
                if b" 200 " in await reader.readline():
                    return
            except OSError:
                pass
            finally:
                writer.close()
            await asyncio.sleep(0.02)

    async def _keep(self) -> None:
        attempt = 0
        while self._process is not None:
            began = time.monotonic()
            await self._either_ended(self._process)
            if self._process.returncode is None:
                _log.error("containerd ended: dockerd is started again with a new one")
                self._process.kill()
            status = await self._process.wait()
            _log.error("dockerd ended with status %s", status)
            attempt = 0 if time.monotonic() - began > _CALM_SECONDS else attempt
            await asyncio.sleep(_BACKOFF[min(attempt, len(_BACKOFF) - 1)])
            attempt += 1
            try:
                await self._launch()
            except (NotReady, OSError) as error:
                _log.error("dockerd does not come back: %s", error)

    async def _either_ended(self, process: AdoptedProcess) -> None:
        """Wait until dockerd, or the containerd that it has started, has ended."""
        if await asyncio.to_thread(self._lost_containerd, process.pid):
            return
        waiting = [asyncio.create_task(process.wait(), name="dockerd-end")]
        containerd = await asyncio.to_thread(self._containerd, process.pid)
        if containerd is not None:
            waiting.append(asyncio.create_task(containerd.wait(), name="containerd-end"))
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    def _lost_containerd(self, parent: int) -> bool:
        """Return whether process `parent` has started a containerd, but has no running one now."""
        return any(self._containerd_notes()) and self._containerd(parent) is None

    def _containerd_notes(self) -> Iterator[Path]:
        return Path(self._config.exec_root, "containerd").glob("*containerd.pid")

    def _containerd(self, parent: int) -> Adopted | None:
        """Return the containerd that process `parent` has started; None if it uses one that existed before."""
        for path in self._containerd_notes():
            try:
                pid = int(path.read_text())
                fd = os.pidfd_open(pid)
            except (OSError, ValueError):
                continue
            if predecessor.parent(pid) == parent:
                return Adopted(pid, fd)
            os.close(fd)
        return None

    async def _end(self, process: AdoptedProcess) -> None:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(_STOP_SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()
        await process.wait()

    async def stop(self) -> None:
        """End dockerd, first with SIGTERM, and remove its mounts."""
        if self._monitor is not None:
            self._monitor.cancel()
            await asyncio.gather(self._monitor, return_exceptions=True)
        if self._process is not None:
            await self._end(self._process)
        await asyncio.to_thread(self._unmount)

    def _unmount(self) -> None:
        netns.unmount_below(Path(self._config.exec_root))
        if self._unmount_note.exists():
            netns.unmount(Path(self._config.data_root))
            self._unmount_note.unlink()

    @property
    def _notes(self) -> Path:
        return self._daemon_json.parent

    @property
    def _unmount_note(self) -> Path:
        """The path of a file that exists if the data directory was no mount point before the first start.

        Then a mount there belongs to dockerd.
        """
        return self._notes / "dockerd-unmount"
