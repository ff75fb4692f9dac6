"""The parts of a plan that signs: scopes and templates."""

import pytest

from policy.aws_hosts import AwsScope
from policy.signing import AwsSigning, HmacSigning, PartKind, TemplatePart, message_parts, value_parts

S3 = "s3.eu-west-1.amazonaws.com"


def test_region_and_service_of_a_rule_have_priority() -> None:
    """Servers with the protocol of S3 have names of their own."""
    assert AwsSigning("auto", "s3").scope("storage.example.com") == AwsScope("auto", "s3")
    assert AwsSigning("us-east-1").scope(S3) == AwsScope("us-east-1", "s3")


def test_a_template_is_a_list_of_known_parts() -> None:
    """Braces are literal when doubled; names of headers are in lower case."""
    assert message_parts("{{v0}}:{timestamp}\n{header:X-Id}") == (
        TemplatePart(PartKind.TEXT, "{"),
        TemplatePart(PartKind.TEXT, "v0"),
        TemplatePart(PartKind.TEXT, "}"),
        TemplatePart(PartKind.TEXT, ":"),
        TemplatePart(PartKind.TIMESTAMP),
        TemplatePart(PartKind.TEXT, "\n"),
        TemplatePart(PartKind.HEADER, "x-id"),
    )
    assert value_parts("v0={signature}") == (TemplatePart(PartKind.TEXT, "v0="), TemplatePart(PartKind.SIGNATURE))


def test_only_a_template_with_the_body_needs_it() -> None:
    """Other requests are sent as they come."""
    assert HmacSigning("X-S", "{body_sha256}").signs_body and HmacSigning("X-S", "{body}").signs_body
    assert not HmacSigning("X-S", "{method}{path}{query}").signs_body


@pytest.mark.parametrize(
    "template", ["", "{bod}", "{body.x}", "{}", "{body", "body}", "{signature}", "{header:Cookie}"]
)
def test_a_template_with_another_part_is_refused(template: str) -> None:
    """Nothing is evaluated."""
    with pytest.raises(ValueError, match=r"template|cannot be signed"):
        message_parts(template)


def test_a_scope_that_does_not_follow_from_the_host_is_refused() -> None:
    """It is never guessed."""
    with pytest.raises(ValueError, match=r"the AWS region and service of host\.test"):
        AwsSigning().scope("host.test")
