"""A vault in this process with a log that the test can delay, and real vaultd and auditd processes."""

import asyncio
import base64
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import wire
from audit.client import AuditClient
from audit.producers import KINDS, VAULT
from audit.records import RecordError, record
from vault.channels import Channels
from vault.client import AdminClient, OnRevoke, VaultClient
from vault.fetching import FetcherPort, NoFetcher
from vault.keyring import create, load
from vault.operations import VaultOperations
from vault.readings import Readings
from vault.sources import Sources
from vault.vaultd import Vault
from wire.api import auditd, vaultd
from wire.serving import handler
from wire.sockets import LISTEN_FD

SERVE, VAULTD = 700000001, 700000002
LAUNCH = (  # imports come first, because an unprivileged uid may be unable to read a developer's interpreter
    "import os, sys, vault.vaultd\n"
    "uid = int(sys.argv[2])\n"
    "if uid != os.geteuid(): os.setgroups([]); os.setgid(uid); os.setuid(uid)\n"
    "raise SystemExit(vault.vaultd.main(sys.argv[1:2]))\n"
)


class Log:
    """The far end of an audit channel. It stores the records, and confirms them only while `open` is set.

    `tests/contracts/test_daemons.py` compares its answers with those of auditd.
    """

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.asked = asyncio.Event()

    async def handle(self, _client: wire.Client, op: str, parameters: wire.Message, _fds: list[int]) -> wire.Message:
        """Accept records like auditd."""
        request = auditd.CHANNEL.read(op, parameters)
        match request:
            case wire.Ping():
                return {}
            case auditd.Record(entry):
                items = (entry,)
            case auditd.Records(entries):
                items = entries
            case _:
                raise wire.RequestError(wire.Code.UNKNOWN_OP, op)
        if any(item.kind not in KINDS[VAULT] for item in items):
            raise wire.RequestError(wire.Code.INVALID, "one of another producer's kind")
        try:
            self.records += [record(item.kind, item.decision, **item.fields) for item in items]
        except RecordError as error:
            raise wire.RequestError(wire.Code.INVALID, str(error)) from None
        self.records[-1]["durable"] = parameters.get("durable", False)
        self.asked.set()
        await self.open.wait()
        return {"seq": len(self.records)}

    def of(self, kind: str, decision: str) -> list[dict[str, Any]]:
        """Return the records of one kind and decision."""
        return [record for record in self.records if (record["kind"], record["decision"]) == (kind, decision)]


class InProcess:
    """Store, custody, channels and socket of vaultd in the test's own process."""

    def __init__(self, directory: Path, administrators: frozenset[int]) -> None:
        self.directory = directory
        self.log = Log()
        self.monotonic: Callable[[], float] = time.monotonic
        self.fetcher: FetcherPort = NoFetcher()
        self._administrators = administrators
        self.key = directory / "master"
        self.key.touch(0o600)
        self.key.write_bytes(base64.b64encode(bytes(range(32))))
        self.held_rekey: tuple[asyncio.Event, asyncio.Event] | None = None
        """Of the next change of the master key: it sets the first after it has read the keys, and waits for the second.
        """

    async def start(self) -> None:
        """Open the vault and listen."""
        near, far = socket.socketpair()
        self._far = await wire.serve_connection(far, self.log.handle)
        self.audit = AuditClient.from_fd(near.detach(), timeout=20)
        self.vault = Vault(self.directory / "vault", load(self.key, {}))
        self.readings = Readings(self.fetcher, self.vault.custody, lambda: self.monotonic())
        sources = Sources(self.vault.custody, self.readings)
        self.channels = Channels(self.vault.custody, sources, self.audit, lambda: self.monotonic())
        self.readings.changed = self.channels.revoke_everywhere

        async def rekey(_credentials: object) -> None:
            found, held, self.held_rekey = load(self.key, {}), self.held_rekey, None
            if held is not None:
                held[0].set()
                await held[1].wait()
            self.vault.rekey(found)

        operations = VaultOperations(
            self.vault.custody, self.channels, self.readings, self.audit, rekey, self._administrators
        )
        listener, own = wire.bind_unix(self.directory / "s"), frozenset({os.geteuid()})
        self._server = await wire.serve_unix(
            listener, handler(vaultd.CONTROL, operations.handle), allowed_uids=own, descriptors_from=own
        )
        self.admin = await AdminClient.connect(self.directory / "s", os.geteuid())

    async def stop(self) -> None:
        """End the vault like a killed vaultd: nothing is saved."""
        await self.admin.close()
        self._server.cancel()
        await asyncio.gather(self._server, return_exceptions=True)
        await self.channels.close()
        await self.readings.close()
        await self.audit.close(0)
        await self._far.close()
        self.vault.close()

    async def worker(self, sandbox: str, generation: int, on_revoke: OnRevoke | None = None) -> VaultClient:
        """Attach a worker's channel and return the worker's end."""
        return await attach(self.admin, sandbox, generation, on_revoke)


async def attach(admin: AdminClient, sandbox: str, generation: int, on_revoke: OnRevoke | None = None) -> VaultClient:
    """Pass one end of a socket pair to vaultd. Return a client on the other end."""
    near, far = socket.socketpair()
    with far:
        try:
            await admin.attach(sandbox, generation, far.fileno())
        except BaseException:
            near.close()
            raise
    return VaultClient.from_fd(near.detach(), on_revoke)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Make a directory that other uids can enter, with a short name because the length of socket paths is limited."""
    path = Path(tempfile.mkdtemp(prefix="v-"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def vault_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Run a HashiCorp Vault for the tests of a session. A test leaves it unsealed."""
    from tests.vault.vault_server import VaultServer  # only system tests have its program

    server = VaultServer(tmp_path_factory.mktemp("hashicorp"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
async def vault(short_path: Path) -> AsyncIterator[InProcess]:
    """Run a vault whose administrator is the test's uid."""
    running = InProcess(short_path, frozenset({os.geteuid()}))
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
async def serve_vault(short_path: Path) -> AsyncIterator[InProcess]:
    """Run a vault for which the test is not an administrator."""
    running = InProcess(short_path, frozenset())
    await running.start()
    yield running
    await running.stop()


async def eventually[T](attempt: Callable[[], Awaitable[T]], seconds: float = 20) -> T:
    """Return the result of `attempt` as soon as its server listens."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return await attempt()
        except OSError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.02)


class Daemons:
    """auditd and vaultd as separate processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.uid = VAULTD if os.geteuid() == 0 else os.geteuid()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.admin: Any = None
        self.audit: Any = None
        self.given: dict[str, int] = {}
        """More descriptors for vaultd, by the variables with their numbers."""
        for part in ("audit", "vault", "run"):
            (path / part).mkdir(mode=0o700)
        (path / "run").chmod(0o755)
        create(path / "key", (self.uid, self.uid) if os.geteuid() == 0 else None)
        if os.geteuid() == 0:
            os.chown(path / "vault", self.uid, self.uid)
        self._write("audit.json", {"directory": f"{path}/audit", "uids": [os.geteuid()]})
        self._write(
            "vault.json",
            {
                "directory": f"{path}/vault",
                "uids": [os.geteuid(), SERVE],
                "master_key_file": f"{path}/key",
            },
        )

    async def start(self) -> None:
        """Start both, like hostd."""
        path = self.path / "audit.sock"
        self.auditd = self._spawn("auditd", ["-m", "audit.auditd", f"{self.path}/audit.json"], path)
        self.audit = await eventually(lambda: wire.Client.connect(path, os.geteuid()))
        await self.start_vaultd()

    async def start_vaultd(self) -> None:
        """Start vaultd with a new audit channel."""
        near, far = socket.socketpair()
        with near, far:
            await self.audit.ask(auditd.Attach(auditd.Producer.VAULT, None, 1), (far.fileno(),))
            self.vaultd = self.spawn_vaultd(near.fileno())
        self.admin = await eventually(lambda: AdminClient.connect(self.path / "run" / "vault.sock", self.uid))
        await self.admin.ask(wire.Ping())

    def spawn_vaultd(self, audit_fd: int) -> subprocess.Popen[bytes]:
        """Start a vaultd process with the configuration. The start can fail."""
        arguments = ["-c", LAUNCH, f"{self.path}/vault.json", str(self.uid)]
        given = {"SALLYPORT_AUDIT_FD": audit_fd, **self.given}
        return self._spawn("vaultd", arguments, self.path / "run" / "vault.sock", given)

    def without_key_file(self) -> None:
        """Have vaultd started with a key in `given` only."""
        self._write("vault.json", {"directory": f"{self.path}/vault", "uids": [os.geteuid(), SERVE]})

    async def stop(self) -> None:
        """End both, also after an incomplete start."""
        for client in (self.admin, self.audit):
            if client is not None:
                await client.close()
        for process in reversed(self.processes):
            if process.poll() is None:
                process.kill()
            process.wait()

    def log(self) -> bytes:
        """Return the whole stderr of the daemons."""
        return b"".join(path.read_bytes() for path in self.path.glob("*.log"))

    def _write(self, name: str, config: dict[str, Any]) -> None:
        path = self.path / name
        path.write_text(json.dumps(config))
        if os.geteuid() == 0:
            os.chown(path, self.uid, self.uid)
        path.chmod(0o600)

    def _spawn(
        self, name: str, arguments: list[str], path: Path, given: dict[str, int] | None = None
    ) -> subprocess.Popen[bytes]:
        with (self.path / f"{name}-{len(self.processes)}.log").open("wb") as log, wire.bind_unix(path) as listener:
            fds = {LISTEN_FD: listener.fileno(), **(given or {})}
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stderr=log,
                pass_fds=tuple(fds.values()),
                env=os.environ | {key: str(fd) for key, fd in fds.items()},
            )
        self.processes.append(process)
        return process


@pytest.fixture
async def daemons(short_path: Path) -> AsyncIterator[Daemons]:
    """Run the daemons, vaultd with an unprivileged uid.

    Only uid 0 is an administrator, so this needs root.
    """
    running = Daemons(short_path)
    try:
        await running.start()
        yield running
    finally:
        await running.stop()
