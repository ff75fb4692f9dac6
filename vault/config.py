"""vaultd's configuration file, which hostd writes.

Unknown keys are refused. The file has paths and uids, and no secret.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vault.fetching import FetcherPlace
from vault.wrapping.sources import WrappingConfig
from wire import codec
from wire.errors import ConfigError

_KEYS = frozenset({"directory", "uids", "master_key_file", "wrapping", "fetcher"})


@dataclass(frozen=True, slots=True)
class VaultConfig:
    """The configuration. `uids` may connect; of these uid 0 may do everything.

    Read without pydantic: its import would double the start time, in which no secret is released.
    """

    directory: Path
    uids: frozenset[int]
    master_key_file: Path | None = None
    wrapping: WrappingConfig = field(default_factory=WrappingConfig)
    fetcher: FetcherPlace | None = None
    """None: there is no backend beside the sealed store."""

    @classmethod
    def read(cls, path: Path) -> "VaultConfig":
        """Read the JSON file at `path`.

        Raises:
            ConfigError: the file is missing or invalid.
        """
        try:
            data = json.loads(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        except ValueError:
            raise ConfigError(f"{path}: not JSON") from None
        if not isinstance(data, dict) or set(data) - _KEYS:
            raise ConfigError(f"{path}: unknown keys")
        uids: Any = data.get("uids")
        key = data.get("master_key_file")
        wrong = [] if isinstance(data.get("directory"), str) else ["directory"]
        if not isinstance(uids, list) or not uids or not all(type(uid) is int and uid >= 0 for uid in uids):
            wrong.append("uids")
        if key is not None and not isinstance(key, str):
            wrong.append("master_key_file")
        fetcher = data.get("fetcher")
        if fetcher is not None and not (
            isinstance(fetcher, dict)
            and fetcher.keys() == {"socket", "uid"}
            and isinstance(fetcher["socket"], str)
            and type(fetcher["uid"]) is int
        ):
            wrong.append("fetcher")
        if wrong:
            raise ConfigError(f"{path}: no good {', '.join(wrong)}")
        try:
            wrapping = codec.decode(WrappingConfig, data["wrapping"]) if "wrapping" in data else WrappingConfig()
        except ValueError as error:
            raise ConfigError(f"{path}: wrapping: {error}") from None
        return cls(
            Path(data["directory"]),
            frozenset(uids),
            None if key is None else Path(key),
            wrapping,
            None if fetcher is None else FetcherPlace(Path(fetcher["socket"]), fetcher["uid"]),
        )
