"""The operator's TOML file: the reference server's keys, and a table `[sallyport]` with this product's keys.

- The file is `--config`, else `SANDBOX_CONFIG_PATH`, else `~/.sandbox.toml`. Without a file the defaults apply.
- `--defaults` names a file with lower priority (what `./run` built). The operator's file overrides it key by key.
- Unknown keys are refused with their path. Keys of the reference server without a meaning here are reported.
- `OPENSANDBOX_SERVER_API_KEY`, when set, replaces the configured keys, even if it is empty. Without a key one is
  created at start. A server without keys needs `OPENSANDBOX_INSECURE_SERVER=YES` and a loopback address.
- `OPENSANDBOX_SECURE_ACCESS_KEYS` (`a=<base64>,b=<base64>`) and `OPENSANDBOX_SECURE_ACCESS_ACTIVE_KEY`, when set,
  replace the configured keys of signed routes.
- `SALLYPORT_DATABASE_DSN`, when set, replaces the configured DSN of the state database. An empty one selects SQLite.

This module reads and checks. `launch` writes the configuration of the daemons.
"""

import os
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from lifecycle.api.credentials import RouteKeys
from lifecycle.config.keys import KEYS, NOT_APPLICABLE, SettingError, converted, defaults
from policy.problems import meant
from wire.endpoints import parse_endpoint, routed

API_KEY = "OPENSANDBOX_SERVER_API_KEY"
INSECURE = "OPENSANDBOX_INSECURE_SERVER"
CONFIG_PATH = "SANDBOX_CONFIG_PATH"
ROUTE_KEYS = "OPENSANDBOX_SECURE_ACCESS_KEYS"
ACTIVE_ROUTE_KEY = "OPENSANDBOX_SECURE_ACCESS_ACTIVE_KEY"
DATABASE_DSN = "SALLYPORT_DATABASE_DSN"
_ROUTE_KEYS = "ingress.secure_access.keys"
_PROJECT = Path(__file__).resolve().parents[2]
_SYSTEM_ROOTS = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")


class SettingsError(ValueError):
    """The settings are unusable. The message names the key and contains no value of a secret one."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked settings: values by key, and messages for the operator."""

    values: Mapping[str, Any]
    origin: str
    remarks: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    insecure: bool = False
    database_dsn: str | None = field(default=None, repr=False)
    """The DSN of the environment. Empty selects SQLite; None: the keys decide."""
    route_keys: RouteKeys | None = None
    """The keys of signed routes; None: `serve` makes one."""

    def get(self, key: str) -> Any:
        """Return the value of a key, or its default if the file does not set it."""
        return self.values[key] if key in self.values else defaults()[key]

    @property
    def host(self) -> str:
        """The listening address."""
        return str(self.get("server.host"))

    @property
    def port(self) -> int:
        """The listening port."""
        return int(self.get("server.port"))

    @property
    def run_dir(self) -> Path:
        """The directory of sockets and other files that exist as long as the host is up."""
        return Path(self.get("sallyport.run_dir"))

    @property
    def state_dir(self) -> Path:
        """The directory of permanent data."""
        return Path(self.get("sallyport.state_dir"))

    @property
    def default_runtime(self) -> str:
        """The runtime of a create call that names none."""
        return str(self.get("sallyport.default_runtime") or self.get("secure_runtime.type"))

    @property
    def policy_file(self) -> Path | None:
        """The file with the operator's policies; None is deny-all."""
        path = self.get("sallyport.policy_file")
        return None if path is None else Path(path)

    @property
    def master_key_file(self) -> Path:
        """The file with the vault's master key."""
        return Path(self.get("sallyport.vault.master_key_file") or self.state_dir / "vault" / "master-key")

    @property
    def upstream_roots(self) -> Path:
        """The file with the authorities against which upstream servers are verified."""
        found = self.get("sallyport.upstream_roots")
        if found is None:
            found = next((path for path in _SYSTEM_ROOTS if Path(path).exists()), _SYSTEM_ROOTS[0])
        return Path(found)

    @property
    def dns_upstreams(self) -> tuple[str, ...]:
        """The resolvers of the gateways. If the file names none, the host's are used."""
        configured = self.get("sallyport.dns_upstreams")
        return detect_resolvers(Path("/etc/resolv.conf")) if configured is None else tuple(configured)

    def program(self, name: str, fallback: str) -> str:
        """Return the path of a program: configured, on the PATH, or a fixed path."""
        return str(self.get(f"sallyport.{name}") or shutil.which(name) or fallback)

    def execd(self) -> str:
        """Return the path of execd's static binary."""
        return str(self.get("sallyport.execd") or _PROJECT / "execd" / "bin" / "execd")


def read(path: Path | None, environment: Mapping[str, str], defaults: Path | None = None) -> Settings:
    """Read the settings.

    Args:
        path: of `--config`. With None the environment and the home directory are searched.
        defaults: of `--defaults`: a file that the other one overrides key by key.

    Raises:
        SettingsError: the fault and its place.
    """
    if path is None and environment.get(CONFIG_PATH):
        path = Path(environment[CONFIG_PATH])
    if path is None:
        home = Path(environment.get("HOME", "/root")) / ".sandbox.toml"
        path = home if home.exists() else None
    under = None if defaults is None else parse(_load(defaults), str(defaults), {})
    if path is None:
        return parse({}, "(defaults)", environment, under)
    return parse(_load(path), str(path), environment, under)


def _load(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"{path}: {error}") from None


def parse(
    document: Mapping[str, Any], origin: str, environment: Mapping[str, str], under: Settings | None = None
) -> Settings:
    """Check a parsed file. `under` has the values for keys that it does not set.

    Raises:
        SettingsError: the fault and its key.
    """
    given: dict[str, Any] = {}
    remarks: list[str] = []
    for key, value in _flatten(document, ""):
        if key in NOT_APPLICABLE:
            remarks.append(f"{origin}: {key} has no effect here")
            continue
        if key not in KEYS:
            raise SettingsError(f"{origin}: unknown key {key}{meant(key, (*KEYS, *NOT_APPLICABLE))}")
        given[key] = value
    try:
        values = converted(given)
    except SettingError as error:
        raise SettingsError(f"{origin}: {error.key} {error}") from None
    if under is not None:
        values = {**under.values, **values}
        remarks = [*under.remarks, *remarks]
    read_ = Settings(values, origin)
    keys = tuple(key for key in (read_.get("server.api_key"), *read_.get("server.api_keys")) if key)
    if API_KEY in environment:
        keys = (environment[API_KEY],) if environment[API_KEY] else ()
    if any(len(key) < 16 and not key.startswith("sha256:") for key in keys):
        remarks.append(f"{origin}: an API key is shorter than 16 characters")
    insecure = not keys and environment.get(INSECURE) == "YES"
    settings = Settings(
        values,
        origin,
        tuple(remarks),
        keys,
        insecure,
        environment.get(DATABASE_DSN),
        _route_keys(read_, environment),
    )
    _check_whole(settings)
    return settings


def _route_keys(settings: Settings, environment: Mapping[str, str]) -> RouteKeys | None:
    """Return the keys of signed routes, of the environment or the file.

    Raises:
        SettingsError: without a value.
    """
    place, keys = f"{settings.origin}: ingress.secure_access", settings.get(_ROUTE_KEYS)
    active = settings.get("ingress.secure_access.active_key")
    if ROUTE_KEYS in environment or ACTIVE_ROUTE_KEY in environment:
        place, active = ROUTE_KEYS, environment.get(ACTIVE_ROUTE_KEY, "").strip()
        named = [item.strip().partition("=") for item in environment.get(ROUTE_KEYS, "").split(",") if item.strip()]
        try:
            keys = converted({_ROUTE_KEYS: [{"key_id": name, "key": key} for name, _, key in named]})[_ROUTE_KEYS]
        except SettingError as error:
            raise SettingsError(f"{ROUTE_KEYS} {error}") from None
    if not keys and not active:
        return None
    if active not in keys:
        raise SettingsError(f"{place}: the active key must be one of the keys")
    return RouteKeys(active, keys)


def _flatten(table: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in KEYS and key not in NOT_APPLICABLE:
            if not any(known.startswith(f"{key}.") for known in (*KEYS, *NOT_APPLICABLE)):
                tables = {known.rpartition(".")[0] for known in (*KEYS, *NOT_APPLICABLE)}
                raise SettingsError(f"unknown table {key}{meant(key, tables)}")
            found += _flatten(value, f"{key}.")
        else:
            found.append((key, value))
    return found


def _check_whole(settings: Settings) -> None:
    allowed = settings.get("sallyport.allowed_runtimes")
    if settings.default_runtime not in allowed:
        raise SettingsError(f"{settings.origin}: sallyport.default_runtime is not in sallyport.allowed_runtimes")
    if settings.insecure and settings.host not in ("127.0.0.1", "::1", "localhost"):
        raise SettingsError(f"{settings.origin}: without an API key server.host must be a loopback address")
    if None not in (settings.get("sallyport.database.dsn"), settings.get("sallyport.database.dsn_file")):
        raise SettingsError(f"{settings.origin}: sallyport.database.dsn and .dsn_file exclude each other")
    for endpoint in settings.get("sallyport.dns_upstreams") or ():
        try:
            parse_endpoint(endpoint)
        except ValueError as error:
            raise SettingsError(f"{settings.origin}: sallyport.dns_upstreams: {error}") from None
    for addresses in settings.get("sallyport.host_addresses").values():
        for address in addresses:
            try:
                routed(ip_address(address))
            except ValueError as error:
                raise SettingsError(f"{settings.origin}: sallyport.host_addresses: {error}") from None


def detect_resolvers(path: Path) -> tuple[str, ...]:
    """Return up to three of the host's resolvers as address:port.

    Resolvers on loopback are omitted, and those with an address that is not routed (`wire.endpoints.routed`).
    """
    try:
        lines = path.read_text("ascii", "replace").splitlines()
    except OSError:
        return ()
    found = [words[1] for line in lines if (words := line.split())[:1] == ["nameserver"] and len(words) > 1]
    return tuple(text for name in found if (text := _resolver(name)) is not None)[:3]


def _resolver(name: str) -> str | None:
    try:
        address = routed(ip_address(name))
    except ValueError:
        return None
    if address.is_loopback:
        return None
    return f"[{address}]:53" if address.version == 6 else f"{address}:53"


def environment() -> Mapping[str, str]:
    """Return the process's environment."""
    return os.environ
