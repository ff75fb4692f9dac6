"""The refresh tokens of the fetcher (RFC 6749, 6), and what becomes of those that an issuer replaces.

An issuer that rotates refresh tokens gives a new one with each access token. It accepts the former one no more, and
revokes the whole login if it gets it again.

- A new refresh token is in memory at once. vaultd has it on disk before its access token is used (`Keeper`).
- Until vaultd has it, each use fails with the reason, and the issuer is not asked again.
- A token that was kept counts only as a descendant of what the operator configures now: credential, client and URL. So
  another credential, which an operator stores after a new login, wins.
- A token that the issuer has refused is not sent again for `PAUSE` seconds.
"""

import hashlib
import json
import time
from typing import Final, Protocol

from vault.stores.backend import NoValueError
from vault.stores.token_config import TokenSource
from wire.api.fetcher import MOST_KEPT_BYTES, Fault, KeptToken
from wire.api.vaultd import Value

PAUSE: Final = 60.0


class Keeper(Protocol):
    """Keeps refresh tokens beyond the life of the fetcher. Both methods raise NoValueError."""

    async def recall(self, name: str) -> KeptToken | None:
        """Return what is kept for a token of the settings."""
        ...

    async def keep(self, name: str, kept: KeptToken) -> None:
        """Keep a token in place of the former one; it is on disk on return."""
        ...


class RefreshTokens:
    """The present refresh token of each token of the settings. Calls for one name come one after the other."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._present: dict[str, KeptToken] = {}
        self._unkept: set[str] = set()
        self._refused: dict[str, tuple[KeptToken, float, NoValueError]] = {}

    async def present(self, name: str, source: TokenSource, credential: str) -> KeptToken:
        """Return the token to send: the last one of the issuer, or else the operator's credential.

        Raises:
            NoValueError: vaultd does not have the last one, or the issuer has refused it.
        """
        origin = _origin(source, credential)
        found = self._present.get(name) or await self._keeper.recall(name)
        if found is None or found.origin != origin:
            if not 0 < len(credential.encode()) <= MOST_KEPT_BYTES:
                raise NoValueError(
                    Fault.UNFIT, f"a refresh token has from 1 to {MOST_KEPT_BYTES} bytes: store another one"
                )
            self._unkept.discard(name)
            found = KeptToken(origin, Value(credential))
        self._present[name] = found
        await self.settle(name)
        refused, until, error = self._refused.get(name, (None, 0.0, None))
        if error is not None and refused == found and time.monotonic() < until:
            raise NoValueError(error.fault, error.reason)
        return found

    async def replace(self, name: str, former: KeptToken, answered: object) -> None:
        """Take the member `refresh_token` of an answer, which may be absent.

        Raises:
            NoValueError: it is not kept; the access token of the answer must not be used.
        """
        if answered in (None, "", former.token.text):
            return
        if not isinstance(answered, str) or not _fit(answered):
            reason = f"the issuer's new refresh token is no text of up to {MOST_KEPT_BYTES} bytes"
            error = NoValueError(Fault.UNFIT, reason)
            self.refuse(name, former, error)
            raise error
        self._present[name] = KeptToken(former.origin, Value(answered))
        self._unkept.add(name)
        await self.settle(name)

    async def settle(self, name: str) -> None:
        """Have vaultd keep the last token, if it does not yet.

        Raises:
            NoValueError: it does not.
        """
        if name in self._unkept:
            await self._keeper.keep(name, self._present[name])
            self._unkept.discard(name)

    def accept(self, name: str) -> None:
        """Forget that the issuer has refused a token."""
        self._refused.pop(name, None)

    def refuse(self, name: str, token: KeptToken, error: NoValueError) -> None:
        """Remember that the issuer has refused a token."""
        self._refused[name] = token, time.monotonic() + PAUSE, error

    def check(self, name: str, source: TokenSource, credential: str) -> None:
        """Raise NoValueError if the issuer has refused the last token that descends from this credential."""
        refused, _, error = self._refused.get(name, (None, 0.0, None))
        if refused is not None and error is not None and refused.origin == _origin(source, credential):
            raise NoValueError(error.fault, error.reason)


def _fit(text: str) -> bool:
    return text.isascii() and text.isprintable() and len(text) <= MOST_KEPT_BYTES


def _origin(source: TokenSource, credential: str) -> str:
    """Return the digest of a credential, with the client and the issuer for which it was made."""
    return hashlib.sha256(json.dumps([source.url, source.client, credential]).encode()).hexdigest()
