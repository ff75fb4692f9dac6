"""Blocking requests to one Vault server: hvac's adapter, with bounds, and each failure as a fault with a sentence.

- The certificate is verified under the configured roots only. Proxies, netrc, cookies and variables of the environment
  do not count.
- No redirect is followed: a token goes to the configured address only.
- An answer is bounded (`vault.stores.web`). A request takes `MOST_SECONDS` at most, also if its answer's body arrives
  byte by byte.
- No message has a token or an answer's content.
"""

import time
from dataclasses import dataclass, field
from http.cookiejar import DefaultCookiePolicy
from typing import Any, Final

import hvac
import requests
import urllib3
from hvac.adapters import RawAdapter

from vault.stores.backend import NoValueError
from vault.stores.hvac.config import HashicorpServer
from vault.stores.web import content_of, object_of
from wire.api.fetcher import Fault

MOST_SECONDS: Final = 6.0
CONNECTIONS: Final = 8
_TIMES: Final = (2.0, 5.0)
_STANDBY: Final = frozenset({301, 302, 307, 308, 472, 473, 474})


@dataclass(frozen=True, slots=True)
class VaultAnswer:
    """The status of a request, and the object in its body; empty if it has none."""

    status: int
    body: dict[str, Any] = field(repr=False)

    @property
    def data(self) -> dict[str, Any]:
        """The member `data`."""
        found = self.body.get("data")
        return found if isinstance(found, dict) else {}

    @property
    def sealed(self) -> bool:
        """Whether the server says that it is sealed."""
        errors = self.body.get("errors")
        said = isinstance(errors, list) and any("sealed" in str(each).lower() for each in errors)
        return self.status == 503 and (said or self.body.get("sealed") is True)


class VaultSession:
    """Requests to one server. Its method is called from several threads."""

    def __init__(self, server: HashicorpServer) -> None:
        session = requests.Session()
        session.trust_env = False
        session.verify = server.roots
        session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        pool = requests.adapters.HTTPAdapter(pool_connections=1, pool_maxsize=CONNECTIONS, max_retries=0)
        session.mount("https://", pool)
        session.mount("http://", requests.adapters.HTTPAdapter(pool_connections=1, pool_maxsize=CONNECTIONS))
        self._session = session
        self._server = server
        self._client = hvac.Client(
            url=server.address,
            token="",
            verify=server.roots,
            timeout=_TIMES,
            allow_redirects=False,
            session=session,
            adapter=RawAdapter,
            namespace=server.namespace or None,
        )

    def request(self, method: str, path: str, token: str, body: dict[str, str] | None = None) -> VaultAnswer:
        """Make one request; `path` is that of the API, without `/v1/`.

        Raises:
            NoValueError: there is no answer, or it says nothing about the request: the server is sealed, standby or
                busy.
        """
        until = time.monotonic() + MOST_SECONDS
        headers = {"X-Vault-Token": token} if token else {}
        try:
            response = self._client.adapter.request(
                method, f"/v1/{path}", headers=headers, raise_exception=False, stream=True, json=body
            )
            with response:
                content = content_of(response, until)
        except requests.exceptions.SSLError:
            raise NoValueError(
                Fault.TLS, "Vault's certificate is not valid for its name under the roots: check ca_file and address"
            ) from None
        except (requests.exceptions.Timeout, urllib3.exceptions.TimeoutError, TimeoutError):
            raise NoValueError(Fault.TIMEOUT, "Vault did not answer in time: look at its load") from None
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError):
            raise NoValueError(
                Fault.UNREACHABLE, "Vault cannot be reached: check that it runs, its address, and the network"
            ) from None
        answer = VaultAnswer(response.status_code, object_of(content))
        _check(answer)
        return answer

    def close(self) -> None:
        """End the connections."""
        self._session.close()


def _check(answer: VaultAnswer) -> None:
    if answer.sealed:
        raise NoValueError(Fault.SEALED, "Vault is sealed: unseal it (`vault operator unseal`)")
    if answer.status in _STANDBY:
        raise NoValueError(
            Fault.STANDBY,
            "Vault's answer is from a standby node that cannot forward: look at the active node, or set its address",
        )
    if answer.status == 429:
        raise NoValueError(Fault.BUSY, "Vault has a rate limit for Sallyport: raise its quota")
    if answer.status == 501:
        raise NoValueError(Fault.SEALED, "Vault is not initialised: initialise and unseal it")
    if answer.status >= 500:
        raise NoValueError(Fault.FAILED, f"Vault answers {answer.status}: see its log")
