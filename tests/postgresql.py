"""A real PostgreSQL for tests, from Debian's package, with a data directory of its own.

It listens on a unix socket, and on loopback if a test asks for it. It refuses to run as root: then it runs as the
package's user. Nothing is left of it.
"""

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.stopping import stop

_READY_SECONDS = 30.0
_OPTIONS = {
    "fsync": "off",  # Processes are killed here, and no host.
    "shared_buffers": "16MB",
    "dynamic_shared_memory_type": "mmap",  # In the data directory: a killed cluster leaves nothing in /dev/shm.
    "max_connections": "60",
    "autovacuum": "off",
    "logging_collector": "off",
}


def programs() -> Path:
    """Return the directory of the server's programs. Without them a test fails."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if not found:
        pytest.fail("PostgreSQL is missing: ./run test installs it; else: apt-get install postgresql-15", pytrace=False)
    return found[-1].parent


class Cluster:
    """One server. Tests can kill it, stop its processes, and start it again."""

    def __init__(
        self, directory: Path, *, port: int = 5432, listen: str = "", netns: str | None = None, **options: str
    ) -> None:
        """Make the data directory. `netns` is the namespace file of the network in which the server listens."""
        self.directory = directory
        self._netns = netns
        self.password = secrets.token_hex(12)
        self.port = port
        self._options = {**_OPTIONS, "listen_addresses": listen, **options}
        self._bin = programs()
        self._process: subprocess.Popen[bytes] | None = None
        self._log = directory / "log"
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            entry = pwd.getpwnam("postgres")
            self._user = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
            os.chown(directory, entry.pw_uid, entry.pw_gid)
        directory.chmod(0o755)
        secret = directory / "password"
        secret.write_text(self.password)
        secret.chmod(0o644)
        try:
            self._run("initdb", "-D", str(self.data), "-U", "postgres", "-A", "scram-sha-256", "--pwfile", str(secret))
        finally:
            secret.unlink()

    @property
    def data(self) -> Path:
        """The data directory."""
        return self.directory / "data"

    def _run(self, name: str, *arguments: str) -> None:
        command = [str(self._bin / name), *arguments, "-N", "-E", "UTF8", "--locale", "C.UTF-8"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", **self._user)
        assert 0 == done.returncode, done.stderr

    def start(self) -> None:
        """Start the server and wait until it answers."""
        options = [word for name, value in self._options.items() for word in ("-c", f"{name}={value}")]
        command = [str(self._bin / "postgres"), "-D", str(self.data), "-k", str(self.directory), "-p", str(self.port)]
        user = self._user
        if self._netns is not None:  # only root can enter it
            ids = (f"--setgid={user['group']}", f"--setuid={user['user']}") if user else ()
            command, user = ["nsenter", f"--net={self._netns}", *ids, *command], {}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *options], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", **user
            )
        deadline = time.monotonic() + _READY_SECONDS
        while True:
            try:
                self.ask("SELECT 1")
                return
            except psycopg.OperationalError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise AssertionError(self._log.read_text()[-2000:]) from None
                time.sleep(0.02)

    def dsn(self, database: str, host: str | None = None, **more: str) -> str:
        """Return the DSN of a database, with the password."""
        options = {
            "host": host or str(self.directory),
            "port": str(self.port),
            "user": "postgres",
            "password": self.password,
            "dbname": database,
            **more,
        }
        return " ".join(f"{name}={value}" for name, value in options.items())

    def ask(self, query: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Execute a statement and return its rows."""
        with psycopg.connect(self.dsn(database), autocommit=True, connect_timeout=5) as connection:
            cursor = connection.execute(query.encode())
            return cursor.fetchall() if cursor.description else []

    def secure(self, key: Path, certificate: Path) -> None:
        """Start the server again. It then accepts TCP only with TLS."""
        self.close(keep=True)
        for source in (key, certificate):
            target = self.data / source.name
            target.write_bytes(source.read_bytes())
            target.chmod(0o600)
            if self._user:
                os.chown(target, self._user["user"], self._user["group"])
        access = self.data / "pg_hba.conf"
        access.write_text("local all all scram-sha-256\nhostssl all all all scram-sha-256\n")
        self._options |= {"ssl": "on", "ssl_key_file": key.name, "ssl_cert_file": certificate.name}
        self.start()

    def create(self, template: str = "template1") -> str:
        """Create a database and return its name."""
        name = f"test_{secrets.token_hex(6)}"
        self.ask(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    def drop(self, name: str) -> None:
        """Remove a database, also if it is in use."""
        self.ask(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def _pids(self) -> list[int]:
        """Return the server's process and those that it forked. These are not in its process group."""
        if self._process is None:
            return []
        found = [self._process.pid]
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == self._process.pid:
                    found.append(int(name))
        return found

    def stop(self) -> None:
        """Stop each process of the server. It answers nothing, and its connections stay open."""
        assert self._process is not None
        stop(self._process.pid)  # It forks no more.
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                stop(pid)

    def resume(self) -> None:
        """Continue each process of the server after `stop`."""
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """End the server like a crash: all of its processes by SIGKILL."""
        if self._process is None:
            return
        stop(self._process.pid)  # It forks no more.
        pids = self._pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        while any(_lives(pid) for pid in pids):  # The next server refuses to start beside them.
            time.sleep(0.005)

    def restart(self) -> None:
        """Start the server if it does not run."""
        if self._process is None:
            self.start()

    def close(self, *, keep: bool = False) -> None:
        """End the server and remove its data, if it is not to be kept."""
        if self._process is not None:
            self.resume()
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None
        if not keep:
            shutil.rmtree(self.directory, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def running(**options: Any) -> Iterator[Cluster]:
    """Run a server."""
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="slp-pg", dir="/dev/shm")), **options)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
