"""Names of headers and query keys in which clients send credentials: the table, and the rules for its gaps. Pure.

- Names are compared without case and separators: `X-Api-Key`, `x_api_key` and `xApiKey` are one name.
- The name of a query key is decoded as servers do: percent-encoding (repeated, `%uXXXX`, UTF-8), `+`, brackets
  (`auth[token]`), Unicode compatibility forms.
- A query key is shown as the entry of the table or the ending that it matched, so without text of the client.
- The rules err on the side of a credential. Names that end in `token` and are no credential are listed.

What the table does not have and no ending matches is no credential for this module. `docs/threat-model.md` states that.
"""

import re
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final
from urllib.parse import unquote_to_bytes

HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "authorization": "RFC 9110, section 11.6.2",
        "authentication": "the name under which some gateways read Authorization",
        "signature": "RFC 9421: HTTP Message Signatures",
        "signature-input": "RFC 9421",
        "x-serverless-authorization": "Google Cloud Run",
        "dpop": "RFC 9449",
        "x-goog-iap-jwt-assertion": "Google Identity-Aware Proxy",
        "cf-access-jwt-assertion": "Cloudflare Access",
        "cf-access-client-id": "Cloudflare Access, service tokens",
        "x-registry-auth": "Docker Engine API",
        "x-registry-config": "Docker Engine API",
        "x-sentry-auth": "Sentry",
        "x-auth": "a convention of HTTP frameworks",
        "x-auth-user": "OpenStack Swift, version 1",
        "x-auth-email": "Cloudflare API, global key",
        "api-key": "Azure OpenAI, New Relic, Qdrant",
        "apikey": "Supabase, Kong",
        "x-api-key": "Anthropic, AWS API Gateway, and many others",
        "x-goog-api-key": "Google APIs",
        "x-auth-key": "Cloudflare API, OpenStack Swift",
        "x-auth-token": "OpenStack Keystone",
        "x-access-token": "a convention of HTTP frameworks",
        "x-github-token": "GitHub proxies",
        "private-token": "GitLab API",
        "job-token": "GitLab API",
        "deploy-token": "GitLab API",
        "x-amz-security-token": "AWS Signature Version 4, session token",
        "x-amz-s3session-token": "Amazon S3 Express",
        "dd-api-key": "Datadog",
        "dd-application-key": "Datadog",
        "x-vault-token": "HashiCorp Vault",
        "x-consul-token": "HashiCorp Consul",
        "x-nomad-token": "HashiCorp Nomad",
        "ocp-apim-subscription-key": "Azure API Management",
        "x-functions-key": "Azure Functions",
        "aeg-sas-key": "Azure Event Grid",
        "x-jfrog-art-api": "JFrog Artifactory",
        "x-nuget-apikey": "NuGet",
        "npm-otp": "npm, one-time password",
        "x-github-otp": "GitHub, one-time password",
        "x-rapidapi-key": "RapidAPI",
        "x-mashape-key": "RapidAPI",
        "x-honeycomb-team": "Honeycomb",
        "x-insert-key": "New Relic",
        "x-query-key": "New Relic",
        "x-license-key": "New Relic",
        "x-parse-master-key": "Parse Server",
        "x-parse-rest-api-key": "Parse Server",
        "x-master-key": "JSONBin, Parse",
        "cb-access-key": "Coinbase",
        "cookie2": "RFC 2965",
    }
)
"""Headers, each with where it is from. Proxy credentials of the client are removed in any case."""

QUERY_KEYS: Final[frozenset[str]] = frozenset(
    {
        *("key", "token", "auth", "sig", "hmac", "jwt", "pass", "pwd", "assertion", "client_assertion", "samlresponse"),
        *(
            "app_key",
            "application_key",
            "consumer_key",
            "oauth_consumer_key",
            "developer_key",
            "user_key",
            "master_key",
        ),
        *("license_key", "shared_key", "session_key", "session_id", "phpsessid", "jsessionid", "key_pair_id"),
        *("x_amz_credential", "x_goog_credential", "googleaccessid", "subscription_key", "auth_key", "sentry_key"),
    }
)
"""Query keys, with `_` between their words. The endings match others, such as `access_token` and `X-Amz-Signature`."""

_ENDINGS = (
    *("token", "apikey", "accesskey", "accesskeyid", "secretkey", "subscriptionkey", "authkey", "privatekey"),
    *("secret", "password", "passwd", "passphrase", "credential", "credentials", "signature", "authorization", "jwt"),
)
"""Endings of the names of headers and query keys, without separators."""

_NO_CREDENTIALS = (
    *("pagetoken", "nexttoken", "continuationtoken", "continuetoken", "paginationtoken", "synctoken", "cursortoken"),
    *("scrolltoken", "starttoken", "resumetoken", "changetoken", "idempotencytoken", "clientrequesttoken"),
    *("pagingtoken", "skiptoken", "deltatoken", "resumptiontoken"),
    *("clienttoken", "csrftoken", "xsrftoken", "atlassiantoken", "canceltoken", "maxtoken", "stoptoken"),
)
"""Endings of names that are no credentials: places in a list, idempotency (AWS), and protection against CSRF."""

_MAX_ROUNDS = 4
_MAX_KNOWN = 64
_UNICODE_ESCAPE = re.compile(r"%u([0-9a-fA-F]{4})")
_SEPARATORS = str.maketrans("", "", "-_. ")
_PARTS = re.compile(r"[][=&;]+")
_COMPACT_HEADERS = frozenset(name.translate(_SEPARATORS) for name in HEADERS)
_COMPACT_KEYS = {name.translate(_SEPARATORS): name for name in QUERY_KEYS}
NESTED: Final = "nested-encoding"
"""Shown for a query key that is still encoded after several rounds."""


def is_credential_header(name: str) -> bool:
    """Whether clients send credentials in a header of this name."""
    return _known_header(name) if len(name) <= _MAX_KNOWN else _is_credential_header(name)


def query_slot(key: str) -> str | None:
    """Return the name to show of a raw query key, None if it is no slot of a credential."""
    return _known_query(key) if len(key) <= _MAX_KNOWN else _query_slot(key)


def compact_key(key: str) -> str | None:
    """Return the one form of a raw query key in which keys are compared; None if it is still encoded."""
    text = key.replace("+", " ")
    for _ in range(_MAX_ROUNDS):
        decoded = _decoded(text)
        if decoded == text:
            break
        text = decoded
    else:
        if _decoded(text) != text:
            return None
    return unicodedata.normalize("NFKC", text.partition("\0")[0]).casefold().translate(_SEPARATORS)


def _is_credential_header(name: str) -> bool:
    compact = name.lower().removesuffix("-bin").translate(_SEPARATORS)
    return compact in _COMPACT_HEADERS or _ending(compact) is not None


def _query_slot(key: str) -> str | None:
    form = compact_key(key)
    if form is None:
        return NESTED
    for part in _PARTS.split(form):
        if part in _COMPACT_KEYS:
            return _COMPACT_KEYS[part]
        if (ending := _ending(part)) is not None:
            return f"*{ending}"
    return None


def _ending(compact: str) -> str | None:
    if compact.endswith(_NO_CREDENTIALS):
        return None
    return next((ending for ending in _ENDINGS if compact.endswith(ending)), None)


def _decoded(text: str) -> str:
    if "%" not in text:
        return text
    plain = _UNICODE_ESCAPE.sub(lambda found: chr(int(found[1], 16)), text)
    octets = unquote_to_bytes(plain.encode("utf-8", "surrogatepass"))
    try:
        return octets.decode("utf-8")
    except UnicodeDecodeError:
        return octets.decode("latin-1")


_known_header = lru_cache(maxsize=256)(_is_credential_header)
_known_query = lru_cache(maxsize=256)(_query_slot)
