"""Where the master key comes from, the form of a wrapped key, and the messages to and from the unwrapper. Pure.

A wrapped key is one JSON object in the place of the plain key:

    {"id": 32 hexadecimal digits, "source": "pkcs11" or "transit", "version": 1, "wrapped": text of that source}

- `id` is random. It is part of `context`, which token and transit engine authenticate with the key. So a ciphertext
  that the same wrapping key made for another purpose, or for another master key, does not open here.
- Nothing in it is secret without the token or Vault.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from vault.stores.hvac.config import HashicorpServer
from wire import codec

VERSION: Final = 1
MOST_BYTES: Final = 4096
"""A wrapped key in a file."""
_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)


class KeySource(StrEnum):
    """Where a master key is kept. With the last two, the file has only a wrapped key."""

    FILE = "file"
    CREDENTIAL = "credential"
    PKCS11 = "pkcs11"
    TRANSIT = "transit"


WRAPPING: Final = (KeySource.PKCS11, KeySource.TRANSIT)
DESCRIPTORS: Final = {KeySource.PKCS11: "SALLYPORT_PKCS11_PIN_FD", KeySource.TRANSIT: "SALLYPORT_TRANSIT_CREDENTIAL_FD"}
"""The variables in which vaultd gets the numbers of the descriptors that hostd has opened for its unwrapper."""


class WrappingError(Exception):
    """The key cannot be wrapped or unwrapped. The message says why, and has neither key nor PIN."""


@dataclass(frozen=True, slots=True)
class WrappedKey:
    """A wrapped master key."""

    version: int
    source: str
    id: str
    wrapped: str

    def __post_init__(self) -> None:
        """Check the values."""
        if self.version != VERSION:
            raise ValueError("a version that this release does not know")
        if self.source not in WRAPPING or not _ID.fullmatch(self.id) or not 0 < len(self.wrapped) <= MOST_BYTES // 2:
            raise ValueError("not a wrapped key")

    @property
    def context(self) -> bytes:
        """What is authenticated with the key."""
        return f"sallyport/master-key/{self.version}/{self.source}/{self.id}".encode("ascii")

    @property
    def text(self) -> bytes:
        """The content of the file."""
        return codec.canonical_json(codec.encode(self)) + b"\n"

    @classmethod
    def parse(cls, text: bytes) -> "WrappedKey":
        """Read `text`'s form.

        Raises:
            ValueError: it is no wrapped key.
        """
        if len(text) > MOST_BYTES:
            raise ValueError("too long for a wrapped key")
        try:
            return codec.decode(cls, json.loads(text))
        except RecursionError:
            raise ValueError("not a wrapped key") from None


@dataclass(frozen=True, slots=True)
class Pkcs11Token:
    """A key in a token.

    Attributes:
        module: the vendor's shared object.
        environment: variables that the module needs.
        pin_file: for messages; the unwrapper gets a descriptor.
    """

    module: str
    token: str
    key: str
    pin_file: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TransitKey:
    """A key of a transit engine, which is mounted at `engine`."""

    server: HashicorpServer
    engine: str
    key: str


@dataclass(frozen=True, slots=True)
class WrappingConfig:
    """What the operator's settings say.

    Attributes:
        source: where a new master key is kept. A key of another configured source still opens.
    """

    source: KeySource = KeySource.FILE
    pkcs11: Pkcs11Token | None = None
    transit: TransitKey | None = None

    def has(self, source: str) -> bool:
        """Whether a key that `source` has wrapped can be opened."""
        return {KeySource.PKCS11: self.pkcs11, KeySource.TRANSIT: self.transit}.get(KeySource(source)) is not None


class Wraps(Protocol):
    """What `vault.keyring` needs; `vault.wrapping.asking.Wrapping` is one."""

    @property
    def source(self) -> KeySource:
        """Where a new master key is kept."""
        ...

    def wrap(self) -> WrappedKey:
        """Make a new master key and return its wrapped form. Raises WrappingError."""
        ...

    def unwrap(self, keys: Sequence[WrappedKey]) -> list[bytes]:
        """Return the plain forms of keys. Raises WrappingError."""
        ...


@dataclass(frozen=True, slots=True)
class WrappingOrder:
    """What the unwrapper shall do, in JSON on its standard input.

    Attributes:
        keys: to unwrap; without one, a new key is made and wrapped.
        credential: the descriptor of the PIN or of Vault's credential; -1: there is none.
        user: become this user before anything is loaded; -1: stay.
        refused: the file that notes a refused PIN.
    """

    pkcs11: Pkcs11Token | None
    transit: TransitKey | None
    keys: tuple[WrappedKey, ...]
    credential: int
    user: int
    refused: str


@dataclass(frozen=True, slots=True)
class WrappingAnswer:
    """The unwrapper's answer: plain keys (base64) in the order of the request, or a new wrapped key, or a problem."""

    keys: tuple[str, ...] = field(default=(), repr=False)
    wrapped: WrappedKey | None = None
    problem: str = ""
