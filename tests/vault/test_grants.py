"""Properties of `vault.grants`: bindings, grants and scopes."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from vault.grants import Grant, GrantError, Refusal, RequestScope, SecretBinding, check, secret_name

NOW = datetime(2026, 3, 1, tzinfo=UTC)
BINDING = SecretBinding.make(["API.good.test.", "b\u00fccher.test"], [443, 8443], expires=NOW + timedelta(hours=1))


@pytest.mark.parametrize(
    ("grant", "code"),
    [
        (("s", "api.good.test", 443, "https"), None),
        (("s", "API.GOOD.TEST.", 8443, "https"), None),
        (("s", "xn--bcher-kva.test", 443, "https"), None),
        (("s", "good.test", 443, "https"), "not_bound"),
        (("s", "x.api.good.test", 443, "https"), "not_bound"),
        (("s", "api.good.test.evil.test", 443, "https"), "not_bound"),
        (("s", "*.good.test", 443, "https"), "not_bound"),
        (("s", "api.good.test", 80, "https"), "not_bound"),
        (("s", "api.good.test", 443, "http"), "not_bound"),
    ],
)
def test_a_binding_consents_to_its_own_destinations_only(grant: tuple[Any, ...], code: str | None) -> None:
    """Host, port and scheme must each be bound, in canonical form."""
    refusal = check(BINDING, Grant.make(*grant), NOW)
    assert code == (refusal and refusal.code)


def test_an_expired_secret_goes_nowhere() -> None:
    """From the moment of its expiry a binding permits nothing."""
    grant = Grant.make("s", "api.good.test", 443, "https")
    assert check(BINDING, grant, NOW + timedelta(minutes=59)) is None
    assert Refusal("expired", "the secret has expired") == check(BINDING, grant, NOW + timedelta(hours=1))


@pytest.mark.parametrize(
    "parts",
    [
        {"hosts": []},
        {"hosts": ["*.good.test"]},
        {"hosts": ["*"]},
        {"hosts": ["127.0.0.1"]},
        {"hosts": ["good.test", "a b"]},
        {"hosts": [5]},
        {"hosts": ["good.test"], "ports": []},
        {"hosts": ["good.test"], "ports": [0]},
        {"hosts": ["good.test"], "ports": [65536]},
        {"hosts": ["good.test"], "ports": [True]},
        {"hosts": ["good.test"], "ports": ["443"]},
        {"hosts": ["good.test"], "schemes": []},
        {"hosts": ["good.test"], "schemes": ["ftp"]},
        {"hosts": ["good.test"], "methods": []},
        {"hosts": ["good.test"], "methods": ["G T"]},
        {"hosts": ["good.test"], "paths": []},
        {"hosts": ["good.test"], "paths": ["v1"]},
        {"hosts": ["good.test"], "paths": ["/v1/*/x"]},
        {"hosts": ["good.test"], "paths": ["/v1/../x"]},
        {"hosts": ["good.test"], "expires": "2026-03-01T00:00:00"},
        {"hosts": ["good.test"], "expires": "soon"},
        {"hosts": ["good.test"], "expires": 5},
        {"hosts": ["good.test"], "who": "me"},
        {"hosts": "good.test"},
        {},
    ],
)
def test_an_unclear_binding_cannot_be_made(parts: dict[str, Any]) -> None:
    """Empty lists, wildcards, addresses, unknown keys, wrong types: each is refused."""
    with pytest.raises(GrantError):
        SecretBinding.from_json(parts)


@pytest.mark.parametrize("port", [1, 65535])
def test_the_first_and_the_last_port_can_be_bound(port: int) -> None:
    assert frozenset({port}) == SecretBinding.make(["good.test"], [port]).ports


@pytest.mark.parametrize("change", [{"hosts": frozenset()}, {"ports": frozenset()}, {"schemes": frozenset()}])
def test_a_binding_with_an_empty_set_cannot_be_made(change: dict[str, Any]) -> None:
    """Also without the check of the lists."""
    with pytest.raises(GrantError, match="at least one host, port and scheme"):
        SecretBinding(**{"hosts": frozenset({"good.test"})} | change)


def test_bindings_and_grants_survive_their_json_form() -> None:
    """Both come back equal."""
    binding = SecretBinding.make(["good.test"], methods=["GET"], paths=["/v1/*"], expires=NOW)
    grant = Grant.make("s", "good.test", 443, "https")
    assert binding == SecretBinding.from_json(binding.to_json())
    assert grant == Grant.from_json(grant.to_json())


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/x", True),
        ("GET", "/v1/", True),
        ("get", "/v1/x", False),
        ("POST", "/v1/x", False),
        (None, "/v1/x", False),
        ("GET", None, False),
        ("GET", "/v1", False),
        ("GET", "/v1safe", False),
        ("GET", "/v1/../admin", False),
        ("GET", "/v1/%2e%2e/admin", False),
        ("GET", "/v1/%2E./admin", False),
        ("GET", "/v1/a%2fb", True),
        ("GET", "/v1%2fb", False),
        ("GET", "/v1/..%2fb", False),
        ("GET", "/v1/a%2f%2e.%2fb", False),
        ("GET", "/v1/a%5cb", False),
        ("GET", "/v1//x", True),
        ("GET", "/v1//../x", False),
        ("GET", "//v1/x", False),
        ("GET", "/v1/./x", False),
        ("GET", "/v1/;x=1/..", False),
        ("GET", "/v1/%252e", False),
        ("GET", "/v1/%00", False),
        ("GET", "/v1/\\..\\x", False),
        ("GET", "v1/x", False),
        ("GET", "", False),
        ("GET", "*", False),
    ],
)
def test_a_scope_refuses_what_it_cannot_be_sure_of(method: str | None, path: str | None, allowed: bool) -> None:
    """Methods match exactly, each reading of the path is inside, and a missing fact is refused."""
    scope = RequestScope(frozenset({"GET"}), ("/v1/*",))
    assert allowed == (scope.check(method, path) is None)


def test_a_scope_without_limits_allows_any_request() -> None:
    """A control for the table above."""
    assert RequestScope().check(None, None) is None


@pytest.mark.parametrize(
    ("host", "covered"), [("a.good.test", True), ("x.a.good.test", True), ("good.test", False), ("agood.test", False)]
)
def test_a_wildcard_grant_covers_names_below_it(host: str, covered: bool) -> None:
    """It covers one or more labels, never the apex. Only exact names can be requested."""
    grant = Grant.make("inline:t", "*.good.test", 443, "https")
    assert covered == grant.covers(Grant.make("inline:t", host, 443, "https"))
    assert not grant.covers(grant)


@pytest.mark.parametrize("name", ["", ".x/..", "a b", "x" * 129, "a/b", "inline:x", "é", None, "a\n"])
def test_names_of_stored_secrets_are_plain(name: object) -> None:
    """No name can be a path, contain a blank or belong to another namespace."""
    with pytest.raises(GrantError):
        secret_name(name)
