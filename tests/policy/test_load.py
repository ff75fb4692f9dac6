"""Reading policy files: every mistake is reported with its line."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.compile import compile_default, compile_named
from policy.facts import Scheme
from policy.load import PolicyError, load, load_text
from policy.rules import Endpoint
from tests.mutations import Mutation, mutations, permitted

EXAMPLE = Path(__file__).parents[2] / "policies.example.yaml"


def rules(*lines: str) -> str:
    """Return a file whose policy `p` has these rules; the first is on line 5."""
    return "version: 1\npolicies:\n  p:\n    rules:\n" + "".join(f"      - {line}\n" for line in lines)


REFUSED: dict[str, tuple[str, str]] = {
    "an empty file": ("", "1:1: file is empty"),
    "only a comment": ("# nothing\n", "1:1: file is empty"),
    "a list": ("[]", "1:1: expected a mapping"),
    "no version": ("default: deny-all\n", "1:1: `version: 1` is missing"),
    "another version": ("version: 2\n", "1:10: version must be 1"),
    "a version that is true": ("version: true\n", "1:10: version must be 1"),
    "an unknown key": ("version: 1\nallowd: []\n", "2:1: unknown key 'allowd'"),
    "a duplicate key": ("version: 1\nversion: 1\n", "2:1: duplicate key 'version'"),
    "a duplicate key in a nested map": (rules("{host: a.test, host: b.test}"), "5:24: duplicate key 'host'"),
    "an anchor": ("version: 1\nalways_deny: &a [x.test]\n", "2:14: anchors are not allowed"),
    "an alias": ("version: 1\nalways_deny: *a\n", "2:14: aliases are not allowed"),
    "a merge key": ("version: 1\n<<: {default: deny-all}\n", "2:1: unknown key '<<'"),
    "a tag": ("version: !!int 1\n", "1:10: tags are not allowed"),
    "a second document": ("version: 1\n---\nversion: 1\n", "2:1: a second document in one file"),
    "broken YAML": ("version: 1\nx: [\n", "3:1: "),
    "a control character": ("version: 1\ndefault: \x07\n", "2:10: control character"),
    "a number for a key": ("version: 1\n1: x\n", "2:1: a key must be text"),
    "deep nesting": ("version: 1\ndefault: " + "[" * 40 + "]" * 40, "2:26: too many values or too deep a nesting"),
    "an unknown default": ("version: 1\ndefault: agents\n", "2:10: there is no policy named 'agents'"),
    "an unknown base": (
        "version: 1\npolicies:\n  p: {extends: [base]}\n",
        "3:17: there is no policy named 'base' to extend",
    ),
    "a policy that extends itself": (
        "version: 1\npolicies:\n  p: {extends: [p]}\n",
        "3:3: extends runs in a circle: p -> p",
    ),
    "a circle of two": (
        "version: 1\npolicies:\n  a: {extends: [b]}\n  b: {extends: [a]}\n",
        "4:3: extends runs in a circle: a -> b -> a",
    ),
    "a policy named deny-all": ("version: 1\npolicies:\n  deny-all: {}\n", "3:3: deny-all is built in"),
    "a policy with an odd name": ("version: 1\npolicies:\n  A b: {}\n", "3:3: a name is up to 63"),
    "an unknown handling": (
        rules("{host: a.test, client_credentials: {cookies: pass}}"),
        "5:54: expected one of refuse, strip, allow",
    ),
    "an unknown class of credentials": (
        rules("{host: a.test, client_credentials: {cookie: strip}}"),
        "5:45: unknown key 'cookie'; did you mean 'cookies'? known here: headers, cookies, query, and slots",
    ),
    "a slot that is none": (
        rules("{host: a.test, client_credentials: {'header:host': strip}}"),
        '5:45: reserved credential header name "host"',
    ),
    "a slot in two spellings": (
        rules("{host: a.test, client_credentials: {'header:x-a': strip, 'header:X_A': allow}}"),
        "5:66: a second handling of header:x-a",
    ),
    "no handling": (rules("{host: a.test, client_credentials: {}}"), "5:44: expected a mapping of headers, cookies"),
    "one handling for all": (rules("{host: a.test, client_credentials: allow}"), "5:44: expected a mapping of headers"),
    "a document without a handling": ("version: 1\nclient_credentials: {}\n", "2:21: expected a mapping of headers"),
    "a handling in a deny rule": (
        rules("{host: a.test, action: deny, client_credentials: {query: allow}}"),
        "5:38: client_credentials belongs to allow rules",
    ),
    "a handling for an address": (
        rules("{address: 93.184.216.34, client_credentials: {query: allow}}"),
        "5:34: client_credentials does not apply to addresses",
    ),
    "an unknown form of a path": (
        rules("{host: a.test, encoded_slashes: true}"),
        "5:41: expected text",
    ),
    "another word for a form": (
        rules("{host: a.test, empty_segments: strip}"),
        "5:40: expected one of refuse, allow",
    ),
    "a form of a path in a deny rule": (
        rules("{host: a.test, action: deny, encoded_slashes: allow}"),
        "5:38: encoded_slashes belongs to allow rules",
    ),
    "an encoded slash that no request may have": (
        rules("{host: a.test, paths: ['/@a%2fb']}"),
        "5:9: rule 'p/rule-1': a path contains %2F, but the rule does not permit encoded slashes",
    ),
    "an unknown mode": ("version: 1\npolicies:\n  p: {mode: report}\n", "3:13: expected one of enforce, observe"),
    "an unknown limit": ("version: 1\npolicies:\n  p: {limits: {bites: 1}}\n", "3:16: unknown key 'bites'"),
    "a limit of nothing": ("version: 1\npolicies:\n  p: {limits: {bytes_out: 0}}\n", "3:15: bytes_out must be from 1"),
    "a limit in words": ("version: 1\npolicies:\n  p: {dns: {query_rate: fast}}\n", "3:25: expected a whole number"),
    "a rule without a target": (rules("{id: x}"), "5:9: a rule needs exactly one of host, hosts, address, addresses"),
    "a rule with two": (rules("{host: a.test, hosts: [b.test]}"), "5:9: a rule needs exactly one of"),
    "no hosts": (rules("{hosts: []}"), "5:17: hosts is empty"),
    "null hosts": (rules("{hosts: }"), "5:17: hosts must be a list"),
    "no methods": (rules("{host: a.test, methods: []}"), "5:33: methods is empty"),
    "no paths": (rules("{host: a.test, paths: []}"), "5:31: paths is empty"),
    "no ports": (rules("{host: a.test, ports: []}"), "5:31: ports is empty"),
    "no injections": (rules("{host: a.test, inject: []}"), "5:32: inject is empty"),
    "no ceiling": ("version: 1\nceiling: {hosts: []}\n", "2:18: hosts is empty"),
    "an entry twice": (rules("{hosts: [a.test, A.test]}"), "5:26: hosts has this entry twice"),
    "an id twice": (rules("{id: x, host: a.test}", "{id: x, host: b.test}"), "6:9: a second rule with the id 'x'"),
    "a wildcard over a public suffix": (rules("{host: '*.com'}"), "5:16: wildcard '*.com' spans a public suffix"),
    "a bare star": (rules("{host: '*'}"), "5:16: '*': the only wildcard"),
    "an always_allow that is too wide": ("version: 1\nalways_allow: ['*.co.uk']\n", "2:16: wildcard '*.co.uk'"),
    "a name with a port": (rules("{host: 'a.test:443'}"), "5:16: host name 'a.test:443' has a character"),
    "a port as text": (rules("{host: a.test, ports: ['443']}"), "5:32: expected a port number"),
    "an octal port": (rules("{host: a.test, ports: [0443]}"), "5:32: expected a port number"),
    "a port that is none": (rules("{host: a.test, ports: [65536]}"), "5:32: 65536 is not a port"),
    "https on 80": (rules("{host: a.test, ports: [80], schemes: [https]}"), "5:32: none of the rule's schemes"),
    "a method with a blank": (rules("{host: a.test, methods: [GET POST]}"), "5:34: 'GET POST' is not an HTTP method"),
    "TRACE": (rules("{host: a.test, methods: [TRACE]}"), "5:34: TRACE is never relayed"),
    "a dead path": (rules("{host: a.test, paths: [/a/../b]}"), "5:32: path pattern '/a/../b' never matches"),
    "an inner star in a path": (rules("{host: a.test, paths: ['/a/*/b']}"), "5:32: path pattern '/a/*/b': `*`"),
    "a text for a flag": (rules("{host: a.test, inspect: 'yes'}"), "5:33: inspect must be true or false"),
    "YAML 1.1's yes": (rules("{host: a.test, inspect: yes}"), "5:33: inspect must be true or false"),
    "a misspelled action": (rules("{host: a.test, action: Allow}"), "5:32: expected one of deny, allow"),
    "paths on an address": (rules("{address: 8.8.8.8, paths: [/x]}"), "5:28: paths does not apply to addresses"),
    "port 80 on an address": (rules("{address: 8.8.8.8, ports: [80]}"), "5:36: a bare address is reached by TLS only"),
    "an address that is a name": (rules("{address: a.test}"), "5:19: 'a.test' is not an address or network"),
    "a secret on a denial": (
        rules("{host: a.test, action: deny, inject: {secret: s, as: bearer}}"),
        "5:38: a deny rule injects nothing",
    ),
    "a secret on a wildcard": (
        rules("{hosts: [a.test, '*.a.test'], inject: {secret: s, as: bearer}}"),
        "5:26: a secret is bound to exact hosts, not to a wildcard",
    ),
    "a secret on port 80": (
        rules("{host: a.test, ports: [80], inject: {secret: s, as: bearer}}"),
        "5:37: a secret over plain HTTP needs a.test in plaintext_secrets",
    ),
    "a secret over http": (
        rules("{host: a.test, schemes: [http], inject: {secret: s, as: bearer}}"),
        "5:41: a secret over plain HTTP needs a.test in plaintext_secrets",
    ),
    "a secret over http on another port": (
        "plaintext_secrets: [a.test]\n"
        + rules("{host: a.test, ports: [8080], schemes: [http], inject: {secret: s, as: bearer}}"),
        "6:56: a secret is never sent over plain HTTP on a port other than 80",
    ),
    "an injection without a secret": (rules("{host: a.test, inject: {as: bearer}}"), "5:32: inject needs `secret`"),
    "an unknown kind": (rules("{host: a.test, inject: {secret: s, as: x}}"), "5:48: expected one of bearer, basic"),
    "an api-key without a header": (
        rules("{host: a.test, inject: {secret: s, as: api-key}}"),
        "5:32: as: api-key needs `header`",
    ),
    "a reserved header": (
        rules("{host: a.test, inject: {secret: s, as: api-key, header: Host}}"),
        '5:65: reserved credential header name "host"',
    ),
    "a secret with a caller's name space": (
        rules("{host: a.test, inject: {secret: 'inline:s', as: bearer}}"),
        "5:41: a secret's name is",
    ),
    "two injections into one header": (
        rules("{host: a.test, inject: [{secret: s, as: bearer}, {secret: t, as: basic}]}"),
        "5:58: a second injection into Authorization",
    ),
    "a query parameter without a name": (
        rules("{host: a.test, inject: {secret: s, as: query}}"),
        "5:32: as: query needs `name`",
    ),
    "a query parameter with an odd name": (
        rules("{host: a.test, inject: {secret: s, as: query, name: 'a b'}}"),
        "5:61: a query parameter's name is up to 128 of letters, digits,",
    ),
    "a query parameter in a header": (
        rules("{host: a.test, inject: {secret: s, as: query, name: key, header: X-Key}}"),
        "5:66: as: query is sent in the place that `name` names and takes no header",
    ),
    "a cookie with an odd name": (
        rules("{host: a.test, inject: {secret: s, as: cookie, name: 'a;b'}}"),
        "5:62: a cookie's name is a token of up to 128 characters",
    ),
    "a bearer token with a name": (
        rules("{host: a.test, inject: {secret: s, as: bearer, name: x}}"),
        "5:56: as: bearer is sent in Authorization and takes no name",
    ),
    "a cookie with a username": (
        rules("{host: a.test, inject: {secret: s, as: cookie, name: sid, username: u}}"),
        "5:77: cookie takes no username",
    ),
    "one cookie twice": (
        rules("{host: a.test, inject: [{secret: s, as: cookie, name: a}, {secret: t, as: cookie, name: a}]}"),
        "5:67: a second injection into cookie a",
    ),
    "a rule with a cookie and one with the header Cookie": (
        rules(
            "{id: a, host: a.test, inject: {secret: s, as: cookie, name: sid}}",
            "{id: b, host: a.test, inject: {secret: t, as: api-key, header: Cookie}}",
        ),
        "6:9: this rule and p/a set Cookie of the same requests to a.test",
    ),
    "no substitutions": (rules("{host: a.test, substitutions: []}"), "5:39: substitutions is empty"),
    "a substitution without a placeholder": (
        rules("{host: a.test, substitutions: {secret: s, in: [path]}}"),
        "5:39: a substitution needs `placeholder`",
    ),
    "a substitution without a surface": (
        rules("{host: a.test, substitutions: {secret: s, placeholder: p, in: []}}"),
        "5:71: in is empty",
    ),
    "a substitution on an unknown surface": (
        rules("{host: a.test, substitutions: {secret: s, placeholder: p, in: [cookie]}}"),
        "5:72: expected one of path, query, header, body",
    ),
    "a blank placeholder": (
        rules("{host: a.test, substitutions: {secret: s, placeholder: ' ', in: [body]}}"),
        "5:64: a placeholder is 1 to 1024 characters, not all blank",
    ),
    "a placeholder that no path has": (
        rules("{host: a.test, substitutions: {secret: s, placeholder: '{TOKEN}', in: [path]}}"),
        "5:64: this placeholder is in no path that is allowed: character that a path does not have",
    ),
    "one placeholder twice on one surface": (
        rules(
            "{host: a.test, substitutions: [{secret: s, placeholder: p, in: [path]}, "
            "{secret: s, placeholder: p, in: [query, path]}]}"
        ),
        "5:81: a second substitution of placeholder 'p' in query, path",
    ),
    "two rules with one placeholder": (
        rules(
            "{id: a, host: a.test, substitutions: {secret: s, placeholder: p, in: [body]}}",
            "{id: b, host: a.test, substitutions: {secret: t, placeholder: p, in: [body]}}",
        ),
        "6:9: this rule and p/a set placeholder 'p' in body of the same requests to a.test",
    ),
    "a deny rule with a substitution": (
        rules("{host: a.test, action: deny, substitutions: {secret: s, placeholder: p, in: [body]}}"),
        "5:38: a deny rule injects nothing",
    ),
    "a substitution at a wildcard": (
        rules("{host: '*.a.test', substitutions: {secret: s, placeholder: p, in: [body]}}"),
        "5:16: a secret is bound to exact hosts, not to a wildcard",
    ),
    "a substitution at an address": (
        rules("{address: 203.0.113.1, substitutions: {secret: s, placeholder: p, in: [body]}}"),
        "5:32: substitutions does not apply to addresses",
    ),
    "a substitution over plain HTTP": (
        rules("{host: a.test, schemes: [http], substitutions: {secret: s, placeholder: p, in: [body]}}"),
        "5:41: a secret over plain HTTP needs a.test in plaintext_secrets",
    ),
    "two rules that inject into one header of one request": (
        rules(
            "{id: a, host: a.test, paths: ['/v1/*'], inject: {secret: s, as: bearer}}",
            "{id: b, host: a.test, paths: ['/v1/x'], inject: {secret: t, as: bearer}}",
        ),
        "6:9: this rule and p/a set Authorization of the same requests to a.test",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_is_refused_at_its_place(case: str) -> None:
    """In the form `file:line:column: problem`."""
    text, message = REFUSED[case]
    with pytest.raises(PolicyError) as caught:
        load_text(text, "p.yaml")

    assert str(caught.value).startswith(f"p.yaml:{message}"), str(caught.value)
    assert str(caught.value) == (
        f"{caught.value.origin}:{caught.value.line}:{caught.value.column}: {caught.value.problem}"
    )


def test_a_file_over_the_limit_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    """The limit is one mebibyte."""
    big = tmp_path / "big.yaml"
    big.write_text("version: 1\n" + "#" * 1024 * 1024)

    with pytest.raises(PolicyError, match="larger than 1048576 bytes"):
        load(big)


def test_too_many_rules_are_refused() -> None:
    """The limit is 4096 in one file."""
    with pytest.raises(PolicyError, match="more than 4096 rules"):
        load_text(rules(*("{host: a.test}" for _ in range(4097))))
    two = rules(*("{host: a.test}" for _ in range(4096))) + "  q: {rules: [{host: a.test}]}\n"
    with pytest.raises(PolicyError, match="more than 4096 rules in one file"):
        load_text(two)


def test_a_file_that_cannot_be_read_is_a_policy_error(tmp_path: Path) -> None:
    """The caller therefore handles only one kind of error."""
    with pytest.raises(PolicyError, match=r"none\.yaml:1:1: cannot be read"):
        load(tmp_path / "none.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_bytes(b"version: 1\n\xff")
    with pytest.raises(PolicyError, match=r"bad\.yaml:2:1: file is not UTF-8"):
        load(bad)


@given(
    st.text(st.sampled_from("version: 1\n-[]{},'\"&*!|>#%@`hostpolicerules. \t\x07\u00e9\ufeff"), max_size=80)
    | st.binary(max_size=60)
)
def test_any_text_is_a_document_or_a_policy_error(text: str | bytes) -> None:
    """No other exception is raised."""
    try:
        document = load_text(text)
    except PolicyError as error:
        assert error.line >= 1 and error.column >= 1
    else:
        assert "(text)" == document.origin


def test_scalars_are_what_they_look_like() -> None:
    """YAML 1.1's special words are plain text: `no` is a name, `on` a policy."""
    document = load_text("version: 1\npolicies:\n  on: {rules: [{id: no, host: no.example}]}\n")

    assert "on/no" == compile_named(document, "on").rules[0].id


SESSIONS: dict[str, tuple[str, str]] = {
    "sessions without a login": ("{host: a.test, schemes: [postgres]}", "postgres needs inject with `as: postgres`"),
    "sessions with a header": (
        "{host: a.test, schemes: [postgres], inject: {secret: s, as: bearer}}",
        "postgres needs inject with",
    ),
    "sessions and requests in one rule": (
        "{host: a.test, schemes: [https, postgres], inject: {secret: s, as: postgres}}",
        "postgres needs a rule of its own",
    ),
    "a login for requests": (
        "{host: a.test, inject: {secret: s, as: postgres}}",
        "as: postgres needs `schemes: [postgres]`",
    ),
    "a login in a list": (
        "{host: a.test, schemes: [postgres], inject: [{secret: s, as: postgres}]}",
        "as: postgres is the only injection of its rule, and no list",
    ),
    "a login without a secret": (
        "{host: a.test, schemes: [postgres], inject: {as: postgres}}",
        "inject needs `secret`",
    ),
    "a login with a header": (
        "{host: a.test, schemes: [postgres], inject: {secret: s, as: postgres, header: X}}",
        "unknown key 'header'",
    ),
    "a login with a long user": (
        f"{{host: a.test, schemes: [postgres], inject: {{secret: s, as: postgres, username: {'u' * 64}}}}}",
        "the name of a database's user has at most 63 bytes",
    ),
    "a login for a wildcard": (
        '{host: "*.a.test", schemes: [postgres], inject: {secret: s, as: postgres}}',
        "a secret is bound to exact hosts",
    ),
    "a login on port 443": (
        "{host: a.test, ports: [443], schemes: [postgres], inject: {secret: s, as: postgres}}",
        "none of the rule's schemes is spoken on port 443",
    ),
    "methods of sessions": (
        "{host: a.test, schemes: [postgres], methods: [GET], inject: {secret: s, as: postgres}}",
        "methods does not apply to postgres",
    ),
    "substitutions in sessions": (
        "{host: a.test, schemes: [postgres], inject: {secret: s, as: postgres}, "
        "substitutions: {secret: s, placeholder: p, in: [body]}}",
        "substitutions does not apply to postgres",
    ),
    "databases of requests": ("{host: a.test, databases: [d]}", "databases needs `schemes: [postgres]`"),
    "databases that are denied": (
        "{host: a.test, action: deny, schemes: [postgres], databases: [d]}",
        "only a rule with a login names databases",
    ),
    "databases of an address": ("{address: 8.8.8.8, databases: [d]}", "databases does not apply to addresses"),
    "no database": (
        "{host: a.test, schemes: [postgres], databases: [], inject: {secret: s, as: postgres}}",
        "databases is empty",
    ),
    "a long database": (
        f"{{host: a.test, schemes: [postgres], databases: [{'d' * 64}], inject: {{secret: s, as: postgres}}}}",
        "the name of a database has at most 63 bytes",
    ),
}


@pytest.mark.parametrize("case", SESSIONS)
def test_a_rule_about_database_sessions_says_nothing_about_requests(case: str) -> None:
    text, problem = SESSIONS[case]
    with pytest.raises(PolicyError, match=re.escape(problem)):
        load_text(rules(text))


def test_two_rules_give_no_session_different_logins() -> None:
    one = "{host: a.test, schemes: [postgres], databases: [d, e], inject: {secret: s, as: postgres}}"
    other = "{host: a.test, schemes: [postgres], databases: [e], inject: {secret: t, as: postgres}}"
    with pytest.raises(PolicyError, match=r"give the same sessions with .* different logins"):
        load_text(rules(one, other))
    for fits in (
        other.replace("[e]", "[f]"),
        other.replace("secret: t", "secret: s"),
        other.replace("a.test", "b.test"),
    ):
        assert 2 == len(compile_named(load_text(rules(one, fits)), "p").rules)


ENDPOINTS = {
    "host: a.test": [(80, "http"), (443, "https")],
    "host: a.test, inject: {secret: s, as: bearer}": [(443, "https")],
    "host: a.test, substitutions: {secret: s, placeholder: p, in: [body]}": [(443, "https")],
    "host: a.test, ports: [8443]": [(8443, "https")],
    "host: a.test, ports: [8080], schemes: [http]": [(8080, "http")],
    "host: a.test, schemes: [http]": [(80, "http")],
    "host: a.test, schemes: [https, http], ports: [80, 443, 9000]": [
        (80, "http"),
        (443, "https"),
        (9000, "https"),
        (9000, "http"),
    ],
    "address: 8.8.8.8": [(443, "https")],
    "host: a.test, action: deny": [],
    "host: a.test, action: deny, ports: [8080]": [(8080, "http"), (8080, "https"), (8080, "postgres")],
    "host: a.test, action: deny, schemes: [postgres]": [],
    "host: a.test, schemes: [postgres], inject: {secret: s, as: postgres}": [(5432, "postgres")],
    "host: a.test, ports: [6432], schemes: [postgres], inject: {secret: s, as: postgres}": [(6432, "postgres")],
}


@pytest.mark.parametrize("text", ENDPOINTS)
def test_a_rule_has_the_endpoints_that_the_reference_says(text: str) -> None:
    """Rules with secrets default to 443, denials to all endpoints."""
    rule = compile_named(load_text(rules(f"{{{text}}}")), "p").rules[0]

    assert tuple(Endpoint(port, Scheme(scheme)) for port, scheme in ENDPOINTS[text]) == rule.endpoints


def test_remarks_name_what_works_but_may_surprise() -> None:
    """Open prefixes, foreign scripts, methods in lower case."""
    document = load_text(rules("{hosts: [münchen.test], paths: ['/v1*'], methods: [get]}"))

    assert [(5, "xn--mnchen-3ya.test"), (5, "methods are case-sensitive"), (5, "inside a segment")] == [
        (
            remark.line,
            next(
                word
                for word in ("xn--mnchen-3ya.test", "methods are case-sensitive", "inside a segment")
                if word in remark.text
            ),
        )
        for remark in sorted(document.remarks, key=lambda remark: ("segment" in remark.text, "methods" in remark.text))
    ]


def test_the_example_file_is_good_and_shows_every_feature() -> None:
    """It contains each key of the language at least once."""
    from policy import schema
    from policy.injection import InjectionKind, Surface
    from policy.references import BackendKind
    from policy.rules import DnsSettings, Limits

    document = load(EXAMPLE)
    text = EXAMPLE.read_text()
    words = [
        *("version", "ceiling", "default", "always_deny", "always_allow", "plaintext_secrets", "wildcard_bindings"),
        *("guard_bindings", "headers", "cookies", "query"),
        *("policies", "extends", "mode", "dns", "limits", "rules"),
        *schema._RULE_KEYS,
        *("secret", "as", "header", "name", "username", "placeholder", "in"),
        *schema._PROVIDING,
        *schema._AWS_KEYS,
        *schema._HMAC_KEYS,
        *DnsSettings.__dataclass_fields__,
        *Limits.__dataclass_fields__,
    ]

    assert [] == [word for word in words if f"{word}:" not in text]
    assert [] == [kind for kind in InjectionKind if f"as: {kind}" not in text]
    assert [] == [surface for surface in Surface if f" {surface}" not in text]
    assert ["base", "agents", "builds", "trial"] == list(document.policies)
    assert {"preset/pypi/index", "preset/npm/registry"} <= {rule.id for rule in compile_named(document, "builds").rules}
    assert 32 == len(compile_named(document, "trial").rules)
    assert [] == [backend for backend in BackendKind if f"{backend}://" not in text]
    assert () == document.remarks


DOCUMENT = yaml.safe_load(EXAMPLE.read_text())
HOSTS = sorted(
    {
        re.sub(r"^\*\.", "below.", name)
        for name in re.findall(r"[*a-z0-9.-]+\.(?:com|org|example)\b", EXAMPLE.read_text())
    }
    | {"else.test"}
)


def _named_by_authors(path: tuple[object, ...]) -> bool:
    """Whether keys of this mapping are names: of policies, of credential slots, of variables."""
    return path == ("policies",) or (path[:1] == ("policies",) and path[-1:] in {("client_credentials",), ("env",)})


@functools.cache
def _mutations() -> list[Mutation]:
    return list(mutations(DOCUMENT, _named_by_authors))


_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def _powers(document: Any) -> dict[str, frozenset[str]] | None:
    """Return the permissions of each policy of a document; None if the document is refused."""
    try:
        read = load_text(yaml.dump(document, Dumper=_DUMPER))
    except PolicyError as error:
        assert re.match(r"\(text\):[0-9]+:[0-9]+: .", str(error))
        return None
    paths = ("/v1/x", "/v1/admin/x", "/health", "/")
    named = {name: permitted(compile_named(read, name), HOSTS, paths) for name in read.policies}
    return named | {"": permitted(compile_default(read), HOSTS, paths)}


@pytest.mark.slow
@settings(deadline=None)
@given(st.deferred(lambda: st.sampled_from(_mutations())))
def test_what_is_not_read_is_refused_or_opens_nothing(mutation: Mutation) -> None:
    """An unknown, misspelt or empty key, and a null, at any place of the example: no policy permits more."""
    opened, bound = _powers(mutation.document), _powers(DOCUMENT)
    assert bound is not None
    if opened is None:
        return
    assert mutation.kind.startswith("empty"), mutation
    without = _powers(mutation.without) or {}
    for name, powers in opened.items():
        assert powers <= bound[name] or powers <= without.get(name, frozenset()), (mutation, name)


@pytest.mark.slow
def test_no_rule_reads_an_empty_list_or_a_null() -> None:
    """For every key of every rule: all mutations of that kind, not a sample."""
    tried = set()
    for mutation in _mutations():
        if "rules" in mutation.path[:-1] and mutation.kind in ("null", "empty list"):
            tried.add(mutation.path[-1])
            assert _powers(mutation.document) is None, mutation
    assert {"methods", "paths", "ports", "schemes", "hosts", "host", "addresses", "inject", "action", "in"} <= tried
