"""Rules that sign requests: what they may contain, and what is refused when the file is read."""

import json

import pytest

from policy.aws_hosts import AwsScope
from policy.client_credentials import DEFAULT, Owned, examine
from policy.compile import compile_named
from policy.compiled import CompiledPolicy
from policy.decision import AllowRequest, Deny, decide_request
from policy.facts import RequestFacts, Scheme
from policy.injection import InjectionKind, InjectionPlan, render
from policy.load import load_text
from policy.problems import PolicyError
from policy.signing import AwsSigning

S3 = "s3.eu-west-1.amazonaws.com"
EXCHANGE = (
    "{secret: k, as: hmac, header: CB-ACCESS-SIGN, key: base64, output: base64, "
    'sign: "{timestamp}{method}{target}{body}", timestamp_header: CB-ACCESS-TIMESTAMP}'
)
WEBHOOK = '{secret: k, as: hmac, header: X-Hub-Signature-256, sign: "{body}", value: "sha256={signature}"}'


def compiled(*rules: str) -> CompiledPolicy:
    """Return the policy of rules in YAML's flow style."""
    lines = "\n".join(f"      - {rule}" for rule in rules)
    return compile_named(load_text(f"version: 1\npolicies:\n  p:\n    rules:\n{lines}\n"), "p")


def rule(host: str, inject: str, *, name: str = "one") -> str:
    return f"{{id: {name}, host: {host}, inject: {inject}}}"


def asked(host: str) -> RequestFacts:
    return RequestFacts(host, 443, Scheme.HTTPS, "GET", "/", "")


def test_a_rule_for_aws_needs_no_more_than_the_secret() -> None:
    """Region and service follow from the name of a host of AWS."""
    allowed = decide_request(compiled(rule(S3, "{secret: keys, as: aws-sigv4}")), asked(S3))

    assert isinstance(allowed, AllowRequest)
    plan = allowed.injections[0]
    assert (plan.kind, plan.slot, plan.signs) == (InjectionKind.AWS_SIGV4, "signature:aws", True)
    assert plan.aws is not None and plan.aws.scope(S3) == AwsScope("eu-west-1", "s3")


def test_a_signing_plan_survives_its_json_form() -> None:
    """A worker gets the plan as JSON."""
    policy = compiled(
        rule(S3, "{secret: keys, as: aws-sigv4, region: eu-west-1}"), rule("b.test", EXCHANGE, name="two")
    )

    assert CompiledPolicy.from_json(json.loads(json.dumps(policy.to_json()))) == policy


def test_the_secret_of_a_signature_is_never_rendered() -> None:
    """The secret is a key. A plan that signs has no header with its value."""
    plan = InjectionPlan("r", "keys", InjectionKind.AWS_SIGV4, "Authorization", aws=AwsSigning("us-east-1", "s3"))

    with pytest.raises(ValueError, match="signs and is not sent"):
        render(plan, "AKIDEXAMPLE:secretsecret")


@pytest.mark.parametrize(
    ("inject", "problem"),
    [
        ("{secret: a, as: aws-sigv4}", "the AWS region and service of host.test does not follow from its name"),
        ("{secret: a, as: aws-sigv4, service: s3}", "the AWS region of host.test does not follow"),
        ("{secret: a, as: aws-sigv4, region: 'a b', service: s3}", "an AWS region is up to 64"),
        ("{secret: a, as: aws-sigv4, header: X-A, region: r, service: s3}", "takes no header"),
        ("{secret: a, as: aws-sigv4, username: u, region: r, service: s3}", "takes no username"),
        ("{secret: a, as: bearer, region: r}", "region belongs to `as: aws-sigv4`"),
        ("{secret: a, as: bearer, sign: x}", "sign belongs to `as: hmac`"),
        ("{secret: a, as: hmac, sign: x}", "as: hmac needs `header`"),
        ("{secret: a, as: hmac, header: X-S}", "as: hmac needs `sign`"),
        ("{secret: a, as: hmac, header: Host, sign: x}", "reserved credential header name"),
        ("{secret: a, as: hmac, header: X-S, sign: x, timestamp_header: Via}", "reserved credential header name"),
        ("{secret: a, as: hmac, header: X-S, sign: x, algorithm: md5}", "expected one of sha256, sha512, sha1"),
        ("{secret: a, as: hmac, header: X-S, sign: x, key: utf8}", "expected one of raw, base64, hex"),
        ("{secret: a, as: hmac, header: X-S, sign: x, output: base32}", "expected one of hex, base64"),
        ("{secret: a, as: hmac, header: X-S, sign: ''}", "a template has 1 to"),
        ("{secret: a, as: hmac, header: X-S, sign: '{bod}'}", "the unknown part 'bod'"),
        ("{secret: a, as: hmac, header: X-S, sign: '{body.x}'}", "the unknown part"),
        ("{secret: a, as: hmac, header: X-S, sign: '{signature}'}", "the unknown part"),
        ("{secret: a, as: hmac, header: X-S, sign: '{}'}", "the unknown part"),
        ("{secret: a, as: hmac, header: X-S, sign: '{body'}", "a brace of the template has no partner"),
        ("{secret: a, as: hmac, header: X-S, sign: 'body}'}", "a brace of the template has no partner"),
        ("{secret: a, as: hmac, header: X-S, sign: '{header:a b}'}", "is not the name of a header"),
        ("{secret: a, as: hmac, header: X-S, sign: '{header:Cookie}'}", "cannot be signed"),
        ("{secret: a, as: hmac, header: X-S, sign: '{header:content_length}'}", "cannot be signed"),
        ("{secret: a, as: hmac, header: X-S, sign: '{header:x_s}'}", "does not cover the headers that it writes"),
        ("{secret: a, as: hmac, header: X-S, sign: '{timestamp}'}", "a signed {timestamp} is sent in"),
        ("{secret: a, as: hmac, header: X-S, sign: x, timestamp_header: X-T}", "is a part of the text that is signed"),
        (
            "{secret: a, as: hmac, header: X-S, sign: '{timestamp}', timestamp_header: X_S}",
            "signature and timestamp are in different headers",
        ),
        ("{secret: a, as: hmac, header: X-S, sign: x, value: 'v1'}", "contains {signature} once"),
        ("{secret: a, as: hmac, header: X-S, sign: x, value: '{body}{signature}'}", "the unknown part"),
        ('{secret: a, as: hmac, header: X-S, sign: x, value: "a\\n{signature}"}', "a header's value is ASCII text"),
        (
            "[{secret: a, as: hmac, header: X-S, sign: x}, {secret: a, as: hmac, header: X-T, sign: x}]",
            "a second injection into the signature",
        ),
        (
            "[{secret: a, as: aws-sigv4, region: r, service: s}, {secret: b, as: api-key, header: X_Amz-Date}]",
            "a second injection into X_amz-Date",
        ),
        (
            "[{secret: b, as: bearer}, {secret: a, as: aws-sigv4, region: r, service: s}]",
            "a second injection into the signature",
        ),
    ],
)
def test_a_rule_that_cannot_sign_is_refused(inject: str, problem: str) -> None:
    """Each at its line, when the file is read."""
    with pytest.raises(PolicyError) as refused:
        compiled(rule("host.test", inject))

    assert problem.lower() in str(refused.value).lower()


def test_a_request_has_one_signature() -> None:
    """Two rules that would sign one request deny it, also if only one of them is known before."""
    first, second = rule(S3, "{secret: a, as: aws-sigv4}"), rule(S3, WEBHOOK, name="two")
    with pytest.raises(PolicyError, match="set the signature of the same requests"):
        compiled(first, second)

    aws = InjectionPlan("r", "a", InjectionKind.AWS_SIGV4, "Authorization", aws=AwsSigning())
    bearer = InjectionPlan("b", "b", InjectionKind.BEARER, "Authorization")
    token = InjectionPlan("b", "b", InjectionKind.API_KEY, "X-Amz-Security-Token")
    other = InjectionPlan("b", "b", InjectionKind.API_KEY, "X-Own")
    assert aws.collides(bearer) and bearer.collides(aws) and aws.collides(token)
    assert not aws.collides(other) and not aws.collides(aws)


def test_conflicts_that_appear_at_the_request_deny_it() -> None:
    """A binding of the API and a rule can want one slot."""
    policy = compiled(rule(S3, "{secret: a, as: aws-sigv4}"))
    with_bearer = CompiledPolicy(
        "p", (*policy.lists, compiled(rule(S3, "{secret: b, as: bearer}")).lists[0]), plaintext_secrets=()
    )

    denied = decide_request(with_bearer, asked(S3))

    assert isinstance(denied, Deny) and denied.rule == "injection-ambiguous"


def test_the_signature_owns_the_slots_that_it_writes_and_no_other() -> None:
    """A client that signs with placeholder keys is not refused for it. Its other credentials are."""
    (aws,) = compiled(rule(S3, "{secret: a, as: aws-sigv4}")).rules[0].injections
    (hook,) = compiled(rule(S3, WEBHOOK)).rules[0].injections
    headers = (
        (b"Authorization", b"AWS4-HMAC-SHA256 Credential=PLACEHOLDER"),
        (b"X-Amz-Security-Token", b"placeholder"),
        (b"X-Hub-Signature-256", b"mine"),
        (b"Signature", b"sig1=:mine:"),
        (b"X-Api-Key", b"mine"),
    )
    query = "X-Amz-Credential=a&X-Amz-Security-Token=b&X-Amz-Signature=c&api_key=d"

    signed = examine(DEFAULT, Owned.by((aws,)), headers, query)
    hashed = examine(DEFAULT, Owned.by((hook,)), headers, query)

    assert {"header:x-api-key", "query:*apikey"} <= set(signed.refused)
    assert set(signed.refused).isdisjoint({"header:authorization", "header:x-amz-security-token"})
    assert [slot for slot in signed.refused if "amz" in slot.lower()] == []
    assert {"header:authorization", "header:x-amz-security-token"} <= set(hashed.refused)
    assert "header:x-hub-signature-256" not in hashed.refused
    unowned = examine(DEFAULT, Owned(), headers, "").refused
    assert ("header:signature" in signed.refused) is ("header:signature" in unowned)
