"""Tells whether this host can run Sallyport, and what to do where it cannot. `python -m runtimes.doctor HOST.json`

- A check tries the very thing that is needed (it makes a slot, it loads the rules), not a version number, where it can.
- It leaves nothing behind, and changes nothing.
"""

import asyncio
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runtimes import netns, nft, slots
from runtimes.cgroups import find
from runtimes.docker import Docker, DockerError
from runtimes.netplan import PLAN
from runtimes.shim_install import runtime_name
from runtimes.spec import RUNTIMES, HostConfig

_PROBE_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `remedy` is empty when it is fine."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str | bool]:
        """Return its wire form."""
        return {"name": self.name, "ok": self.ok, "detail": self.detail, "remedy": self.remedy}


def _attempt(name: str, remedy: str, probe: Callable[[], str]) -> Check:
    try:
        return Check(name, True, probe())
    except (OSError, ValueError, netns.NftError, subprocess.SubprocessError, DockerError) as error:
        return Check(name, False, f"{type(error).__name__}: {error}"[:300], remedy)


def _root() -> str:
    if os.geteuid() != 0:
        raise PermissionError("not root")
    return "running as root"


def _slot() -> str:
    with tempfile.TemporaryDirectory(prefix="sallyport-doctor-", dir="/run") as directory:
        slot = slots.make(Path(directory), 0, PLAN)
        residue = slots.destroy(slot)
        if residue:
            raise OSError("; ".join(residue))
    return "namespaces, a veth pair and the gateway's rules can be made and unmade"


def _guard(config: HostConfig) -> str:
    uids = config.uids
    rules = nft.render_guard(
        nft.GuardPlan(uids.worker_base, uids.worker_base + uids.workers - 1, config.resolvers, config.allowed)
    )
    with tempfile.TemporaryDirectory(prefix="sallyport-doctor-", dir="/run") as directory:
        path = Path(directory, "guard")
        netns.create_gateway(path)
        try:
            netns.load_rules(path, rules)
        finally:
            netns.delete(path)
    return "nft has owner tables, socket uid, fib and connection counts"


def _cgroups() -> str:
    found = find(Path("/proc/self/mountinfo").read_text())
    if not all(os.access(root, os.W_OK) for root in found.roots):
        raise PermissionError("a hierarchy cannot be written")
    return f"cgroup v{found.version}: {', '.join(map(str, found.roots))}"


def _program(path: str) -> str:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=True)
    return f"{path}: {done.stdout.splitlines()[0] if done.stdout else 'runs'}"


def _static(path: str) -> str:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o555 != 0o555 or status.st_mode & 0o022:
        raise PermissionError(f"{path} must be a program that everybody can run and only its owner can write")
    return path


def _upstream(config: HostConfig) -> str:
    if config.upstream_netns is None:
        return "workers dial from this network namespace"
    netns.links(Path(config.upstream_netns))
    return f"workers dial from {config.upstream_netns}"


def _interpreter(config: HostConfig) -> str:
    real = os.path.realpath(config.python)
    closed = [str(parent) for parent in Path(real).parents if not parent.stat().st_mode & 0o001]
    return f"{real} lies below the closed {closed[-1]}: daemons get it bound into place" if closed else real


async def _docker(docker: Docker | None) -> Check:
    name, remedy = "docker", "install docker.io (20.10 or newer), or let Sallyport start its own dockerd"
    if docker is None:
        return Check(name, False, "not connected", remedy)
    try:
        version = (await docker.version())["Version"]
        missing = {runtime_name(runtime) for runtime in RUNTIMES} - set(await docker.runtimes())
    except DockerError as error:
        return Check(name, False, str(error), remedy)
    if missing:
        entries = "add the `runtimes` entries of <run_dir>/runtimes to daemon.json and reload dockerd with SIGHUP"
        return Check(name, False, f"Docker {version} does not know {', '.join(sorted(missing))}", entries)
    return Check(name, True, f"Docker {version}")


async def diagnose(config: HostConfig, docker: Docker | None) -> list[Check]:
    """Run all checks."""
    runsc = "build it: CGO_ENABLED=0 go install gvisor.dev/gvisor/runsc (a static binary), and set `runsc`"
    probes: tuple[tuple[str, str, Callable[[], str]], ...] = (
        ("permissions", "start it as root", _root),
        ("slot", "load the kernel modules veth, nf_tables, nft_redir, nft_connlimit, nft_reject_inet", _slot),
        ("guard", "nftables 1.0.1 or newer and a kernel with owner tables (5.12) are needed", lambda: _guard(config)),
        ("cgroups", "mount cgroup v2, or v1 with memory, cpu and pids", _cgroups),
        ("runc", "install runc 1.1 or newer", lambda: _program(config.runc)),
        ("runsc", runsc, lambda: _program(config.runsc)),
        ("execd", "build execd and set its path", lambda: _static(config.execd)),
        ("upstream", "make the namespace, or set `upstream_netns` to null", lambda: _upstream(config)),
        ("interpreter", "use a Python that exists", lambda: _interpreter(config)),
    )
    checks = [await asyncio.to_thread(_attempt, name, remedy, probe) for name, remedy, probe in probes]
    return [*checks, await _docker(docker)]


def main(arguments: list[str]) -> int:
    """Print the findings; 0 if all is well."""
    if len(arguments) != 1:
        print("usage: python -m runtimes.doctor HOST.json", file=sys.stderr)
        return 64
    config = HostConfig.model_validate_json(Path(arguments[0]).read_bytes())
    try:
        docker: Docker | None = Docker(config.docker_socket)
    except (OSError, DockerError):
        docker = None
    checks = asyncio.run(diagnose(config, docker))
    for check in checks:
        print(f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.detail}")
        if check.remedy:
            print(f"     -> {check.remedy}")
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
