"""Wraps and unwraps with an AES key in a PKCS#11 token. The module of the token is loaded by the unwrapper only.

    base64 of: nonce (12 bytes) | AES-256-GCM ciphertext (32 bytes) | tag (16 bytes)

- The token encrypts and decrypts. Its key must be private, sensitive and not extractable: it is of no use without the
  PIN, and no copy of it can be made.
- There is one login for each process, with the PIN of a descriptor. A refused PIN is noted (`RefusedPin`) and not tried
  again until its file changes: no restart locks the user of the token. The last try before a lock is not used.
- Every failure says what it is about. No message has a PIN or a byte of a key.
"""

import base64
import contextlib
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pkcs11
import pkcs11._pkcs11  # before the user is given up: an unprivileged user may be unable to read it
from pkcs11 import Attribute, GCMParams, KeyType, Mechanism, ObjectClass, TokenFlag
from pkcs11.exceptions import (
    MechanismInvalid,
    MechanismParamInvalid,
    PinExpired,
    PinIncorrect,
    PinInvalid,
    PinLenRange,
    PinLocked,
    PKCS11Error,
    UserPinNotInitialized,
)

from vault.wrapping.sources import Pkcs11Token, WrappedKey, WrappingError

KEY_BYTES: Final = 32
_NONCE: Final = 12
_TAG_BITS: Final = 128
_MOST_PIN: Final = 256
_MOST_KEYS: Final = 16


class RefusedPin:
    """The note of a refused PIN: the times and the number of the PIN's file, and nothing of the PIN."""

    def __init__(self, note: Path, descriptor: int, pin_file: str) -> None:
        status = os.fstat(descriptor)
        fields = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        self._stamp = ":".join(map(str, fields)).encode("ascii")
        self._note, self._pin_file = note, pin_file

    @contextlib.contextmanager
    def one_try(self) -> Iterator[None]:
        """Try the PIN in the block, which raises `PinIncorrect` and its like if the token refuses it.

        The note is on disk before the try, under another name: a full disk must not cause a second try.

        Raises:
            WrappingError: this PIN was refused before, or its refusal could not be noted.
        """
        prepared = self._note.with_name(f"{self._note.name}.new")
        try:
            with contextlib.suppress(FileNotFoundError):
                if self._note.read_bytes() == self._stamp:
                    raise WrappingError(
                        f"the token has refused the PIN in {self._pin_file}; it is not tried again: correct that file"
                    )
            prepared.unlink(missing_ok=True)
            with open(prepared, "xb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600)) as file:
                file.write(self._stamp)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise WrappingError(f"{prepared}: {error.strerror}; without it no PIN is tried") from None
        try:
            yield
        except (PinIncorrect, PinInvalid, PinLenRange):
            prepared.replace(self._note)
            raise WrappingError(
                f"the token refuses the PIN in {self._pin_file}: correct that file; it is not tried again before"
            ) from None
        finally:
            prepared.unlink(missing_ok=True)


def wrap(place: Pkcs11Token, pin: int, note: Path, key: bytes, context: bytes) -> str:
    """Return `key` in its wrapped form. Raises WrappingError."""
    with _wrapping_key(place, pin, note) as wrapping:
        nonce = secrets.token_bytes(_NONCE)
        try:
            wrapped = nonce + wrapping.encrypt(key, **_gcm(nonce, context))
        except (MechanismInvalid, MechanismParamInvalid):
            raise WrappingError(
                f"the token does not encrypt with AES-GCM (CKM_AES_GCM) and a nonce of the caller: {place.token}"
            ) from None
        except PKCS11Error as error:
            raise WrappingError(f"the token does not encrypt: {_named(error)}") from None
        if _decrypted(wrapping, wrapped, context) != key:
            raise WrappingError("the token does not return what it has encrypted")
        return base64.b64encode(wrapped).decode("ascii")


def unwrap(place: Pkcs11Token, pin: int, note: Path, keys: Sequence[WrappedKey]) -> list[bytes]:
    """Return the plain forms, with one login. Raises WrappingError."""
    with _wrapping_key(place, pin, note) as wrapping:
        return [_unwrapped(wrapping, each) for each in keys]


def _unwrapped(wrapping: Any, each: WrappedKey) -> bytes:
    try:
        wrapped = base64.b64decode(each.wrapped, validate=True)
    except ValueError:
        wrapped = b""
    if len(wrapped) != _NONCE + KEY_BYTES + _TAG_BITS // 8:
        raise WrappingError("the wrapped key was changed: it has a wrong length")
    return _decrypted(wrapping, wrapped, each.context)


def _decrypted(wrapping: Any, wrapped: bytes, context: bytes) -> bytes:
    try:
        return bytes(wrapping.decrypt(wrapped[_NONCE:], **_gcm(wrapped[:_NONCE], context)))
    except PKCS11Error as error:  # each token has its own code for a wrong tag
        raise WrappingError(
            f"the wrapped key does not open: it was changed, or another key wrapped it ({_named(error)})"
        ) from None


def _gcm(nonce: bytes, context: bytes) -> dict[str, Any]:
    return {"mechanism": Mechanism.AES_GCM, "mechanism_param": GCMParams(nonce, context, _TAG_BITS)}


@contextlib.contextmanager
def _wrapping_key(place: Pkcs11Token, pin: int, note: Path) -> Iterator[Any]:
    """Log in, and find the key."""
    token = _token(place)
    text = _pin(place, pin)
    try:
        with RefusedPin(note, pin, place.pin_file).one_try():
            session = token.open(user_pin=text)
    except PinLocked:
        raise WrappingError(_locked(place)) from None
    except PinExpired:
        raise WrappingError("the PIN has expired: set another one with the tool of the token's vendor") from None
    except UserPinNotInitialized:
        raise WrappingError(f"the token {place.token} has no PIN of its user yet: set it") from None
    except PKCS11Error as error:
        raise WrappingError(f"the token {place.token} accepts no login: {_named(error)}") from None
    with session:
        yield _key(session, place)


def _token(place: Pkcs11Token) -> Any:
    if not os.path.isfile(place.module):
        raise WrappingError(f"{place.module}: there is no such file: correct sallyport.vault.pkcs11.module")
    try:
        tokens = list(pkcs11.lib(place.module).get_tokens())
    except PKCS11Error as error:
        raise WrappingError(f"{place.module} is no usable PKCS#11 module: {_named(error)}") from None
    found = [each for each in tokens if each.label == place.token and TokenFlag.TOKEN_INITIALIZED in each.flags]
    if not found:
        empty = sum(TokenFlag.TOKEN_INITIALIZED not in each.flags for each in tokens)
        hint = f"; {empty} of its slots have a token that is not initialised" if empty else ""
        raise WrappingError(f"{place.module} has no initialised token {place.token}{hint}")
    if len(found) > 1:
        raise WrappingError(f"{place.module} has {len(found)} tokens {place.token}: give each its own label")
    flags = found[0].flags
    if TokenFlag.USER_PIN_INITIALIZED not in flags:
        raise WrappingError(f"the token {place.token} has no PIN of its user yet: set it")
    if TokenFlag.USER_PIN_LOCKED in flags:
        raise WrappingError(_locked(place))
    if TokenFlag.USER_PIN_FINAL_TRY in flags:
        raise WrappingError(
            f"the token {place.token} locks its user after the next wrong PIN, so no PIN is tried: log in once with "
            "the tool of its vendor"
        )
    return found[0]


def _locked(place: Pkcs11Token) -> str:
    return f"the token {place.token} has locked its user: unlock it with the tool of its vendor"


def _pin(place: Pkcs11Token, descriptor: int) -> str:
    if descriptor < 0:
        raise WrappingError(f"{place.pin_file} (sallyport.vault.pkcs11.pin_file) cannot be opened: there is no PIN")
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or stat.S_IMODE(status.st_mode) & 0o177:
        raise WrappingError(f"{place.pin_file}: must be a regular file with mode 0600 or 0400")
    if status.st_uid not in (0, os.geteuid()):
        raise WrappingError(f"{place.pin_file}: must belong to root")
    try:
        text = os.pread(descriptor, _MOST_PIN + 2, 0).decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        text = ""
    if not text or len(text) > _MOST_PIN or "\0" in text or "\n" in text:
        raise WrappingError(f"{place.pin_file}: must have the PIN in one line, at most {_MOST_PIN} characters")
    return text


def _key(session: Any, place: Pkcs11Token) -> Any:
    wanted = {Attribute.CLASS: ObjectClass.SECRET_KEY, Attribute.LABEL: place.key}
    try:
        found = [each for each, _ in zip(session.get_objects(wanted), range(_MOST_KEYS), strict=False)]
    except PKCS11Error as error:
        raise WrappingError(f"the token {place.token} cannot be searched: {_named(error)}") from None
    if not found:
        raise WrappingError(f"the token {place.token} has no secret key {place.key}: make it, or correct key_label")
    if len(found) > 1:
        raise WrappingError(f"the token {place.token} has {len(found)} secret keys {place.key}: one must remain")
    key = found[0]
    try:
        if key.key_type is not KeyType.AES or key.key_length != KEY_BYTES * 8:
            raise WrappingError(f"the key {place.key} is no AES key of 256 bits")
        if key[Attribute.EXTRACTABLE] or not key[Attribute.SENSITIVE]:
            raise WrappingError(f"the key {place.key} can leave the token: make a sensitive, not extractable one")
        if not key[Attribute.PRIVATE]:
            raise WrappingError(f"the key {place.key} can be used without the PIN: make a private one")
    except PKCS11Error as error:
        raise WrappingError(f"the token does not say what the key {place.key} is: {_named(error)}") from None
    return key


def _named(error: PKCS11Error) -> str:
    said = str(error)[:200]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
