"""The validation of a create call: everything that needs no request to a daemon.

- The contract fixes the order of the checks, so that a call with several faults always gets the same error.
- An unsupported feature (templates) is refused by name and never ignored. Keys of `extensions` are free, but a probable
  misspelling of a known key is refused, because it would have no effect.
- A plan contains the sandbox's environment, which may contain the caller's secrets. It is never logged or stored.
"""

import difflib
import platform as host_platform
import re
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lifecycle.api.errors import ApiError, invalid
from lifecycle.api.models import HOOKS_VARIABLE, CapacitySpec, Create, CreatePool
from lifecycle.sandboxes import labels, volumes
from lifecycle.sandboxes.bounds import SandboxLimits
from lifecycle.sandboxes.pool import Capacity, SandboxPool
from lifecycle.sandboxes.quantities import Resources, check_names, resolve
from lifecycle.snapshots.snapshot import Snapshot
from policy.api import ApiPolicy, ApiPolicyError, parse_network_policy
from policy.strict import unknown
from runtimes.engine.profile import ISOLATED, PROFILES
from wire.api.hostd import VolumeMount

POLICY_EXTENSION = "sallyport.policy"
RUNTIME_EXTENSION = "sallyport.runtime"
ISOLATION_EXTENSION = "bootstrap.execd.isolation"
RENEW_EXTENSION = "access.renew.extend.seconds"
POOL_EXTENSION = "poolRef"
_EXTENSIONS = (POLICY_EXTENSION, RUNTIME_EXTENSION, ISOLATION_EXTENSION, RENEW_EXTENSION, POOL_EXTENSION)
_RESEMBLES = 0.85
"""The similarity (1 is equal) from which a key counts as a misspelling of another."""
_OF_SNAPSHOT = ("tail", "-f", "/dev/null")
"""The entrypoint of a sandbox that begins with a snapshot, if the call names none."""
_ECHOED = "opensandbox.extensions."
_EGRESS_ENV = "OPENSANDBOX_EGRESS_"
_EGRESS_NAMES = frozenset(
    _EGRESS_ENV + name
    for name in (
        *("LOG_LEVEL", "DNS_UPSTREAM_TIMEOUT", "MITMPROXY_SSL_INSECURE", "MITMPROXY_TRANSPARENT"),
        *("MITMPROXY_EXTRA_PORTS", "DENY_WEBHOOK", "METRICS_EXTRA_ATTRS", "CREDENTIAL_VAULT_REQUIRE_TLS"),
        *("CREDENTIAL_VAULT_REQUIRE_SCOPED_MATCH", "CREDENTIAL_VAULT_TRUSTED_PROXY_CIDRS", "POLICY_FILE"),
    )
)
_TRANSPARENT = _EGRESS_ENV + "MITMPROXY_TRANSPARENT"
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,255}", re.ASCII)
_CLAIMED_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}", re.ASCII)
_START_NAMES = frozenset(
    {
        *("JUPYTER_HOST", "JUPYTER_TOKEN", "EXECD_ENVS", "EXECD_LOG_FILE", "EXECD_API_GRACE_SHUTDOWN"),
        *("EXECD_ACCESS_TOKEN", "EXECD_ISOLATION_CONFIG"),
    }
)
"""Variables that execd reads when it starts. A member of a pool has started."""
IDLE_ENTRYPOINT = ("tail", "-f", "/dev/null")
"""The default of the SDKs. execd waits by itself if the image has no such program."""
_ARCHES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
MAX_TIMEOUT = 100 * 366 * 86400
_LARGEST = Resources(1 << 62, 1 << 62, 1 << 31, None)
MAX_STRING = 128 * 1024 - 1
"""The kernel's limit for one argument, or for one variable with its name."""
MAX_ENV = (1 << 20) - 4096
MAX_HOOKS = 1 << 16
"""execd's limit for the text of all hooks."""
MAX_COMMAND = 1 << 19
"""The limit of bytes for all of them, which leaves room for the variables of the image and the server."""


@dataclass(frozen=True, slots=True)
class MemberClaim:
    """What a create call that names a pool says about its member. What it leaves out is the pool's.

    Attributes:
        pool: its name, in a complete plan its key.
        image, runtime: None if the call does not name it.
        limits: its `resourceLimits`.
    """

    pool: str
    image: str | None
    runtime: str | None
    limits: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Plan:
    """A validated create call."""

    image: str
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]
    """The command to execute: `entrypoint`, with a single element of several words split."""
    env: Mapping[str, str] = field(repr=False)
    timeout: int | None
    metadata: Mapping[str, str]
    extensions: Mapping[str, str]
    platform: Mapping[str, str] | None
    resources: Resources
    runtime: str
    isolation: bool
    policy_name: str | None
    network_policy: ApiPolicy | None
    credential_proxy: bool
    secure_access: bool
    renew_seconds: int | None
    claim: MemberClaim | None = None
    """The pool whose member the sandbox becomes; None to launch one."""
    held_for: str = ""
    """The key of the pool for which an idle member is launched, or empty."""
    volumes: tuple[VolumeMount, ...] = ()
    snapshot: str | None = None


def plan(request: Create, limits: SandboxLimits, source: Snapshot | ApiError | None = None) -> Plan:
    """Check a create call.

    Args:
        source: the snapshot with which the sandbox begins, or why it cannot.

    Raises:
        ApiError: the first fault of the call.
    """
    extensions = dict(request.extensions or {})
    runtime = _check_extensions(extensions, limits)
    if isinstance(source, ApiError):
        raise source
    hooks = _hooks(request)
    claim = _claim(request, extensions)
    if request.template_id is not None:
        raise ApiError(400, "FSB::API_NOT_SUPPORTED", "templateId is not supported by this server.")
    given = tuple(request.entrypoint or (_OF_SNAPSHOT if source else ()))
    entrypoint, command = ((), ()) if claim and request.entrypoint is None else _entrypoint(given)
    labels.check(request.metadata or {})
    platform = _platform(request)
    timeout = request.timeout
    if timeout is not None and timeout > (limits.max_timeout or MAX_TIMEOUT):
        raise invalid(f"timeout is over this server's maximum of {limits.max_timeout or MAX_TIMEOUT} seconds.")
    network_policy = _network_policy(request)
    credential_proxy = request.credential_proxy is not None and request.credential_proxy.enabled
    check_names(request.resource_requests or {}, "resourceRequests")
    resources = resolve(request.resource_limits or {}, limits.defaults, limits.maxima)
    env = dict(limits.env) | _environment(request, credential_proxy=credential_proxy)
    if hooks:
        env[HOOKS_VARIABLE] = hooks
    _check_size(env)
    if claim is not None:
        _check_claimed(env)
    mounted = volumes.mounts(request.volumes or ())
    return Plan(
        image=source.image if source else request.image.uri if request.image else "",
        entrypoint=entrypoint,
        command=command,
        env=env,
        timeout=timeout,
        metadata=dict(request.metadata or {}),
        extensions={key: value for key, value in extensions.items() if _is_echoed(key)},
        platform=platform,
        resources=resources,
        runtime=runtime,
        isolation=extensions.get(ISOLATION_EXTENSION) == "enable",
        policy_name=extensions.get(POLICY_EXTENSION),
        network_policy=network_policy,
        credential_proxy=credential_proxy,
        secure_access=bool(request.secure_access),
        renew_seconds=int(extensions[RENEW_EXTENSION]) if RENEW_EXTENSION in extensions else None,
        claim=claim,
        volumes=mounted,
        snapshot=source.id if source else None,
    )


def _claim(request: Create, extensions: Mapping[str, str]) -> MemberClaim | None:
    name = extensions.get(POOL_EXTENSION)
    if name is None:
        return None
    for field_name, given in (
        ("templateId", request.template_id is not None),
        ("snapshotId", bool((request.snapshot_id or "").strip())),
        ("volumes", bool(request.volumes)),
        (f"extensions: {ISOLATION_EXTENSION}", ISOLATION_EXTENSION in extensions),
    ):
        if given:
            raise invalid(f"{field_name} cannot be combined with extensions.poolRef.")
    image = request.image.uri.strip() if request.image else ""
    return MemberClaim(name, image or None, extensions.get(RUNTIME_EXTENSION), dict(request.resource_limits or {}))


def _check_claimed(env: Mapping[str, str]) -> None:
    for name in env:
        if not _CLAIMED_ENV_NAME.fullmatch(name) or name in _START_NAMES:
            raise invalid(f"env: {name[:80]!r} cannot be given to a sandbox of a pool.")


def claimed(plan: Plan, pool: SandboxPool) -> Plan:
    """Complete the plan of a claim with what its pool has.

    Raises:
        ApiError: the call names another image, runtime or limit than the pool has, because that has no effect.
    """
    claim = plan.claim
    assert claim is not None  # noqa: S101 - narrows the type: the caller looked the pool up
    has = pool.resources
    if claim.image is not None and tagged(claim.image) != tagged(pool.image):
        raise invalid(f"image: pool {pool.name} has {pool.image}.")
    if claim.runtime not in (None, pool.runtime):
        raise invalid(f"extensions: {RUNTIME_EXTENSION}: pool {pool.name} has {pool.runtime}.")
    if resolve(claim.limits, has, _LARGEST if has.disk_bytes is None else replace(_LARGEST, disk_bytes=1 << 62)) != has:
        limits = f"cpu {has.cpu_nanos}n, memory {has.memory_bytes}, pids {has.pids}, disk {has.disk_bytes}"
        raise invalid(f"resourceLimits: pool {pool.name} has {limits}.")
    entrypoint, command = plan.entrypoint or pool.entrypoint, plan.command or pool.entrypoint
    return replace(
        plan,
        image=pool.image,
        entrypoint=entrypoint,
        command=command,
        resources=has,
        runtime=pool.runtime,
        claim=replace(claim, pool=pool.key),
    )


def pool_of(request: CreatePool, limits: SandboxLimits, now: float) -> SandboxPool:
    """Check the call that creates a pool.

    Raises:
        ApiError: the first fault of the call.
    """
    container, runtime = request.template.spec.containers[0], request.template.spec.runtime_class_name
    if runtime is not None and runtime not in limits.runtimes:
        allowed = ", ".join(limits.runtimes)
        raise invalid(f"template.spec.runtimeClassName: {runtime[:40]!r} is not allowed; allowed are {allowed}.")
    if container.args and not container.command:
        raise invalid("template.spec.containers[0].args: needs a command.")
    words = (*(container.command or ()), *(container.args or ())) or IDLE_ENTRYPOINT
    _entrypoint(words)
    given = container.resources.limits if container.resources else None
    return SandboxPool(
        name=request.name,
        mark=secrets.token_hex(4),
        image=container.image.strip(),
        entrypoint=words,
        runtime=runtime or limits.default_runtime,
        resources=resolve(given or {}, limits.defaults, limits.maxima, "template.spec.containers[0].resources.limits"),
        capacity=capacity_of(request.capacity_spec),
        created_at=now,
    )


def capacity_of(given: CapacitySpec) -> Capacity:
    """Check a capacity.

    Raises:
        ApiError: a minimum is above its maximum, or the buffer is larger than the pool.
    """
    if given.buffer_min > given.buffer_max or given.pool_min > given.pool_max or given.buffer_max > given.pool_max:
        raise invalid("capacitySpec: bufferMin <= bufferMax <= poolMax and poolMin <= poolMax are needed.")
    return Capacity(given.buffer_min, given.buffer_max, given.pool_min, given.pool_max)


def idle_member(pool: SandboxPool, limits: SandboxLimits) -> Plan:
    """Return the plan of an idle member: no access, no expiry, and only the variables of every sandbox."""
    return Plan(
        image=pool.image,
        entrypoint=pool.entrypoint,
        command=pool.entrypoint,
        env=dict(limits.env),
        timeout=None,
        metadata={},
        extensions={},
        platform=None,
        resources=pool.resources,
        runtime=pool.runtime,
        isolation=False,
        policy_name=None,
        network_policy=ApiPolicy(),
        credential_proxy=False,
        secure_access=False,
        renew_seconds=None,
        held_for=pool.key,
    )


def tagged(image: str) -> str:
    """Return the name of an image with its tag. Without one it is `latest`."""
    last = image.rpartition("/")[2]
    return image if ":" in last or "@" in last else f"{image}:latest"


def _is_echoed(key: str) -> bool:
    return key.startswith(_ECHOED) or key in (POLICY_EXTENSION, RUNTIME_EXTENSION)


def _check_extensions(extensions: Mapping[str, str], limits: SandboxLimits) -> str:
    renew = extensions.get(RENEW_EXTENSION)
    if renew is not None and not (re.fullmatch(r"[0-9]{1,6}", renew, re.ASCII) and 300 <= int(renew) <= 86400):
        raise invalid(f"extensions: {RENEW_EXTENSION} must be a number of seconds from 300 to 86400.")
    for key in extensions:
        if key not in _EXTENSIONS and _is_misspelt(key):
            raise invalid(f"{unknown(('extensions', key))}; known are {', '.join(_EXTENSIONS)}.")
    runtime = extensions.get(RUNTIME_EXTENSION, limits.default_runtime)
    if runtime not in limits.runtimes:
        allowed = ", ".join(limits.runtimes)
        raise invalid(f"extensions: {RUNTIME_EXTENSION} {runtime[:40]!r} is not allowed; allowed are {allowed}.")
    if extensions.get(ISOLATION_EXTENSION) == "enable" and not PROFILES[runtime].isolation:
        raise invalid(f"extensions: {ISOLATION_EXTENSION} needs {RUNTIME_EXTENSION} {ISOLATED}, a kernel of its own.")
    return runtime


def _is_misspelt(key: str) -> bool:
    """Return whether a key is in our namespace, or differs from a known key by one or two letters."""
    folded = key.strip().lower()
    return folded.startswith("sallyport") or (
        len(folded) <= 64 and bool(difflib.get_close_matches(folded, _EXTENSIONS, 1, _RESEMBLES))
    )


def _entrypoint(entrypoint: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    command = entrypoint
    if len(entrypoint) == 1 and re.search(r"\s", entrypoint[0].strip()):
        try:
            command = tuple(shlex.split(entrypoint[0]))
        except ValueError:
            raise ApiError(400, "DOCKER::INVALID_ENTRYPOINT", "entrypoint: unbalanced quotes.") from None
    if not command or not command[0].strip():
        raise ApiError(400, "DOCKER::INVALID_ENTRYPOINT", "entrypoint: the program must not be blank.")
    if any("\0" in part for part in command):
        raise ApiError(400, "DOCKER::INVALID_ENTRYPOINT", "entrypoint: NUL is not allowed.")
    sizes = [len(part.encode()) for part in command]
    if max(sizes) > MAX_STRING or sum(sizes) > MAX_COMMAND:
        raise ApiError(400, "DOCKER::INVALID_ENTRYPOINT", "entrypoint: longer than a command line can be.")
    return entrypoint, command


def _hooks(request: Create) -> str:
    if request.lifecycle is None:
        return ""
    if any("\0" in word for word in request.lifecycle.words()):
        raise invalid("lifecycle: NUL is not allowed.")
    hooks = request.lifecycle.document()
    if len(hooks.encode()) > MAX_HOOKS:
        raise invalid(f"lifecycle: over {MAX_HOOKS} bytes.")
    return hooks


def _platform(request: Create) -> dict[str, str] | None:
    if request.platform is None:
        return None
    system, arch = request.platform.os.strip().lower(), request.platform.arch.strip().lower()
    if system not in ("linux", "windows") or arch not in ("amd64", "arm64"):
        raise invalid("platform: os is linux or windows, arch is amd64 or arm64.")
    if system != "linux" or arch != _ARCHES.get(host_platform.machine(), ""):
        raise invalid(f"platform: this server does not run {system}/{arch}.")
    return {"os": system, "arch": arch}


def _network_policy(request: Create) -> ApiPolicy | None:
    if request.network_policy is None:
        return None
    try:
        return parse_network_policy(request.network_policy.document())
    except ApiPolicyError as error:
        raise invalid(f"networkPolicy: {error}.") from None


def _environment(request: Create, *, credential_proxy: bool) -> dict[str, str]:
    env: dict[str, str] = {}
    for name, value in (request.env or {}).items():
        if name.startswith(_EGRESS_ENV):
            if name not in _EGRESS_NAMES:
                permitted = ", ".join(sorted(_EGRESS_NAMES))
                raise invalid(f"env: {name[:80]!r} is not permitted; permitted with this prefix are {permitted}.")
            if name == _EGRESS_ENV + "MITMPROXY_SSL_INSECURE" and credential_proxy:
                raise invalid(f"env: {name} cannot be combined with credentialProxy.")
            if name == _TRANSPARENT and value is not None and request.network_policy is not None:
                env[name] = value
            continue
        if not _ENV_NAME.fullmatch(name):
            raise invalid(f"env: {name[:80]!r} is not a valid name.")
        if value is None:
            continue
        if "\0" in value:
            raise invalid(f"env: the value of {name[:80]!r} holds a NUL.")
        env[name] = value
    if credential_proxy:
        env[_TRANSPARENT] = "true"
    return env


def _check_size(env: Mapping[str, str]) -> None:
    sizes = {name: len(name) + 1 + len(value.encode()) for name, value in env.items()}
    for name, size in sizes.items():
        if size > MAX_STRING:
            raise invalid(f"env: {name[:80]!r} with its value is over {MAX_STRING} bytes.")
    if sum(sizes.values()) > MAX_ENV:
        raise invalid(f"env: names and values are over {MAX_ENV} bytes together.")
