"""`token://`: tokens that the fetcher obtains. The issuers are stand-ins that check as their specifications say.

The properties that it shares with other backends are in `test_backends.py`. Refresh tokens are in
`test_refresh_tokens.py`.
"""

import base64
import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from policy.references import BackendKind, SecretReference
from tests.vault.authorization_server import SECONDS, AuthorizationServer
from tests.vault.stand_in import https, send
from tests.vault.vault_server import Authority
from vault.fetcher import VaultKeeper
from vault.secret import Secret
from vault.stores import tokens
from vault.stores.backend import BackendValue, NoValueError
from vault.stores.token_config import TokenKind, TokenSource
from vault.stores.tokens import TokenBackend
from wire.api.fetcher import Fault, Material

CANARY = "canary-c1d0f4/ +&%"
REFERENCE = SecretReference(BackendKind.TOKEN, "api")
KEYS: dict[str, Callable[[], Any]] = {
    "RS256": lambda: rsa.generate_private_key(public_exponent=65537, key_size=2048),
    "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate,
}


class Supplier:
    """A replacement for what hostd opens."""

    def __init__(self, content: str = CANARY) -> None:
        self.content = content

    async def text(self, material: Material, name: str = "") -> str:
        return self.content + "\n"


def pem(key: Any) -> str:
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return str(key.private_bytes(*form).decode())


def source(kind: TokenKind, port: int = 1, **more: Any) -> TokenSource:
    urls = {
        TokenKind.CLIENT_CREDENTIALS: f"https://127.0.0.1:{port}/token",
        TokenKind.GITHUB_APP: f"https://127.0.0.1:{port}/",
        TokenKind.JWT: "",
    }
    return TokenSource(kind, "file://credential", url=urls[kind], **{"client": "the-client", **more})


def backend(of: TokenSource, authority: Authority | None = None, content: str = CANARY) -> TokenBackend:
    roots = "" if authority is None else str(authority.path)
    return TokenBackend({"api": of}, Supplier(content), 60, roots, VaultKeeper())


async def read(tested: TokenBackend) -> BackendValue:
    return await tested.read(REFERENCE, "sbx-1")


async def fault(tested: TokenBackend) -> NoValueError:
    with pytest.raises(NoValueError) as caught:
        await read(tested)
    await tested.close()
    assert "canary" not in str(caught.value)
    return caught.value


class Issuer:
    """Answers like a token endpoint of OAuth 2.0."""

    def __init__(self, **answer: Any) -> None:
        self.answer = {"token_type": "Bearer", "expires_in": 3600, **answer}
        self.forms: list[dict[str, list[str]]] = []
        self.issued = 0

    def __call__(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["content-length"])).decode()
        scheme, _, login = request.headers["authorization"].partition(" ")
        client, _, secret = base64.b64decode(login).decode().partition(":")
        self.forms.append(parse_qs(body))
        if (scheme, unquote(client), unquote(secret)) != ("Basic", "the-client", CANARY):
            send(request, 401, b'{"error": "invalid_client", "error_description": "canary"}')
            return
        self.issued += 1
        answer = {"access_token": f"access-token-{self.issued}", **self.answer}
        send(request, 200, json.dumps({k: v for k, v in answer.items() if v is not None}).encode())


async def test_client_credentials_give_a_token_that_is_kept_for_three_quarters_of_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, issuer = Authority(tmp_path, "issuer"), Issuer()
    with https(authority, issuer) as port:
        of = source(TokenKind.CLIENT_CREDENTIALS, port, scope="read write", audience="api")
        tested = backend(of, authority)
        now = float(int(time.monotonic()))  # Sums of it are exact.
        monkeypatch.setattr(tokens.time, "monotonic", lambda: now)
        first = await read(tested)
        assert (Secret("access-token-1"), 2696, 3595, True) == (first.value, first.fresh, first.valid, first.shared)
        now += 2696
        assert (Secret("access-token-1"), 0, 899) == ((again := await read(tested)).value, again.fresh, again.valid)
        now += 1
        assert Secret("access-token-2") == (await read(tested)).value
        await tested.close()
    form = {"grant_type": ["client_credentials"], "scope": ["read write"], "audience": ["api"]}
    assert [form] * 2 == issuer.forms


@pytest.mark.system
async def test_a_real_authorization_server_gives_a_token_for_client_credentials(tmp_path: Path) -> None:
    server = AuthorizationServer(tmp_path)
    try:
        of = replace(source(TokenKind.CLIENT_CREDENTIALS, client="confidential"), url=server.url)
        tested = backend(of, server.authority, server.secret)
        found = await read(tested)
        await tested.close()
        assert server.active(found.value.reveal())
        other = await fault(backend(of, server.authority, "another-secret"))
    finally:
        server.kill()
    assert SECONDS - 6 <= found.valid <= SECONDS - 5
    assert (Fault.LOGIN, True) == (other.fault, "(invalid_client)" in other.reason)


async def test_a_token_without_an_end_has_the_times_of_other_values(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "issuer")
    with https(authority, Issuer(expires_in=None)) as port:
        tested = backend(source(TokenKind.CLIENT_CREDENTIALS, port), authority)
        found = await read(tested)
        await tested.close()
    assert (60, 300) == (found.fresh, found.valid)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"token_type": "mac"}, Fault.UNFIT),
        ({"access_token": None}, Fault.FAILED),
        ({"access_token": 1}, Fault.FAILED),
        ({"access_token": "short"}, Fault.UNFIT),
        ({"access_token": "with\nline break"}, Fault.UNFIT),
        ({"expires_in": 5}, Fault.UNFIT),
        ({"expires_in": -1}, Fault.UNFIT),
    ],
    ids=repr,
)
async def test_an_answer_without_a_usable_token_is_a_fault(
    tmp_path: Path, answer: dict[str, Any], expected: Fault
) -> None:
    authority = Authority(tmp_path, "issuer")
    with https(authority, Issuer(**answer)) as port:
        assert expected == (await fault(backend(source(TokenKind.CLIENT_CREDENTIALS, port), authority))).fault


async def test_a_refused_client_gets_the_code_of_the_issuer_as_its_reason(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "issuer")
    with https(authority, Issuer()) as port:
        found = await fault(backend(source(TokenKind.CLIENT_CREDENTIALS, port), authority, "another"))
    assert Fault.LOGIN == found.fault
    assert "answers 401 (invalid_client): check client and credential" in found.reason


async def test_the_credential_goes_to_no_server_but_the_configured_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server without a certificate of the roots, a redirect, and a proxy of the environment. The control is above."""
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    authority, other, elsewhere = Authority(tmp_path, "issuer"), Authority(tmp_path, "other"), Issuer()
    with https(other, elsewhere) as port:
        assert Fault.TLS == (await fault(backend(source(TokenKind.CLIENT_CREDENTIALS, port), authority))).fault
    with https(authority, elsewhere) as target:

        def redirect(request: BaseHTTPRequestHandler) -> None:
            send(request, 307, b"", ("location", f"https://127.0.0.1:{target}/token"))

        with https(authority, redirect) as port:
            assert Fault.FAILED == (await fault(backend(source(TokenKind.CLIENT_CREDENTIALS, port), authority))).fault
        assert [] == elsewhere.forms
        tested = backend(source(TokenKind.CLIENT_CREDENTIALS, target), authority)
        await read(tested)
        await tested.close()
    assert Fault.UNREACHABLE == (await fault(backend(source(TokenKind.CLIENT_CREDENTIALS, target), authority))).fault


@pytest.mark.parametrize("algorithm", KEYS)
async def test_a_jwt_is_signed_with_the_algorithm_of_its_key(algorithm: str) -> None:
    key = KEYS[algorithm]()
    of = source(TokenKind.JWT, audience="api", subject="agent", key_id="k-1", seconds=600)
    tested = backend(of, content=pem(key))
    found = await read(tested)
    text = found.value.reveal()
    claims = jwt.decode(text, key.public_key(), [algorithm], audience="api", issuer="the-client")
    assert ("agent", 600) == (claims["sub"], claims["exp"] - claims["iat"])
    assert "k-1" == jwt.get_unverified_header(text)["kid"]
    assert found.valid in (594, 595)
    await tested.close()


@pytest.mark.parametrize(
    "content",
    [
        CANARY,
        "",
        pem(rsa.generate_private_key(public_exponent=65537, key_size=1024)),  # noqa: S505 - it is refused
        pem(ec.generate_private_key(ec.SECP384R1())),
    ],
    ids=["no key", "nothing", "short RSA", "another curve"],
)
async def test_a_key_that_cannot_be_used_is_refused(content: str) -> None:
    found = await fault(backend(source(TokenKind.JWT, audience="api"), content=content))
    assert Fault.LOGIN == found.fault


async def test_a_github_app_gets_the_token_of_its_installation(tmp_path: Path) -> None:
    key, asked = KEYS["RS256"](), []

    def github(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.path)
        token = request.headers["authorization"].removeprefix("Bearer ")
        try:
            claims = jwt.decode(token, key.public_key(), ["RS256"], issuer="the-client")
        except jwt.InvalidTokenError:
            send(request, 401, b'{"message": "Bad credentials"}')
            return
        assert claims["exp"] - claims["iat"] <= 600
        end = datetime.now(UTC) + timedelta(hours=1)
        send(request, 201, json.dumps({"token": "ghs_canary", "expires_at": f"{end:%Y-%m-%dT%H:%M:%SZ}"}).encode())

    authority = Authority(tmp_path, "issuer")
    with https(authority, github) as port:
        of = source(TokenKind.GITHUB_APP, port, installation="456")
        tested = backend(of, authority, pem(key))
        found = await read(tested)
        assert (Secret("ghs_canary"), True) == (found.value, 3580 < found.valid <= 3595)
        assert Secret("ghs_canary") == (await read(tested)).value
        await tested.close()
        other = await fault(backend(of, authority, pem(KEYS["RS256"]())))
    assert (Fault.LOGIN, ["/app/installations/456/access_tokens"] * 2) == (other.fault, asked)
