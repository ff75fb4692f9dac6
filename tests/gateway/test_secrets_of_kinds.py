"""Each kind of use of a secret in an exchange: a refusal of the vault is explained, and a revocation finds the flow."""

import pytest

from gateway.exchange import Exchange
from gateway.verdicts import Forward
from policy.compiled import secrets_to
from policy.decision import AllowRequest, decide_request
from policy.facts import RequestFacts, Scheme
from policy.logins import LoginPlan
from tests.gateway.exchange_cases import HOST, Case, Ports
from tests.gateway.test_exchange import DESTINATION, drive, ended, no_connection, parts_of, session_of
from tests.kinds import KINDS, Kind

kinds = pytest.mark.parametrize(
    ("kind", "secret"),
    [
        pytest.param(kind, secret, id=f"{kind.name}-{secret}")
        for kind in KINDS
        if kind.scheme is not Scheme.POSTGRES  # `tests/gateway/postgres` has the same properties of sessions
        for secret in kind.names
    ],
)


def case(kind: Kind, secret: str, **more: object) -> Case:
    """Return a request with the placeholders of every kind, under a policy with one rule of this kind."""
    policy = kind.policy(secret)
    decision = decide_request(policy, RequestFacts(HOST, 443, Scheme.HTTPS, "GET", "/v1", ""))
    assert isinstance(decision, AllowRequest)
    uses = secrets_to(policy, HOST)
    assert {secret} == {use.plan.secret for use in uses}
    assert not any(isinstance(use.plan, LoginPlan) for use in uses)
    headers = ((b"X-Note", b"__TOKEN__"),)
    return Case(kind.name, [], 200, decision=decision, uses=uses, secret=kind.value, headers=headers, **more)  # type: ignore[arg-type]


@kinds
def test_a_refusal_of_the_vault_names_the_secret_and_what_to_do(kind: Kind, secret: str) -> None:
    """Nothing is sent. The log has the secret, too. The control: without the refusal the request is sent."""
    assert drive(case(kind, secret)).sent is not None
    said = f"{secret} has no value; for the operator: missing: add it"
    seen = drive(case(kind, secret, refused=said))
    assert (403, None) == (seen.status, seen.sent)
    assert said.encode() in seen.body
    denied = [fields for name, decision, fields in seen.ports.records if (name, decision) == ("request", "deny")]
    assert [(said, secret)] == [(fields["reason"], fields["secret"]) for fields in denied]


@kinds
def test_a_revocation_finds_the_flow_from_the_first_wait_on(kind: Kind, secret: str) -> None:
    """At the lease already. A revocation then leaves nothing to send."""
    asked = case(kind, secret)
    ports: Ports = asked.ports()
    session = session_of(ports)
    found: list[bool] = []

    def note(_number: int, step: str) -> None:
        if step == "lease":
            found.append(secret in session.used)

    ports.on_step = note
    verdict = ended(Exchange(session, "q1").request(parts_of(asked), DESTINATION, no_connection))
    assert isinstance(verdict, Forward)
    assert found == [True]
    assert secret in session.used
