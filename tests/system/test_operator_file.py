"""The operator's file changes while sandboxes work: what it forbids is denied within two seconds, at the far end.

Each case removes something that a sandbox's credential binding needs. The document applies in any case: the binding is
out of force, the rest of the sandbox's policy stays in force under the new document, and the log names the binding. The
compiler reads the file (`policy/operator_file.py`).
"""

import json
import os
import secrets
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from opensandbox.models.sandboxes import CredentialProxyConfig, NetworkPolicy, NetworkRule

from testbed.internet import API, STATUS, Internet
from testbed.stack import POLICY, Stack
from tests.conftest import representatives
from tests.stopping import stop
from tests.system.test_changes import MARGIN, Asked, Asker, arrivals, askers, wait_for_questions
from tests.system.test_create_and_delete import until

pytestmark = pytest.mark.system

LIMIT = 2.0
"""Seconds until a changed file is in force."""
ENOUGH = 12
"""Questions at each host that are judged under each document."""


@dataclass(frozen=True, slots=True)
class Case:
    """The additional content of the file, before and after, the sandbox's own policy, and the hosts that it can still
    reach afterwards.
    """

    before: str
    after: str
    named: str | None
    host: str
    reached: frozenset[str]


CASES = {
    "a bound host is denied": Case("", f"always_deny: [{STATUS}]\n", None, STATUS, frozenset({API})),
    "the named policy is removed": Case(
        f"  doomed:\n    rules:\n      - {{id: both, hosts: [{API}, {STATUS}]}}\n", "", "doomed", STATUS, frozenset()
    ),
    "the ceiling is lowered": Case("", f"ceiling: {{hosts: [{API}]}}\n", None, STATUS, frozenset({API})),
    "wildcard bindings are taken back": Case(
        "wildcard_bindings: true\n", "", None, "*.bank.example", frozenset({API, STATUS})
    ),
}


def write(stack: Stack, more: str) -> float:
    """Replace the operator's file. Return the time of the replacement."""
    new = stack.policy.with_suffix(".new")
    new.write_text(POLICY.read_text() + more)
    new.chmod(0o644)
    os.replace(new, stack.policy)
    return time.time()


@pytest.fixture(autouse=True, name="restored")
def _restored(stack: Stack) -> Iterator[None]:
    yield
    read = reloads(stack)
    write(stack, "")
    assert until(lambda: reloads(stack) > read)


def bind(asker: Asker, case: Case, value: str) -> None:
    credential: Any = {"name": "token", "source": {"type": "inline", "value": value}}
    auth = {"type": "apiKey", "name": "x-bound", "credential": "token"}
    binding: Any = {"name": "bound", "match": {"hosts": [case.host]}, "auth": auth}
    asker.sandbox.credential_vault.create(credentials=[credential], bindings=[binding])


def asked(asker: Asker) -> list[Asked]:
    """Return the questions so far."""
    lines = asker.sandbox.files.read_file("/tmp/asked").splitlines(keepends=True)
    return [Asked(**json.loads(line)) for line in lines if line.endswith("\n")]


def enough(asker: Asker, since: float) -> bool:
    """Return whether each host got enough questions since a time."""
    hosts = [question.host for question in asked(asker) if question.began > since]
    return min(hosts.count(API), hosts.count(STATUS)) >= ENOUGH


def records(stack: Stack, asker: Asker, kind: str) -> list[dict[str, Any]]:
    return [item for item in stack.audit_records() if item.get("sandbox") == asker.id and item["kind"] == kind]


def reloads(stack: Stack) -> int:
    """Return how often the server has put a changed file in force."""
    return sum(item["kind"] == "lifecycle.policies" for item in stack.audit_records())


@pytest.mark.parametrize("name", representatives(CASES, "the ceiling is lowered"))
def test_a_change_that_forbids_applies_whatever_a_sandbox_was_given(
    stack: Stack, internet: Internet, name: str
) -> None:
    case, value, read = CASES[name], f"bound-{secrets.token_hex(16)}", reloads(stack)
    write(stack, case.before)
    if case.before:
        assert until(lambda: reloads(stack) > read)
    targets = sorted({API, STATUS, case.host})
    rules = [NetworkRule(action="allow", target=target) for target in targets]
    options: dict[str, Any] = {
        "policy": case.named,
        "network_policy": NetworkPolicy(defaultAction="deny", egress=rules),
        "credential_proxy": CredentialProxyConfig(enabled=True),
    }

    def used(asker: Asker, since: float) -> bool:
        arrived = arrivals(internet, asker.mark)
        return bool(arrived) and any(  # The client has opened its file before its first question.
            value in str(arrived[question.id])
            for question in asked(asker)
            if question.id in arrived and question.began > since
        )

    with askers(stack, (API, STATUS), **options) as made:
        for one in made:
            bind(one, case, value)
            assert until(lambda one=one: used(one, 0.0))  # type: ignore[misc]
        changed = write(stack, case.after)
        for one in made:
            assert until(lambda one=one: enough(one, changed + LIMIT))  # type: ignore[misc]
        restored = write(stack, case.before)
        for one in made:
            assert until(lambda one=one: used(one, restored))  # type: ignore[misc]
        told = {one.id: len(records(stack, one, "gateway.dropped")) for one in made}
        write(stack, case.after)
        headers = {"OPEN-SANDBOX-API-KEY": stack.api_key}
        with httpx.Client(base_url=f"{stack.base}/v1", headers=headers, timeout=60, trust_env=False) as http:
            for one in made:
                assert until(lambda one=one: len(records(stack, one, "gateway.dropped")) > told[one.id])  # type: ignore[misc]
                closed = http.put(f"/sandboxes/{one.id}/networkpolicy", json={"defaultAction": "deny", "egress": []})
                assert 200 == closed.status_code, closed.text
        ended = {one.id: one.finish() for one in made}
        for one in made:
            arrived = arrivals(internet, one.mark)
            under = [
                question
                for question in ended[one.id]
                if changed + LIMIT + MARGIN < question.began and question.ended < restored - MARGIN
            ]
            reached = {question.host for question in under if question.id in arrived}
            assert case.reached == reached, (name, one.id)
            assert [] == [item for item in under if value in str(arrived.get(item.id))]
            dropped = records(stack, one, "gateway.dropped")
            assert {"bound"} == {item["binding"] for item in dropped if "binding" in item}
            assert ({case.named} if case.named else set()) == {item["name"] for item in dropped if "name" in item}
            assert all(item["reason"] and item["decision"] == "deny" for item in dropped)
            assert "bound" in {item.get("binding") for item in records(stack, one, "gateway.restored")}


def test_a_tighter_document_does_not_wait_for_serve(stack: Stack, internet: Internet) -> None:
    """`serve` is stopped. hostd's compiler reads the file, and every gateway has the new policy."""
    rules = [NetworkRule(action="allow", target=target) for target in (API, STATUS)]
    everything = NetworkPolicy(defaultAction="deny", egress=rules)
    with askers(stack, (API, STATUS), policy=None, network_policy=everything) as made:
        for one in made:
            for host in (API, STATUS):
                wait_for_questions(internet, one.mark, host)
        serve = int((stack.run / "config" / "serve.pid").read_text().split()[0])
        stop(serve)
        try:
            changed = write(stack, f"always_deny: [{STATUS}]\n")
            assert until(lambda: time.time() > changed + LIMIT)
            for one in made:
                wait_for_questions(internet, one.mark, API)
            continued = time.time()
        finally:
            os.kill(serve, signal.SIGCONT)
        for one in made:
            ended, arrived = one.finish(), arrivals(internet, one.mark)
            before = [item for item in ended if item.ended < changed - MARGIN]
            under = [
                item for item in ended if changed + LIMIT + MARGIN < item.began and item.ended < continued - MARGIN
            ]
            assert {API, STATUS} == {item.host for item in before if item.id in arrived}, one.id
            assert {API, STATUS} == {item.host for item in under}, one.id
            assert {API} == {item.host for item in under if item.id in arrived}, one.id
