"""Each source of the master key, for the same cases over all of them."""

import os
import secrets
import shutil
import stat
from base64 import b64encode
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.vault.tokens import ready
from vault.keyring import (
    CREDENTIAL,
    ENVIRONMENT,
    KEY_FD,
    NEXT_ENVIRONMENT,
    NEXT_KEY_FD,
    Keyring,
    create,
    load,
    next_file,
    replace,
)
from vault.stores.hvac.config import Auth, HashicorpServer
from vault.wrapping.asking import Wrapping
from vault.wrapping.sources import KeySource, TransitKey, WrappingConfig

POLICY = """
path "transit/encrypt/master" { capabilities = ["update"] }
path "transit/decrypt/master" { capabilities = ["update"] }
"""


class Source:
    """A key in a file, and the actions that are different for other sources."""

    wraps = False

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state = directory / "vault"
        self.state.mkdir(mode=0o700)
        self.file = directory / "master-key"
        self.config = WrappingConfig()
        self._opened = ExitStack()

    def make(self) -> None:
        """Make the key."""
        create(self.file, None, self.wrapping())

    def follow(self) -> None:
        """Make the successor."""
        create(next_file(self.file), None, self.wrapping())

    def succeed(self) -> None:
        """Put the successor in the place of the key."""
        replace(self.file)

    def load(self) -> Keyring:
        """Read the key, as vaultd does at a start."""
        return load(self.file, {}, self.wrapping())

    def wrapping(self) -> Wrapping:
        """Return the configured sources with what a process gets that uses them."""
        return Wrapping(self.config, self.state, self._credentials())

    def stored(self) -> bytes:
        """Return what is stored in the place of the key."""
        return self.file.read_bytes()

    def store(self, content: bytes) -> None:
        """Store something in the place of the key."""
        self.file.write_bytes(content)

    def lose(self) -> None:
        """Take away what a copy of the files does not have."""

    def close(self) -> None:
        """Close the descriptors."""
        self._opened.close()

    def _credentials(self) -> dict[KeySource, int]:
        return {}

    def _open(self, path: Path) -> int:
        fd = os.open(path, os.O_RDONLY)
        self._opened.callback(os.close, fd)
        return fd


class Credential(Source):
    """The credential that hostd opens."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.file = directory / CREDENTIAL

    def load(self) -> Keyring:
        environment = {KEY_FD: str(self._open(self.file))}
        if (following := next_file(self.file)).exists():
            environment[NEXT_KEY_FD] = str(self._open(following))
        return load(None, environment, self.wrapping())


class Variable(Source):
    """The variable of vaultd's environment."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._environment: dict[str, str] = {}

    def make(self) -> None:
        self._environment = {ENVIRONMENT: _fresh()}

    def follow(self) -> None:
        self._environment[NEXT_ENVIRONMENT] = _fresh()

    def succeed(self) -> None:
        self._environment = {ENVIRONMENT: self._environment[NEXT_ENVIRONMENT]}

    def load(self) -> Keyring:
        environment: Mapping[str, str] = dict(self._environment)
        return load(None, environment, self.wrapping())

    def stored(self) -> bytes:
        return self._environment[ENVIRONMENT].encode()

    def store(self, content: bytes) -> None:
        self._environment[ENVIRONMENT] = content.decode()


class Token(Source):
    """A key in SoftHSM wraps the master key."""

    wraps = True

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.token = ready(directory / "token")
        self.config = WrappingConfig(KeySource.PKCS11, self.token.place)

    def lose(self) -> None:
        self.token.remove()

    def _credentials(self) -> dict[KeySource, int]:
        return {KeySource.PKCS11: self._open(self.token.pin_file)}


class Transit(Source):
    """A key of Vault's transit engine wraps the master key."""

    wraps = True

    def __init__(self, directory: Path, server: Any) -> None:
        super().__init__(directory)
        self.server = server
        self.credential = directory / "secret-id"
        mounts = server.ask("GET", "sys/mounts")["data"]
        if "transit/" not in mounts:
            server.ask("POST", "sys/mounts/transit", type="transit")
        self.drop()
        server.ask("POST", "transit/keys/master")
        server.ask("PUT", "sys/policies/acl/master-key", policy=POLICY)
        role, secret = server.app_role("master-key", token_policies=["master-key"])
        self.credential.write_text(secret)
        place = HashicorpServer(server.address, str(server.authority.path), "", Auth.APPROLE, "", role, ())
        self.config = WrappingConfig(KeySource.TRANSIT, None, TransitKey(place, "transit", "master"))

    def drop(self) -> None:
        """Delete the key, if there is one."""
        if self.server.status("GET", "transit/keys/master") == 200:
            self.server.ask("POST", "transit/keys/master/config", deletion_allowed=True)
            self.server.ask("DELETE", "transit/keys/master")

    def lose(self) -> None:
        self.drop()

    def _credentials(self) -> dict[KeySource, int]:
        return {KeySource.TRANSIT: self._open(self.credential)}


def _fresh() -> str:
    return b64encode(secrets.token_bytes(32)).decode()


def copied(source: Path, target: Path) -> None:
    """Copy a directory, with the modes of its files."""
    shutil.copytree(source, target)
    assert stat.S_IMODE(source.stat().st_mode) == stat.S_IMODE(target.stat().st_mode)
