"""The guard of one request: what it leaves of the request, and which decision it returns."""

from dataclasses import replace

from gateway.client_credentials import GuardedRequest, guard
from gateway.translate import RequestParts, Translated, translate
from policy.client_credentials import DEFAULT, ClientCredentials, Handling
from policy.decision import AllowRequest, Deny
from policy.facts import FlowFacts, Scheme
from policy.injection import InjectionKind, InjectionPlan

PLAN = InjectionPlan("api", "token", InjectionKind.BEARER, "Authorization")
ALLOWED = AllowRequest("r", (PLAN,), client_credentials=DEFAULT)


def translated(target: bytes = b"/v1", *headers: tuple[bytes, bytes]) -> Translated:
    parts = RequestParts(11, b"GET", target, b"", b"", ((b"Host", b"good.test"), *headers))
    done = translate(parts, FlowFacts("good.test", 443, Scheme.HTTPS))
    assert isinstance(done, Translated)
    return done


def test_a_host_without_secrets_is_not_guarded() -> None:
    request = translated(b"/v1?token=x", (b"Authorization", b"x"), (b"Cookie", b"a=1"))
    assert GuardedRequest(request, AllowRequest("r")) == guard(request, AllowRequest("r"))


def test_a_request_without_credentials_is_the_same_one() -> None:
    request = translated(b"/v1?a=1", (b"Accept", b"*/*"))
    guarded = guard(request, ALLOWED)
    assert isinstance(guarded, GuardedRequest)
    assert request is guarded.translated
    assert ALLOWED is guarded.allowed


def test_the_header_of_the_injection_is_left_to_it() -> None:
    request = translated(b"/v1", (b"authorization", b"Basic own"))
    assert GuardedRequest(request, ALLOWED) == guard(request, ALLOWED)
    denied = guard(request, replace(ALLOWED, injections=()))
    assert isinstance(denied, Deny)
    assert "client-credentials" == denied.rule


def test_the_facts_of_a_stripped_request_stay() -> None:
    """Policy judges the path, which the guard does not change."""
    strip = replace(ALLOWED, client_credentials=ClientCredentials(query=Handling.STRIP))
    request = translated(b"/v1%20x?a=1&sig=x", (b"Cookie", b"a=1"))
    guarded = guard(request, strip)
    assert isinstance(guarded, GuardedRequest)
    assert (b"/v1%20x?a=1", request.facts, ()) == (
        guarded.translated.target,
        guarded.translated.facts,
        guarded.translated.headers,
    )
    assert (("cookie", "query:sig"), ()) == (guarded.stripped, guarded.forwarded)


def test_a_list_in_mode_observe_reports_and_sends_no_secret() -> None:
    request = translated(b"/v1?key=x", (b"Cookie", b"a=1"))
    guarded = guard(request, replace(ALLOWED, trial="observe:watch"))
    assert isinstance(guarded, GuardedRequest)
    assert request is guarded.translated
    assert ("observe:watch", ()) == (guarded.allowed.rule, guarded.allowed.injections)
    assert guarded.allowed.observed is not None
    assert "client-credentials" == guarded.allowed.observed.rule
