"""Fixtures with a real auditd in its own process, and producers attached to it over real socket pairs."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from audit.client import AuditClient
from audit.keys import load_public
from audit.layout import read_verifier
from audit.verifier import Verifier
from wire import Client, Ping, bind_unix
from wire.api.auditd import Attach, Producer
from wire.sockets import LISTEN_FD

ROOT = Path(__file__).resolve().parents[2]
A, B = f"sbx-{'a' * 24}", f"sbx-{'b' * 24}"


class Auditd:
    """An auditd on one directory that a test can start, kill and restart."""

    def __init__(self, base: Path, *, uid: int | None = None, **config: Any) -> None:
        self.uid = uid
        self.log = base / "log"
        self.socket = base / "audit.sock"
        self.stderr = base / "stderr"
        self.config = base / "audit.json"
        settings = {"sync": "group", "max_file_bytes": 1 << 26, "max_files": 0, "uids": [os.getuid()]}
        settings |= {"host_uid": os.getuid()} | config
        self.config.write_text(json.dumps({"directory": str(self.log)} | settings))
        self.process: asyncio.subprocess.Process | None = None
        self.control: Client | None = None
        self.clients: list[AuditClient] = []

    def _program(self) -> tuple[str, ...]:
        if self.uid is None:
            return ("-m", "audit.auditd")
        drop = f"os.setgroups([]); os.setgid({self.uid}); os.setuid({self.uid})"
        # The uid can lack access to the interpreter of a development machine, so the process drops root after the
        # imports.
        return ("-c", f"import os, sys; from audit.auditd import main; {drop}; sys.exit(main(sys.argv[1:]))")

    def _open_stderr(self) -> BinaryIO:
        return open(self.stderr, "ab")

    async def start(self) -> "Auditd":
        with self._open_stderr() as stderr, bind_unix(self.socket) as listener:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                *self._program(),
                str(self.config),
                cwd=ROOT,
                stderr=stderr,
                pass_fds=[listener.fileno()],
                env=os.environ | {LISTEN_FD: str(listener.fileno())},
            )
        async with asyncio.timeout(20):
            while self.control is None:
                if self.process.returncode is not None:
                    raise AssertionError(self.stderr.read_text())
                try:
                    self.control = await Client.connect(self.socket, os.getuid() if self.uid is None else self.uid)
                except OSError:
                    await asyncio.sleep(0.01)  # polls for another process's socket
            await self.control.ask(Ping())
        return self

    async def attach_fd(self, sandbox: str | None, generation: int = 1) -> int:
        assert self.control is not None
        producer = Producer.VAULT if sandbox is None else Producer.GATEWAY
        ours, theirs = socket.socketpair()
        try:
            await self.control.ask(Attach(producer, sandbox, generation), fds=[theirs.fileno()])
        finally:
            theirs.close()
        return ours.detach()

    async def attach(self, sandbox: str | None, generation: int = 1, **options: Any) -> AuditClient:
        client = AuditClient.from_fd(await self.attach_fd(sandbox, generation), **options)
        self.clients.append(client)
        return client

    async def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        code = await self.process.wait()
        for client in self.clients:
            await client.close(0)
        self.clients.clear()
        if self.control is not None:
            await self.control.close()
            self.control = None
        return code

    async def restart(self, number: int = signal.SIGTERM) -> "Auditd":
        await self.stop(number)
        return await self.start()

    def files(self) -> list[Path]:
        return sorted(self.log.glob("audit-*.jsonl"))

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for path in self.files() for line in path.read_bytes().splitlines(keepends=True)]

    def said(self, **wanted: Any) -> list[dict[str, Any]]:
        return [record for record in self.records() if wanted.items() <= record.items()]

    def verify(self) -> Verifier:
        return verify(self.log)


def verify(directory: Path) -> Verifier:
    return read_verifier(directory, load_public(directory / "keys/public.pem"))


async def retired(daemon: Auditd, files: int) -> None:
    """Wait until at most this number of files is not retired."""
    async with asyncio.timeout(20):
        while len(daemon.files()) > files:  # noqa: ASYNC110 - it is another process's state
            await asyncio.sleep(0.01)


type NewAuditd = Callable[..., Auditd]


@pytest.fixture
async def new_auditd() -> AsyncIterator[NewAuditd]:
    """Return a function that makes auditds. Those that still run after the test are killed."""
    made: list[Auditd] = []

    def make(base: Path, **options: Any) -> Auditd:
        made.append(Auditd(base, **options))
        return made[-1]

    yield make
    for daemon in made:
        if daemon.process is not None:
            await daemon.stop(signal.SIGKILL)


@pytest.fixture
async def auditd(tmp_path: Path, new_auditd: NewAuditd) -> Auditd:
    return await new_auditd(tmp_path).start()


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a closed log of two sandboxes and the control plane, with at least three files.

    A test must copy it to change it.
    """
    base = tmp_path_factory.mktemp("written")

    async def write() -> Path:
        daemon = await Auditd(base, max_file_bytes=65536).start()
        a, b, control = await daemon.attach(A), await daemon.attach(B), await daemon.attach(None)
        for n in range(200):
            await a.accept("request", "allow", host="a.example", path=f"/{n}" + "x" * 400)
            await b.accept("request", "deny", host="b.example", path=f"/{n}", reason="no rule allows it")
            if n % 20 == 0:
                await control.accept("vault.open", "info", sandbox=A, lineage="one")
        assert await daemon.stop() == 0
        return daemon.log

    log = asyncio.run(write())
    assert len(list(log.glob("audit-*.jsonl"))) >= 3
    yield log


@pytest.fixture
def log_copy(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "copy"))


def run(*command: str | Path) -> None:
    """Run a program that must succeed."""
    subprocess.run(command, check=True, capture_output=True, timeout=30)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk)
    yield disk
    run("umount", "-l", disk)
