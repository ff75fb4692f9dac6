"""vaultd's configuration file, as hostd hands it over.

Unknown keys are refused. It holds paths and uids, no secret.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class ConfigError(Exception):
    """The configuration cannot be read; the message says where."""


class VaultConfig(BaseModel):
    """See the module. `uids`: who may connect; of these uid 0 may do everything."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    socket: Path
    directory: Path
    uids: frozenset[int] = Field(min_length=1)
    master_key_file: Path | None = None

    @classmethod
    def read(cls, path: Path) -> "VaultConfig":
        """Read the JSON file at `path`.

        Raises:
            ConfigError: it is missing or is not a configuration.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, item['loc'])) or 'file'}: {item['msg']}"
                for item in error.errors(include_input=False)
            )
            raise ConfigError(f"{path}: {problems}") from None
