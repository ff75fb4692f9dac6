"""Names of headers and query keys that are slots of credentials, and names that are not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.credential_names import HEADERS, QUERY_KEYS, compact_key, is_credential_header, query_slot

HARMLESS_HEADERS = [
    # what curl, pip, npm, git, apt, boto3 and the SDKs of model providers send
    *("accept", "user-agent", "content-type", "content-length", "expect", "range", "if-none-match", "if-match"),
    *("git-protocol", "npm-command", "npm-session", "npm-scope", "npm-auth-type", "npm-in-ci", "pacote-req-type"),
    *("x-amz-date", "x-amz-content-sha256", "x-amz-user-agent", "amz-sdk-invocation-id", "amz-sdk-request"),
    *("x-amz-checksum-crc32", "x-amz-decoded-content-length", "x-amz-acl", "x-amz-meta-author"),
    *("anthropic-version", "anthropic-beta", "openai-organization", "openai-project", "x-stainless-lang"),
    *("x-github-api-version", "idempotency-key", "x-request-id", "x-client-request-id", "traceparent", "tracestate"),
    *("sec-websocket-key", "sec-websocket-protocol", "x-csrf-token", "x-xsrf-token", "x-requested-with", "origin"),
    *("cache-control", "referer", "x-pypi-last-serial", "x-goog-user-project", "grpc-timeout", "te", "cookies"),
]
HARMLESS_KEYS = [
    *("page", "per_page", "q", "q[0]", "state", "code", "client_id", "scope", "version-id", "uploadId", "partNumber"),
    *("list-type", "prefix", "delimiter", "continuation-token", "ContinuationToken", "NextToken", "pageToken"),
    *("next_page_token", "$skiptoken", "%24deltatoken", "resumptionToken", "max_tokens", "keys", "keyword", "monkey"),
    *("key-marker", "X-Amz-Date", "X-Amz-Expires", "X-Amz-SignedHeaders", "X-Amz-Algorithm", "ClientToken", "author"),
    *("passage", "compass", "service", "api-version", "write", "csrf_token"),
]


@pytest.mark.parametrize("name", HEADERS)
def test_each_header_of_the_table_is_a_slot_in_each_spelling(name: str) -> None:
    for spelling in (name, name.upper(), name.title(), name.replace("-", "_"), name.replace("-", "."), f"{name}-bin"):
        assert is_credential_header(spelling), spelling


@pytest.mark.parametrize(
    "name",
    [
        *("x-corp-token", "X-Session-Token", "xCorpApiKey", "x-secret", "x-password", "x-user-credentials"),
        *("x-upstream-authorization", "x-hub-signature", "x-aws-secret-key", "my-jwt", "x" * 200 + "-token"),
    ],
)
def test_a_header_whose_ending_means_a_credential_is_a_slot(name: str) -> None:
    assert is_credential_header(name)


@pytest.mark.parametrize("name", HARMLESS_HEADERS)
def test_headers_of_common_clients_are_no_slots(name: str) -> None:
    assert not is_credential_header(name)


@pytest.mark.parametrize("key", sorted(QUERY_KEYS))
def test_each_query_key_of_the_table_is_a_slot_in_each_spelling(key: str) -> None:
    shown = query_slot(key)
    assert shown is not None
    encoded = "".join(f"%{ord(letter):02x}" for letter in key)
    for spelling in (key.upper(), key.replace("_", "-"), key.replace("_", "."), key.replace("_", ""), encoded):
        assert shown == query_slot(spelling), spelling


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("access_token", "*token"),
        ("X-Amz-Signature", "*signature"),
        ("X-Amz-Security-Token", "*token"),
        ("client_secret", "*secret"),
        ("auth[token]", "auth"),
        ("user%5Bpassword%5D", "*password"),
        ("%61ccess%5ftoken", "*token"),
        ("%2574oken", "token"),
        ("%25252574oken", "token"),
        ("%u0074oken", "token"),
        ("+token+", "token"),
        ("token%00x", "token"),
        ("%ef%bd%94%ef%bd%8f%ef%bd%8b%ef%bd%85%ef%bd%8e", "token"),
        ("%25252525252574oken", "nested-encoding"),
    ],
)
def test_a_query_key_is_read_as_servers_read_it(key: str, shown: str) -> None:
    """What is shown has no text of the client."""
    assert shown == query_slot(key)


@pytest.mark.parametrize("key", HARMLESS_KEYS)
def test_query_keys_of_common_clients_are_no_slots(key: str) -> None:
    assert query_slot(key) is None


@given(st.text(st.characters(codec="ascii"), max_size=40))
def test_any_key_has_one_form_or_none(key: str) -> None:
    form = compact_key(key)
    assert form is None or "-" not in form
    shown = query_slot(key)
    assert shown is None or shown in QUERY_KEYS or shown.startswith("*") or shown == "nested-encoding"
