"""From settings to the configuration files of hostd and its daemons.

- Files are written to run_dir/launch, which only root can read. hostd gives each daemon a copy that it can read.
- The file of `serve` contains the DSN of the state database, which may have a password, and the configured keys of
  signed routes.
- No file contains API keys, except the file of a key that was created because none is configured. `serve` gets their
  digests.
"""

import base64
import json
import os
import secrets
import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lifecycle.api import credentials
from lifecycle.config import master_key
from lifecycle.config.serve import DatabaseConfig, RouteKeysConfig, ServeConfig
from lifecycle.config.settings import DATABASE_DSN, Settings, SettingsError
from lifecycle.sandboxes.bounds import CreationBounds, SandboxLimits
from lifecycle.sandboxes.ceilings import Ceilings, SandboxCeiling
from lifecycle.sandboxes.quantities import Resources
from lifecycle.snapshots.snapshot import SnapshotBounds
from policy.references import BackendKind
from vault.wrapping.sources import KeySource
from wire import codec

_MAX_DSN = 4096
_UIDS = ("serve", "vaultd", "auditd", "compiler", "fetcher", "worker_base", "workers")
_DAEMONS = ("auditd", "vaultd", "zygote", "compiler", "serve", "fetcher")


def uids(settings: Settings) -> dict[str, int]:
    """Return the uids of daemons and workers."""
    return {name: int(settings.get(f"sallyport.uids.{name}")) for name in _UIDS}


def api_keys(settings: Settings) -> tuple[str, ...]:
    """Return the API keys, or their digests. If none is configured, create and store one."""
    if settings.api_keys or settings.insecure:
        return settings.api_keys
    path = _key_file(settings)
    try:
        return (path.read_text("ascii").strip(),)
    except FileNotFoundError:
        key = f"slp_{secrets.token_urlsafe(32)}"
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, f"{key}\n")
        return (key,)


def _key_file(settings: Settings) -> Path:
    return settings.state_dir / "lifecycle" / "api-key"


def exports(settings: Settings) -> list[str]:
    """Return the shell lines that configure a client for this server.

    They contain no key, because printed text is stored in a journal.
    """
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104 - compared
    lines = [f"export OPEN_SANDBOX_DOMAIN={_in_url(host)}:{settings.port}"]
    if not settings.api_keys and not settings.insecure:
        lines.append(f'export OPEN_SANDBOX_API_KEY="$(cat {shlex.quote(str(_key_file(settings)))})"')
    return lines


def address(settings: Settings) -> str:
    """Return the URL on which the server listens."""
    return f"http://{_in_url(settings.host)}:{settings.port}"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def serve_config(settings: Settings, keys: tuple[str, ...]) -> ServeConfig:
    """Return the configuration of `serve`."""
    most = maxima(settings)
    return ServeConfig(
        host=settings.host,
        run_dir=settings.run_dir,
        state_dir=settings.state_dir / "lifecycle",
        database=database(settings),
        policy_file=settings.policy_file,
        key_digests=tuple(
            key.removeprefix("sha256:").lower() if key.startswith("sha256:") else credentials.digest(key)
            for key in keys
        ),
        route_keys=route_keys(settings),
        limits=SandboxLimits(
            runtimes=tuple(settings.get("sallyport.allowed_runtimes")),
            default_runtime=settings.default_runtime,
            defaults=Resources(
                min(settings.get("sallyport.default_cpu"), most.cpu_nanos),
                min(settings.get("sallyport.default_memory"), most.memory_bytes),
                min(settings.get("sallyport.default_pids"), most.pids),
                min(settings.get("sallyport.default_disk"), most.disk_bytes) if most.disk_bytes else None,
            ),
            maxima=most,
            max_timeout=settings.get("server.max_sandbox_timeout_seconds"),
            env=settings.get("docker.sandbox_env"),
        ),
        daemon_uids={"hostd": 0, **{name: uids(settings)[name] for name in ("vaultd", "auditd")}},
        bounds=CreationBounds(
            launches=launch_concurrency(settings),
            pending=settings.get("sallyport.max_pending"),
            sandboxes=max_sandboxes(settings),
            answer_seconds=float(settings.get("sallyport.create_answer_seconds")),
            queue_seconds=float(settings.get("sallyport.create_queue_seconds")),
            ceilings=Ceilings(_ceiling(settings, "total"), _ceiling(settings, "per_key")),
        ),
        snapshots=SnapshotBounds(
            count=settings.get("sallyport.snapshots.count"),
            total_bytes=settings.get("sallyport.snapshots.total_bytes"),
        ),
        allowed_hosts=tuple(settings.get("server.allowed_hosts")),
        external_base=external_base(settings),
        ignored_fields=tuple(settings.get("sallyport.ignored_request_fields")),
        proxy_connections=settings.get("sallyport.proxy_connections"),
        renew_interval=(
            float(settings.get("renew_intent.min_interval_seconds")) if settings.get("renew_intent.enabled") else None
        ),
        diagnostics_retention=settings.get("sallyport.diagnostics_retention_seconds"),
        keep_alive=settings.get("server.timeout_keep_alive"),
        concurrency=settings.get("server.limit_concurrency") or None,
        backlog=settings.get("server.backlog"),
        graceful_shutdown=settings.get("server.timeout_graceful_shutdown"),
        log_level=settings.get("log.level"),
    )


def route_keys(settings: Settings) -> RouteKeysConfig | None:
    """Return the configured keys of signed routes."""
    found = settings.route_keys
    if found is None:
        return None
    return RouteKeysConfig(found.active, {name: base64.b64encode(key).decode() for name, key in found.keys.items()})


def database(settings: Settings) -> DatabaseConfig | None:
    """Return the configuration of the state database; None for SQLite.

    Raises:
        SettingsError: the DSN cannot be read, or is none. The message contains no part of it.
    """
    place, dsn = _dsn(settings)
    if dsn is None:
        return None
    from lifecycle.database.dsn import parsed  # This imports the driver, which no other command needs.

    try:
        parsed(dsn)
    except ValueError as error:
        raise SettingsError(f"{place} {error}") from None
    limits = {
        name: int(settings.get(f"sallyport.database.{name}"))
        for name in ("connections", "connect_seconds", "statement_seconds")
    }
    return DatabaseConfig(dsn, **limits)


def database_problem(settings: Settings) -> str:
    """Return what keeps `serve` from its PostgreSQL; empty if nothing does, or the database is SQLite.

    Raises:
        SettingsError: the DSN cannot be read, or is none.
    """
    config = database(settings)
    if config is None:
        return ""
    from lifecycle.database.probe import problem  # As above.

    return problem(config, uids(settings)["serve"])


def _dsn(settings: Settings) -> tuple[str, str | None]:
    """Return the place of the DSN, and the DSN if there is one."""
    if settings.database_dsn is not None:
        return DATABASE_DSN, settings.database_dsn or None
    path = settings.get("sallyport.database.dsn_file")
    if path is None:
        return f"{settings.origin}: sallyport.database.dsn", settings.get("sallyport.database.dsn")
    place = f"{path} (sallyport.database.dsn_file)"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            mode, content = os.fstat(fd).st_mode, file.read(_MAX_DSN + 1)
        text = content.decode()
    except OSError as error:
        raise SettingsError(f"{place}: {error.strerror}") from None
    except UnicodeError:
        raise SettingsError(f"{place} is not text") from None
    if mode & 0o077:
        raise SettingsError(f"{place} can be read or changed by other users (chmod 600); it may hold a password")
    if len(content) > _MAX_DSN or not text.strip():
        raise SettingsError(f"{place} is empty, or over {_MAX_DSN} bytes")
    return place, text.strip()


def _ceiling(settings: Settings, of: str) -> SandboxCeiling:
    names = ("sandboxes", "cpu", "memory", "disk")
    return SandboxCeiling(*(settings.get(f"sallyport.ceilings.{of}.{name}") for name in names))


def maxima(settings: Settings) -> Resources:
    """Return the maximum of each resource of one sandbox."""
    return Resources(
        settings.get("sallyport.max_cpu") or (os.cpu_count() or 1) * 1_000_000_000,
        settings.get("sallyport.max_memory") or _physical_memory(),
        settings.get("docker.pids_limit"),
        settings.get("sallyport.max_disk") if disk_limits(settings) else None,
    )


def max_sandboxes(settings: Settings) -> int:
    """Return the maximum number of sandboxes."""
    return int(settings.get("sallyport.max_sandboxes"))


def launch_concurrency(settings: Settings) -> int:
    """Return the maximum number of concurrent launches. Both `serve` and hostd enforce it."""
    return int(settings.get("sallyport.launch_concurrency"))


def disk_limits(settings: Settings) -> bool:
    """Return whether each sandbox has a disk of its own. Only an explicit setting of the operator disables that."""
    return bool(settings.get("sallyport.disk_limits"))


def external_base(settings: Settings) -> str:
    """Return the public base of endpoints, without its scheme. If it is not set, `server.eip` is used."""
    own = settings.get("server.external_base")
    base = str(settings.get("server.eip") if own is None else own)
    return base.removeprefix("https://").removeprefix("http://").rstrip("/")


def audit_config(settings: Settings) -> dict[str, Any]:
    """Return the configuration of auditd."""
    return {
        "directory": str(settings.state_dir / "audit"),
        "uids": [0, uids(settings)["serve"]],
        "sync": settings.get("sallyport.audit.sync"),
        "max_file_bytes": settings.get("sallyport.audit.max_file_bytes"),
        "max_files": settings.get("sallyport.audit.max_files"),
        "sandbox_share": settings.get("sallyport.audit.sandbox_share"),
        "control_share": settings.get("sallyport.audit.control_share"),
        "closed_sandboxes": settings.get("sallyport.audit.closed_sandboxes"),
        "sandbox_bytes_per_second": settings.get("sallyport.audit.sandbox_bytes_per_second"),
    }


def vault_config(settings: Settings) -> dict[str, Any]:
    """Return the configuration of vaultd."""
    credential = settings.get("sallyport.vault.key_source") == KeySource.CREDENTIAL
    return {
        "directory": str(settings.state_dir / "vault"),
        "uids": [0, uids(settings)["serve"]],
        "master_key_file": None if credential else str(settings.master_key_file),
        "wrapping": codec.encode(master_key.wrapping(settings)),
        "fetcher": {"socket": str(settings.run_dir / "fetcher.sock"), "uid": uids(settings)["fetcher"]}
        if backends(settings)
        else None,
    }


def backends(settings: Settings) -> frozenset[BackendKind]:
    """Return the backends of secrets that the operator has configured."""
    keys = {
        BackendKind.ENV: "sallyport.vault.environment",
        BackendKind.FILE: "sallyport.vault.file_directories",
        BackendKind.COMMAND: "sallyport.vault.commands",
        BackendKind.TOKEN: "sallyport.vault.tokens",
        BackendKind.VAULT: "sallyport.vault.hashicorp.address",
    }
    return frozenset(backend for backend, key in keys.items() if settings.get(key))


def fetcher_config(settings: Settings) -> dict[str, Any]:
    """Return the configuration of the fetcher."""
    return {
        "vaultd": uids(settings)["vaultd"],
        "refresh_seconds": settings.get("sallyport.vault.refresh_seconds"),
        "environment": len(settings.get("sallyport.vault.environment")),
        "file_directories": len(settings.get("sallyport.vault.file_directories")),
        "commands": {
            name: {"argv": list(argv), "environment": dict(environment)}
            for name, argv, environment in settings.get("sallyport.vault.commands")
        },
        "hashicorp": _hashicorp(settings),
        "tokens": {name: codec.encode(source) for name, source in settings.get("sallyport.vault.tokens")},
        "roots": str(settings.upstream_roots),
    }


def _hashicorp(settings: Settings) -> dict[str, Any] | None:
    """Return the server of `vault://`.

    Raises:
        SettingsError: a key is missing that its login needs.
    """

    def get(key: str) -> Any:
        return settings.get(f"sallyport.vault.hashicorp.{key}")

    if not get("address"):
        return None
    if not get("credential_file"):
        raise SettingsError("sallyport.vault.hashicorp.credential_file is missing: it has the token, secret id or JWT")
    if get("auth") != "token" and not get("role"):
        raise SettingsError(f"sallyport.vault.hashicorp.role is missing: the login {get('auth')} needs it")
    return {
        "address": get("address").rstrip("/"),
        "roots": str(get("ca_file") or settings.upstream_roots),
        "namespace": get("namespace"),
        "auth": get("auth"),
        "mount": get("auth_mount"),
        "role": get("role"),
        "allowed": list(get("allowed")),
    }


def _credential_file(settings: Settings) -> str | None:
    path = settings.get("sallyport.vault.hashicorp.credential_file")
    return None if path is None else str(path)


def compiler_config(settings: Settings) -> dict[str, Any]:
    """Return the configuration of the compiler."""
    return {"policy_file": None if settings.policy_file is None else str(settings.policy_file)}


def host_config(settings: Settings, directory: Path) -> dict[str, Any]:
    """Return the configuration of hostd; `directory` contains the other files."""
    netns = settings.get("sallyport.upstream_netns")
    managed = bool(settings.get("sallyport.docker.managed"))
    docker_state = settings.state_dir.parent / "docker"
    default_socket = settings.run_dir / "docker.sock" if managed else "/var/run/docker.sock"
    dockerd = {
        "binary": str(settings.get("sallyport.docker.binary")),
        "data_root": str(settings.get("sallyport.docker.data_root") or docker_state / "data"),
        "exec_root": str(settings.get("sallyport.docker.exec_root") or settings.run_dir / "docker"),
        "pidfile": str(settings.get("sallyport.docker.pidfile") or settings.run_dir / "docker.pid"),
        "log": str(settings.get("sallyport.docker.log") or docker_state / "dockerd.log"),
    }
    modules = {
        "auditd": "audit.auditd",
        "vaultd": "vault.vaultd",
        "compiler": "policy.compiler",
        "zygote": "gateway.zygote",
        "serve": "lifecycle.serve",
    }
    if backends(settings):
        modules["fetcher"] = "vault.fetcher"
    return {
        "run_dir": str(settings.run_dir),
        "state_dir": str(settings.state_dir),
        "python": str(settings.get("sallyport.python") or sys.executable),
        "upstream_netns": None if netns is None else str(netns),
        "docker_socket": str(settings.get("sallyport.docker.socket") or default_socket),
        "dockerd": dockerd if managed else None,
        "images": [{"name": name, "tar": tar, "env": dict(env)} for name, tar, env in settings.get("sallyport.images")],
        "registries": {
            "allowed": list(settings.get("sallyport.registry.allowed")),
            "secrets": dict(settings.get("sallyport.registry.secrets")),
            "max_bytes": settings.get("sallyport.max_image"),
            "skopeo": str(settings.get("sallyport.registry.skopeo") or shutil.which("skopeo") or "/usr/bin/skopeo"),
        },
        "runsc": settings.program("runsc", "/usr/local/bin/runsc"),
        "runc": settings.program("runc", "/usr/sbin/runc"),
        "execd": settings.execd(),
        "upstream_roots": str(settings.upstream_roots),
        "uids": uids(settings),
        "listen": {"host": settings.host, "port": settings.port},
        "dns_upstreams": list(settings.dns_upstreams),
        "allowed_addresses": list(settings.get("sallyport.allowed_addresses")),
        "host_addresses": {
            host: list(addresses) for host, addresses in settings.get("sallyport.host_addresses").items()
        },
        "gateway_limits": dict(settings.get("sallyport.gateway_limits")),
        "maxima": {**asdict(maxima(settings)), "sandboxes": max_sandboxes(settings)},
        "snapshots": {
            "count": settings.get("sallyport.snapshots.count"),
            "bytes_each": settings.get("sallyport.snapshots.max_bytes"),
            "bytes_total": settings.get("sallyport.snapshots.total_bytes"),
        },
        "launch_concurrency": launch_concurrency(settings),
        "runtimes": list(settings.get("sallyport.allowed_runtimes")),
        "disk_limits": disk_limits(settings),
        "network_bandwidth": settings.get("sallyport.network_bandwidth"),
        "disk_bandwidth": settings.get("sallyport.disk_bandwidth"),
        "volumes": {
            "allowed_host_paths": list(settings.get("storage.allowed_host_paths")),
            "default_bytes": settings.get("storage.volume_default_size"),
            "max_bytes": settings.get("sallyport.max_volume"),
            "max_count": settings.get("sallyport.max_volumes"),
        },
        "memory": {name: settings.get(f"sallyport.memory.{name}") for name in _DAEMONS},
        "supplies": {
            "environment": list(settings.get("sallyport.vault.environment")),
            "directories": list(settings.get("sallyport.vault.file_directories")),
            "credential": _credential_file(settings),
        },
        "vault_files": {name: str(path) for name, path in master_key.files(settings).items()},
        "processes": [
            {"name": name, "module": module, "config": str(directory / f"{name}.json")}
            for name, module in modules.items()
        ],
    }


def write_all(settings: Settings, keys: tuple[str, ...]) -> Path:
    """Write every file; return hostd's.

    Raises:
        SettingsError, OSError: they cannot be written, or a file that they name cannot be read.
    """
    for path in (
        settings.upstream_roots,
        settings.policy_file,
        settings.get("sallyport.vault.hashicorp.ca_file"),
        settings.get("sallyport.vault.transit.ca_file"),
    ):
        if path is not None:
            check_readable(path)
    if len(str(settings.run_dir)) > 60:
        raise SettingsError("sallyport.run_dir is too long for unix sockets (60 characters at most)")
    if (place := Path(os.path.realpath(settings.run_dir))).is_relative_to("/dev") or place.is_relative_to("/proc"):
        raise SettingsError("sallyport.run_dir is below /dev or /proc, which a container's start hides: use /run")
    directory = settings.run_dir / "launch"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    files = {
        "auditd": audit_config(settings),
        "vaultd": vault_config(settings),
        "compiler": compiler_config(settings),
        "zygote": {},
        "fetcher": fetcher_config(settings),
    }
    for name, document in files.items():
        _write(directory / f"{name}.json", json.dumps(document, indent=1) + "\n")
    _write(directory / "serve.json", serve_config(settings, keys).text())
    return write_host(settings, directory)


def write_host(settings: Settings, directory: Path) -> Path:
    """Write only the configuration of hostd; return the file."""
    path = directory / "host.json"
    _write(path, json.dumps(host_config(settings, directory), indent=1) + "\n")
    return path


def check_readable(path: Path) -> None:
    """Check early, with a clear message, that unprivileged daemons can read a file.

    Raises:
        SettingsError: there is no such file, or not every user can read it.
    """
    if not path.is_file():
        raise SettingsError(f"{path}: there is no such file")
    if not path.stat().st_mode & 0o004:
        raise SettingsError(f"{path}: must be readable by every user (chmod o+r); it holds no secret")


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def _physical_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
