"""The backend `token://name`: tokens that the fetcher obtains with a credential that no sandbox and no worker has.

- Kinds: OAuth 2.0 client credentials and refresh tokens, a JWT that is signed here, and a token of a GitHub App's
  installation.
- A token is the same for every sandbox. It is obtained again when three quarters of its time are over, and not used in
  its last seconds.
- One request for a token is under way at a time. It goes on when its caller no longer waits, because its answer can
  have a new refresh token (`vault.stores.refresh_tokens`).
- The credential is read at each time. It goes to the configured URL only: certificates are verified under the roots of
  the settings, no redirect is followed, and proxies, netrc, cookies and variables of the environment do not count.
- No message has a credential, a token or text of an answer, but for the error code of RFC 6749.
"""

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from http.cookiejar import DefaultCookiePolicy
from typing import Any, Final
from urllib.parse import quote

import jwt
import requests
import urllib3
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from policy.references import BackendKind, SecretReference
from vault.secret import Secret
from vault.stores.backend import BackendValue, NoValueError, fit, unleased
from vault.stores.refresh_tokens import Keeper, RefreshTokens
from vault.stores.supplied import Supplier, without_newline
from vault.stores.token_config import TokenKind, TokenSource
from vault.stores.web import content_of, object_of
from wire.api.fetcher import MOST_SECONDS, Fault, Material

REQUEST_SECONDS: Final = 6.0
_TIMES: Final = (2.0, 5.0)
_THREADS: Final = 4
_MARGIN: Final = 5
_HOUR: Final = 3600
_APP_SECONDS: Final = 540
_SKEW: Final = 60
"""The clock of GitHub may be behind by this time."""
_MATERIAL: Final = {BackendKind.ENV: Material.ENVIRONMENT, BackendKind.FILE: Material.FILE}
_ERROR = re.compile(r"[a-z_]{1,40}", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Token:
    value: Secret = field(repr=False)
    fresh_until: float
    valid_until: float

    def now(self) -> BackendValue:
        """Return the value with the times that are left."""
        now = time.monotonic()
        return BackendValue(self.value, int(max(0.0, self.fresh_until - now)), int(max(0.0, self.valid_until - now)))


class TokenBackend:
    """See `vault.stores.backend.Backend`."""

    def __init__(
        self,
        sources: Mapping[str, TokenSource],
        supplier: Supplier,
        refresh: int,
        roots: str,
        keeper: Keeper,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._sources = sources
        self._supplier = supplier
        self._refresh = refresh
        self._clock = clock
        self._held: dict[str, _Token] = {}
        self._renewals: dict[str, asyncio.Task[BackendValue]] = {}
        self._refresh_tokens = RefreshTokens(keeper)
        self._threads = ThreadPoolExecutor(_THREADS, "token")
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.verify = roots
        self._session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        self.about = ", ".join(sorted(sources))

    async def read(self, reference: SecretReference, sandbox: str) -> BackendValue:
        """See `Backend`."""
        source = self._source(reference)
        held = self._held.get(reference.path)
        if held is None or held.fresh_until <= time.monotonic():
            return await asyncio.shield(self._renewal(reference.path, source))
        return held.now()

    async def probe(self, reference: SecretReference) -> None:
        """See `Backend`."""
        await self._text(self._source(reference).credential)

    async def release(self, reference: SecretReference, sandbox: str) -> None:
        """See `Backend`. The next read obtains another token; the issuer is not asked to revoke this one."""
        if (renewal := self._renewals.get(reference.path)) is not None:
            await asyncio.wait([renewal])  # a token that is being obtained is forgotten, too
        self._held.pop(reference.path, None)

    async def examine(self) -> None:
        """See `Backend`."""
        for name, source in self._sources.items():
            try:
                credential = await self._text(source.credential)
                if source.client_secret:
                    await self._text(source.client_secret)
                if source.kind is TokenKind.REFRESH_TOKEN:
                    self._refresh_tokens.check(name, source, without_newline(credential))
            except NoValueError as error:
                raise NoValueError(error.fault, f"the credential of {name}: {error.reason}") from None

    async def close(self) -> None:
        """See `Backend`. Requests under way are completed: their answers can have new refresh tokens."""
        await asyncio.gather(*self._renewals.values(), return_exceptions=True)
        await asyncio.gather(*map(self._refresh_tokens.settle, self._sources), return_exceptions=True)
        self._held.clear()
        self._session.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _source(self, reference: SecretReference) -> TokenSource:
        source = self._sources.get(reference.path)
        if source is None:
            raise NoValueError(Fault.MISSING, "sallyport.vault.tokens has no token of this name: add it")
        return source

    def _renewal(self, name: str, source: TokenSource) -> asyncio.Task[BackendValue]:
        """Return the request for a token that is under way, or begin it."""
        task = self._renewals.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._renew(name, source), name="obtain-token")
            self._renewals[name] = task
            task.add_done_callback(lambda done: self._renewed(name, done))
        return task

    def _renewed(self, name: str, task: asyncio.Task[BackendValue]) -> None:
        self._renewals.pop(name, None)
        if not task.cancelled():
            task.exception()  # the caller may not wait any more

    async def _renew(self, name: str, source: TokenSource) -> BackendValue:
        now = time.monotonic()
        text, seconds = await self._obtain(name, source)
        if seconds is None:
            return unleased(text, self._refresh)
        valid = min(MOST_SECONDS, seconds) - _MARGIN
        if valid < 1:
            raise NoValueError(Fault.UNFIT, f"the token ends in {seconds} s: let its issuer give it more time")
        held = self._held[name] = _Token(fit(text), now + valid * 3 / 4, now + valid)
        return held.now()

    async def _text(self, reference: str) -> str:
        parsed = SecretReference.parse(reference)
        return await self._supplier.text(_MATERIAL[parsed.backend], parsed.path)

    async def _obtain(self, name: str, source: TokenSource) -> tuple[str, int | None]:
        """Return a new token and its seconds; None: its issuer does not say."""
        credential = await self._text(source.credential)
        match source.kind:
            case TokenKind.JWT:
                seconds, now = source.seconds or _HOUR, int(self._clock())
                claims = {"iss": source.client, "sub": source.subject or source.client, "aud": source.audience}
                times = {"iat": now, "exp": now + seconds, "jti": secrets.token_hex(16)}
                return _signed({**claims, **times}, credential, source.key_id), seconds
            case TokenKind.GITHUB_APP:
                return await self._installation(source, credential)
            case TokenKind.CLIENT_CREDENTIALS:
                return await self._client_credentials(source, without_newline(credential))
            case TokenKind.REFRESH_TOKEN:
                return await self._refreshed(name, source, without_newline(credential))

    async def _client_credentials(self, source: TokenSource, secret: str) -> tuple[str, int | None]:
        form = {"grant_type": "client_credentials", "scope": source.scope, "audience": source.audience}
        return _access_token(*await self._ask(source.url, form, _login(source.client, secret)))

    async def _refreshed(self, name: str, source: TokenSource, credential: str) -> tuple[str, int | None]:
        """Ask with a refresh token, and have a new one kept before the access token is used."""
        form, login = {"grant_type": "refresh_token", "scope": source.scope}, None
        if source.client_secret:
            login = _login(source.client, without_newline(await self._text(source.client_secret)))
        else:
            form["client_id"] = source.client
        present = await self._refresh_tokens.present(name, source, credential)
        status, answer = await self._ask(source.url, form | {"refresh_token": present.token.text}, login)
        if status != 200 and answer.get("error") == "invalid_grant":
            error = NoValueError(
                Fault.LOGIN,
                "the issuer refuses the refresh token (invalid_grant): it has ended, was revoked, or was used before. "
                f"Log in again, and store the new refresh token in {source.credential}",
            )
            self._refresh_tokens.refuse(name, present, error)
            raise error
        if status == 200:
            await self._refresh_tokens.replace(name, present, answer.get("refresh_token"))
        found = _access_token(status, answer)
        self._refresh_tokens.accept(name)
        return found

    async def _ask(
        self, url: str, form: Mapping[str, str], login: tuple[str, str] | None
    ) -> tuple[int, dict[str, Any]]:
        """Ask a token endpoint of OAuth 2.0."""
        return await self._post(url, data={key: value for key, value in form.items() if value}, auth=login)

    async def _installation(self, source: TokenSource, key: str) -> tuple[str, int | None]:
        now = int(self._clock())
        app = _signed({"iss": source.client, "iat": now - _SKEW, "exp": now + _APP_SECONDS}, key, "")
        url = f"{source.url.rstrip('/')}/app/installations/{source.installation}/access_tokens"
        headers = {"Authorization": f"Bearer {app}", "Accept": "application/vnd.github+json"}
        status, answer = await self._post(url, headers=headers)
        token, end = answer.get("token"), answer.get("expires_at")
        if status != 201 or not isinstance(token, str) or not isinstance(end, str):
            raise _refused(status, answer)
        try:
            seconds = int(datetime.fromisoformat(end).timestamp() - now)
        except (ValueError, OverflowError):
            raise NoValueError(Fault.UNFIT, "the token has no end that can be read") from None
        return token, seconds

    async def _post(self, url: str, **options: Any) -> tuple[int, dict[str, Any]]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(self._asked, url, options))

    def _asked(self, url: str, options: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        until = time.monotonic() + REQUEST_SECONDS
        try:
            with self._session.post(url, stream=True, allow_redirects=False, timeout=_TIMES, **options) as response:
                return response.status_code, object_of(content_of(response, until))
        except requests.exceptions.SSLError:
            raise NoValueError(
                Fault.TLS, "the issuer's certificate is not valid for its name under sallyport.upstream_roots"
            ) from None
        except (requests.exceptions.Timeout, urllib3.exceptions.TimeoutError, TimeoutError):
            raise NoValueError(Fault.TIMEOUT, "the issuer of the token did not answer in time") from None
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError):
            raise NoValueError(
                Fault.UNREACHABLE, "the issuer of the token cannot be reached: check its URL and the network"
            ) from None


def _login(client: str, secret: str) -> tuple[str, str]:
    """Return user and password of a client's Basic login (RFC 6749, 2.3.1)."""
    return quote(client, safe=""), quote(secret, safe="")


def _access_token(status: int, answer: Mapping[str, Any]) -> tuple[str, int | None]:
    """Return the token of an answer, and its seconds if it says so (RFC 6749, 5.1)."""
    token, seconds = answer.get("access_token"), answer.get("expires_in")
    if status != 200 or not isinstance(token, str):
        raise _refused(status, answer)
    if str(answer.get("token_type", "")).lower() != "bearer":
        raise NoValueError(Fault.UNFIT, "the token is no bearer token")
    return token, seconds if type(seconds) is int else None


def _refused(status: int, answer: Mapping[str, Any]) -> NoValueError:
    said = answer.get("error")
    code = f" ({said})" if isinstance(said, str) and _ERROR.fullmatch(said) else ""
    if status == 429:
        return NoValueError(Fault.BUSY, "the issuer of the token has a rate limit")
    if status in (400, 401, 403, 404):
        return NoValueError(Fault.LOGIN, f"the issuer of the token answers {status}{code}: check client and credential")
    return NoValueError(Fault.FAILED, f"the issuer of the token answers {status}{code}")


def _signed(claims: dict[str, Any], pem: str, key_id: str) -> str:
    """Return a JWT, signed with the algorithm of its key.

    Raises:
        NoValueError: the key cannot be used.
    """
    try:
        key = load_pem_private_key(pem.encode(), None)
    except (ValueError, TypeError):
        raise NoValueError(Fault.LOGIN, "the credential is no private key in PEM without a passphrase") from None
    match key:
        case rsa.RSAPrivateKey() if key.key_size >= 2048:
            algorithm = "RS256"
        case ec.EllipticCurvePrivateKey() if isinstance(key.curve, ec.SECP256R1):
            algorithm = "ES256"
        case ed25519.Ed25519PrivateKey():
            algorithm = "EdDSA"
        case _:
            raise NoValueError(Fault.LOGIN, "the private key is none of RSA with 2048 bits, P-256 and Ed25519")
    return jwt.encode(claims, key, algorithm, {"kid": key_id} if key_id else None)
