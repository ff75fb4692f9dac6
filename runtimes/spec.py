"""What hostd is asked to launch, and what it is configured with: the wire forms, strictly validated.

- Unknown keys, wrong types and out-of-range numbers are refused; there are no defaults for anything that isolates.
- A launch names an image, an entrypoint and limits. It cannot name mounts, capabilities, devices or namespaces.
"""

import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from runtimes.engine.disk import SMALLEST
from runtimes.engine.profile import ISOLATED, PROFILES
from runtimes.engine.user_namespace import RANGE
from wire.endpoints import parse_endpoint
from wire.ids import SANDBOX_ID

IMAGE_NAME = re.compile(r"(?=.{1,256}$)[a-zA-Z0-9](?:[a-zA-Z0-9_:@-]|[./][a-zA-Z0-9_:@-])*")
"""What Docker may be asked for as an image: part of a path there, so nothing that leads elsewhere in it."""
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,255}")
_IMAGE_TEXT = re.compile(r"[ !#%-\[\]-~]{0,1024}")  # what Docker's ENV takes as it is: no quote, dollar or backslash
_MAX_TEXT = 128 * 1024
_MAX_ENV = 1024 * 1024

type Runtime = Literal["runc", "runsc"]
RUNTIMES: tuple[Runtime, ...] = ("runc", "runsc")

SandboxId = Annotated[str, Field(pattern=rf"^{SANDBOX_ID.pattern}$")]


def _image_name(name: str) -> str:
    if not IMAGE_NAME.fullmatch(name):
        raise ValueError("not an image name")
    return name


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class LaunchSpec(_Strict):
    """One sandbox to launch; no `disk_bytes`: no limit.

    `selection` says which policy it has, and is read by the compiler alone. `ca_root` is what its programs trust beside
    the operator's roots: no worker does. `isolation` lets execd mount inside the sandbox, for isolated sessions: on
    a runtime only whose kernel is the sandbox's own.
    """

    sandbox: SandboxId
    runtime: Runtime
    image: Annotated[str, AfterValidator(_image_name)]
    entrypoint: list[str] = Field(min_length=1, max_length=256)
    env: dict[str, str] = Field(max_length=1024)
    cpu_nanos: int = Field(ge=1_000_000, le=1024 * 10**9)
    memory_bytes: int = Field(ge=6 * 1024 * 1024, le=2**44)
    pids: int = Field(ge=1, le=4 * 1024 * 1024)
    disk_bytes: int | None = Field(ge=SMALLEST, le=2**50)
    isolation: bool = False
    ca_root: str = Field(min_length=1, max_length=64 * 1024)
    execd_token_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    selection: dict[str, Any]

    @field_validator("entrypoint")
    @classmethod
    def _arguments(cls, value: list[str]) -> list[str]:
        if any("\0" in item or len(item) > _MAX_TEXT for item in value) or not value[0]:
            raise ValueError("an argument is empty in front, too long, or holds a NUL")
        return value

    @field_validator("env")
    @classmethod
    def _environment(cls, value: dict[str, str]) -> dict[str, str]:
        if any(not _ENV_NAME.fullmatch(name) for name in value):
            raise ValueError("a variable name is not allowed")
        if any("\0" in text or len(text) > _MAX_TEXT for text in value.values()):
            raise ValueError("a variable's value is too long or holds a NUL")
        if sum(len(name) + len(text) for name, text in value.items()) > _MAX_ENV:
            raise ValueError("the environment is too large")
        return value

    @model_validator(mode="after")
    def _isolated(self) -> "LaunchSpec":
        if self.isolation and not PROFILES[self.runtime].isolation:
            raise ValueError(f"isolated sessions need {ISOLATED}")
        return self


_FIRST_USER = 0x70000000  # systemd assigns nothing from here to 0x7ffdffff


def sandbox_users(index: int) -> int:
    """Return the first of the `RANGE` host uids of a sandbox on runc in slot `index`."""
    return _FIRST_USER + index * RANGE


class Uids(_Strict):
    """Numeric users of the daemons; gateway workers have `workers` uids from `worker_base` on.

    Each sandbox on runc has a range of uids, see `sandbox_users`; `workers` bounds their number, too.
    """

    serve: int = Field(default=700000001, ge=1)
    vaultd: int = Field(default=700000002, ge=1)
    auditd: int = Field(default=700000003, ge=1)
    compiler: int = Field(default=700000004, ge=1)
    worker_base: int = Field(default=700001000, ge=1)
    workers: int = Field(default=4094, ge=1, le=4094)

    @model_validator(mode="after")
    def _distinct(self) -> "Uids":
        daemons = set(self.daemons)
        if len(daemons) != len(self.daemons) or any(0 <= uid - self.worker_base < self.workers for uid in daemons):
            raise ValueError("each daemon and each worker needs a uid of its own")
        sandboxes = range(sandbox_users(0), sandbox_users(self.workers))
        if any(uid in sandboxes for uid in (*daemons, self.worker_base, self.worker_base + self.workers - 1)):
            raise ValueError("a uid is in the range of the sandboxes")
        return self

    @property
    def daemons(self) -> tuple[int, ...]:
        """Of the daemons, one each."""
        return self.serve, self.vaultd, self.auditd, self.compiler


class Maxima(_Strict):
    """The most that one sandbox may have, and how many there may be. `disk_bytes` None is no limit."""

    cpu_nanos: int = Field(ge=1)
    memory_bytes: int = Field(ge=1)
    pids: int = Field(ge=1)
    disk_bytes: int | None = Field(ge=1)
    sandboxes: int = Field(ge=1)


class DockerdConfig(_Strict):
    """A dockerd of our own, in a network namespace of its own."""

    binary: str = "/usr/sbin/dockerd"
    data_root: str
    exec_root: str
    pidfile: str
    log: str


def image_environment(env: dict[str, str]) -> dict[str, str]:
    """Return the environment of an image.

    Raises:
        ValueError: a name is none, or a value is long or has other than printable ASCII, or `"`, `$` or a backslash.
    """
    for name, text in env.items():
        if not _ENV_NAME.fullmatch(name) or not _IMAGE_TEXT.fullmatch(text):
            raise ValueError("must have names of variables and plain values in each env")
    return env


class ImageConfig(_Strict):
    """An image imported from a root file system tar when it is missing or the tar or `env` has changed."""

    name: str
    tar: str
    env: Annotated[dict[str, str], AfterValidator(image_environment)] = {}


class ProcessConfig(_Strict):
    """A daemon: `python -m <module> <config>`."""

    name: Literal["auditd", "vaultd", "compiler", "zygote", "serve"]
    module: str = Field(pattern=r"^[a-z_][a-z0-9_.]*$")
    config: str


class ListenConfig(_Strict):
    """The address of the API; an address or a name of this host."""

    host: str = Field(min_length=1)
    port: int = Field(ge=1, le=65535)


LEAST_MEMORY: Final = 256 << 20


class DaemonMemory(_Strict):
    """Bytes that each daemon may have; one that wants more is ended by the kernel and started again."""

    auditd: int = Field(default=1 << 30, ge=LEAST_MEMORY)
    vaultd: int = Field(default=1 << 30, ge=LEAST_MEMORY)
    zygote: int = Field(default=1 << 30, ge=LEAST_MEMORY)
    compiler: int = Field(default=1 << 30, ge=LEAST_MEMORY)
    serve: int = Field(default=2 << 30, ge=LEAST_MEMORY)


class HostConfig(_Strict):
    """What `python -m runtimes.hostd` reads. With `disk_limits` a launch without a limit is refused.

    All that is the operator's in a worker's configuration is here or in the operator's policy file, which the compiler
    reads: no call can say it. `listen` is None where no process is `serve`.
    """

    run_dir: str
    state_dir: str
    python: str
    upstream_netns: str | None
    docker_socket: str
    dockerd: DockerdConfig | None
    images: list[ImageConfig]
    runsc: str
    runc: str
    execd: str
    upstream_roots: str
    uids: Uids = Uids()
    dns_upstreams: list[str]
    allowed_addresses: list[str]
    host_addresses: dict[str, list[str]]
    gateway_limits: dict[str, int]
    maxima: Maxima
    launch_concurrency: int = Field(ge=1, le=256)
    processes: list[ProcessConfig]
    listen: ListenConfig | None = None
    runtimes: list[Runtime] = Field(default=list(RUNTIMES), min_length=1)
    disk_limits: bool = True
    memory: DaemonMemory = DaemonMemory()

    @property
    def programs(self) -> dict[Runtime, str]:
        """The real program of each runtime."""
        return {"runc": self.runc, "runsc": self.runsc}

    @model_validator(mode="after")
    def _check(self) -> "HostConfig":
        names = [process.name for process in self.processes]
        if len(names) != len(set(names)) or not {"auditd", "vaultd", "compiler", "zygote"} <= set(names):
            raise ValueError("processes must name auditd, vaultd, compiler and zygote, each process once")
        if ("serve" in names) is (self.listen is None):
            raise ValueError("listen is the address of serve, and missing without it")
        paths = [self.run_dir, self.state_dir, self.python, self.docker_socket, self.runsc, self.runc, self.execd]
        paths.append(self.upstream_roots)
        if any(not Path(path).is_absolute() for path in paths):
            raise ValueError("paths must be absolute")
        _ = self.resolvers, self.allowed
        return self

    @property
    def resolvers(self) -> tuple[tuple[IPv4Address | IPv6Address, int], ...]:
        """`dns_upstreams`, parsed."""
        return tuple(parse_endpoint(text) for text in self.dns_upstreams)

    @property
    def allowed(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """`allowed_addresses`, parsed."""
        return tuple(ip_network(text) for text in self.allowed_addresses)
