"""What hostd is asked on its socket.

The types bound what needs no knowledge of the host: counts, lengths and forms. `runtimes.spec.check_launch` judges what
depends on Docker and on the runtimes, and `runtimes.operator` what the operator allows.
"""

import re
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from wire.api.provided import NOTHING, Provided
from wire.api.states import HostState
from wire.ids import check_digest, check_sandbox, check_snapshot
from wire.operations import Done, Operations, Request

MOST_TEXT: Final = 128 * 1024
"""The longest argument and the longest value of a variable, in characters."""
_MOST_ENTRIES: Final = 1024
_MOST_ARGUMENTS: Final = 256
_MOST_ENVIRONMENT: Final = 1024 * 1024
_MOST_ROOT: Final = 64 * 1024
_LEAST_CPU_NANOS: Final = 1_000_000
_MOST_CPU_NANOS: Final = 1024 * 10**9
_LEAST_MEMORY: Final = 6 * 1024 * 1024
_MOST_MEMORY: Final = 2**44
_MOST_PIDS: Final = 4 * 1024 * 1024
_MOST_DISK: Final = 2**50
_MOST_LINES: Final = 10_000
_MOST_SECONDS: Final = 2**40
LEAST_HIDDEN: Final = 8
"""Bytes. A shorter value of the environment is not removed from an output, because it is in many texts by chance."""
MOST_KEPT: Final = 32 * 1024
"""The most bytes of an output that are kept of a removed sandbox."""
_MOST_PATH: Final = 4096
_MOST_NAME: Final = 256
_MOST_NAMES: Final = 32
MOST_VOLUMES: Final = 32
MOST_CLAIMABLE: Final = 1000
"""The most sandboxes of one question."""
MOST_PATH: Final = 4095
_MOST_PARTS: Final = 64
_MOST_PART: Final = 255
_VOLUME_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9](?:[-a-z0-9]*[a-z0-9])?", re.ASCII)


class Runtime(StrEnum):
    """What runs a sandbox."""

    RUNC = "runc"
    RUNSC = "runsc"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding about the host; `remedy` is empty when it is fine."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""

    def line(self) -> str:
        """Return it as a line for people."""
        if self.ok:
            return f"ok    {self.name}: {self.detail}"
        return f"FAIL  {self.name}: {self.detail} -> {self.remedy or 'see the server log'}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings."""

    checks: tuple[Check, ...]


@dataclass(frozen=True, slots=True)
class Doctor(Request[Diagnosis]):
    """Ask whether this host can run Sallyport."""


@dataclass(frozen=True, slots=True)
class ImageDescription:
    """An image; `env` has texts of the form `NAME=value`."""

    id: str
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    env: tuple[str, ...]
    workdir: str


@dataclass(frozen=True, slots=True)
class DescribeImage(Request[ImageDescription]):
    """Look an image up. One that the host does not have is refused (`unknown_image`)."""

    name: str


@dataclass(frozen=True, slots=True)
class ImageNames:
    """Names of images that may be started: the configured ones first, and not all where there are very many."""

    images: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Images(Request[ImageNames]):
    """Ask for the names of the images of this host."""


class ImageOrigin(StrEnum):
    """Where an added image is from."""

    REGISTRY = "registry"
    """`source` is a name of an image."""
    FILE = "file"
    """`source` is an archive, or a directory with an OCI layout."""
    DOCKER = "docker"
    """`source` is a name of an image that this host's Docker has."""


@dataclass(frozen=True, slots=True)
class ListedImage:
    """An image that may be started.

    Attributes:
        name: its name in its short form.
        digests: those of its name in the registry or archive, and of its manifest.
        source: where it is from, for people.
        configured: whether it is from the settings.
        added: RFC 3339.
        size: in bytes, unpacked.
        present: whether Docker has it.
    """

    name: str
    aliases: tuple[str, ...]
    digest: str
    digests: tuple[str, ...]
    source: str
    configured: bool
    added: str
    size: int
    present: bool


@dataclass(frozen=True, slots=True)
class AddImage(Request[ListedImage]):
    """Add an image to those that may be started. Only root may ask.

    Attributes:
        names: its name and aliases; empty: the name that the registry or archive has for it.
        selected: its name in an archive of several images; empty for none.
        replace: whether it takes a name that another added image has.
    """

    origin: ImageOrigin
    source: str
    names: tuple[str, ...]
    selected: str
    replace: bool

    def __post_init__(self) -> None:
        _bounded(self.source, 1, _MOST_PATH, "characters of the source")
        _bounded(self.names, 0, _MOST_NAMES, "names")
        _bounded(self.selected, 0, _MOST_NAME, "characters of the selected name")


@dataclass(frozen=True, slots=True)
class AliasImage(Request[ListedImage]):
    """Give an image a further name. Only root may ask."""

    name: str
    alias: str
    replace: bool


@dataclass(frozen=True, slots=True)
class ListedImages:
    """The images that may be started, those of the settings first."""

    images: tuple[ListedImage, ...]


@dataclass(frozen=True, slots=True)
class ListImages(Request[ListedImages]):
    """Ask for the images that may be started. Only root may ask."""


@dataclass(frozen=True, slots=True)
class ShownImage:
    """An image: of its variables the names only. `sandboxes` run from it."""

    listed: ListedImage
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    env_names: tuple[str, ...]
    user: str
    workdir: str
    layers: tuple[str, ...]
    sandboxes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShowImage(Request[ShownImage]):
    """Ask for one image. Only root may ask."""

    name: str


@dataclass(frozen=True, slots=True)
class RemovedImage:
    """What a removal did.

    Attributes:
        names: the names that lead to no image now.
        sandboxes: those that still run from it.
        freed: whether its bytes are gone. Otherwise they go with the last sandbox, or another name needs them.
    """

    names: tuple[str, ...]
    sandboxes: tuple[str, ...]
    freed: bool


@dataclass(frozen=True, slots=True)
class RemoveImage(Request[RemovedImage]):
    """Remove an image with all of its names, or only an alias. Only root may ask.

    No sandbox can be started from it then; those that run continue.
    """

    name: str


def path_parts(text: str) -> tuple[str, ...]:
    """Return the names of a path, without empty ones and `.`.

    Raises:
        ValueError: it has `..` or a NUL, or is too long.
    """
    parts = tuple(part for part in text.split("/") if part not in ("", "."))
    if ".." in parts:
        raise ValueError("a path has ..")
    if "\0" in text or len(text.encode("utf-8", "surrogatepass")) > MOST_PATH:
        raise ValueError("a path has a NUL or is too long")
    if len(parts) > _MOST_PARTS or any(len(part.encode("utf-8", "surrogatepass")) > _MOST_PART for part in parts):
        raise ValueError("a path has too many names, or one that is too long")
    return parts


def check_volume_name(text: str) -> None:
    """Check the name of a named volume.

    Raises:
        ValueError: the text is no name of a volume.
    """
    if not _VOLUME_NAME.fullmatch(text):
        raise ValueError("not a name of a volume")


@dataclass(frozen=True, slots=True)
class HostPath:
    """A directory or a plain file of the host. hostd makes a missing directory, and decides which paths are allowed."""

    path: str

    def __post_init__(self) -> None:
        if self.path != "/" + "/".join(path_parts(self.path)):
            raise ValueError("a path of the host is absolute and normalised")


@dataclass(frozen=True, slots=True)
class NamedVolume:
    """A volume of this host, by its name.

    Attributes:
        create: make it if there is none.
        delete: remove it with the sandbox, if this launch makes it.
        size_bytes: its size if this launch makes it; None is the operator's default.
    """

    name: str
    create: bool
    delete: bool
    size_bytes: int | None

    def __post_init__(self) -> None:
        check_volume_name(self.name)
        if self.size_bytes is not None:
            _within(self.size_bytes, 1, _MOST_DISK, "size_bytes")


@dataclass(frozen=True, slots=True)
class VolumeMount:
    """A volume of a sandbox: exactly one of `host` and `named`, or a part of it.

    Attributes:
        target: the place inside, absolute and normalised.
        sub_path: what of the volume is mounted, relative; empty for all. hostd makes a missing directory.
    """

    target: str
    sub_path: str
    read_only: bool
    host: HostPath | None
    named: NamedVolume | None

    def __post_init__(self) -> None:
        if self.target != "/" + "/".join(path_parts(self.target)):
            raise ValueError("a target is absolute and normalised")
        if self.sub_path != "/".join(path_parts(self.sub_path)):
            raise ValueError("a sub_path is relative and normalised")
        if (self.host is None) is (self.named is None):
            raise ValueError("a volume is either a path of the host or a named volume")


@dataclass(frozen=True, slots=True)
class PolicyInForce:
    """The digest of the policy that the sandbox's worker has confirmed, and what the policy provides to the sandbox.

    hostd gives nothing of it to the sandbox: the caller does, with the first init of execd.
    """

    digest: str
    provided: Provided = NOTHING

    def __post_init__(self) -> None:
        check_digest(self.digest)


@dataclass(frozen=True, slots=True)
class Launch(Request[PolicyInForce]):
    """Launch a sandbox. After a refusal, no part of it is left.

    It cannot name capabilities, devices or namespaces, and no mounts but its volumes.

    Attributes:
        image: a name of an image of this host; of no effect with a snapshot.
        entrypoint: the program and its arguments.
        env: variables of the sandbox.
        cpu_nanos: processor time, in billionths of a processor.
        pids: the limit of processes.
        disk_bytes: the limit of what the sandbox writes; None is no limit.
        isolation: whether execd may mount inside the sandbox, for isolated sessions.
        held: whether execd starts no program before its first init, which names the entrypoint.
        ca_root: PEM that the sandbox's programs trust beside the operator's roots. No worker trusts it.
        execd_token_sha256: of the token that execd accepts, in hexadecimal.
        selection: which policy the sandbox has, as a JSON text. Only the compiler reads it.
        volumes: what is mounted into the sandbox besides its root file system.
        snapshot: the snapshot whose file system the sandbox begins with; None for that of the image.
    """

    sandbox: str
    runtime: Runtime
    image: str
    entrypoint: tuple[str, ...] = field(repr=False)
    env: Mapping[str, str] = field(repr=False)
    cpu_nanos: int
    memory_bytes: int
    pids: int
    disk_bytes: int | None
    isolation: bool
    held: bool
    ca_root: str = field(repr=False)
    execd_token_sha256: str
    selection: str = field(repr=False)
    volumes: tuple[VolumeMount, ...] = ()
    snapshot: str | None = None

    def __post_init__(self) -> None:
        check_sandbox(self.sandbox)
        check_digest(self.execd_token_sha256)
        if self.snapshot is not None:
            check_snapshot(self.snapshot)
        _bounded(self.entrypoint, 1, _MOST_ARGUMENTS, "arguments")
        _check_environment(self.env)
        _bounded(self.ca_root, 1, _MOST_ROOT, "characters of ca_root")
        _within(self.cpu_nanos, _LEAST_CPU_NANOS, _MOST_CPU_NANOS, "cpu_nanos")
        _within(self.memory_bytes, _LEAST_MEMORY, _MOST_MEMORY, "memory_bytes")
        _within(self.pids, 1, _MOST_PIDS, "pids")
        if self.disk_bytes is not None:
            _within(self.disk_bytes, 1, _MOST_DISK, "disk_bytes")
        if not self.entrypoint[0] or any(map(_unfit, self.entrypoint)):
            raise ValueError("an argument is too long or has a NUL, or the program has no name")
        _bounded(self.volumes, 0, MOST_VOLUMES, "volumes")
        if len({volume.target for volume in self.volumes}) != len(self.volumes):
            raise ValueError("two volumes have the same target")


@dataclass(frozen=True, slots=True)
class Configure(Request[PolicyInForce]):
    """Give a sandbox's worker another policy: the one of a selection (JSON text), under the operator's document.

    `decided`: the policy is in force whatever happens. A worker that is replaced meanwhile begins with it. Else a
    worker that does not confirm it keeps the former one.
    """

    sandbox: str
    selection: str = field(repr=False)
    decided: bool

    def __post_init__(self) -> None:
        check_sandbox(self.sandbox)


@dataclass(frozen=True, slots=True)
class ClaimableSandboxes:
    """The sandboxes that a caller can get."""

    sandboxes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Claimable(Request[ClaimableSandboxes]):
    """Ask which of these idle members of pools a caller can get: those that hostd has, and whose image is in the list.

    A member whose image was removed, or whose image's name means another one now, is not in the answer.
    """

    sandboxes: tuple[str, ...]

    def __post_init__(self) -> None:
        _bounded(self.sandboxes, 0, MOST_CLAIMABLE, "sandboxes")
        for sandbox in self.sandboxes:
            check_sandbox(sandbox)


@dataclass(frozen=True, slots=True)
class ClaimMember(Request[PolicyInForce]):
    """Give the worker of an idle member the policy of its claim: the one of a selection (JSON text).

    A member that is not claimable is refused (`unknown_image`). After another refusal its policy is the former one.

    Attributes:
        env: the variables that its execd gets with its first init. Their values are removed from its output.
    """

    sandbox: str
    selection: str = field(repr=False)
    env: Mapping[str, str] = field(repr=False)

    def __post_init__(self) -> None:
        check_sandbox(self.sandbox)
        _check_environment(self.env)


@dataclass(frozen=True, slots=True)
class Pause(Request[Done]):
    """Freeze a sandbox. On the answer none of its processes runs, and its gateway forwards nothing.

    A paused sandbox is no error. A sandbox without a process is refused (`not_running`). After another refusal the
    sandbox runs.
    """

    sandbox: str

    def __post_init__(self) -> None:
        check_sandbox(self.sandbox)


@dataclass(frozen=True, slots=True)
class Resume(Request[Done]):
    """Let a paused sandbox run again. A sandbox that is not paused is no error. After a refusal it is paused."""

    sandbox: str

    def __post_init__(self) -> None:
        check_sandbox(self.sandbox)


@dataclass(frozen=True, slots=True)
class Printed:
    """The end of what a sandbox's entrypoint has written to its standard output and standard error.

    Attributes:
        text: whole lines. Values of the sandbox's environment are replaced by the names of their variables, and bytes
            that are not UTF-8 by a sign. Everything else is as the entrypoint wrote it.
        truncated: whether lines of the requested ones are missing, because they were too long.
    """

    text: str = field(repr=False)
    truncated: bool


@dataclass(frozen=True, slots=True)
class Removed:
    """The end of a removal.

    Attributes:
        residue: what is left of the sandbox, as sentences for a log. Empty is the good case.
        printed: the end of its output, if it was requested and could be read.
    """

    residue: tuple[str, ...]
    printed: Printed | None = None


@dataclass(frozen=True, slots=True)
class Remove(Request[Removed]):
    """Remove a sandbox; an unknown one is no error.

    Attributes:
        lines: the number of last lines of its output that the answer has, at most `MOST_KEPT` bytes; 0 for none.
    """

    sandbox: str
    lines: int = 0

    def __post_init__(self) -> None:
        check_sandbox(self.sandbox)
        _within(self.lines, 0, _MOST_LINES, "lines")


@dataclass(frozen=True, slots=True)
class HostSandboxState:
    """What hostd knows of a sandbox.

    Attributes:
        reason: a sentence about `state`, or empty.
        exit_code: of the container, once it has ended.
        oom: whether the kernel ended a process of it at its memory limit.
        worker_pid: None while it has no worker.
        slot: the number of its slot.
        generation: of its worker.
        restarts: how many workers have been replaced.
        policy: the digest that its worker has confirmed, or empty.
        alarm: why it was cut off, or empty.
    """

    sandbox: str
    state: HostState
    reason: str = ""
    exit_code: int | None = None
    oom: bool = False
    worker_pid: int | None = None
    container: str | None = None
    slot: int | None = None
    generation: int = 1
    restarts: int = 0
    policy: str = ""
    alarm: str = ""


@dataclass(frozen=True, slots=True)
class Listed:
    """The state of every sandbox."""

    sandboxes: tuple[HostSandboxState, ...]


@dataclass(frozen=True, slots=True)
class List(Request[Listed]):
    """Ask for the state of every sandbox."""


@dataclass(frozen=True, slots=True)
class SlotDescription:
    """The network namespaces of a sandbox.

    Attributes:
        sandbox_netns: the file of the sandbox's namespace.
        gateway_netns: the file of its gateway's namespace.
        inodes: of both.
        links: the names of the links in the sandbox's namespace.
    """

    sandbox_netns: str
    gateway_netns: str
    inodes: tuple[int, ...]
    links: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inspected:
    """The state of one sandbox, and its slot if it has one."""

    state: HostSandboxState
    network: SlotDescription | None


@dataclass(frozen=True, slots=True)
class Inspect(Request[Inspected]):
    """Ask for the state of one sandbox."""

    sandbox: str

    def __post_init__(self) -> None:
        check_sandbox(self.sandbox)


@dataclass(frozen=True, slots=True)
class ReadOutput(Request[Printed]):
    """Ask for the last lines of the output of a sandbox's entrypoint. It can have ended.

    Attributes:
        lines: their number. A line of more than 16 KiB counts as several.
        since: only lines that were written after this time, in seconds since the epoch; None for all.
    """

    sandbox: str
    lines: int
    since: int | None = None

    def __post_init__(self) -> None:
        check_sandbox(self.sandbox)
        _within(self.lines, 1, _MOST_LINES, "lines")
        if self.since is not None:
            _within(self.since, 0, _MOST_SECONDS, "since")


@dataclass(frozen=True, slots=True)
class VolumeState:
    """A named volume.

    Attributes:
        size_bytes: of its file on the host's disk.
        sandboxes: how many sandboxes use it now.
        made_by: the sandbox whose create call made it; empty if its record cannot be read.
        made_at: seconds since the epoch.
        deleted_with: whether it is removed with the sandbox that made it.
    """

    name: str
    size_bytes: int
    sandboxes: int
    made_by: str
    made_at: int
    deleted_with: bool


@dataclass(frozen=True, slots=True)
class VolumesListed:
    """Every named volume of this host."""

    volumes: tuple[VolumeState, ...]


@dataclass(frozen=True, slots=True)
class ListVolumes(Request[VolumesListed]):
    """Ask for the named volumes. Only root may."""


@dataclass(frozen=True, slots=True)
class RemoveVolume(Request[Done]):
    """Remove a named volume and its content. Only root may. One that a sandbox uses is refused (`busy`)."""

    name: str

    def __post_init__(self) -> None:
        check_volume_name(self.name)


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """A snapshot that is complete: the bytes of its layer."""

    bytes: int


@dataclass(frozen=True, slots=True)
class TakeSnapshot(Request[SnapshotTaken]):
    """Take a snapshot of what a running sandbox has written. The sandbox is frozen for a part of the time.

    After a refusal nothing of the snapshot is left: `not_running`, also for a paused sandbox; `busy` during another
    snapshot of the sandbox; `full` at a limit of the host; `too_large` over a limit of one snapshot; `image` if the
    content cannot be a layer of an image; `timeout`; `exists`. If the caller leaves, the snapshot is completed.
    """

    sandbox: str
    snapshot: str

    def __post_init__(self) -> None:
        check_sandbox(self.sandbox)
        check_snapshot(self.snapshot)


@dataclass(frozen=True, slots=True)
class RemoveSnapshot(Request[Done]):
    """Remove a snapshot. An unknown one is no error. One that a sandbox uses, or that is being taken, is `busy`."""

    snapshot: str

    def __post_init__(self) -> None:
        check_snapshot(self.snapshot)


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """A snapshot on this host. `bytes` is None while it is being taken."""

    snapshot: str
    bytes: int | None


@dataclass(frozen=True, slots=True)
class HeldSnapshots:
    """All snapshots on this host."""

    snapshots: tuple[HeldSnapshot, ...]


@dataclass(frozen=True, slots=True)
class ListSnapshots(Request[HeldSnapshots]):
    """Ask for the snapshots on this host."""


def _check_environment(env: Mapping[str, str]) -> None:
    _bounded(env, 0, _MOST_ENTRIES, "variables")
    if any(map(_unfit, env.values())):
        raise ValueError("a variable's value is too long or has a NUL")
    if sum(len(name) + len(text) for name, text in env.items()) > _MOST_ENVIRONMENT:
        raise ValueError("the environment is too large")


def _unfit(text: str) -> bool:
    return "\0" in text or len(text) > MOST_TEXT


def _bounded(value: Sized, least: int, most: int, what: str) -> None:
    if not least <= len(value) <= most:
        raise ValueError(f"{what}: from {least} to {most}")


def _within(number: int, least: int, most: int, what: str) -> None:
    if not least <= number <= most:
        raise ValueError(f"{what}: from {least} to {most}")


IMAGE_REQUESTS: Final = (AddImage, AliasImage, ListImages, ShowImage, RemoveImage)
"""What only root may ask."""
OPERATIONS: Final = Operations(
    *(Doctor, DescribeImage, Images, Launch, Configure, Pause, Resume, Remove, List, Inspect, ReadOutput),
    *(Claimable, ClaimMember, ListVolumes, RemoveVolume, TakeSnapshot, RemoveSnapshot, ListSnapshots),
    *IMAGE_REQUESTS,
)
