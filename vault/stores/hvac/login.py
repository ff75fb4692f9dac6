"""The token with which the fetcher asks Vault: obtained by a login, renewed, and replaced when it cannot be renewed.

- The credential is read from hostd at each login and is not kept: a replaced file is in force at the next login.
- A token is renewed when two thirds of its time are over, also while nothing is read: leases end with their token.
- A token of a login is revoked at the end, and Vault revokes its leases with it. The operator's own token is not.
"""

import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from vault.stores.backend import NoValueError
from vault.stores.hvac.config import Auth, HashicorpServer
from vault.stores.hvac.session import CONNECTIONS, VaultAnswer, VaultSession
from vault.stores.supplied import Supplier, without_newline
from wire.api.fetcher import MOST_SECONDS, Fault, Material

_LOOK_SECONDS: Final = 1.0
_MARGIN: Final = 5.0
_DEFAULT_MOUNTS: Final = {Auth.APPROLE: "approle", Auth.JWT: "jwt", Auth.KUBERNETES: "kubernetes"}


@dataclass(frozen=True, slots=True)
class Token:
    """A token and its times; `expires` is infinite for a token without an end."""

    text: str = field(repr=False)
    expires: float
    renew_at: float

    @property
    def seconds(self) -> int:
        """The time that is left."""
        return int(min(MOST_SECONDS, max(0.0, self.expires - time.monotonic())))


class VaultLogin:
    """Asks one server with a token that is valid."""

    def __init__(self, server: HashicorpServer, supplier: Supplier) -> None:
        self._server = server
        self._supplier = supplier
        self._session = VaultSession(server)
        self._threads = ThreadPoolExecutor(CONNECTIONS, "vault")
        self._token: Token | None = None
        self._lock = asyncio.Lock()
        self._keeper: asyncio.Task[None] | None = None

    async def ask(self, method: str, path: str, body: dict[str, str] | None = None) -> tuple[VaultAnswer, Token]:
        """Make a request with the token, after a login if necessary. A refused token is replaced once.

        Raises:
            NoValueError: see `VaultSession.request`; or the login is refused.
        """
        token = await self._valid()
        answer = await self._request(method, path, token.text, body)
        if answer.status == 403 and await self._refused(token):
            token = await self._valid()
            answer = await self._request(method, path, token.text, body)
        return answer, token

    async def health(self) -> None:
        """Ask whether the server is in use, and log in. Raises NoValueError."""
        await self._request("get", "sys/health?standbyok=true&perfstandbyok=true", "", None)
        token = await self._valid()
        if (await self._request("get", "auth/token/lookup-self", token.text, None)).status != 200:
            raise _login_refused(self._server.auth)

    async def close(self) -> None:
        """Revoke the token if it is of a login, and end the connections."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._token is not None and self._server.auth is not Auth.TOKEN:
            with contextlib.suppress(NoValueError):
                await self._request("post", "auth/token/revoke-self", self._token.text, None)
        self._token = None
        self._session.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _request(self, method: str, path: str, token: str, body: dict[str, str] | None) -> VaultAnswer:
        call = partial(self._session.request, method, path, token, body)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def _valid(self) -> Token:
        async with self._lock:
            now = time.monotonic()
            if self._token is None or self._token.expires - now < _MARGIN:
                self._token = await self._log_in()
                if self._keeper is None:
                    self._keeper = asyncio.create_task(self._keep(), name="keep-token")
            return self._token

    async def _refused(self, token: Token) -> bool:
        """Return whether it makes sense to repeat a refused request: the token is not valid any more."""
        looked = await self._request("get", "auth/token/lookup-self", token.text, None)
        if looked.status == 200:
            return False
        async with self._lock:
            if self._token is token:
                self._token = None
        return True

    async def _log_in(self) -> Token:
        credential = without_newline(await self._supplier.text(Material.CREDENTIAL))
        asked = time.monotonic()
        server = self._server
        if server.auth is Auth.TOKEN:
            answer = await self._request("get", "auth/token/lookup-self", credential, None)
            if answer.status != 200:
                raise _login_refused(server.auth)
            return _token(credential, answer.data.get("ttl"), asked)
        body = (
            {"role_id": server.role, "secret_id": credential}
            if server.auth is Auth.APPROLE
            else {"role": server.role, "jwt": credential}
        )
        mount = server.mount or _DEFAULT_MOUNTS[server.auth]
        answer = await self._request("post", f"auth/{mount}/login", "", body)
        auth = answer.body.get("auth")
        text = auth.get("client_token") if isinstance(auth, dict) else None
        if answer.status != 200 or not isinstance(auth, dict) or not isinstance(text, str):
            raise _login_refused(server.auth)
        return _token(text, auth.get("lease_duration"), asked)

    async def _keep(self) -> None:
        """Renew the token when it is due, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            token = self._token
            if token is not None and time.monotonic() >= token.renew_at:
                with contextlib.suppress(NoValueError):
                    await self._renew(token)

    async def _renew(self, token: Token) -> None:
        asked = time.monotonic()
        answer = await self._request("post", "auth/token/renew-self", token.text, None)
        auth = answer.body.get("auth")
        async with self._lock:
            if self._token is not token:
                return
            if answer.status == 200 and isinstance(auth, dict):
                self._token = _token(token.text, auth.get("lease_duration"), asked)
            else:  # it cannot be renewed: it is used up to its end
                self._token = Token(token.text, token.expires, token.expires)


def _token(text: str, seconds: Any, asked: float) -> Token:
    """Return a token with the time that Vault says; 0 is a token without an end."""
    if type(seconds) is not int or seconds <= 0:
        return Token(text, float("inf"), float("inf"))
    return Token(text, asked + seconds, asked + seconds * 2 / 3)


def _login_refused(auth: Auth) -> NoValueError:
    what = {
        Auth.TOKEN: "the token is not valid any more: put a new one into credential_file",
        Auth.APPROLE: "check role (the role id) and the secret id in credential_file",
        Auth.JWT: "check role, auth_mount and the JWT in credential_file",
        Auth.KUBERNETES: "check role, auth_mount and the service account of credential_file",
    }[auth]
    return NoValueError(Fault.LOGIN, f"Vault refuses the login: {what}")
