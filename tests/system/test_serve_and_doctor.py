"""`sallyport serve` and `sallyport doctor` on machines that lack something: refusals, remedies, nothing left behind.

Each test has its own server (directories, port, upstream namespace), beside other programs of the machine. It uses the
parts that `./run test` names: SALLYPORT_RUNSC, SALLYPORT_EXECD, SALLYPORT_EMPTY_IMAGE.
It tests `lifecycle/doctor.py`.
"""

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
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from runtimes.engine.dockerd import arguments
from runtimes.net import netns, nft
from runtimes.process.cgroups import Cgroups
from runtimes.spec import DockerdConfig
from testbed.ports import reserve_port
from tests.anyone import as_anyone
from tests.conftest import ON_RUNSC, representatives

pytestmark = [pytest.mark.system, pytest.mark.faults]

ROOT = Path(__file__).resolve().parents[2]
MANAGED = {"managed": True}


def _toml(value: object) -> str:
    match value:
        case dict():
            return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case _:
            return json.dumps(value)


class Machine:
    """The directories and settings of one server, and ways to break them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run = directory / "run"
        self.upstream = directory / "upstream"
        self.port = reserve_port()
        self.path = os.environ["PATH"]
        self.top: dict[str, object] = {
            "state_dir": str(directory / "state"),
            "run_dir": str(self.run),
            "upstream_netns": str(self.upstream),
            "dns_upstreams": ["192.0.2.53:53"],
            "runsc": os.environ["SALLYPORT_RUNSC"],
            "execd": os.environ["SALLYPORT_EXECD"],
        }
        self.docker: dict[str, object] = {
            **MANAGED,
            "data_root": str(directory / "docker"),
            "log": str(directory / "dockerd.log"),
        }
        netns.create(self.upstream, {})

    def without(self, *programs: str) -> None:
        """Remove programs from the PATH: return a directory of links to all the others."""
        bin_ = self.directory / "bin"
        bin_.mkdir()
        for directory in self.path.split(":"):
            for program in Path(directory).iterdir() if Path(directory).is_dir() else ():
                if program.name not in programs and not (bin_ / program.name).is_symlink():
                    (bin_ / program.name).symlink_to(program)
        self.path = str(bin_)

    def broken(self, name: str) -> Path:
        """Return a program that always fails."""
        path = self.directory / "broken" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\necho no such luck >&2\nexit 1\n")
        path.chmod(0o755)
        return path

    def command(self, *words: str) -> list[str]:
        config = self.directory / "sallyport.toml"
        text = [f'[server]\nhost = "127.0.0.1"\nport = {self.port}\n[sallyport]']
        text += [f"{key} = {_toml(value)}" for key, value in self.top.items()]
        text += ["[sallyport.docker]", *(f"{key} = {_toml(value)}" for key, value in self.docker.items())]
        config.write_text("\n".join(text) + "\n")
        return [sys.executable, "-m", "lifecycle.cli", "--config", str(config), *words]

    @property
    def environment(self) -> Mapping[str, str]:
        return os.environ | {"PATH": self.path}

    def sallyport(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words),
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    def refusal(self) -> str:
        """Start the server, which must refuse. Return the line with the reason."""
        done = self.sallyport("serve")
        assert 1 == done.returncode, done.stderr
        lines = [line for line in done.stderr.splitlines() if "cannot run" in line]
        assert 1 == len([line for line in lines if line.endswith("; run: sallyport doctor")]), done.stderr
        assert "Traceback" not in done.stderr
        return lines[-1]

    def doctor(self) -> tuple[int, dict[str, str]]:
        """Run the doctor. Return its status and each failed check's line."""
        done = self.sallyport("doctor")
        lines = done.stdout.splitlines()
        assert all(re.match(r"(ok    |FAIL  )[a-z]+: .", line) for line in lines), done.stdout + done.stderr
        return done.returncode, {line.split()[1][:-1]: line for line in lines if line.startswith("FAIL")}

    @contextmanager
    def serving(self) -> Iterator[None]:
        """The server, which answers. It is ended like by Ctrl-C."""
        log = self.directory / "serve.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                self.command("serve"),
                cwd=ROOT,
                env=self.environment,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
            )
        try:
            self._wait(process, log)
            yield
        finally:
            process.send_signal(signal.SIGINT)
            status = process.wait(timeout=180)
        assert 0 == status, log.read_text()

    def _wait(self, process: subprocess.Popen[bytes], log: Path) -> None:
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            assert process.poll() is None, log.read_text()
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=2).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                time.sleep(0.05)
        raise AssertionError(log.read_text())

    def left(self) -> list[str]:
        """Return everything of the server that still exists: processes, mounts, namespaces, rules, groups."""
        found = [f"process {pid}" for pid in netns.processes(frozenset((netns.inode(self.upstream),)))]
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().decode(errors="replace")
                except OSError:
                    continue
                if f"{self.run}/" in words:
                    found.append(f"process {words!r}")
        points = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        found += [point for point in points if point.startswith((f"{self.run}/", str(self.directory / "docker")))]
        found += [str(path) for path in self.run.glob("netns/*")]
        found += re.findall(nft.GUARD_TABLE, netns.list_rules(self.upstream, "ruleset"))
        groups = Cgroups(str(self.run))
        return found + [str(root) for root in groups.hierarchies.roots if (root / groups.parent).exists()]


@pytest.fixture(name="machine")
def _machine() -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(prefix="sallyport-serve-", dir="/run") as name:
        Path(name).chmod(0o711)
        machine = Machine(Path(name))
        try:
            yield machine
            assert [] == machine.left()
        finally:
            netns.delete(machine.upstream)


def test_a_whole_machine_serves_and_ctrl_c_leaves_nothing(machine: Machine) -> None:
    """The control of every refusal below: the doctor finds no fault, before the start and while it runs."""
    assert (0, {}) == machine.doctor()
    with machine.serving():
        assert [] != machine.left()
        assert (0, {}) == machine.doctor()
    assert [] == machine.left()


@pytest.mark.extended
def test_commands_without_settings_have_those_of_the_running_server(machine: Machine) -> None:
    """Only its run directory is known to them. A check that needs root reports that. Every user can run the others."""
    policy = machine.directory / "policy.yaml"
    policy.write_text("version: 1\npolicies: {agents: {rules: [{id: api, host: api.example}]}}\n")
    policy.chmod(0o644)
    machine.top["policy_file"] = str(policy)
    defaults = machine.directory / "defaults.toml"
    defaults.write_text(f'[sallyport]\nrun_dir = "{machine.run}"\n')
    defaults.chmod(0o644)
    start = [sys.executable, "-m", "lifecycle.command", "--defaults", str(defaults)]

    def sallyport(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*start, *words],
            cwd=ROOT,
            env=machine.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    def by_anyone(*words: str) -> subprocess.CompletedProcess[str]:
        return as_anyone("env", "-C", ROOT, *start, *words)

    assert "no policy file" in sallyport("policy", "check").stderr
    with machine.serving():
        log = (machine.directory / "serve.log").read_text()
        assert f"sallyport: address: http://127.0.0.1:{machine.port}\nsallyport: policy file: {policy}\n" in log
        version = httpx.get(f"http://127.0.0.1:{machine.port}/version", timeout=30).json()
        assert {"version": "1.1.1", "product": "Sallyport", "contract": "OpenSandbox 1.1.1"}.items() <= version.items()
        for command in (sallyport, by_anyone):
            assert f"{policy}: good" in command("policy", "check").stdout
            assert "may be resolved" in command("policy", "explain", "--host", "api.example").stdout
        assert 0 == sallyport("vault", "list").returncode
        assert "ok: " in sallyport("audit", "verify").stdout
        assert "ok    runsc: " in (found := sallyport("doctor").stdout), found
        assert re.search(r"^ok    runsc: \S+: runsc.* \S*[0-9]", found, re.MULTILINE)
        assert f"ok    policy: {policy}: good" in found
        for words in (("vault", "list"), ("audit", "verify"), ("audit", "tail"), ("doctor",)):
            done = by_anyone(*words)
            assert 0 != done.returncode
            assert "as root" in done.stdout + done.stderr, (words, done)
            assert "Traceback" not in done.stderr
    assert "no policy file" in sallyport("policy", "check").stderr
    assert "the server is not running: ./run serve" in sallyport("vault", "list").stderr


PHASES = ("runtimes/sallyport-runsc", "docker.pid", "config/guard.nft", "config/vaultd.pid")


@pytest.mark.parametrize("reached", representatives(PHASES, "docker.pid", "config/vaultd.pid"))
def test_ctrl_c_while_it_starts_leaves_nothing(machine: Machine, reached: str) -> None:
    """In every phase: before dockerd, while dockerd starts, at the guard, at the daemons."""
    log = machine.directory / "serve.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            machine.command("serve"),
            cwd=ROOT,
            env=machine.environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    deadline = time.monotonic() + 180
    while not (machine.run / reached).exists():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    assert 0 == process.wait(timeout=180), log.read_text()
    assert "Traceback" not in log.read_text()
    assert [] == machine.left()


def test_without_nft_nothing_is_started(machine: Machine) -> None:
    machine.without("nft")
    assert "nft: nft is missing" in machine.refusal()
    status, failed = machine.doctor()
    assert (1, True) == (status, {"nft", "slot", "guard"} <= set(failed))
    assert "install the Debian packages nftables" in failed["nft"]


@pytest.mark.extended
def test_with_an_nft_that_fails_nothing_is_started(machine: Machine) -> None:
    machine.path = f"{machine.broken('nft').parent}:{machine.path}"
    assert "nft: nft fails with status 1: no such luck" in machine.refusal()
    assert {"nft", "slot", "guard"} == set(machine.doctor()[1])


@pytest.mark.parametrize("program", ON_RUNSC)
def test_an_allowed_runtime_must_run(machine: Machine, program: str) -> None:
    """Missing or failing. A runtime that is not allowed can have any fault."""
    machine.top[program] = "/nonexistent/program"
    assert f"{program}: /nonexistent/program is missing" in machine.refusal()
    machine.top[program] = str(machine.broken(program))
    assert "fails with status 1" in machine.refusal()
    status, failed = machine.doctor()
    assert (1, True) == (status, program in failed)
    assert "sallyport.allowed_runtimes" in failed[program]
    other = {"runc": "runsc", "runsc": "runc"}[program]
    machine.top |= {"allowed_runtimes": [other], "default_runtime": other}
    assert (0, {}) == machine.doctor()
    with machine.serving():
        pass


def test_without_docker_nothing_is_started(machine: Machine) -> None:
    machine.docker = {"managed": False, "socket": str(machine.directory / "none.sock")}
    assert f"no Docker answers at {machine.directory}/none.sock" in machine.refusal()
    assert {"docker"} == set(machine.doctor()[1])


@pytest.mark.extended
def test_without_dockerd_nothing_is_started(machine: Machine) -> None:
    machine.docker["binary"] = "/nonexistent/dockerd"
    assert "dockerd: /nonexistent/dockerd is missing" in machine.refusal()
    assert "docker.io" in machine.doctor()[1]["dockerd"]


def test_without_its_upstream_namespace_nothing_is_started(machine: Machine) -> None:
    machine.top["upstream_netns"] = str(machine.directory / "nowhere")
    assert f"upstream: {machine.directory}/nowhere is no network namespace" in machine.refusal()
    assert {"upstream"} == set(machine.doctor()[1])


def test_a_port_in_use_is_reported_before_anything_is_made(machine: Machine) -> None:
    with closing(socket.create_server(("127.0.0.1", machine.port))):
        assert f"cannot listen on 127.0.0.1:{machine.port}: it is in use" in machine.refusal()
        assert not machine.run.exists()
        assert {"listen"} == set(machine.doctor()[1])


def test_a_server_that_cannot_listen_after_all_takes_everything_down(machine: Machine) -> None:
    """The port is taken between the check and the start. At that time dockerd, guard and daemons run."""
    written = machine.sallyport("serve", "--write-only")
    assert 0 == written.returncode, written.stderr
    with closing(socket.create_server(("127.0.0.1", machine.port))):
        command = [sys.executable, "-m", "runtimes.hostd", str(machine.run / "launch" / "host.json")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert 1 == done.returncode
    assert f"cannot listen on 127.0.0.1:{machine.port}: it is in use" in done.stderr
    assert "cannot run: " in done.stderr and "run: sallyport doctor" in done.stderr
    assert [] == machine.left()


def test_a_second_server_in_the_same_place_refuses(machine: Machine) -> None:
    """The first server continues."""
    with machine.serving():
        port, machine.port = machine.port, reserve_port()
        assert f"another server runs in {machine.run}" in machine.refusal()
        machine.port = port
        assert httpx.codes.OK == httpx.get(f"http://127.0.0.1:{port}/health", timeout=30).status_code


def test_a_policy_file_that_is_missing_or_wrong(machine: Machine) -> None:
    policy = machine.directory / "policy.yaml"
    machine.top["policy_file"] = str(policy)
    assert 2 == machine.sallyport("serve").returncode
    assert {"policy"} == set(machine.doctor()[1])
    policy.write_text("version: 1\npolicies:\n  a: {nonsense: 1}\n")
    policy.chmod(0o644)
    assert 2 == machine.sallyport("serve").returncode
    assert f"{policy}:3:" in machine.doctor()[1]["policy"]
    policy.write_text("version: 1\n")
    assert (0, {}) == machine.doctor()


def test_the_doctor_finds_what_else_is_wrong(machine: Machine) -> None:
    """Many faults at once, each with its own line and remedy."""
    script = machine.broken("execd")
    machine.top |= {
        "execd": str(script),
        "images": [{"name": "x", "tar": str(script), "env": {}}],
        "upstream_roots": str(script),
        "dns_upstreams": ["127.0.0.53:53"],
        "uids.worker_base": 1,
        "python": "/bin/false",
        "upstream_netns": "",
    }
    status, failed = machine.doctor()
    assert (1, {"execd", "images", "roots", "dns", "users", "python", "namespace"}) == (status, set(failed))
    for name, remedy in (("execd", "CGO_ENABLED=0"), ("roots", "ca-certificates"), ("dns", "sallyport.dns_upstreams")):
        assert remedy in failed[name]


class Operator:
    """A dockerd that ran before."""

    def __init__(self, directory: Path) -> None:
        self.socket = str(directory / "operator.sock")
        self.daemon_json = directory / "daemon.json"
        self.daemon_json.write_text("{}\n")
        config = DockerdConfig(
            binary=shutil.which("dockerd") or "/usr/sbin/dockerd",
            data_root=str(directory / "operator"),
            exec_root=str(directory / "operator-exec"),
            pidfile=str(directory / "operator.pid"),
            log="",
        )
        with (directory / "operator.log").open("wb") as log:
            self.process = subprocess.Popen(
                arguments(config, self.socket, self.daemon_json), stdout=log, stderr=log, start_new_session=True
            )
        self._exec_root = Path(config.exec_root)

    def runtimes(self) -> set[str]:
        command = ["docker", "-H", f"unix://{self.socket}", "info", "-f", "{{json .Runtimes}}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return set(json.loads(done.stdout) or {}) if done.returncode == 0 else set()

    def wait(self, *wanted: str) -> None:
        deadline = time.monotonic() + 180
        while not set(wanted) <= self.runtimes():
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=180)
        netns.unmount_below(self._exec_root)


def test_an_operators_docker_is_used_once_it_has_the_entries_that_were_printed(machine: Machine) -> None:
    """Refused before, with the exact text to add. Only the operator edits the file."""
    operator = Operator(machine.directory)
    try:
        operator.wait("runc")
        machine.docker = {"managed": False, "socket": operator.socket}
        said = machine.refusal()
        failed = machine.doctor()[1]["runtimes"]
        assert "{}\n" == operator.daemon_json.read_text()
        text = re.search(r'"runtimes": \{.*\}\}', said)
        assert text is not None
        assert text[0] in failed
        operator.daemon_json.write_text(f"{{{text[0]}}}")
        operator.process.send_signal(signal.SIGHUP)
        operator.wait("sallyport-runc", "sallyport-runsc")
        assert (0, {}) == machine.doctor()
        with machine.serving():
            assert (0, {}) == machine.doctor()
    finally:
        operator.close()
