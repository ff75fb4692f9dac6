"""The configuration of hostd, and the checks that a launch must pass on any host.

Unknown and missing keys, wrong types and out-of-range numbers are refused. Defaults are defined only in the settings
(`lifecycle/config/keys.py`).
"""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from runtimes.bounds import (
    ENV_NAME,
    IMAGE_NAME,
    LEAST_BANDWIDTH,
    LEAST_MEMORY,
    MOST_BANDWIDTH,
    configured_name,
    image_environment,
)
from runtimes.engine import targets
from runtimes.engine.disk import SMALLEST
from runtimes.engine.profile import ISOLATED, PROFILES
from runtimes.engine.user_namespace import RANGE
from runtimes.images.references import Pattern
from runtimes.net.nft import GuardPlan
from runtimes.net.plan import NetworkPlan, slot_plan
from wire.api.hostd import Launch, Runtime
from wire.endpoints import parse_endpoint
from wire.gateway_limits import GatewayLimits
from wire.ids import SANDBOX_ID

SandboxId = Annotated[str, Field(pattern=rf"^{SANDBOX_ID.pattern}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


def check_launch(launch: Launch) -> None:
    """Check the values of a launch that go to Docker and to its runtime.

    Raises:
        ValueError: the launch is not possible. The message has no value of the launch.
    """
    if not IMAGE_NAME.fullmatch(launch.image):
        raise ValueError("not an image name")
    if any(not ENV_NAME.fullmatch(name) for name in launch.env):
        raise ValueError("a variable's name is not allowed")
    if launch.disk_bytes is not None and launch.disk_bytes < SMALLEST:
        raise ValueError(f"disk_bytes: at least {SMALLEST}")
    if launch.isolation and not PROFILES[launch.runtime].isolation:
        raise ValueError(f"isolated sessions need {ISOLATED}")
    for volume in launch.volumes:
        if problem := targets.problem(volume.target):
            raise ValueError(f"a volume cannot be mounted there: {problem}")
        if volume.named is not None and volume.named.size_bytes is not None and volume.named.size_bytes < SMALLEST:
            raise ValueError(f"size_bytes: at least {SMALLEST}")


_FIRST_USER = 0x70000000  # systemd assigns nothing from here to 0x7ffdffff


def sandbox_users(index: int) -> int:
    """Return the first of the `RANGE` host uids of a sandbox on runc in slot `index`."""
    return _FIRST_USER + index * RANGE


class Uids(_Strict):
    """Numeric users of the daemons; gateway workers have `workers` uids from `worker_base` on.

    Each sandbox on runc has a range of uids, see `sandbox_users`; `workers` is also the limit of their number.
    """

    serve: int = Field(ge=1)
    vaultd: int = Field(ge=1)
    auditd: int = Field(ge=1)
    compiler: int = Field(ge=1)
    fetcher: int = Field(ge=1)
    worker_base: int = Field(ge=1)
    workers: int = Field(ge=1, le=4094)

    @model_validator(mode="after")
    def _distinct(self) -> "Uids":
        daemons = set(self.daemons)
        if len(daemons) != len(self.daemons) or any(0 <= uid - self.worker_base < self.workers for uid in daemons):
            raise ValueError("each daemon and each worker needs a uid of its own")
        if self.image_fetcher in daemons:
            raise ValueError("the uid behind the workers' is the fetcher's of images")
        sandboxes = range(sandbox_users(0), sandbox_users(self.workers))
        if any(uid in sandboxes for uid in (*daemons, self.worker_base, self.image_fetcher)):
            raise ValueError("a uid is in the range of the sandboxes")
        return self

    @property
    def daemons(self) -> tuple[int, ...]:
        """The uids of the daemons, one for each."""
        return self.serve, self.vaultd, self.auditd, self.compiler, self.fetcher

    @property
    def image_fetcher(self) -> int:
        """The user that fetches and unpacks images. The guard judges its packets like a worker's."""
        return self.worker_base + self.workers


class Maxima(_Strict):
    """The maximum that one sandbox can have, and the maximum number of sandboxes. `disk_bytes` None is no limit."""

    cpu_nanos: int = Field(ge=1)
    memory_bytes: int = Field(ge=1)
    pids: int = Field(ge=1)
    disk_bytes: int | None = Field(ge=1)
    sandboxes: int = Field(ge=1)


class VolumesConfig(_Strict):
    """The operator's bounds of volumes. An empty `allowed_host_paths` allows no path of the host."""

    allowed_host_paths: list[str]
    default_bytes: int = Field(ge=SMALLEST)
    max_bytes: int = Field(ge=SMALLEST)
    max_count: int = Field(ge=0)


class SnapshotLimits(_Strict):
    """The limits of snapshots: their number, the bytes of one, and the bytes of all. With 0 there are none."""

    count: int = Field(ge=0)
    bytes_each: int = Field(ge=1)
    bytes_total: int = Field(ge=1)


class DockerdConfig(_Strict):
    """The dockerd that hostd starts, in its own network namespace."""

    binary: str
    data_root: str
    exec_root: str
    pidfile: str
    log: str


class ImageConfig(_Strict):
    """An image that is imported from a root file system tar if it is missing, or if the tar or `env` has changed."""

    name: Annotated[str, AfterValidator(configured_name)]
    tar: str
    env: Annotated[dict[str, str], AfterValidator(image_environment)]


def _patterns(texts: list[str]) -> list[str]:
    for text in texts:
        Pattern.parse(text)
    return texts


class RegistryConfig(_Strict):
    """What may be fetched from registries, and which secret of the vault is for which registry.

    `max_bytes` is the limit of an image, also of one from a file.
    """

    allowed: Annotated[list[str], AfterValidator(_patterns)]
    secrets: dict[str, str]
    max_bytes: int = Field(ge=1 << 20)
    skopeo: str


class ProcessConfig(_Strict):
    """A daemon: `python -m <module> <config>`."""

    name: Literal["auditd", "vaultd", "compiler", "zygote", "serve", "fetcher"]
    module: str = Field(pattern=r"^[a-z_][a-z0-9_.]*$")
    config: str


class SuppliesConfig(_Strict):
    """What hostd opens for the fetcher. Nothing here is a secret.

    Attributes:
        environment: names of variables of hostd's environment.
        directories: directories of files with secrets, in the order in which they are searched.
        credential: the file with the credential for HashiCorp Vault.
    """

    environment: list[str]
    directories: list[str]
    credential: str | None


class ListenConfig(_Strict):
    """The address of the API: an address or a name of this host."""

    host: str = Field(min_length=1)
    port: int = Field(ge=1, le=65535)


class DaemonMemory(_Strict):
    """Memory limits of the daemons, in bytes. The kernel kills a daemon above its limit, and hostd restarts it."""

    auditd: int = Field(ge=LEAST_MEMORY)
    vaultd: int = Field(ge=LEAST_MEMORY)
    zygote: int = Field(ge=LEAST_MEMORY)
    compiler: int = Field(ge=LEAST_MEMORY)
    serve: int = Field(ge=LEAST_MEMORY)
    fetcher: int = Field(ge=LEAST_MEMORY)


class HostConfig(_Strict):
    """The configuration file of `python -m runtimes.hostd`. With `disk_limits` a launch without a limit is refused.

    All of the operator's part of a worker's configuration is here or in the operator's policy file, which the
    compiler reads: no call can set it. `listen` is None if no process is `serve`.
    """

    run_dir: str
    state_dir: str
    python: str
    upstream_netns: str | None
    docker_socket: str
    dockerd: DockerdConfig | None
    images: list[ImageConfig]
    registries: RegistryConfig
    runsc: str
    runc: str
    execd: str
    upstream_roots: str
    uids: Uids
    dns_upstreams: list[str]
    allowed_addresses: list[str]
    host_addresses: dict[str, list[str]]
    gateway_limits: dict[str, int]
    maxima: Maxima
    snapshots: SnapshotLimits
    launch_concurrency: int = Field(ge=1, le=256)
    processes: list[ProcessConfig]
    listen: ListenConfig | None
    runtimes: list[Annotated[Runtime, Field(strict=False)]] = Field(min_length=1)
    disk_limits: bool
    network_bandwidth: int | None = Field(ge=LEAST_BANDWIDTH, le=MOST_BANDWIDTH)
    disk_bandwidth: int | None = Field(ge=LEAST_BANDWIDTH, le=MOST_BANDWIDTH)
    volumes: VolumesConfig
    memory: DaemonMemory
    supplies: SuppliesConfig
    vault_files: dict[Annotated[str, Field(pattern=r"^SALLYPORT_[A-Z0-9_]+_FD$")], str] = Field(default_factory=dict)
    """Files that hostd opens for vaultd at each of its starts, by the variable that has the descriptor's number."""

    @property
    def programs(self) -> dict[Runtime, str]:
        """The real program of each runtime."""
        return {Runtime.RUNC: self.runc, Runtime.RUNSC: self.runsc}

    @model_validator(mode="after")
    def _check(self) -> "HostConfig":
        names = [process.name for process in self.processes]
        if len(names) != len(set(names)) or not {"auditd", "vaultd", "compiler", "zygote"} <= set(names):
            raise ValueError("processes must name auditd, vaultd, compiler and zygote, each process once")
        if ("serve" in names) is (self.listen is None):
            raise ValueError("listen is the address of serve, and missing without it")
        paths = [self.run_dir, self.state_dir, self.python, self.docker_socket, self.runsc, self.runc, self.execd]
        paths += [self.upstream_roots, self.registries.skopeo, *self.volumes.allowed_host_paths]
        paths += [*self.supplies.directories, *([] if self.supplies.credential is None else [self.supplies.credential])]
        paths += self.vault_files.values()
        if any(not Path(path).is_absolute() for path in paths):
            raise ValueError("paths must be absolute")
        _ = self.resolvers, self.allowed, self.limits
        return self

    @property
    def resolvers(self) -> tuple[tuple[IPv4Address | IPv6Address, int], ...]:
        """`dns_upstreams`, parsed."""
        return tuple(parse_endpoint(text) for text in self.dns_upstreams)

    @property
    def allowed(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """`allowed_addresses`, parsed."""
        return tuple(ip_network(text) for text in self.allowed_addresses)

    @property
    def limits(self) -> GatewayLimits:
        """`gateway_limits`, with the defaults of the others."""
        return GatewayLimits.of(self.gateway_limits)

    @property
    def slot_plan(self) -> NetworkPlan:
        """The plan of every slot."""
        return slot_plan(self.limits, self.network_bandwidth)

    @property
    def guard_plan(self) -> GuardPlan:
        """The plan of guard and floor."""
        uids = self.uids
        return GuardPlan(uids.worker_base, uids.image_fetcher, self.resolvers, self.allowed).widened(self.limits)
