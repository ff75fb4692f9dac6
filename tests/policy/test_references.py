"""References to secrets of backends: one spelling each, and no way out of the place that a backend gives them."""

import pytest

from policy.compile import references_of
from policy.facts import Scheme
from policy.load import load_text
from policy.problems import PolicyError
from policy.references import MAX_REFERENCE, BackendKind, SecretReference, is_reference, secret_text

GOOD = {
    "vault://kv/agents/api#token": SecretReference(BackendKind.VAULT, "kv/agents/api", ("token",)),
    "vault://database/creds/ro#username:password": SecretReference(
        BackendKind.VAULT, "database/creds/ro", ("username", "password")
    ),
    "env://API_TOKEN": SecretReference(BackendKind.ENV, "API_TOKEN"),
    "file://api-token": SecretReference(BackendKind.FILE, "api-token"),
    "command://api-token": SecretReference(BackendKind.COMMAND, "api-token"),
    "token://api": SecretReference(BackendKind.TOKEN, "api"),
}
BAD = [
    "vault://kv#token",
    "vault://kv/a",
    "vault://kv/a#",
    "vault://kv/a#b:c:d",
    "vault://kv/a#b#c",
    "vault:///kv/a#b",
    "vault://kv/a/#b",
    "vault://kv//a#b",
    "vault://kv/../sys/raw#b",
    "vault://kv/./a#b",
    "vault://kv/a%2fb#c",
    "vault://kv/a?version=1#b",
    "vault://kv/a\n#b",
    "vault://" + "a/" * 130 + "a#b",
    "env://",
    "env://1A",
    "env://A-B",
    "env://A#b",
    "file:///etc/shadow",
    "file://..",
    "file://.",
    "file://a/b",
    "command://a b",
    "command://",
]


@pytest.mark.parametrize("text", GOOD)
def test_a_reference_is_read_and_written_in_one_spelling(text: str) -> None:
    assert GOOD[text] == SecretReference.parse(text)
    assert text == str(SecretReference.parse(text)) == secret_text(text)
    assert is_reference(text)


@pytest.mark.parametrize("text", BAD)
def test_other_spellings_are_refused_and_are_no_names_of_sealed_secrets(text: str) -> None:
    for read in (SecretReference.parse, secret_text):
        with pytest.raises(ValueError, match=r"://|reference"):
            read(text)
    assert is_reference(text)


@pytest.mark.parametrize("text", ["sealed://api-token", "api-token"])
def test_both_spellings_of_a_sealed_secret_are_one_name(text: str) -> None:
    assert "api-token" == secret_text(text)
    assert not is_reference(text)
    with pytest.raises(ValueError, match="a reference begins with"):
        SecretReference.parse(text)


@pytest.mark.parametrize("text", ["", "sealed://", "sealed://a/b", "ssm://a", "VAULT://kv/a#b", "a b", "x" * 129])
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a secret's name"):
        secret_text(text)


def test_a_reference_has_a_most_length() -> None:
    longest = f"vault://kv/{'a' * 128}/{'b' * (MAX_REFERENCE - 142)}#c"
    assert MAX_REFERENCE == len(longest)
    assert longest == str(SecretReference.parse(longest))
    with pytest.raises(ValueError, match="begins with"):
        SecretReference.parse(longest.replace("#c", "#cc"))


DOCUMENT = """
version: 1
policies:
  one:
    rules:
      - {id: a, hosts: [a.example.org, b.example.org], inject: {secret: "vault://kv/x#y", as: bearer}}
      - {id: b, host: c.example.org, inject: {secret: "sealed://stored", as: bearer}}
  two:
    rules: [{id: a, host: a.example.org, inject: {secret: "env://TOKEN", as: bearer}}]
"""


def test_the_operators_statement_is_each_reference_at_each_exact_host_of_its_rules() -> None:
    found = {(use.secret, use.host, use.port, use.scheme) for use in references_of(load_text(DOCUMENT))}
    hosts = {("vault://kv/x#y", host, 443, Scheme.HTTPS) for host in ("a.example.org", "b.example.org")}
    assert hosts | {("env://TOKEN", "a.example.org", 443, Scheme.HTTPS)} == found


@pytest.mark.parametrize("secret", ["vault://kv/x", "file:///etc/shadow", "ssm://x"])
def test_a_file_with_a_wrong_reference_is_refused_with_its_place(secret: str) -> None:
    with pytest.raises(PolicyError, match=r":6:"):
        load_text(DOCUMENT.replace("vault://kv/x#y", secret))
