"""The properties and permissions of a process inside a sandbox, compared with the documented table of each runtime.

The same probe runs in the sandbox and, as controls, as root on the host and in a container of runsc with every
capability. A door that is closed in the sandbox and open in a control can be opened. `doors.py` has the answer at each
place.
"""

import contextlib
import hashlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opensandbox.exceptions import SandboxException
from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.filesystem import SearchEntry
from opensandbox.models.isolated import BindMount, CreateIsolatedSessionRequest, IsolatedWorkspaceSpec
from opensandbox.sync.sandbox import SandboxSync

from demo.sandboxes import DemoSandbox
from runtimes.engine.containers import CA_BUNDLE, EXECD, JAVA_STORE, LAUNCH
from runtimes.engine.docker import CAPABILITIES
from runtimes.process.cgroups import Cgroups, Processor
from testbed import namespaces
from testbed.internet import Internet, ip
from testbed.privileged import privileged
from testbed.stack import IMAGE, Stack
from testbed.traces import start_time
from tests.security.doors import DOORS, SESSION
from tests.stacks import INTERNET

pytestmark = pytest.mark.system

PROBE = Path(__file__).with_name("hardening_probe.py")
ENDED = {"Failed", "Terminated"}
OTHER = {"runsc": "runc", "runc": "runsc"}
_NUMBERS = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7}
_NUMBERS |= {"NET_BIND_SERVICE": 10}
MASK = f"{sum(1 << _NUMBERS[name] for name in CAPABILITIES):016x}"
NONE = f"{0:016x}"

_BOMBS = """
import os, threading, time
def note(what): open("/tmp/refused-" + what, "w").close()
def thread():
    while True:
        try: threading.Thread(target=thread, daemon=True).start()
        except RuntimeError: note("thread")
        time.sleep(0.05)
def process():
    while True:
        try: os.fork()
        except OSError: note("process")
        time.sleep(0.05)
thread() if os.fork() else process()
""".replace("'", '"')

_CONTROL = """
ip link set lo up
echo 0 0 >/proc/sys/net/ipv4/ping_group_range
mount --bind /proc/sys /proc/sys
mount --bind "$1" "${1%/*}"
python3 "$2"
exit $?
"""
"""The control's script.

The first process of new namespaces runs it. Some files exist only in cgroups below the root group.
"""
NODES = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "pts/ptmx")}
OURS = {
    *(EXECD, LAUNCH, CA_BUNDLE, "/etc/ssl/certs/ca-certificates.crt", JAVA_STORE, "/etc/ssl/certs/java/cacerts"),
    *("/etc/resolv.conf", "/etc/hosts", "/etc/hostname", "/etc/machine-id"),
}


_STRANGERS = """
import os
listed = {int(name) for name in os.listdir("/proc") if name.isdigit()}
threads = {int(name) for pid in listed for name in os.listdir(f"/proc/{pid}/task")}
found = []
for pid in set(range(1, 32768)) - listed - threads:
    try:
        os.kill(pid, 0)
        found.append(pid)
    except ProcessLookupError:
        pass
# What began meanwhile is listed now.
owners = [name for name in os.listdir("/proc") if name.isdigit()]
print([pid for pid in found if not any(os.path.exists(f"/proc/{name}/task/{pid}") for name in owners)])
"""


@pytest.fixture(scope="module", name="reports")
def _reports(stack: Stack, sandboxes: dict[str, DemoSandbox]) -> dict[str, dict[str, Any]]:
    found = {}
    for runtime, sandbox in sandboxes.items():
        inside = stack.connect(sandbox.id)
        try:
            inside.files.write_file("/tmp/hardening.py", PROBE.read_text())
            _, printed = sandbox.run("python3 /tmp/hardening.py")
            found[runtime] = json.loads(printed)
        finally:
            inside.close()
    return found


@pytest.fixture(scope="module", name="answers")
def _answers() -> dict[str, dict[str, str]]:
    """Return the answers of the controls: the host, and a container of runsc with every capability."""
    group = Path("/sys/fs/cgroup/pids")
    child = (group if group.exists() else group.parent) / f"sallyport-doors-{os.getpid()}"
    child.mkdir()
    try:
        command = ["unshare", "-mnuipf", "--mount-proc", "sh", "-c", _CONTROL, "sh", str(child), str(PROBE)]
        host = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        child.rmdir()
    name = f"{INTERNET}-doors"
    namespaces.make(name)
    try:
        ip("-n", name, "link", "set", "lo", "up")
        with privileged("runsc", PROBE, netns=Internet.path(name)) as command:
            opened = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        namespaces.remove(name)
    return {"host": json.loads(host.stdout)["doors"], "opened": json.loads(opened.stdout)["doors"]}


def unexpected(place: str, doors: dict[str, str], answers: dict[str, dict[str, str]]) -> dict[str, tuple[str, str]]:
    """Return the answers that differ from the table, each with the expected one."""
    expected = {name: door.answer(place, answers["host"][name]) for name, door in DOORS.items()}
    assert list(doors) == list(expected)
    return {name: (answer, expected[name]) for name, answer in doors.items() if answer != expected[name]}


@contextlib.contextmanager
def ended(sandbox: SandboxSync) -> Iterator[SandboxSync]:
    """Remove a sandbox at the end, independently of its processes."""
    try:
        yield sandbox
    finally:
        with contextlib.suppress(SandboxException):  # the test may have removed it already
            sandbox.kill()
        sandbox.close()


@pytest.fixture(name="small")
def _small(stack: Stack, runtime: str) -> Iterator[SandboxSync]:
    """Yield a new sandbox with low limits."""
    with ended(stack.create(runtime, resource={"memory": "256Mi", "cpu": "500m", "pids": "128"})) as sandbox:
        yield sandbox


def host_pid(stack: Stack, sandbox: str) -> int:
    """Return the host's pid of the sandbox's first process: PID 1 on runc, the sandbox's kernel on runsc."""
    container = stack.container(sandbox)
    return int(stack.docker("inspect", "-f", "{{.State.Pid}}", container).stdout)


def printed(sandbox: SandboxSync, command: str) -> str:
    execution = sandbox.commands.run(command)
    return "".join(message.text for message in (*execution.logs.stdout, *execution.logs.stderr))


def state_within(stack: Stack, sandbox: str, states: set[str], seconds: float = 60.0) -> str:
    """Return the sandbox's state in the API when it is one of `states` or the time is over."""
    deadline = time.monotonic() + seconds
    address, key = f"{stack.base}/v1/sandboxes/{sandbox}", {"OPEN-SANDBOX-API-KEY": stack.api_key}
    while True:
        state = str(httpx.get(address, headers=key, timeout=30).json()["status"]["state"])
        if state in states or time.monotonic() > deadline:
            return state
        time.sleep(0.1)


@pytest.mark.parametrize("place", ["host", "opened"])
def test_the_probe_sees_each_door_open_where_it_is(place: str, answers: dict[str, dict[str, str]]) -> None:
    """A door that a kernel lacks has its error in the table."""
    assert {} == unexpected(place, answers[place], answers)


def test_exactly_the_documented_doors_are_open(
    runtime: str, reports: dict[str, dict[str, Any]], answers: dict[str, dict[str, str]]
) -> None:
    assert {} == unexpected(runtime, reports[runtime]["doors"], answers)


@pytest.mark.parametrize("who", ["init", "self"])
def test_capabilities_are_the_documented_ones(who: str, runtime: str, reports: dict[str, dict[str, Any]]) -> None:
    status = reports[runtime][who]

    assert (MASK, MASK, MASK) == (status["CapPrm"], status["CapEff"], status["CapBnd"])
    assert (NONE, NONE) == (status["CapInh"], status["CapAmb"])
    assert "1" == status["NoNewPrivs"]
    if runtime == "runc":
        assert "2" == status["Seccomp"]


def test_isolated_sessions_open_no_door(stack: Stack, answers: dict[str, dict[str, str]]) -> None:
    """No command has the capability that execd has for isolated sessions, neither outside nor inside of a session."""
    extensions = {"sallyport.runtime": "runsc", "sallyport.policy": "agents", "bootstrap.execd.isolation": "enable"}
    with SandboxSync.create(IMAGE, connection_config=stack.connection, extensions=extensions) as sandbox:
        try:
            sandbox.files.write_file("/srv/hardening.py", PROBE.read_text())
            reports = [json.loads(printed(sandbox, "python3 /srv/hardening.py"))]
            request = CreateIsolatedSessionRequest(workspace=IsolatedWorkspaceSpec(path="/srv"))
            with sandbox.isolation.session(request) as session:
                inside = session.run("python3 hardening.py")
                reports.append(json.loads("".join(message.text for message in inside.logs.stdout)))
        finally:
            sandbox.kill()
    for report, others in zip(reports, ({}, SESSION), strict=True):
        found = unexpected("runsc", report["doors"], answers)
        assert others == {name: answer for name, (answer, _) in found.items()}
        assert (MASK, MASK, "1") == tuple(report["self"][name] for name in ("CapPrm", "CapEff", "NoNewPrivs"))


def test_an_exec_of_docker_gains_nothing(runtime: str, stack: Stack, sandboxes: dict[str, DemoSandbox]) -> None:
    """Even root on the host cannot start a process in a sandbox with more privileges than PID 1 has."""
    container = stack.container(sandboxes[runtime].id)
    plain = stack.docker("exec", container, "sh", "-c", "cat /proc/self/status; ls /proc/self/fd")
    privileged = stack.docker("exec", "--privileged", container, "true")

    assert re.search(rf"CapEff:\s+{MASK}\n", plain.stdout)
    assert re.search(r"NoNewPrivs:\s+1\n", plain.stdout)
    assert ["0", "1", "2", "3"] == plain.stdout.split()[-4:]  # descriptor 3 is the directory that `ls` reads
    assert 0 != privileged.returncode
    assert "capabilities" in privileged.stderr + privileged.stdout


def test_an_exec_of_docker_is_in_the_sandboxs_network(
    runtime: str, stack: Stack, sandboxes: dict[str, DemoSandbox]
) -> None:
    container = stack.container(sandboxes[runtime].id)
    names = "import socket; print(sorted(name for _, name in socket.if_nameindex()))"
    assert "['eth0', 'lo']\n" == stack.docker("exec", container, "python3", "-c", names).stdout


def test_a_set_user_id_program_gives_nothing(runtime: str, sandboxes: dict[str, DemoSandbox]) -> None:
    command = (
        "cp $(readlink -f $(command -v python3)) /tmp/raised && chmod 4755 /tmp/raised && stat -c %a /tmp/raised && "
        "python3 -c 'import os; os.setgid(65534); os.setuid(65534); "
        'os.execv("/tmp/raised", ["raised", "-c", "import os; print(os.geteuid())"])\'; rm -f /tmp/raised'
    )
    _, text = sandboxes[runtime].run(command)

    assert ["4755", "65534"] == text.split()


def test_device_nodes_are_the_harmless_ones(runtime: str, reports: dict[str, dict[str, Any]]) -> None:
    """runsc adds its own nodes for fuse and tun. No process inside has the capability that they require."""
    allowed = NODES | ({"/dev/fuse", "/dev/net/tun"} if runtime == "runsc" else set())

    assert set() == reports[runtime]["nodes"].keys() - allowed
    assert "open" != reports[runtime]["doors"]["tun"]


def test_mounts_are_ours_read_only_and_inert(runtime: str, reports: dict[str, dict[str, Any]]) -> None:
    report = reports[runtime]
    kinds: dict[str, str] = report["kinds"]
    kernel = {"proc", "sysfs", "tmpfs", "devpts", "mqueue", "cgroup", "cgroup2", "dev"}

    assert OURS | {"/"} == {path for path, kind in kinds.items() if kind not in kernel}
    assert [] == [path for path in OURS if not {"ro", "nosuid"} <= set(report["mounts"][path])]
    if runtime == "runc":
        assert [] == [path for path in OURS if "nodev" not in report["mounts"][path]]
    assert [] == report["propagation"]
    assert [] == [path for path in report["mounts"] if "docker" in path or path.endswith(".sock")]


def test_no_descriptor_leads_out(runtime: str, stack: Stack, sandboxes: dict[str, DemoSandbox]) -> None:
    """A command has its three descriptors.

    PID 1 of runc has no directory, namespace or file of the host, only its own /proc.
    """
    _, text = sandboxes[runtime].run("ls /proc/self/fd | wc -l; ls -d /proc/self/fd/* /proc/self/cwd/..")
    assert "4" == text.split()[0]
    if runtime == "runc":
        pid = host_pid(stack, sandboxes[runtime].id)
        held = set()
        own = os.stat(f"/proc/{pid}/root/proc").st_dev
        assert own != os.stat("/proc").st_dev
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # a connection that was just closed
                path = os.readlink(f"/proc/{pid}/fd/{name}")
                if path != "/proc" or os.stat(f"/proc/{pid}/fd/{name}").st_dev != own:
                    held.add(path)
        harmless = re.compile(
            r"(pipe|socket|anon_inode):.*|/dev/null|/sys/fs/cgroup/cpu.*|/proc/\d+/.*|/opt/opensandbox/.*"
        )
        assert set() == {path for path in held if not harmless.fullmatch(path)}


@pytest.mark.parametrize("kind", ["net", "pid", "mnt", "ipc", "uts"])
def test_namespaces_belong_to_the_sandbox_alone(
    kind: str, runtime: str, stack: Stack, sandboxes: dict[str, DemoSandbox]
) -> None:
    def inode(pid: int | str) -> int:
        return os.stat(f"/proc/{pid}/ns/{kind}").st_ino

    names = [sandboxes[runtime].id, sandboxes[OTHER[runtime]].id]
    own, other = (inode(host_pid(stack, name)) for name in names)
    worker = inode(stack.worker_pid(names[0]))

    assert own not in {other, worker, inode("self")}


def test_only_the_sandboxs_own_processes_can_be_seen(runtime: str, sandboxes: dict[str, DemoSandbox]) -> None:
    """No pid other than the listed ones answers to a signal or has a root directory."""
    _, text = sandboxes[runtime].run(f"cat >/tmp/pids.py <<'END'\n{_STRANGERS}END\npython3 /tmp/pids.py")

    assert "[]" == text.strip()


def test_init_holds_nothing_worth_stealing(
    runtime: str, stack: Stack, sandboxes: dict[str, DemoSandbox], reports: dict[str, dict[str, Any]]
) -> None:
    """Only the hash of the token is in the sandbox, and no environment contains the token."""
    sandbox = stack.connect(sandboxes[runtime].id)
    try:
        token = sandbox.get_endpoint(44772).headers["X-EXECD-ACCESS-TOKEN"]
        egress = sandbox.get_endpoint(18080).headers["OPENSANDBOX-EGRESS-AUTH"]
    finally:
        sandbox.close()
    report = reports[runtime]
    command = report["command"]

    assert hashlib.sha256(token.encode()).hexdigest() == command[command.index("--access-token-sha256") + 1]
    told = json.dumps([command, report["environment"]])
    assert [] == [value for value in (token, egress, stack.api_key) if value in told]
    assert "open" != report["doors"]["read /proc/1/environ"]
    _, text = sandboxes[runtime].run("grep -alsF -e EXECD_ACCESS_TOKEN /proc/*/environ; env | grep -ci token; true")
    assert "0" == text.strip()


def test_execd_refuses_requests_without_its_token(
    runtime: str, stack: Stack, sandboxes: dict[str, DemoSandbox]
) -> None:
    """The status is 401 without a token, with a wrong one, another sandbox's, and the hash; inside and by the proxy."""
    name, other = sandboxes[runtime].id, sandboxes[OTHER[runtime]].id
    theirs = stack.connect(other)
    try:
        stranger = theirs.get_endpoint(44772).headers["X-EXECD-ACCESS-TOKEN"]
    finally:
        theirs.close()
    _, shown = sandboxes[runtime].run("tr '\\0' '\\n' </proc/1/cmdline | sed -n 4p")
    address = f"{stack.base}/v1/sandboxes/{name}/proxy/44772/files/info?path=/etc/passwd"
    header = "X-EXECD-ACCESS-TOKEN"
    given: list[dict[str, str]] = [{}, *({header: value} for value in ("", "x", stranger, shown.strip()))]

    assert [401] * len(given) == [httpx.get(address, headers=headers, timeout=60).status_code for headers in given]
    key = {"OPEN-SANDBOX-API-KEY": stack.api_key}
    assert 401 == httpx.get(address, headers=key, timeout=60).status_code
    expected = {"127.0.0.1": "401 0", "192.0.2.2": "401 0", "[::1]": "000 7"}  # the sandbox has no IPv6
    codes = {
        host: sandboxes[runtime].run(
            f"curl -s -o /dev/null --max-time 20 -w '%{{http_code}} %{{exitcode}}' -X POST "
            f'-d \'{{"command":"id"}}\' http://{host}:44772/command; true'
        )[1]
        for host in expected
    }
    assert expected == codes


def test_execd_ended_from_inside_ends_the_sandbox(runtime: str, stack: Stack, small: SandboxSync) -> None:
    """runc's PID 1 can end only by a signal that it handles. On both runtimes the sandbox is then reported as ended."""
    if runtime == "runc":
        assert "alive" in printed(small, "kill -KILL 1; echo alive")
    endpoint = small.get_endpoint(44772)
    signal = "TERM" if runtime == "runc" else "KILL"
    with contextlib.suppress(SandboxException):  # it may end before its answer is sent
        small.commands.run(f"kill -{signal} 1", opts=RunCommandOpts(background=True))

    assert state_within(stack, str(small.id), ENDED) in ENDED
    assert 502 == httpx.get(f"http://{endpoint.endpoint}/ping", headers=endpoint.headers, timeout=60).status_code


def test_memory_is_limited(runtime: str, stack: Stack, small: SandboxSync) -> None:
    """Above the limit, runc kills the process and runsc ends the sandbox. The gateway is not affected."""
    worker = stack.worker_pid(str(small.id))
    assert "fits" in printed(small, "python3 -c 'bytearray(64 << 20)' && echo fits")
    command = "python3 -c 'bytearray(400 << 20)'"
    if runtime == "runsc":
        small.commands.run(command, opts=RunCommandOpts(background=True))
        assert "Failed" == state_within(stack, str(small.id), ENDED)
    else:
        assert "ended 137" in printed(small, f"{command}; echo ended $?")
        assert "here" in printed(small, "echo here")

    assert worker == stack.worker_pid(str(small.id))


def test_bombs_end_at_the_limit_of_processes_and_no_other_sandbox_notices(runtime: str, stack: Stack) -> None:
    """Fork and thread bombs are refused at the limit.

    execd and another sandbox continue. The removal ends all processes.
    """
    # On runsc a hundred interpreters need half a GiB; with less memory the sandbox would end at the memory limit.
    with ended(stack.create(runtime, resource={"memory": "1Gi", "cpu": "500m", "pids": "128"})) as hog:
        container = stack.container(str(hog.id))
        group = next(path for path in Path("/sys/fs/cgroup").glob(f"**/{container}/pids.max"))
        endpoint = hog.get_endpoint(44772)
        hog.commands.run(f"python3 -c '{_BOMBS}'", opts=RunCommandOpts(background=True))
        refused, deadline = set(), time.monotonic() + 120
        while refused != {"process", "thread"} and time.monotonic() < deadline:
            found = hog.files.search(SearchEntry(path="/tmp", pattern="refused-*"))
            refused = {entry.path.rpartition("-")[2] for entry in found}
            time.sleep(0.1)

        assert {"process", "thread"} == refused
        # The host counts gVisor's own threads, too. gVisor ends idle ones, so their number says nothing of the bombs.
        least, host = {"runc": (64, 128), "runsc": (1, 128 + 1024)}[runtime]
        assert host == int(group.read_text())
        assert least <= int((group.parent / "pids.current").read_text()) <= host
        with httpx.Client(headers=endpoint.headers, timeout=60) as client:
            assert {200} == {client.get(f"http://{endpoint.endpoint}/ping").status_code for _ in range(20)}
        with ended(stack.create(runtime)) as neighbour:
            assert "here" in printed(neighbour, "echo here")
        assert state_within(stack, str(hog.id), {"Running"}) == "Running"
        bombs = [(int(pid), start_time(int(pid))) for pid in (group.parent / "cgroup.procs").read_text().split()]
        assert bombs
        hog.kill()
        assert [] == [pid for pid, began in bombs if began is not None and start_time(pid) == began]
        assert not group.exists()


def test_processor_time_is_limited(stack: Stack, small: SandboxSync) -> None:
    """The limit of half a processor holds by the host's account.

    runsc's own account counts also time in which it is paused.
    """
    container = stack.container(str(small.id))
    processor = Processor(Cgroups(str(stack.run)))
    began, before = time.monotonic(), processor.seconds(container)
    printed(small, "python3 -c 'import time\nw=time.time()\nwhile time.time()-w<3: pass'")

    assert processor.seconds(container) - before < 0.65 * (time.monotonic() - began)


def test_no_core_is_dumped(runtime: str, sandboxes: dict[str, DemoSandbox]) -> None:
    _, text = sandboxes[runtime].run("ulimit -Hc; ulimit -c unlimited 2>&1 | grep -c .")

    assert ["0", "1"] == text.split()


def test_runsc_runs_with_the_stated_flags_and_writes_no_log(stack: Stack, sandboxes: dict[str, DemoSandbox]) -> None:
    words = Path(f"/proc/{host_pid(stack, sandboxes['runsc'].id)}/cmdline").read_bytes().decode().split("\0")
    values = dict(word.lstrip("-").split("=", 1) for word in words if word.startswith("-") and "=" in word)

    assert "sandbox" == values.get("network", "sandbox")
    for flag in ("net-raw", "allow-packet-socket-write", "allow-flag-override", "debug", "strace", "log-packets"):
        assert "false" == values.get(flag, "false")
    assert "none" == values.get("host-uds", "none")
    assert [] == [word for word in values if "TESTONLY" in word or "debug-log" in word]


@pytest.mark.parametrize("descriptor", [7, *(pytest.param(other, marks=pytest.mark.extended) for other in (3, 8))])
def test_a_work_directory_that_is_a_descriptor_starts_nothing(descriptor: int, stack: Stack) -> None:
    """CVE-2024-21626: an image whose work directory is one of runc's descriptors is refused without residue."""
    image = f"sallyport/workdir-{descriptor}"
    before = stack.sandboxes()
    work = f"WORKDIR /proc/self/fd/{descriptor}"
    assert 0 == stack.docker("import", "-c", work, os.environ["SALLYPORT_EMPTY_IMAGE"], image).returncode
    stack.permit_images(image)
    try:
        with pytest.raises(SandboxException):
            stack.create("runc", image=image, policy="deny-all")
    finally:
        stack.remove_images(image)

    assert before == stack.sandboxes()


_EXCHANGE = """
import os, time
os.chdir("/workspace")
for _ in range(1000):
    os.rename("share", "kept"), os.rename("link", "share"), time.sleep(0.02)
    os.rename("share", "link"), os.rename("kept", "share"), time.sleep(0.02)
"""

_PLANT = """
mv /opt /moved && mkdir -p {directory} && cat > {execd} <<'END' && chmod 755 {execd}
#!/bin/sh
{{ echo ran; grep ^Cap /proc/self/status; }} >> /tmp/planted; printf + >&3
END
{execd} 3>/dev/null; cat /tmp/planted; rm /tmp/planted
"""
_EXCHANGE_PROC = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), name)
root = os.open("/", os.O_RDONLY)
call("unshare", 0x10000000 | 0x20000)
open("/proc/self/setgroups", "w").write("deny")
open("/proc/self/uid_map", "w").write("0 0 1")
open("/proc/self/gid_map", "w").write("0 0 1")
call("mount", b"none", b"/", None, 0x4000 | 0x40000, None)
call("mount", b"none", b"/mnt", b"tmpfs", 0, None)
os.mkdir("/mnt/old")
call("syscall", 155, b"/mnt", b"/mnt/old")  # pivot_root
os.chdir("/")
call("umount2", b"/old", 2)
os.rename("proc", "moved-proc", src_dir_fd=root, dst_dir_fd=root)
os.fchdir(root)
os.makedirs("proc/self/fd")
for name in ("exe", "fd/3", "fd/4", "fd/5", "fd/6", "fd/7", "fd/8", "fd/9"):
    os.symlink("{EXECD}", f"proc/self/{{name}}")
print("exchanged")
"""


def test_a_program_at_execds_path_is_not_started_by_execd(stack: Stack) -> None:
    """Root moves away /proc and the directory of execd's file. A program put there gets no privilege of execd."""
    extensions = {"sallyport.runtime": "runsc", "sallyport.policy": "agents", "bootstrap.execd.isolation": "enable"}
    with SandboxSync.create(IMAGE, connection_config=stack.connection, extensions=extensions) as sandbox:
        try:
            plant = _PLANT.format(execd=EXECD, directory=str(Path(EXECD).parent))
            control = printed(sandbox, f"mkdir -p /srv; {plant}")
            assert re.search(rf"^ran\n(.*\n)*CapPrm:\s+{MASK}\nCapEff:\s+{MASK}\nCapBnd:\s+{MASK}\n", control)
            sandbox.files.write_file("/srv/exchange.py", _EXCHANGE_PROC)
            endpoint = sandbox.get_endpoint(44772)
            request = CreateIsolatedSessionRequest(workspace=IsolatedWorkspaceSpec(path="/srv"))
            started, answers = [], []
            for user in (1000, 1001):
                with contextlib.suppress(SandboxException), sandbox.isolation.session(request) as session:
                    started.append("".join(message.text for message in session.run("echo made").logs.stdout))
                with contextlib.suppress(httpx.HTTPError):
                    address = f"http://{endpoint.endpoint}/v1/filesystem/{user}/1000/files/info?path=/srv"
                    answers.append(httpx.get(address, headers=endpoint.headers, timeout=30).status_code)
                if user == 1000:
                    assert "exchanged" in printed(sandbox, "python3 /srv/exchange.py")
            assert "" == printed(sandbox, "cat /tmp/planted 2>/dev/null")
            assert "made" == started[0].strip()
            assert [200, 200] == answers
        finally:
            sandbox.kill()


_AROUND = """
rm -f /dev/null; ln -s /workspace/caught /dev/null; chmod 777 /dev; rm -f /dev/urandom; echo same > /dev/urandom
for place in /dev/pts/[0-9]*; do echo forged > $place && echo reached $place; done; rm -rf /dev/shm/*
script -qc 'tty' /dev/null; echo end
"""


def test_isolated_sessions_change_nothing_around_them(stack: Stack) -> None:
    """A session cannot change the sandbox's devices or terminals, and cannot replace a directory after its check."""
    extensions = {"sallyport.runtime": "runsc", "sallyport.policy": "agents", "bootstrap.execd.isolation": "enable"}
    with SandboxSync.create(IMAGE, connection_config=stack.connection, extensions=extensions) as sandbox:
        try:
            printed(sandbox, "mkdir -p /workspace/share /srv; ln -s / /workspace/link; echo ours > /dev/shm/ours")
            printed(sandbox, "setsid script -qc 'sleep 300' /dev/null < /dev/null > /dev/null 2>&1 &")
            sandbox.files.write_file("/srv/exchange.py", _EXCHANGE)
            devices = "ls -l /dev | grep -v pts; ls -ld /dev; cat /dev/shm/ours; ls /dev/pts"
            before = printed(sandbox, devices)
            assert "ours" in before
            with sandbox.isolation.session(
                CreateIsolatedSessionRequest(workspace=IsolatedWorkspaceSpec(path="/workspace", mode="rw"))
            ) as session:
                inside = "".join(message.text for message in session.run(_AROUND).logs.stdout)
            assert "end" in inside
            assert "/dev/pts/" in inside  # a session can have terminals
            assert "reached" not in inside
            assert before == printed(sandbox, devices)

            sandbox.commands.run("exec python3 /srv/exchange.py", opts=RunCommandOpts(background=True))
            request = CreateIsolatedSessionRequest(
                workspace=IsolatedWorkspaceSpec(path="/srv"), binds=[BindMount(source="/workspace/share", dest="/mnt")]
            )
            made = 0
            deadline = time.monotonic() + 60
            while made < 3 and time.monotonic() < deadline:
                with contextlib.suppress(SandboxException), sandbox.isolation.session(request) as session:
                    session.run("echo theirs > /mnt/root/theirs; echo theirs > /mnt/theirs")
                    made += 1
            assert 3 == made
            assert "theirs" not in printed(sandbox, "ls /root")
        finally:
            sandbox.kill()
