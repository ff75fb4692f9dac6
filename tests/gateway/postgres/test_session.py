"""One database session: the order of its steps, and each place at which it ends. No event loop runs."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pytest

from gateway.admission import Admission
from gateway.effects import Effects, Over, SecretRefused, SecretsSuspended
from gateway.engines.postgres.session import Credentials, DatabaseSession, SessionRefused
from gateway.startup import Startup
from gateway.verdicts import Origin, Route
from policy.decision import Deny
from policy.facts import FlowFacts, Scheme, SessionFacts
from policy.logins import LoginPlan
from policy.sessions import AllowSession
from tests.gateway.record_forms import PlainForms
from vault.secret import Secret

HOST = "db.test"
PLAN = LoginPlan("p/db", "db-login")
ALLOWED = AllowSession("p/db", PLAN)
ROUTE = Route("198.51.100.7", HOST)
STARTUP = Startup(0, "ledger", (), (), 0)
VALUE = "app:canary-of-the-session"


@dataclass
class Ports(PlainForms):
    """Every port. `order` has what was asked."""

    decisions: list[AllowSession | Deny | Exception] = field(default_factory=lambda: [ALLOWED])
    value: str | Exception = VALUE
    over: Over | None = None
    failing: str = ""
    order: list[str] = field(default_factory=list)
    on_login: Callable[[], None] = lambda: None

    def decide_session(self, facts: SessionFacts) -> AllowSession | Deny:
        self.order.append(f"decide {facts.database}")
        found = self.decisions.pop(0) if len(self.decisions) > 1 else self.decisions[0]
        if isinstance(found, Exception):
            raise found
        return found

    async def login(self, plan: LoginPlan, _facts: SessionFacts) -> Secret:
        self.order.append(f"lease {plan.secret}")
        self.on_login()
        if isinstance(self.value, Exception):
            raise self.value
        return Secret(self.value)

    def request(self) -> Over | None:
        self.order.append("count")
        return self.over

    async def accept(self, kind: str, decision: str, **fields: object) -> None:
        if kind == self.failing:
            raise ConnectionError("the log is gone")
        self.order.append(f"{kind} {decision}")
        assert VALUE.partition(":")[2] not in str(fields)

    def note(self, kind: str, decision: str, **_fields: object) -> None:
        self.order.append(f"note {kind} {decision}")


def _no_date() -> datetime:
    raise AssertionError("a session does not ask for the date")


class Steps:
    """A session, and an engine that takes its steps."""

    def __init__(self, ports: Ports, *, sessions: bool = True) -> None:
        self.ports = ports
        self.now = 0.0
        self.admission = Admission(lambda: self.now)
        effects = Effects(ports, ports, ports, ports, ports, self.admission, lambda: 0.0, _no_date)  # type: ignore[arg-type]
        origin = Origin(FlowFacts(HOST, 5432, Scheme.POSTGRES), "f1", "203.0.113.9", ("192.0.2.2", 40000), "postgres")
        self.session = DatabaseSession(origin, effects, ports if sessions else None)

    def all(self) -> Credentials:
        ended(self.session.judge(STARTUP))
        ended(self.session.connection(ROUTE))
        return ended(self.session.credentials())

    def refused(self) -> str:
        with pytest.raises(SessionRefused) as caught:
            self.all()
        answer = caught.value.answer
        assert b"E" == answer[:1]
        assert b"canary" not in answer
        return answer[5:].decode()


def ended[T](work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, which awaits only ports that answer at once."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    raise AssertionError("the session waits for something that is no port")


WHOLE = [
    "decide ledger",
    "count",
    "request allow",
    "connect info",
    "lease db-login",
    "secret.use allow",
    "decide ledger",
]


def test_a_session_takes_its_steps_in_this_order() -> None:
    steps = Steps(Ports())
    found = steps.all()
    assert WHOLE == steps.ports.order
    assert ("app", "canary-of-the-session") == (found.user, found.password.reveal())
    assert {"db-login"} == steps.session.used
    steps.session.ready()
    steps.session.finish(1, 2, None)
    assert "note request info" == steps.ports.order[-1]


def test_no_step_is_taken_twice_or_early() -> None:
    steps = Steps(Ports())
    for early in (steps.session.credentials, lambda: steps.session.connection(ROUTE)):
        with pytest.raises(RuntimeError, match="out of order"):
            ended(early())
    steps.all()
    for late in (steps.session.credentials, steps.session.cancelled, lambda: steps.session.judge(STARTUP)):
        with pytest.raises(RuntimeError, match="out of order"):
            ended(late())
    assert WHOLE == steps.ports.order


REFUSALS: dict[str, tuple[Ports, str, int]] = {
    "a denial": (Ports([Deny("default", "not this database")]), "C28000\0MDenied by policy rule default: not this", 1),
    "a budget": (Ports(over=Over("too many requests", 7)), "C53300\0Mtoo many requests", 2),
    "no record": (Ports(failing="request"), "C57P03\0MThe gateway's audit log", 2),
    "no record of the connection": (Ports(failing="connect"), "C57P03\0MThe gateway's audit log", 3),
    "no record of the use": (Ports(failing="secret.use"), "C57P03\0MThe gateway's audit log", 5),
    "no grant": (Ports(value=SecretRefused("not bound")), "C28000\0MDenied by policy rule p/db: not bound", 5),
    "a freeze": (Ports(value=SecretsSuspended("frozen by the operator")), "C57P03\0Mfrozen by the operator", 5),
    "no vault": (Ports(value=ConnectionError("canary")), "C57P03\0MThe gateway's vault gives no login", 5),
    "a short password": (Ports(value="app:canary"), "shorter than 8 characters", 5),
    "no login": (Ports(value="canary-without-a-colon"), "is not user:password", 5),
    "another policy": (Ports([ALLOWED, Deny("default", "x")]), "the policy changed", 7),
    "another login": (Ports([ALLOWED, AllowSession("p/db", LoginPlan("p/db", "other"))]), "the policy changed", 7),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_session_that_is_refused_takes_no_further_step(case: str) -> None:
    ports, expected, taken = REFUSALS[case]
    steps = Steps(ports)
    assert expected in steps.refused()
    assert WHOLE[:taken] == ports.order[:taken]
    assert {"request deny", "note request deny"} >= set(ports.order[taken:])
    assert [] != ports.order[taken:]


def test_a_gateway_without_sessions_refuses_each() -> None:
    assert "this gateway opens no database sessions" in Steps(Ports(), sessions=False).refused()


def test_a_decision_that_fails_ends_the_session() -> None:
    steps = Steps(Ports([ValueError("broken")]))
    with pytest.raises(ValueError, match="broken"):
        steps.all()


def test_a_session_whose_flow_was_aborted_goes_no_further() -> None:
    steps = Steps(Ports())

    def revoke() -> None:
        assert {"db-login"} == steps.session.used
        steps.session.over = True

    steps.ports.on_login = revoke
    with pytest.raises(ConnectionAbortedError):
        steps.all()
    assert WHOLE[:5] == steps.ports.order


def test_a_session_is_allowed_as_long_as_its_login_is() -> None:
    steps = Steps(Ports())
    assert steps.session.still_allowed()
    steps.all()
    assert steps.session.still_allowed()
    for later in (Deny("default", "x"), AllowSession("p/db", LoginPlan("p/db", "other"))):
        steps.ports.decisions = [later]
        assert not steps.session.still_allowed()


def test_a_cancel_request_is_counted_and_recorded() -> None:
    steps = Steps(Ports())
    ended(steps.session.cancelled())
    assert ["count", "request allow"] == steps.ports.order
    for ports in (Ports(over=Over("too many requests", 7)), Ports(failing="request")):
        with pytest.raises(SessionRefused):
            ended(Steps(ports).session.cancelled())


def test_the_time_of_the_vault_counts_as_the_workers_and_that_of_the_server_does_not() -> None:
    """Otherwise a server that answers slowly would have all requests of the sandbox refused."""
    steps, waits = Steps(Ports()), list[int | None]()

    def later() -> None:
        steps.now += 100
        waits.append(steps.admission.retry_after())

    steps.ports.on_login = later
    ended(steps.session.judge(STARTUP))
    later()
    ended(steps.session.connection(ROUTE))
    later()
    ended(steps.session.credentials())
    later()
    assert [None, None, 60, None] == waits


def test_a_worker_under_load_refuses_a_session() -> None:
    steps = Steps(Ports())
    steps.admission.begin()
    steps.now += 100
    assert "C53300\0MThe gateway is busy.\0HTry again in 60 seconds." in steps.refused()
    assert ["decide ledger", "note request deny"] == steps.ports.order
