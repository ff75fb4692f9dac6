"""The configuration file of `serve`, which `launch` writes and `python -m lifecycle.serve` reads.

It contains digests of API keys, never a key. It contains the DSN of the state database, possibly with a password, and
keys of signed routes: only root and the user of `serve` can read it. Unknown or missing keys are refused.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lifecycle.sandboxes.bounds import CreationBounds, SandboxLimits
from lifecycle.sandboxes.ceilings import Ceilings, SandboxCeiling
from lifecycle.sandboxes.quantities import Resources
from lifecycle.snapshots.snapshot import SnapshotBounds
from wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DatabaseConfig:
    """The PostgreSQL in which `serve` keeps its state.

    Attributes:
        connections: the most at once.
        connect_seconds: the limit for a connect.
        statement_seconds: the limit for a statement.
    """

    dsn: str = field(repr=False)
    connections: int
    connect_seconds: int
    statement_seconds: int


@dataclass(frozen=True, slots=True)
class RouteKeysConfig:
    """The configured keys of signed routes: the id of the key that signs, and each key by its id, in base64."""

    active: str
    keys: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """The configuration of `serve`.

    Attributes:
        state_dir: its own directory: the SQLite database, the token key and the server's identity.
        database: None for SQLite.
        key_digests: SHA-256 of each API key, hexadecimal. Without any, authentication is off.
        route_keys: None: the server makes one.
        allowed_hosts: further names for Host while authentication is off.
        external_base: public base of endpoints without a scheme, or empty for the Host that the client used.
        diagnostics_retention: seconds for which the history of a removed sandbox stays; 0 for none.
        ignored_fields: top-level request fields that are dropped if this server does not know them.
        host: the name that clients can use for it in any case. The socket itself is inherited.
        daemon_uids: the users of hostd, vaultd and auditd. Nothing is sent to a socket of another user's process.
    """

    host: str
    run_dir: Path
    state_dir: Path
    database: DatabaseConfig | None
    policy_file: Path | None
    key_digests: tuple[str, ...]
    route_keys: RouteKeysConfig | None
    limits: SandboxLimits
    daemon_uids: Mapping[str, int]
    bounds: CreationBounds
    snapshots: SnapshotBounds
    allowed_hosts: tuple[str, ...]
    external_base: str
    ignored_fields: tuple[str, ...]
    proxy_connections: int
    renew_interval: float | None
    diagnostics_retention: int
    keep_alive: int
    concurrency: int | None
    backlog: int
    graceful_shutdown: int
    log_level: str

    def text(self) -> str:
        """Return the text of the file."""
        document = asdict(self)
        return json.dumps(document, default=str, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> "ServeConfig":
        """Read the file.

        Raises:
            ConfigError: it is not a configuration.
            OSError: it cannot be read.
        """
        try:
            document = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path}: not JSON: {error}") from None
        known = {item.name for item in fields(cls)}
        if not isinstance(document, dict) or set(document) != known:
            wrong = sorted(set(document) ^ known) if isinstance(document, dict) else []
            raise ConfigError(f"{path}: missing or unknown keys: {', '.join(wrong[:8])}")
        try:
            return cls(**_typed(document))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path}: a key has the wrong form ({type(error).__name__})") from None


def _typed(document: dict[str, Any]) -> dict[str, Any]:
    typed = dict(document)
    for key in ("run_dir", "state_dir"):
        typed[key] = Path(typed[key])
    typed["policy_file"] = None if typed["policy_file"] is None else Path(typed["policy_file"])
    for key in ("key_digests", "allowed_hosts", "ignored_fields"):
        typed[key] = tuple(typed[key])
    limits = dict(typed["limits"])
    limits["runtimes"] = tuple(limits["runtimes"])
    limits["defaults"] = Resources(**limits["defaults"])
    limits["maxima"] = Resources(**limits["maxima"])
    typed["limits"] = SandboxLimits(**limits)
    typed["daemon_uids"] = {name: int(typed["daemon_uids"][name]) for name in ("hostd", "vaultd", "auditd")}
    typed["database"] = None if typed["database"] is None else DatabaseConfig(**typed["database"])
    typed["route_keys"] = None if typed["route_keys"] is None else RouteKeysConfig(**typed["route_keys"])
    bounds = dict(typed["bounds"])
    bounds["ceilings"] = Ceilings(**{name: SandboxCeiling(**most) for name, most in bounds["ceilings"].items()})
    typed["bounds"] = CreationBounds(**bounds)
    typed["snapshots"] = SnapshotBounds(**typed["snapshots"])
    return typed
