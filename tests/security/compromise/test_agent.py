"""Each agent runs in the daemon or worker that it names, with that process's user and confinement."""

from pathlib import Path

import pytest

from tests.security.compromise.stack import CompromisedStack, Refused

pytestmark = pytest.mark.system


def test_hostile_code_runs_as_each_daemon_and_worker(compromised: CompromisedStack, runtime: str) -> None:
    with compromised.create(runtime) as sandbox:
        worker = compromised.hostile(sandbox.id)
        try:
            assert compromised.inspect(sandbox.id).worker_pid == worker.pid
            assert worker.run("import os; value = [os.getpid(), os.getuid()]") == [worker.pid, _uid(worker.pid)]
            assert worker.run("value = type(process).__name__") == "Worker"
            with pytest.raises(Refused) as refused:
                worker.run("open('/etc/passwd')")
            assert ("PermissionError", 1) == (refused.value.kind, refused.value.number)
        finally:
            worker.close()
            sandbox.kill()


@pytest.mark.parametrize("name", ["serve", "vaultd", "auditd", "host"])
def test_hostile_code_runs_as_each_daemon(compromised: CompromisedStack, name: str) -> None:
    daemon = compromised.hostile(name)
    assert [daemon.pid, _uid(daemon.pid)] == daemon.run("import os; value = [os.getpid(), os.getuid()]")
    daemon.close()


def _uid(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Uid:")).split()[1])
