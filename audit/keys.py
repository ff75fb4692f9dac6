"""The log's keys on disk: one private key at a time, replaced and destroyed at the end of its epoch.

    keys/signing.key    the private key in use, 32 bytes       keys/public.pem    the first public key: the identity
    keys/next.key       the one that will replace it           keys/epochs.jsonl  certificates (`audit.ring`)

- Only auditd can read private keys. In a later epoch auditd has no key of an earlier one: the file was overwritten
  before the next key took its name, and the buffer in memory was wiped.
- An epoch ends in these steps, each on disk before the next: `next.key`; its certificate; the checkpoint in the log,
  which the old key signs last; `signing.key` overwritten; `next.key` renamed to it. After a crash `load` continues: a
  next key with a certificate is used, one without is destroyed.
- A log of the former format has one key in `keys/signing.pem`. It is the key of the first epoch, which ends at the
  next `open`.
- A log directory with records but without a key is an error: a new key could not verify them.

A file system or a device may keep overwritten blocks; auditd cannot read those.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from audit.ring import Ring, certificate, read_ring

PUBLIC_NAME: Final = "keys/public.pem"
EPOCHS_NAME: Final = "keys/epochs.jsonl"
_SIGNING_NAME = "keys/signing.key"
_NEXT_NAME = "keys/next.key"
_FORMER_NAME = "keys/signing.pem"
_LENGTH = 32


class KeyUnusable(Exception):
    """A key file is missing or not an Ed25519 key."""


class Keys:
    """The keys of the open log. `prepare` and `destroy_former` may run in another thread, one at a time."""

    def __init__(
        self, directory: Path, key: Ed25519PrivateKey, ring: Ring, following: Ed25519PrivateKey | None
    ) -> None:
        """Sign with `key`; `following` is the certified next key. Use `load` to make an object."""
        self._directory = directory
        self.key = key
        self.ring = ring
        self.following = following
        self._destroy = False

    @classmethod
    def load(cls, directory: Path, *, create: bool) -> "Keys":
        """Return the keys of the log in `directory`; with `create`, make missing ones.

        Raises:
            KeyUnusable: there are no keys, or they are invalid.
            OSError: the files cannot be read or written.
        """
        key = _read(directory / _SIGNING_NAME) or _read_former(directory / _FORMER_NAME)
        following = _read(directory / _NEXT_NAME)
        if key is None and following is not None and not create:  # the former key is destroyed
            (directory / _NEXT_NAME).replace(directory / _SIGNING_NAME)
            sync_directory(directory / "keys")
            key, following = following, None
        if key is None and not create:
            raise KeyUnusable(f"{directory / _SIGNING_NAME} is missing, although there are records signed by it")
        if key is None:
            (directory / "keys").mkdir(mode=0o700, exist_ok=True)
            key = _create(directory / _SIGNING_NAME)
        if create and not (directory / PUBLIC_NAME).exists():
            public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
            write_atomically(directory / PUBLIC_NAME, public, 0o644)
        ring = _read_epochs(directory)
        last = ring.keys[-1].public_bytes_raw()
        if following is not None and following.public_key().public_bytes_raw() != last:
            _wipe(directory / _NEXT_NAME)
            following = None
        keys = cls(directory, key, ring, following)
        if (
            ring.keys[-1] if following is None else ring.keys[-2]
        ).public_bytes_raw() != key.public_key().public_bytes_raw():
            raise KeyUnusable(f"{directory / _SIGNING_NAME} is not the key that keys/epochs.jsonl names")
        if (directory / _SIGNING_NAME).exists():
            _wipe(directory / _FORMER_NAME)
        return keys

    def resume_at(self, epoch: int) -> bool:
        """Use the key of the epoch of the log's last line: a crash may have interrupted the change of keys.

        Returns False if that is neither the key in use nor the following one.
        """
        if epoch == len(self.ring.keys) - 1 and self.following is not None:
            self.switch()
            return True
        return epoch == len(self.ring.keys) - (1 if self.following is None else 2)

    @property
    def switched(self) -> bool:
        """Whether a former key must still be destroyed."""
        return self._destroy

    def prepare(self) -> None:
        """Make the key of the next epoch and its certificate, unless they exist.

        Raises:
            OSError: they could not be written; the key in use does not change.
        """
        if self._destroy:
            self.destroy_former()
        if self.following is not None:
            return
        _wipe(self._directory / _NEXT_NAME)
        following = _create(self._directory / _NEXT_NAME)
        _append(self._directory / EPOCHS_NAME, certificate(self.key, following.public_key()))
        self.ring.add(following.public_key())
        self.following = following

    def switch(self) -> None:
        """Sign with the key of the next epoch from now on. The former key has certified it in the log."""
        if self.following is None:
            raise ValueError("no key was prepared")
        self.key, self.following = self.following, None
        self._destroy = True

    def destroy_former(self) -> None:
        """Destroy the former private key. The checkpoint with the next key must be on disk.

        Raises:
            OSError: the key may still exist; try again.
        """
        if not self._destroy:
            return
        for name in (_SIGNING_NAME, _FORMER_NAME):
            _overwrite(self._directory / name)
        (self._directory / _NEXT_NAME).replace(self._directory / _SIGNING_NAME)
        sync_directory(self._directory / "keys")
        _wipe(self._directory / _FORMER_NAME)
        self._destroy = False


def load_public(path: Path) -> Ed25519PublicKey:
    """Return the public key in `path`.

    Raises:
        KeyUnusable: the file is missing, or no Ed25519 public key.
        PermissionError: the process may not read it.
    """
    try:
        key = load_pem_public_key(path.read_bytes())
    except PermissionError:
        raise
    except (OSError, ValueError) as error:
        raise KeyUnusable(f"{path} is not a readable public key") from error
    if not isinstance(key, Ed25519PublicKey):
        raise KeyUnusable(f"{path} is not an Ed25519 public key")
    return key


def _read_epochs(directory: Path) -> Ring:
    path = directory / EPOCHS_NAME
    data = path.read_bytes() if path.exists() else b""
    whole = data.rfind(b"\n") + 1
    if whole != len(data):  # an incomplete certificate: its key was never used
        os.truncate(path, whole)
    ring, problem = read_ring(load_public(directory / PUBLIC_NAME), data, check=False)
    if problem is not None:
        raise KeyUnusable(problem)
    return ring


def _read(path: Path) -> Ed25519PrivateKey | None:
    """Return the private key in `path`. None if the file is missing, incomplete or overwritten."""
    seed = bytearray(_LENGTH)
    try:
        with open(path, "rb", buffering=0) as file:
            length = file.readinto(seed)
        return Ed25519PrivateKey.from_private_bytes(seed) if length == _LENGTH and any(seed) else None
    except FileNotFoundError:
        return None
    finally:
        seed[:] = bytes(_LENGTH)


def _read_former(path: Path) -> Ed25519PrivateKey | None:
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except FileNotFoundError:
        return None
    except ValueError:
        if any(path.read_bytes()):
            raise KeyUnusable(f"{path} is not a key") from None
        return None
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyUnusable(f"{path} is not an Ed25519 key")
    return key


def _create(path: Path) -> Ed25519PrivateKey:
    """Make a private key and write it to disk. The buffer of its bytes is wiped."""
    seed = bytearray(_LENGTH)
    try:
        with open("/dev/urandom", "rb", buffering=0) as source:
            if source.readinto(seed) != _LENGTH:
                raise OSError("the kernel returned too few random bytes")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.write(fd, seed) != _LENGTH:
                raise OSError("short write")
            os.fdatasync(fd)
        finally:
            os.close(fd)
        sync_directory(path.parent)
        return Ed25519PrivateKey.from_private_bytes(seed)
    finally:
        seed[:] = bytes(_LENGTH)


def _append(path: Path, line: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    size = os.fstat(fd).st_size
    try:
        if os.write(fd, line) != len(line):
            raise OSError("short write")
        os.fdatasync(fd)
    except OSError:
        with suppress(OSError):
            os.ftruncate(fd, size)
        raise
    finally:
        os.close(fd)
    sync_directory(path.parent)


def _overwrite(path: Path) -> None:
    with suppress(FileNotFoundError), open(path, "r+b", buffering=0) as file:
        file.write(bytes(os.fstat(file.fileno()).st_size))
        os.fdatasync(file.fileno())


def _wipe(path: Path) -> None:
    if path.exists():
        _overwrite(path)
        path.unlink()
        sync_directory(path.parent)


def write_atomically(path: Path, data: bytes, mode: int) -> None:
    """Replace the file at `path` atomically by `data`.

    Raises:
        OSError: the write failed; the old file is unchanged.
    """
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Sync a directory to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
