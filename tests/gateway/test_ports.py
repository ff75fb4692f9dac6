"""A leased secret goes only into requests that its binding permits, and uploads stay within the budget."""

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv4Network, ip_address, ip_network
from typing import Any

import pytest

import wire
from audit.client import AuditClient, AuditUnavailable
from gateway import ports
from gateway.budget import Budget
from gateway.config import GatewayConfig, WorkerConstants
from gateway.dns.queries import Outcome
from gateway.dns.resolver import Resolution, Resolver
from gateway.effects import SecretRefused, SecretsSuspended
from gateway.ledger import Ledger
from gateway.ports import AuditRecorder, LeasedSecrets, PolicyDecider, StreamDialler
from gateway.upstream import DialError, DialFailure, UpstreamDialler, judge
from policy.compile import compile_named
from policy.compiled import DENY_ALL, CompiledPolicy, SecretAt
from policy.decision import AllowAddress, AllowRequest, Deny
from policy.facts import AddressSource, Destination, RequestFacts, Scheme, SessionFacts
from policy.injection import InjectionKind, InjectionPlan
from policy.load import load_text
from policy.logins import LoginPlan
from policy.names import HostPattern
from policy.paths import PathPattern
from policy.rules import Action, Endpoint, Limits, Precedence, Rule, RuleList
from tests.gateway.record_forms import PlainForms
from tests.gateway.states import Bound, in_force
from vault.client import ReleaseRefusedError, VaultClient, VaultUnavailableError
from vault.secret import Secret
from wire.api import auditd
from wire.api.auditd import Accepted, Entry, Record, Records
from wire.api.vaultd import CHANNEL, Release, Released, ReleasePurpose, Revoke, Scope, Value
from wire.gateway_limits import GatewayLimits
from wire.routes import own_address
from wire.serving import handler

_RULE = Rule("r", Action.ALLOW, (HostPattern("good.test"),), endpoints=(Endpoint(443, Scheme.HTTPS),))
POLICY = CompiledPolicy("p", (RuleList("p", Precedence.DENY_WINS, rules=(_RULE,)),))
PLAN = InjectionPlan("api", "token", InjectionKind.BEARER, "Authorization")
USE = SecretAt(PLAN, "good.test", Endpoint(443, Scheme.HTTPS))


def allowing(port: int) -> CompiledPolicy:
    """Return a policy that allows TLS to good.test on one port."""
    rule = Rule("r", Action.ALLOW, (HostPattern("good.test"),), endpoints=(Endpoint(port, Scheme.HTTPS),))
    return CompiledPolicy("p", (RuleList("p", Precedence.DENY_WINS, rules=(rule,)),))


def request(method: str = "GET", path: str = "/v1/x") -> RequestFacts:
    return RequestFacts("good.test", 443, Scheme.HTTPS, method, path, "q=1")


@dataclass
class Far:
    """vaultd's end of the channel."""

    scope: Scope = field(default_factory=Scope)
    refusal: wire.RequestError | None = None
    former: tuple[str, ...] = ()
    lease_seconds: int = 300
    uses: int | None = None
    sent: int | None = None
    asked: list[Release] = field(default_factory=list)
    channel: wire.Client | None = None

    async def handle(self, channel: wire.Client, request: Release, _fds: list[int]) -> Released:
        self.channel = channel
        self.asked.append(request)
        if self.refusal is not None:
            raise self.refusal
        former = tuple(map(Value, self.former))
        uses, sent = (None, None) if request.purpose else (self.uses, self.sent)
        return Released(Value(f"value {len(self.asked)}"), former, self.lease_seconds, self.scope, uses, sent)


@pytest.fixture
async def far() -> Far:
    return Far()


@pytest.fixture
async def secrets(far: Far) -> AsyncIterator[LeasedSecrets]:
    near, other = socket.socketpair()
    server = await wire.serve_connection(other, handler(CHANNEL, far.handle))
    vault = VaultClient.from_fd(near.detach())
    yield LeasedSecrets(in_force(vault=vault))
    await vault.close()
    await server.close()


async def test_a_release_is_asked_for_with_the_request_and_serves_the_next_ones(
    far: Far, secrets: LeasedSecrets
) -> None:
    assert Secret("value 1") == await secrets.lease(PLAN, request("POST", "/v1/x"), 100)
    assert Secret("value 1") == await secrets.lease(PLAN, request("GET", "/other"), 100)
    assert [Release("token", "good.test", 443, "https", "POST", "/v1/x", None, 100)] == far.asked


@pytest.mark.parametrize(
    ("outside", "reason"),
    [
        (request("POST"), "the secret is not bound to this method"),
        (request(path="/v2/x"), "the secret is not bound to this path"),
        (request(path="/v1/../x"), "the path is missing or could be read in two ways"),
    ],
)
async def test_a_lease_at_hand_is_refused_to_a_request_outside_its_scope(
    far: Far, secrets: LeasedSecrets, outside: RequestFacts, reason: str
) -> None:
    far.scope = Scope(("GET",), ("/v1/*",))
    await secrets.lease(PLAN, request(), 100)
    with pytest.raises(SecretRefused) as caught:
        await secrets.lease(PLAN, outside, 100)
    assert f"{PLAN.secret}: {reason}" == caught.value.reason
    assert Secret("value 1") == await secrets.lease(PLAN, request(path="/v1/y"), 100)
    assert 1 == len(far.asked)


async def test_a_value_that_came_with_another_scope_than_was_asked_for_is_not_used(
    far: Far, secrets: LeasedSecrets
) -> None:
    far.scope = Scope(("PUT",))
    with pytest.raises(SecretRefused):
        await secrets.lease(PLAN, request(), 100)


UNUSUAL = replace(request(), port=8443)
"""A port that can carry either scheme."""


@pytest.mark.parametrize(
    "other",
    [replace(UNUSUAL, host="other.test"), replace(UNUSUAL, port=8444), replace(UNUSUAL, scheme=Scheme.HTTP)],
    ids=["host", "port", "scheme"],
)
async def test_a_lease_is_for_one_destination(far: Far, secrets: LeasedSecrets, other: RequestFacts) -> None:
    """Another destination needs its own release, for requests and for the search of responses."""
    assert Secret("value 1") == await secrets.lease(PLAN, UNUSUAL, 100)
    far.refusal = wire.RequestError(wire.Code.NOT_BOUND, "the secret is not bound to this destination")
    with pytest.raises(SecretRefused):
        await secrets.lease(PLAN, other, 100)
    use = SecretAt(PLAN, other.host, Endpoint(other.port, other.scheme))
    with pytest.raises(SecretRefused):
        await secrets.searched(use)
    far.refusal = None
    assert Secret("value 1") == await secrets.lease(PLAN, UNUSUAL, 100)
    assert Secret("value 4") == await secrets.lease(PLAN, other, 100)
    assert (Secret("value 4"),) == await secrets.searched(use)
    assert [(asked.host, asked.port, asked.scheme) for asked in far.asked] == [
        (each.host, each.port, each.scheme.value) for each in (UNUSUAL, other, other, other)
    ]


async def test_a_login_has_a_release_of_its_own_and_no_method(far: Far, secrets: LeasedSecrets) -> None:
    plan, session = LoginPlan("p/db", "token"), SessionFacts("good.test", 8443, "ledger")
    assert Secret("value 1") == await secrets.lease(PLAN, UNUSUAL, 100)
    assert Secret("value 2") == await secrets.login(plan, session)
    assert Secret("value 2") == await secrets.login(plan, session)
    asked = far.asked[-1]
    assert ("good.test", 8443, "postgres", None, None) == (
        asked.host,
        asked.port,
        asked.scheme,
        asked.method,
        asked.path,
    )
    secrets.drop(None)
    far.scope = Scope(("PUT",))
    with pytest.raises(SecretRefused):
        await secrets.login(plan, session)


async def test_a_lease_is_for_one_secret(far: Far, secrets: LeasedSecrets) -> None:
    assert Secret("value 1") == await secrets.lease(PLAN, request(), 100)
    assert Secret("value 2") == await secrets.lease(replace(PLAN, secret="other"), request(), 100)
    assert ["token", "other"] == [asked.secret for asked in far.asked]


@pytest.mark.parametrize("dropped", [None, frozenset({"token"}), frozenset({"other"})])
async def test_what_is_dropped_is_asked_for_again(
    far: Far, secrets: LeasedSecrets, dropped: frozenset[str] | None
) -> None:
    await secrets.lease(PLAN, request(), 100)
    await secrets.searched(replace(USE, host="other.test"))
    far.refusal = wire.RequestError(wire.Code.NOT_GRANTED, "a sentence")
    absent = replace(USE, host="absent.test")
    with pytest.raises(SecretRefused):
        await secrets.searched(absent)
    far.refusal = None
    secrets.drop(dropped)
    kept = dropped == frozenset({"other"})
    assert Secret("value 1" if kept else "value 4") == await secrets.lease(PLAN, request(), 100)
    assert (Secret("value 2" if kept else "value 5"),) == await secrets.searched(replace(USE, host="other.test"))
    if kept:
        with pytest.raises(SecretRefused):
            await secrets.searched(absent)
    else:
        assert (Secret("value 6"),) == await secrets.searched(absent)


async def test_a_lease_ends_with_its_time_and_with_its_channel(far: Far, secrets: LeasedSecrets) -> None:
    far.lease_seconds = 0
    assert Secret("value 1") == await secrets.lease(PLAN, request(), 100)
    far.lease_seconds = 300
    assert Secret("value 2") == await secrets.lease(PLAN, request(), 100)
    assert Secret("value 2") == await secrets.lease(PLAN, request(), 100)
    assert far.channel is not None
    await far.channel.close()
    async with asyncio.timeout(10):
        await secrets._state.vault.closed.wait()
    with pytest.raises(VaultUnavailableError):
        await secrets.lease(PLAN, request(), 100)


async def test_concurrent_requests_share_one_release_and_each_is_held_against_its_scope(
    far: Far, secrets: LeasedSecrets
) -> None:
    far.scope = Scope(("GET",))
    asked = [request(), request("POST"), request(path="/other")]
    leases = (secrets.lease(PLAN, one, 100) for one in asked)
    first, second, third = await asyncio.gather(*leases, return_exceptions=True)
    assert (Secret("value 1"), Secret("value 1"), 1) == (first, third, len(far.asked))
    assert isinstance(second, SecretRefused)


async def test_after_a_revocation_the_lease_is_asked_for_again(far: Far, secrets: LeasedSecrets) -> None:
    await secrets.lease(PLAN, request(), 100)
    assert far.channel is not None
    await far.channel.notify("revoke", secrets=["token"])
    await far.channel.ask(Revoke(()))  # its answer follows the notification
    assert Secret("value 2") == await secrets.lease(PLAN, request(), 100)


@pytest.mark.parametrize("code", ["not_bound", "not_granted", "expired", "exhausted", "unknown_secret", "forbidden"])
async def test_what_vaultd_judged_is_a_refusal_with_its_reason(far: Far, secrets: LeasedSecrets, code: str) -> None:
    far.refusal = wire.RequestError(code, "a sentence")
    with pytest.raises(SecretRefused) as caught:
        await secrets.lease(PLAN, request(), 100)
    assert "a sentence" == caught.value.reason


@pytest.mark.parametrize("code", ["audit_unavailable", "rate_limited", "damaged", "stale_generation"])
async def test_what_vaultd_could_not_do_is_a_failure(far: Far, secrets: LeasedSecrets, code: str) -> None:
    far.refusal = wire.RequestError(code, "a sentence")
    with pytest.raises(ReleaseRefusedError):
        await secrets.lease(PLAN, request(), 100)


@pytest.mark.parametrize("code", [wire.Code.FROZEN, wire.Code.BACKEND])
@pytest.mark.parametrize("purpose", ["lease", "searched"])
async def test_a_suspended_secret_is_unknown_and_not_absent(
    far: Far, secrets: LeasedSecrets, purpose: str, code: wire.Code
) -> None:
    """A response could hold it still, so it must not be left out of the search. It is asked for again at once."""
    far.refusal = wire.RequestError(code, "a sentence")
    for _ in range(2):
        with pytest.raises(SecretsSuspended) as caught:
            await (secrets.lease(PLAN, request(), 100) if purpose == "lease" else secrets.searched(USE))
        assert "a sentence" == caught.value.reason
    far.refusal = None
    assert Secret("value 3") == await secrets.lease(PLAN, request(), 100)


@pytest.mark.parametrize("uses", [1, 3])
async def test_a_lease_serves_as_many_requests_as_it_permits(far: Far, secrets: LeasedSecrets, uses: int) -> None:
    """Requests at once take different uses; a request outside of the scope takes none, a search neither."""
    far.uses, far.scope = uses, Scope(("GET",))
    with pytest.raises(SecretRefused):
        await secrets.lease(PLAN, request("PUT"), 100)
    values = await asyncio.gather(*(secrets.lease(PLAN, request(), 100) for _ in range(6)))
    assert 6 // uses == len(far.asked)
    assert sorted(f"value {number // uses + 1}" for number in range(6)) == sorted(one.reveal() for one in values)
    assert (values[-1],) == await secrets.searched(USE)
    far.refusal = wire.RequestError(wire.Code.EXHAUSTED, "a sentence")
    with pytest.raises(SecretRefused):
        await secrets.lease(PLAN, request(), 100)
    assert (values[-1],) == await secrets.searched(USE)  # what was sent may still come back
    assert 6 // uses + 1 == len(far.asked)


async def test_requests_take_their_bytes_of_a_lease_and_what_is_left_is_added_to_the_next(
    far: Far, secrets: LeasedSecrets
) -> None:
    """So what vaultd counted is not lost with each request that is larger than what is left."""
    far.sent = 100
    for size, asked in ((40, 1), (50, 1), (11, 2), (99, 2), (101, 3), (None, 4)):
        await secrets.lease(PLAN, request(), size)
        assert asked == len(far.asked), size
    assert [40, 11, 101, None] == [one.size for one in far.asked]


async def test_bytes_that_were_left_end_with_the_drop_of_their_secret(far: Far, secrets: LeasedSecrets) -> None:
    far.sent = 100
    await secrets.lease(PLAN, request(), 40)
    secrets.drop(frozenset({PLAN.secret}))
    await secrets.lease(PLAN, request(), 40)
    await secrets.lease(PLAN, request(), 61)
    assert [40, 40, 61] == [one.size for one in far.asked]


async def test_requests_at_once_take_different_bytes(far: Far, secrets: LeasedSecrets) -> None:
    far.sent = 100
    await asyncio.gather(*(secrets.lease(PLAN, request(), 40) for _ in range(5)))
    assert 2 == len(far.asked)
    await secrets.lease(PLAN, request(), 0)
    assert 2 == len(far.asked)
    await secrets.lease(PLAN, request(), 1)
    assert 3 == len(far.asked)


async def test_a_request_outside_of_the_scope_takes_no_bytes(far: Far, secrets: LeasedSecrets) -> None:
    far.sent, far.scope = 100, Scope(("GET",))
    for _ in range(3):
        with pytest.raises(SecretRefused):
            await secrets.lease(PLAN, request("PUT"), 100)
    await secrets.lease(PLAN, request(), 100)
    assert 1 == len(far.asked)


async def test_a_login_has_no_known_length(far: Far, secrets: LeasedSecrets) -> None:
    await secrets.login(LoginPlan("p/db", "token"), SessionFacts("good.test", 8443, "ledger"))
    assert [None] == [one.size for one in far.asked]


async def test_a_lease_without_a_limit_after_one_with_a_limit_is_not_counted(far: Far, secrets: LeasedSecrets) -> None:
    far.uses = 1
    await secrets.lease(PLAN, request(), 100)
    far.uses = None
    assert 1 == len({(await secrets.lease(PLAN, request(), 100)).reveal() for _ in range(3)})


async def test_what_is_looked_for_is_released_once_for_no_request(far: Far, secrets: LeasedSecrets) -> None:
    """A release for the search serves no request.

    A request's own release, for its method and path, also serves the search.
    """
    far.scope = Scope(("PUT",))
    far.former = ("yesterday's value",)
    for _ in range(3):
        assert (Secret("value 1"), Secret("yesterday's value")) == await secrets.searched(USE)
    assert Secret("value 2") == await secrets.lease(PLAN, request("PUT"), 100)
    assert (Secret("value 2"), Secret("yesterday's value")) == await secrets.searched(USE)
    where = ("token", "good.test", 443, "https")
    assert [Release(*where, purpose=ReleasePurpose.SCRUB), Release(*where, "PUT", "/v1/x", size=100)] == far.asked


async def test_what_is_looked_for_is_asked_for_again_after_a_revocation_and_on_a_new_channel(far: Far) -> None:
    """From a restarted vaultd, or in a new worker: the search ends only with the secret itself."""
    for values in (1, 2):
        near, other = socket.socketpair()
        server = await wire.serve_connection(other, handler(CHANNEL, far.handle))
        vault = VaultClient.from_fd(near.detach())
        secrets = LeasedSecrets(in_force(vault=vault))
        assert (Secret(f"value {2 * values - 1}"),) == await secrets.searched(USE)
        assert far.channel is not None
        await far.channel.ask(Revoke(("token",)))
        assert (Secret(f"value {2 * values}"),) == await secrets.searched(USE)
        await vault.close()
        await server.close()


async def test_a_secret_the_sandbox_does_not_have_is_not_asked_for_with_each_request(
    far: Far, secrets: LeasedSecrets
) -> None:
    far.refusal = wire.RequestError(wire.Code.NOT_GRANTED, "a sentence")
    for _ in range(5):
        with pytest.raises(SecretRefused):
            await secrets.searched(USE)
    assert 1 == len(far.asked)
    far.refusal = None
    far.lease_seconds = 0
    await secrets.lease(PLAN, request(), 100)
    assert (Secret("value 3"),) == await secrets.searched(USE)  # the lease has ended, and the secret exists


async def test_what_is_not_known_is_no_absence(far: Far, secrets: LeasedSecrets) -> None:
    far.refusal = wire.RequestError(wire.Code.AUDIT_UNAVAILABLE, "a sentence")
    for _ in range(2):
        with pytest.raises(ReleaseRefusedError):
            await secrets.searched(USE)
    assert 2 == len(far.asked)


class Recorded(PlainForms):
    """A log that stores its records, or does not accept them."""

    def __init__(self, *, failing: bool = False) -> None:
        self.records: list[tuple[str, str, dict[str, object]]] = []
        self.failing = failing

    async def accept(self, kind: str, decision: str, **fields: object) -> None:
        if self.failing:
            raise AuditUnavailable("no log")
        self.note(kind, decision, **fields)

    def note(self, kind: str, decision: str, **fields: object) -> None:
        self.records.append((kind, decision, fields))


async def unannounced(_address: object, _allowed: object) -> None:
    return None


FLOW = {"flow": "f1", "host": "good.test", "destination": "203.0.113.9"}


def configured(policy: CompiledPolicy) -> GatewayConfig:
    hosts = {"good.test": (IPv4Address("127.0.0.1"),)}
    return GatewayConfig("sbx-1", 1, policy, WorkerConstants("", (), IPv4Address("192.0.2.2"), (), hosts))


def changed(config: GatewayConfig, **changes: Any) -> GatewayConfig:
    """Return the configuration of the same sandbox on a host with other constants."""
    return replace(config, constants=replace(config.constants, **changes))


@pytest.mark.parametrize(
    ("policy", "failure"),
    [(DENY_ALL, DialFailure.POLICY), (POLICY, DialFailure.POLICY), (allowing(1), DialFailure.CONNECT)],
)
async def test_a_flow_that_policy_does_not_allow_is_not_dialled(policy: CompiledPolicy, failure: DialFailure) -> None:
    """Even for the operator's own addresses of hosts, and after any earlier decision."""
    clock = asyncio.get_running_loop().time
    config = configured(policy)
    dialler = UpstreamDialler(Resolver((), clock), in_force(config), clock)

    with pytest.raises(DialError) as refused:
        await dialler.dial("good.test", 1, Scheme.HTTPS, unannounced)

    assert failure is refused.value.failure


async def test_an_address_that_policy_names_nowhere_is_not_dialled() -> None:
    clock = asyncio.get_running_loop().time
    config = configured(POLICY)
    dialler = UpstreamDialler(Resolver((), clock), in_force(config), clock)

    with pytest.raises(DialError) as refused:
        await dialler.dial_address(IPv4Address("93.184.216.34"), 443, unannounced)

    assert DialFailure.POLICY is refused.value.failure


async def test_nothing_is_dialled_while_the_guard_is_gone() -> None:
    clock = asyncio.get_running_loop().time
    dialler = UpstreamDialler(Resolver((), clock), in_force(configured(allowing(1)), alive=False), clock)

    with pytest.raises(DialError) as refused:
        await dialler.dial("good.test", 1, Scheme.HTTPS, unannounced)

    assert DialFailure.GUARD is refused.value.failure


async def test_a_dial_that_comes_early_waits_for_its_turn_and_no_longer_than_a_connection_may() -> None:
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    config = changed(configured(allowing(port)), limits=GatewayLimits(dial_rate=20, connect=1))
    clock = asyncio.get_running_loop().time
    dialler = UpstreamDialler(Resolver((), clock, lambda: True), in_force(config), clock)
    started = clock()
    begun: list[float] = []

    async def dial() -> float:
        begun.append(clock() - started)
        (await dialler.dial("good.test", port, Scheme.HTTPS, unannounced)).sock.close()
        return clock() - started

    ends = await asyncio.gather(*(dial() for _ in range(400)), return_exceptions=True)
    made = sorted(end for end in ends if isinstance(end, float))
    failures = {end.failure for end in ends if isinstance(end, DialError)}
    server.close()

    assert 60 <= len(made) <= 41 + 20 * (max(begun) + 1)  # the turns until one second after the last dial began
    assert {DialFailure.RATE} == failures
    assert all(after >= (number - 41) / 20 for number, after in enumerate(made, 1))


async def test_a_dial_that_waited_is_judged_by_the_policy_it_finds_then() -> None:
    config = changed(configured(allowing(1)), limits=GatewayLimits(dial_rate=1, connect=5))
    clock = asyncio.get_running_loop().time
    state = in_force(config)
    dialler = UpstreamDialler(Resolver((), clock, lambda: True), state, clock)
    dials = [asyncio.ensure_future(dialler.dial("good.test", 1, Scheme.HTTPS, unannounced)) for _ in range(3)]
    await asyncio.sleep(0.1)
    state.config = replace(config, policy=DENY_ALL)
    ends = await asyncio.gather(*dials, return_exceptions=True)

    failures = [end.failure for end in ends if isinstance(end, DialError)]
    assert [DialFailure.CONNECT, DialFailure.CONNECT, DialFailure.POLICY] == failures


async def test_a_change_of_policy_cuts_connections_to_addresses_that_it_denies() -> None:
    ends: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _reader, writer: ends.append(writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    config = configured(allowing(port))
    clock = asyncio.get_running_loop().time
    state = in_force(config)
    dialler = UpstreamDialler(Resolver((), clock), state, clock)
    streams = StreamDialler(dialler, Budget(Ledger.fresh(), Bound(Limits()), clock, lambda: None), Recorded())
    _, writer, _ = await streams.dial("good.test", port, Scheme.HTTPS, FLOW)

    assert (0, False) == (streams.recheck(), writer.is_closing())
    state.config = replace(config, policy=replace(config.policy, always_deny=("127.0.0.0/8",)))
    assert (1, True) == (streams.recheck(), writer.is_closing())
    assert 0 == streams.recheck()
    with pytest.raises(ConnectionError):
        await streams.dial("good.test", port, Scheme.HTTPS, FLOW)
    for end in ends:
        end.close()
    server.close()


async def test_a_connection_is_not_handed_out_if_the_policy_changed_while_it_was_made() -> None:
    """The dialler has judged and connected. Before its caller gets the connection, the policy denies the address."""
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    config = configured(allowing(port))
    clock = asyncio.get_running_loop().time

    class Overtaken(UpstreamDialler):
        async def dial(self, *arguments: Any) -> Any:
            connection = await super().dial(*arguments)
            state.config = replace(config, policy=replace(config.policy, always_deny=("127.0.0.0/8",)))
            return connection

    state = in_force(config)
    dialler = Overtaken(Resolver((), clock), state, clock)
    streams = StreamDialler(dialler, Budget(Ledger.fresh(), Bound(Limits()), clock, lambda: None), Recorded())
    with pytest.raises(ConnectionError, match="the policy changed"):
        await streams.dial("good.test", port, Scheme.HTTPS, FLOW)
    server.close()


def test_without_a_configuration_every_request_is_denied() -> None:
    decider = PolicyDecider(in_force())

    assert Deny("unconfigured", "no policy is active yet") == decider.decide_request(request())
    assert () == decider.secrets_to("good.test")


def test_the_policy_in_force_says_which_secrets_a_host_can_be_sent() -> None:
    rules = RuleList("p", Precedence.DENY_WINS, rules=(replace(_RULE, injections=(PLAN,)),))
    decider = PolicyDecider(in_force(configured(CompiledPolicy("p", (rules,)))))

    assert (USE,) == decider.secrets_to("good.test")
    assert () == decider.secrets_to("other.test")
    assert isinstance(decider.decide_request(request()), AllowRequest)
    assert isinstance(decider.decide_request(replace(request(), host="other.test")), Deny)


async def test_a_decision_is_recorded_with_the_policy_that_made_it_and_an_outcome_without() -> None:
    """auditd has the record before `accept` returns, and gets notes after it."""
    recorded: list[Entry] = []
    all_noted = asyncio.Event()

    async def keep(_channel: wire.Client, request: Record | Records, _fds: list[int]) -> Accepted:
        recorded.extend((request.entry,) if isinstance(request, Record) else request.entries)
        if len(recorded) == 7:
            all_noted.set()
        return Accepted(len(recorded))

    near, other = socket.socketpair()
    server = await wire.serve_connection(other, handler(auditd.CHANNEL, keep))
    audit = AuditClient.from_fd(near.detach())
    policy = replace(POLICY, always_deny=("evil.test",))
    state = in_force(configured(policy))
    recorder = AuditRecorder(audit, state)
    await recorder.accept("request", "deny", rule="always-deny:1")
    assert 1 == len(recorded)
    recorder.note("request", "deny", rule="always-deny:1")
    recorder.note("request", "info", rule="r")
    form = recorder.form("request", "allow", ("request_id",), rule="always-deny:1", error=None)
    form.note("f1-1")
    form.note("f1-2")
    state.config = None
    recorder.note("request", "deny", rule="r")
    form.note("f1-3")
    async with asyncio.timeout(10):
        await all_noted.wait()
    await audit.close()
    await server.close()

    by_policy = {"policy": policy.digest, "policy_name": "p"}
    assert [
        ("request", "deny", {"rule": "always-deny:1", "entry": "evil.test"} | by_policy),
        ("request", "deny", {"rule": "always-deny:1", "entry": "evil.test"} | by_policy),
        ("request", "info", {"rule": "r"}),
        ("request", "allow", {"rule": "always-deny:1", "entry": "evil.test", "request_id": "f1-1"} | by_policy),
        ("request", "allow", {"rule": "always-deny:1", "entry": "evil.test", "request_id": "f1-2"} | by_policy),
        ("request", "deny", {"rule": "r"}),
        ("request", "allow", {"rule": "always-deny:1", "request_id": "f1-3"}),
    ] == [(entry.kind, entry.decision, dict(entry.fields)) for entry in recorded]


class Waiting(Resolver):
    """A resolver that answers when it is released."""

    def __init__(self) -> None:
        super().__init__((), lambda: 0.0)
        self.asked, self.release = asyncio.Event(), asyncio.Event()

    async def resolve(self, host: str, *, counted: bool = False) -> Resolution:
        self.asked.set()
        await self.release.wait()
        return Resolution(Outcome.ADDRESSES, (IPv4Address("93.184.216.34"),), 60)


async def test_an_answer_is_judged_by_the_policy_that_is_in_force_when_it_comes() -> None:
    config = changed(configured(allowing(443)), host_addresses={})
    resolver, clock = Waiting(), asyncio.get_running_loop().time
    state = in_force(config)
    dialler = UpstreamDialler(resolver, state, clock)
    dial = asyncio.ensure_future(dialler.dial("good.test", 443, Scheme.HTTPS, unannounced))
    await resolver.asked.wait()
    state.config = replace(config, policy=replace(config.policy, always_deny=("93.184.216.0/24",)))
    resolver.release.set()
    with pytest.raises(DialError) as refused:
        await dial

    assert (DialFailure.POLICY, "always-deny:1") == (refused.value.failure, refused.value.rule)


@pytest.mark.parametrize("denied", ["good.test", "127.0.0.1/32"])
async def test_the_operators_own_map_dials_nothing_that_the_operator_always_denies(denied: str) -> None:
    config = configured(replace(allowing(1), always_deny=(denied,)))
    clock = asyncio.get_running_loop().time
    dialler = UpstreamDialler(Resolver((), clock), in_force(config), clock)
    with pytest.raises(DialError) as refused:
        await dialler.dial("good.test", 1, Scheme.HTTPS, unannounced)

    assert "always-deny:1" == refused.value.rule


async def test_a_name_beyond_a_bound_is_not_dialled_and_the_rule_is_said() -> None:
    config = changed(configured(allowing(443)), host_addresses={})
    denied = Deny("dns.unique_names", "Too many.")
    clock = asyncio.get_running_loop().time
    resolver = Resolver((), clock, may_ask=lambda _host: denied)
    with pytest.raises(DialError) as refused:
        await UpstreamDialler(resolver, in_force(config), clock).dial("good.test", 443, Scheme.HTTPS, unannounced)

    assert ("dns.unique_names", "Too many.") == (refused.value.rule, refused.value.reason)


@pytest.mark.parametrize(
    ("address", "opened", "own"),
    [
        ("127.0.0.1", (), True),
        ("127.0.0.1", (IPv4Network("127.0.0.0/8"),), True),
        ("93.184.216.34", (), False),
    ],
)
def test_the_host_knows_its_own_addresses(address: str, opened: tuple[IPv4Network, ...], own: bool) -> None:
    """An exception of the operator permits them."""
    config = GatewayConfig("sbx-1", 1, allowing(443), WorkerConstants("", (), IPv4Address("192.0.2.2"), opened))
    destination = Destination("good.test", IPv4Address(address), 443, Scheme.HTTPS, AddressSource.RESOLVED)

    assert own is own_address(IPv4Address(address))
    assert isinstance(judge(config, destination), Deny if own and not opened else AllowAddress)


async def test_the_write_beyond_the_budget_ends_the_connection_and_is_not_sent() -> None:
    received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    whole = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = b""
        try:
            while part := await reader.read(100):
                data += part
                if len(data) == 10:
                    whole.set()
        except ConnectionResetError:
            pass
        writer.close()
        received.set_result(data)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    config = configured(allowing(port))
    clock = asyncio.get_running_loop().time
    spent: list[float] = []
    budget = Budget(Ledger.fresh(), Bound(Limits(bytes_out=10)), clock, lambda: spent.append(clock()))
    dialler = UpstreamDialler(Resolver((), clock, lambda: True), in_force(config), clock)
    _, writer, address = await StreamDialler(dialler, budget, Recorded()).dial("good.test", port, Scheme.HTTPS, {})
    assert "127.0.0.1" == address
    writer.write(b"01234")
    writer.writelines([b"56", b"789"])
    await writer.drain()
    assert (False, 0) == (writer.is_closing(), len(spent))
    async with asyncio.timeout(20):
        await whole.wait()  # a reset can overtake earlier data
    writer.write(b"X")
    assert (True, 1) == (writer.is_closing(), len(spent))
    async with asyncio.timeout(20):
        assert b"0123456789" == await received
    server.close()


async def test_each_address_is_in_the_log_before_it_is_dialled_and_none_is_dialled_that_is_not() -> None:
    """Also the second address of a name, if the first does not answer."""
    began: list[int] = []
    arrived = asyncio.Event()
    log = Recorded()

    async def note(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        began.append(len(log.records))
        arrived.set()
        writer.close()

    server = await asyncio.start_server(note, "127.0.0.2", 0)
    port = server.sockets[0].getsockname()[1]
    hosts = {"good.test": (IPv4Address("127.0.0.1"), IPv4Address("127.0.0.2"))}
    config = changed(configured(allowing(port)), host_addresses=hosts)
    clock = asyncio.get_running_loop().time
    dialler = UpstreamDialler(Resolver((), clock), in_force(config), clock)
    budget = Budget(Ledger.fresh(), Bound(Limits()), clock, lambda: None)

    _, writer, address = await StreamDialler(dialler, budget, log).dial("good.test", port, Scheme.HTTPS, FLOW)
    await arrived.wait()
    writer.close()
    with pytest.raises(AuditUnavailable):
        await StreamDialler(dialler, budget, Recorded(failing=True)).dial("good.test", port, Scheme.HTTPS, FLOW)
    server.close()

    assert ("127.0.0.2", [2]) == (address, began)
    expected = [("connect", "allow", {**FLOW, "address": f"127.0.0.{last}", "rule": None}) for last in (1, 2)]
    assert expected == [(kind, decision, fields | {"rule": None}) for kind, decision, fields in log.records]


async def _dialled(
    addresses: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    silent: tuple[str, ...] = (),
    pathless: tuple[str, ...] = (),
) -> tuple[str | None, list[str], list[float]]:
    """Dial `addresses` of a fixed name. Return the connected address, the announced ones, and the wait at each."""
    announced: list[str] = []
    waits: list[float] = []
    clock = asyncio.get_running_loop().time

    async def announce(address: object, _allowed: object) -> None:
        announced.append(str(address))

    async def connected(address: object, _port: int) -> socket.socket:
        began = clock()
        try:
            if str(address) in silent:
                await asyncio.get_running_loop().create_future()
        finally:
            waits.append(clock() - began)
        return socket.socket()

    hosts = {"good.test": tuple(map(ip_address, addresses))}
    limits = GatewayLimits(connect=2)
    config = changed(configured(allowing(443)), host_addresses=hosts, limits=limits)
    monkeypatch.setattr("gateway.upstream._NEXT_SECONDS", 0.1)
    monkeypatch.setattr("gateway.upstream._connected", connected)
    monkeypatch.setattr("gateway.upstream.source", lambda address: None if str(address) in pathless else address)
    try:
        connection = await UpstreamDialler(Resolver((), clock), in_force(config), clock).dial(
            "good.test", 443, Scheme.HTTPS, announce
        )
    except DialError as error:
        assert DialFailure.CONNECT is error.failure
        return error.reason, announced, waits
    connection.sock.close()
    return str(connection.address), announced, waits


ONE, SIX, TWO = "93.184.216.1", "2606:2800::1", "93.184.216.2"


async def test_a_silent_address_delays_the_next_one_briefly_and_the_last_has_the_whole_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, announced, waits = await _dialled((ONE, SIX, TWO), monkeypatch, silent=(ONE, SIX, TWO))
    assert ("no address of the host accepted a connection", [ONE, SIX, TWO]) == (found, announced)
    assert max(waits[:2]) < 1.9 < sum(waits)
    assert (SIX, [ONE, SIX]) == (await _dialled((ONE, SIX, TWO), monkeypatch, silent=(ONE,)))[:2]


async def test_an_address_without_a_route_is_neither_announced_nor_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (TWO, [TWO]) == (await _dialled((ONE, SIX, TWO), monkeypatch, pathless=(ONE, SIX)))[:2]
    found, announced, waits = await _dialled((SIX,), monkeypatch, pathless=(SIX,))
    assert ("the gateway's host has no route to an address of the host", [], []) == (found, announced, waits)


async def test_an_ipv6_address_is_dialled_and_recorded() -> None:
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "::1", 0)
    port = server.sockets[0].getsockname()[1]
    config = changed(configured(allowing(port)), host_addresses={"good.test": (ip_address("::1"),)})
    clock = asyncio.get_running_loop().time
    dialler, log = UpstreamDialler(Resolver((), clock), in_force(config), clock), Recorded()
    budget = Budget(Ledger.fresh(), Bound(Limits()), clock, lambda: None)

    _, writer, address = await StreamDialler(dialler, budget, log).dial("good.test", port, Scheme.HTTPS, FLOW)
    writer.close()
    server.close()

    assert ("::1", ["::1"]) == (address, [fields["address"] for _, _, fields in log.records])


NETWORKS = """
version: 1
policies:
  enforced:
    rules:
      - {id: good, host: good.test, ports: [PORT]}
      - {id: not-there, action: deny, addresses: [127.0.0.0/24]}
  observed: {extends: [enforced], mode: observe}
"""


class Resolved(Resolver):
    """A resolver with the address 127.0.0.1 for every name."""

    async def resolve(self, host: str, *, counted: bool = False) -> Resolution:
        return Resolution(Outcome.ADDRESSES, (IPv4Address("127.0.0.1"),), 60)


@pytest.mark.parametrize("name", ["enforced", "observed"])
async def test_an_address_that_rules_deny_is_recorded_before_a_byte_can_be_sent(name: str) -> None:
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    policy = compile_named(load_text(NETWORKS.replace("PORT", str(port))), name)
    opened = (ip_network("127.0.0.1/32"),)
    config = GatewayConfig("sbx-1", 1, policy, WorkerConstants("", (), IPv4Address("192.0.2.2"), opened))
    clock = asyncio.get_running_loop().time
    dialler = UpstreamDialler(Resolved((), clock, lambda: True), in_force(config), clock)
    budget = Budget(Ledger.fresh(), Bound(Limits()), clock, lambda: None)
    log = Recorded()
    if name == "enforced":
        with pytest.raises(ConnectionError):
            await StreamDialler(dialler, budget, log).dial("good.test", port, Scheme.HTTPS, FLOW)
    else:
        _, writer, _ = await StreamDialler(dialler, budget, log).dial("good.test", port, Scheme.HTTPS, FLOW)
        writer.close()
        with pytest.raises(AuditUnavailable):
            await StreamDialler(dialler, budget, Recorded(failing=True)).dial("good.test", port, Scheme.HTTPS, FLOW)
    server.close()

    ((kind, decision, fields),) = log.records
    assert (("flow", "deny") if name == "enforced" else ("connect", "observe")) == (kind, decision)
    assert FLOW == {field: fields[field] for field in FLOW}
    assert (None if name == "enforced" else "127.0.0.1") == fields.get("address")
    assert f"{name}/not-there".replace("observed", "enforced") in (fields["rule"], fields.get("observed"))
    assert "good.test resolves to 127.0.0.1, which is denied by rule enforced/not-there." == fields["reason"]


def test_a_kept_decision_is_void_when_the_policy_changes() -> None:
    state = in_force(configured(allowing(443)))
    decider = PolicyDecider(state)
    repeated = request()  # a repeated head has the same object
    for _ in range(2):
        for port, kind in ((443, AllowRequest), (8443, Deny), (443, AllowRequest)):
            state.config = configured(allowing(port))
            for asked in (repeated, repeated, request(), repeated):
                assert kind is type(decider.decide_request(asked))
        state.config = None
        assert "unconfigured" == getattr(decider.decide_request(request()), "rule", "")


def test_decisions_are_kept_up_to_a_number_and_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[RequestFacts] = []
    real = ports.decide_request

    def counting(policy: CompiledPolicy, facts: RequestFacts) -> AllowRequest | Deny:
        judged.append(facts)
        return real(policy, facts)

    monkeypatch.setattr(ports, "decide_request", counting)
    rule = replace(_RULE, paths=(PathPattern("/*"),))
    decider = PolicyDecider(
        in_force(configured(CompiledPolicy("p", (RuleList("p", Precedence.DENY_WINS, rules=(rule,)),))))
    )
    for path, times in (("/v1/x", 1), ("/" + "a" * ports._MAX_KEPT_PATH, 3)):
        judged.clear()
        for _ in range(3):
            decider.decide_request(request(path=path))
        assert times == len(judged)
    for number in range(3 * ports._KEPT):
        decider.decide_request(request(path=f"/{number}"))
        assert len(decider._kept) <= ports._KEPT


def test_requests_to_a_host_without_path_rules_are_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decider = PolicyDecider(in_force(configured(allowing(443))))
    first = decider.decide_request(request(path="/0"))
    monkeypatch.delattr(ports, "decide_request")
    for number in range(3):
        assert first is decider.decide_request(replace(request(path=f"/{number}"), query=str(number)))


def test_decisions_differ_by_every_part_of_a_request() -> None:
    decider = PolicyDecider(in_force(configured(allowing(443))))
    assert isinstance(decider.decide_request(request()), AllowRequest)
    for other in (
        replace(request(), host="evil.test"),
        replace(request(), port=8443),
        replace(request(), port=80, scheme=Scheme.HTTP),
        replace(request(), method="TRACE"),
        replace(request(), path="v1"),
    ):
        assert isinstance(decider.decide_request(other), Deny), other
