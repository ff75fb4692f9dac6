"""The configuration file of `serve`, which `launch` writes and `python -m lifecycle.serve` reads.

It holds digests of API keys, never a key. Unknown or missing keys are refused.
"""

import errno
import json
import os
import socket
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lifecycle.connections import expect_silence
from lifecycle.creation import Limits
from lifecycle.quantities import Resources
from lifecycle.transaction import Bounds


class ConfigError(ValueError):
    """The file is not a configuration; the message names the key, never a value."""


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything `serve` is told.

    Attributes:
        state_dir: its own directory: the database and the token key.
        key_digests: SHA-256 of each API key, hexadecimal; empty switches authentication off.
        allowed_hosts: further names for Host while authentication is off.
        external_base: public base of endpoints without a scheme, or empty for the Host the client used.
        ignored_fields: top-level request fields that may be sent though this server does not know them.
        uid: what to become if started as root; None stays.
    """

    host: str
    port: int
    run_dir: Path
    state_dir: Path
    policy_file: Path | None
    key_digests: tuple[str, ...]
    limits: Limits
    bounds: Bounds = field(default_factory=Bounds)
    allowed_hosts: tuple[str, ...] = ()
    external_base: str = ""
    ignored_fields: tuple[str, ...] = ()
    proxy_connections: int = 128
    renew_interval: float | None = None
    keep_alive: int = 30
    concurrency: int | None = 1024
    backlog: int = 2048
    graceful_shutdown: int = 5
    log_level: str = "INFO"
    uid: int | None = None

    def listen(self) -> socket.socket:
        """Bind the address and listen.

        Raises:
            OSError: it is taken, or not ours; the text names it.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            listener = socket.create_server((self.host, self.port), family=family, backlog=self.backlog)
            # Inherited by what is accepted: asyncio sets it only on sockets that name their protocol, these do not.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            expect_silence(listener)
            return listener
        except OSError as error:
            reason = "it is in use" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0)
            raise OSError(f"cannot listen on {self.host}:{self.port}: {reason}") from error

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
    typed["limits"] = Limits(**limits)
    typed["bounds"] = Bounds(**typed["bounds"])
    return typed
