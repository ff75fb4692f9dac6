"""hostd with a real dockerd, runc, runsc, auditd and vaultd; compiler, zygote and worker are `runtimes/standin.py`.

`./run test` names a root file system as tar (SALLYPORT_BASE_IMAGE) and a current runsc (SALLYPORT_RUNSC).
It tests `runtimes/sandbox.py` and `runtimes/sandboxes.py`.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import docker
import docker.errors
import pytest

import wire
from runtimes.engine.docker import LABEL
from runtimes.net import netns
from runtimes.net.slot_pool import AHEAD
from runtimes.process.cgroups import Cgroups
from testbed.traces import alive, cookie_of
from tests.conftest import ON_RUNC, representatives
from tests.runtimes.standin import digest
from tests.runtimes.test_spec import MEMORY, UIDS
from tests.stacks import scratch
from tests.stopping import stop
from tests.system.test_watch_cuts_off import guards
from vault import keyring
from wire.api import vaultd
from wire.api.hostd import (
    Configure,
    DescribeImage,
    Doctor,
    HostSandboxState,
    Images,
    Inspect,
    Inspected,
    Launch,
    List,
    Listed,
    PolicyInForce,
    Remove,
    Removed,
    Runtime,
)
from wire.blocking import BlockingClient
from wire.operations import Ping, Request

pytestmark = [pytest.mark.system, pytest.mark.faults]

_ROOT = Path(__file__).resolve().parents[2]
_ids = itertools.count(1)
PATIENCE = 60.0
NO_POLICY = ("", "null", "[]", "{", "nothing")


class Hostd:
    """A separate hostd, used through its socket."""

    def __init__(self, directory: Path, data_root: Path, tar: Path) -> None:
        self.run = directory / "run"
        self.upstream = directory / "upstream"
        self.directory = directory
        """A daemon ends when a worker is attached to it while `NAME.brittle` exists."""
        netns.create(self.upstream, {})
        state, uids = directory / "state", UIDS
        for part, owner in (("audit", uids.auditd), ("vault", uids.vaultd)):
            (state / part).mkdir(mode=0o700, parents=True)
            os.chown(state / part, owner, owner)
        keyring.create(directory / "master-key", (uids.vaultd, uids.vaultd))
        configs: dict[str, dict[str, Any]] = {
            "auditd": {"directory": str(state / "audit"), "uids": [0]},
            "vaultd": {
                "directory": str(state / "vault"),
                "uids": [0],
                "master_key_file": str(directory / "master-key"),
            },
            "compiler": {"kind": "compiler"},
            "zygote": {"kind": "zygote"},
        }
        processes = []
        for name, content in configs.items():
            config = directory / f"{name}.json"
            config.write_text(json.dumps(content))
            module = "tests.runtimes.standin" if "kind" in content else "tests.runtimes.brittle"
            processes.append({"name": name, "module": module, "config": str(config)})
        host = {
            "run_dir": str(self.run),
            "state_dir": str(state),
            "python": sys.executable,
            "upstream_netns": str(self.upstream),
            "docker_socket": str(self.run / "docker.sock"),
            "dockerd": {
                "binary": shutil.which("dockerd") or "/usr/sbin/dockerd",
                "data_root": str(data_root),
                "exec_root": str(self.run / "docker"),
                "pidfile": str(self.run / "docker.pid"),
                "log": str(directory / "dockerd.log"),
            },
            "registries": {"allowed": [], "secrets": {}, "max_bytes": 1 << 30, "skopeo": "/usr/bin/skopeo"},
            "images": [{"name": "sallyport/test:1", "tar": str(tar), "env": {"PLACE": "http://127.0.0.1:1/a b"}}],
            "runsc": os.environ["SALLYPORT_RUNSC"],
            "runc": shutil.which("runc") or "/usr/sbin/runc",
            "execd": os.environ["SALLYPORT_EXECD"],
            "upstream_roots": "/etc/ssl/certs/ca-certificates.crt",
            "dns_upstreams": ["10.9.9.9:53"],
            "allowed_addresses": ["10.7.0.0/16"],
            "host_addresses": {"fixed.example": ["10.7.0.1"]},
            "gateway_limits": {"idle": 77},
            "maxima": {
                "cpu_nanos": 2 * 10**9,
                "memory_bytes": 2**30,
                "pids": 128,
                "disk_bytes": 128 << 20,
                "sandboxes": 8,
            },
            "snapshots": {"count": 100, "bytes_each": 1 << 30, "bytes_total": 1 << 32},
            "launch_concurrency": 4,
            "volumes": {"allowed_host_paths": [], "default_bytes": 1 << 30, "max_bytes": 1 << 34, "max_count": 4},
            "processes": processes,
            "uids": UIDS.model_dump(),
            "listen": None,
            "runtimes": ["runc", "runsc"],
            "disk_limits": True,
            "network_bandwidth": None,
            "disk_bandwidth": None,
            "memory": MEMORY,
            "supplies": {"environment": [], "directories": [], "credential": None},
        }
        config = directory / "host.json"
        config.write_text(json.dumps(host))
        self.log = directory / "hostd.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "runtimes.hostd", str(config)], cwd=_ROOT, stdout=log, stderr=log
            )
        self._client: BlockingClient | None = None

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 300
        while True:
            assert self.process.poll() is None, self.log.read_text()
            try:
                self._client = BlockingClient(self.run / "hostd.sock", 0, PATIENCE)
            except OSError:
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.1)
                continue
            self.ask(Ping())
            return

    def ask[Answer](self, request: Request[Answer]) -> Answer:
        assert self._client is not None
        return self._client.ask(request)

    def raw(self, op: str, **parameters: Any) -> None:
        """Send a request that hostd's typed clients cannot send.

        Raises:
            wire.RemoteError: it was refused.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(PATIENCE)
            sock.connect(str(self.run / "hostd.sock"))
            wire.send(sock, {"id": 1, "op": op, **parameters})
            answer = wire.receive(sock)
        assert answer is not None
        if "error" in answer[0]:
            raise wire.RemoteError(answer[0]["error"]["code"], answer[0]["error"]["message"])

    def configure(self, sandbox: str, selection: dict[str, Any], *, decided: bool = False) -> PolicyInForce:
        return self.ask(Configure(sandbox, json.dumps(selection), decided))

    def vault[Answer](self, request: Request[Answer]) -> Answer:
        """Send a request to vaultd, as serve does. Wait while vaultd restarts."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                with BlockingClient(self.run / "vault.sock", UIDS.vaultd, PATIENCE) as client:
                    return client.ask(request)
            except OSError:
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.05)

    def launch(self, runtime: str, **changes: Any) -> str:
        sandbox = f"sbx-{runtime}-{next(_ids)}"
        opened = self.vault(vaultd.OpenSandbox(sandbox, sandbox, names=()))
        launch: dict[str, Any] = {
            "sandbox": sandbox,
            "runtime": Runtime(runtime),
            "image": "sallyport/test:1",
            "entrypoint": ("sleep", "1000"),
            "env": {},
            "cpu_nanos": 10**9,
            "memory_bytes": 2**28,
            "pids": 64,
            "disk_bytes": 64 << 20,
            "isolation": False,
            "held": False,
            "ca_root": opened.root_pem,
            "execd_token_sha256": "0" * 64,
            "selection": json.dumps({"note": "first"}),
            "snapshot": None,
        }
        self.ask(Launch(**(launch | changes)))
        return sandbox

    def state(self, sandbox: str) -> HostSandboxState:
        return next(state for state in self.ask(List()).sandboxes if state.sandbox == sandbox)

    def wait_generation(self, sandbox: str, generation: int) -> HostSandboxState:
        deadline = time.monotonic() + PATIENCE
        while True:
            state = self.state(sandbox)
            if state.generation >= generation and state.worker_pid is not None:
                return state
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def standing(self) -> dict[int, Path]:
        """Return the numbers of the slots made ahead, after all of them have existed for a second, and their gateways'
        files.
        """
        began = since = time.monotonic()
        former: dict[int, Path] = {}
        while len(former) != AHEAD or time.monotonic() < since + 1:
            assert time.monotonic() < began + 30, self.log.read_text()
            time.sleep(0.1)
            taken = {state.slot for state in self.ask(List()).sandboxes}
            made = {int(path.name.split("-")[0]): path for path in (self.run / "netns").glob("*-gw")}
            ready = {number: path for number, path in made.items() if number not in taken}
            if ready != former:
                former, since = ready, time.monotonic()
        return former

    def daemon(self, name: str) -> int:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if str(self.run / "config" / f"{name}.json").encode() in words:
                    return int(entry.name)
        raise AssertionError(f"{name} is not running")

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=180)
        netns.delete(self.upstream)


class Engine:
    """Use Docker as another program beside Sallyport."""

    def __init__(self, hostd: Hostd) -> None:
        self._socket = hostd.run / "docker.sock"
        self.api: Any = docker.APIClient(base_url=f"unix://{self._socket}", version="auto", timeout=60)

    def execute(self, sandbox: str, *command: str, options: Sequence[str] = ()) -> tuple[int, str]:
        """Run a program; return its status and output.

        This uses Docker's own client. docker-py loses what a program has printed before the head of Docker's answer is
        read.
        """
        done = subprocess.run(
            ["docker", "-H", f"unix://{self._socket}", "exec", *options, f"sallyport-{sandbox}", *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        return done.returncode, done.stdout + done.stderr

    def python(self, sandbox: str, code: str) -> str:
        """Run a program; return what it printed."""
        status, output = self.execute(sandbox, "python3", "-c", code)
        assert 0 == status, output
        return output.strip()


@pytest.fixture(scope="module")
def hostd() -> Iterator[Hostd]:
    with (
        tempfile.TemporaryDirectory(prefix=f"sallyport-rt-{os.getpid()}-", dir="/run") as run,
        scratch("rt") as data,
    ):
        os.chmod(run, 0o755)  # noqa: S103 - the container's root reads what lies below
        host = Hostd(Path(run), data / "docker", Path(os.environ["SALLYPORT_BASE_IMAGE"]))
        try:
            host.wait_ready()
            yield host
        finally:
            host.close()


@pytest.fixture(scope="module")
def engine(hostd: Hostd) -> Iterator[Engine]:
    made = Engine(hostd)
    yield made
    made.api.close()


@pytest.fixture(params=["runc", "runsc"])
def sandbox(request: pytest.FixtureRequest, hostd: Hostd) -> Iterator[str]:
    made = hostd.launch(request.param)
    yield made
    assert Removed(()) == hostd.ask(Remove(made))


_DIAL = """
import socket
with socket.create_connection(({address!r}, {port}), timeout=30) as s:
    print(s.getsockname()[0], s.makefile().read())
"""


_RECEIVED = """
import socket
received = b""
try:
    with socket.create_connection(({address!r}, {port}), timeout=10) as s:
        s.settimeout(1)
        received = s.recv(1)
except OSError:
    pass
print(received)
"""


def test_a_sandbox_has_one_interface_with_the_one_address(hostd: Hostd, engine: Engine, sandbox: str) -> None:
    assert ["eth0", "lo"] == list(hostd.ask(Inspect(sandbox)).network.links)
    names = "import socket; print(sorted(name for _, name in socket.if_nameindex()))"
    assert "['eth0', 'lo']" == engine.python(sandbox, names)
    assert engine.python(sandbox, "print(open('/etc/resolv.conf').read())").startswith("nameserver 192.0.2.1")


def test_every_dial_arrives_at_this_sandboxes_worker(engine: Engine, sandbox: str) -> None:
    for address, port in (("8.8.8.8", 443), ("10.0.0.1", 22), ("169.254.169.254", 80)):
        said = engine.python(sandbox, _DIAL.format(address=address, port=port))
        assert f"192.0.2.2 {sandbox} 1 {address}:{port} first" == said


def test_udp_icmp_and_ipv6_get_no_answer(engine: Engine, sandbox: str) -> None:
    code = """
import socket
def quiet(family, kind, protocol, send):
    try:
        with socket.socket(family, kind, protocol) as s:
            s.settimeout(0.5)
            send(s)
            return ('answer', s.recv(10))
    except OSError as error:
        return 'quiet'
print(quiet(socket.AF_INET, socket.SOCK_DGRAM, 0, lambda s: s.sendto(b'x', ('8.8.8.8', 443))),
      quiet(socket.AF_INET, socket.SOCK_DGRAM, 1, lambda s: s.sendto(b'\\x08\\0\\0\\0\\0\\0\\0\\0', ('192.0.2.1', 0))),
      quiet(socket.AF_INET, socket.SOCK_RAW, 1, lambda s: s.sendto(b'\\x08\\0\\0\\0\\0\\0\\0\\0', ('192.0.2.1', 0))),
      quiet(socket.AF_INET6, socket.SOCK_STREAM, 0, lambda s: s.connect(('2001:db8::1', 443))))
"""
    assert "quiet quiet quiet quiet" == engine.python(sandbox, code)


def test_exec_has_no_capability_beyond_the_list(engine: Engine, sandbox: str) -> None:
    status, output = engine.execute(sandbox, "grep", "-E", "^(CapBnd|CapEff|NoNewPrivs)", "/proc/self/status")
    assert (0, {"00000000000004fb", "1"}) == (status, {line.split()[1] for line in output.splitlines()})
    status, output = engine.execute(sandbox, "id", options=["--privileged"])
    assert 0 != status
    assert "uid=" not in output
    assert "capabilities" in output


def test_no_client_can_start_a_sandbox_again(hostd: Hostd, engine: Engine, sandbox: str) -> None:
    engine.api.kill(f"sallyport-{sandbox}")
    engine.api.wait(f"sallyport-{sandbox}", timeout=60)
    with pytest.raises(docker.errors.APIError, match="no launch plan"):
        engine.api.start(f"sallyport-{sandbox}")
    assert ("exited", 137) == ((ended := hostd.state(sandbox)).state, ended.exit_code)


def test_a_docker_that_hangs_holds_up_no_list(hostd: Hostd) -> None:
    """Each call is answered after a while. Then everything is as before."""
    sandbox = hostd.launch("runc")
    try:
        dockerd = int((hostd.run / "docker.pid").read_text())
        stop(dockerd)
        try:
            said = []
            for _ in range(2):  # A look that began before the stop can have the first answer.
                said.append(hostd.state(sandbox).state)
            assert "unknown" == said[-1]
        finally:
            os.kill(dockerd, signal.SIGCONT)
        deadline = time.monotonic() + PATIENCE
        while hostd.state(sandbox).state != "running":
            assert time.monotonic() < deadline
    finally:
        residue = hostd.ask(Remove(sandbox))
    assert Removed(()) == residue


@pytest.mark.parametrize("runtime", ["sallyport-runc", "sallyport-runsc"])
def test_a_container_without_a_plan_does_not_start(engine: Engine, runtime: str) -> None:
    config = engine.api.create_host_config(runtime=runtime, network_mode="none")
    made = engine.api.create_container("sallyport/test:1", ["sleep", "9"], host_config=config)
    try:
        with pytest.raises(docker.errors.APIError, match="no launch plan"):
            engine.api.start(made["Id"])
    finally:
        engine.api.remove_container(made["Id"], force=True)


@pytest.mark.parametrize("sandbox", ON_RUNC, indirect=True)
def test_a_killed_worker_is_replaced_with_the_same_configuration(hostd: Hostd, engine: Engine, sandbox: str) -> None:
    second = {"note": "second"}
    assert PolicyInForce(digest(second)) == hostd.configure(sandbox, second)
    os.kill(hostd.state(sandbox).worker_pid, signal.SIGKILL)
    hostd.wait_generation(sandbox, 2)
    said = engine.python(sandbox, _DIAL.format(address="1.2.3.4", port=5))
    assert f"192.0.2.2 {sandbox} 2 1.2.3.4:5 second" == said


def test_a_worker_that_is_silent_is_replaced(hostd: Hostd, engine: Engine) -> None:
    """A stopped worker never ends itself. Its sandbox is closed until the worker is ended, which the liveness check
    causes.
    """
    sandbox = hostd.launch("runc")
    stopped = hostd.state(sandbox).worker_pid
    stop(stopped)
    assert "b''" == engine.python(sandbox, _RECEIVED.format(address="1.2.3.4", port=5))
    hostd.wait_generation(sandbox, 2)
    with pytest.raises(ProcessLookupError):
        os.kill(stopped, 0)
    said = engine.python(sandbox, _DIAL.format(address="1.2.3.4", port=5))
    assert f"192.0.2.2 {sandbox} 2 1.2.3.4:5 first" == said
    assert Removed(()) == hostd.ask(Remove(sandbox))


@pytest.mark.parametrize("sandbox", ON_RUNC, indirect=True)
@pytest.mark.parametrize("stopped", representatives(("auditd", "vaultd", "compiler"), "auditd"))
def test_a_daemon_that_is_silent_is_replaced(hostd: Hostd, sandbox: str, stopped: str) -> None:
    """A stopped daemon never ends itself. Its sandbox's worker stays alive, and gets a channel to the next daemon."""
    worker = hostd.state(sandbox).worker_pid
    former = hostd.daemon(stopped)
    stop(former)
    deadline = time.monotonic() + PATIENCE
    while True:
        if not Path(f"/proc/{former}").exists():
            break
        assert time.monotonic() < deadline, hostd.log.read_text()
        time.sleep(0.05)
    assert f"{stopped} hangs" in hostd.log.read_text()
    assert worker == hostd.state(sandbox).worker_pid


@pytest.mark.parametrize("sandbox", ON_RUNC, indirect=True)
def test_a_refused_configuration_changes_nothing(hostd: Hostd, engine: Engine, sandbox: str) -> None:
    with pytest.raises(wire.RemoteError, match="gateway: told to refuse"):
        hostd.configure(sandbox, {"refuse": True})
    with pytest.raises(wire.RemoteError, match="invalid"):
        hostd.raw("configure", sandbox=sandbox, selection="{}", decided=False, gateway={"sandbox": sandbox})
    for answer in NO_POLICY:
        with pytest.raises(wire.RemoteError, match="the compiler's answer is no policy"):
            hostd.configure(sandbox, {"answer": answer}, decided=True)
    os.kill(hostd.state(sandbox).worker_pid, signal.SIGKILL)
    hostd.wait_generation(sandbox, 2)
    assert engine.python(sandbox, _DIAL.format(address="1.2.3.4", port=5)).endswith("first")


def test_a_decided_configuration_is_in_force_though_the_worker_does_not_confirm_it(
    hostd: Hostd, engine: Engine
) -> None:
    """The worker that replaces a silent one starts with it. Without `decided` it starts with the former one."""
    for decided, expected in ((True, "second"), (False, "first")):
        sandbox = hostd.launch("runc")
        stop(hostd.state(sandbox).worker_pid)
        with pytest.raises(wire.RemoteError, match="did not confirm"):
            hostd.configure(sandbox, {"note": "second"}, decided=decided)
        hostd.wait_generation(sandbox, 2)
        assert engine.python(sandbox, _DIAL.format(address="1.2.3.4", port=5)).endswith(expected)
        assert Removed(()) == hostd.ask(Remove(sandbox))


@pytest.mark.parametrize("sandbox", ON_RUNC, indirect=True)
def test_a_worker_that_refuses_a_decided_configuration_is_ended(hostd: Hostd, engine: Engine, sandbox: str) -> None:
    """The former configuration has ended. The sandbox is closed until a worker accepts a configuration."""
    worker = hostd.state(sandbox).worker_pid
    with pytest.raises(wire.RemoteError, match="told to refuse"):
        hostd.configure(sandbox, {"refuse": True}, decided=True)
    deadline = time.monotonic() + PATIENCE
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "b''" == engine.python(sandbox, _RECEIVED.format(address="1.2.3.4", port=5))
    with contextlib.suppress(wire.RemoteError):  # There may be no worker yet.
        hostd.configure(sandbox, {"note": "third"}, decided=True)
    hostd.wait_generation(sandbox, 2)
    assert engine.python(sandbox, _DIAL.format(address="1.2.3.4", port=5)).endswith("third")


@pytest.mark.parametrize("sandbox", ON_RUNC, indirect=True)
@pytest.mark.parametrize(("killed", "expected"), [("auditd", "audit, vault"), ("vaultd", "vault")])
def test_a_worker_lives_on_with_a_new_channel_when_a_daemon_died(
    hostd: Hostd, engine: Engine, sandbox: str, killed: str, expected: str
) -> None:
    """Without auditd vaultd ends too. The worker itself reports which channels it was given."""
    before = hostd.state(sandbox)
    os.kill(hostd.daemon(killed), signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    said = ""
    while sorted(said.partition(" first ")[2].split(", ")) != expected.split(", "):  # They come back in any order.
        assert time.monotonic() < deadline, said
        said = engine.python(sandbox, _DIAL.format(address="1.2.3.4", port=5))
    after = hostd.state(sandbox)
    assert (before.worker_pid, before.generation) == (after.worker_pid, after.generation)


@pytest.mark.parametrize("sandbox", ON_RUNC, indirect=True)
@pytest.mark.parametrize("name", ["auditd", pytest.param("vaultd", marks=pytest.mark.extended)])
def test_a_worker_outlives_a_daemon_that_dies_again_and_again(
    hostd: Hostd, engine: Engine, sandbox: str, name: str
) -> None:
    """Each new process answers, and ends when a worker is attached to it. The worker refuses in the meantime."""
    before = hostd.state(sandbox)
    brittle = hostd.directory / f"{name}.brittle"
    brittle.touch()
    try:
        former = killed = hostd.daemon(name)
        os.kill(killed, signal.SIGKILL)
        deadline, deaths = time.monotonic() + PATIENCE, 0
        while deaths < 3:
            assert time.monotonic() < deadline, hostd.log.read_text()
            with contextlib.suppress(AssertionError):
                found = hostd.daemon(name)
                deaths, former = deaths + (found != former), found
            time.sleep(0.02)
    finally:
        brittle.unlink()
    _wait_for_channel(engine, sandbox, {"auditd": "audit", "vaultd": "vault"}[name])
    after = hostd.state(sandbox)
    assert (before.worker_pid, before.generation) == (after.worker_pid, after.generation)


def _wait_for_channel(engine: Engine, sandbox: str, channel: str) -> None:
    """Until the worker reports that it was given one."""
    deadline, said = time.monotonic() + PATIENCE, ""
    while channel not in said.partition(" first ")[2].split(", "):
        assert time.monotonic() < deadline, said
        said = engine.python(sandbox, _DIAL.format(address="1.2.3.4", port=5))


@pytest.mark.parametrize("sandbox", ON_RUNC, indirect=True)
def test_a_worker_that_takes_no_new_channel_is_born_again(hostd: Hostd, engine: Engine, sandbox: str) -> None:
    deaf = {"deaf": True, "note": "first"}
    assert PolicyInForce(digest(deaf)) == hostd.configure(sandbox, deaf)
    os.kill(hostd.daemon("auditd"), signal.SIGKILL)
    assert "running" == hostd.wait_generation(sandbox, 2).state
    deadline = time.monotonic() + PATIENCE
    said = ""
    while "1.2.3.4:5 first" not in said:
        assert time.monotonic() < deadline, said
        with contextlib.suppress(AssertionError):  # It is refused until the new one listens.
            said = engine.python(sandbox, _DIAL.format(address="1.2.3.4", port=5))


def _namespaces(inspected: Inspected) -> dict[int, int]:
    """A sandbox's network namespaces: inodes, which other namespaces can get later, and what distinguishes those."""
    return {
        os.stat(path).st_ino: cookie_of(path)
        for path in (inspected.network.sandbox_netns, inspected.network.gateway_netns)
    }


def _alive(namespaces: dict[int, int]) -> list[int]:
    return [inode for inode, cookie in namespaces.items() if alive(inode, cookie)]


def _left(hostd: Hostd, engine: Engine, inspected: Inspected, namespaces: dict[int, int]) -> list[str]:
    sandbox = inspected.state.sandbox
    cgroups = Cgroups(str(hostd.run))
    found: list[Any] = [*_alive(namespaces), *(hostd.run / "plans").iterdir()]
    hostd.standing()  # None is being created then.
    found += [path for path in (hostd.run / "netns").iterdir() if not os.path.ismount(path)]
    found += [path for root in cgroups.hierarchies.roots for path in root.glob(f"**/*{sandbox}*")]
    found += [path for path in hostd.run.glob("**/*") if sandbox in path.name]
    found += engine.api.containers(all=True, filters={"label": f"{LABEL}={sandbox}"})
    return [str(item) for item in found]


@pytest.mark.parametrize("runtime", ["runc", "runsc"])
def test_removal_leaves_nothing(hostd: Hostd, engine: Engine, runtime: str) -> None:
    sandbox = hostd.launch(runtime)
    inspected = hostd.ask(Inspect(sandbox))
    namespaces = _namespaces(inspected)
    assert list(inspected.network.inodes) == sorted(_alive(namespaces))
    assert [] != _left(hostd, engine, inspected, namespaces)
    assert Removed(()) == hostd.ask(Remove(sandbox))
    assert [] == _left(hostd, engine, inspected, namespaces)
    with pytest.raises(ProcessLookupError):
        os.kill(inspected.state.worker_pid, 0)
    assert Removed(()) == hostd.ask(Remove(sandbox))


def test_a_launch_that_fails_leaves_nothing(hostd: Hostd, engine: Engine) -> None:
    failing: dict[str, dict[str, Any]] = {
        "gateway": {"selection": json.dumps({"refuse": True})},
        "unavailable": {"selection": json.dumps({"answer": {}})},
        "unknown_image": {"image": "no/such:1"},
    }
    for code, changes in failing.items():
        with pytest.raises(wire.RemoteError, match=code):
            hostd.launch("runc", **changes)
    assert Listed(()) == hostd.ask(List())
    assert 2 * len(hostd.standing()) == len(list((hostd.run / "netns").iterdir()))
    assert [] == list((hostd.run / "plans").iterdir())
    assert [] == [*(hostd.run / "ingress").iterdir(), *(hostd.run / "sandboxes").iterdir()]


def test_the_guard_survives_a_flush_and_comes_back_after_a_kill(hostd: Hostd) -> None:
    def table() -> str:
        return netns.list_rules(hostd.upstream, "table", "inet", "sallyport_guard")

    assert "700001000-700005094" in table()
    netns.load_rules(hostd.upstream, "flush ruleset\n")
    assert "700001000-700005094" in table()
    (guard,) = guards(hostd.upstream)
    os.kill(guard, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            assert "flags owner" in table()
            return
        except netns.NftError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_runc_opens_no_door_of_the_kernel(hostd: Hostd, engine: Engine) -> None:
    sandbox = hostd.launch("runc")
    code = """
import ctypes, socket
def outcome(call):
    try:
        call().close()
        return 'open'
    except OSError as error:
        return error.errno
libc = ctypes.CDLL(None, use_errno=True)
def number(n, *arguments):
    result = libc.syscall(n, *arguments)
    return ctypes.get_errno() if result < 0 else 'open'
print([outcome(lambda f=f: socket.socket(f, socket.SOCK_STREAM)) for f in (1, 2, 10)])
print(outcome(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)))
print([outcome(lambda p=p: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, p)) for p in (2, 9, 12, 15, 16)])
print([outcome(lambda f=f: socket.socket(f, socket.SOCK_STREAM)) for f in (40, 38, 44, 17, 21, 30)])
print([number(n, 0, 0, 0, 0, 0) for n in (425, 426, 427, 321, 272, 308, 101, 250, 323, 298, 165)])
"""
    try:
        assert [
            "['open', 'open', 'open']",
            "open",
            "[1, 1, 1, 1, 1]",
            "[1, 1, 1, 1, 1, 1]",
            "[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]",
        ] == engine.python(sandbox, code).splitlines()
    finally:
        hostd.ask(Remove(sandbox))


def test_what_people_run_in_sandboxes_runs_under_the_filter(hostd: Hostd, engine: Engine) -> None:
    sandbox = hostd.launch("runc")
    try:
        work = "import subprocess, threading, asyncio, multiprocessing, tempfile; tempfile.TemporaryFile(); print(1)"
        assert "1" == engine.python(sandbox, work)
        assert 0 == engine.execute(sandbox, "bash", "-c", "set -e; ls -l / | sort | wc -l; (sleep 0.1 &); mkfifo /f")[0]
        programs = ("curl", "git", "pip", "node")
        assert dict.fromkeys(programs, 0) == {
            program: engine.execute(sandbox, program, "--version")[0] for program in programs
        }
    finally:
        hostd.ask(Remove(sandbox))


def test_the_doctor_finds_this_host_well(hostd: Hostd) -> None:
    assert [] == [check for check in hostd.ask(Doctor()).checks if not check.ok]


def test_an_image_has_the_environment_it_was_given(hostd: Hostd) -> None:
    """In addition to the usual search path."""
    env = hostd.ask(DescribeImage("sallyport/test:1")).env
    assert ["PATH", "PLACE"] == sorted(item.split("=")[0] for item in env)
    assert "PLACE=http://127.0.0.1:1/a b" in env


def test_the_images_that_a_sandbox_may_have_are_listed(hostd: Hostd) -> None:
    """With the names of a create call."""
    names = hostd.ask(Images()).images
    assert "sallyport/test:1" in names
    assert all(hostd.ask(DescribeImage(name)).id for name in names)


def test_what_hostd_does_not_know_is_refused(hostd: Hostd) -> None:
    with pytest.raises(wire.RemoteError, match="unknown_image"):
        hostd.ask(DescribeImage("no/such:1"))
    with pytest.raises(wire.RemoteError, match="unknown_op"):
        hostd.raw("shell")


def test_a_launch_takes_a_slot_that_stands(hostd: Hostd) -> None:
    """One more than exist are launched. Each slot is used once."""
    ready = hostd.standing()
    names = [hostd.launch("runc") for _ in range(AHEAD + 1)]
    try:
        used = {hostd.state(name).slot for name in names}
        assert ready.keys() < used
        assert len(names) == len(used)
        assert used.isdisjoint(hostd.standing())
    finally:
        for name in names:
            hostd.ask(Remove(name))


def _another_namespace(path: Path) -> None:
    netns.delete(path)
    netns.create(path, {})


CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "flushed": ("ruleset", lambda path: netns.load_rules(path, "flush ruleset\n")),
    "more rules": ("ruleset", lambda path: netns.load_rules(path, "add table inet more\n")),
    "forwarding": (
        "setting",
        lambda path: netns.inside(path, lambda: Path("/proc/sys/net/ipv4/ip_forward").write_text("1")),
    ),
    "link": (
        "link",
        lambda path: netns.inside(path, lambda: _ip("link", "add", "a0", "type", "veth", "peer", "name", "a1")),
    ),
    "address": ("address", lambda path: netns.inside(path, lambda: _ip("addr", "add", "192.0.2.9/32", "dev", "lo"))),
    "replaced": ("namespace", _another_namespace),
    "gone": ("namespace", netns.delete),
}


@pytest.mark.parametrize("changed", representatives(CHANGES, "flushed", "forwarding", "replaced"))
def test_a_slot_that_was_changed_while_idle_is_reported_and_never_used(
    hostd: Hostd, engine: Engine, changed: str
) -> None:
    rule, change = CHANGES[changed]
    ready = hostd.standing()
    said = len(hostd.log.read_text())
    for path in ready.values():
        change(path)
    name = hostd.launch("runc")
    try:
        assert hostd.state(name).slot not in ready
        assert engine.python(name, _DIAL.format(address="1.2.3.4", port=5)).endswith("1.2.3.4:5 first")
        news = hostd.log.read_text()[said:]
        assert AHEAD == len(re.findall(rf"alarm: host: isolation\.{rule}: a slot made ahead is not used", news)), news
        assert not [
            path for path in ready.values() if path.exists() or path.with_name(f"{path.name[:-3]}-sbx").exists()
        ]
    finally:
        hostd.ask(Remove(name))
    assert 2 * len(hostd.standing()) == len(list((hostd.run / "netns").iterdir()))


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=10)


def test_a_stop_removes_everything(hostd: Hostd) -> None:
    """The last test of this file, because it ends the hostd of the others."""
    inspected = [hostd.ask(Inspect(hostd.launch(runtime))) for runtime in ("runc", "runsc")]
    namespaces = {inode: cookie for one in inspected for inode, cookie in _namespaces(one).items()}
    assert 4 == len(_alive(namespaces))
    hostd.close()
    assert 0 == hostd.process.returncode, hostd.log.read_text()
    assert [] == _alive(namespaces)
    assert str(hostd.run) not in Path("/proc/self/mountinfo").read_text()
    roots = Cgroups(str(hostd.run))
    assert [] == [root / roots.parent for root in roots.hierarchies.roots if (root / roots.parent).exists()]
    assert [] == [
        entry.name
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and str(hostd.run).encode() in _cmdline(entry)
    ]


def _cmdline(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""
