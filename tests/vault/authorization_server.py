"""A real OAuth 2.0 authorization server for tests: oidc-provider, with refresh tokens that rotate.

`SALLYPORT_CLIENTS` names the directory with Node and its packages, which `./run test` fills. Nothing is left of the
server.
"""

import base64
import hashlib
import os
import secrets
import signal
import subprocess
from pathlib import Path
from urllib.parse import parse_qs, quote, urljoin, urlsplit

import pytest
import requests

from testbed.ports import reserve_port
from tests.vault.vault_server import Authority

PROGRAM = Path(__file__).with_suffix(".mjs")
SECONDS = 30
_BACK = "https://operator.invalid/back"
_STEPS = 12


class AuthorizationServer:
    """One server. `log_in` returns the refresh token of a new login, as an operator obtains it in a browser."""

    def __init__(self, directory: Path, seconds: int = SECONDS) -> None:
        clients = os.environ.get("SALLYPORT_CLIENTS")
        if not clients:
            pytest.fail("SALLYPORT_CLIENTS names no directory: ./run test fills it", pytrace=False)
        self.authority = Authority(directory, "authorization-server")
        self.secret = "secret/+&%" + secrets.token_urlsafe(24)
        certificate, key = self.authority.issue()
        self._port = reserve_port()
        arguments = (f"{clients}/npm", certificate, key, str(self._port), str(seconds), self.secret)
        self._process = subprocess.Popen(
            [f"{clients}/node/bin/node", PROGRAM, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # that program starts Node as its child
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            pytest.fail("the authorization server does not start", pytrace=False)

    @property
    def url(self) -> str:
        """The token endpoint."""
        return self._at("/token")

    def log_in(self, client: str) -> str:
        """Log in with an authorization code (RFC 6749, 4.1, with PKCE); return the refresh token."""
        verifier = secrets.token_urlsafe(32)
        challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).decode().rstrip("=")
        asked = {
            "client_id": client,
            "response_type": "code",
            "redirect_uri": _BACK,
            "scope": "openid offline_access",
            "code_challenge": challenge,
            "code_challenge_method": "S256",
            "prompt": "consent",
        }
        with self._session() as browser:
            answer = browser.get(self._at("/auth"), params=asked, allow_redirects=False)
            for _ in range(_STEPS):
                place = urljoin(answer.url, answer.headers.get("location", ""))
                if place.startswith(_BACK):
                    return self._exchange(client, parse_qs(urlsplit(place).query)["code"][0], verifier)
                if answer.is_redirect:
                    answer = browser.get(place, allow_redirects=False)
                else:
                    prompt = "login" if 'name="login"' in answer.text else "consent"
                    form = {"prompt": prompt, "login": "operator", "password": "any"}
                    answer = browser.post(answer.url, data=form, allow_redirects=False)
        pytest.fail("the login does not end")

    def active(self, token: str) -> bool:
        """Whether the server accepts an access token."""
        with self._session() as session:
            answer = session.post(self._at("/token/introspection"), data={"token": token}, auth=self._login)
        return answer.json()["active"] is True

    def revoke(self, token: str) -> None:
        """Revoke the login of an access token, as an administrator does."""
        with self._session() as session:
            answer = session.post(self._at("/token/revocation"), data={"token": token}, auth=self._login)
        assert answer.status_code == 200

    def _exchange(self, client: str, code: str, verifier: str) -> str:
        form = {"grant_type": "authorization_code", "code": code, "redirect_uri": _BACK, "code_verifier": verifier}
        login = self._login if client == "confidential" else None
        with self._session() as session:
            answer = session.post(self.url, data=form if login else {**form, "client_id": client}, auth=login)
        return str(answer.json()["refresh_token"])

    @property
    def _login(self) -> tuple[str, str]:
        return "confidential", quote(self.secret, safe="")  # RFC 6749, 2.3.1

    def _session(self) -> requests.Session:
        session = requests.Session()
        session.trust_env = False
        session.verify = str(self.authority.path)
        return session

    def _at(self, path: str) -> str:
        return f"https://127.0.0.1:{self._port}{path}"

    def kill(self) -> None:
        """End the server."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
