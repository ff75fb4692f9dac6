"""A stand-in for an authorization server whose refresh tokens rotate; see `tests.vault.authorization_server`."""

import base64
import json
import secrets
import threading
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote

from tests.vault.stand_in import https, send
from tests.vault.vault_server import Authority


class Issuer(Protocol):
    """What a test uses of an authorization server, real or not."""

    authority: Authority
    secret: str
    """That of the client `confidential`. The client `public` has none."""

    @property
    def url(self) -> str:
        """The token endpoint."""
        ...

    def log_in(self, client: str) -> str:
        """Return the refresh token of a new login."""
        ...

    def active(self, token: str) -> bool:
        """Whether the server accepts an access token."""
        ...

    def kill(self) -> None:
        """End the server."""
        ...


class RotatingIssuer:
    """Gives a new refresh token with each access token. One that is used twice revokes its login."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory, "rotating-issuer")
        self.secret = "secret/ +&%" + secrets.token_urlsafe(8)
        self.answer: dict[str, Any] = {"token_type": "Bearer", "expires_in": 3600}
        """Members of each answer. None removes one."""
        self.forms: list[dict[str, list[str]]] = []
        self.pass_on = threading.Event()
        """While it is not set, an answer waits after its tokens were made."""
        self.pass_on.set()
        self.next_token = ""
        self._logins: dict[str, tuple[str, str]] = {}
        self._used: dict[str, str] = {}
        self._access: dict[str, str] = {}
        self._serving: AbstractContextManager[int] = https(self.authority, self._issue)
        self.url = f"https://127.0.0.1:{self._serving.__enter__()}/token"

    def log_in(self, client: str) -> str:
        """See `Issuer`."""
        login = secrets.token_hex(4)
        return self._refresh_token(login, client)

    def active(self, token: str) -> bool:
        """See `Issuer`."""
        return token in self._access

    def kill(self) -> None:
        """See `Issuer`."""
        self.pass_on.set()
        self._serving.__exit__(None, None, None)

    def _refresh_token(self, login: str, client: str) -> str:
        token = f"canary-refresh-{secrets.token_urlsafe(16)}"
        self._logins[token] = login, client
        return token

    def _issue(self, request: BaseHTTPRequestHandler) -> None:
        form = parse_qs(request.rfile.read(int(request.headers["content-length"])).decode())
        self.forms.append(form)
        client = self._client(request, form)
        if client is None:
            send(request, 401, b'{"error": "invalid_client"}')
            return
        token = form["refresh_token"][0]
        if (login := self._used.get(token)) is not None:
            self._logins = {other: found for other, found in self._logins.items() if found[0] != login}
            self._access = {other: found for other, found in self._access.items() if found != login}
        if self._logins.get(token, ("", ""))[1] != client:
            send(request, 400, b'{"error": "invalid_grant", "error_description": "canary"}')
            return
        login, _ = self._logins.pop(token)
        self._used[token] = login
        following = self._refresh_token(login, client)
        access = self.next_token or f"canary-access-{secrets.token_urlsafe(16)}"
        self._access[access] = login
        self.pass_on.wait(20)
        answer = {"access_token": access, "refresh_token": following, **self.answer}
        send(request, 200, json.dumps({key: each for key, each in answer.items() if each is not None}).encode())

    def _client(self, request: BaseHTTPRequestHandler, form: dict[str, list[str]]) -> str | None:
        scheme, _, login = request.headers.get("authorization", "").partition(" ")
        if not scheme:
            return "public" if form.get("client_id") == ["public"] else None
        client, _, secret = base64.b64decode(login).decode().partition(":")
        good = (scheme, unquote(client), unquote(secret)) == ("Basic", "confidential", self.secret)
        return "confidential" if good and "client_id" not in form else None
