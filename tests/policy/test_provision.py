"""Placeholders: their form, their derivation, the language that provides them, and their resolution for one sandbox."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.compile import compile_named, secrets_of
from policy.compiled import CompiledPolicy
from policy.decision import AllowRequest, decide_request
from policy.document import PolicyDocument
from policy.facts import RequestFacts, Scheme
from policy.injection import Surface
from policy.load import load_text
from policy.placeholders import known, provided, provisions_of, resolve, variables_of
from policy.problems import PolicyError
from policy.provision import (
    HOLE,
    LENGTH,
    MAX_PROVISIONS,
    RESERVED,
    Provision,
    ProvisionKind,
    check_form,
    check_path,
    check_variable,
    derived,
)
from runtimes.engine.trust import CA_VARIABLES

SEED, OTHER = "0" * 63 + "1", "0" * 63 + "2"
RULE = "{{id: {id}, host: {host}, {key}: {items}}}"


def document(*rules: str) -> PolicyDocument:
    """Return the document with a policy `p` of these rules."""
    lines = "".join(f"      - {rule}\n" for rule in rules)
    return load_text(f"version: 1\npolicies:\n  p:\n    rules:\n{lines}")


def compiled(*injections: str) -> CompiledPolicy:
    """Return the policy with a rule for host `hN.example.com` and each of these injections."""
    rules = [
        RULE.format(id=f"r{number}", host=f"h{number}.example.com", key=key(text), items=text)
        for number, text in items(injections)
    ]
    return compile_named(document(*rules), "p")


def key(text: str) -> str:
    """Return the key of a rule for this text."""
    return "inject" if " as: " in text else "substitutions"


def items(texts: tuple[str, ...]) -> list[tuple[int, str]]:
    """Number the texts from 1."""
    return list(enumerate(texts, start=1))


TOKEN = "{secret: gh, env: GITHUB_TOKEN, form: 'ghp_{}', in: [header, basic], username: u}"
NETRC = "{secret: git, file: ~/.netrc, template: 'machine h password {placeholder} ', in: [basic], username: u}"


def test_a_sandbox_gets_a_variable_with_a_placeholder_of_its_own() -> None:
    """The value has the form, more than 128 random bits, and differs between sandboxes."""
    policy = compiled(TOKEN)
    first, second = provided(policy, SEED).variables, provided(policy, OTHER).variables
    assert {"GITHUB_TOKEN"} == set(first) == variables_of(policy)
    assert first["GITHUB_TOKEN"].startswith("ghp_")
    assert len("ghp_") + LENGTH == len(first["GITHUB_TOKEN"])
    assert first != second
    assert 62**LENGTH > 2**128
    assert known(policy, SEED) == {first["GITHUB_TOKEN"]: "gh"}


def test_the_placeholder_is_replaced_at_its_host_by_its_secret_and_needs_a_grant_there() -> None:
    """The resolved policy names the placeholder of the sandbox; the compiled one has the form only."""
    policy = compiled(TOKEN)
    text = provided(policy, SEED).variables["GITHUB_TOKEN"]
    request = RequestFacts("h1.example.com", 443, Scheme.HTTPS, "GET", "/")
    decision = decide_request(resolve(policy, SEED), request)
    assert isinstance(decision, AllowRequest)
    assert [("gh", text, (Surface.HEADER, Surface.BASIC))] == [
        (plan.secret, plan.placeholder, plan.surfaces) for plan in decision.substitutions
    ]
    assert [("gh", "h1.example.com", 443)] == [(use.secret, use.host, use.port) for use in secrets_of(policy)]
    assert text not in str(policy.to_json())
    assert policy == CompiledPolicy.from_json(policy.to_json())


def test_a_placeholder_is_replaced_where_the_rule_says_it() -> None:
    """`in` names the surfaces."""
    policy = compiled("{secret: s, env: A, in: [path, query, body]}")
    (plan,) = policy.rules[0].substitutions
    assert (Surface.PATH, Surface.QUERY, Surface.BODY) == plan.surfaces


def test_rules_with_one_variable_and_one_secret_give_one_placeholder() -> None:
    """The variable has one value, so each of its hosts replaces the same text."""
    policy = compiled(TOKEN, TOKEN)
    assert 1 == len(provisions_of(policy)) == len(known(policy, SEED))
    plans = [plan for rule in resolve(policy, SEED).rules for plan in rule.substitutions]
    assert 1 == len({plan.placeholder for plan in plans})
    assert 2 == len(plans)


def test_each_variable_of_a_rule_has_a_placeholder_of_its_own() -> None:
    """A rule can provide several variables, each with a text around the placeholder, and inject in another way."""
    policy = compiled("{secret: s, as: bearer, env: {KEY_ID: 'AKIA{placeholder}', URL: 'https://u:{placeholder}@h1/'}}")
    variables = provided(policy, SEED).variables
    assert variables["KEY_ID"].startswith("AKIA")
    assert variables["URL"].startswith("https://u:")
    assert 2 == len(known(policy, SEED))
    assert all(any(text in value for text in known(policy, SEED)) for value in variables.values())
    assert () == policy.rules[0].substitutions


def test_rules_with_one_file_each_add_their_text_to_it() -> None:
    """A .netrc can have the logins of several hosts."""
    (file,) = provided(compiled(NETRC, NETRC.replace("git", "hub")), SEED).files
    assert "~/.netrc" == file.path
    assert 2 == file.content.count("machine h password ")
    assert 2 == len(set(file.content.split()) - {"machine", "h", "password"})


def test_a_policy_without_placeholders_needs_no_seed() -> None:
    """A policy with placeholders is refused without one."""
    plain = compiled("{secret: s, as: bearer}")
    assert plain is resolve(plain, "")
    assert {} == known(plain, "")
    for seed in ("", "0" * 62, "G" * 64, "0" * 65):
        with pytest.raises(ValueError, match="seed"):
            resolve(compiled(TOKEN), seed)
        with pytest.raises(ValueError, match="seed"):
            known(compiled(TOKEN), seed)


@pytest.mark.parametrize(
    ("problem", "injections"),
    {
        "two secrets for one variable": (TOKEN, TOKEN.replace("gh,", "hub,")),
        "two forms for one variable": (TOKEN, TOKEN.replace("ghp_", "gho_")),
        "two variables of one name in one rule": (f"[{TOKEN}, {TOKEN.replace('gh,', 'hub,')}]",),
        "two forms of one placeholder in a file": (NETRC, NETRC.replace("file:", "form: 'a{}', file:")),
        "a placeholder for nothing": ("{secret: s, in: [header]}",),
        "a file without a text": ("{secret: s, file: /a, in: [header]}",),
        "a text without a file": ("{secret: s, env: A, template: '{placeholder}', in: [header]}",),
        "a form of nothing": ("{secret: s, as: bearer, form: '{}'}",),
        "surfaces without a placeholder": ("{secret: s, as: bearer, env: A, in: [path]}",),
        "a text of the policy and one of the sandbox": ("{secret: s, placeholder: a, env: A, in: [path]}",),
        "a login of any user": ("{secret: s, env: A, in: [basic]}",),
        "a user of no login": ("{secret: s, env: A, in: [header], username: u}",),
        "a user with a colon": ("{secret: s, env: A, in: [basic], username: 'u:v'}",),
        "no place": ("{secret: s, env: A}",),
        "an unknown surface": ("{secret: s, env: A, in: [cookie]}",),
        "no surface": ("{secret: s, env: A, in: []}",),
        "a header of a placeholder": ("{secret: s, env: A, header: X, in: [header]}",),
        "a text without the placeholder": ("{secret: s, env: {A: b}, in: [header]}",),
        "no variable": ("{secret: s, env: {}, in: [header]}",),
        "a variable of the trust anchors": ("{secret: s, env: SSL_CERT_FILE, in: [header]}",),
        "a form with a blank": ("{secret: s, env: A, form: 'a {}', in: [header]}",),
        "a form without a hole": ("{secret: s, env: A, form: abc, in: [header]}",),
        "a relative file": ("{secret: s, file: a, template: '{placeholder}', in: [header]}",),
        "no name of a secret": ("{secret: '', env: A, in: [header]}",),
        "too many": tuple(f"{{secret: s, env: A{number}, in: [header]}}" for number in range(MAX_PROVISIONS + 1)),
    }.items(),
)
def test_a_rule_that_cannot_provide_is_refused_with_its_line(problem: str, injections: tuple[str, ...]) -> None:
    """Each mistake has a line of the rules."""
    with pytest.raises(PolicyError) as caught:
        compiled(*injections)
    assert all(4 < one.line <= 4 + len(injections) for one in caught.value.problems), problem


def test_a_wildcard_gets_no_placeholder() -> None:
    """A secret is bound to exact hosts."""
    with pytest.raises(PolicyError, match="exact hosts"):
        document(RULE.format(id="r", host="'*.example.com'", key=key(TOKEN), items=TOKEN))


def test_the_variables_of_the_trust_anchors_are_reserved() -> None:
    """No policy can switch off the trust in the gateway by mistake."""
    assert set(CA_VARIABLES) <= RESERVED


@pytest.mark.parametrize("name", ["", "A B", "1A", "A-B", "PATH", "LD_PRELOAD", "OPENSANDBOX_ID", "EXECD_ENVS", "Ä"])
def test_some_names_are_no_variables(name: str) -> None:
    """A variable that programs depend on is not provided."""
    with pytest.raises(ValueError, match="variable"):
        check_variable(name)


@pytest.mark.parametrize(
    "path", ["", "a", "~", "/", "~a/b", "/a/../b", "/a/./b", "//a", "/a$HOME", "/a b", "/a/", "/é"]
)
def test_some_texts_are_no_paths(path: str) -> None:
    """A path has no part that a program reads in another way."""
    with pytest.raises(ValueError, match="path"):
        check_path(path)


@pytest.mark.parametrize("form", ["", "{}{}", "a", "a b{}", "{}\n", "%{}", "a" * 33 + "{}"])
def test_some_texts_are_no_forms(form: str) -> None:
    """A form has one hole, and characters that no encoding changes."""
    with pytest.raises(ValueError, match="form"):
        check_form(form)


@given(st.text(st.characters(codec="utf-8"), max_size=40), st.integers(0, 2**256 - 1), st.integers(0, 2**256 - 1))
def test_a_placeholder_depends_on_seed_and_identity_only(identity: str, first: int, second: int) -> None:
    """Equal inputs give equal texts; another seed or identity gives another text. No character needs an encoding."""
    seeds = f"{first:064x}", f"{second:064x}"
    text = derived(seeds[0], identity, HOLE)
    assert text == derived(seeds[0], identity, HOLE)
    assert (first == second) == (text == derived(seeds[1], identity, HOLE))
    assert text != derived(seeds[0], f"{identity}.", HOLE)
    assert text.isascii()
    assert text.isalnum()
    assert LENGTH == len(text)


def test_a_provision_checks_itself() -> None:
    """A compiled policy with an invalid provision cannot be read."""
    for change in ({"name": "A B"}, {"form": "x"}, {"text": "none"}, {"text": "{placeholder}\x00"}):
        values = {"secret": "s", "kind": ProvisionKind.ENV, "name": "A"} | change
        with pytest.raises(ValueError, match=r"variable|form|text"):
            Provision(**values)
