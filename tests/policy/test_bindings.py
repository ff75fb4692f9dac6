"""Credential bindings in their wire form."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.api import ApiPolicyError
from policy.bindings import conflicts, number_of_places, parse_binding, parse_bindings
from policy.facts import Scheme
from policy.injection import InjectionKind, InjectionPlan, SubstitutionPlan, Surface
from policy.names import HostPattern
from policy.paths import PathPattern
from policy.rules import Binding


def binding(match: Any = None, auth: Any = None, name: Any = "b") -> dict[str, Any]:
    """Return a valid binding with replaced parts."""
    return {
        "name": name,
        "match": {"hosts": ["good.test"], **(match or {})},
        "auth": auth or {"type": "bearer", "credential": "c"},
    }


SUBSTITUTION = {"credential": "c", "placeholder": "__TOKEN__", "in": ["path", "body"]}


def substituting(value: Any) -> dict[str, Any]:
    """Return a binding with these substitutions and nothing else."""
    return binding(auth={"type": "passthrough", "substitutions": value})


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
    "substitutions that are no list": (substituting({}), 'binding "b": substitutions must be an array'),
    "a substitution without a credential": (
        substituting([{"credential": " ", "placeholder": "p", "in": ["path"]}]),
        'binding "b": substitution 0 requires credential',
    ),
    "a substitution without a placeholder": (
        substituting([SUBSTITUTION, {"credential": "c", "placeholder": " ", "in": ["path"]}]),
        'binding "b": substitution 1 requires placeholder',
    ),
    "a substitution without a surface": (
        substituting([{**SUBSTITUTION, "in": []}]),
        'binding "b": substitution 0 requires at least one target surface',
    ),
    "a substitution on an unknown surface": (
        substituting([{**SUBSTITUTION, "in": ["path", "cookie"]}]),
        'binding "b": substitution 0 has unsupported target surface "cookie"',
    ),
    "a surface of the operator's rules only": (
        substituting([{**SUBSTITUTION, "in": ["basic"]}]),
        'binding "b": substitution 0 has unsupported target surface "basic"',
    ),
    "a surface that is no text": (
        substituting([{**SUBSTITUTION, "in": [1]}]),
        'binding "b": substitution 0 has unsupported target surface "1"',
    ),
    "one placeholder twice on one surface": (
        substituting([SUBSTITUTION, {"credential": "d", "placeholder": "__TOKEN__", "in": ["query", "body"]}]),
        'binding "b": substitution 1 duplicates placeholder "__TOKEN__" on body surface from substitution 0',
    ),
    "a placeholder with a line end": (
        substituting([{**SUBSTITUTION, "placeholder": "a\nb"}]),
        'binding "b": substitution 0: a placeholder is 1 to 1024 characters, not all blank, without control characters',
    ),
    "an unknown field in a substitution": (
        substituting([{**SUBSTITUTION, "encoding": "raw"}]),
        'binding "b": unknown field "auth.substitutions[0].encoding"',
    ),
    "too many substitutions": (substituting([SUBSTITUTION] * 33), 'binding "b": at most 32 substitutions'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_refused_with_the_contracts_text(case: str) -> None:
    """With the contract's prefix and words."""
    value, message = REFUSED[case]
    with pytest.raises(ApiPolicyError) as caught:
        parse_binding(value)

    assert message == str(caught.value)


def test_a_binding_is_echoed_normalised_with_its_defaults() -> None:
    """The answer does not contain its credentials."""
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
        (plan.secret, plan.name, str(plan.kind)) for plan in parsed.compiled().injections
    ]


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "the same host": ({}, {}, True),
    "another host": ({}, {"hosts": ["other.test"]}, False),
    "another method": ({"methods": ["GET"]}, {"methods": ["POST"]}, False),
    "another scheme": ({}, {"schemes": ["http"]}, False),
    "paths beside one another": ({"paths": ["/a/*"]}, {"paths": ["/b/*"]}, False),
    "a longer path is no tie-break": ({"paths": ["/a/*"]}, {"paths": ["/a/b/*"]}, True),
    "an exact host wins over a wildcard": ({"hosts": ["a.good.test"]}, {"hosts": ["*.good.test"]}, False),
    "a path below the second prefix": ({"paths": ["/a*", "/b*"]}, {"paths": ["/b/x"]}, True),
    "a path below the first prefix": ({"paths": ["/a*", "/b*"]}, {"paths": ["/a/x"]}, True),
    "one path of two below a prefix": ({"paths": ["/a/*", "/c/*"]}, {"paths": ["/c/x", "/z"]}, True),
    "a prefix behind two of which one covers the other": ({"paths": ["/a*", "/ab*", "/b*"]}, {"paths": ["/b/x"]}, True),
    "the wider of two prefixes": ({"paths": ["/a*", "/ab*"]}, {"paths": ["/ac"]}, True),
    "a path beside a prefix": ({"paths": ["/a*"]}, {"paths": ["/b"]}, False),
    "a path above a prefix": ({"paths": ["/a/*"]}, {"paths": ["/a"]}, False),
    "an exact path twice": ({"paths": ["/a", "/b"]}, {"paths": ["/b", "/c"]}, True),
    "one wildcard inside another": ({"hosts": ["*.a.good.test"]}, {"hosts": ["*.good.test"]}, True),
}


@pytest.mark.parametrize("case", PAIRS)
def test_bindings_that_could_match_one_request_are_refused(case: str) -> None:
    """The names are sorted, for any given order."""
    first, second, conflict = PAIRS[case]
    for names in (("z", "a"), ("a", "z")):
        values = [binding(match, name=name) for match, name in zip((first, second), names, strict=True)]
        if not conflict:
            assert 2 == len(parse_bindings(values))
            continue
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
    """The fast comparison, made for thousands of names, equals the comparison of each part with each other."""

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
    """Names identify bindings."""
    with pytest.raises(ApiPolicyError, match=r'^duplicate binding name "b"$'):
        parse_bindings([binding(), binding({"hosts": ["other.test"]})])


MATCH = {
    "hosts": ["good.test", "*.good.test"],
    "schemes": ["https", "http"],
    "methods": ["GET", "PUT"],
    "paths": ["/a", "/b/*"],
}
AUTHS: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[str, InjectionKind, str]]]] = {
    "bearer": (
        {"type": "bearer", "credential": " c "},
        {"type": "bearer", "credential": "c"},
        [("inline:c", InjectionKind.BEARER, "Authorization")],
    ),
    "basic": (
        {"type": "basic", "credential": "c"},
        {"type": "basic", "credential": "c"},
        [("inline:c", InjectionKind.BASIC_RAW, "Authorization")],
    ),
    "apiKey": (
        {"type": "apiKey", "name": " x-key ", "credential": "c"},
        {"type": "apiKey", "name": "X-Key", "credential": "c"},
        [("inline:c", InjectionKind.API_KEY, "X-Key")],
    ),
    "customHeaders": (
        {"type": "customHeaders", "headers": [{"name": "x-a", "credential": "c"}, {"name": "x-b", "credential": "d"}]},
        {"type": "customHeaders", "headers": [{"name": "X-A", "credential": "c"}, {"name": "X-B", "credential": "d"}]},
        [("inline:c", InjectionKind.API_KEY, "X-A"), ("inline:d", InjectionKind.API_KEY, "X-B")],
    ),
    "passthrough": ({"type": "passthrough"}, {"type": "passthrough"}, []),
}


@pytest.mark.parametrize("kind", AUTHS)
def test_each_kind_puts_each_credential_where_it_belongs(kind: str) -> None:
    """In the compiled binding, and in its JSON form."""
    auth, written, plans = AUTHS[kind]
    parsed = parse_binding({"name": " b ", "match": MATCH, "auth": auth})

    assert parsed.compiled() == Binding(
        "b",
        (HostPattern("good.test"), HostPattern("*.good.test")),
        (Scheme.HTTPS, Scheme.HTTP),
        ("GET", "PUT"),
        (PathPattern("/a"), PathPattern("/b/*")),
        tuple(InjectionPlan("binding:b", secret, form, header) for secret, form, header in plans),
    )
    assert parsed.to_json() == {"name": "b", "match": MATCH, "auth": written}
    assert parsed == parse_binding(parsed.to_json())
    shown = {key: value for key, value in written.items() if key in ("type", "name")}
    assert parsed.to_wire() == {"name": "b", "match": MATCH, "auth": shown}
    assert parsed.credentials == tuple(secret.removeprefix("inline:") for secret, _, _ in plans)


@pytest.mark.parametrize("kind", AUTHS)
def test_each_kind_can_have_substitutions_which_are_not_shown(kind: str) -> None:
    """Surfaces are trimmed, in lower case and without duplicates. A placeholder stays as it is written."""
    auth, written, plans = AUTHS[kind]
    given_ = [
        {"credential": " key ", "placeholder": " {Key} ", "in": [" BODY", "query", "body"]},
        {"credential": "c2", "placeholder": " {Key} ", "in": ["header"]},
    ]
    kept = [
        {"credential": "key", "placeholder": " {Key} ", "in": ["body", "query"]},
        {"credential": "c2", "placeholder": " {Key} ", "in": ["header"]},
    ]
    parsed = parse_binding({"name": "b", "match": MATCH, "auth": {**auth, "substitutions": given_}})

    assert parsed.to_json() == {"name": "b", "match": MATCH, "auth": {**written, "substitutions": kept}}
    assert parsed == parse_binding(parsed.to_json())
    assert (
        SubstitutionPlan("binding:b", "inline:key", " {Key} ", (Surface.BODY, Surface.QUERY)),
        SubstitutionPlan("binding:b", "inline:c2", " {Key} ", (Surface.HEADER,)),
    ) == parsed.compiled().substitutions
    assert len(plans) == len(parsed.compiled().injections)
    assert {"key", "c2"} <= set(parsed.credentials)
    assert parse_binding({"name": "b", "match": MATCH, "auth": auth}).to_wire() == parsed.to_wire()
    renamed = parsed.renamed(lambda name: f"1/{name}")
    assert {f"1/{name}" for name in parsed.credentials} == set(renamed.credentials)


def test_bindings_are_a_bounded_list() -> None:
    for value in (None, {}, "b", 1):
        with pytest.raises(ApiPolicyError, match=r"^bindings must be an array$"):
            parse_bindings(value)
    many = [binding({"hosts": [f"h{number}.test"]}, name=f"b{number}") for number in range(257)]
    assert 256 == len(parse_bindings(many[:256]))
    with pytest.raises(ApiPolicyError, match=r"^more than 256 bindings$"):
        parse_bindings(many)
    with pytest.raises(ApiPolicyError, match=r'^unknown field "bindings\[1\]\.x"$'):
        parse_bindings([many[0], {**many[1], "x": 1}])


MORE_REFUSED: dict[str, tuple[Any, str]] = {
    "a name that is no text": (binding(name=7), "binding name cannot be blank"),
    "no name": ({"match": {}, "auth": {}}, "binding name cannot be blank"),
    "a name of 257 bytes": (binding(name="\u00e4" * 128 + "a"), "binding name is too long or has a control character"),
    "a name with a line end": (binding(name="a\nb"), "binding name is too long or has a control character"),
    "hosts that are missing": (
        {"name": "b", "match": {}, "auth": {"type": "passthrough"}},
        'binding "b": match.hosts cannot be empty',
    ),
    "a host that is no text": (
        binding({"hosts": ["a.test", 7]}),
        'binding "b": match.hosts must be an array of strings',
    ),
    "hosts that are a text": (binding({"hosts": "ab"}), 'binding "b": match.hosts must be an array of strings'),
    "ports that are a text": (binding({"ports": "443"}), 'binding "b": match.ports must be an array of integers'),
    "headers that are an object": (
        binding(auth={"type": "customHeaders", "headers": {"name": "x-a", "credential": "c"}}),
        'binding "b": customHeaders auth requires headers',
    ),
    "an empty list of headers": (
        binding(auth={"type": "customHeaders", "headers": []}),
        'binding "b": customHeaders auth requires headers',
    ),
    "no kind": (binding(auth={"credential": "c"}), 'binding "b": unsupported auth type ""'),
    "an API key without a name": (
        binding(auth={"type": "apiKey", "credential": "c"}),
        'binding "b": invalid credential header name ""',
    ),
    "a host that is not ASCII": (
        binding({"hosts": ["\u00e4/b.test"]}),
        'binding "b": host "\\xe4/b.test" must not include scheme or path',
    ),
    "1025 methods": (binding({"methods": ["GET"] * 1025}), 'binding "b": match.methods must be an array of strings'),
    "1025 ports": (binding({"ports": [443] * 1025}), 'binding "b": match.ports must be an array of integers'),
    "a port that is a bool": (binding({"ports": [True]}), 'binding "b": match.ports must be an array of integers'),
    "a second port": (
        binding({"ports": [443, 22]}),
        'binding "b": unsupported port 22: only ports 80 and 443 are supported (derived from scheme)',
    ),
    "userinfo": (binding({"hosts": ["a@b.test"]}), 'binding "b": host "a@b.test" must not include scheme or path'),
    "a query": (binding({"hosts": ["b.test?x"]}), 'binding "b": host "b.test?x" must not include scheme or path'),
    "an IPv6 address": (
        binding({"hosts": ["::1"]}),
        'binding "b": credential binding host "::1" must be an FQDN, not an IP address',
    ),
    "an underscore": (
        binding({"hosts": ["a_b.test"]}),
        'binding "b": credential binding host "a_b.test" must be an FQDN',
    ),
    "a wildcard over an underscore": (
        binding({"hosts": ["*.a_b.test"]}),
        'binding "b": invalid wildcard host "*.a_b.test"',
    ),
    "a method that is no token": (binding({"methods": ["G T"]}), 'binding "b": invalid method "G T"'),
    "33 headers": (
        binding(auth={"type": "customHeaders", "headers": [{"name": f"x-{n}", "credential": "c"} for n in range(33)]}),
        'binding "b": customHeaders auth requires headers',
    ),
    "a header without a credential": (
        binding(auth={"type": "customHeaders", "headers": [{"name": "x-a", "credential": " "}]}),
        'binding "b": customHeaders entry "X-A" requires credential',
    ),
    "an API key without a credential": (
        binding(auth={"type": "apiKey", "name": "x-a"}),
        'binding "b": apiKey auth requires credential',
    ),
    "a name in customHeaders": (
        binding(auth={"type": "customHeaders", "name": "x", "headers": [{"name": "x-a", "credential": "c"}]}),
        'binding "b": customHeaders auth does not accept name',
    ),
    "a credential in customHeaders": (
        binding(auth={"type": "customHeaders", "credential": "x", "headers": [{"name": "x-a", "credential": "c"}]}),
        'binding "b": customHeaders auth does not accept credential',
    ),
    "headers in apiKey": (
        binding(auth={"type": "apiKey", "name": "x", "credential": "c", "headers": []}),
        'binding "b": apiKey auth does not accept headers',
    ),
    "headers in basic": (
        binding(auth={"type": "basic", "credential": "c", "headers": []}),
        'binding "b": basic auth does not accept headers',
    ),
    "a name in a passthrough": (
        binding(auth={"type": "passthrough", "name": "x"}),
        'binding "b": passthrough auth does not accept name',
    ),
    "headers in a passthrough": (
        binding(auth={"type": "passthrough", "headers": []}),
        'binding "b": passthrough auth does not accept headers',
    ),
}


@pytest.mark.parametrize("case", MORE_REFUSED)
def test_each_part_that_is_wrong_is_refused_with_its_text(case: str) -> None:
    value, message = MORE_REFUSED[case]
    with pytest.raises(ApiPolicyError) as caught:
        parse_binding(value)
    assert message == str(caught.value)


def test_the_longest_parts_of_a_binding_pass() -> None:
    assert "\u00e4" * 128 == parse_binding(binding(name="\u00e4" * 128)).name
    methods = [f"M{number}" for number in range(1024)]
    assert tuple(methods) == parse_binding(binding({"methods": methods})).methods
    assert parse_binding(binding({"ports": [443] * 1023 + [80]}))
    headers = [{"name": f"x-{number}", "credential": "c"} for number in range(32)]
    assert 32 == len(parse_binding(binding(auth={"type": "customHeaders", "headers": headers})).headers)


def test_blanks_and_case_of_a_binding_are_folded() -> None:
    match = {"hosts": [" *.Good.TEST "], "schemes": [" HTTPS "], "methods": [" get "], "paths": [" /a "]}
    parsed = parse_binding(binding(match))
    assert (("*.good.test",), ("https",), ("GET",), ("/a",)) == (
        parsed.hosts,
        parsed.schemes,
        parsed.methods,
        parsed.paths,
    )


def test_the_places_of_bindings_are_counted() -> None:
    bindings = parse_bindings([binding(MATCH, name="a"), binding({"hosts": ["other.test"]}, name="b")])
    assert (2 + 2 + 2) + (1 + 5 + 1) == number_of_places(bindings)


def test_every_two_bindings_that_compete_are_named_in_order() -> None:
    three = [parse_binding(binding(name=name)) for name in ("c", "a", "b")]
    apart = parse_binding(binding({"hosts": ["other.test"]}, name="aa"))
    assert [("a", "b"), ("a", "c"), ("b", "c")] == list(conflicts((*three, apart)))
