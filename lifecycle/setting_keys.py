"""Every key of the settings file: how its value is read and checked. docs/operations.md explains each.

A check raises `ValueError` with a text that goes on after the key's name and never repeats the value.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lifecycle import quantities
from runtimes.spec import LEAST_MEMORY, image_environment

RUNTIMES = ("runc", "runsc")
DAEMONS = ("auditd", "vaultd", "zygote", "compiler", "serve")

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


def _field_names(value: Any) -> tuple[str, ...]:
    names = _texts(value)
    if not all(re.fullmatch(r"[A-Za-z][A-Za-z0-9]{0,63}", name, re.ASCII) for name in names):
        raise ValueError("must be a list of names of fields, of letters and digits")
    return names


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


def _images(value: Any) -> tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...]:
    if not isinstance(value, list):
        raise ValueError("must be a list of tables with name and tar")
    images = []
    for item in value:
        if not isinstance(item, dict) or not {"name", "tar"} <= set(item) <= {"name", "tar", "env"}:
            raise ValueError("each image has name and tar, may have env, and nothing else")
        env = item.get("env", {})
        if not isinstance(env, dict):
            raise ValueError("env of an image must be a table of strings")
        variables = image_environment({name: str(_text(text)) for name, text in env.items()})
        images.append((str(_text(item["name"])), str(_absolute(item["tar"])), tuple(variables.items())))
    return tuple(images)


def _cpu(value: Any) -> int:
    return quantities.cpu(str(_text(value)))


def _memory(value: Any) -> int:
    return quantities.memory(str(_text(value)))


def _disk(value: Any) -> int:
    size = quantities.memory(str(_text(value)))
    if size < quantities.DISK_FLOOR:
        raise ValueError("must be at least 64Mi")
    return size


def _daemon_memory(value: Any) -> int:
    memory = _memory(value)
    if memory < LEAST_MEMORY:
        raise ValueError(f"must be at least {LEAST_MEMORY >> 20}Mi")
    return memory


def _docker_runtime(value: Any) -> str:
    if value == "":
        return "runc"
    if value == "gvisor":
        return "runsc"
    raise ValueError('must be "" or "gvisor"; others are not supported')


KEYS: dict[str, Check] = {
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
    "sallyport.ignored_request_fields": _field_names,
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
    "sallyport.disk_limits": _flag,
    **dict.fromkeys((f"sallyport.memory.{name}" for name in DAEMONS), _daemon_memory),
    "sallyport.default_disk": _disk,
    "sallyport.max_disk": _disk,
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
    "sallyport.audit.sandbox_share": _number(65536, 2**40),
    "sallyport.audit.control_share": _number(65536, 2**40),
    "sallyport.audit.closed_sandboxes": _number(0, 10**6),
    "sallyport.audit.sandbox_bytes_per_second": _number(0, 1 << 40),
    "sallyport.vault.master_key_file": _absolute,
    "sallyport.uids.serve": _number(1, 2**31 - 1),
    "sallyport.uids.vaultd": _number(1, 2**31 - 1),
    "sallyport.uids.auditd": _number(1, 2**31 - 1),
    "sallyport.uids.compiler": _number(1, 2**31 - 1),
    "sallyport.uids.worker_base": _number(1, 2**31 - 1),
    "sallyport.uids.workers": _number(1, 4094),
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
