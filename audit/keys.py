"""The log's signing key: made on first use, beside the log.

- `keys/signing.pem` is readable by auditd alone (0600 in a 0700 directory); `keys/public.pem` is for verifiers.
- A log directory that already has records but no key is an error: a new key would disown them.
"""

import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

PUBLIC_NAME = "keys/public.pem"
_SIGNING_NAME = "keys/signing.pem"


class KeyUnusable(Exception):
    """A key file is missing or not an Ed25519 key."""


def load_or_create(directory: Path, *, create: bool) -> Ed25519PrivateKey:
    """Return the signing key of the log in `directory`; with `create`, make it if there is none.

    Raises:
        KeyUnusable: there is none, or it cannot be used.
        OSError: it cannot be read or written.
    """
    path = directory / _SIGNING_NAME
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except FileNotFoundError:
        if not create:
            raise KeyUnusable(f"{path} is missing, although there are records signed by it") from None
        key = Ed25519PrivateKey.generate()
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomically(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    except ValueError as error:
        raise KeyUnusable(f"{path} is not a key") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyUnusable(f"{path} is not an Ed25519 key")
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    public_path = directory / PUBLIC_NAME
    if not public_path.exists() or public_path.read_bytes() != public:
        write_atomically(public_path, public, 0o644)
    return key


def load_public(path: Path) -> Ed25519PublicKey:
    """Return the public key in `path`.

    Raises:
        KeyUnusable: it is missing or not an Ed25519 public key.
        PermissionError: it may not be read.
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


def write_atomically(path: Path, data: bytes, mode: int) -> None:
    """Replace `path` by `data`, on disk before its name is.

    Raises:
        OSError: it could not; what was there is still there.
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
    """Put the names in a directory on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
