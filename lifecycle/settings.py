"""The operator's TOML file: the reference server's keys, and a `[sallyport]` table of ours.

- Looked up as `--config`, then `SANDBOX_CONFIG_PATH`, then `~/.sandbox.toml`; no file means defaults.
- Unknown keys are refused with their path (R33). Keys of the reference without a meaning here are reported.
- `OPENSANDBOX_SERVER_API_KEY`, when set, replaces the configured keys, even if it is empty. Without a key one is made
  at start; to run without keys takes `OPENSANDBOX_INSECURE_SERVER=YES`, and only loopback then.

It reads and checks; what the daemons are told is written by `launch`.
"""

import os
import re
import shutil
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lifecycle import quantities

API_KEY = "OPENSANDBOX_SERVER_API_KEY"
INSECURE = "OPENSANDBOX_INSECURE_SERVER"
CONFIG_PATH = "SANDBOX_CONFIG_PATH"
RUNTIMES = ("runc", "runsc")
_PROJECT = Path(__file__).resolve().parent.parent
_SYSTEM_ROOTS = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")


class SettingsError(ValueError):
    """The settings cannot be used; the message names the key and holds no value of a secret one."""


type Check = Callable[[Any], Any]


def _is(kind: type, what: str) -> Check:
    def check(value: Any) -> Any:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"must be {what}")
        return value

    return check


_text = _is(str, "a string")
_flag = _is(bool, "true or false")
_table = _is(dict, "a table")


def _number(least: int, most: int) -> Check:
    def check(value: Any) -> Any:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"must be a number from {least} to {most}")
        return value

    return check


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError("must be a list of strings")
    return tuple(value)


def _text_map(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise ValueError("must be a table of strings")
    return dict(value)


def _number_map(value: Any) -> dict[str, int]:
    if not isinstance(value, dict) or not all(type(item) is int for item in value.values()):
        raise ValueError("must be a table of numbers")
    return dict(value)


def _address_map(value: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, dict):
        raise ValueError("must be a table of lists of addresses")
    return {host: _texts(addresses) for host, addresses in value.items()}


def _absolute(value: Any) -> Path:
    path = Path(_text(value)).expanduser()
    if not path.is_absolute():
        raise ValueError("must be an absolute path")
    return path


def _path(value: Any) -> Path | None:
    return None if value == "" else _absolute(value)


def _one_of(*words: str) -> Check:
    def check(value: Any) -> Any:
        if value not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return value

    return check


def _runtimes(value: Any) -> tuple[str, ...]:
    names = _texts(value)
    if not names or any(name not in RUNTIMES for name in names):
        raise ValueError(f"must be a list of {', '.join(RUNTIMES)}")
    return names


def _images(value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list):
        raise ValueError("must be a list of tables with name and tar")
    images = []
    for item in value:
        if not isinstance(item, dict) or set(item) != {"name", "tar"}:
            raise ValueError("each image has exactly name and tar")
        images.append((str(_text(item["name"])), str(_absolute(item["tar"]))))
    return tuple(images)


def _cpu(value: Any) -> int:
    return quantities.cpu(str(_text(value)))


def _memory(value: Any) -> int:
    return quantities.memory(str(_text(value)))


def _docker_runtime(value: Any) -> str:
    if value == "":
        return "runc"
    if value == "gvisor":
        return "runsc"
    raise ValueError('must be "" or "gvisor"; others are not supported')


_KEYS: dict[str, Check] = {
    "server.host": _text,
    "server.port": _number(1, 65535),
    "server.api_key": _text,
    "server.api_keys": _texts,
    "server.eip": _text,
    "server.external_base": _text,
    "server.allowed_hosts": _texts,
    "server.max_sandbox_timeout_seconds": _number(60, 10**9),
    "server.timeout_keep_alive": _number(1, 3600),
    "server.limit_concurrency": _number(0, 10**6),
    "server.backlog": _number(1, 65535),
    "server.timeout_graceful_shutdown": _number(0, 3600),
    "log.level": _one_of("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"),
    "runtime.type": _one_of("docker"),
    "docker.pids_limit": _number(1, 4 * 1024 * 1024),
    "docker.sandbox_env": _text_map,
    "secure_runtime.type": _docker_runtime,
    "renew_intent.enabled": _flag,
    "renew_intent.min_interval_seconds": _number(1, 86400),
    "sallyport.state_dir": _absolute,
    "sallyport.run_dir": _absolute,
    "sallyport.policy_file": _path,
    "sallyport.upstream_netns": _path,
    "sallyport.upstream_roots": _absolute,
    "sallyport.dns_upstreams": _texts,
    "sallyport.allowed_addresses": _texts,
    "sallyport.host_addresses": _address_map,
    "sallyport.gateway_limits": _number_map,
    "sallyport.python": _absolute,
    "sallyport.runsc": _absolute,
    "sallyport.runc": _absolute,
    "sallyport.execd": _absolute,
    "sallyport.images": _images,
    "sallyport.default_runtime": _one_of(*RUNTIMES),
    "sallyport.allowed_runtimes": _runtimes,
    "sallyport.default_cpu": _cpu,
    "sallyport.default_memory": _memory,
    "sallyport.default_pids": _number(1, 4 * 1024 * 1024),
    "sallyport.max_cpu": _cpu,
    "sallyport.max_memory": _memory,
    "sallyport.max_sandboxes": _number(1, 4096),
    "sallyport.max_pending": _number(1, 4096),
    "sallyport.launch_concurrency": _number(1, 256),
    "sallyport.create_answer_seconds": _number(1, 29),
    "sallyport.proxy_connections": _number(1, 256),
    "sallyport.docker.managed": _flag,
    "sallyport.docker.socket": _absolute,
    "sallyport.docker.binary": _absolute,
    "sallyport.docker.data_root": _absolute,
    "sallyport.docker.exec_root": _absolute,
    "sallyport.docker.pidfile": _absolute,
    "sallyport.docker.log": _absolute,
    "sallyport.audit.sync": _one_of("group", "always"),
    "sallyport.audit.max_file_bytes": _number(65536, 1 << 40),
    "sallyport.audit.max_files": _number(0, 10**6),
    "sallyport.vault.master_key_file": _absolute,
    "sallyport.uids.serve": _number(1, 2**31 - 1),
    "sallyport.uids.vaultd": _number(1, 2**31 - 1),
    "sallyport.uids.auditd": _number(1, 2**31 - 1),
    "sallyport.uids.worker_base": _number(1, 2**31 - 1),
    "sallyport.uids.workers": _number(1, 65536),
}
"""Every key that has an effect, and how its value is read."""

NOT_APPLICABLE = frozenset(
    (
        *("server.thread_pool_size", "server.loop", "server.http", "proxy.resolve_internal", "log.file_enabled"),
        *("log.file_path", "log.access_file_path", "log.file_max_bytes", "log.file_backup_count"),
        *("runtime.execd_image", "runtime.execd_run_as_init", "docker.network_mode", "docker.api_timeout"),
        *("docker.host_ip", "docker.port_range_min", "docker.port_range_max", "docker.publish_host"),
        *("docker.drop_capabilities", "docker.no_new_privileges", "docker.apparmor_profile"),
        *("docker.seccomp_profile", "storage.volume_default_size", "storage.ossfs_mount_root", "store.type"),
        *("store.path", "egress.image", "egress.mode", "egress.disable_ipv6", "egress.readiness_timeout_seconds"),
        *("egress.otlp_endpoint", "ingress.mode", "secure_runtime.docker_runtime", "otel.enabled", "otel.endpoint"),
        *("otel.service_name", "otel.export_interval_millis", "storage.allowed_host_paths"),
    )
)
"""Keys of the reference that are accepted without effect: what they set is built in, or not offered yet."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked settings: values by key, and what to tell the operator about."""

    values: Mapping[str, Any]
    origin: str
    remarks: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    insecure: bool = False

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default` where the file says nothing."""
        assert key in _KEYS, key  # noqa: S101 - a typing error of ours
        return self.values.get(key, default)

    @property
    def host(self) -> str:
        """Listen address."""
        return str(self.get("server.host", "127.0.0.1"))

    @property
    def port(self) -> int:
        """Listen port."""
        return int(self.get("server.port", 8080))

    @property
    def run_dir(self) -> Path:
        """Sockets and what lives as long as the host is up."""
        return Path(self.get("sallyport.run_dir", "/run/sallyport"))

    @property
    def state_dir(self) -> Path:
        """What survives."""
        return Path(self.get("sallyport.state_dir", "/var/lib/sallyport/state"))

    @property
    def default_runtime(self) -> str:
        """Runtime of a create call that names none."""
        return str(self.get("sallyport.default_runtime", self.get("secure_runtime.type", "runc")))

    @property
    def policy_file(self) -> Path | None:
        """The operator's policies; None is deny-all."""
        path = self.get("sallyport.policy_file")
        return None if path is None else Path(path)

    @property
    def master_key_file(self) -> Path:
        """The vault's master key."""
        return Path(self.get("sallyport.vault.master_key_file", self.state_dir / "vault" / "master-key"))

    @property
    def upstream_roots(self) -> Path:
        """Authorities that upstream servers are verified against."""
        found = self.get("sallyport.upstream_roots")
        if found is None:
            found = next((path for path in _SYSTEM_ROOTS if Path(path).exists()), _SYSTEM_ROOTS[0])
        return Path(found)

    @property
    def dns_upstreams(self) -> tuple[str, ...]:
        """Resolvers of the gateways; detected from the host if the file names none."""
        configured = self.get("sallyport.dns_upstreams")
        return detect_resolvers(Path("/etc/resolv.conf")) if configured is None else tuple(configured)

    def program(self, name: str, fallback: str) -> str:
        """Path of a program: configured, on the PATH, or a fixed place."""
        return str(self.get(f"sallyport.{name}") or shutil.which(name) or fallback)

    def execd(self) -> str:
        """Path of execd's static binary."""
        return str(self.get("sallyport.execd", _PROJECT / "execd" / "bin" / "execd"))


def read(path: Path | None, environment: Mapping[str, str]) -> Settings:
    """Read the settings.

    Args:
        path: of `--config`; None looks in the environment and the home directory.

    Raises:
        SettingsError: what is wrong, and where.
    """
    if path is None and environment.get(CONFIG_PATH):
        path = Path(environment[CONFIG_PATH])
    if path is None:
        home = Path(environment.get("HOME", "/root")) / ".sandbox.toml"
        path = home if home.exists() else None
    if path is None:
        return parse({}, "(defaults)", environment)
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"{path}: {error}") from None
    return parse(document, str(path), environment)


def parse(document: Mapping[str, Any], origin: str, environment: Mapping[str, str]) -> Settings:
    """Check a parsed file.

    Raises:
        SettingsError: what is wrong, and at which key.
    """
    values: dict[str, Any] = {}
    remarks: list[str] = []
    for key, value in _flatten(document, ""):
        if key in NOT_APPLICABLE:
            remarks.append(f"{origin}: {key} has no effect here")
            continue
        if key not in _KEYS:
            raise SettingsError(f"{origin}: unknown key {key}")
        try:
            values[key] = _KEYS[key](value)
        except ValueError as error:
            raise SettingsError(f"{origin}: {key} {error}") from None
    keys = tuple(key for key in (values.get("server.api_key", ""), *values.get("server.api_keys", ())) if key)
    if API_KEY in environment:
        keys = (environment[API_KEY],) if environment[API_KEY] else ()
    if any(len(key) < 16 and not key.startswith("sha256:") for key in keys):
        remarks.append(f"{origin}: an API key is shorter than 16 characters")
    insecure = not keys and environment.get(INSECURE) == "YES"
    settings = Settings(values, origin, tuple(remarks), keys, insecure)
    _check_whole(settings)
    return settings


def _flatten(table: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in _KEYS and key not in NOT_APPLICABLE:
            if not any(known.startswith(f"{key}.") for known in (*_KEYS, *NOT_APPLICABLE)):
                raise SettingsError(f"unknown table {key}")
            found += _flatten(value, f"{key}.")
        else:
            found.append((key, value))
    return found


def _check_whole(settings: Settings) -> None:
    allowed = settings.get("sallyport.allowed_runtimes", RUNTIMES)
    if settings.default_runtime not in allowed:
        raise SettingsError(f"{settings.origin}: sallyport.default_runtime is not in sallyport.allowed_runtimes")
    if settings.insecure and settings.host not in ("127.0.0.1", "::1", "localhost"):
        raise SettingsError(f"{settings.origin}: without an API key server.host must be a loopback address")
    for endpoint in settings.get("sallyport.dns_upstreams", ()):
        if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[0-9.]+):[0-9]{1,5}", endpoint):
            raise SettingsError(f"{settings.origin}: sallyport.dns_upstreams: {endpoint!r} is not address:port")


def detect_resolvers(path: Path) -> tuple[str, ...]:
    """Return the host's own resolvers, without those on loopback, as address:port."""
    try:
        lines = path.read_text("ascii", "replace").splitlines()
    except OSError:
        return ()
    found = [words[1] for line in lines if (words := line.split())[:1] == ["nameserver"] and len(words) > 1]
    usable = [name for name in found if not name.startswith("127.") and name != "::1" and "%" not in name]
    return tuple(f"[{name}]:53" if ":" in name else f"{name}:53" for name in usable[:3])


def environment() -> Mapping[str, str]:
    """The process's environment."""
    return os.environ
