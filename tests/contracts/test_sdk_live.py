"""The unmodified OpenSandbox SDK, synchronous and asynchronous, against a running server: its calls have their effects.

Network effects are judged by the requests that the demo internet received.
"""

import base64
import inspect
import json
import secrets
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from opensandbox.config.connection import ConnectionConfig
from opensandbox.config.connection_sync import ConnectionConfigSync
from opensandbox.exceptions import SandboxApiException, SandboxException
from opensandbox.manager import SandboxManager
from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.filesystem import (
    ContentReplaceEntry,
    DirectoryListEntry,
    MoveEntry,
    SearchEntry,
    SetPermissionEntry,
    WriteEntry,
)
from opensandbox.models.isolated import (
    BindMount,
    CreateIsolatedSessionRequest,
    IsolatedOverlaySpec,
    IsolatedRunOpts,
)
from opensandbox.models.sandboxes import (
    Credential,
    CredentialBinding,
    CredentialProxyConfig,
    NetworkPolicy,
    NetworkRule,
    SandboxFilter,
)
from opensandbox.sandbox import Sandbox
from opensandbox.sync.manager import SandboxManagerSync
from opensandbox.sync.sandbox import SandboxSync
from websockets.asyncio.client import connect

from testbed.internet import API, STATUS, Internet, received_field
from testbed.stack import IMAGE, Stack
from tests.conftest import ON_RUNSC, RUNTIMES

pytestmark = pytest.mark.system

BIG = 20 << 20


async def settle(value: Any) -> Any:
    """Return the value of a call of either SDK."""
    return await value if inspect.isawaitable(value) else value


class Sdk:
    """One of the two SDKs."""

    def __init__(self, kind: str, stack: Stack) -> None:
        self.kind, self.stack = kind, stack
        self._open: list[Any] = []

    def connection(self, **options: Any) -> Any:
        """Return the configuration of a connection to the server."""
        cls = ConnectionConfig if self.kind == "async" else ConnectionConfigSync
        return cls(domain=f"127.0.0.1:{self.stack.port}", api_key=self.stack.api_key, **options)

    async def create(self, **options: Any) -> Any:
        """Create a sandbox. It is removed after the test."""
        cls: Any = Sandbox if self.kind == "async" else SandboxSync
        proxied = options.pop("use_server_proxy", False)
        extensions = {"sallyport.runtime": "runc"} | options.pop("extensions", {})
        options.setdefault("connection_config", self.connection(use_server_proxy=proxied))
        sandbox = await settle(cls.create(options.pop("image", IMAGE), extensions=extensions, **options))
        self._open.append(sandbox)
        return sandbox

    async def connect(self, name: str, **options: Any) -> Any:
        cls: Any = Sandbox if self.kind == "async" else SandboxSync
        sandbox = await settle(cls.connect(name, connection_config=self.connection(**options)))
        self._open.append(sandbox)
        return sandbox

    async def resume(self, name: str) -> Any:
        cls: Any = Sandbox if self.kind == "async" else SandboxSync
        sandbox = await settle(cls.resume(name, connection_config=self.connection()))
        self._open.append(sandbox)
        return sandbox

    async def manager(self) -> Any:
        cls: Any = SandboxManager if self.kind == "async" else SandboxManagerSync
        manager = await settle(cls.create(connection_config=self.connection()))
        self._open.append(manager)
        return manager

    async def close(self) -> None:
        for item in reversed(self._open):
            if hasattr(item, "kill"):
                try:
                    await settle(item.kill())
                except SandboxApiException as error:
                    if error.status_code != httpx.codes.NOT_FOUND:
                        raise
            await settle(item.close())


BOTH_KINDS = pytest.mark.parametrize("sdk", ["sync", "async"], indirect=True)
"""For a test of each part of the API. Only --all runs the other tests with the asynchronous client too."""


@pytest.fixture(params=["sync", pytest.param("async", marks=pytest.mark.extended)], name="sdk")
async def _sdk(request: pytest.FixtureRequest, stack: Stack) -> AsyncIterator[Sdk]:
    sdk = Sdk(request.param, stack)
    yield sdk
    await sdk.close()


async def within(condition: Callable[[], Awaitable[bool]], seconds: float) -> bool:
    """Return whether `condition` became true in time."""
    deadline = time.monotonic() + seconds
    while not await condition():
        if time.monotonic() > deadline:
            return False
    return True


def out(execution: Any) -> str:
    return "".join(message.text for message in execution.logs.stdout)


async def shell(sandbox: Any, command: str | list[str], **options: Any) -> Any:
    return await settle(sandbox.commands.run(command, opts=RunCommandOpts(**options) if options else None))


@BOTH_KINDS
async def test_what_a_create_call_says_is_what_there_is(sdk: Sdk) -> None:
    """Entrypoint echoed exactly, environment, metadata, limits as text, and no expiry if none was requested."""
    entrypoint = ["/bin/sh", "-c", "echo started >/tmp/marker; exec sleep 3600"]
    sandbox = await sdk.create(
        entrypoint=entrypoint,
        env={"PLAIN": "a b=c", "EMPTY": ""},
        metadata={"team": "a", "example.com/role": "x.y"},
        resource={"cpu": "500m", "memory": "256Mi"},
        timeout=None,
    )
    info = await settle(sandbox.get_info())
    execution = await shell(sandbox, 'cat /tmp/marker; printf \'%s|%s|\' "$PLAIN" "${EMPTY-unset}"')

    assert (entrypoint, "Running", None) == (info.entrypoint, info.status.state, info.expires_at)
    assert {"team": "a", "example.com/role": "x.y"} == info.metadata
    assert IMAGE == info.image.image
    assert "started\na b=c||" == out(execution).replace("\r", "")
    metrics = await settle(sandbox.get_metrics())
    assert 0 < metrics.memory_used_in_mib <= metrics.memory_total_in_mib == 256
    assert metrics.cpu_count > 0
    assert 0 <= metrics.cpu_used_percentage <= 100
    assert await settle(sandbox.is_healthy())


def test_an_explicit_null_is_no_value(stack: Stack) -> None:
    """For fields that clients send as null, null means absent."""
    plain = {"image": {"uri": IMAGE}, "entrypoint": ["sleep", "60"], "resourceLimits": {"memory": "128Mi"}}
    nulls = {"env": {"A": None, "B": "b"}, "timeout": None}
    with httpx.Client(
        base_url=f"{stack.base}/v1", headers={"OPEN-SANDBOX-API-KEY": stack.api_key}, timeout=60
    ) as client:
        answer = client.post("/sandboxes", json=plain | nulls)
        assert 202 == answer.status_code, answer.text
        name = answer.json()["id"]
        try:
            assert f"/v1/sandboxes/{name}" == answer.headers["Location"]
            shown = client.get(f"/sandboxes/{name}").json()
            assert [] == [key for key, value in shown.items() if value is None]
            assert "expiresAt" not in shown
        finally:
            client.delete(f"/sandboxes/{name}")


@BOTH_KINDS
async def test_lists_renewals_metadata_and_the_end(sdk: Sdk) -> None:
    tag = secrets.token_hex(6)
    made = [await sdk.create(metadata={"run": tag, "n": str(n)}, timeout=timedelta(minutes=20)) for n in range(3)]
    manager = await sdk.manager()

    async def listed(**options: Any) -> Any:
        metadata = {"run": tag, **options.pop("metadata", {})}
        return await settle(manager.list_sandbox_infos(SandboxFilter(metadata=metadata, **options)))

    everything = await listed(page_size=2, page=1)
    rest = await listed(page_size=2, page=2)
    assert (3, 2, True) == (
        everything.pagination.total_items,
        everything.pagination.total_pages,
        everything.pagination.has_next_page,
    )
    ids = [info.id for page in (everything, rest) for info in page.sandbox_infos]
    assert [sandbox.id for sandbox in reversed(made)] == ids
    assert [made[1].id] == [info.id for info in (await listed(metadata={"n": "1"})).sandbox_infos]
    assert [] == (await listed(states=["Paused"])).sandbox_infos
    assert 3 == len((await listed(states=["running", "Paused"])).sandbox_infos)

    patched = await settle(made[0].patch_metadata({"n": None, "odd": "v_1.2"}))
    assert {"run": tag, "odd": "v_1.2"} == patched.metadata
    assert [made[0].id] == [info.id for info in (await listed(metadata={"odd": "v_1.2"})).sandbox_infos]

    renewed = await settle(made[0].renew(timedelta(minutes=2)))
    left = renewed.expires_at - datetime.now(UTC)
    assert timedelta(seconds=100) < left <= timedelta(minutes=2)
    await settle(manager.kill_sandbox(made[2].id))
    with pytest.raises(SandboxApiException) as raised:
        await settle(made[2].get_info())
    assert 404 == raised.value.status_code
    assert raised.value.request_id
    assert "DOCKER::SANDBOX_NOT_FOUND" == raised.value.error.code
    assert 2 == (await listed()).pagination.total_items


async def test_a_sandbox_is_paused_and_resumed(sdk: Sdk, runtime: str) -> None:
    """By the sandbox's own object and by the manager. The state is there at once, and what was in memory stays."""
    sandbox = await sdk.create(extensions={"sallyport.runtime": runtime}, timeout=timedelta(minutes=20))
    manager = await sdk.manager()
    session = await settle(sandbox.commands.create_session())
    await settle(sandbox.commands.run_in_session(session, "kept=value"))
    before = await settle(sandbox.get_info())

    await settle(sandbox.pause())
    paused = await settle(sandbox.get_info())
    assert ("Paused", before.expires_at) == (paused.status.state, paused.expires_at)
    with pytest.raises(SandboxApiException) as again:
        await settle(sandbox.pause())
    assert (409, "DOCKER::SANDBOX_NOT_RUNNING") == (again.value.status_code, again.value.error.code)
    with pytest.raises(SandboxException):
        await shell(sandbox, "true")
    assert not await settle(sandbox.is_healthy())
    listed = await settle(manager.list_sandbox_infos(SandboxFilter(states=["PAUSED"])))
    assert sandbox.id in [item.id for item in listed.sandbox_infos]

    resumed = await sdk.resume(sandbox.id)
    assert "Running" == (await settle(resumed.get_info())).status.state
    for one in (sandbox, resumed):
        assert "value" == out(await settle(one.commands.run_in_session(session, "echo $kept"))).strip()

    await settle(manager.pause_sandbox(sandbox.id))
    assert "Paused" == (await settle(sandbox.get_info())).status.state
    await settle(manager.resume_sandbox(sandbox.id))
    with pytest.raises(SandboxApiException) as again:
        await settle(manager.resume_sandbox(sandbox.id))
    assert (409, "DOCKER::SANDBOX_NOT_PAUSED") == (again.value.status_code, again.value.error.code)
    assert "on" == out(await shell(sandbox, "echo on")).strip()


@pytest.mark.parametrize("proxied", [False, True], ids=["direct", "proxied"])
async def test_endpoints_carry_what_their_ports_ask_for(sdk: Sdk, proxied: bool) -> None:
    """A second client that knows only the id gets the same."""
    sandbox = await sdk.create(use_server_proxy=proxied)
    again = await sdk.connect(sandbox.id, use_server_proxy=proxied)
    for port, header in ((44772, "X-EXECD-ACCESS-TOKEN"), (18080, "OPENSANDBOX-EGRESS-AUTH"), (8080, None)):
        endpoint = await settle(sandbox.get_endpoint(port))
        assert endpoint.endpoint.endswith(f"/v1/sandboxes/{sandbox.id}/proxy/{port}")
        assert "://" not in endpoint.endpoint
        assert ({header} if header else set()) == set(endpoint.headers)
        assert endpoint == await settle(again.get_endpoint(port))
    assert "hello\n" == out(await shell(again, "echo hello"))
    with pytest.raises(SandboxApiException) as raised:
        await sdk.connect("sbx-000000000000000000000000")
    assert (404, True) == (raised.value.status_code, bool(raised.value.request_id))


@BOTH_KINDS
async def test_files(sdk: Sdk) -> None:
    sandbox = await sdk.create()
    files = sandbox.files
    await settle(files.create_directories([WriteEntry(path="/tmp/d/e", mode=755)]))
    await settle(files.write_file("/tmp/d/one.txt", "grüße\n", mode=640))
    await settle(files.write_files([WriteEntry(path="/tmp/d/e/two.bin", data=b"\0\xff\r\n", mode=600)]))
    assert "grüße\n" == await settle(files.read_file("/tmp/d/one.txt"))
    assert b"\0\xff\r\n" == await settle(files.read_bytes("/tmp/d/e/two.bin"))
    assert b"\xff\r" == await settle(files.read_bytes("/tmp/d/e/two.bin", range_header="bytes=1-2"))

    info = (await settle(files.get_file_info(["/tmp/d/one.txt"])))["/tmp/d/one.txt"]
    assert (640, "root", 8) == (info.mode, info.owner, info.size)
    found = await settle(files.search(SearchEntry(path="/tmp/d", pattern="**/*.bin")))
    assert ["/tmp/d/e/two.bin"] == [entry.path for entry in found]
    listed = await settle(files.list_directory(DirectoryListEntry(path="/tmp/d", depth=2)))
    assert ["/tmp/d/e", "/tmp/d/e/two.bin", "/tmp/d/one.txt"] == sorted(entry.path for entry in listed)

    await settle(files.move_files([MoveEntry(src="/tmp/d/one.txt", dest="/tmp/d/three.txt")]))
    await settle(files.set_permissions([SetPermissionEntry(path="/tmp/d/three.txt", mode=600, owner="nobody")]))
    moved = (await settle(files.get_file_info(["/tmp/d/three.txt"])))["/tmp/d/three.txt"]
    assert (600, "nobody") == (moved.mode, moved.owner)
    entry = ContentReplaceEntry(path="/tmp/d/three.txt", old_content="grüße", new_content="hello")
    await settle(files.replace_contents([entry]))
    assert "hello\n" == await settle(files.read_file("/tmp/d/three.txt"))
    await settle(files.delete_files(["/tmp/d/three.txt"]))
    with pytest.raises(SandboxApiException) as raised:
        await settle(files.read_file("/tmp/d/three.txt"))
    assert 404 == raised.value.status_code
    await settle(files.delete_directories(["/tmp/d"]))
    assert "gone\n" == out(await shell(sandbox, "test -e /tmp/d || echo gone"))

    big = secrets.token_bytes(1 << 20) * (BIG >> 20)
    await settle(files.write_file("/tmp/big", big))
    assert big == await settle(files.read_bytes("/tmp/big"))


async def test_commands(sdk: Sdk) -> None:
    sandbox = await sdk.create(env={"OUTER": "o"})
    execution = await shell(sandbox, "echo out; echo err >&2; exit 7")
    assert (7, "out\n") == (execution.exit_code, out(execution))
    assert ["err\n"] == [message.text for message in execution.logs.stderr]
    assert (0, "a  b|$HOME|\n") == (
        (done := await shell(sandbox, ["printf", "%s|%s|\n", "a  b", "$HOME"])).exit_code,
        out(done),
    )
    told = await shell(sandbox, "pwd; echo $OUTER$INNER; id -u", working_directory="/usr", envs={"INNER": "i"}, uid=33)
    assert ["/usr", "oi", "33"] == out(told).split()

    late = await shell(sandbox, "sleep 5; touch /tmp/late", timeout=timedelta(seconds=1))
    assert late.exit_code != 0
    assert "none\n" == out(await shell(sandbox, "sleep 6; ls /tmp/late || echo none"))

    background = await shell(sandbox, "echo first; sleep 0.3; echo second; exit 3", background=True)

    async def ended() -> bool:
        return not (await settle(sandbox.commands.get_command_status(background.id))).running

    assert await within(ended, 60)
    assert 3 == (await settle(sandbox.commands.get_command_status(background.id))).exit_code
    logs = await settle(sandbox.commands.get_background_command_logs(background.id))
    assert ["first", "second"] == logs.content.split()

    endless = await shell(sandbox, "sleep 300", background=True)
    await settle(sandbox.commands.interrupt(endless.id))

    async def interrupted() -> bool:
        return not (await settle(sandbox.commands.get_command_status(endless.id))).running

    assert await within(interrupted, 60)


@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_a_signed_endpoint_is_all_that_a_program_needs(sdk: Sdk, runtime: str) -> None:
    """No key, token or header: HTTP and a WebSocket, until the expiry or the end of the sandbox. The plain endpoint
    needs the token that the SDK has.
    """
    sandbox = await sdk.create(extensions={"sallyport.runtime": runtime}, secure_access=True)
    server = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=8000, bind='0.0.0.0')"
    await settle(sandbox.files.write_file("/srv/file", "content"))
    await shell(sandbox, f'cd /srv && exec python3 -c "{server}"', background=True)
    until = int(time.time()) + 3600
    signed = await settle(sandbox.get_signed_endpoint(8000, until))
    plain = await settle(sandbox.get_endpoint(8000))
    assert not signed.headers
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:

        async def served() -> bool:
            return (await client.get(f"http://{signed.endpoint}/file")).text == "content"

        assert await within(served, 60)
        assert 401 == (await client.get(f"http://{plain.endpoint}/file")).status_code
        assert "content" == (await client.get(f"http://{plain.endpoint}/file", headers=plain.headers)).text
        altered = signed.endpoint[:-2] + ("A" if signed.endpoint[-2] != "A" else "B") + signed.endpoint[-1]
        assert 401 == (await client.get(f"http://{altered}/file")).status_code
        execd = await settle(sandbox.get_signed_endpoint(44772, until))
        assert 401 == (await client.get(f"http://{execd.endpoint}/metrics")).status_code
        assert 200 == (await client.get(f"http://{execd.endpoint}/metrics", headers=execd.headers)).status_code
        session = (await client.post(f"http://{execd.endpoint}/pty", json={}, headers=execd.headers)).json()[
            "session_id"
        ]
        url = f"ws://{execd.endpoint}/pty/{session}/ws"
        async with connect(url, additional_headers=execd.headers, proxy=None) as terminal:
            assert await terminal.recv()
        await settle(sandbox.kill())
        assert 404 == (await client.get(f"http://{signed.endpoint}/file")).status_code


@pytest.mark.parametrize("runtime", ON_RUNSC)
async def test_bash_sessions(sdk: Sdk, runtime: str) -> None:
    """State stays between runs as in a shell. A run that ends its shell does not change the state."""
    sandbox = await sdk.create(extensions={"sallyport.runtime": runtime})
    session = await settle(sandbox.commands.create_session(working_directory="/tmp/made/by-session"))

    async def run(command: str, **options: Any) -> Any:
        return await settle(sandbox.commands.run_in_session(session, command, **options))

    await run("export WHO=world; greet() { echo \"hello $1\"; }; declare -A map=([a]='b  c'); set -o pipefail; n=1")
    told = await run('greet "$WHO"; echo "${map[a]}"; pwd; false | true; echo $?')
    assert ["hello world", "b  c", "/tmp/made/by-session", "1"] == [message.text for message in told.logs.stdout]
    assert 3 == (await run("n=2; echo oops >&2; exit 3")).exit_code
    assert ["1"] == [message.text for message in (await run("echo $n")).logs.stdout]
    assert ["/usr"] == [message.text for message in (await run("pwd", working_directory="/usr")).logs.stdout]
    late = await run("sleep 60 & sleep 60", timeout=timedelta(seconds=1))
    assert (-1, ["timeout after 1s"]) == (late.exit_code, late.error.traceback)
    assert ["1 /usr"] == [message.text for message in (await run("echo $n $PWD")).logs.stdout]
    await settle(sandbox.commands.delete_session(session))
    with pytest.raises(SandboxException):
        await run("echo gone")


SCRIPTS = {
    "a script": "true\n\nmissing\necho $LINENO",
    "a function": "f() {\n  true\n  missing\n}\nf",
    "a sourced file": "printf 'true\\nmissing\\n' >/tmp/lib\n. /tmp/lib\nmissing",
    "a heredoc": "cat <<END\n$LINENO $(missing)\nEND\nmissing",
    "a trap": "trap 'echo $LINENO' ERR\ntrue\nfalse\ntrap - ERR",
    "an unfinished text": "true\necho 'one\n",
    "a syntax error": "true\n\nif true; then\nfi",
}


@pytest.mark.parametrize("runtime", ON_RUNSC)
async def test_messages_of_bash_sessions_count_the_lines_of_their_user(sdk: Sdk, runtime: str) -> None:
    """In every run, with any state of the session: the line numbers are those of the same text in a plain bash."""
    sandbox = await sdk.create(extensions={"sallyport.runtime": runtime})
    session = await settle(sandbox.commands.create_session())

    async def run(command: str) -> list[str]:
        told = (await settle(sandbox.commands.run_in_session(session, command))).logs
        return [line for message in told.stdout for line in message.text.replace(": eval: ", ": ").splitlines() if line]

    await run("earlier() {\n  true\n  missing\n}\nexport KEPT=$'\\n\\n'; declare -A map=([a]=b); set -o pipefail")
    for text in SCRIPTS.values():
        plain = await shell(sandbox, f"bash -c {shlex.quote(text)} bash 2>&1")
        assert [line for line in out(plain).replace(": -c: ", ": ").splitlines() if line] == await run(text)
        assert ["environment: line 3: missing: command not found"] == await run("earlier")


@pytest.mark.parametrize("runtime", ON_RUNSC)
async def test_files_of_an_identity(sdk: Sdk, runtime: str) -> None:
    """A file belongs to the identity that wrote it, and another identity cannot read it."""
    sandbox = await sdk.create(extensions={"sallyport.runtime": runtime})
    await shell(sandbox, "mkdir -m 1777 /tmp/shared")
    mine, other = sandbox.files_with_identity(1234, 1235), sandbox.files_with_identity(1300, 1300)
    await settle(mine.write_file("/tmp/shared/mine", "content", mode=600))
    assert "1234 1235 600" == out(await shell(sandbox, "stat -c '%u %g %a' /tmp/shared/mine")).strip()
    assert "content" == await settle(mine.read_file("/tmp/shared/mine"))
    with pytest.raises(SandboxException):
        await settle(other.read_file("/tmp/shared/mine"))


@pytest.mark.parametrize("runtime", ON_RUNSC)
async def test_a_terminal_over_the_servers_proxy(sdk: Sdk, runtime: str) -> None:
    """No SDK has terminals yet. The test uses the wire contract through the endpoint that the SDK returns."""
    sandbox = await sdk.create(extensions={"sallyport.runtime": runtime})
    endpoint = await settle(sandbox.get_endpoint(44772))
    base, headers = endpoint.endpoint, {**endpoint.headers, "OPEN-SANDBOX-API-KEY": sdk.stack.api_key}
    async with httpx.AsyncClient(headers=headers, timeout=60) as http:
        made = await http.post(f"http://{base}/pty", json={"cwd": "/tmp/made"})
        assert 201 == made.status_code, made.text
        session = made.json()["session_id"]
        async with connect(f"ws://{base}/pty/{session}/ws", additional_headers=headers) as terminal:
            assert ("connected", "pty") == itemgetter("type", "mode")(json.loads(await terminal.recv()))
            shown = b""
            while b"# " not in shown:  # during its start readline writes back the size that it has read
                frame = await terminal.recv()
                shown += frame[1:] if isinstance(frame, bytes) else b""
            await terminal.send(json.dumps({"type": "resize", "cols": 91, "rows": 31}))
            await terminal.send(b"\x00stty size; pwd; exit 5\n")
            texts = []
            async for frame in terminal:
                if isinstance(frame, bytes):
                    shown += frame[1:]
                else:
                    texts.append(json.loads(frame))
        assert b"31 91" in shown
        assert b"/tmp/made" in shown
        assert {"type": "exit", "exit_code": 5} == texts[-1]
        assert 200 == (await http.delete(f"http://{base}/pty/{session}")).status_code


def received(internet: Internet, marker: str) -> list[dict[str, Any]]:
    """Return the requests that reached any server with `marker` in their target."""
    return [note for note in internet.notes() if marker in str(note.get("target"))]


@BOTH_KINDS
@pytest.mark.parametrize("proxied", [False, True], ids=["direct", "proxied"])
async def test_an_egress_policy_changes_on_the_wire(sdk: Sdk, internet: Internet, proxied: bool) -> None:
    rules = NetworkPolicy(defaultAction="deny", egress=[NetworkRule(action="allow", target=STATUS)])
    sandbox = await sdk.create(network_policy=rules, use_server_proxy=proxied)
    policy = await settle(sandbox.get_egress_policy())
    assert ("deny", [("allow", STATUS)]) == (
        policy.default_action,
        [(rule.action, rule.target) for rule in policy.egress],
    )

    async def arrives(host: str) -> bool:
        marker = secrets.token_hex(8)
        await shell(sandbox, f"curl -sS -o /dev/null --max-time 20 https://{host}/{marker}")
        return bool(received(internet, marker))

    assert await arrives(STATUS)
    assert not await arrives(API)
    await settle(sandbox.patch_egress_rules([NetworkRule(action="allow", target=API)]))
    assert await arrives(API)
    await settle(sandbox.delete_egress_rules([API, "unknown.example.org"]))
    assert not await arrives(API)
    await settle(sandbox.patch_egress_rules([NetworkRule(action="deny", target=STATUS)]))
    assert not await arrives(STATUS)
    await settle(sandbox.delete_egress_rules([STATUS]))
    assert [] == (await settle(sandbox.get_egress_policy())).egress


async def test_a_credential_vault_acts_at_the_far_end(sdk: Sdk, internet: Internet) -> None:
    """Bearer, basic, apiKey and customHeaders reach the API host. A rotation and a revocation hold when answered."""
    rules = NetworkPolicy(defaultAction="deny", egress=[NetworkRule(action="allow", target=API)])
    sandbox = await sdk.create(network_policy=rules, credential_proxy=CredentialProxyConfig(enabled=True))
    values = {name: f"{name}-{secrets.token_hex(20)}" for name in ("token", "key", "first", "second")}
    values["login"] = base64.b64encode(f"user:{secrets.token_hex(20)}".encode()).decode()

    def binding(name: str, auth: dict[str, Any]) -> dict[str, Any]:
        return {"name": name, "match": {"hosts": [API], "paths": [f"/{name}/*"]}, "auth": auth}

    custom = [{"name": "X-First", "credential": "first"}, {"name": "X-Second", "credential": "second"}]
    made = await settle(
        sandbox.credential_vault.create(
            credentials=[{"name": name, "source": {"type": "inline", "value": text}} for name, text in values.items()],
            bindings=[
                binding("bearer", {"type": "bearer", "credential": "token"}),
                binding("basic", {"type": "basic", "credential": "login"}),
                binding("apikey", {"type": "apiKey", "name": "x-api-key", "credential": "key"}),
                binding("custom", {"type": "customHeaders", "headers": custom}),
            ],
        )
    )
    assert (1, sorted(values)) == (made.revision, [item.name for item in made.credentials])

    async def sent(name: str) -> dict[str, str]:
        """Return the headers that reach the API host for a request below the binding's path."""
        marker = secrets.token_hex(8)
        command = f"curl -sS -D - --max-time 20 -H 'Authorization: mine' https://{API}/{name}/{marker}"
        execution = await shell(sandbox, command)
        assert [] == [True for value in values.values() if value in out(execution)]
        (note,) = received(internet, marker)
        names = {key.lower() for key, _ in note["headers"]}
        return {name: str(received_field(note, name)) for name in names}

    assert f"Bearer {values['token']}" == (await sent("bearer"))["authorization"]
    assert f"Basic {values['login']}" == (await sent("basic"))["authorization"]
    assert values["key"] == (await sent("apikey"))["x-api-key"]
    headers = await sent("custom")
    assert (values["first"], values["second"]) == (headers["x-first"], headers["x-second"])
    assert "mine" == (await sent("unbound"))["authorization"]

    fresh = f"fresh-{secrets.token_hex(20)}"
    change = {"replace": [{"name": "token", "source": {"type": "inline", "value": fresh}}]}
    with pytest.raises(SandboxException):
        await settle(sandbox.credential_vault.patch(expected_revision=9, credentials=change))
    patched = await settle(sandbox.credential_vault.patch(expected_revision=1, credentials=change))
    assert 2 == patched.revision
    values["token"] = fresh

    assert f"Bearer {fresh}" == (await sent("bearer"))["authorization"]
    await settle(sandbox.credential_vault.delete())

    assert "mine" == (await sent("bearer"))["authorization"]
    with pytest.raises(SandboxException):
        await settle(sandbox.credential_vault.get())


@pytest.mark.parametrize("runtime", ON_RUNSC)
async def test_the_substitutions_of_a_binding_act_at_the_far_end(sdk: Sdk, internet: Internet, runtime: str) -> None:
    """On each surface, beside an injection and without one. They are not shown, and end with their binding."""
    rules = NetworkPolicy(defaultAction="deny", egress=[NetworkRule(action="allow", target=API)])
    sandbox = await sdk.create(
        network_policy=rules,
        credential_proxy=CredentialProxyConfig(enabled=True),
        extensions={"sallyport.runtime": runtime},
    )
    value, token = f"a b+{secrets.token_hex(20)}", f"token-{secrets.token_hex(20)}"
    encoded = quote(value, safe="")

    def binding(name: str, auth: dict[str, Any], *surfaces: str) -> CredentialBinding:
        substitution = {"credential": "value", "placeholder": "__VALUE__", "in": list(surfaces)}
        match = {"hosts": [API], "paths": [f"/{name}/*"], "methods": ["POST"]}
        return CredentialBinding.model_validate(
            {"name": name, "match": match, "auth": {**auth, "substitutions": [substitution]}}
        )

    made = await settle(
        sandbox.credential_vault.create(
            credentials=[
                Credential.model_validate({"name": name, "source": {"value": text}})
                for name, text in (("value", value), ("token", token))
            ],
            bindings=[
                binding("passthrough", {"type": "passthrough"}, "path", "query", "header", "body"),
                binding("bearer", {"type": "bearer", "credential": "token"}, "body"),
            ],
        )
    )
    assert [("bearer", "bearer"), ("passthrough", "passthrough")] == [
        (item.name, item.auth.type) for item in made.bindings
    ]
    assert "__VALUE__" not in made.model_dump_json()

    async def sent(name: str) -> dict[str, Any]:
        """Return the request that the API host receives below the path of a binding."""
        marker = secrets.token_hex(8)
        url = f"https://{API}/{name}/{marker}/__VALUE__?q=__VALUE__"
        command = f"curl -sS -D - --max-time 20 -H 'X-Own: __VALUE__' --json '{{\"v\": \"__VALUE__\"}}' '{url}'"
        execution = await shell(sandbox, command)
        assert [] == [True for text in (value, encoded, token) if text in out(execution)]
        (note,) = received(internet, marker)
        return {**note, "target": note["target"].replace(marker, "@")}

    whole = await sent("passthrough")
    assert f"/passthrough/@/{encoded}?q={encoded}" == whole["target"]
    assert (value, {"v": value}) == (received_field(whole, "x-own"), json.loads(whole["body"]))
    assert received_field(whole, "authorization") is None
    beside = await sent("bearer")
    assert "/bearer/@/__VALUE__?q=__VALUE__" == beside["target"]
    assert (f"Bearer {token}", "__VALUE__") == (
        received_field(beside, "authorization"),
        received_field(beside, "x-own"),
    )
    assert {"v": value} == json.loads(beside["body"])

    await settle(sandbox.credential_vault.patch(bindings={"delete": ["passthrough"]}))

    assert "/passthrough/@/__VALUE__?q=__VALUE__" == (await sent("passthrough"))["target"]


async def test_isolated_sessions(sdk: Sdk) -> None:
    """A session has its own layer, state between runs, files and background runs. None of it is visible outside."""
    extensions = {"sallyport.runtime": "runsc", "bootstrap.execd.isolation": "enable"}
    sandbox = await sdk.create(extensions=extensions)
    await shell(sandbox, "mkdir -p /workspace /data && echo below >/workspace/file && echo shared >/data/file")
    capabilities = await settle(sandbox.isolation.capabilities())
    assert (True, True, False) == (
        capabilities.available,
        capabilities.setpriv_available,
        capabilities.userns_available,
    )
    assert ("pid1", "active") == (capabilities.hardening.init_mode, capabilities.hardening.cap_drop.state)
    assert "CapEff:\t00000000000004fb" == out(await shell(sandbox, "grep CapEff /proc/self/status")).strip()
    request = CreateIsolatedSessionRequest(
        overlays=[IsolatedOverlaySpec(path="/workspace"), IsolatedOverlaySpec(path="/opt", persist=False)],
        binds=[BindMount(source="/data", readonly=True)],
        share_net=False,
    )
    session = await settle(sandbox.isolation.create(request))
    first = await settle(
        session.run(
            "n=1; echo above >file; touch /etc/x 2>/dev/null || echo read-only\n"
            "cat /proc/1/status /proc/self/status | grep CapEff | uniq; pwd\n"
            "umount /workspace 2>/dev/null || echo kept; ls /proc | grep -cE '^[0-9]+$'; grep -c eth0 /proc/net/dev"
        )
    )
    told = [message.text for message in first.logs.stdout]
    assert ["read-only", "CapEff:\t00000000000004fb", "/workspace", "kept"] == told[:4]
    assert (int(told[4]) < 9, "0") == (True, told[5])
    again = await settle(session.run("echo $n $MORE $(cat file)", opts=IsolatedRunOpts(envs={"MORE": "more"})))
    assert (["1 more above"], 0) == ([message.text for message in again.logs.stdout], again.exit_code)
    assert 3 == (await settle(session.run("exit 3"))).exit_code
    await settle(session.files.write_file("/workspace/made", "made"))
    assert "above\n" == await settle(session.files.read_file("/workspace/file"))
    assert "below\n" == await settle(sandbox.files.read_file("/workspace/file"))
    replaced = await settle(
        session.files.replace_contents_detailed(
            [ContentReplaceEntry(path="/workspace/file", old_content="above", new_content="new")]
        )
    )
    assert [1] == [item.replaced_count for item in replaced]
    assert {"/workspace/file", "/workspace/made"} == {
        item.path for item in await settle(session.files.search(SearchEntry(path="/workspace", pattern="*")))
    }
    with pytest.raises(SandboxException):
        await settle(session.files.write_file("/data/denied", "x"))
    late = await settle(session.run("sleep 60", opts=IsolatedRunOpts(timeout_seconds=1)))
    assert "IsolatedError" == late.error.name
    run = await settle(session.run_background("echo one; sleep 0.2; echo two; exit 4"))

    async def over() -> bool:
        return not (await settle(session.run_status(run.run_id))).running

    assert await within(over, 60)
    logs = await settle(session.run_logs(run.run_id, 4))
    assert (4, "two\n", 8) == ((await settle(session.run_status(run.run_id))).exit_code, logs.text, logs.cursor)
    other = await settle(sandbox.isolation.attach(session.session_id))
    assert "active" == (await settle(other.get())).status
    assert [session.session_id] == [item.session_id for item in await settle(sandbox.isolation.list())]
    cut = await settle(session.run_background("echo begun; sleep 600"))

    async def begun() -> bool:
        return (await settle(session.run_logs(cut.run_id))).text == "begun\n"

    assert await within(begun, 60)
    await shell(sandbox, "for p in /proc/[0-9]*; do grep -q isola[t] $p/cmdline && kill -9 ${p#/proc/}; done; true")

    async def dead() -> bool:
        return (await settle(other.get())).status == "dead"

    assert await within(dead, 60)
    ended = await settle(session.run_status(cut.run_id))
    assert (False, "session terminated") == (ended.running, ended.error)
    assert "begun\n" == (await settle(session.run_logs(cut.run_id))).text
    assert 4 == (await settle(session.run_status(run.run_id))).exit_code
    assert "two\n" == (await settle(session.run_logs(run.run_id, 4))).text
    await settle(session.delete())
    with pytest.raises(SandboxException):
        await settle(sandbox.isolation.attach(session.session_id))
    once = await settle(sandbox.isolation.run_once("cat file; id -u", workspace="/workspace"))
    assert ["below", "0"] == [message.text for message in once.logs.stdout]
    assert "0" == out(await shell(sandbox, "ls /var/lib/execd/isolation | wc -l")).strip()


async def test_isolated_sessions_are_not_pretended(sdk: Sdk) -> None:
    """Without the right to mount there are none. On a shared kernel no sandbox gets that right."""
    sandbox = await sdk.create()
    capabilities = await settle(sandbox.isolation.capabilities())
    assert not capabilities.available
    assert all(word in capabilities.message for word in ("bootstrap.execd.isolation", "sallyport.runtime", "runsc"))
    with pytest.raises(SandboxApiException) as refused:
        await settle(sandbox.isolation.run_once("true", workspace="/tmp"))
    assert 503 == refused.value.status_code
    with pytest.raises(SandboxApiException, match="runsc"):
        await sdk.create(extensions={"bootstrap.execd.isolation": "enable"})
