"""A real server whose state is in a real PostgreSQL: over a unix socket and TCP, without it, and after its crash.

It tests `lifecycle/database/engine.py` and `lifecycle/database/probe.py` under the users and processes of a server.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from demo.sandboxes import Secrets
from testbed.census import command_lines, daemons
from testbed.internet import ATTACKER, STATUS
from testbed.ports import reserve_port
from testbed.stack import Stack
from tests.postgresql import Cluster, running
from tests.stacks import Second, beside, put_secrets
from tests.system.test_create_and_delete import body

pytestmark = [pytest.mark.system, pytest.mark.faults]

CODE = "DATABASE::UNAVAILABLE"
_LARGE = 16 << 20
"""Bytes. The disks of sandboxes are larger."""


class Stored(Stack):
    """A Sallyport with its state in PostgreSQL. The DSN, with a password, is in a file that only root can read."""

    dsn = ""

    @property
    def settings(self) -> str:
        return super().settings + f'\n[sallyport.database]\ndsn_file = "{self.dsn_file}"\nconnect_seconds = 2\n'

    @property
    def dsn_file(self) -> Path:
        return self.directory / "dsn"

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o711)
        self.dsn_file.touch(mode=0o600)
        self.dsn_file.write_text(self.dsn)
        super().start()


class Neighbour(Stored, Second):
    """Another one, with its own hostd, Docker and home, on the same database."""


@pytest.fixture(scope="module", name="cluster")
def _cluster() -> Iterator[Cluster]:
    with running(port=reserve_port(), listen="127.0.0.1") as cluster:
        yield cluster


@pytest.fixture(scope="module", name="stored")
def _stored(cluster: Cluster, values: Secrets) -> Iterator[Stored]:
    Stored.dsn = cluster.dsn(cluster.create())
    with beside(Stored, "stored", values) as stack:
        assert isinstance(stack, Stored)
        put_secrets(stack, values)
        yield stack


def api(stack: Stack, method: str, path: str = "", content: object = None) -> httpx.Response:
    """Call the lifecycle API."""
    key = {"OPEN-SANDBOX-API-KEY": stack.api_key}
    return httpx.request(
        method, f"{stack.base}/v1/sandboxes{path}", json=content, headers=key, timeout=60, trust_env=False
    )


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def works(stack: Stack, container: str) -> bool:
    """Return whether a sandbox reaches an allowed host, and not a denied one."""
    seen = stack.docker("exec", container, "sh", "-c", f"curl -sS -o /dev/null -w %{{http_code}} https://{STATUS}/")
    denied = stack.docker("exec", container, "sh", "-c", f"curl -sSk --max-time 3 https://{ATTACKER}/")
    return seen.stdout == "200" and denied.returncode != 0


def answers(stack: Stack, path: str = "") -> bool:
    """Return whether the API has the row of a path."""
    try:
        return api(stack, "GET", path).status_code == 200
    except httpx.HTTPError:
        return False


def test_sandboxes_work_on_while_the_database_is_away(stored: Stored, cluster: Cluster) -> None:
    """Calls get 503, and nothing is launched. No process is restarted before or after its return."""
    sandbox = stored.create("runc")
    container, serve = stored.container(sandbox.id), daemons(stored)["lifecycle.serve"]
    assert works(stored, container)
    traces = stored.traces(sandbox.id)
    cluster.kill()
    try:
        for method, path, content in (("GET", "", None), ("POST", "", body()), ("DELETE", f"/{sandbox.id}", None)):
            answer = api(stored, method, path, content)
            assert (503, "1", CODE) == (answer.status_code, answer.headers["Retry-After"], answer.json()["code"])
        assert works(stored, container)
        assert [sandbox.id] == [state.sandbox for state in stored.sandboxes()]
        os.kill(serve, signal.SIGKILL)  # hostd restarts it, and it begins without its database
        until(lambda: daemons(stored).get("lifecycle.serve", serve) != serve and stored.healthy())
        assert 503 == api(stored, "GET").status_code
        assert works(stored, container)
    finally:
        cluster.restart()
    until(lambda: answers(stored, f"/{sandbox.id}"))
    assert works(stored, container)
    assert "ok" == sandbox.commands.run("echo ok").text.strip()
    assert 204 == api(stored, "DELETE", f"/{sandbox.id}").status_code
    assert [] == traces.remaining()
    sandbox.close()


def listed(stack: Stack) -> list[str]:
    """Return the ids of the sandboxes that the API lists."""
    return [item["id"] for item in api(stack, "GET").json()["items"]]


@pytest.mark.extended
def test_two_servers_on_one_database_do_not_disturb_each_other(stored: Stored, cluster: Cluster) -> None:
    """Neither by their lists and removals, nor when both `serve` are killed, nor when one server ends."""
    mine = api(stored, "POST", "", body()).json()["id"]
    Neighbour.dsn = stored.dsn
    with beside(Neighbour, "neighbour") as neighbour:
        assert isinstance(neighbour, Neighbour)
        theirs = api(neighbour, "POST", "", body()).json()["id"]
        pairs = ((stored, mine, theirs), (neighbour, theirs, mine))
        for stack, own, other in pairs:
            assert [own] == listed(stack)
            assert 404 == api(stack, "DELETE", f"/{other}").status_code
        former = [daemons(stack)["lifecycle.serve"] for stack, _, _ in pairs]
        for pid in former:
            os.kill(pid, signal.SIGKILL)
        for (stack, own, _), pid in zip(pairs, former, strict=True):
            until(lambda stack=stack, pid=pid: daemons(stack).get("lifecycle.serve", pid) != pid)  # type: ignore[misc]
            until(lambda stack=stack, own=own: answers(stack, f"/{own}"))  # type: ignore[misc]
            assert ([own], [own]) == (listed(stack), [state.sandbox for state in stack.sandboxes()])
            assert "Running" == api(stack, "GET", f"/{own}").json()["status"]["state"]
    rows = cluster.ask("SELECT id FROM sandboxes WHERE state <> 'Failed'", stored.dsn.rpartition("dbname=")[2])
    assert (mine,) in rows
    assert [mine] == listed(stored) == [state.sandbox for state in stored.sandboxes()]
    assert 204 == api(stored, "DELETE", f"/{mine}").status_code


def test_no_other_user_can_read_the_password(stored: Stored, cluster: Cluster) -> None:
    """It is in no log, command line or environment, and in files of root and of `serve` only."""
    sandbox = stored.create("runc")
    files = [path for root in (stored.run, stored.state) for path in root.rglob("*") if path.is_file()]
    small = [path for path in files if "netns" not in path.parts and path.stat().st_size < _LARGE]
    found = [path for path in small if cluster.password.encode() in path.read_bytes()]
    assert {stored.run / "launch/serve.json", stored.run / "config/serve.json"} == set(found)
    assert {0o600, 0o440} == {path.stat().st_mode & 0o777 for path in found}
    assert {0} == {path.stat().st_uid for path in found}
    assert cluster.password not in stored.log.read_text(errors="replace")
    for pid, line in command_lines().items():
        assert cluster.password not in line
        if str(stored.run) in line:
            assert cluster.password.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    sandbox.kill()
    sandbox.close()


@pytest.mark.extended
def test_a_start_with_an_unreachable_database_says_why(stored: Stored, cluster: Cluster) -> None:
    """Then the server starts with the DSN of TCP. A sandbox of before is adopted, with its row."""
    sandbox = stored.create("runc")
    container, serve = stored.container(sandbox.id), daemons(stored)["lifecycle.serve"]
    name = stored.dsn.rpartition("dbname=")[2]
    stored.kill()
    cluster.kill()
    try:
        done = subprocess.run(stored.command, capture_output=True, text=True, check=False, timeout=120)
        doctor = [*stored.command[:-1], "doctor"]
        findings = subprocess.run(doctor, capture_output=True, text=True, check=False, timeout=300).stdout.splitlines()
    finally:
        cluster.restart()
        stored.dsn = cluster.dsn(name, "127.0.0.1")
        stored.start()
        until(lambda: daemons(stored).get("lifecycle.serve", serve) != serve and answers(stored, f"/{sandbox.id}"))
    said = done.stderr.splitlines()[-1]
    assert (1, True) == (done.returncode, said.startswith("sallyport: cannot run: the state database postgresql host="))
    assert said.endswith("; run: sallyport doctor")
    assert cluster.password not in done.stdout + done.stderr
    assert 1 == len([line for line in findings if "database" in line and "start PostgreSQL" in line])
    clients = cluster.ask("SELECT count(*) FROM pg_stat_activity WHERE client_addr = '127.0.0.1'")
    assert clients[0][0] >= 1
    until(lambda: works(stored, container))
    assert 204 == api(stored, "DELETE", f"/{sandbox.id}").status_code
    sandbox.close()
