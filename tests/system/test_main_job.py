"""The main job through the published SDK, and what happens when it is asked for wrongly or cut short."""

import contextlib
from typing import Any

import httpx
import pytest
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.sandboxes import NetworkPolicy, NetworkRule

from demo.internet import API, ATTACKER, STATUS, Internet
from demo.sandboxes import DemoSandbox, Secrets, empty_image_works
from demo.stack import IMAGE, Stack

pytestmark = pytest.mark.system


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
        "unfulfilled-secret": {"extensions": {"sallyport.policy": "unfulfilled"}},
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_exist_is_refused_by_name_and_leaves_nothing(
    named: str, body: dict[str, Any], stack: Stack
) -> None:
    before = stack.host("list")["sandboxes"]
    request = {"image": {"uri": IMAGE}, "resourceLimits": {}, "entrypoint": ["tail", "-f", "/dev/null"], **body}
    answer = httpx.post(
        f"{stack.base}/v1/sandboxes", json=request, headers={"OPEN-SANDBOX-API-KEY": stack.api_key}, timeout=60
    )

    assert 400 <= answer.status_code < 500, answer.text
    assert {"code", "message"} <= answer.json().keys()
    assert named in answer.json()["message"]
    assert answer.headers["X-Request-ID"]
    assert before == stack.host("list")["sandboxes"]


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


def test_a_container_of_a_used_plan_cannot_be_started_again(stack: Stack, values: Secrets) -> None:
    """No plan, no container: not even Docker's own start brings a sandbox back without its gate."""
    sandbox = DemoSandbox(stack, "runc", values)
    try:
        container = stack.host("inspect", sandbox=sandbox.id)["container"]
        stack.docker("kill", container)
        done = stack.docker("start", container)

        assert 0 != done.returncode
        assert "plan" in done.stderr
    finally:
        with contextlib.suppress(SandboxApiException):
            sandbox.close()
