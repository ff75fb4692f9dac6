"""The master key: its sources, and its creation.

- The sources are a file (mode 0600, owned by this process's user or root, no symlink, no second name), a systemd
  credential, and the environment. Only the first configured source is used: an invalid file is an error.
- Each of them has the base64 form of 32 bytes, or a wrapped key (`vault.wrapping`), which a token or Vault opens.
- A successor is of the configured source only: a file that appears beside a wrapped key must not replace it by a plain
  one.
- `create` never overwrites: a new key would make every sealed record unreadable. A crash leaves a whole key or none.
- No message contains a byte of the key.

During a change of the master key there is a second key, its successor: for a file, the file with `.next` after its
name; for a credential or a variable, the one with `-next` or `_NEXT`. Records open with either key. vaultd seals all of
them with the successor, which then replaces the first key.
"""

import base64
import binascii
import ctypes
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from vault.envelope import KEY_BYTES, subkey
from vault.wrapping.sources import MOST_BYTES, WRAPPING, KeySource, WrappedKey, WrappingError, Wraps

_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
CREDENTIAL = "sallyport-master-key"
ENVIRONMENT = "SALLYPORT_MASTER_KEY"
NEXT_ENVIRONMENT = f"{ENVIRONMENT}_NEXT"
KEY_FD = "SALLYPORT_MASTER_KEY_FD"
NEXT_KEY_FD = "SALLYPORT_MASTER_KEY_NEXT_FD"
"""The numbers of the descriptors of a credential, which hostd opens because only root can."""


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


def load(
    path: Path | None, environment: Mapping[str, str], wraps: Wraps | None = None, owner: int | None = None
) -> Keyring:
    """Read the master key from `path`; without a path, from the systemd credential or the environment.

    Args:
        wraps: opens wrapped keys; None: no source is configured that could.
        owner: the user that may own the file beside root; None: that of this process.

    Raises:
        MasterKeyError: there is no key, or it is unsafe or malformed, or does not open.
    """
    found, following = _contents(path, environment, owner)
    configured = None if wraps is None or wraps.source not in WRAPPING else wraps.source
    if following is not None and _wrapped_by(following) != configured:
        raise MasterKeyError(_OTHER_SOURCE.format(_wrapped_by(following) or "plain", configured or "plain"))
    wrapped = [each for each in (found, following) if isinstance(each, WrappedKey)]
    opened: dict[str, bytes] = {}
    if wrapped and wraps is None:
        raise MasterKeyError(
            "the master key is wrapped, and the settings name neither a token nor a Vault that opens it"
        )
    if wrapped and wraps is not None:
        try:
            opened = dict(zip((each.id for each in wrapped), wraps.unwrap(wrapped), strict=True))
        except WrappingError as error:
            raise MasterKeyError(f"the master key does not open: {error}") from None
    successor = None if following is None else Keyring(_plain(following, opened))
    return Keyring(_plain(found, opened), successor)


def source_of(path: Path, owner: int | None = None) -> KeySource | None:
    """Return the source by which the key in `path` is wrapped; None for a plain key. `owner` is as for `load`.

    Raises:
        MasterKeyError: there is no key, or it is unsafe or malformed.
    """
    return _wrapped_by(_decode(_read_private(path, owner), str(path)))


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


def create(path: Path, owner: tuple[int, int] | None = None, wraps: Wraps | None = None) -> None:
    """Make a new master key file, durable on return.

    Args:
        owner: (uid, gid) of the process that reads it; needs root.
        wraps: makes a wrapped key, if its source is one of a wrapped key; otherwise the key is plain.

    Raises:
        MasterKeyError: the file exists, or cannot be made.
    """
    exists = f"{path} exists; a new master key would make every sealed record unreadable"
    if os.path.lexists(path):
        raise MasterKeyError(exists)
    text = _new_key(wraps)
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            if owner is not None:
                os.fchown(fd, *owner)
            file.write(text)
            file.flush()
            os.fsync(fd)
        _rename_new(temporary, path)
        _sync(path.parent)
    except FileExistsError:
        raise MasterKeyError(exists) from None
    except OSError as error:
        raise MasterKeyError(f"{path}: {error.strerror}") from None


def _rename_new(old: Path, new: Path) -> None:
    """Rename a file; raise FileExistsError if there is one of the new name."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = _AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), _RENAME_NOREPLACE
    if libc.renameat2(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(new))


def try_out(wraps: Wraps) -> None:
    """Check that a new key could be wrapped; nothing of it is kept.

    Raises:
        MasterKeyError: it could not.
    """
    _new_key(wraps)


def _new_key(wraps: Wraps | None) -> bytes:
    """Return the content of a new key's file."""
    if wraps is None or wraps.source not in WRAPPING:
        return base64.b64encode(secrets.token_bytes(KEY_BYTES)) + b"\n"
    try:
        return wraps.wrap().text
    except WrappingError as error:
        raise MasterKeyError(f"no master key can be made: {error}") from None


def _sync(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


type _Content = bytes | WrappedKey
_OTHER_SOURCE = (
    "the successor of the master key is of the source {}, and sallyport.vault.key_source is {}: set it back until the "
    "change of the key is complete; see 'A new master key' in docs/operations.md"
)


def _contents(path: Path | None, environment: Mapping[str, str], owner: int | None) -> tuple[_Content, _Content | None]:
    """Return the key and its successor as they are stored."""
    if path is not None:
        return _from_files(path, next_file(path), owner)
    if number := environment.get(KEY_FD):
        following = environment.get(NEXT_KEY_FD)
        successor = None if following is None else _from_descriptor(following, f"{CREDENTIAL}-next")
        return _from_descriptor(number, CREDENTIAL), successor
    if directory := environment.get("CREDENTIALS_DIRECTORY"):
        credential = Path(directory) / CREDENTIAL
        if credential.exists():
            return _from_files(credential, Path(directory) / f"{CREDENTIAL}-next")
    if text := environment.get(ENVIRONMENT):
        following = environment.get(NEXT_ENVIRONMENT)
        successor = None if following is None else _from_text(following, NEXT_ENVIRONMENT)
        return _from_text(text, ENVIRONMENT), successor
    raise MasterKeyError("there is no master key: configure a key file, a systemd credential or a variable")


def _wrapped_by(content: _Content) -> KeySource | None:
    return KeySource(content.source) if isinstance(content, WrappedKey) else None


def _plain(content: _Content, opened: Mapping[str, bytes]) -> bytes:
    return opened[content.id] if isinstance(content, WrappedKey) else content


def _from_files(path: Path, following: Path, owner: int | None = None) -> tuple[_Content, _Content | None]:
    successor = _decode(_read_private(following, owner), str(following)) if os.path.lexists(following) else None
    return _decode(_read_private(path, owner), str(path)), successor


def _from_text(text: str, variable: str) -> _Content:
    return _decode(text.encode("utf-8", "replace"), f"the variable {variable}")


def _from_descriptor(number: str, name: str) -> _Content:
    place = f"the credential {name}"
    try:
        fd = os.dup(int(number))
        os.lseek(fd, 0, os.SEEK_SET)
    except (OSError, ValueError):
        raise MasterKeyError(f"{place} was not handed over") from None
    return _decode(_read_checked(fd, place), place)


def _read_private(path: Path, owner: int | None) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise MasterKeyError(f"{path}: {error.strerror}") from None
    return _read_checked(fd, str(path), owner)


def _read_checked(fd: int, place: str, owner: int | None = None) -> bytes:
    """Read a private file, and close it."""
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise MasterKeyError(f"{place}: not a regular file with one name")
        if status.st_uid not in (os.geteuid() if owner is None else owner, 0):
            raise MasterKeyError(f"{place}: owned by uid {status.st_uid}, neither this process's user nor root")
        if stat.S_IMODE(status.st_mode) & 0o177:
            raise MasterKeyError(f"{place}: mode {stat.S_IMODE(status.st_mode):04o}, must be 0600 or 0400")
        return file.read(MOST_BYTES + 1)


def _decode(text: bytes, origin: str) -> _Content:
    if text.startswith(b"{"):
        try:
            return WrappedKey.parse(text)
        except ValueError:
            raise MasterKeyError(f"{origin}: changed, or not a wrapped key of this release") from None
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise MasterKeyError(f"{origin}: not the base64 form of {KEY_BYTES} bytes")
    return key
