"""The fetcher's configuration file, which `sallyport serve` writes and hostd passes on.

It has names, paths and addresses, and no secret: credentials and values come as descriptors (`vault.supply`). Unknown
keys are refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vault.stores.command import Command
from vault.stores.hvac.config import HashicorpServer
from vault.stores.token_config import TokenSource
from wire import codec
from wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FetcherConfig:
    """The configuration.

    Attributes:
        vaultd: the uid that may connect.
        refresh_seconds: a value without a lease of its own is read again after this time.
        environment: how many variables are permitted; 0: there is no such backend.
        file_directories: how many directories have secrets; 0: there is no such backend.
        commands: the commands of the settings, by name.
        tokens: the tokens of the settings, by name.
        roots: the file with the authorities of their issuers.
        hashicorp: the server of HashiCorp Vault or OpenBao, if there is one.
    """

    vaultd: int
    refresh_seconds: int
    environment: int
    file_directories: int
    commands: Mapping[str, Command] = field(default_factory=dict)
    hashicorp: HashicorpServer | None = None
    tokens: Mapping[str, TokenSource] = field(default_factory=dict)
    roots: str = ""

    @classmethod
    def read(cls, path: Path) -> "FetcherConfig":
        """Read the JSON file at `path`.

        Raises:
            ConfigError: the file is missing or invalid.
        """
        try:
            return codec.decode(cls, json.loads(path.read_bytes()))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from None
