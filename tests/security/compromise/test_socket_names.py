"""No daemon and no worker can take the name of a daemon's socket, also while that daemon restarts.

The module tests `wire/rpc.py`.
"""

import os
import secrets
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from testbed.internet import API
from testbed.stack import StackError
from tests.security.compromise.held import Held
from tests.security.compromise.stack import CompromisedStack, Hostile
from wire import bind_unix

pytestmark = [pytest.mark.system, pytest.mark.faults]

_ATTEMPTS = """
import os, socket
def attempts(run, names):
    done = []
    def attempt(what, work):
        try:
            work()
        except BaseException as error:
            return
        done.append(what)
    def bind(path):
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(path)
        sock.listen()
        held.append(sock)
    held = []
    new = [f"{run}/{name}" for name in ("new.sock", ".new", "ingress/new.sock", "config/new")]
    for path in [f"{run}/{name}" for name in names] + new:
        attempt(f"bind {path}", lambda: bind(path))
        attempt(f"unlink {path}", lambda: os.unlink(path))
        attempt(f"rmdir {path}", lambda: os.rmdir(path))
        attempt(f"rename {path}", lambda: os.rename(path, f"{path}.old"))
        attempt(f"rename over {path}", lambda: os.rename(own, path))
        attempt(f"link {path}", lambda: os.link(own, path))
        attempt(f"symlink {path}", lambda: os.symlink(own, path))
        attempt(f"mkdir {path}", lambda: os.mkdir(path))
        attempt(f"mkfifo {path}", lambda: os.mkfifo(path))
        attempt(f"create {path}", lambda: os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)))
        attempt(f"chmod {path}", lambda: os.chmod(path, 0o666))
        attempt(f"chown {path}", lambda: os.chown(path, os.getuid(), -1))
    attempt("chmod run", lambda: os.chmod(run, 0o777))
    for sock in held:
        sock.close()
    return done
open(own, "w").close()
"""

_STEAL = """
received = []
while not os.path.exists(stop):
    try:
        os.unlink(path)
    except OSError: pass
    try:
        taken = socket.socket(socket.AF_UNIX)
        taken.bind(path)
        taken.listen()
    except OSError: continue
    peer, _ = taken.accept()
    received.append(len(peer.recv(65536)))
value = received
"""


def _names(run: Path) -> dict[str, tuple[int, int, int, int]]:
    """Return inode, mode and owner of each path in the run directory."""
    found = {}
    for path in (run, *run.iterdir(), *(run / "ingress").iterdir(), *(run / "config").iterdir()):
        status = path.lstat()
        found[str(path)] = (status.st_ino, status.st_mode, status.st_uid, status.st_gid)
    return found


@pytest.fixture(scope="module", name="held")
def _held(compromised: CompromisedStack) -> Iterator[Held]:
    held = Held(compromised)
    yield held
    held.close()


@pytest.fixture(name="own")
def _own(compromised: CompromisedStack) -> Iterator[str]:
    """Yield a directory that every user can write, in the file system of the run directory."""
    with tempfile.TemporaryDirectory(prefix="sallyport-own-", dir=compromised.run.parent) as name:
        os.chmod(name, 0o1777)  # noqa: S103 - hostile code needs a place of its own
        yield name


@contextmanager
def _process(stack: CompromisedStack, held: Held, name: str) -> Iterator[Hostile]:
    if name != "worker":
        yield held[name]
        return
    with stack.create("runc") as sandbox:
        process = stack.hostile(sandbox.id)
        yield process
        process.close()
        sandbox.kill()


@pytest.mark.parametrize("name", ["serve", "vaultd", "auditd", "compiler", "worker"])
def test_no_process_but_roots_can_change_a_name_in_the_run_directory(
    compromised: CompromisedStack, held: Held, own: str, name: str
) -> None:
    """The process tries every name that exists, and some that do not."""
    with _process(compromised, held, name) as process:
        before = _names(compromised.run)
        names = [path.removeprefix(f"{compromised.run}/") for path in before if path != str(compromised.run)]
        attempts = f"own = {own + '/own'!r}\n{_ATTEMPTS}"
        process.run(attempts if name != "worker" else attempts.replace('open(own, "w").close()', ""))
        assert [] == process.run(f"value = attempts({str(compromised.run)!r}, {names!r})")
        assert before == _names(compromised.run)


@pytest.mark.parametrize("name", ["auditd", "serve"])
def test_a_secret_that_is_put_while_vaultd_is_started_again_reaches_vaultd_only(
    compromised: CompromisedStack, held: Held, name: str
) -> None:
    """The secret is sent just after vaultd's death. It waits in the socket that hostd keeps open, then it is stored."""
    stop = compromised.directory / f"stop-{name}"
    path = compromised.run / "vault.sock"
    secret = f"put-{name}"
    inode = path.stat().st_ino
    with _process(compromised, held, name) as thief:
        thief.begin(f"import os, socket\npath, stop = {str(path)!r}, {str(stop)!r}\n{_STEAL}")
        try:
            os.kill(held["vaultd"].pid, signal.SIGKILL)
            compromised.sallyport("vault", "put", secret, "--host", API, stdin=secrets.token_urlsafe(40))
        finally:
            stop.touch()
        assert [] == thief.finish()
    held.renewed("vaultd")
    assert inode == path.stat().st_ino
    assert secret in compromised.sallyport("vault", "list")


def test_a_secret_is_not_sent_to_a_server_of_another_user(compromised: CompromisedStack, held: Held) -> None:
    """The path leads to a socket of auditd's, by an error of the operator: the command sends nothing."""
    path, kept, fake = (compromised.run / name for name in ("vault.sock", "kept.sock", "fake.sock"))
    auditd = held["auditd"]
    with bind_unix(fake) as listener:
        os.seteuid(auditd.uid)
        try:
            listener.listen()
        finally:
            os.seteuid(0)
        path.rename(kept)
        fake.rename(path)
        try:
            with pytest.raises(StackError, match=f"is served by uid {auditd.uid}, not by 700000002: nothing was sent"):
                compromised.sallyport("vault", "put", "misled", "--host", API, stdin=secrets.token_urlsafe(40))
        finally:
            kept.rename(path)
        listener.settimeout(10)
        connection, _ = listener.accept()
        with connection:
            assert b"" == connection.recv(1)
    assert "misled" not in compromised.sallyport("vault", "list")


def test_each_daemon_is_the_server_that_the_kernel_names(compromised: CompromisedStack) -> None:
    """Each daemon calls `listen` itself. So clients see its credentials, not those of hostd, which bound the socket."""
    for name, uid in (("hostd", 0), ("vault", 700000002), ("audit", 700000003)):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(compromised.run / f"{name}.sock"))
            data = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            assert uid == int.from_bytes(data[4:8], "little")
