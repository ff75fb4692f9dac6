"""The master key: its sources, and its creation.

- The sources are a file (base64 of 32 bytes, mode 0600, owned by this process's user or root, no symlink, no second
  name), a systemd credential, and the environment. Only the first configured source is used: an invalid file is an
  error.
- `create` never overwrites: a new key would make every sealed record unreadable.
- No message contains a byte of the key.

During a change of the master key there is a second key, its successor: for a file, the file with `.next` after its
name; for a credential or a variable, the one with `-next` or `_NEXT`. Records open with either key. vaultd seals all of
them with the successor, which then replaces the first key.
"""

import base64
import binascii
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from vault.envelope import KEY_BYTES, subkey

CREDENTIAL = "sallyport-master-key"
ENVIRONMENT = "SALLYPORT_MASTER_KEY"
NEXT_ENVIRONMENT = f"{ENVIRONMENT}_NEXT"


class MasterKeyError(Exception):
    """The master key is missing, unsafe or malformed. The message names source and reason, never the key."""


class Keyring:
    """The master key, as derived keys for single purposes. `successor` is the key that will replace it, if any."""

    __slots__ = ("_key", "successor")

    def __init__(self, key: bytes, successor: "Keyring | None" = None) -> None:
        if len(key) != KEY_BYTES:
            raise MasterKeyError("the master key is not 32 bytes")
        self._key = key
        self.successor = successor

    def purpose(self, name: str) -> bytes:
        """Return the 32-byte key for one purpose."""
        return subkey(self._key, name)

    def __repr__(self) -> str:
        return "Keyring(hidden)"

    def __reduce__(self) -> str:
        raise TypeError("a keyring is not pickled")


def load(path: Path | None, environment: Mapping[str, str]) -> Keyring:
    """Read the master key from `path`; without a path, from the systemd credential or the environment.

    Raises:
        MasterKeyError: there is no key, or it is unsafe or malformed.
    """
    if path is not None:
        return _from_files(path, next_file(path))
    if directory := environment.get("CREDENTIALS_DIRECTORY"):
        credential = Path(directory) / CREDENTIAL
        if credential.exists():
            return _from_files(credential, Path(directory) / f"{CREDENTIAL}-next")
    if text := environment.get(ENVIRONMENT):
        following = environment.get(NEXT_ENVIRONMENT)
        successor = None if following is None else Keyring(_from_text(following, NEXT_ENVIRONMENT))
        return Keyring(_from_text(text, ENVIRONMENT), successor)
    raise MasterKeyError("there is no master key: configure a key file, a systemd credential or a variable")


def next_file(path: Path) -> Path:
    """Return the path of the successor of the key in `path`."""
    return path.with_name(f"{path.name}.next")


def replace(path: Path) -> None:
    """Replace the key in `path` by its successor, durably. The former key is lost.

    Raises:
        MasterKeyError: the file cannot be replaced.
    """
    try:
        os.rename(next_file(path), path)
        _sync(path.parent)
    except OSError as error:
        raise MasterKeyError(f"{next_file(path)}: {error.strerror}") from None


def create(path: Path, owner: tuple[int, int] | None = None) -> None:
    """Make a new master key file, durable on return.

    Args:
        owner: (uid, gid) of the process that reads it; needs root.

    Raises:
        MasterKeyError: the file exists, or cannot be made.
    """
    text = base64.b64encode(secrets.token_bytes(KEY_BYTES)) + b"\n"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise MasterKeyError(f"{path} exists; a new master key would make every sealed record unreadable") from None
    except OSError as error:
        raise MasterKeyError(f"{path}: {error.strerror}") from None
    with os.fdopen(fd, "wb") as file:
        if owner is not None:
            os.fchown(fd, *owner)
        file.write(text)
        file.flush()
        os.fsync(fd)
    _sync(path.parent)


def _sync(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _from_files(path: Path, following: Path) -> Keyring:
    successor = Keyring(_decode(_read_private(following), str(following))) if os.path.lexists(following) else None
    return Keyring(_decode(_read_private(path), str(path)), successor)


def _from_text(text: str, variable: str) -> bytes:
    return _decode(text.encode("utf-8", "replace"), f"the variable {variable}")


def _read_private(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise MasterKeyError(f"{path}: {error.strerror}") from None
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise MasterKeyError(f"{path}: not a regular file with one name")
        if status.st_uid not in (os.geteuid(), 0):
            raise MasterKeyError(f"{path}: owned by uid {status.st_uid}, neither this process's user nor root")
        if stat.S_IMODE(status.st_mode) & 0o177:
            raise MasterKeyError(f"{path}: mode {stat.S_IMODE(status.st_mode):04o}, must be 0600 or 0400")
        return file.read(1024)


def _decode(text: bytes, origin: str) -> bytes:
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise MasterKeyError(f"{origin}: not the base64 form of {KEY_BYTES} bytes")
    return key
