"""What the operator says about a token that Sallyport obtains itself. Pure: no secret, no IO."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from policy.references import BackendKind, SecretReference, is_reference

LEAST_SECONDS: Final = 60
MOST_SECONDS: Final = 24 * 3600


class TokenKind(StrEnum):
    """How a token is obtained."""

    CLIENT_CREDENTIALS = "client-credentials"  # OAuth 2.0 (RFC 6749, 4.4)
    REFRESH_TOKEN = "refresh-token"  # noqa: S105 - OAuth 2.0 (RFC 6749, 6)
    JWT = "jwt"  # signed by the fetcher itself: RFC 7519
    GITHUB_APP = "github-app"  # an installation's token, for a JWT of the app


_URL: Final = re.compile(r"https://[A-Za-z0-9.-]+(:[0-9]{1,5})?(/[A-Za-z0-9._~/-]*)?", re.ASCII)
_NEEDED: Final = {
    TokenKind.CLIENT_CREDENTIALS: ("url", "client"),
    TokenKind.REFRESH_TOKEN: ("url", "client"),
    TokenKind.JWT: ("client", "audience"),
    TokenKind.GITHUB_APP: ("url", "client", "installation"),
}
_PERMITTED: Final = {
    TokenKind.CLIENT_CREDENTIALS: (*_NEEDED[TokenKind.CLIENT_CREDENTIALS], "scope", "audience"),
    TokenKind.REFRESH_TOKEN: (*_NEEDED[TokenKind.REFRESH_TOKEN], "client_secret", "scope"),
    TokenKind.JWT: (*_NEEDED[TokenKind.JWT], "subject", "key_id", "seconds"),
    TokenKind.GITHUB_APP: _NEEDED[TokenKind.GITHUB_APP],
}


@dataclass(frozen=True, slots=True)
class TokenSource:
    """One token.

    Attributes:
        credential: `env://NAME` or `file://NAME`: the client's secret, the refresh token of a login, or the private key
            (PEM).
        client_secret: `env://NAME` or `file://NAME`: the client's, beside a refresh token; empty: a public client.
        url: the token endpoint; of GitHub the address of its API.
        client: the client id; of a JWT the issuer; of GitHub the app's id.
        audience, scope: sent to the token endpoint if they are not empty; of a JWT the claim `aud`.
        subject: the claim `sub`; empty: the issuer.
        key_id: the header `kid`; empty: none.
        seconds: the life of a JWT; 0: an hour.
    """

    kind: TokenKind
    credential: str
    url: str = ""
    client: str = ""
    audience: str = ""
    scope: str = ""
    subject: str = ""
    key_id: str = ""
    installation: str = ""
    seconds: int = 0
    client_secret: str = ""

    def __post_init__(self) -> None:
        for name in _NEEDED[self.kind]:
            if not getattr(self, name):
                raise ValueError(f"{self.kind} needs {name}")
        others = ("url", "client", "client_secret", "audience", "scope", "subject", "key_id", "installation", "seconds")
        for name in others:
            if getattr(self, name) and name not in _PERMITTED[self.kind]:
                raise ValueError(f"{self.kind} has no {name}")
        if self.url and not _URL.fullmatch(self.url):
            raise ValueError("url must be https://HOST/PATH, without a user, a query or a fragment")
        if not _is_material(self.credential):
            raise ValueError("credential is env://NAME or file://NAME")
        if self.client_secret and not _is_material(self.client_secret):
            raise ValueError("client_secret is env://NAME or file://NAME")
        if self.seconds and not LEAST_SECONDS <= self.seconds <= MOST_SECONDS:
            raise ValueError(f"seconds are from {LEAST_SECONDS} to {MOST_SECONDS}")
        if self.installation and not (self.installation.isascii() and self.installation.isdigit()):
            raise ValueError("installation is a number, as text")


def _is_material(text: str) -> bool:
    return is_reference(text) and SecretReference.parse(text).backend in (BackendKind.ENV, BackendKind.FILE)
