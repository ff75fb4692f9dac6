"""The region and the signing name of the AWS service behind a host. Pure.

- `scope_of` answers from the name alone: the forms that AWS documents for endpoints, and the names that differ from the
  endpoint's. It never guesses: a host of another form has no scope, and the rule then has to give region and service.
- A wrong scope causes a refusal by the service, never a signature for another host: the host is signed, too.

Sources: the endpoint tables and service models of botocore 1.44 (`endpointPrefix`, `signingName`, `credentialScope`);
for hosts below a service, the AWS General Reference and the user guides of S3, API Gateway, Lambda, OpenSearch, AppSync
and DynamoDB. `tests/policy/test_aws_hosts.py` compares the result with the endpoints of botocore's clients.
"""

import re
from dataclasses import dataclass

REGIONS = (
    *("us-east-1", "us-east-2", "us-west-1", "us-west-2", "ca-central-1", "ca-west-1", "mx-central-1", "sa-east-1"),
    *("eu-central-1", "eu-central-2", "eu-north-1", "eu-south-1", "eu-south-2", "eu-west-1", "eu-west-2", "eu-west-3"),
    *("ap-east-1", "ap-east-2", "ap-northeast-1", "ap-northeast-2", "ap-northeast-3", "ap-south-1", "ap-south-2"),
    *("ap-southeast-1", "ap-southeast-2", "ap-southeast-3", "ap-southeast-4", "ap-southeast-5", "ap-southeast-6"),
    *("ap-southeast-7", "af-south-1", "il-central-1", "me-central-1", "me-south-1"),
)
"""The regions of the partition `aws`. The first is that of the preset's file."""
_REGION = re.compile(r"(?:us-gov|us|eu|ap|sa|ca|me|af|il|mx|cn)-[a-z]+-[1-9][0-9]?")
_SERVICE = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_SUFFIXES = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws", ".api.amazonwebservices.com.cn")

_GLOBAL = {
    "budgets.amazonaws.com": ("us-east-1", "budgets"),
    "budgets.amazonaws.com.cn": ("cn-northwest-1", "budgets"),
    "cloudfront.amazonaws.com": ("us-east-1", "cloudfront"),
    "global.health.amazonaws.com": ("us-east-1", "health"),
    "global.health.amazonaws.com.cn": ("cn-northwest-1", "health"),
    "iam.amazonaws.com": ("us-east-1", "iam"),
    "iam.us-gov.amazonaws.com": ("us-gov-west-1", "iam"),
    "importexport.amazonaws.com": ("us-east-1", "IngestionService"),
    "route53.amazonaws.com": ("us-east-1", "route53"),
    "route53.amazonaws.com.cn": ("cn-northwest-1", "route53"),
    "route53.us-gov.amazonaws.com": ("us-gov-west-1", "route53"),
    "savingsplans.amazonaws.com": ("us-east-1", "savingsplans"),
    "sdb.amazonaws.com": ("us-east-1", "sdb"),
    "sts.amazonaws.com": ("us-east-1", "sts"),
    "waf.amazonaws.com": ("us-east-1", "waf"),
}
"""Endpoints without a region in their name."""

_OTHER_NAME = {
    "account-access-runtime": "account-access",
    "agent-registry-control": "agent-registry",
    "agreement-marketplace": "aws-marketplace",
    "appconfigdata": "appconfig",
    "appstream2": "appstream",
    "bedrock-agent": "bedrock",
    "bedrock-agent-runtime": "bedrock",
    "bedrock-agentcore-control": "bedrock-agentcore",
    "bedrock-data-automation": "bedrock",
    "bedrock-data-automation-runtime": "bedrock",
    "bedrock-runtime": "bedrock",
    "cassandra-streams": "cassandra",
    "cloudhsmv2": "cloudhsm",
    "cloudsearchdomain": "cloudsearch",
    "cloudwatch-omni": "cloudwatch",
    "contact-lens": "connect",
    "data-signer": "signer",
    "deployment-marketplace": "aws-marketplace",
    "discovery-marketplace": "aws-marketplace",
    "email": "ses",
    "eventsv2": "events",
    "forecastquery": "forecast",
    "iam-toolbox": "iam",
    "identity-chime": "chime",
    "ivsrealtime": "ivs",
    "mail-manager": "ses",
    "media-pipelines-chime": "chime",
    "meetings-chime": "chime",
    "memory-db": "memorydb",
    "messaging-chime": "chime",
    "migrationhub-config": "mgh",
    "models-v2-lex": "lex",
    "oidc": "sso-oauth",
    "partnercentral-prm": "partnercentral",
    "personalize-events": "personalize",
    "personalize-runtime": "personalize",
    "pinpoint": "mobiletargeting",
    "reporting-marketplace": "aws-marketplace",
    "runtime-v2-lex": "lex",
    "s3-control": "s3",
    "servicecatalog-appregistry": "servicecatalog",
    "voice-chime": "chime",
}
"""Endpoints of one label whose signing name is another one."""

_PREFIXED = {
    "api.detective": "detective",
    "api.ecr": "ecr",
    "api.ecr-public": "ecr-public",
    "api.iotdeviceadvisor": "iotdeviceadvisor",
    "api.iotmanagedintegrations": "iotmanagedintegrations",
    "api.iotwireless": "iotwireless",
    "api.mediatailor": "mediatailor",
    "api.pricing": "pricing",
    "api.tunneling.iot": "IoTSecuredTunneling",
    "admin.wickr": "wickr",
    "catalog.marketplace": "aws-marketplace",
    "cn.transcribe": "transcribe",
    "controlplane.payment-cryptography": "payment-cryptography",
    "data.ats.iot": "iotdata",
    "data-ats.iot": "iotdata",
    "data.iot": "iotdata",
    "data.jobs.iot": "iot-jobs-data",
    "data.mediastore": "mediastore",
    "data.qapps": "qapps",
    "dataplane.payment-cryptography": "payment-cryptography",
    "entitlement.marketplace": "aws-marketplace",
    "ingest.timestream": "timestream",
    "metering.marketplace": "aws-marketplace",
    "models.lex": "lex",
    "participant.connect": "execute-api",
    "portal.sso": "awsssoportal",
    "query.timestream": "timestream",
    "runtime.lex": "lex",
    "sms-voice.pinpoint": "sms-voice",
    "streams.dynamodb": "dynamodb",
}
"""Endpoints of several labels."""

_BELOW = {
    "appsync-api": "appsync",
    "ddb": "dynamodb",
    "execute-api": "execute-api",
    "s3-control": "s3",
    "s3-object-lambda": "s3-object-lambda",
    "s3-outposts": "s3-outposts",
    "sagemaker": "sagemaker",
}
"""Services that have one label of the customer, or of a part of the service, in front."""

_S3 = re.compile(r"(?:[a-z0-9.-]+\.)?(s3|s3-fips|s3-accesspoint|s3-accesspoint-fips)(?:\.dualstack)?")
_S3_LEGACY = re.compile(r"(?:[a-z0-9.-]+\.)?s3-(" + _REGION.pattern + r")\.amazonaws\.com")
_S3_GLOBAL = re.compile(r"(?:[a-z0-9.-]+\.)?s3\.amazonaws\.com")
_S3_UNSIGNED = re.compile(r"s3-website|s3-accelerate|s3express")
_SEARCH = re.compile(r"[a-z0-9-]+\.(" + _REGION.pattern + r")\.(es|aoss)\.amazonaws\.com")
_FUNCTION = re.compile(r"[a-z0-9]+\.lambda-url\.(" + _REGION.pattern + r")\.on\.aws")


@dataclass(frozen=True, slots=True)
class AwsScope:
    """The part of a credential scope that names a service."""

    region: str
    service: str


def scope_of(host: str) -> AwsScope | None:
    """Return region and signing name for a canonical host name; None if its name does not give them."""
    if (known := _GLOBAL.get(host)) is not None:
        return AwsScope(*known)
    if any(_S3_UNSIGNED.match(label) for label in host.split(".")):
        return None
    if (legacy := _S3_LEGACY.fullmatch(host)) is not None:
        return AwsScope(legacy[1], "s3")
    if _S3_GLOBAL.fullmatch(host) is not None:
        return AwsScope("us-east-1", "s3")
    if (search := _SEARCH.fullmatch(host)) is not None:
        return AwsScope(search[1], search[2])
    if (function := _FUNCTION.fullmatch(host)) is not None:
        return AwsScope(function[1], "lambda")
    for suffix in _SUFFIXES:
        front, _, region = host.removesuffix(suffix).rpartition(".")
        if host.endswith(suffix) and front and _REGION.fullmatch(region) is not None:
            service = _service_of(front)
            return None if service is None else AwsScope(region, service)
    return None


def _service_of(front: str) -> str | None:
    """Return the signing name for the labels in front of the region."""
    if _S3.fullmatch(front) is not None:
        return "s3"
    if (service := _PREFIXED.get(front)) is not None:
        return service
    above, _, last = front.rpartition(".")
    last = last.removesuffix("-fips")
    if not above:
        return _OTHER_NAME.get(last, last) if _SERVICE.fullmatch(last) is not None else None
    return _BELOW.get(last) if "." not in above else None
