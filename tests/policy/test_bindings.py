"""Credential bindings on the wire."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.api import ApiPolicyError
from policy.bindings import parse_binding, parse_bindings
from policy.names import HostPattern
from policy.paths import PathPattern


def binding(match: Any = None, auth: Any = None, name: Any = "b") -> dict[str, Any]:
    """A good binding, with parts replaced."""
    return {
        "name": name,
        "match": {"hosts": ["good.test"], **(match or {})},
        "auth": auth or {"type": "bearer", "credential": "c"},
    }


REFUSED: dict[str, tuple[Any, str]] = {
    "a blank name": (binding(name=" "), "binding name cannot be blank"),
    "no hosts": (binding({"hosts": []}), 'binding "b": match.hosts cannot be empty'),
    "a blank host": (binding({"hosts": [" "]}), 'binding "b": host cannot be blank'),
    "a URL": (
        binding({"hosts": ["https://a.test"]}),
        'binding "b": host "https://a.test" must not include scheme or path',
    ),
    "one label": (binding({"hosts": ["intranet"]}), 'binding "b": credential binding host "intranet" must be an FQDN'),
    "an address": (
        binding({"hosts": ["10.0.0.1"]}),
        'binding "b": credential binding host "10.0.0.1" must be an FQDN, not an IP address',
    ),
    "a wildcard over one label": (binding({"hosts": ["*.test"]}), 'binding "b": invalid wildcard host "*.test"'),
    "an inner wildcard": (binding({"hosts": ["a.*.test"]}), 'binding "b": invalid wildcard host "a.*.test"'),
    "an unknown scheme": (binding({"schemes": ["ftp"]}), 'binding "b": unsupported scheme "ftp"'),
    "another port": (
        binding({"ports": [8443]}),
        'binding "b": unsupported port 8443: only ports 80 and 443 are supported (derived from scheme)',
    ),
    "a blank method": (binding({"methods": [""]}), 'binding "b": method cannot be blank'),
    "a path without a slash": (binding({"paths": ["v1"]}), 'binding "b": path pattern must start with /'),
    "an unknown field": ({**binding(), "x": 1}, 'unknown field "x"'),
    "an unknown field in match": (binding({"requestHeaders": []}), 'binding "b": unknown field "match.requestHeaders"'),
    "an unknown field in a header": (
        binding(auth={"type": "customHeaders", "headers": [{"name": "x-a", "credential": "c", "prefix": "t"}]}),
        'binding "b": unknown field "auth.headers[0].prefix"',
    ),
    "no schemes": (binding({"schemes": []}), 'binding "b": match.schemes cannot be empty'),
    "no methods": (binding({"methods": []}), 'binding "b": match.methods cannot be empty'),
    "no paths": (binding({"paths": []}), 'binding "b": match.paths cannot be empty'),
    "no ports": (binding({"ports": []}), 'binding "b": match.ports cannot be empty'),
    "null methods": (binding({"methods": None}), 'binding "b": match.methods: must not be null'),
    "a null credential": (
        binding(auth={"type": "passthrough", "credential": None}),
        'binding "b": auth.credential: must not be null',
    ),
    "an empty name where none belongs": (
        binding(auth={"type": "bearer", "credential": "c", "name": ""}),
        'binding "b": bearer auth does not accept name',
    ),
    "an unknown auth": (binding(auth={"type": "oauth"}), 'binding "b": unsupported auth type "oauth"'),
    "a missing credential": (binding(auth={"type": "bearer"}), 'binding "b": bearer auth requires credential'),
    "no headers": (binding(auth={"type": "customHeaders"}), 'binding "b": customHeaders auth requires headers'),
    "a reserved header": (
        binding(auth={"type": "apiKey", "name": "Host", "credential": "c"}),
        'binding "b": reserved credential header name "host"',
    ),
    "a header that is no token": (
        binding(auth={"type": "apiKey", "name": "x y", "credential": "c"}),
        'binding "b": invalid credential header name "x y"',
    ),
    "a header twice": (
        binding(
            auth={
                "type": "customHeaders",
                "headers": [{"name": "x-a", "credential": "c"}, {"name": "X-A", "credential": "d"}],
            }
        ),
        'binding "b": duplicate custom header name "X-A"',
    ),
    "a passthrough with a credential": (
        binding(auth={"type": "passthrough", "credential": "c"}),
        'binding "b": passthrough auth does not accept credential',
    ),
    "substitutions": (
        binding(
            auth={"type": "passthrough", "substitutions": [{"credential": "c", "placeholder": "p", "in": ["path"]}]}
        ),
        'binding "b": substitutions are not supported',
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_refused_with_the_contracts_text(case: str) -> None:
    """Prefix and words."""
    value, message = REFUSED[case]
    with pytest.raises(ApiPolicyError) as caught:
        parse_binding(value)

    assert message == str(caught.value)


def test_a_binding_is_echoed_normalised_with_its_defaults() -> None:
    """And without its credentials."""
    parsed = parse_binding(
        binding(
            {"hosts": ["Good.TEST.", "good.test"], "ports": [443]},
            {"type": "apiKey", "name": "x-api-key", "credential": "c"},
        )
    )

    assert {
        "name": "b",
        "match": {
            "hosts": ["good.test"],
            "schemes": ["https"],
            "methods": ["GET", "POST", "PUT", "PATCH", "DELETE"],
            "paths": ["/*"],
        },
        "auth": {"type": "apiKey", "name": "X-Api-Key"},
    } == parsed.to_wire()
    assert ("c",) == parsed.credentials
    assert [("inline:c", "X-Api-Key", "api-key")] == [
        (plan.secret, plan.header, str(plan.kind)) for plan in parsed.compiled().injections
    ]


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "the same host": ({}, {}, True),
    "another host": ({}, {"hosts": ["other.test"]}, False),
    "another method": ({"methods": ["GET"]}, {"methods": ["POST"]}, False),
    "another scheme": ({}, {"schemes": ["http"]}, False),
    "paths beside one another": ({"paths": ["/a/*"]}, {"paths": ["/b/*"]}, False),
    "a longer path is no tie-break": ({"paths": ["/a/*"]}, {"paths": ["/a/b/*"]}, True),
    "an exact host wins over a wildcard": ({"hosts": ["a.good.test"]}, {"hosts": ["*.good.test"]}, False),
    "one wildcard inside another": ({"hosts": ["*.a.good.test"]}, {"hosts": ["*.good.test"]}, True),
}


@pytest.mark.parametrize("case", PAIRS)
def test_bindings_that_could_match_one_request_are_refused(case: str) -> None:
    """Names in sorted order, whatever the order given."""
    first, second, conflict = PAIRS[case]
    values = [binding(first, name="z"), binding(second, name="a")]
    if not conflict:
        assert 2 == len(parse_bindings(values))
        return
    with pytest.raises(ApiPolicyError, match=r'^bindings "a" and "z" can match the same request$'):
        parse_bindings(values)


_HOSTS = st.sampled_from(["a.good.test", "b.a.good.test", "*.good.test", "*.a.good.test", "*.b.good.test"])
_PATHS = st.sampled_from(["/*", "/a*", "/a/*", "/a/b", "/a/b*", "/ab", "/b/*", "/a/", "/a", "/a/b/c*"])
_MATCHES = st.fixed_dictionaries(
    {
        "hosts": st.lists(_HOSTS, min_size=1, max_size=3),
        "paths": st.lists(_PATHS, min_size=1, max_size=4),
        "methods": st.lists(st.sampled_from(["GET", "POST", "PUT"]), min_size=1, max_size=2),
    }
)


@given(_MATCHES, _MATCHES)
def test_two_bindings_compete_where_any_two_of_their_parts_do(first: dict[str, Any], second: dict[str, Any]) -> None:
    """The comparison that is quick with thousands of names says what one of each with each says."""

    def reach(one: HostPattern, other: HostPattern) -> bool:
        if one.wildcard != other.wildcard:
            return False
        return one == other or (one.wildcard and (one.matches(other.suffix) or other.matches(one.suffix)))

    compete = (
        bool(set(first["methods"]) & set(second["methods"]))
        and any(reach(HostPattern(one), HostPattern(other)) for one in first["hosts"] for other in second["hosts"])
        and any(PathPattern(one).overlaps(PathPattern(other)) for one in first["paths"] for other in second["paths"])
    )
    try:
        parse_bindings([binding(first, name="a"), binding(second, name="b")])
    except ApiPolicyError:
        assert compete
    else:
        assert not compete


def test_two_bindings_of_one_name_are_refused() -> None:
    """Names identify."""
    with pytest.raises(ApiPolicyError, match=r'^duplicate binding name "b"$'):
        parse_bindings([binding(), binding({"hosts": ["other.test"]})])
