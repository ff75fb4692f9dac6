"""Probes of this host: each tries one thing that Sallyport needs, and leaves nothing behind.

- A probe that is killed leaves a directory, which the next one removes (`scratch`).
- If possible a probe does exactly what is needed: it makes a slot, loads the rules, runs a sandbox.
- It returns a short description of the result. If the thing cannot be done, it raises an error with the reason.

`doctor` says how to repair a failure.
"""

import grp
import mmap
import os
import pwd
import re
import resource
import socket
import ssl
import stat
import struct
import subprocess
import tarfile
from collections.abc import Callable, Iterable
from functools import partial
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from runtimes.checks.scratch import scratch
from runtimes.engine import disk as disks
from runtimes.engine import user_namespace
from runtimes.net import netns, nft, slots
from runtimes.net.plan import PLAN
from runtimes.process.cgroups import find
from runtimes.process.freezer import Freezer
from runtimes.spec import HostConfig, Uids, sandbox_users
from wire.routes import reaches_ipv6
from wire.sockets import WrongServer, check_server

_SYS_RESOURCE = 24
_SECONDS = 15.0
_RUN = Path("/run")
_CAPABILITIES = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "SETPCAP": 8,
    "NET_BIND_SERVICE": 10,
    "NET_ADMIN": 12,
    "SYS_CHROOT": 18,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
    "MKNOD": 27,
}
_PT_INTERP = 3


class CheckError(Exception):
    """The host does not have what is needed; the message describes its state."""


def run(*command: str) -> str:
    """Run a program; return the first line of its output.

    Raises:
        CheckError: it is missing, failed or hangs.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise CheckError(f"{command[0]} is missing") from None
    except OSError as error:
        raise CheckError(f"{command[0]} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise CheckError(f"{command[0]} does not end within {_SECONDS:.0f} s") from None
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise CheckError(f"{command[0]} fails with status {done.returncode}: {said[:200]}")
    return (done.stdout.splitlines() or [""])[0].strip()


def permissions() -> str:
    """Root, with the capabilities that namespaces, rules and containers need."""
    if os.geteuid() != 0:
        raise CheckError("not root")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff:"))
    held = int(line.split()[1], 16)
    missing = [name for name, bit in _CAPABILITIES.items() if not held >> bit & 1]
    if missing:
        raise CheckError(f"root without the capabilities {', '.join(missing)}")
    return "root, with all capabilities that are needed"


def locked_memory() -> str:
    """Describe whether the daemons with secrets can lock their memory. They run without that, too."""
    most = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if most == resource.RLIM_INFINITY or (capabilities and int(capabilities[1], 16) >> _SYS_RESOURCE & 1):
        return "vaultd and the fetcher lock their memory"
    return (
        f"vaultd and the fetcher cannot lock their memory, which may be swapped out: the limit is {most >> 10} KiB and "
        "root has no CAP_SYS_RESOURCE; set LimitMEMLOCK=infinity in the unit, or turn swap off"
    )


def kernel() -> str:
    """Return name, release and machine of the kernel."""
    system = os.uname()
    return f"{system.sysname} {system.release} {system.machine}"


def nft_program() -> str:
    """`nft`, `nsenter` and `unshare`."""
    version = run("nft", "--version")
    run("nsenter", "--version")
    run("unshare", "--version")
    return version


def namespace() -> str:
    """A new network namespace."""
    with scratch(_RUN) as directory:
        path = directory / "netns"
        netns.create_sandbox(path)
        netns.delete(path)
    return "network namespaces can be made and unmade"


def slot() -> str:
    """A complete slot: namespaces, link, nat and netdev ingress rules."""
    with scratch(_RUN) as directory:
        made = slots.make(directory, 0, PLAN)
        if residue := slots.destroy(made):
            raise CheckError("; ".join(residue))
    return "a veth pair, nat and netdev ingress rules can be made and unmade"


def disk(config: HostConfig) -> str:
    """A file system for one sandbox, on a loop device, in the directory where these will be."""
    place = Path(config.state_dir)
    there = next(path for path in (place, *place.parents) if path.is_dir())
    with scratch(there) as directory:
        try:
            return disks.probe(directory)
        except disks.DiskError as error:
            raise CheckError(str(error)) from None


def sandbox_namespace(config: HostConfig) -> str:
    """A user namespace and an overlay of idmapped layers, in the file system of the containers."""
    place = Path(config.dockerd.data_root if config.dockerd else config.state_dir)
    there = next(path for path in (place, *place.parents) if path.is_dir())
    with scratch(there) as directory:
        run(config.python, "-IS", user_namespace.__file__, str(directory), str(sandbox_users(0)))
    return "containers on runc can have user namespaces"


def guard(config: HostConfig) -> str:
    """The guard's table and the floor, in a namespace made for this probe."""
    plan = config.guard_plan
    with scratch(_RUN) as directory:
        path = directory / "guard"
        netns.create_gateway(path)
        try:
            netns.load_rules(path, nft.render_guard(plan, "probe"))
            netns.load_rules(path, nft.render_floor(plan))
        finally:
            netns.delete(path)
    return "nft has owner tables, socket uid, fib and connection counts"


def cgroups() -> str:
    """Control groups for workers."""
    found = find(Path("/proc/self/mountinfo").read_text())
    closed = [str(root) for root in found.roots if _read_only(root)]
    if closed:
        raise CheckError(f"cgroup v{found.version}, but {', '.join(closed)} cannot be written")
    if found.version == 2:
        offered = set((found.roots[0] / "cgroup.controllers").read_text().split())
        if missing := {"memory", "cpu", "pids"} - offered:
            raise CheckError(f"cgroup v2 without {', '.join(sorted(missing))}")
    without = "" if Freezer().available else "; without a freezer no sandbox can be paused"
    return f"cgroup v{found.version} with memory, cpu and pids: {', '.join(map(str, found.roots))}{without}"


def _read_only(path: Path) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY) or not os.access(path, os.W_OK)


def seccomp() -> str:
    """Filters with an errno action, under which containers on runc are started."""
    actions = Path("/proc/sys/kernel/seccomp/actions_avail").read_text().split()
    if not {"errno", "allow"} <= set(actions):
        raise CheckError("the kernel's seccomp filters have no errno action")
    return "the kernel has seccomp filters"


def program(path: str) -> str:
    """A program that prints its version."""
    return f"{path}: {run(path, '--version') or 'runs'}"


def runsc(path: str) -> str:
    """A runsc with its version. A build from the Go module does not print it, but contains the module's version."""
    said = program(path)
    if "VERSION_MISSING" not in said:
        return said
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        found = re.search(rb"\nmod\tgvisor\.dev/gvisor\t([0-9A-Za-z.+-]{1,80})", text)
        version = found[1].decode() if found else "of an unknown version"
    return f"{path}: runsc {version}"


def gvisor(path: str) -> str:
    """A runsc that can start a sandbox here: old releases fail on current kernels."""
    with scratch(_RUN) as directory:
        run(path, f"--root={directory}", "--network=none", "--ignore-cgroups", "do", "true")
    return "runsc runs a sandbox"


def execd(path: str) -> str:
    """A static program that every user can execute and only its owner can write."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o555 != 0o555 or status.st_mode & 0o022:
        raise CheckError(f"{path} must be a program that every user can run and only its owner can write")
    with open(path, "rb") as file:
        if not is_static(file.read(65536)):
            raise CheckError(f"{path} is not a static 64-bit ELF program: it could not run in every image")
    return f"{path}: static"


def is_static(head: bytes) -> bool:
    """Return whether a program that begins with `head` is a 64-bit little-endian ELF that needs no loader."""
    if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
        return False
    (offset,) = struct.unpack_from("<Q", head, 32)
    size, count = struct.unpack_from("<HH", head, 54)
    if size < 4 or count == 0 or offset + size * count > len(head):
        return False
    return all(struct.unpack_from("<I", head, offset + size * index)[0] != _PT_INTERP for index in range(count))


def fetching(config: HostConfig) -> str:
    """The program that fetches images from registries, where any may be fetched."""
    if not config.registries.allowed:
        return "no image may be fetched: sallyport.registry.allowed is empty"
    if not any(port == 53 for _, port in config.resolvers):
        raise CheckError("no resolver of sallyport.dns_upstreams is on port 53")
    return program(config.registries.skopeo)


def images(config: HostConfig) -> str:
    """The tar files of images."""
    for image in config.images:
        if not Path(image.tar).is_file():
            raise CheckError(f"image {image.name}: there is no file {image.tar}")
        if not tarfile.is_tarfile(image.tar):
            raise CheckError(f"image {image.name}: {image.tar} is not a tar")
    names = ", ".join(image.name for image in config.images)
    return names or "none configured: only images that Docker has already"


def roots(path: str) -> str:
    """The certificate authorities by which upstream servers are verified."""
    if not os.stat(path).st_mode & 0o004:
        raise CheckError(f"{path} is not readable by every user")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError:
        raise CheckError(f"{path} holds no certificate in PEM form") from None
    return f"{path}: {len(context.get_ca_certs())} authorities"


def resolvers(config: HostConfig) -> str:
    """The resolvers of the gateways."""
    if not config.resolvers:
        raise CheckError("no resolver: every name would be refused")
    for address, _ in config.resolvers:
        if address.is_loopback and config.upstream_netns is None:
            raise CheckError(f"{address} is this host itself")
    return ", ".join(config.dns_upstreams)


def users(uids: Uids) -> str:
    """The uids of daemons and workers belong to no other account."""
    taken = [(entry.pw_name, entry.pw_uid, 1) for entry in pwd.getpwall()]
    taken += [(entry.gr_name, entry.gr_gid, 1) for entry in grp.getgrall()]
    for name in ("/etc/subuid", "/etc/subgid"):
        if Path(name).exists():
            taken += subordinate(Path(name).read_text())
    if found := overlapping(uids, taken):
        raise CheckError(f"{', '.join(found)} has a uid or gid that is configured for Sallyport")
    first, end = sandbox_users(0), sandbox_users(uids.workers) - 1
    return f"{', '.join(map(str, uids.daemons))}, {uids.worker_base}-{uids.image_fetcher} and {first}-{end} are free"


def subordinate(text: str) -> list[tuple[str, int, int]]:
    """Parse /etc/subuid or /etc/subgid into (name, first, count)."""
    words = [line.split(":") for line in text.splitlines() if line.count(":") == 2]
    return [(name, int(first), int(count)) for name, first, count in words if first.isdigit() and count.isdigit()]


def overlapping(uids: Uids, taken: Iterable[tuple[str, int, int]]) -> list[str]:
    """Return the names whose ids (name, first, count) overlap with those of Sallyport, sorted."""
    ours = [range(uid, uid + 1) for uid in uids.daemons]
    ours.append(range(uids.worker_base, uids.image_fetcher + 1))
    ours.append(range(sandbox_users(0), sandbox_users(uids.workers)))
    found = {name for name, first, count in taken for own in ours if first < own.stop and own.start < first + count}
    return sorted(found)


def upstream(config: HostConfig) -> str:
    """The network namespace from which workers dial, and whether they have IPv6 there."""
    place = config.upstream_netns or "this network namespace"
    ask = partial(reaches_ipv6, config.allowed)
    try:
        ipv6 = ask() if config.upstream_netns is None else netns.inside(Path(config.upstream_netns), ask)
    except OSError as error:
        raise CheckError(f"{place} is no network namespace: {error.strerror}") from None
    return f"workers dial from {place}, IPv4 and IPv6" if ipv6 else f"workers dial from {place}, IPv4: no IPv6 route"


def interpreter(config: HostConfig) -> str:
    """A CPython, 3.13 or newer, with which daemons are started."""
    said = run(config.python, "-IS", "-c", "import sys; print(sys.version_info[:2] >= (3, 13), sys.version.split()[0])")
    good, _, version = said.partition(" ")
    if good != "True":
        raise CheckError(f"{config.python} is Python {version}")
    real = os.path.realpath(config.python)
    closed = [str(parent) for parent in Path(real).parents if not parent.stat().st_mode & 0o001]
    return f"{version}; below the closed {closed[-1]}: daemons get it bound into place" if closed else version


def packages() -> str:
    """All packages that Sallyport requires, in versions that it permits.

    Source: importlib.metadata, compared with the minimum versions in pyproject.toml.
    """
    try:
        asked = [Requirement(text) for text in metadata.requires("sallyport") or ()]
    except metadata.PackageNotFoundError:
        raise CheckError("Sallyport is not installed as a package") from None
    wanted = [item for item in asked if item.marker is None or item.marker.evaluate()]
    for item in wanted:
        try:
            version = metadata.version(item.name)
        except metadata.PackageNotFoundError:
            raise CheckError(f"{item.name} is missing") from None
        if not item.specifier.contains(version, prereleases=True):
            raise CheckError(f"{item.name} is {version}, and must be {item.specifier}")
    return f"{len(wanted)} packages, none older than asked for"


def docker_answers(path: str) -> str:
    """A server at the socket that speaks Docker's protocol."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(5.0)
        try:
            sock.connect(path)
            check_server(sock, path, os.geteuid())
            sock.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            said = sock.recv(64)
        except WrongServer as error:
            raise CheckError(str(error)) from None
        except OSError as error:
            raise CheckError(f"no Docker answers at {path}: {error.strerror or 'too slow'}") from None
    if b" 200 " not in said:
        raise CheckError(f"what answers at {path} is not Docker")
    return f"Docker answers at {path}"


def attempt[T](probe: Callable[[], T]) -> T:
    """Run a probe; convert the errors of the operating system into a `CheckError`."""
    try:
        return probe()
    except (OSError, ValueError, netns.NftError, subprocess.SubprocessError) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.strerror:
            reason = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        raise CheckError((reason or "the check failed without a reason")[:300]) from None
