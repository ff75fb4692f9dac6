"""Small sealed records in one directory: a name, some metadata, a body; one file each.

    magic (4 bytes) | length of the sealed metadata (4 bytes) | sealed metadata | sealed body

- Both parts are sealed for this directory's purpose and the record's name; the body also for its metadata. A record
  that was changed, renamed, or patched together from two does not open.
- Metadata can be read without opening the body.
- A write is whole or absent after a crash: temporary file, fsync, rename, fsync of the directory.
- Files are opened relative to the directory's own descriptor and never through a symlink; the directory must belong to
  this process's user and nobody else may enter it.

It keeps nothing in memory and knows nothing of what it stores. Blocking.
"""

import hashlib
import os
import re
import secrets
import stat
import struct
from pathlib import Path

from vault.envelope import SALT_BYTES, EnvelopeError, seal, unseal
from vault.keyring import Keyring

MAX_RECORD = 32 * 1024 * 1024
_MAGIC = b"SPV1"
_LENGTH = struct.Struct("!I")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}", re.ASCII)
_SUFFIX = ".sealed"
_TEMPORARY = ".new-"
_PREFIX = "="  # so that no record is a hidden file, and none can be taken for a temporary one


class SealedRecordError(Exception):
    """A record is not what was written under this name with this key."""


class SealedDirectory:
    """The records of one purpose."""

    def __init__(self, path: Path, keyring: Keyring, purpose: str) -> None:
        """Open the directory, making it if absent; remove what a crash left half written.

        Raises:
            OSError: it cannot be made or opened, or is a symlink.
            PermissionError: it belongs to somebody else, or others may enter it.
        """
        self._key = keyring.purpose(purpose)
        self._purpose = purpose
        path.mkdir(mode=0o700, exist_ok=True)
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        status = os.fstat(self._fd)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            os.close(self._fd)
            raise PermissionError(f"{path} must belong to uid {os.geteuid()} alone, mode 0700")
        for entry in os.listdir(self._fd):
            if entry.startswith(_TEMPORARY):
                os.unlink(entry, dir_fd=self._fd)

    def close(self) -> None:
        """Give the directory's descriptor back."""
        os.close(self._fd)

    def names(self) -> list[str]:
        """The names of all records, sorted; whether each opens is not known."""
        entries = [
            entry.removeprefix(_PREFIX).removesuffix(_SUFFIX)
            for entry in os.listdir(self._fd)
            if entry.startswith(_PREFIX) and entry.endswith(_SUFFIX)
        ]
        return sorted(name for name in entries if _NAME.fullmatch(name))

    def exists(self, name: str) -> bool:
        """Whether anything is stored under `name`."""
        try:
            os.stat(_file(name), dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def write(self, name: str, metadata: bytes, body: bytes) -> None:
        """Store or replace a record; durable on return. On an OSError the former record is still there."""
        sealed_metadata = seal(self._key, self._context(name, b"metadata"), metadata, salt=_salt())
        sealed_body = seal(self._key, self._context(name, _digest(sealed_metadata)), body, salt=_salt())
        content = _MAGIC + _LENGTH.pack(len(sealed_metadata)) + sealed_metadata + sealed_body
        temporary = _TEMPORARY + secrets.token_hex(8)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=self._fd)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(fd)
            os.rename(temporary, _file(name), src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            os.unlink(temporary, dir_fd=self._fd)
            raise
        os.fsync(self._fd)

    def read_metadata(self, name: str) -> bytes:
        """The metadata of a record, its body unopened.

        Raises:
            FileNotFoundError: there is none.
            SealedRecordError: it does not open.
        """
        sealed_metadata, _ = self._load(name)
        return self._open(name, b"metadata", sealed_metadata)

    def read(self, name: str) -> tuple[bytes, bytes]:
        """Metadata and body of a record; raises as `read_metadata`."""
        sealed_metadata, sealed_body = self._load(name)
        metadata = self._open(name, b"metadata", sealed_metadata)
        return metadata, self._open(name, _digest(sealed_metadata), sealed_body)

    def remove(self, name: str) -> bool:
        """Delete a record, durably; False if there was none."""
        try:
            os.unlink(_file(name), dir_fd=self._fd)
        except FileNotFoundError:
            return False
        os.fsync(self._fd)
        return True

    def _load(self, name: str) -> tuple[bytes, bytes]:
        try:
            fd = os.open(_file(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd)
        except FileNotFoundError:
            raise
        except OSError:  # a symlink, say
            raise SealedRecordError("a record is no regular file") from None
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_RECORD:
                raise SealedRecordError("a record is no regular file of a sensible size")
            content = file.read(MAX_RECORD)
        start = len(_MAGIC) + _LENGTH.size
        if len(content) < start or not content.startswith(_MAGIC):
            raise SealedRecordError("a record has no header")
        end = start + _LENGTH.unpack_from(content, len(_MAGIC))[0]
        return content[start:end], content[end:]

    def _open(self, name: str, part: bytes, envelope: bytes) -> bytes:
        try:
            return unseal(self._key, self._context(name, part), envelope)
        except EnvelopeError:
            raise SealedRecordError("a record does not open: changed, or sealed with another key") from None

    def _context(self, name: str, part: bytes) -> bytes:
        return b"\0".join((self._purpose.encode(), name.encode(), part))


def _file(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("not a record's name")
    return f"{_PREFIX}{name}{_SUFFIX}"


def _digest(sealed: bytes) -> bytes:
    return b"body" + hashlib.sha256(sealed).digest()


def _salt() -> bytes:
    return secrets.token_bytes(SALT_BYTES)
