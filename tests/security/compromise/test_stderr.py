"""The standard error of a compromised process is bounded and escaped, and is not a descriptor of hostd's.

The module tests `runtimes/process/output.py`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.compromise.held import Held
from tests.security.compromise.stack import CompromisedStack, Hostile

pytestmark = pytest.mark.system

_FLOOD = r"""
import os
written = attempted = 0
while attempted < 16 << 20:
    attempted += 65536
    try: written += os.write(2, b"\x1b]0;title\x07\x1b[2Jx\rhostd: ERROR: forged\n" * 1638)
    except BlockingIOError: pass
value = attempted
"""

_BLOCKING = """
import fcntl, os
value = []
for fd in (1, 2):
    for flags in (0, os.O_APPEND, os.O_NONBLOCK):
        try: fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        except OSError as error: value.append(error.errno)
"""

_MOST = 120_000
"""The maximum number of bytes that hostd logs of a worker.

A worker may log 50 lines at once and then one line in two seconds, of 1000 characters each.
"""


@pytest.fixture(scope="module", name="held")
def _held(compromised: CompromisedStack) -> Iterator[Held]:
    held = Held(compromised)
    yield held
    held.close()


def _hostd(stack: CompromisedStack) -> int:
    assert stack._process is not None
    return stack._process.pid


def _flags(pid: int, fd: int) -> str:
    return next(line for line in Path(f"/proc/{pid}/fdinfo/{fd}").read_text().splitlines() if "flags" in line)


def _shared(stack: CompromisedStack, process: Hostile) -> list[int]:
    """Return those of hostd's standard streams that the process has, too."""
    files = {os.stat(f"/proc/{_hostd(stack)}/fd/{fd}").st_ino for fd in (1, 2)}
    return [fd for fd in (1, 2) if os.stat(f"/proc/{process.pid}/fd/{fd}").st_ino in files]


def test_a_flood_of_a_worker_is_bounded_and_cannot_be_taken_for_hostds(compromised: CompromisedStack) -> None:
    with compromised.create("runc") as flooding, compromised.create("runc") as other:
        worker, neighbour = compromised.hostile(flooding.id), compromised.hostile(other.id)
        flags = [_flags(_hostd(compromised), fd) for fd in (1, 2)]
        before = compromised.log.stat().st_size
        worker.run(_BLOCKING)
        assert 16 << 20 == worker.run(_FLOOD)
        assert "on" == other.commands.run("echo on").text.strip()
        assert flags == [_flags(_hostd(compromised), fd) for fd in (1, 2)]
        worker.close()
        neighbour.close()
        flooding.kill()
        other.kill()
    data = compromised.log.read_bytes()[before:]
    assert len(data) <= _MOST
    assert b"\x1b" not in data and b"\r" not in data
    lines = [line for line in data.decode().splitlines() if "forged" in line]
    assert lines
    assert lines == [line for line in lines if line.startswith(f"hostd.output: INFO: {flooding.id}| ")]


@pytest.mark.parametrize("name", ["serve", "vaultd", "auditd", "compiler"])
def test_no_daemon_has_a_standard_stream_of_hostds(compromised: CompromisedStack, held: Held, name: str) -> None:
    assert [] == _shared(compromised, held[name])


def test_no_worker_has_a_standard_stream_of_another_process(compromised: CompromisedStack) -> None:
    with compromised.create("runc") as first, compromised.create("runc") as second:
        workers = [compromised.hostile(sandbox.id) for sandbox in (first, second)]
        assert [[], []] == [_shared(compromised, worker) for worker in workers]
        assert 2 == len({os.stat(f"/proc/{worker.pid}/fd/2").st_ino for worker in workers})
        for worker, sandbox in zip(workers, (first, second), strict=True):
            worker.close()
            sandbox.kill()


@pytest.mark.parametrize("name", ["serve", "vaultd", "auditd", "compiler"])
def test_a_flood_of_a_daemon_is_bounded_and_does_not_hold_it_up(
    compromised: CompromisedStack, held: Held, name: str
) -> None:
    before = compromised.log.stat().st_size
    assert 16 << 20 == held[name].run(_FLOOD)
    data = compromised.log.read_bytes()[before:]
    assert len(data) <= 1_500_000
    assert b"\x1b" not in data
    assert compromised.healthy()
