"""The published programs, unmodified, against a running server: the osb command line, the MCP server, the npm SDK.

`./run test` installs the versions that tests/clients pins. A call that this server does not support ends with an
error that says so. Network effects are judged by the requests that the demo internet received.
"""

import json
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.internet import API, STATUS, Internet, received_field
from testbed.stack import Stack

pytestmark = pytest.mark.system

HERE = Path(__file__).parent
ANSWER_SECONDS = 60
OPEN = {"defaultAction": "deny", "egress": [{"action": "allow", "target": STATUS}]}
LINES = "for n in 1 2 3; do echo line$n; sleep 0.1; done; echo last >&2; exit 4"


@pytest.fixture(scope="module", name="clients")
def _clients() -> Path:
    """Return the directory of the programs."""
    return Path(os.environ["SALLYPORT_CLIENTS"])


@pytest.fixture(scope="module", name="surroundings")
def _surroundings(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a user with only these two variables of the server."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path_factory.mktemp("home")),
        "NO_COLOR": "1",
        "OPEN_SANDBOX_DOMAIN": f"127.0.0.1:{stack.port}",
        "OPEN_SANDBOX_API_KEY": stack.api_key,
    }


class Lines:
    """A program that answers each line of its standard input with one line."""

    def __init__(self, command: list[str | Path], environment: dict[str, str], log: Path) -> None:
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        self.log = log

    def tell(self, message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        late = threading.Timer(ANSWER_SECONDS, self.process.kill)
        late.start()
        line = self.process.stdout.readline()
        late.cancel()
        assert line, self.log.read_text()[-2000:]
        return json.loads(line)

    def end(self) -> int:
        """Close its standard input, as a client does at its end. Return the exit code."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


class Osb:
    """The osb command line, and a sandbox that it created."""

    def __init__(self, lines: Lines, place: Path) -> None:
        self._lines, self.place = lines, place
        self.id = ""

    def __call__(self, *arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
        self._lines.tell([*arguments, stdin])
        code, out, err = self._lines.hear()
        return code, out, err

    def told(self, *arguments: str, stdin: str | None = None) -> str:
        """Return its output; it must succeed."""
        code, out, err = self(*arguments, stdin=stdin)
        assert 0 == code, out + err
        return out

    def json(self, command: str, *arguments: str, stdin: str | None = None) -> Any:
        """Return the parsed output of a command with `-o json`."""
        return json.loads(self.told(*command.split(), "-o", "json", *arguments, stdin=stdin))


@pytest.fixture(scope="module", name="osb")
def _osb(clients: Path, surroundings: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Osb]:
    place = tmp_path_factory.mktemp("osb")
    lines = Lines([clients / "osb/bin/python", HERE / "osb_calls.py"], surroundings, place / "log")
    osb = Osb(lines, place)
    (place / "policy.json").write_text(json.dumps(OPEN))
    options = ["--image", "sallyport/base", "--timeout", "20m", "--env", "GREETING=hello", "--metadata", "made=by-osb"]
    options += ["--extension", "sallyport.runtime=runc", "--resource", "cpu=1", "--resource", "memory=512Mi"]
    options += ["--network-policy-file", str(place / "policy.json"), "--credential-proxy"]
    try:
        osb.id = osb.json("sandbox create", *options)["id"]
        yield osb
        osb.told("sandbox", "kill", osb.id)
    finally:
        lines.end()


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    """Wait for `condition`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def authorizations(internet: Internet, marker: str) -> list[str | None]:
    """Return the authorization of each request that reached any server with `marker` in its target."""
    notes = [note for note in internet.notes() if marker in str(note.get("target"))]
    return [received_field(note, "Authorization") for note in notes]


def test_osb_as_a_process(clients: Path, surroundings: dict[str, str], osb: Osb) -> None:
    done = subprocess.run(
        [clients / "osb/bin/osb", "command", "run", osb.id, "--", "printenv", "GREETING"],
        env=surroundings,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (0, "hello\n") == (done.returncode, done.stdout), done.stderr


@pytest.mark.extended
def test_osb_makes_and_removes_what_a_request_file_says(osb: Osb) -> None:
    request = {
        "image": {"uri": "sallyport/base"},
        "timeout": None,
        "entrypoint": ["sleep", "infinity"],
        "env": {"GREETING": "filed"},
        "resourceLimits": {"cpu": "500m", "memory": "256Mi"},
        "networkPolicy": {"defaultAction": "deny"},
        "secureAccess": True,
        "volumes": [
            {
                "name": "v",
                "mountPath": "/mnt/osb",
                "pvc": {"claimName": "by-osb", "storage": "64Mi", "deleteOnSandboxTermination": True},
            }
        ],
        "extensions": {"sallyport.runtime": "runsc"},
    }
    file = osb.place / "request.json"
    file.write_text(json.dumps(request))

    made = osb.json("sandbox create", "--file", str(file))
    shown = osb.json("sandbox get", made["id"])
    said = osb.told("command", "run", made["id"], "--", "printenv", "GREETING")
    mounted = osb.told("command", "run", made["id"], "--", "mountpoint", "/mnt/osb")
    endpoint = osb.json("sandbox endpoint", made["id"], "--port", "8000")
    osb.told("sandbox", "kill", made["id"])

    assert "/mnt/osb is a mountpoint\n" == mounted
    assert ("manual-cleanup", None) == (made["timeout"], shown["expires_at"])
    assert (["sleep", "infinity"], "filed\n") == (shown["entrypoint"], said)
    assert ["OpenSandbox-Secure-Access"] == list(endpoint["headers"])
    assert 1 == osb("sandbox", "get", made["id"])[0]


@pytest.mark.extended
def test_osb_shows_and_renews_a_sandbox(osb: Osb) -> None:
    states = ("--state", "running", "--state", "paused", "--page-size", "5")
    shown = osb.json("sandbox get", osb.id)
    listed = osb.json("sandbox list", "--metadata", "made=by-osb", *states)
    renewed = osb.json("sandbox renew", osb.id, "--timeout", "90m")
    metrics = osb.json("sandbox metrics", osb.id)

    assert ("Running", "sallyport/base", {"made": "by-osb"}) == (
        shown["status"]["state"],
        shown["image"]["image"],
        shown["metadata"],
    )
    assert [osb.id] == [item["id"] for item in listed["items"]]
    assert [] == osb.json("sandbox list", "--metadata", "made=by-nobody")["items"]
    assert renewed["expires_at"].replace(" ", "T") > shown["expires_at"]
    assert (1.0, 512.0) == (metrics["cpu_count"], metrics["memory_total_in_mib"])
    assert osb.json("sandbox health", osb.id)["healthy"]
    assert osb.json("sandbox endpoint", osb.id, "--port", "8000")["endpoint"].endswith(f"{osb.id}/proxy/8000")


@pytest.mark.extended
def test_osb_pauses_and_resumes_a_sandbox(osb: Osb) -> None:
    osb.told("sandbox", "pause", osb.id)
    paused = osb.json("sandbox get", osb.id)["status"]["state"]
    listed = osb.json("sandbox list", "--metadata", "made=by-osb", "--state", "paused")
    again = osb("sandbox", "pause", osb.id)
    run = osb("command", "run", osb.id, "--", "true")
    osb.told("sandbox", "resume", osb.id)

    assert ("Paused", [osb.id]) == (paused, [item["id"] for item in listed["items"]])
    for code, out, err in (again, run):
        assert 1 == code
        assert "DOCKER::SANDBOX_NOT_RUNNING" in "".join((out + err).split())
    assert "Running" == osb.json("sandbox get", osb.id)["status"]["state"]
    assert "back\n" == osb.told("command", "run", osb.id, "--", "echo", "back")


@pytest.mark.extended
def test_osb_runs_commands(osb: Osb) -> None:
    run = ("command", "run", osb.id)
    code, out, err = osb(*run, "--", "bash", "-c", "echo out; echo err >&2; exit 3")
    late = osb(*run, "--timeout", "1s", "--", "sleep", "60")

    assert (1, True, True) == (code, "out\n" in out, "CommandExecError: 3" in out + err)
    assert "/usr\n" == osb.told(*run, "--workdir", "/usr", "--", "pwd")
    assert "$HOME||a b|\n" == osb.told(*run, "--argv", "--", "printf", r"%s|%s|%s|\n", "$HOME", "", "a b")
    assert (1, True) == (late[0], "CommandExecError: -1" in late[1] + late[2])


@pytest.mark.extended
def test_osb_follows_and_interrupts_commands_in_the_background(osb: Osb) -> None:
    def begun(*command: str) -> str:
        return str(osb.json("command run", osb.id, "--background", "--", *command)["execution_id"])

    def status(name: str) -> tuple[bool, int | None]:
        shown = osb.json("command status", osb.id, name)
        return shown["running"], shown["exit_code"]

    lines, sleep = begun("bash", "-c", LINES), begun("sleep", "60")
    until(lambda: status(lines) == (False, 4))
    logs = osb.json("command logs", osb.id, lines)
    rest = osb.json("command logs", osb.id, lines, "--cursor", "6")
    assert (True, None) == status(sleep)
    osb.told("command", "interrupt", osb.id, sleep)

    assert ("line1\nline2\nline3\nlast\n", 23) == (logs["content"], logs["cursor"])
    assert ("line2\nline3\nlast\n", 23) == (rest["content"], rest["cursor"])
    until(lambda: status(sleep) == (False, -1))


@pytest.mark.extended
def test_osb_keeps_a_session(osb: Osb) -> None:
    session = osb.json("command session create", osb.id, "--workdir", "/usr")["session_id"]
    run = ("command", "session", "run", osb.id, session)
    osb.told(*run, "--", "export", "KEPT=7")

    assert "7" == osb.told(*run, "--", "printenv", "KEPT").strip()
    assert "/usr" == osb.told(*run, "--", "pwd").strip()
    osb.told("command", "session", "delete", osb.id, session)
    assert 1 == osb(*run, "--", "pwd")[0]


@pytest.mark.extended
def test_osb_moves_files(osb: Osb) -> None:
    def shown(path: str) -> tuple[int, str, str, int]:
        (entry,) = osb.json("file info", osb.id, path)
        return entry["mode"], entry["owner"], entry["group"], entry["size"]

    sent, back = osb.place / "sent", osb.place / "back"
    sent.write_bytes(secrets.token_bytes(3_000_000))
    osb.told("file", "mkdir", osb.id, "/tmp/osb/deep", "--mode", "0700")
    osb.told("file", "write", osb.id, "/tmp/osb/a.txt", "--content", "hello wörld", "--mode", "0640")
    osb.told("file", "write", osb.id, "/tmp/osb/b.txt", stdin="from standard input\n")
    osb.told("file", "replace", osb.id, "/tmp/osb/a.txt", "--old", "hello", "--new", "bye")
    assert (640, "root", "root", 10) == shown("/tmp/osb/a.txt")
    osb.told("file", "chmod", osb.id, "/tmp/osb/a.txt", "--mode", "600", "--owner", "nobody", "--group", "nogroup")
    osb.told("file", "mv", osb.id, "/tmp/osb/a.txt", "/tmp/osb/deep/c.txt")
    osb.told("file", "upload", osb.id, str(sent), "/tmp/osb/bytes")
    osb.told("file", "download", osb.id, "/tmp/osb/bytes", str(back))
    found = osb.json("file search", osb.id, "/tmp/osb", "--pattern", "**/*.txt")

    assert "bye wörld" == osb.told("file", "cat", osb.id, "/tmp/osb/deep/c.txt")
    assert "from standard input\n" == osb.told("file", "cat", osb.id, "/tmp/osb/b.txt")
    assert (600, "nobody", "nogroup", 10) == shown("/tmp/osb/deep/c.txt")
    assert 700 == shown("/tmp/osb/deep")[0]
    assert ["/tmp/osb/b.txt", "/tmp/osb/deep/c.txt"] == sorted(entry["path"] for entry in found)
    assert sent.read_bytes() == back.read_bytes()
    osb.told("file", "rm", osb.id, "/tmp/osb/bytes")
    assert 1 == osb("file", "cat", osb.id, "/tmp/osb/bytes")[0]
    osb.told("file", "rmdir", osb.id, "/tmp/osb")
    assert 1 == osb("file", "info", osb.id, "/tmp/osb")[0]


@pytest.mark.extended
def test_osb_changes_what_leaves_and_with_which_secret(osb: Osb, internet: Internet) -> None:
    marker, first, second = (f"{name}-{secrets.token_hex(20)}" for name in ("osb", "first", "second"))
    auth = {"type": "bearer", "credential": "token"}
    vault = {
        "credentials": [{"name": "token", "source": {"value": first}}],
        "bindings": [{"name": "api", "match": {"hosts": [API]}, "auth": auth}],
    }
    change = {"credentials": {"replace": [{"name": "token", "source": {"value": second}}]}}
    told = []

    def fetch() -> None:
        url = f"https://{API}/{marker}"
        osb("command", "run", osb.id, "--", "curl", "-sS", "-o", "/dev/null", "--max-time", "20", url)

    fetch()
    assert [] == authorizations(internet, marker)
    osb.told("egress", "patch", osb.id, "--rule", f"allow={API}")
    told.append(osb.told("credential-vault", "create", osb.id, "--file", "-", stdin=json.dumps(vault)))
    fetch()
    told.append(osb.told("credential-vault", "patch", osb.id, "--file", "-", stdin=json.dumps(change)))
    fetch()
    for kind, name in (("credential", "token"), ("binding", "api")):
        told.append(osb.told("credential-vault", kind, "list", osb.id))
        told.append(osb.told("credential-vault", kind, "get", osb.id, name))
    assert 2 == osb.json("credential-vault get", osb.id)["revision"]
    osb.told("credential-vault", "delete", osb.id)
    fetch()
    policy = osb.json("egress get", osb.id)

    assert [f"Bearer {first}", f"Bearer {second}", None] == authorizations(internet, marker)
    assert [] == [text for text in told if first in text or second in text]
    assert [API, STATUS] == sorted(rule["target"] for rule in policy["egress"])
    assert 1 == osb("credential-vault", "get", osb.id)[0]


@pytest.mark.extended
def test_osb_takes_lists_restores_and_removes_snapshots(osb: Osb) -> None:
    """A sandbox that begins with a snapshot has the file of its source."""
    osb.told("file", "write", osb.id, "/root/kept", "-c", "by osb")
    snapshot = osb.json("snapshot create", osb.id, "--name", "osb")["id"]
    deadline = time.monotonic() + ANSWER_SECONDS
    while (state := osb.json("snapshot get", snapshot)["status"]["state"]) == "Creating":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    listed = osb.json("snapshot list", "--name", "osb")
    restored = osb.json("sandbox create", "--snapshot-id", snapshot, "--timeout", "10m")["id"]
    told = osb.told("file", "cat", restored, "/root/kept")
    osb.told("sandbox", "kill", restored)
    osb.told("snapshot", "delete", snapshot)

    assert "Ready" == state
    assert snapshot in json.dumps(listed)
    assert "by osb" in told
    assert 1 == osb("snapshot", "get", snapshot)[0]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("sandbox pause sbx-000000000000000000000000", "DOCKER::SANDBOX_NOT_FOUND"),
        ("sandbox resume {id}", "DOCKER::SANDBOX_NOT_PAUSED"),
        ("snapshot delete unknown", "SNAPSHOT::NOT_FOUND"),
        ("sandbox create --snapshot-id unknown", "SNAPSHOT::NOT_FOUND"),
        ("snapshot get unknown", "SNAPSHOT::NOT_FOUND"),
        ("diagnostics logs {id} --scope process", "DIAGNOSTICS_SCOPE_UNSUPPORTED"),
        ("diagnostics events sbx-000000000000000000000000 --scope all", "DOCKER::SANDBOX_NOT_FOUND"),
        ("devops summary sbx-000000000000000000000000", "not found"),
        ("template list", "FSB::API_NOT_SUPPORTED"),
        ("sandbox create --template tpl_x --timeout 1m", "FSB::API_NOT_SUPPORTED"),
        ("sandbox create --image unknown:1", "DOCKER::SANDBOX_IMAGE_PULL_FAILED"),
        ("sandbox get sbx-000000000000000000000000", "DOCKER::SANDBOX_NOT_FOUND"),
        ("command status {id} unknown", "command not found: unknown"),
    ],
)
def test_osb_says_what_cannot_be(osb: Osb, command: str, code: str) -> None:
    status, out, err = osb(*command.format(id=osb.id).split())

    assert 1 == status
    assert "".join(code.split()) in "".join((out + err).split())  # the program wraps its lines


@pytest.mark.extended
def test_osb_shows_diagnostics_of_a_sandbox_and_of_a_removed_one(osb: Osb) -> None:
    """Logs and events with a scope, and all commands of the plain text."""
    secret = f"value-{secrets.token_hex(8)}"
    options = ["--image", "sallyport/base", "--timeout", "20m", "--env", f"TOKEN={secret}", "--extension"]
    options += ["sallyport.runtime=runc", "--resource", "memory=256Mi"]
    options += ["--entrypoint", "sh", "--entrypoint", "-c", "--entrypoint", "echo said $TOKEN; sleep 600"]
    name = osb.json("sandbox create", *options)["id"]
    for removed in (False, True):
        if removed:
            osb.told("sandbox", "kill", name)
        logs = osb.json(f"diagnostics logs {name} --scope container")
        assert ("logs", "container", "said [env TOKEN]") == (logs["kind"], logs["scope"], logs["content"])
        assert "said [env TOKEN]" in osb.told("diagnostics", "logs", name, "--scope", "all")
        events = osb.told("diagnostics", "events", name, "--scope", "runtime")
        assert "CONTAINER_RUNNING: Sandbox container started successfully." in events
        plain = [osb.told("devops", what, name) for what in ("logs", "inspect", "events", "summary")]
        plain += [osb.told("devops", "logs", name, "--tail", "1", "--since", "10m")]
        plain += [osb.told("devops", "events", name, "--limit", "1")]
        plain += [osb.told("devops", "summary", name, "--tail", "1", "--event-limit", "1")]
        assert removed == ("Removed: deleted by the API." in plain[1])
        assert all(part in plain[3] for part in ("INSPECT", "EVENTS", "LOGS", "said [env TOKEN]"))
        assert not any(secret in text for text in (events, *plain, json.dumps(logs)))


class Mcp(Lines):
    """The MCP server on its standard input and output."""

    def __init__(self, clients: Path, environment: dict[str, str], log: Path) -> None:
        super().__init__([clients / "mcp/bin/opensandbox-mcp"], environment, log)
        self._number = 0
        client = {"name": "test", "version": "1"}
        self.ask("initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo=client)
        self.tell({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def ask(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        self.tell({"jsonrpc": "2.0", "id": self._number, "method": method, "params": parameters})
        while (heard := self.hear()).get("id") != self._number:
            pass
        return heard["result"]

    def call(self, tool: str, **arguments: Any) -> Any:
        """Return the result of `tool`, or None if it reports a failure."""
        result = self.ask("tools/call", name=tool, arguments=arguments)
        return None if result.get("isError") else result["structuredContent"]


@pytest.mark.extended
def test_every_tool_of_the_mcp_server_works_and_it_ends(
    clients: Path, surroundings: dict[str, str], tmp_path: Path, runtime: str
) -> None:
    mcp = Mcp(clients, surroundings, tmp_path / "log")
    called = set()
    try:
        made = mcp.call(
            "sandbox_create",
            image="sallyport/base",
            metadata={"made": f"by-mcp-{runtime}"},
            network_policy=OPEN,
            extensions={"sallyport.runtime": runtime},
        )
        name = made["sandbox_id"]

        def call(tool: str, **arguments: Any) -> Any:
            called.add(tool)
            return mcp.call(tool, sandbox_id=name, **arguments)

        listed = mcp.call("sandbox_list", filter={"metadata": {"made": f"by-mcp-{runtime}"}, "states": ["Running"]})
        assert [name] == [item["id"] for item in listed["sandbox_infos"]]
        assert "Running" == call("sandbox_get_info")["status"]["state"]
        assert call("sandbox_renew", timeout_seconds=3600)["expires_at"] > made["info"]["expires_at"]
        assert call("sandbox_healthcheck")["healthy"]
        assert 0 < call("sandbox_get_metrics")["memory_used_in_mib"]
        assert call("sandbox_get_endpoint", port=8000)["endpoint"].endswith(f"{name}/proxy/8000")
        assert name == call("sandbox_connect")["sandbox_id"]

        ran = call("command_run", command="pwd; echo bad >&2; exit 3", working_directory="/usr")
        assert ("/usr\n", "bad\n", 3) == (
            ran["logs"]["stdout"][0]["text"],
            ran["logs"]["stderr"][0]["text"],
            ran["exit_code"],
        )
        sleep = call("command_run", command="echo $$ > /tmp/pid; exec sleep 60", background=True)
        look = "kill -0 $(cat /tmp/pid)"
        until(lambda: bool(call("command_run", command=look)["exit_code"] == 0))
        assert {"status": "interrupted"} == call("command_interrupt", execution_id=sleep["id"])
        until(lambda: bool(call("command_run", command=look)["exit_code"] != 0))
        assert call("command_interrupt", execution_id="unknown") is None

        call("file_create_directories", entries=[{"path": "/tmp/mcp/deep", "mode": 700}])
        call("file_write", path="/tmp/mcp/a.txt", content="hello wörld\n", mode=640)
        call(
            "file_replace_contents", entries=[{"path": "/tmp/mcp/a.txt", "old_content": "hello", "new_content": "bye"}]
        )
        call("file_move", entries=[{"src": "/tmp/mcp/a.txt", "dest": "/tmp/mcp/deep/b.txt"}])
        found = call("file_search", path="/tmp/mcp", pattern="*.txt")["result"]
        assert [("/tmp/mcp/deep/b.txt", 640)] == [(entry["path"], entry["mode"]) for entry in found]
        assert "bye wörld\n" == call("file_read", path="/tmp/mcp/deep/b.txt")["content"]
        assert "bye" == call("file_read", path="/tmp/mcp/deep/b.txt", range_header="bytes=0-2")["content"]
        call("file_delete", paths=["/tmp/mcp/deep/b.txt"])
        assert call("file_read", path="/tmp/mcp/deep/b.txt") is None
        call("file_delete_directories", paths=["/tmp/mcp"])
        assert 1 == call("command_run", command="test -e /tmp/mcp")["exit_code"]

        assert {"status": "killed"} == call("sandbox_kill")
        assert call("sandbox_get_info") is None
        assert mcp.call("sandbox_create", image="unknown:1") is None
        offered = {tool["name"] for tool in mcp.ask("tools/list")["tools"]}
    finally:
        code = mcp.end()

    assert offered == called | {"sandbox_create", "sandbox_list"}
    assert 0 == code


@pytest.mark.extended
def test_the_npm_sdk(
    clients: Path, surroundings: dict[str, str], stack: Stack, internet: Internet, runtime: str
) -> None:
    secret = f"npm-{secrets.token_hex(20)}"
    with (HERE / "npm_journey.mjs").open() as program:
        done = subprocess.run(
            [
                *(clients / "node/bin/node", "--input-type=module", "-"),
                *(f"127.0.0.1:{stack.port}", stack.api_key, runtime, STATUS, API, secret),
            ],
            cwd=clients / "npm",
            env=surroundings,
            stdin=program,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert 0 == done.returncode, done.stderr
    seen = json.loads(done.stdout)
    isolated = [True, "layered", 2, "layered\n", [404, "UNEXPECTED_RESPONSE"]] if runtime == "runsc" else [False]

    assert [f"Bearer {secret}"] == authorizations(internet, f"npm-{seen.pop('id')}")
    assert {
        "info": ["Running", {"made": "by-npm"}, True],
        "health": [True, 512],
        "metadata": {"more": "yes"},
        "listed": [[True], 1],
        "run": ["hello\n", "bad\n", 3, ["hello\n", "3"]],
        "options": "/usr\nx\n65534\n",
        "timeout": -1,
        "streamed": ["one\n", "two\n"],
        "logs": [{"content": "begun\n", "cursor": 6}, True],
        "interrupted": -1,
        "session": ["7", "/tmp"],
        "streamedFile": [4_000_000, 78_000_000],
        "read": ["Hello Wörld", "Hello", "b\nc", [0, 1, 255]],
        "replaced": [{"path": "/tmp/demo/hello.txt", "replacedCount": 1}],
        "moved": ["/tmp/demo/below/moved.txt", 600, "nobody", "nogroup", "file"],
        "left": ["/tmp/demo/below", "/tmp/demo/below/moved.txt", "/tmp/demo/lines"],
        "gone": [404, "FILE_NOT_FOUND"],
        "vault": [1, {"type": "bearer"}, False],
        "held": [400, "UNEXPECTED_RESPONSE"],
        "egress": {"defaultAction": "deny", "egress": [{"action": "allow", "target": STATUS}]},
        "isolated": isolated,
        "served": "served\n",
        "signed": "served\n",
        "connected": "again\n",
        "paused": ["Paused", False, "resumed\n", "Paused", "managed\n"],
        "snapshot": [
            *("Creating", "Ready", "npm", True, [True], "by npm"),
            *([409, "SNAPSHOT::DELETE_CONFLICT"], [404, "SNAPSHOT::NOT_FOUND"]),
        ],
        "refused": {
            "pause": [409, "DOCKER::SANDBOX_NOT_RUNNING"],
            "resume": [409, "DOCKER::SANDBOX_NOT_PAUSED"],
            "snapshot": [404, "SNAPSHOT::NOT_FOUND"],
            "image": [400, "DOCKER::SANDBOX_IMAGE_PULL_FAILED"],
            "volume": [400, "VOLUME::HOST_PATH_NOT_ALLOWED"],
            "key": [401, "INVALID_API_KEY"],
        },
        "killed": [False, [404, "DOCKER::SANDBOX_NOT_FOUND"]],
    } == seen
