"""Region and signing name of an AWS host, compared with the endpoints of botocore's clients."""

from urllib.parse import urlsplit

import botocore.session
import pytest

from policy.aws_hosts import AwsScope, scope_of

SERVICES = ("s3", "sts", "iam", "dynamodb", "lambda", "ecr", "ses", "bedrock-runtime", "sagemaker-runtime", "route53")
SERVICES += ("cloudfront", "dynamodbstreams", "timestream-query", "marketplace-catalog", "s3control", "sqs", "ec2")
REGIONS = ("us-east-1", "eu-west-1", "us-gov-west-1", "cn-north-1", "ap-southeast-2")
UNKNOWN = frozenset({"codecatalyst"})
"""Services whose clients use tokens, not signatures."""


def disagreements(services: list[str] | tuple[str, ...], regions: tuple[str, ...]) -> list[str]:
    """Return the clients whose scope is not the one that `scope_of` returns for their endpoint."""
    session = botocore.session.get_session()
    session.set_credentials("AKIDEXAMPLE", "placeholder")
    found = []
    for service in services:
        for region in regions:
            try:
                client = session.create_client(service, region_name=region)
            except ValueError:  # the service is not in this region
                continue
            host = urlsplit(client.meta.endpoint_url).hostname
            signer = client._request_signer
            if host and scope_of(host) != AwsScope(signer._region_name, signer._signing_name):
                found.append(f"{service} {region} {host}: {scope_of(host)}")
    return found


def test_the_scope_is_that_of_botocores_clients() -> None:
    """The services that sandboxes use most, in four partitions' forms of names."""
    assert disagreements(SERVICES, REGIONS) == []


@pytest.mark.extended
def test_the_scope_is_that_of_each_client_of_botocore() -> None:
    """Every service of botocore."""
    services = [one for one in botocore.session.get_session().get_available_services() if one not in UNKNOWN]

    assert disagreements(services, REGIONS[:2] + REGIONS[3:4]) == []


@pytest.mark.parametrize(
    ("host", "region", "service"),
    [
        ("my.bucket.s3.eu-west-1.amazonaws.com", "eu-west-1", "s3"),
        ("bucket.s3.dualstack.eu-west-1.amazonaws.com", "eu-west-1", "s3"),
        ("bucket.s3-fips.us-east-1.amazonaws.com", "us-east-1", "s3"),
        ("bucket.s3-eu-west-1.amazonaws.com", "eu-west-1", "s3"),
        ("bucket.s3.amazonaws.com", "us-east-1", "s3"),
        ("point-123456789012.s3-accesspoint.us-west-2.amazonaws.com", "us-west-2", "s3"),
        ("123456789012.s3-control.eu-west-1.amazonaws.com", "eu-west-1", "s3"),
        ("point-123456789012.s3-object-lambda.eu-west-1.amazonaws.com", "eu-west-1", "s3-object-lambda"),
        ("a1b2c3.execute-api.eu-central-1.amazonaws.com", "eu-central-1", "execute-api"),
        ("a1b2c3.lambda-url.eu-central-1.on.aws", "eu-central-1", "lambda"),
        ("search-docs-a1b2.us-east-1.es.amazonaws.com", "us-east-1", "es"),
        ("a1b2.us-east-1.aoss.amazonaws.com", "us-east-1", "aoss"),
        ("a1b2.appsync-api.us-east-1.amazonaws.com", "us-east-1", "appsync"),
        ("123456789012.ddb.us-east-1.amazonaws.com", "us-east-1", "dynamodb"),
        ("dynamodb-fips.us-gov-west-1.amazonaws.com", "us-gov-west-1", "dynamodb"),
        ("sts.eu-west-1.api.aws", "eu-west-1", "sts"),
        ("sts.amazonaws.com", "us-east-1", "sts"),
    ],
)
def test_hosts_below_a_service_have_its_scope(host: str, region: str, service: str) -> None:
    """The forms of names in the services' user guides."""
    assert scope_of(host) == AwsScope(region, service)


@pytest.mark.parametrize(
    "host",
    [
        "example.com",
        "amazonaws.com",
        "eu-west-1.amazonaws.com",
        "s3.eu-west-1.amazonaws.com.example.com",
        "s3.nowhere.amazonaws.com",
        "bucket.s3-accelerate.amazonaws.com",
        "bucket.s3-website-eu-west-1.amazonaws.com",
        "bucket.s3express-use1-az4.us-east-1.amazonaws.com",
        "ec2-192-0-2-1.us-west-2.compute.amazonaws.com",
        "123456789012.dkr.ecr.eu-west-1.amazonaws.com",
        "other.eu-west-1.elb.amazonaws.com",
        "d111111abcdef8.cloudfront.net",
        "unknown.amazonaws.com",
    ],
)
def test_a_host_without_a_known_form_has_no_scope(host: str) -> None:
    """The rule then has to give region and service."""
    assert scope_of(host) is None
