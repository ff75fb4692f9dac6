"""Presets: data in the language of the operator's file, part of a policy only where it extends them."""

import re
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

import botocore.session
import pytest
from botocore.config import Config

from lifecycle.stored_secrets import StoredSecrets
from policy import cli
from policy.aws_hosts import REGIONS
from policy.compile import UnknownPolicy, compile_named
from policy.compiled import secrets_of
from policy.decision import AllowFlow, AllowRequest, Deny, decide_flow, decide_request
from policy.document import PolicySource
from policy.facts import FlowFacts, RequestFacts, Scheme
from policy.injection import InjectionKind, InjectionPlan
from policy.load import load_text, presets
from policy.names import HostPattern
from policy.placeholders import provided
from policy.problems import PolicyError
from policy.rules import Action, Endpoint, Mode, Rule
from policy.schema import read_document
from policy.yaml_tree import parse

FILES = sorted((Path(cli.__file__).parent / "presets").glob("*.yaml"))
REGION = "eu-west-1"
NAMES = [f"preset/{path.stem}" if path.stem != "aws" else f"preset/aws/{REGION}" for path in FILES]


def document(*names: str, more: str = "") -> str:
    return f"version: 1\npolicies:\n  agents:\n    extends: [{', '.join(names)}]\n{more}"


def allowed(policy: str, host: str, method: str = "GET", path: str = "/", scheme: Scheme = Scheme.HTTPS) -> bool:
    facts = RequestFacts(host, 443 if scheme is Scheme.HTTPS else 80, scheme, method, path)
    return isinstance(decide_request(compile_named(load_text(document(policy)), "agents"), facts), AllowRequest)


def test_there_are_presets() -> None:
    services = ["anthropic", "aws", "debian", "github", "huggingface", "npm", "openai", "pypi"]
    assert services == [path.stem for path in FILES]
    regional = [f"preset/aws/{region}" for region in REGIONS]
    assert ["preset/anthropic", *regional, *(f"preset/{name}" for name in services[2:])] == list(presets())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_preset_names_its_sources_and_is_one_policy_that_only_allows(path: Path) -> None:
    """Exact names only, no other limits, and each rule with an id."""
    text = path.read_text()
    (written,) = load_text(text).policies
    assert path.stem == written
    name = NAMES[FILES.index(path)].removeprefix("preset/")
    source = presets()[f"preset/{name}"]
    assert re.search(r"^# Sources:\n(# .*\n)*# .*https://", text, re.MULTILINE)
    assert ((), Mode.ENFORCE, None, None) == (source.extends, source.mode, source.dns, source.limits)
    for rule in source.rules:
        assert re.fullmatch(rf"preset/{name}/(?!rule-)[a-z]+", rule.id)
        assert {rule.id} >= {plan.binding for plan in rule.request_plans}
        assert Action.ALLOW is rule.action
        assert rule.methods
        assert not rule.addresses
        assert not any(host.wildcard for host in rule.hosts)
        assert {Endpoint(443, Scheme.HTTPS)} <= set(rule.endpoints)


def test_a_policy_has_the_rules_of_a_preset_only_if_it_extends_it() -> None:
    for name in NAMES:
        with_it, without = (
            load_text(document(*names)) for names in ([name], [other for other in NAMES if other != name])
        )
        for rule in presets()[name].rules:
            assert rule in compile_named(with_it, "agents").rules
            assert rule not in compile_named(without, "agents").rules
    assert () == compile_named(load_text("version: 1\npolicies: {agents: {rules: []}}\n"), "agents").rules


@pytest.mark.parametrize("name", NAMES)
def test_no_sandbox_gets_a_preset_by_its_name(name: str) -> None:
    """Neither as the policy of a create call nor as the default."""
    loaded = load_text(document(name))
    assert ["agents"] == list(loaded.policies)
    with pytest.raises(UnknownPolicy):
        compile_named(loaded, name)
    with pytest.raises(PolicyError, match="there is no policy named"):
        load_text(f"version: 1\ndefault: {name}\n")
    with pytest.raises(PolicyError, match="a name is up to 63"):
        load_text(f"version: 1\npolicies:\n  {name}: {{}}\n")


def test_a_misspelled_preset_is_refused_with_a_suggestion() -> None:
    with pytest.raises(PolicyError, match="no policy named 'preset/pipy' to extend; did you mean 'preset/pypi'"):
        load_text(document("preset/pipy"))


ALLOWED = [
    ("preset/pypi", "pypi.org", "GET", "/simple/requests/"),
    ("preset/pypi", "files.pythonhosted.org", "GET", "/packages/aa/bb/cc/requests-2.0-py3-none-any.whl"),
    ("preset/npm", "registry.npmjs.org", "GET", "/@types%2fnode"),
    ("preset/github", "github.com", "POST", "/owner/repository.git/git-upload-pack"),
    ("preset/github", "api.github.com", "PATCH", "/repos/owner/repository/issues/1"),
    ("preset/github", "api.github.com", "GET", "/repos/owner/repository/branches/feature%2Fone"),
    ("preset/github", "codeload.github.com", "GET", "/owner/repository/tar.gz/main"),
    ("preset/debian", "deb.debian.org", "GET", "/debian/pool/main/g/gcc-12/libstdc%2b%2b6_12.2.0_amd64.deb"),
    ("preset/openai", "api.openai.com", "POST", "/v1/chat/completions"),
    ("preset/openai", "api.openai.com", "POST", "/v1/responses"),
    ("preset/openai", "api.openai.com", "POST", "/v1/responses/resp_1/cancel"),
    ("preset/openai", "api.openai.com", "GET", "/v1/responses/resp_1"),
    ("preset/openai", "api.openai.com", "POST", "/v1/embeddings"),
    ("preset/openai", "api.openai.com", "GET", "/v1/models/gpt-4o"),
    ("preset/openai", "api.openai.com", "POST", "/v1/files"),
    ("preset/openai", "api.openai.com", "GET", "/v1/files/file-1/content"),
    ("preset/openai", "api.openai.com", "DELETE", "/v1/files/file-1"),
    ("preset/anthropic", "api.anthropic.com", "POST", "/v1/messages"),
    ("preset/anthropic", "api.anthropic.com", "POST", "/v1/messages/count_tokens"),
    ("preset/anthropic", "api.anthropic.com", "GET", "/v1/models"),
    ("preset/huggingface", "huggingface.co", "GET", "/api/whoami-v2"),
    ("preset/huggingface", "huggingface.co", "HEAD", "/owner/model/resolve/refs%2Fpr%2F1/config.json"),
    ("preset/huggingface", "us.aws.cdn.hf.co", "GET", "/xet-bridge-us/1/2"),
    ("preset/huggingface", "cas-server.xethub.hf.co", "GET", "/v1/reconstructions/1"),
    ("preset/aws/eu-west-1", "s3.eu-west-1.amazonaws.com", "PUT", "/bucket/a//b"),
    ("preset/aws/eu-west-1", "dynamodb.eu-west-1.amazonaws.com", "POST", "/"),
    ("preset/aws/us-east-1", "s3.us-east-1.amazonaws.com", "GET", "/bucket"),
]
DENIED = [
    ("preset/pypi", "pypi.org", "GET", "/account/login/"),
    ("preset/pypi", "pypi.org", "POST", "/simple/requests/"),
    ("preset/pypi", "upload.pypi.org", "POST", "/legacy/"),
    ("preset/npm", "registry.npmjs.org", "PUT", "/package"),
    ("preset/npm", "registry.npmjs.org", "POST", "/-/npm/v1/security/advisories/bulk"),
    ("preset/github", "codeload.github.com", "POST", "/"),
    ("preset/github", "gist.github.com", "GET", "/"),
    ("preset/debian", "deb.debian.org", "POST", "/debian/"),
    ("preset/openai", "api.openai.com", "GET", "/v1/organization/admin_api_keys"),
    ("preset/openai", "api.openai.com", "POST", "/v1/organization/admin_api_keys"),
    ("preset/openai", "api.openai.com", "GET", "/v1/files"),
    ("preset/openai", "api.openai.com", "GET", "/v1/chat/completions"),
    ("preset/openai", "api.openai.com", "DELETE", "/v1/models/ft:gpt-4o:owner"),
    ("preset/openai", "api.openai.com", "POST", "/v1/fine_tuning/jobs"),
    ("preset/anthropic", "api.anthropic.com", "GET", "/v1/organizations/api_keys"),
    ("preset/anthropic", "api.anthropic.com", "POST", "/v1/messages/batches"),
    ("preset/anthropic", "api.anthropic.com", "GET", "/v1/files"),
    ("preset/huggingface", "huggingface.co", "DELETE", "/api/repos/delete"),
    ("preset/huggingface", "huggingface.co", "POST", "/api/models/owner/model/commit/main"),
    ("preset/huggingface", "cas-server.xethub.hf.co", "POST", "/v1/xorbs/default/1"),
    ("preset/huggingface", "s3.amazonaws.com", "GET", "/"),
    ("preset/aws/eu-west-1", "s3.us-east-1.amazonaws.com", "GET", "/bucket/key"),
    ("preset/aws/eu-west-1", "bucket.s3.eu-west-1.amazonaws.com", "GET", "/key"),
    ("preset/aws/eu-west-1", "iam.amazonaws.com", "POST", "/"),
    ("preset/aws/eu-west-1", "sts.eu-west-1.amazonaws.com", "POST", "/"),
    ("preset/aws/eu-west-1", "dynamodb.eu-west-1.amazonaws.com", "GET", "/"),
]


@pytest.mark.parametrize("case", ALLOWED, ids=str)
def test_what_its_clients_ask_for_is_allowed(case: tuple[str, str, str, str]) -> None:
    assert allowed(*case)


@pytest.mark.parametrize("case", DENIED, ids=str)
def test_what_they_do_not_need_is_denied(case: tuple[str, str, str, str]) -> None:
    assert not allowed(*case)


def test_apts_plain_http_is_allowed_and_no_other() -> None:
    assert allowed("preset/debian", "deb.debian.org", scheme=Scheme.HTTP)
    for name, host in (
        ("preset/pypi", "pypi.org"),
        ("preset/npm", "registry.npmjs.org"),
        ("preset/github", "github.com"),
    ):
        loaded = compile_named(load_text(document(name)), "agents")
        assert isinstance(decide_flow(loaded, FlowFacts(host, 80, Scheme.HTTP)), Deny)
        assert isinstance(decide_flow(loaded, FlowFacts(host, 443, Scheme.HTTPS)), AllowFlow)


def test_each_secret_goes_to_the_hosts_of_its_service_only() -> None:
    uses = secrets_of(compile_named(load_text(document(*NAMES)), "agents"))
    assert {
        ("anthropic-api-key", "api.anthropic.com", "substitution"),
        ("aws-keys", "dynamodb.eu-west-1.amazonaws.com", "aws-sigv4"),
        ("aws-keys", "s3.eu-west-1.amazonaws.com", "aws-sigv4"),
        ("github-token", "github.com", "basic"),
        ("github-token", "api.github.com", "bearer"),
        ("huggingface-token", "huggingface.co", "bearer"),
        ("openai-api-key", "api.openai.com", "bearer"),
    } == {(use.secret, use.host, use.kind) for use in uses}


def test_each_client_starts_with_a_placeholder() -> None:
    given = provided(compile_named(load_text(document(*NAMES)), "agents"), "0" * 64)
    forms = {"OPENAI_API_KEY": "sk-", "ANTHROPIC_API_KEY": "sk-ant-", "HF_TOKEN": "hf_"}
    forms |= {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    assert given.variables.keys() == forms.keys()
    for name, form in forms.items():
        assert re.fullmatch(rf"{form}[A-Za-z0-9]{{36}}", given.variables[name])
    (file,) = given.files
    assert "~/.aws/config" == file.path
    assert {"aws_access_key_id", "aws_secret_access_key", "s3"} == set(re.findall(r"^(\w+) =", file.content, re.M))


def test_a_regional_preset_has_the_hosts_of_its_region() -> None:
    """Those of botocore's clients. Two regions can be extended together."""
    session = botocore.session.get_session()
    for service in ("s3", "dynamodb"):
        assert set(REGIONS) == set(session.get_available_regions(service))
    session.set_credentials("AKIDEXAMPLE", "placeholder")
    config = Config(s3={"us_east_1_regional_endpoint": "regional", "addressing_style": "path"})
    for region in ("us-east-1", "eu-west-1", "ap-southeast-2"):
        clients = [session.create_client(service, region, config=config) for service in ("s3", "dynamodb")]
        wanted = {urlsplit(client.meta.endpoint_url).hostname for client in clients}
        assert wanted == {host.text for rule in presets()[f"preset/aws/{region}"].rules for host in rule.hosts}
    both = compile_named(load_text(document("preset/aws/us-east-1", "preset/aws/eu-west-1")), "agents")
    assert 4 == len(both.rules) == len({rule.id for rule in both.rules})
    assert 1 == provided(both, "0" * 64).files[0].content.count("[default]")


def test_a_regional_preset_without_its_region_is_refused_with_a_suggestion() -> None:
    with pytest.raises(
        PolicyError, match="'preset/aws' to extend; there is one for each region: 'preset/aws/us-east-1'"
    ):
        load_text(document("preset/aws"))


@pytest.mark.parametrize("name", [name for name in NAMES if any(rule.request_plans for rule in presets()[name].rules)])
def test_check_and_explain_name_a_missing_secret_and_the_command_that_adds_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text(document(name))
    rule = next(rule for rule in presets()[name].rules if rule.request_plans)
    host, path = rule.hosts[0].text, rule.paths[0].text if rule.paths else "/x"
    secret = rule.request_plans[0].secret
    hosts = {use.host for use in secrets_of(compile_named(load_text(document(name)), "agents")) if secret == use.secret}
    assert cli.OK == cli.check(file, StoredSecrets({}))
    checked = capsys.readouterr().out
    assert cli.OK == cli.explain(file, "agents", host, 443, "https", rule.methods[0], path, stored=StoredSecrets({}))
    explained = capsys.readouterr().out
    assert f"  request  allow   {rule.id}: is sent, if\n" in explained
    for printed in (checked, explained):
        commands = re.findall(rf"the operator adds it: sallyport vault put {secret}(.*)", printed)
        assert commands
        assert all(hosts == set(re.findall(r" --host (\S+)", command)) for command in commands)


def test_a_deny_rule_narrows_a_preset() -> None:
    more = "    rules: [{id: no-push, action: deny, host: github.com, paths: [/o/r.git/git-receive-pack]}]\n"
    policy = compile_named(load_text(document("preset/github", more=more)), "agents")
    for path, denied in (("/o/r.git/git-receive-pack", True), ("/o/r.git/git-upload-pack", False)):
        facts = RequestFacts("github.com", 443, Scheme.HTTPS, "POST", path)
        assert denied is isinstance(decide_request(policy, facts), Deny)


def test_a_rule_adds_requests_with_the_secret_of_a_preset() -> None:
    """Also where the rule overlaps one of the preset."""
    for path in ("/v1/images/generations", "/v1/embeddings"):
        rule = f"{{id: more, host: api.openai.com, methods: [POST], paths: [{path}], inject: {{SECRET}}}}"
        more = f"    rules: [{rule.replace('SECRET', 'secret: openai-api-key, as: bearer')}]\n"
        policy = compile_named(load_text(document("preset/openai", more=more)), "agents")
        found = decide_request(policy, RequestFacts("api.openai.com", 443, Scheme.HTTPS, "POST", path))
        assert isinstance(found, AllowRequest)
        assert ["openai-api-key"] == [plan.secret for plan in found.plans]


CONFLICT = "    rules:\n      - {id: own, host: api.github.com, inject: {secret: other, as: bearer}}\n"


def test_a_rule_that_sets_what_a_preset_sets_is_refused_at_its_place() -> None:
    with pytest.raises(PolicyError) as refused:
        load_text(document("preset/github", more=CONFLICT), "f")
    (problem,) = refused.value.problems
    assert str(problem) == (
        "f:6:9: this rule and preset/github/api set Authorization of the same requests to api.github.com"
    )


def test_a_base_that_comes_before_the_preset_is_refused_at_its_place_too() -> None:
    text = f"version: 1\npolicies:\n  own:\n{CONFLICT}  agents: {{extends: [own, preset/github]}}\n"
    with pytest.raises(PolicyError, match="f:5:9: this rule and preset/github/api set Authorization"):
        load_text(text, "f")


def test_two_presets_that_conflict_are_refused_at_the_policy() -> None:
    def preset(name: str) -> PolicySource:
        plan = InjectionPlan(f"{name}/r", name[-1], InjectionKind.BEARER, "Authorization")
        endpoints = (Endpoint(443, Scheme.HTTPS),)
        rule = Rule(f"{name}/r", Action.ALLOW, (HostPattern("a.test"),), endpoints=endpoints, injections=(plan,))
        return PolicySource(name, rules=(rule,))

    known = MappingProxyType({name: preset(name) for name in ("preset/a", "preset/b")})
    for names, conflict in (("preset/a", False), ("preset/a, preset/b", True)):
        tree = parse(document(names), "f")
        if conflict:
            with pytest.raises(PolicyError, match="f:3:3: preset/b/r and preset/a/r set Authorization"):
                read_document(tree, "f", None, known)
        else:
            read_document(tree, "f", None, known)


def test_check_and_explain_show_the_rules_of_a_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each rule with its methods, hosts and paths, and each secret; the verdict names the rule."""
    file = tmp_path / "policies.yaml"
    file.write_text(document(*NAMES, more="    rules: [{id: own, host: a.test}]\n"))
    assert cli.OK == cli.check(file)
    printed = capsys.readouterr().out
    for name in NAMES:
        for rule in presets()[name].rules:
            assert 1 == printed.count(f"    rule {rule.id}: allow ")
    assert "    rule preset/pypi/index: allow GET, HEAD on https:443 to pypi.org, /simple/*, /pypi/*\n" in printed
    assert "    rule preset/npm/registry: allow GET, HEAD on https:443 to registry.npmjs.org, any path\n" in printed
    assert "    secret github-token -> https://github.com:443 as basic (preset/github/git)\n" in printed
    assert cli.OK == cli.explain(file, "agents", "pypi.org", 443, "https", "GET", "/simple/requests/")
    assert "  request  allow   preset/pypi/index: is sent, if\n" in capsys.readouterr().out
