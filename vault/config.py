"""vaultd's configuration file, as hostd hands it over.

Unknown keys are refused. It holds paths and uids, no secret.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_KEYS = frozenset({"directory", "uids", "master_key_file"})


class ConfigError(Exception):
    """The configuration cannot be read; the message says where."""


@dataclass(frozen=True, slots=True)
class VaultConfig:
    """See the module. `uids`: who may connect; of these uid 0 may do everything.

    Read by hand: importing pydantic would take as long as everything else in vaultd, and nothing is released meanwhile.
    """

    directory: Path
    uids: frozenset[int]
    master_key_file: Path | None = None

    @classmethod
    def read(cls, path: Path) -> "VaultConfig":
        """Read the JSON file at `path`.

        Raises:
            ConfigError: it is missing or is not a configuration.
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
        if wrong:
            raise ConfigError(f"{path}: no good {', '.join(wrong)}")
        return cls(Path(data["directory"]), frozenset(uids), None if key is None else Path(key))
