"""Wraps and unwraps with a key of the transit engine of HashiCorp Vault or OpenBao, in the unwrapper only.

- The text of a wrapped key is Vault's ciphertext. Its context is sent as associated data, so a ciphertext that the same
  key made for another purpose does not open. A server that does not look at associated data is refused.
- Server, TLS and logins are as for the backend of secrets (`vault.stores.hvac`), with settings of their own: vaultd
  starts without the fetcher. A token of a login is revoked at the end.
- After a failure that can pass (unreachable, busy, standby) there is one more try. The parent bounds the time.
"""

import asyncio
import base64
import encodings.idna  # noqa: F401 - a later import would fail where the user cannot read the interpreter
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from vault.stores.backend import NoValueError
from vault.stores.hvac.login import VaultLogin
from vault.stores.hvac.session import VaultAnswer
from vault.stores.supplied import decoded
from vault.wrapping.sources import TransitKey, WrappedKey, WrappingError
from wire.api.fetcher import Fault, Material

TRIES: Final = 2
_AGAIN: Final = frozenset({Fault.UNREACHABLE, Fault.BUSY, Fault.STANDBY})
_PAUSE: Final = 1.0
_MOST_CREDENTIAL: Final = 64 * 1024
_KEY_BYTES: Final = 32


class _Descriptor:
    """The credential of a descriptor; see `vault.stores.supplied.Supplier`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def text(self, material: Material, name: str = "") -> str:
        """Return the credential, whatever is asked for."""
        if self._descriptor < 0:
            raise NoValueError(Fault.MISSING, "the file of sallyport.vault.transit.credential_file cannot be opened")
        try:
            content = os.pread(self._descriptor, _MOST_CREDENTIAL + 1, 0)
        except OSError as error:
            raise NoValueError(Fault.FAILED, f"the credential cannot be read: {error.strerror}") from None
        return decoded(content, _MOST_CREDENTIAL)


def wrap(place: TransitKey, credential: int, key: bytes, context: bytes) -> str:
    """Return `key` in its wrapped form. Raises WrappingError."""

    async def work(login: VaultLogin) -> str:
        body = {"plaintext": _base64(key), "associated_data": _base64(context)}
        text = (await _asked(login, place, "encrypt", body)).data.get("ciphertext")
        if not isinstance(text, str) or not text.isascii():
            raise WrappingError(f"Vault's answer for the transit key {place.key} has no ciphertext")
        if await _plain(login, place, text, context) != key:
            raise WrappingError("Vault does not return what it has encrypted")
        if await _opens(login, place, text, context + b"/another"):
            raise WrappingError(
                "this Vault does not look at associated data: use a newer one, and a key of type aes256-gcm96"
            )
        return text

    return asyncio.run(_logged_in(place, credential, work))


def unwrap(place: TransitKey, credential: int, keys: Sequence[WrappedKey]) -> list[bytes]:
    """Return the plain forms, with one login. Raises WrappingError."""

    async def work(login: VaultLogin) -> list[bytes]:
        return [await _plain(login, place, each.wrapped, each.context) for each in keys]

    return asyncio.run(_logged_in(place, credential, work))


async def _logged_in[T](place: TransitKey, credential: int, work: Callable[[VaultLogin], Awaitable[T]]) -> T:
    """Do `work`, with one more try after a failure that can pass."""
    for left in reversed(range(TRIES)):
        login = VaultLogin(place.server, _Descriptor(credential))
        try:
            return await work(login)
        except NoValueError as error:
            if not left or error.fault not in _AGAIN:
                raise WrappingError(f"{place.server.address}: {error.reason}") from None
        finally:
            await login.close()
        await asyncio.sleep(_PAUSE)
    raise AssertionError("unreachable")


async def _plain(login: VaultLogin, place: TransitKey, text: str, context: bytes) -> bytes:
    answer = await _asked(login, place, "decrypt", {"ciphertext": text, "associated_data": _base64(context)})
    try:
        key = base64.b64decode(str(answer.data.get("plaintext")), validate=True)
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise WrappingError(f"Vault's answer for the transit key {place.key} is no key of {_KEY_BYTES} bytes")
    return key


async def _opens(login: VaultLogin, place: TransitKey, text: str, context: bytes) -> bool:
    body = {"ciphertext": text, "associated_data": _base64(context)}
    answer, _ = await login.ask("post", f"{place.engine}/decrypt/{place.key}", body)
    return answer.status != 400


async def _asked(login: VaultLogin, place: TransitKey, operation: str, body: dict[str, str]) -> VaultAnswer:
    answer, _ = await login.ask("post", f"{place.engine}/{operation}/{place.key}", body)
    if answer.status != 200:
        raise WrappingError(_reason(answer, place, operation))
    return answer


def _reason(answer: VaultAnswer, place: TransitKey, operation: str) -> str:
    """Return a sentence for an answer; none of Vault's own text is repeated."""
    errors = answer.body.get("errors")
    said = " ".join(map(str, errors)).lower() if isinstance(errors, list) else ""
    if answer.status in (401, 403):
        return f"Vault denies it: give Sallyport's policy `update` on {place.engine}/{operation}/{place.key}"
    if answer.status == 404:
        return f"Vault has no transit engine at {place.engine}, or no key {place.key}: correct mount and key"
    if "key not found" in said or "policy not found" in said:
        return f"Vault has no transit key {place.key}: it was deleted, or was never made"
    if "too old" in said or "disallowed by policy" in said or "minimum" in said:
        return f"Vault does not decrypt with this version of {place.key} any more: lower its min_decryption_version"
    if answer.status == 400 and operation == "decrypt":
        return f"Vault does not open the wrapped key: it was changed, or is of another purpose or key than {place.key}"
    return f"Vault answers {answer.status} for {place.engine}/{operation}/{place.key}: see its log"


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
