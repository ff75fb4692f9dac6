"""Small sealed records in one directory: a name, some metadata, a body; one file each, and an index of them.

    magic (4 bytes) | length of the sealed metadata (4 bytes) | sealed metadata | sealed body

- Both parts are sealed for this directory's purpose and the record's name; the body also for its metadata. A record
  that was changed, renamed or combined from two others does not open.
- The index is sealed, too. It has the digest of each record's file, and a counter that grows with each change. A record
  that is not in the index, or has another digest, is an older copy and does not open. An index that is older than the
  head (`vault.head`) is refused.
- Metadata can be read without opening the body.
- A change takes effect with the index: the new file is written beside the old one, the index is replaced, and the new
  file gets the old one's name. After a crash at any step the record is complete, and either the old or the new one.
- Files are opened relative to the directory's descriptor, and never through a symlink. The directory must belong to
  this process's user, and no other user may enter it.

The digests are kept in memory. All methods block.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from vault.envelope import SALT_BYTES, EnvelopeError, seal, unseal
from vault.head import StoreHead
from vault.keyring import Keyring

MAX_RECORD = 32 * 1024 * 1024
_MAGIC = b"SPV1"
_LENGTH = struct.Struct("!I")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}", re.ASCII)
_SUFFIX = ".sealed"
_INDEX = ".index"
_TEMPORARY = ".new-"
_PREFIX = "="  # so that a record is neither a hidden nor a temporary file
_NEXT = "+"  # the prefix of a new record until the index has it


class SealedRecordError(Exception):
    """A record, or the index, differs from the last one that was written with this key."""


@dataclass(frozen=True, slots=True)
class _Index:
    """The digests of all records by name, after change number `counter`."""

    counter: int
    digests: dict[str, str]

    def to_bytes(self) -> bytes:
        return json.dumps({"counter": self.counter, "digests": self.digests}, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "_Index":
        document = json.loads(data)
        return cls(document["counter"], document["digests"])


class SealedDirectory:
    """The records of one purpose."""

    def __init__(
        self, path: Path, keyring: Keyring, purpose: str, head: StoreHead | None = None, *, adopt: bool = False
    ) -> None:
        """Open or create the directory, and complete or undo a change that a crash has interrupted.

        Args:
            head: the head with the number of the last change.
            adopt: permit a directory of an older version without an index. Its records are then accepted unchanged,
                and the caller calls `adopt` to write an index.

        Raises:
            OSError: the directory cannot be made or opened, or is a symlink.
            PermissionError: it belongs to another user, or other users may enter it.
            SealedRecordError: the index does not open, or there are records without one.
            HeadError: the index is older than `head`.
        """
        self._purpose = purpose
        self._head = head or StoreHead()
        path.mkdir(mode=0o700, exist_ok=True)
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(self._fd)
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise PermissionError(f"{path} must belong to uid {os.geteuid()} alone, mode 0700")
            self._key, self._index = self._read_index(keyring, adopt)
            self._head.check(purpose, self._index.counter)
            self._recover()
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        """Close the directory's descriptor."""
        os.close(self._fd)

    def adopt(self) -> None:
        """Write the index of a directory without one; see `__init__`."""
        if not self._index.counter and self._index.digests:
            self._commit(self._key, self._index.digests)

    @property
    def indexed(self) -> bool:
        """Whether the index is on disk."""
        return self._index.counter > 0

    def names(self) -> list[str]:
        """Return the names of all records, sorted, also of those that do not open."""
        return sorted({*self._entries(_PREFIX), *self._index.digests})

    def exists(self, name: str) -> bool:
        """Whether there is a record with this name."""
        if name in self._index.digests:
            return True
        try:
            os.stat(_file(name), dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def write(self, name: str, metadata: bytes, body: bytes) -> None:
        """Store or replace a record; durable on return.

        After an OSError the former record is unchanged. The exception is an error in the last step: then the record is
        the new one, and does not open until the directory is opened again.
        """
        digest = self._prepare(self._key, name, metadata, body)
        os.fsync(self._fd)
        self._commit(self._key, self._index.digests | {name: digest})
        os.rename(_file(name, _NEXT), _file(name), src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def read_metadata(self, name: str) -> bytes:
        """Return the metadata of a record without opening its body.

        Raises:
            FileNotFoundError: there is no such record.
            SealedRecordError: the metadata does not open.
        """
        sealed_metadata, _ = self._load(name)
        return self._open(name, b"metadata", sealed_metadata)

    def read(self, name: str) -> tuple[bytes, bytes]:
        """Return metadata and body of a record. Raises like `read_metadata`."""
        sealed_metadata, sealed_body = self._load(name)
        metadata = self._open(name, b"metadata", sealed_metadata)
        return metadata, self._open(name, _digest(sealed_metadata), sealed_body)

    def remove(self, name: str) -> bool:
        """Delete a record, durably. False if there was none."""
        try:
            os.unlink(_file(name), dir_fd=self._fd)
            found = True
        except FileNotFoundError:
            found = False
        if name in self._index.digests:
            self._commit(self._key, {key: value for key, value in self._index.digests.items() if key != name})
            return True
        os.fsync(self._fd)
        return found

    def reseal(self, keyring: Keyring) -> None:
        """Seal every record with another key, all or none; durable on return.

        Records that do not open stay unchanged. If the key is the present one, nothing is done.
        """
        key = keyring.purpose(self._purpose)
        if key == self._key:
            return
        digests: dict[str, str] = {}
        for name in self._index.digests:
            try:
                digests[name] = self._prepare(key, name, *self.read(name))
            except SealedRecordError:
                continue
        os.fsync(self._fd)
        self._commit(key, digests)
        for name in digests:
            os.rename(_file(name, _NEXT), _file(name), src_dir_fd=self._fd, dst_dir_fd=self._fd)
        os.fsync(self._fd)

    def _prepare(self, key: bytes, name: str, metadata: bytes, body: bytes) -> str:
        """Write the new file of a record; return its digest."""
        sealed_metadata = seal(key, self._context(name, b"metadata"), metadata, salt=_salt())
        sealed_body = seal(key, self._context(name, _digest(sealed_metadata)), body, salt=_salt())
        content = _MAGIC + _LENGTH.pack(len(sealed_metadata)) + sealed_metadata + sealed_body
        self._put(_file(name, _NEXT), content)
        return hashlib.sha256(content).hexdigest()

    def _commit(self, key: bytes, digests: dict[str, str]) -> None:
        """Replace the index. The change takes effect with this."""
        index = _Index(self._index.counter + 1, digests)
        temporary = _TEMPORARY + secrets.token_hex(8)
        try:
            self._put(temporary, seal(key, self._context("", b"index"), index.to_bytes(), salt=_salt()))
            os.rename(temporary, _INDEX, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            self._discard(temporary)
            raise
        os.fsync(self._fd)
        self._key, self._index = key, index
        self._head.record(self._purpose, index.counter)

    def _put(self, file: str, content: bytes) -> None:
        self._discard(file)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(file, flags, 0o600, dir_fd=self._fd)
        try:
            with os.fdopen(fd, "wb") as target:
                target.write(content)
                target.flush()
                os.fsync(fd)
        except BaseException:
            self._discard(file)
            raise

    def _discard(self, file: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file, dir_fd=self._fd)

    def _read_index(self, keyring: Keyring, adopt: bool) -> tuple[bytes, _Index]:
        keys = [each.purpose(self._purpose) for each in (keyring, keyring.successor) if each is not None]
        try:
            sealed = self._read_file(_INDEX)
        except FileNotFoundError:
            present = self._entries(_PREFIX)
            if not present:
                return keys[0], _Index(0, {})
            if not adopt:
                raise SealedRecordError(f"the index of the vault's {self._purpose} is missing") from None
            return keys[0], _Index(0, {name: self._file_digest(_file(name)) for name in present})
        for key in keys:
            try:
                return key, _Index.from_bytes(unseal(key, self._context("", b"index"), sealed))
            except EnvelopeError:
                continue
        raise SealedRecordError(
            f"the index of the vault's {self._purpose} does not open: changed, or sealed with another master key"
        )

    def _recover(self) -> None:
        for entry in os.listdir(self._fd):
            if entry.startswith(_TEMPORARY):
                os.unlink(entry, dir_fd=self._fd)
        for name in self._entries(_NEXT):
            file = _file(name, _NEXT)
            if self._index.digests.get(name) == self._file_digest(file):
                os.rename(file, _file(name), src_dir_fd=self._fd, dst_dir_fd=self._fd)
            else:
                os.unlink(file, dir_fd=self._fd)
        os.fsync(self._fd)

    def _entries(self, prefix: str) -> list[str]:
        entries = [
            entry.removeprefix(prefix).removesuffix(_SUFFIX)
            for entry in os.listdir(self._fd)
            if entry.startswith(prefix) and entry.endswith(_SUFFIX)
        ]
        return [name for name in entries if _NAME.fullmatch(name)]

    def _file_digest(self, file: str) -> str:
        try:
            return hashlib.sha256(self._read_file(file)).hexdigest()
        except SealedRecordError:
            return ""

    def _load(self, name: str) -> tuple[bytes, bytes]:
        expected = self._index.digests.get(name)
        try:
            content = self._read_file(_file(name))
        except FileNotFoundError:
            if expected is None:
                raise
            raise SealedRecordError("a record is missing") from None
        if hashlib.sha256(content).hexdigest() != expected:
            raise SealedRecordError(
                "a record differs from the last one that was written: it is an older copy, or was changed"
            )
        start = len(_MAGIC) + _LENGTH.size
        if len(content) < start or not content.startswith(_MAGIC):
            raise SealedRecordError("a record has no header")
        end = start + _LENGTH.unpack_from(content, len(_MAGIC))[0]
        return content[start:end], content[end:]

    def _read_file(self, file: str) -> bytes:
        try:
            fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd)
        except FileNotFoundError:
            raise
        except OSError:  # for example a symlink
            raise SealedRecordError("a record is no regular file") from None
        with os.fdopen(fd, "rb") as source:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_RECORD:
                raise SealedRecordError("a record is no regular file, or has an impossible size")
            return source.read(MAX_RECORD)

    def _open(self, name: str, part: bytes, envelope: bytes) -> bytes:
        try:
            return unseal(self._key, self._context(name, part), envelope)
        except EnvelopeError:
            raise SealedRecordError("a record does not open: changed, or sealed with another key") from None

    def _context(self, name: str, part: bytes) -> bytes:
        return b"\0".join((self._purpose.encode(), name.encode(), part))


def _file(name: str, prefix: str = _PREFIX) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("not a record's name")
    return f"{prefix}{name}{_SUFFIX}"


def _digest(sealed: bytes) -> bytes:
    return b"body" + hashlib.sha256(sealed).digest()


def _salt() -> bytes:
    return secrets.token_bytes(SALT_BYTES)
