"""The main job through the published SDK, and the results of wrong or interrupted calls."""

import contextlib
import secrets
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.sandboxes import NetworkPolicy, NetworkRule
from websockets.sync.client import connect

from demo.sandboxes import DemoSandbox, Secrets, empty_image_works
from testbed.internet import API, ATTACKER, STATUS, Internet
from testbed.stack import IMAGE, Stack

pytestmark = pytest.mark.system

_RUNNING = "{{.State.Running}} {{.State.Pid}} {{.State.StartedAt}}"


def processes_of(container: str) -> list[int]:
    """Return the processes in a container's control groups, and those that are named after it: its shim, its kernel."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # It has ended.
            if container in (path / "cgroup").read_text() + (path / "cmdline").read_text():
                found.append(int(path.name))
    return found


def left_of(container: str) -> list[int]:
    """Return the processes of a container that ends: none, or those that are left after half a minute."""
    deadline = time.monotonic() + 30
    while (left := processes_of(container)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_stock_tools_do_their_work_without_a_secret(runtime: str, sandboxes: dict[str, DemoSandbox]) -> None:
    rows = sandboxes[runtime].work()

    assert [] == [row for row in rows if not row.as_expected]


def test_execd_runs_in_an_image_without_a_single_file(runtime: str, stack: Stack) -> None:
    row = empty_image_works(stack, runtime)

    assert row.as_expected, row.observed


@pytest.mark.timed
def test_a_killed_worker_lets_nothing_out_and_its_replacement_is_trusted(
    runtime: str, sandboxes: dict[str, DemoSandbox], internet: Internet
) -> None:
    row = sandboxes[runtime].kill_worker(internet)

    assert row.as_expected, row.observed


def test_a_deleted_sandbox_leaves_nothing(runtime: str, stack: Stack, values: Secrets) -> None:
    row = DemoSandbox(stack, runtime, values).delete()

    assert row.as_expected, row.observed


def test_network_policy_of_the_create_call_is_enforced(runtime: str, stack: Stack) -> None:
    """An allowed name works and everything else is refused, with the SDK's own arguments."""
    rules = NetworkPolicy(defaultAction="deny", egress=[NetworkRule(action="allow", target=STATUS)])
    sandbox = stack.create(runtime, policy=None, network_policy=rules)
    try:
        allowed = sandbox.commands.run(f"curl -sS --max-time 20 https://{STATUS}/")
        refused = sandbox.commands.run(
            f"curl -sS --max-time 20 https://{API}/v1/x; getent hosts {ATTACKER} || echo none"
        )

        assert STATUS in allowed.text
        assert "method" not in refused.text
        assert "none" in refused.text
    finally:
        sandbox.kill()
        sandbox.close()


@pytest.mark.parametrize(
    ("named", "body"),
    {
        "firecracker": {"extensions": {"sallyport.runtime": "firecracker"}},
        "no-such-policy": {"extensions": {"sallyport.policy": "no-such-policy"}},
        "sallyport/no-such-image": {"image": {"uri": "sallyport/no-such-image"}},
        "memory": {"resourceLimits": {"memory": "a lot"}},
        "index-login": {"extensions": {"sallyport.policy": "misbound"}},
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_exist_is_refused_by_name_and_leaves_nothing(
    named: str, body: dict[str, Any], stack: Stack
) -> None:
    before = stack.sandboxes()
    request = {"image": {"uri": IMAGE}, "resourceLimits": {}, "entrypoint": ["tail", "-f", "/dev/null"], **body}
    answer = httpx.post(
        f"{stack.base}/v1/sandboxes", json=request, headers={"OPEN-SANDBOX-API-KEY": stack.api_key}, timeout=60
    )

    assert 400 <= answer.status_code < 500, answer.text
    assert {"code", "message"} <= answer.json().keys()
    assert named in answer.json()["message"]
    assert answer.headers["X-Request-ID"]
    assert before == stack.sandboxes()


def test_an_unknown_sandbox_is_not_found(stack: Stack) -> None:
    with pytest.raises(SandboxApiException) as raised:
        stack.connect("sbx-000000000000000000000000")

    assert 404 == raised.value.status_code


def test_without_the_api_key_nothing_is_answered(stack: Stack) -> None:
    answer = httpx.get(f"{stack.base}/v1/sandboxes", timeout=10)

    assert 401 == answer.status_code


def test_the_audit_log_verifies_and_tells_of_the_secrets_use(
    stack: Stack, sandboxes: dict[str, DemoSandbox], values: Secrets
) -> None:
    sandboxes["runc"].work()
    records = stack.audit_records()

    assert "secret.release" in {record["kind"] for record in records}
    stack.sallyport("audit", "verify")
    log = b"".join(path.read_bytes() for path in (stack.state / "audit").glob("*.jsonl"))
    assert [] == [True for value in values.values if value.encode() in log]


def test_no_log_and_no_state_tells_a_token(stack: Stack) -> None:
    """After calls with each kind of key, token and value, right ones and wrong ones, none is stored."""
    rules = {"defaultAction": "deny", "egress": [{"action": "allow", "target": API}]}
    request = {
        "image": {"uri": IMAGE},
        "resourceLimits": {},
        "entrypoint": ["tail", "-f", "/dev/null"],
        "networkPolicy": rules,
        "credentialProxy": {"enabled": True},
        "secureAccess": True,
        "extensions": {"sallyport.runtime": "runc"},
    }
    told = {name: f"{name}-{secrets.token_hex(20)}" for name in ("value", "query", "word", "wrong")}
    with httpx.Client(base_url=f"{stack.base}/v1", timeout=60) as http:
        http.headers["OPEN-SANDBOX-API-KEY"] = stack.api_key
        sandbox = http.post("/sandboxes", json=request).json()["id"]
        route = f"/sandboxes/{sandbox}"
        try:
            tokens = {port: http.get(f"{route}/endpoints/{port}").json()["headers"] for port in (44772, 18080)}
            told |= {name: value for headers in tokens.values() for name, value in headers.items()}
            execd, egress = (f"{route}/proxy/{port}" for port in tokens)
            command = http.post(f"{execd}/command", json={"command": f"echo {told['word']}"}, headers=tokens[44772])
            assert told["word"] in command.text
            made = http.post(f"{execd}/pty", json={}, headers=tokens[44772]).json()["session_id"]
            url = f"ws://127.0.0.1:{stack.port}/v1{execd}/pty/{made}/ws?token={told['query']}"
            with connect(url, additional_headers=tokens[44772]) as terminal:
                assert "connected" in str(terminal.recv(timeout=30))
            vault = {
                "credentials": [{"name": "c", "source": {"type": "inline", "value": told["value"]}}],
                "bindings": [],
            }
            assert 201 == http.post(f"{egress}/credential-vault", json=vault, headers=tokens[18080]).status_code
            broken = {**request, "env": {"A": [told["value"]]}}
            assert 422 == http.post("/sandboxes", json=broken).status_code
            assert 400 == http.post(f"/sandboxes?key={told['query']}", json=broken).status_code
            wrong = {
                name: http.get(
                    f"{execd}/metrics?x={told['query']}", headers={**tokens[44772], name: told["wrong"]}
                ).status_code
                for name in ("OPEN-SANDBOX-API-KEY", *tokens[44772], *tokens[18080])
            }
            # The way to execd requires execd's token only.
            assert {name: 401 if name in tokens[44772] else 200 for name in wrong} == wrong
            texts = _kept(stack)
        finally:
            assert 204 == http.delete(route).status_code
    texts |= {f"{path} after": text for path, text in _kept(stack).items()}
    told["key"] = stack.api_key
    assert any(sandbox.encode() in text for text in texts.values())
    own = {record["kind"] for record in stack.audit_records() if record.get("sandbox") == sandbox}
    assert "ingress" in own  # The control of the next line: execd sends nothing by itself.
    assert set() == own & {"dns", "flow", "request"}
    assert [] == [
        (path, name) for path, text in texts.items() for name, value in told.items() if value.encode() in text
    ]


def _kept(stack: Stack) -> dict[str, bytes]:
    """Return everything that the server and its Docker have written, except the file with the API key, and all command
    lines.
    """
    places = [stack.directory, stack.run, stack.stores[1] / "containers"]
    paths = [path for place in places for path in place.rglob("*") if path.name != "api-key"]
    texts = {}
    for path in (*paths, *Path("/proc").glob("[0-9]*/cmdline")):
        with contextlib.suppress(OSError):
            if path.is_file() and path.stat().st_size < 64 << 20:
                texts[str(path)] = path.read_bytes()
    return texts


def test_a_container_of_a_used_plan_cannot_be_started_again(stack: Stack, runtime: str, values: Secrets) -> None:
    """No container starts without a plan: even Docker's own start does not start a sandbox without its gateway."""
    sandbox = DemoSandbox(stack, runtime, values)
    try:
        container = stack.container(sandbox.id)
        assert "true" == stack.docker("inspect", "-f", _RUNNING, container).stdout.split()[0]
        assert [] != processes_of(container)
        assert 0 == stack.docker("kill", container).returncode
        assert [] == left_of(container)
        before = stack.docker("inspect", "-f", _RUNNING, container).stdout.split()
        for command in ("start", "restart"):
            done = stack.docker(command, container)

            assert ["false", "0", before[2]] == stack.docker("inspect", "-f", _RUNNING, container).stdout.split()
            assert [] == left_of(container)
            assert "sallyport: no launch plan: only Sallyport starts this container" in done.stderr
    finally:
        with contextlib.suppress(SandboxApiException):
            sandbox.close()
