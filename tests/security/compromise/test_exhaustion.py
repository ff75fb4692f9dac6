"""A compromised worker can neither stop nor exhaust a daemon, and cannot prevent the removal of its sandbox.

The module tests `runtimes/workers.py`.
"""

import errno
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opensandbox import SandboxSync

from testbed.internet import API
from testbed.stack import StackError
from testbed.traces import start_time
from tests.conftest import representatives
from tests.security.compromise.stack import CompromisedStack, Hostile, Refused
from tests.stopping import stop
from wire.api.hostd import Configure, Remove, Removed
from wire.operations import Ping

pytestmark = [pytest.mark.system, pytest.mark.faults]

GROWTH = 48 << 20
"""The number of bytes by which a daemon may grow. Without a limit, one channel made it grow by 6 GB."""
CHANNELS = {
    "hostd": "process._control._sock",
    "auditd": "process._audit._client._sock",
    "vaultd": "process._state.vault._wire._sock",
}
FIND = """
import json, os, socket, struct, threading, time
sock = socket.socket(fileno=os.dup({channel}.fileno()))
"""
# The worker's own event loop is blocked, so the worker reads no answers.
FLOOD = """
process._control._reader.get_loop().call_soon_threadsafe(time.sleep, 3600)
time.sleep(0.5)
sock.setblocking(False)
def frame(body):
    return struct.pack("!I", len(body)) + body
def push(data, seconds):
    end = time.monotonic() + seconds
    while data and time.monotonic() < end:
        try:
            data = data[sock.send(data[:1 << 20]):]
        except BlockingIOError:
            time.sleep(0.01)
    return not data
"""
UNREAD = """
part = b"[]," * 20000
body = b'{"id":1,"op":"record","durable":false,"entry":[' + part + b'0]}'
taken = 0
try:
    while taken < 2000 and push(frame(body), 2):
        taken += 1
except OSError:
    pass
value = taken
"""
SMALL = """
value = None
try:
    for count in (340000, 1398000):
        push(frame(b'{"id":1,"op":"record","entry":[' + b"[]," * count + b'0]}'), 30)
    push(frame(b"{}"), 30)
    push(frame(b"{}"), 30)
except OSError as error:
    value = error.errno
"""


@pytest.fixture(scope="module", name="daemons")
def _daemons(compromised: CompromisedStack) -> dict[str, int]:
    """Return the process ids of the daemons to which a worker has a channel."""
    found = {}
    for name, called in (("hostd", "host"), ("auditd", "auditd"), ("vaultd", "vaultd")):
        agent = compromised.hostile(called)
        found[name] = agent.pid
        agent.close()
    return found


class Taken:
    """A sandbox whose worker is hostile."""

    def __init__(self, compromised: CompromisedStack, runtime: str) -> None:
        self.stack = compromised
        self.sandbox = compromised.create(runtime)
        self.id = self.sandbox.id
        self.worker: Hostile = compromised.hostile(self.id)

    def record(self) -> dict[str, Any]:
        """Return hostd's record of the sandbox."""
        record: dict[str, Any] = json.loads((self.stack.run / "records" / f"{self.id}.json").read_text())
        return record

    def configure(self, *, decided: bool = False) -> None:
        """Let hostd configure the sandbox again with its present selection."""
        self.stack.ask(Configure(self.id, self.record()["selection"], decided))

    def removed(self) -> None:
        """Remove the sandbox without `serve`, and check that nothing is left."""
        assert Removed(()) == self.stack.ask(Remove(self.id))
        assert self.id not in [item.sandbox for item in self.stack.sandboxes()]
        assert start_time(self.worker.pid) is None  # its exit status can be left: the zygote reaps it soon


@pytest.fixture(name="taken")
def _taken(compromised: CompromisedStack) -> Iterator[Taken]:
    taken = Taken(compromised, "runc")
    yield taken
    taken.worker.close()
    taken.sandbox.kill()
    taken.sandbox.close()


@pytest.fixture(scope="module", name="other")
def _other(compromised: CompromisedStack) -> Iterator[SandboxSync]:
    sandbox = compromised.create("runc")
    yield sandbox
    sandbox.kill()
    sandbox.close()


def works(sandbox: SandboxSync) -> None:
    """Check that a request is decided, recorded, gets its secret and is answered.

    The answer is 401, because the API of this server knows another secret.
    """
    done = sandbox.commands.run(f"curl -sS -o /dev/null -w '%{{http_code}}' https://{API}/v1/balance")
    assert "401" == "".join(line.text for line in done.logs.stdout).strip()


def peak(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])


@pytest.mark.parametrize("channel", representatives(CHANNELS, "hostd", "vaultd"))
def test_a_worker_passes_no_descriptor_to_a_daemon(taken: Taken, other: SandboxSync, channel: str) -> None:
    """A descriptor whose close blocks would stop the daemon. The kernel refuses it at the sender."""
    taken.worker.run(FIND.format(channel=CHANNELS[channel]))
    with pytest.raises(Refused) as refused:
        taken.worker.run("socket.send_fds(sock, [b'x'], [0])")
    assert ("PermissionError", 1) == (refused.value.kind, refused.value.number)
    works(other)


@pytest.mark.parametrize("channel", representatives(CHANNELS, "auditd"))
def test_frames_of_small_parts_with_unread_answers_do_not_grow_a_daemon(
    taken: Taken, other: SandboxSync, daemons: dict[str, int], channel: str
) -> None:
    pid = daemons[channel]
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    before = peak(pid)
    taken.worker.run(FIND.format(channel=CHANNELS[channel]))
    taken.worker.begin(FLOOD + UNREAD)
    works(other)
    assert taken.id in [item.sandbox for item in taken.stack.sandboxes()]
    assert taken.worker.finish() < 2000
    assert peak(pid) - before < GROWTH
    assert Path(f"/proc/{pid}").exists()
    works(other)
    taken.removed()


@pytest.mark.parametrize("channel", representatives(("auditd", "vaultd"), "vaultd"))
def test_a_frame_of_small_parts_costs_a_worker_its_channel(
    taken: Taken, other: SandboxSync, daemons: dict[str, int], channel: str
) -> None:
    pid = daemons[channel]
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    before = peak(pid)
    taken.worker.run(FIND.format(channel=CHANNELS[channel]))
    assert taken.worker.run(FLOOD + SMALL) in (errno.EPIPE, errno.ECONNRESET)
    assert peak(pid) - before < GROWTH
    works(other)
    taken.removed()


@pytest.mark.parametrize(
    "digest",
    [
        "None",
        "'0' * 64",
        *(
            pytest.param(digest, marks=pytest.mark.extended)
            for digest in ("''", "[]", "'x' * 1000000", "{'a': [[]] * 1000}", "7")
        ),
    ],
)
def test_a_worker_that_confirms_something_else_is_replaced(taken: Taken, other: SandboxSync, digest: str) -> None:
    taken.worker.run(f"""
import wire.serving
wire.serving.parameters = lambda answer: {{"digest": {digest}}}
""")
    with pytest.raises(StackError, match="did not confirm"):
        taken.configure()
    states = {item.sandbox: item for item in taken.stack.sandboxes()}
    assert taken.record()["compiled"]["digest"] == states[taken.id].policy
    taken.worker.close()
    former, taken.worker = taken.worker.pid, taken.stack.hostile(taken.id)
    assert former != taken.worker.pid
    works(taken.sandbox)
    taken.removed()


SILENT = """
import threading, time
loop = process._control._reader.get_loop()
loop.call_soon_threadsafe(time.sleep, 3600)
def beat():
    while True:
        process._ledger.beat()
        time.sleep(0.01)
threading.Thread(target=beat, daemon=True).start()
"""
SPINNING = """
import time
loop = process._control._reader.get_loop()
def spin():
    while True:
        process._ledger.beat()
loop.call_soon_threadsafe(spin)
"""


@pytest.mark.parametrize("code", [SILENT, SPINNING])
def test_a_worker_that_pretends_to_work_does_not_outlive_a_decision(taken: Taken, code: str) -> None:
    """The worker changes its ledger constantly. hostd answers within its caller's timeout and kills the worker."""
    taken.worker.run(code)
    with pytest.raises(StackError, match="did not confirm"):
        taken.configure(decided=True)
    taken.worker.close()
    former, taken.worker = taken.worker.pid, taken.stack.hostile(taken.id)
    assert former != taken.worker.pid
    taken.removed()


def test_a_removal_does_not_wait_for_a_worker_that_holds_up_a_configuration(taken: Taken) -> None:
    """The removal ends the configuration that waits for the worker; it does not wait for the configuration."""
    ends: list[str] = []
    taken.worker.run(SILENT)

    def configure() -> None:
        try:
            taken.configure()
        except (StackError, FileNotFoundError) as error:
            ends.append(str(error))

    waiting = threading.Thread(target=configure)
    waiting.start()
    taken.removed()
    waiting.join()
    assert 1 == len(ends)


def test_an_answer_of_a_worker_to_nothing_costs_it_its_life(taken: Taken, other: SandboxSync) -> None:
    former = taken.worker
    former.begin(  # the agent's own answer may no longer arrive
        FIND.format(channel=CHANNELS["hostd"])
        + """
body = b'{"id":123456,"ok":{}}'
sock.sendall(struct.pack("!I", len(body)) + body)
"""
    )
    taken.worker = taken.stack.hostile(taken.id)
    former.close()
    assert former.pid != taken.worker.pid
    works(other)


@pytest.mark.parametrize(("channel", "ended"), [("audit", "_audit._client"), ("vault", "_state.vault._wire")])
def test_a_worker_whose_channel_was_ended_gets_a_new_one(taken: Taken, channel: str, ended: str) -> None:
    """A daemon ends a channel, for example after a late confirmation of a revocation. The sandbox works again."""
    works(taken.sandbox)
    taken.worker.run(f"former = process.{ended}; former._reader.get_loop().call_soon_threadsafe(former._shut)")
    deadline = time.monotonic() + 30
    while not taken.worker.run(f"value = process.{ended} is not former and not process.{ended}.closed.is_set()"):
        assert time.monotonic() < deadline
    works(taken.sandbox)
    assert taken.worker.pid == taken.stack.inspect(taken.id).worker_pid


def test_a_serve_that_hangs_is_replaced(compromised: CompromisedStack) -> None:
    """The stopped process is alive and its connections are open. A new process answers calls again."""
    serve = compromised.hostile("serve")
    assert compromised.healthy()
    compromised.ask(Ping())
    stop(serve.pid)
    serve.close()
    after = compromised.hostile("serve")
    assert serve.pid != after.pid
    after.close()
    deadline = time.monotonic() + 60
    while not compromised.healthy():
        assert time.monotonic() < deadline
