"""Every key of the settings file, as one model: type, default, unit, bounds and description.

- A default is defined only here. A default that depends on the host or on another key is None and has a description.
- `settings` reads files with this model. `reference` writes the table of the documents and the file of `init-config`.

A check raises `ValueError` with a text that continues after the key's name and never repeats the value.
"""

import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from pydantic.fields import FieldInfo

from lifecycle.api.credentials import KEY_ID, LEAST_ROUTE_KEY
from lifecycle.sandboxes import quantities
from policy.references import BackendKind, backend_of, is_reference
from runtimes.bounds import LEAST_BANDWIDTH, LEAST_MEMORY, MOST_BANDWIDTH, configured_name, image_environment
from runtimes.images.references import Pattern, Reference
from vault.stores.token_config import TokenKind, TokenSource
from wire.errors import ConfigError
from wire.gateway_limits import GatewayLimits, described

RUNTIMES = ("runc", "runsc")

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


def _gateway_limits(value: Any) -> dict[str, int]:
    if not isinstance(value, dict) or not all(type(item) is int for item in value.values()):
        raise ValueError("must be a table of numbers")
    try:
        GatewayLimits.of(value)
    except ConfigError as error:
        raise ValueError(f"is wrong: {error}") from None
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
    return None if value in ("", None) else _absolute(value)


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
        images.append(
            (configured_name(str(_text(item["name"]))), str(_absolute(item["tar"])), tuple(variables.items()))
        )
    return tuple(images)


def _route_keys(value: Any) -> dict[str, bytes]:
    if not isinstance(value, list):
        raise ValueError("must be a list of tables with key_id and key")
    keys: dict[str, bytes] = {}
    for item in value:
        if not isinstance(item, dict) or set(item) != {"key_id", "key"}:
            raise ValueError("each key has key_id and key, and nothing else")
        name, key = str(_text(item["key_id"])), _decoded(str(_text(item["key"])))
        if not KEY_ID.fullmatch(name) or name in keys:
            raise ValueError("key_id must be one of 0-9 and a-z, and no two keys may have the same")
        keys[name] = key
    return keys


def _decoded(text: str) -> bytes:
    try:
        key = base64.b64decode(text, validate=True)
    except ValueError:
        raise ValueError("a key must be base64") from None
    if len(key) < LEAST_ROUTE_KEY:
        raise ValueError(f"a key must have at least {LEAST_ROUTE_KEY} bytes")
    return key


def _key_id(value: Any) -> str:
    if _text(value) and not KEY_ID.fullmatch(value):
        raise ValueError("must be one of 0-9 and a-z, or empty")
    return str(value)


def _references(value: Any) -> tuple[str, ...]:
    texts = _texts(value)
    for text in texts:
        Pattern.parse(text)
    return texts


def _registry_secrets(value: Any) -> dict[str, str]:
    secrets = _text_map(value)
    for host in secrets:
        if "/" in host or Reference.parse(f"{host}/a/b").path != f"{host}/a/b":
            raise ValueError("must name each registry as images do, with its port")
    return secrets


def _image_bytes(value: Any) -> int:
    size = _memory(value)
    if size < 1 << 20:
        raise ValueError("must be at least 1Mi")
    return size


def _cpu(value: Any) -> int:
    return quantities.cpu(str(_text(value)))


def _memory(value: Any) -> int:
    return quantities.memory(str(_text(value)))


def _disk(value: Any) -> int:
    size = quantities.memory(str(_text(value)))
    if size < quantities.DISK_FLOOR:
        raise ValueError("must be at least 64Mi")
    return size


def _host_paths(value: Any) -> tuple[str, ...]:
    paths = _texts(value)
    if any(not path.startswith("/") or ".." in path.split("/") or "\0" in path for path in paths):
        raise ValueError("must be a list of absolute paths without ..")
    return paths


def _variables(value: Any) -> tuple[str, ...]:
    names = _texts(value)
    if len(set(names)) != len(names) or any(not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,127}", name) for name in names):
        raise ValueError("must be a list of names of variables, each once")
    return names


def _commands(value: Any) -> tuple[tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]], ...]:
    if not isinstance(value, list):
        raise ValueError("must be a list of tables with name and argv")
    commands: dict[str, tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]]] = {}
    for item in value:
        if not isinstance(item, dict) or not {"name", "argv"} <= set(item) <= {"name", "argv", "env"}:
            raise ValueError("each command has name and argv, may have env, and nothing else")
        name, argv, env = str(_text(item["name"])), _texts(item["argv"]), _text_map(item.get("env", {}))
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", name, re.ASCII) or name in commands:
            raise ValueError("each command has a name of its own, of letters, digits, `.`, `_` and `-`")
        if not argv or not argv[0].startswith("/"):
            raise ValueError("argv begins with the absolute path of a program")
        _variables(list(env))
        for text in env.values():
            if is_reference(text) and backend_of(text) not in (BackendKind.ENV, BackendKind.FILE):
                raise ValueError("a value in env is plain text, env://NAME or file://NAME")
        commands[name] = name, argv, tuple(env.items())
    return tuple(commands.values())


def _tokens(value: Any) -> tuple[tuple[str, TokenSource], ...]:
    if not isinstance(value, list):
        raise ValueError("must be a list of tables with name, kind and credential")
    tokens: dict[str, TokenSource] = {}
    for item in value:
        if not isinstance(item, dict) or not {"name", "kind", "credential"} <= set(item):
            raise ValueError("each token has name, kind and credential")
        name, kind = str(_text(item["name"])), str(_text(item["kind"]))
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", name, re.ASCII) or name in (".", "..", *tokens):
            raise ValueError("each token has a name of its own, of letters, digits, `.`, `_` and `-`")
        if kind not in set(TokenKind):
            raise ValueError(f"kind is one of {', '.join(TokenKind)}")
        given = {key: each for key, each in item.items() if key not in ("name", "kind")}
        for key, each in given.items():
            if key not in TokenSource.__dataclass_fields__ or type(each) is not (int if key == "seconds" else str):
                raise ValueError("a token has no such key, or not with such a value")
        tokens[name] = TokenSource(TokenKind(kind), **given)
    logins = [source.credential for source in tokens.values() if source.kind is TokenKind.REFRESH_TOKEN]
    if len(logins) != len(set(logins)):
        raise ValueError(
            "two tokens have the same refresh token: log in for each, as issuers revoke a token that is used twice"
        )
    return tuple(tokens.items())


def _vault_address(value: Any) -> str:
    text = str(_text(value))
    try:
        parts = urlsplit(text)
        local = parts.hostname in ("127.0.0.1", "::1", "localhost")
        good = parts.scheme == "https" or (parts.scheme == "http" and local)
        extra = parts.path.strip("/") or parts.query or parts.fragment or parts.username or parts.password
        _ = parts.port
    except ValueError:
        raise ValueError("must be a URL") from None
    if text and (not good or not parts.hostname or extra):
        raise ValueError("must be https://HOST:PORT; http only for an agent on this host's loopback")
    return text


def _vault_path(value: Any) -> str:
    if not re.fullmatch(r"([A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*)?", str(_text(value)), re.ASCII) or ".." in value:
        raise ValueError("must be a path of names without a slash at either end")
    return str(value)


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


_PASSWORD = re.compile(r"password|://[^/@?]*:[^/@?]*@", re.IGNORECASE)


def _dsn(value: Any) -> str:
    dsn = str(_text(value))
    if not re.match(r"postgres(ql)?://|[a-z]+ *=", dsn):
        raise ValueError('must be a DSN of PostgreSQL: "postgresql://user@host/name" or "host=... user=... dbname=..."')
    if _PASSWORD.search(dsn):
        raise ValueError(
            "must have no password, because more users read this file: use dsn_file, SALLYPORT_DATABASE_DSN, or a "
            "passfile"
        )
    return dsn


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a type that has its own check, in words."""

    text: str


Text = Annotated[str, PlainValidator(_text)]
Flag = Annotated[bool, PlainValidator(_flag)]
Texts = Annotated[tuple[str, ...], PlainValidator(_texts)]
TextMap = Annotated[dict[str, str], PlainValidator(_text_map)]
LimitMap = Annotated[dict[str, int], PlainValidator(_gateway_limits), Bounds(described())]
AddressMap = Annotated[dict[str, tuple[str, ...]], PlainValidator(_address_map)]
FieldNames = Annotated[tuple[str, ...], PlainValidator(_field_names)]
AbsolutePath = Annotated[Path, PlainValidator(_absolute), Bounds("absolute")]
OptionalPath = Annotated[Path | None, PlainValidator(_path), Bounds("absolute, or empty for none")]
Runtimes = Annotated[tuple[str, ...], PlainValidator(_runtimes), Bounds("at least one of runc, runsc")]
Images = Annotated[tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...], PlainValidator(_images)]
References = Annotated[tuple[str, ...], PlainValidator(_references), Bounds("names of images, or a prefix and `/*`")]
RegistrySecrets = Annotated[dict[str, str], PlainValidator(_registry_secrets)]
ImageBytes = Annotated[int, PlainValidator(_image_bytes), Bounds("at least 1Mi")]
Cpu = Annotated[int, PlainValidator(_cpu), Bounds("above 0")]
Memory = Annotated[int, PlainValidator(_memory), Bounds("above 0")]
Disk = Annotated[int, PlainValidator(_disk), Bounds("at least 64Mi")]
Variables = Annotated[tuple[str, ...], PlainValidator(_variables), Bounds("names of variables")]
Commands = Annotated[tuple[tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]], ...], PlainValidator(_commands)]
Tokens = Annotated[tuple[tuple[str, TokenSource], ...], PlainValidator(_tokens)]
VaultAddress = Annotated[str, PlainValidator(_vault_address), Bounds("https, or http on loopback")]
VaultPath = Annotated[str, PlainValidator(_vault_path)]
HostPaths = Annotated[tuple[str, ...], PlainValidator(_host_paths), Bounds("absolute paths")]
DaemonMemory = Annotated[int, PlainValidator(_daemon_memory), Bounds(f"at least {LEAST_MEMORY >> 20}Mi")]
Dsn = Annotated[str, PlainValidator(_dsn), Bounds("a DSN in a form of libpq, without a password")]
RouteKeyMap = Annotated[dict[str, bytes], PlainValidator(_route_keys), Bounds(f"at least {LEAST_ROUTE_KEY} bytes each")]
KeyId = Annotated[str, PlainValidator(_key_id), Bounds("one of 0-9 and a-z")]
SecureRuntime = Annotated[str, PlainValidator(_docker_runtime), Bounds('`""` or `"gvisor"`')]


def _key(key: str, default: Any, meaning: str, *, unit: str = "", shown: str = "", example: Any = None) -> Any:
    """Describe a key.

    Args:
        default: as a file would contain it; None where it is not a constant.
        shown: the text of the documents in place of the default.
        example: a value for a file where there is no constant default.
    """
    extra = {"unit": unit, "shown": shown, "example": example}
    return Field(default, alias=key, description=meaning, json_schema_extra=extra)


class SettingsModel(BaseModel):
    """One field for each key, in the order of the documents; the alias is the key."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, hide_input_in_errors=True
    )

    server_host: Text = _key("server.host", "127.0.0.1", "address to listen on")
    server_port: Annotated[int, Field(ge=1, le=65535)] = _key(
        "server.port", 8080, "port to listen on; ports below 1024 too, since root binds it"
    )
    server_api_key: Text | None = _key(
        "server.api_key",
        None,
        "the key that clients send, or `sha256:` and its digest in hexadecimal",
        shown="made at the first start",
        example="",
    )
    server_api_keys: Texts = _key("server.api_keys", [], "more keys, each may be taken back alone")
    server_eip: Text = _key("server.eip", "", "public base of endpoints, where `external_base` does not say")
    server_external_base: Text | None = _key(
        "server.external_base",
        None,
        "public base of endpoints; empty: the Host the client used",
        shown="`server.eip`",
        example="",
    )
    server_allowed_hosts: Texts = _key("server.allowed_hosts", [], "further names for Host while no key is asked for")
    server_max_sandbox_timeout_seconds: Annotated[int, Field(ge=60, le=10**9)] | None = _key(
        "server.max_sandbox_timeout_seconds",
        None,
        "longest life a caller may ask for",
        unit="s",
        shown="none",
        example=86400,
    )
    server_timeout_keep_alive: Annotated[int, Field(ge=1, le=3600)] = _key(
        "server.timeout_keep_alive",
        30,
        "seconds an idle connection is kept; a request's head has 15 s, its body on the API's own routes 30 s",
        unit="s",
    )
    server_limit_concurrency: Annotated[int, Field(ge=0, le=10**6)] = _key(
        "server.limit_concurrency", 1024, "connections at once; `0` is no limit"
    )
    server_backlog: Annotated[int, Field(ge=1, le=65535)] = _key(
        "server.backlog", 2048, "connections waiting to be accepted"
    )
    server_timeout_graceful_shutdown: Annotated[int, Field(ge=0, le=3600)] = _key(
        "server.timeout_graceful_shutdown", 5, "seconds that requests get to finish at the end", unit="s"
    )
    ingress_secure_access_active_key: KeyId = _key(
        "ingress.secure_access.active_key", "", "`key_id` of the key that signs new signed routes"
    )
    ingress_secure_access_keys: RouteKeyMap = _key(
        "ingress.secure_access.keys",
        [],
        '`[{key_id = "a", key = "<base64>"}]`: keys of signed routes; a route is valid while its key is in the list. '
        "Without any, the server makes one",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = _key("log.level", "INFO", "of `serve`")
    runtime_type: Literal["docker"] = _key("runtime.type", "docker", "nothing else is offered")
    docker_pids_limit: Annotated[int, Field(ge=1, le=4 * 1024 * 1024)] = _key(
        "docker.pids_limit",
        4096,
        "most processes a caller may ask for; on runsc gVisor keeps this limit, for each user inside, and the "
        "host's is 1024 larger",
        unit="processes",
    )
    docker_sandbox_env: TextMap = _key("docker.sandbox_env", {}, "environment of every sandbox")
    secure_runtime_type: SecureRuntime = _key(
        "secure_runtime.type",
        "",
        '`"gvisor"` makes runsc the default runtime, where `sallyport.default_runtime` does not say',
    )
    renew_intent_enabled: Flag = _key(
        "renew_intent.enabled", False, "an access moves the expiry of sandboxes that ask for it"
    )
    renew_intent_min_interval_seconds: Annotated[int, Field(ge=1, le=86400)] = _key(
        "renew_intent.min_interval_seconds", 60, "at most once in this time", unit="s"
    )
    sallyport_state_dir: AbsolutePath = _key("sallyport.state_dir", "/var/lib/sallyport/state", "what survives")
    sallyport_run_dir: AbsolutePath = _key(
        "sallyport.run_dir",
        "/run/sallyport",
        "what lives as long as the server; at most 60 characters, not below /dev or /proc",
    )
    sallyport_database_dsn: Dsn | None = _key(
        "sallyport.database.dsn",
        None,
        "PostgreSQL for the server's state, with the options of libpq; none: SQLite in `state_dir/lifecycle`",
        shown="none",
        example="postgresql://sallyport@db.example.com/sallyport?sslmode=verify-full&sslrootcert=/etc/ssl/db.pem",
    )
    sallyport_database_dsn_file: OptionalPath = _key(
        "sallyport.database.dsn_file",
        None,
        "a file with the DSN, also with a password, that only its owner can read; it is read as root at the start",
        shown="none",
        example="",
    )
    sallyport_database_connections: Annotated[int, Field(ge=2, le=32)] = _key(
        "sallyport.database.connections", 4, "to PostgreSQL at once: one writes, the others read"
    )
    sallyport_database_connect_seconds: Annotated[int, Field(ge=2, le=60)] = _key(
        "sallyport.database.connect_seconds", 5, "most time for a connect to each address of the DSN", unit="s"
    )
    sallyport_database_statement_seconds: Annotated[int, Field(ge=1, le=300)] = _key(
        "sallyport.database.statement_seconds",
        5,
        "most time for a statement; a call that takes longer gets 503",
        unit="s",
    )
    sallyport_policy_file: OptionalPath = _key(
        "sallyport.policy_file",
        None,
        "the operator's policies (YAML), reread when it changes, by `serve` and by the compiler; none is deny-all",
        shown="none",
        example="",
    )
    sallyport_upstream_netns: OptionalPath = _key(
        "sallyport.upstream_netns",
        None,
        "namespace file that workers dial from; none is the server's own",
        shown="none",
        example="",
    )
    sallyport_upstream_roots: AbsolutePath | None = _key(
        "sallyport.upstream_roots",
        None,
        "authorities (PEM, at most 1 MiB) that upstream servers are verified against, read at the server's start",
        shown="the system's",
        example="/etc/ssl/certs/ca-certificates.crt",
    )
    sallyport_ignored_request_fields: FieldNames = _key(
        "sallyport.ignored_request_fields",
        [],
        "fields at the top of request bodies that newer clients send and that may be ignored; any other "
        "unknown field is refused",
    )
    sallyport_dns_upstreams: Texts | None = _key(
        "sallyport.dns_upstreams",
        None,
        "resolvers of the gateways, `192.0.2.53:53` or `[2001:db8::53]:53`; not on loopback. Addresses with "
        "an interface (`fe80::1%eth0`) are refused here, and passed over in `/etc/resolv.conf`",
        shown="from `/etc/resolv.conf`",
        example=["192.0.2.53:53"],
    )
    sallyport_allowed_addresses: Texts = _key(
        "sallyport.allowed_addresses",
        [],
        "private ranges (CIDR, IPv4 or IPv6) that may be dialled all the same, policy permitting; `always_deny` "
        "outranks them",
    )
    sallyport_host_addresses: AddressMap = _key(
        "sallyport.host_addresses",
        {},
        'fixed addresses of names, IPv4 or IPv6: `{"git.corp.example" = ["10.0.0.5"]}`, private ones too where '
        "`allowed_addresses` opens them in the kernel; policy and `always_deny` hold for them",
    )
    sallyport_gateway_limits: LimitMap = _key(
        "sallyport.gateway_limits",
        {},
        "limits of each sandbox's gateway that differ from the defaults in parentheses: "
        "`{connection_rate = 2000, dial_rate = 2000}` permits 2000 new connections a second. `connections` at once; "
        "`connection_rate` of the sandbox and `dial_rate` to the outside, per second, twice that at once; "
        "`first_bytes`, `connect`, `idle` and `total` in seconds; `scrub_body_bytes` of a response; "
        "`request_body_bytes` of a request that gets a secret in its body or is signed with it",
    )
    sallyport_python: AbsolutePath | None = _key(
        "sallyport.python",
        None,
        "interpreter of hostd and its daemons",
        shown="the running one",
        example="/usr/bin/python3",
    )
    sallyport_runsc: AbsolutePath | None = _key(
        "sallyport.runsc", None, "gVisor", shown="from the PATH", example="/usr/local/bin/runsc"
    )
    sallyport_runc: AbsolutePath | None = _key(
        "sallyport.runc", None, "runc", shown="from the PATH", example="/usr/sbin/runc"
    )
    sallyport_execd: AbsolutePath | None = _key(
        "sallyport.execd",
        None,
        "the static binary for sandboxes",
        shown="`execd/bin/execd` here",
        example="/usr/local/lib/sallyport/execd",
    )
    sallyport_images: Images = _key(
        "sallyport.images",
        [],
        '`[{name = "...", tar = "/...", env = {NAME = "value"}}]`: imported at start where missing or '
        "changed, `env` becomes the image's own (optional; printable ASCII without `\"`, `$` and backslash); "
        "nothing is pulled",
    )
    sallyport_registry_allowed: References = _key(
        "sallyport.registry.allowed",
        [],
        "what `image add` may fetch: `registry.example.com/team/tool` (each tag), `...:1.2`, `...@sha256:...`, or "
        "`registry.example.com/team/*`; empty: nothing",
    )
    sallyport_registry_secrets: RegistrySecrets = _key(
        "sallyport.registry.secrets",
        {},
        'logins of registries: `{"registry.example.com" = "NAME"}` of a secret `user:password` that is bound to the '
        "registry",
    )
    sallyport_registry_skopeo: AbsolutePath | None = _key(
        "sallyport.registry.skopeo",
        None,
        "the program that fetches",
        shown="from the PATH",
        example="/usr/bin/skopeo",
    )
    sallyport_max_image: ImageBytes = _key(
        "sallyport.max_image", "16Gi", "most that an added image may have, unpacked", unit="bytes"
    )
    sallyport_default_runtime: Literal["runc", "runsc"] | None = _key(
        "sallyport.default_runtime",
        None,
        "where a call names none",
        shown="`runc`, or what `secure_runtime.type` says",
        example="runc",
    )
    sallyport_allowed_runtimes: Runtimes = _key(
        "sallyport.allowed_runtimes",
        ["runc", "runsc"],
        "what a call may name; each must work, or the server does not start",
    )
    sallyport_default_cpu: Cpu = _key("sallyport.default_cpu", "1", "of a sandbox that asks for nothing", unit="cores")
    sallyport_default_memory: Memory = _key(
        "sallyport.default_memory", "2Gi", "of a sandbox that asks for nothing", unit="bytes"
    )
    sallyport_default_pids: Annotated[int, Field(ge=1, le=4 * 1024 * 1024)] = _key(
        "sallyport.default_pids", 1024, "of a sandbox that asks for nothing", unit="processes"
    )
    sallyport_max_cpu: Cpu | None = _key(
        "sallyport.max_cpu", None, "most a sandbox may ask for", unit="cores", shown="all there are", example="4"
    )
    sallyport_max_memory: Memory | None = _key(
        "sallyport.max_memory", None, "most a sandbox may ask for", unit="bytes", shown="all there is", example="8Gi"
    )
    sallyport_disk_limits: Flag = _key(
        "sallyport.disk_limits",
        True,
        "each sandbox has a disk of its own; `false`: none has, and one can fill the host's",
    )
    sallyport_network_bandwidth: Annotated[int, Field(ge=LEAST_BANDWIDTH, le=MOST_BANDWIDTH)] | None = _key(
        "sallyport.network_bandwidth",
        None,
        "most of the link of each sandbox, in each direction, calls into the sandbox included; more waits",
        unit="bytes/s",
        shown="none",
        example=12500000,
    )
    sallyport_disk_bandwidth: Annotated[int, Field(ge=LEAST_BANDWIDTH, le=MOST_BANDWIDTH)] | None = _key(
        "sallyport.disk_bandwidth",
        None,
        "most that a sandbox reads from its disk, and writes to it; without `disk_limits` it has no effect",
        unit="bytes/s",
        shown="none",
        example=50000000,
    )
    sallyport_memory_auditd: DaemonMemory = _key(
        "sallyport.memory.auditd",
        "1Gi",
        "what the daemon may have; one that wants more is ended by the kernel and started again",
        unit="bytes",
    )
    sallyport_memory_vaultd: DaemonMemory = _key(
        "sallyport.memory.vaultd", "1Gi", "the same for the vault", unit="bytes"
    )
    sallyport_memory_zygote: DaemonMemory = _key(
        "sallyport.memory.zygote",
        "1Gi",
        "the same for the zygote; gateway workers have groups of their own",
        unit="bytes",
    )
    sallyport_memory_compiler: DaemonMemory = _key(
        "sallyport.memory.compiler", "1Gi", "the same for the compiler of policies", unit="bytes"
    )
    sallyport_memory_serve: DaemonMemory = _key(
        "sallyport.memory.serve", "2Gi", "the same for the API server", unit="bytes"
    )
    sallyport_memory_fetcher: DaemonMemory = _key(
        "sallyport.memory.fetcher", "1Gi", "the same for the process that speaks to backends of secrets", unit="bytes"
    )
    sallyport_default_disk: Disk = _key(
        "sallyport.default_disk",
        "2Gi",
        "of a sandbox that asks for nothing (`resourceLimits` takes `disk` or `ephemeral-storage`)",
        unit="bytes",
    )
    sallyport_max_disk: Disk = _key("sallyport.max_disk", "16Gi", "most a sandbox may ask for", unit="bytes")
    storage_allowed_host_paths: HostPaths = _key(
        "storage.allowed_host_paths",
        [],
        "files and directories of this host that a create call may mount, with all below them; an empty list allows "
        "none",
        example=["/srv/agents"],
    )
    storage_volume_default_size: Disk = _key(
        "storage.volume_default_size", "1Gi", "of a new named volume for which the call requests no size", unit="bytes"
    )
    sallyport_max_volume: Disk = _key(
        "sallyport.max_volume", "16Gi", "largest named volume that a call may make", unit="bytes"
    )
    sallyport_max_volumes: Annotated[int, Field(ge=0, le=1000)] = _key(
        "sallyport.max_volumes", 64, "named volumes of this host; a call that would make more is answered with 429"
    )
    sallyport_snapshots_count: Annotated[int, Field(ge=0, le=10000)] = _key(
        "sallyport.snapshots.count", 100, "at once, of all sandboxes; more are answered with 409"
    )
    sallyport_snapshots_max_bytes: Disk = _key(
        "sallyport.snapshots.max_bytes",
        "4Gi",
        "one snapshot: what its sandbox wrote, holes of files included",
        unit="bytes",
    )
    sallyport_snapshots_total_bytes: Disk = _key(
        "sallyport.snapshots.total_bytes", "20Gi", "all snapshots together; more are answered with 409", unit="bytes"
    )
    sallyport_max_sandboxes: Annotated[int, Field(ge=1, le=4096)] = _key(
        "sallyport.max_sandboxes", 1000, "at once; more are answered with 429"
    )
    sallyport_max_pending: Annotated[int, Field(ge=1, le=4096)] = _key(
        "sallyport.max_pending", 128, "creations at once, launches and those that wait; more are answered with 429"
    )
    sallyport_launch_concurrency: Annotated[int, Field(ge=1, le=256)] = _key(
        "sallyport.launch_concurrency", 4, "launches at once; the others wait"
    )
    sallyport_create_queue_seconds: Annotated[int, Field(ge=1, le=3600)] = _key(
        "sallyport.create_queue_seconds",
        60,
        "longest wait of a creation for its launch; then it fails, with 429 if its caller still waits",
        unit="s",
    )
    sallyport_create_answer_seconds: Annotated[int, Field(ge=1, le=29)] = _key(
        "sallyport.create_answer_seconds", 20, "a create call that takes longer is answered with `Pending`", unit="s"
    )
    sallyport_ceilings_total_sandboxes: Annotated[int, Field(ge=1, le=10**6)] | None = _key(
        "sallyport.ceilings.total.sandboxes",
        None,
        "most number of all sandboxes together, of all servers with the same state database",
        shown="none",
        example=200,
    )
    sallyport_ceilings_total_cpu: Cpu | None = _key(
        "sallyport.ceilings.total.cpu",
        None,
        "most of all sandboxes together, of all servers with the same state database",
        unit="cores",
        shown="none",
        example="32",
    )
    sallyport_ceilings_total_memory: Memory | None = _key(
        "sallyport.ceilings.total.memory",
        None,
        "most of all sandboxes together, of all servers with the same state database",
        unit="bytes",
        shown="none",
        example="64Gi",
    )
    sallyport_ceilings_total_disk: Memory | None = _key(
        "sallyport.ceilings.total.disk",
        None,
        "most of all sandboxes together, of all servers with the same state database",
        unit="bytes",
        shown="none",
        example="200Gi",
    )
    sallyport_ceilings_per_key_sandboxes: Annotated[int, Field(ge=1, le=10**6)] | None = _key(
        "sallyport.ceilings.per_key.sandboxes",
        None,
        "most number of the sandboxes of each API key together",
        shown="none",
        example=20,
    )
    sallyport_ceilings_per_key_cpu: Cpu | None = _key(
        "sallyport.ceilings.per_key.cpu",
        None,
        "most of the sandboxes of each API key together",
        unit="cores",
        shown="none",
        example="32",
    )
    sallyport_ceilings_per_key_memory: Memory | None = _key(
        "sallyport.ceilings.per_key.memory",
        None,
        "most of the sandboxes of each API key together",
        unit="bytes",
        shown="none",
        example="64Gi",
    )
    sallyport_ceilings_per_key_disk: Memory | None = _key(
        "sallyport.ceilings.per_key.disk",
        None,
        "most of the sandboxes of each API key together",
        unit="bytes",
        shown="none",
        example="200Gi",
    )
    sallyport_proxy_connections: Annotated[int, Field(ge=1, le=256)] = _key(
        "sallyport.proxy_connections", 128, "to one sandbox at once"
    )
    sallyport_diagnostics_retention_seconds: Annotated[int, Field(ge=0, le=30 * 86400)] = _key(
        "sallyport.diagnostics_retention_seconds",
        86400,
        "how long events and the end of the output of a removed sandbox are kept; `0` keeps none",
        unit="s",
    )
    sallyport_docker_managed: Flag = _key(
        "sallyport.docker.managed", False, "start a dockerd of our own", shown="`false`; `./run`: `true`"
    )
    sallyport_docker_socket: AbsolutePath | None = _key(
        "sallyport.docker.socket",
        None,
        "where Docker answers",
        shown="`/var/run/docker.sock`; managed: `run_dir/docker.sock`",
        example="/var/run/docker.sock",
    )
    sallyport_docker_binary: AbsolutePath = _key("sallyport.docker.binary", "/usr/sbin/dockerd", "managed: the program")
    sallyport_docker_data_root: AbsolutePath | None = _key(
        "sallyport.docker.data_root",
        None,
        "managed: its images and containers",
        shown="`docker/data` beside `state_dir`; `./run`: `/var/lib/sallyport/docker`",
        example="/var/lib/sallyport/docker/data",
    )
    sallyport_docker_exec_root: AbsolutePath | None = _key(
        "sallyport.docker.exec_root",
        None,
        "managed: its run-time files",
        shown="`run_dir/docker`",
        example="/run/sallyport/docker",
    )
    sallyport_docker_pidfile: AbsolutePath | None = _key(
        "sallyport.docker.pidfile", None, "managed", shown="`run_dir/docker.pid`", example="/run/sallyport/docker.pid"
    )
    sallyport_docker_log: AbsolutePath | None = _key(
        "sallyport.docker.log",
        None,
        "managed",
        shown="`docker/dockerd.log` beside `state_dir`",
        example="/var/lib/sallyport/docker/dockerd.log",
    )
    sallyport_audit_sync: Literal["group", "always"] = _key(
        "sallyport.audit.sync", "group", "`always` syncs each record; `group` shares a sync among those that wait"
    )
    sallyport_audit_max_file_bytes: Annotated[int, Field(ge=65536, le=1 << 40)] = _key(
        "sallyport.audit.max_file_bytes", 67108864, "size at which a new file is begun", unit="bytes"
    )
    sallyport_audit_max_files: Annotated[int, Field(ge=0, le=10**6)] = _key(
        "sallyport.audit.max_files",
        0,
        "files to keep as they were written; of older ones each chain keeps its share; `0` keeps all",
    )
    sallyport_audit_sandbox_share: Annotated[int, Field(ge=65536, le=2**40)] = _key(
        "sallyport.audit.sandbox_share", 8388608, "bytes that a sandbox's chain keeps of older files", unit="bytes"
    )
    sallyport_audit_control_share: Annotated[int, Field(ge=65536, le=2**40)] = _key(
        "sallyport.audit.control_share", 268435456, "bytes that the control chain keeps of older files", unit="bytes"
    )
    sallyport_audit_closed_sandboxes: Annotated[int, Field(ge=0, le=10**6)] = _key(
        "sallyport.audit.closed_sandboxes", 1000, "removed sandboxes whose chains are kept of older files"
    )
    sallyport_audit_sandbox_bytes_per_second: Annotated[int, Field(ge=0, le=1 << 40)] = _key(
        "sallyport.audit.sandbox_bytes_per_second",
        8388608,
        "what one sandbox may have logged, eight seconds of it at once; beyond it its requests wait; `0`: any amount",
        unit="bytes/s",
    )
    sallyport_vault_master_key_file: AbsolutePath | None = _key(
        "sallyport.vault.master_key_file",
        None,
        "made at the first start",
        shown="`state_dir/vault/master-key`",
        example="/var/lib/sallyport/state/vault/master-key",
    )
    sallyport_vault_key_source: Literal["file", "credential", "pkcs11", "transit"] = _key(
        "sallyport.vault.key_source",
        "file",
        "where a new master key is kept: plain in `master_key_file`; in the systemd credential `sallyport-master-key`; "
        "in `master_key_file`, wrapped by a key in a PKCS#11 token or by Vault's transit engine",
    )
    sallyport_vault_pkcs11_module: OptionalPath = _key(
        "sallyport.vault.pkcs11.module",
        None,
        "the shared object of the token's vendor; only a short-lived process loads it",
        shown="none",
        example="",
    )
    sallyport_vault_pkcs11_token_label: Text = _key("sallyport.vault.pkcs11.token_label", "", "the label of the token")
    sallyport_vault_pkcs11_key_label: Text = _key(
        "sallyport.vault.pkcs11.key_label",
        "",
        "the label of an AES key of 256 bits in it, sensitive and not extractable",
    )
    sallyport_vault_pkcs11_pin_file: OptionalPath = _key(
        "sallyport.vault.pkcs11.pin_file",
        None,
        "the PIN of the token's user, in a file of root (mode 0600 or 0400), or a systemd credential",
        shown="none",
        example="",
    )
    sallyport_vault_pkcs11_environment: TextMap = _key(
        "sallyport.vault.pkcs11.environment",
        {},
        "variables that the module needs, such as its configuration file; no secret: every user can read them",
    )
    sallyport_vault_transit_address: VaultAddress = _key(
        "sallyport.vault.transit.address",
        "",
        "HashiCorp Vault or OpenBao whose transit engine wraps the master key",
        example="https://vault.example.com:8200",
    )
    sallyport_vault_transit_ca_file: OptionalPath = _key(
        "sallyport.vault.transit.ca_file",
        None,
        "the authorities of its certificate (PEM); no others count",
        shown="`sallyport.upstream_roots`",
        example="",
    )
    sallyport_vault_transit_namespace: Text = _key("sallyport.vault.transit.namespace", "", "sent with each request")
    sallyport_vault_transit_auth: Literal["token", "approle", "jwt", "kubernetes"] = _key(
        "sallyport.vault.transit.auth", "approle", "how Sallyport logs in"
    )
    sallyport_vault_transit_auth_mount: VaultPath = _key(
        "sallyport.vault.transit.auth_mount", "", "where that method is mounted; empty: at its own name"
    )
    sallyport_vault_transit_role: Text = _key(
        "sallyport.vault.transit.role", "", "the role of the login; of `approle` the role id"
    )
    sallyport_vault_transit_credential_file: OptionalPath = _key(
        "sallyport.vault.transit.credential_file",
        None,
        "the token, secret id or JWT, in a file that root can read; it is read at each login",
        shown="none",
        example="",
    )
    sallyport_vault_transit_mount: VaultPath = _key(
        "sallyport.vault.transit.mount", "transit", "where the transit engine is mounted"
    )
    sallyport_vault_transit_key: VaultPath = _key("sallyport.vault.transit.key", "", "the name of its key")
    sallyport_vault_environment: Variables = _key(
        "sallyport.vault.environment",
        [],
        "variables of the server's environment that a policy may name as `env://NAME`",
        example=["OPENAI_API_KEY"],
    )
    sallyport_vault_file_directories: HostPaths = _key(
        "sallyport.vault.file_directories",
        [],
        "directories whose files a policy may name as `file://NAME`; the first one with the file counts",
        example=["/run/credentials/sallyport.service"],
    )
    sallyport_vault_commands: Commands = _key(
        "sallyport.vault.commands",
        [],
        '`[{name = "x", argv = ["/usr/bin/pass", "show", "x"], env = {HOME = "/srv/pass"}}]`: programs whose output a '
        "policy may name as `command://x`; a value in `env` can be `env://NAME` or `file://NAME`",
    )
    sallyport_vault_tokens: Tokens = _key(
        "sallyport.vault.tokens",
        [],
        "tokens that a policy may name as `token://NAME`: tables with `name`, `kind` (`client-credentials`, "
        "`refresh-token`, `jwt`, `github-app`), `credential` (`env://NAME` or `file://NAME`), and by kind `url`, "
        "`client`, `client_secret`, `audience`, `scope`, `subject`, `key_id`, `installation`, `seconds`",
    )
    sallyport_vault_hashicorp_address: VaultAddress = _key(
        "sallyport.vault.hashicorp.address",
        "",
        "HashiCorp Vault or OpenBao, whose secrets a policy may name as `vault://mount/path#field`",
        example="https://vault.example.com:8200",
    )
    sallyport_vault_hashicorp_ca_file: OptionalPath = _key(
        "sallyport.vault.hashicorp.ca_file",
        None,
        "the authorities of its certificate (PEM); no others count",
        shown="`sallyport.upstream_roots`",
        example="",
    )
    sallyport_vault_hashicorp_namespace: Text = _key(
        "sallyport.vault.hashicorp.namespace", "", "sent with each request"
    )
    sallyport_vault_hashicorp_auth: Literal["token", "approle", "jwt", "kubernetes"] = _key(
        "sallyport.vault.hashicorp.auth", "approle", "how Sallyport logs in"
    )
    sallyport_vault_hashicorp_auth_mount: VaultPath = _key(
        "sallyport.vault.hashicorp.auth_mount", "", "where that method is mounted; empty: at its own name"
    )
    sallyport_vault_hashicorp_role: Text = _key(
        "sallyport.vault.hashicorp.role", "", "the role of the login; of `approle` the role id"
    )
    sallyport_vault_hashicorp_credential_file: OptionalPath = _key(
        "sallyport.vault.hashicorp.credential_file",
        None,
        "the token, secret id or JWT, in a file that root can read; it is read at each login",
        shown="none",
        example="",
    )
    sallyport_vault_hashicorp_allowed: Texts = _key(
        "sallyport.vault.hashicorp.allowed",
        [],
        "paths that a policy may name, each exact or a prefix and `*`; empty: all that Vault permits",
    )
    sallyport_vault_refresh_seconds: Annotated[int, Field(ge=5, le=300)] = _key(
        "sallyport.vault.refresh_seconds",
        60,
        "after this time a backend is asked again for a value without a lease of its own",
        unit="s",
    )
    sallyport_uids_serve: Annotated[int, Field(ge=1, le=2**31 - 1)] = _key(
        "sallyport.uids.serve", 700000001, "user of the API server"
    )
    sallyport_uids_vaultd: Annotated[int, Field(ge=1, le=2**31 - 1)] = _key(
        "sallyport.uids.vaultd", 700000002, "user of the vault"
    )
    sallyport_uids_auditd: Annotated[int, Field(ge=1, le=2**31 - 1)] = _key(
        "sallyport.uids.auditd", 700000003, "user of the log"
    )
    sallyport_uids_compiler: Annotated[int, Field(ge=1, le=2**31 - 1)] = _key(
        "sallyport.uids.compiler", 700000004, "user of the policies' compiler"
    )
    sallyport_uids_fetcher: Annotated[int, Field(ge=1, le=2**31 - 1)] = _key(
        "sallyport.uids.fetcher", 700000005, "user of the process that speaks to backends of secrets"
    )
    sallyport_uids_worker_base: Annotated[int, Field(ge=1, le=2**31 - 1)] = _key(
        "sallyport.uids.worker_base", 700001000, "first user of the gateway workers"
    )
    sallyport_uids_workers: Annotated[int, Field(ge=1, le=4094)] = _key(
        "sallyport.uids.workers",
        4094,
        "how many of them, 4094 at most: each sandbox on runc has 65,536 users from 1879048192 on",
    )


KEYS: Mapping[str, FieldInfo] = {str(field.alias): field for field in SettingsModel.model_fields.values()}
"""Every key that has an effect."""

NOT_APPLICABLE = frozenset(
    (
        *("server.thread_pool_size", "server.loop", "server.http", "proxy.resolve_internal", "log.file_enabled"),
        *("log.file_path", "log.access_file_path", "log.file_max_bytes", "log.file_backup_count"),
        *("runtime.execd_image", "runtime.execd_run_as_init", "docker.network_mode", "docker.api_timeout"),
        *("docker.host_ip", "docker.port_range_min", "docker.port_range_max", "docker.publish_host"),
        *("docker.drop_capabilities", "docker.no_new_privileges", "docker.apparmor_profile"),
        *("docker.seccomp_profile", "storage.ossfs_mount_root", "store.type"),
        *("store.path", "egress.image", "egress.mode", "egress.disable_ipv6", "egress.readiness_timeout_seconds"),
        *("ingress.gateway.address", "ingress.gateway.route.mode"),
        *("egress.otlp_endpoint", "ingress.mode", "secure_runtime.docker_runtime", "otel.enabled", "otel.endpoint"),
        *("otel.service_name", "otel.export_interval_millis"),
    )
)
"""Keys of the reference server that are accepted without effect: their features are built in, or not offered yet."""


@cache
def defaults() -> Mapping[str, Any]:
    """Return the default of each key, converted like a value of a file."""
    model = SettingsModel()
    return {str(field.alias): getattr(model, name) for name, field in SettingsModel.model_fields.items()}


def converted(document: Mapping[str, Any]) -> dict[str, Any]:
    """Check and convert the values of keys.

    Raises:
        SettingError: the first wrong value.
    """
    try:
        model = SettingsModel.model_validate(document)
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        key = str(problem["loc"][0])
        own = problem.get("ctx", {}).get("error")
        raise SettingError(key, str(own) if own is not None else f"must be {allowed(key)}") from None
    found = {str(field.alias): getattr(model, name) for name, field in SettingsModel.model_fields.items()}
    return {key: found[key] for key in document}


class SettingError(ValueError):
    """The value of a key is wrong. The text continues after the key's name."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(problem)
        self.key = key


def allowed(key: str) -> str:
    """Describe the bounds of a key; empty if its type has none."""
    parts = _parts(KEYS[key])
    least = next((item.ge for item in parts if hasattr(item, "ge")), None)
    most = next((item.le for item in parts if hasattr(item, "le")), None)
    if least is not None:
        return f"a number from {least} to {most}"
    words = [item for item in parts if isinstance(item, str)]
    return (
        f"one of {', '.join(words)}" if words else next((item.text for item in parts if isinstance(item, Bounds)), "")
    )


def _parts(field: FieldInfo) -> list[Any]:
    """Return the constraints of a field, at any depth of its type."""
    found, waiting = [], [field.annotation, *field.metadata]
    while waiting:
        item = waiting.pop(0)
        if isinstance(item, FieldInfo):
            waiting += item.metadata
        elif arguments := get_args(item):
            waiting += [*arguments, *getattr(item, "__metadata__", ())]
        else:
            found.append(item)
    return found
