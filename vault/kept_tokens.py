"""The refresh tokens that vaultd keeps for the fetcher: sealed, one record for each token of the settings.

An issuer that replaces refresh tokens accepts each one once. So a new one must outlive the fetcher, which has no master
key. The fetcher asks on the connection that vaultd has made to it, and gets nothing else there.

- A token is on disk before `Keep` is answered.
- The number of records and the size of each are bounded, because a compromised fetcher can ask for any number.
- A record that does not open counts as absent: the fetcher then uses the operator's credential.
- The log has a record of each change and of each failure. No record and no message has a token.
"""

import json
import logging
from typing import Final

import wire
from vault.channels import Audit
from vault.stores.directory import SealedDirectory, SealedRecordError
from wire.api import fetcher
from wire.api.fetcher import KeptToken, Recalled
from wire.api.vaultd import Value
from wire.frames import close_all

MOST_KEPT: Final = 256

_log = logging.getLogger(__name__)


class TooManyTokensError(Exception):
    """There are `MOST_KEPT` records."""


class KeptTokens:
    """The sealed records. All methods block."""

    def __init__(self, directory: SealedDirectory) -> None:
        self._directory = directory

    def recall(self, name: str) -> KeptToken | None:
        """Return what is kept under a name; None also if it cannot be read."""
        try:
            document = json.loads(self._directory.read(name)[1])
            return KeptToken(document["origin"], Value(document["token"]))
        except FileNotFoundError:
            return None
        except (SealedRecordError, ValueError, KeyError, TypeError):
            _log.error("the refresh token that was kept for token://%s cannot be read and counts as absent", name)
            return None

    def keep(self, name: str, kept: KeptToken) -> None:
        """Store a token in place of the former one, durably.

        Raises:
            TooManyTokensError: it would be one too many.
            OSError: it could not be written; the former one is unchanged.
        """
        if not self._directory.exists(name) and len(self._directory.names()) >= MOST_KEPT:
            raise TooManyTokensError
        body = json.dumps({"origin": kept.origin, "token": kept.token.text})
        self._directory.write(name, b"{}", body.encode())


class KeepingOperations:
    """Answers what the fetcher asks on vaultd's connection to it."""

    def __init__(self, tokens: KeptTokens, audit: Audit) -> None:
        self._tokens = tokens
        self._audit = audit

    async def handle(self, _client: wire.Client, request: fetcher.Recall | fetcher.Keep, fds: list[int]) -> object:
        """Answer one request of `wire.api.fetcher.KEEPING`."""
        close_all(fds)
        match request:
            case fetcher.Recall():
                return Recalled(self._tokens.recall(request.name))
            case fetcher.Keep():
                self._keep(request.name, request.kept)
        return None

    def _keep(self, name: str, kept: KeptToken) -> None:
        secret = f"token://{name}"
        try:
            self._tokens.keep(name, kept)
        except TooManyTokensError:
            raise self._failed(secret, wire.Code.FULL, f"vaultd keeps {MOST_KEPT} refresh tokens, its limit") from None
        except OSError as error:
            raise self._failed(secret, wire.Code.STORAGE, f"the vault's files: {error.strerror}") from None
        self._audit.note("vault.keep", "info", secret=secret)

    def _failed(self, secret: str, code: wire.Code, reason: str) -> wire.RequestError:
        _log.error("the new refresh token of %s is not kept: %s", secret, reason)
        self._audit.note("vault.keep", "deny", secret=secret, code=code, reason=reason)
        return wire.RequestError(code, reason)
