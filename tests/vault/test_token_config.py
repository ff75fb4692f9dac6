"""What an operator can say of a token. Anything else is refused."""

import pytest

from vault.stores.token_config import MOST_SECONDS, TokenKind, TokenSource

GOOD = {
    "client credentials": {
        "kind": TokenKind.CLIENT_CREDENTIALS,
        "url": "https://issuer.example.com:8443/oauth2/token",
        "client": "c",
        "audience": "a",
        "scope": "read write",
    },
    "refresh token": {
        "kind": TokenKind.REFRESH_TOKEN,
        "url": "https://issuer.example.com/token",
        "client": "c",
        "client_secret": "env://CLIENT",
        "scope": "read",
    },
    "public client": {"kind": TokenKind.REFRESH_TOKEN, "url": "https://issuer.example.com/token", "client": "c"},
    "jwt": {"kind": TokenKind.JWT, "client": "i", "audience": "a", "subject": "s", "key_id": "k", "seconds": 60},
    "github app": {
        "kind": TokenKind.GITHUB_APP,
        "url": "https://api.github.com",
        "client": "123",
        "installation": "456",
    },
}


def made(name: str, **changes: object) -> TokenSource:
    return TokenSource(**{"credential": "file://key", **GOOD[name], **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("credential", ["file://key", "env://KEY"])
def test_each_kind_is_accepted(name: str, credential: str) -> None:
    assert GOOD[name]["kind"] == made(name, credential=credential).kind


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("client credentials", {"url": ""}, "needs url"),
        ("client credentials", {"client": ""}, "needs client"),
        ("client credentials", {"seconds": 60}, "has no seconds"),
        ("client credentials", {"url": "http://issuer.example.com/"}, "url must be https"),
        ("client credentials", {"url": "https://a:b@issuer.example.com/"}, "url must be https"),
        ("client credentials", {"url": "https://issuer.example.com/?a=b"}, "url must be https"),
        ("client credentials", {"credential": "plain-secret"}, "credential is"),
        ("client credentials", {"credential": "vault://kv/a#b"}, "credential is"),
        ("client credentials", {"credential": "token://other"}, "credential is"),
        ("client credentials", {"client_secret": "env://CLIENT"}, "has no client_secret"),
        ("refresh token", {"url": ""}, "needs url"),
        ("refresh token", {"client": ""}, "needs client"),
        ("refresh token", {"client_secret": "plain-secret"}, "client_secret is"),
        ("refresh token", {"client_secret": "token://other"}, "client_secret is"),
        ("refresh token", {"audience": "a"}, "has no audience"),
        ("jwt", {"audience": ""}, "needs audience"),
        ("jwt", {"url": "https://issuer.example.com/"}, "has no url"),
        ("jwt", {"seconds": 59}, "seconds are from"),
        ("jwt", {"seconds": MOST_SECONDS + 1}, "seconds are from"),
        ("github app", {"installation": ""}, "needs installation"),
        ("github app", {"installation": "1/../2"}, "is a number"),
        ("github app", {"scope": "all"}, "has no scope"),
    ],
)
def test_anything_else_is_refused_by_its_key(name: str, changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        made(name, **changes)
