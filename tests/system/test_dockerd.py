"""A managed dockerd that is killed at any moment: its mounts are removed after the stop."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from runtimes.engine.dockerd import Dockerd
from runtimes.net import netns
from runtimes.spec import DockerdConfig

pytestmark = [pytest.mark.system, pytest.mark.faults]

PATIENCE = 60.0


class Place:
    """The directories of a dockerd."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.data, self.notes, self.exec = root / "data", root / "config", root / "exec"
        self.notes.mkdir()
        (self.notes / "daemon.json").write_text("{}")
        self.config = DockerdConfig(
            binary=shutil.which("dockerd") or "/usr/sbin/dockerd",
            data_root=str(self.data),
            exec_root=str(self.exec),
            pidfile=str(root / "docker.pid"),
            log=str(root / "docker.log"),
        )

    def dockerd(self) -> Dockerd:
        return Dockerd(self.config, str(self.root / "docker.sock"), self.notes / "daemon.json")

    @property
    def own_note(self) -> Path:
        """What dockerd itself writes when it has bound its data directory."""
        return self.exec / "unmount-on-shutdown"

    def answers(self) -> bool:
        """Whether a dockerd answers."""
        with suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(1)
            sock.connect(str(self.root / "docker.sock"))
            sock.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return b" 200 " in sock.recv(100)
        return False

    def pid(self) -> int:
        with suppress(OSError, ValueError, IndexError):
            return int((self.notes / "dockerd.pid").read_text().split()[0])
        return 0


@pytest.fixture(name="place")
def _place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="sallyport-dd-", dir="/var/tmp") as name:
        place = Place(Path(name))
        yield place
        netns.unmount(place.data)  # else a failed test leaves the directory


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


async def test_a_dockerd_that_is_killed_as_it_starts_leaves_no_mount(place: Place) -> None:
    """The second one has found the mount of the first one, and does not consider it its own."""
    dockerd = place.dockerd()
    await dockerd.start()
    try:
        assert netns.is_mount_point(place.data)
        assert place.own_note.exists()
        for _ in range(2):
            former = place.pid()
            os.kill(former, signal.SIGKILL)
            await _until(lambda former=former: place.pid() != former and not place.own_note.exists())
        await _until(place.answers)
        assert netns.is_mount_point(place.data)
    finally:
        await dockerd.stop()
    assert not netns.is_mount_point(place.data)


async def test_a_mount_of_the_operator_stays(place: Place) -> None:
    """The data directory was a mount point before the first start."""
    place.data.mkdir()
    subprocess.run(  # noqa: ASYNC221 - the loop has no other work
        ["mount", "--bind", place.data, place.data], check=True
    )
    dockerd = place.dockerd()
    await dockerd.start()
    await dockerd.stop()
    assert netns.is_mount_point(place.data)
