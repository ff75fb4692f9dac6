"""Checks whether this host can run Sallyport, and says how to repair what is missing.

`python -m runtimes.checks.doctor [--json] HOST.json`

- Each failure has a sentence that says how to repair it.
- `refusal` runs the checks without which there would be no enforcement: hostd does not start if one fails.
- It changes nothing and leaves nothing behind. In particular it does not edit Docker's configuration.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from runtimes.checks import probes
from runtimes.checks.probes import CheckError
from runtimes.engine import wrappers
from runtimes.engine.docker import Docker, DockerError
from runtimes.engine.profile import PROFILES
from runtimes.spec import HostConfig
from wire import codec
from wire.api.hostd import Check, Diagnosis, Runtime

_ROOT = "start it as root, in a container or service manager that drops no capability"
_NFT = "install the Debian packages nftables (1.0.1 or newer) and util-linux, and have them on the PATH"
_NAMESPACE = "start it as root where namespaces and mounts are allowed; see also sysctl user.max_net_namespaces"
_SLOT = "load the kernel modules veth, nf_tables, nft_nat, nft_redir, nft_connlimit and nft_reject_inet"
_GUARD = "use Linux 5.12 or newer with nft_socket and nft_fib_inet, and nftables 1.0.1 or newer"
_CGROUPS = "mount cgroup v2 (or v1) with the controllers memory, cpu and pids, writable for root"
_SECCOMP = "use a kernel with CONFIG_SECCOMP_FILTER"
_RUNC = "install the Debian package runc (1.1 or newer), or leave runc out of sallyport.allowed_runtimes"
_OWN_USERS = (
    "use Linux 5.19 or newer and have Docker's data root on ext4, XFS or Btrfs; see also sysctl "
    "user.max_user_namespaces; or leave runc out of sallyport.allowed_runtimes"
)
_RUNSC = "build a current one as `./run` does and set sallyport.runsc, or leave runsc out of sallyport.allowed_runtimes"
_EXECD = "build it with CGO_ENABLED=0 as `./run` does, and set sallyport.execd"
_DISK = (
    "load the kernel modules loop and ext4, install the Debian package e2fsprogs, have room in sallyport.state_dir; "
    "or set sallyport.disk_limits = false, and any sandbox can fill the host's disk"
)
_STORAGE = (
    "give Docker the storage driver overlay2; or set sallyport.disk_limits = false and leave runc out of "
    "sallyport.allowed_runtimes"
)
_SKOPEO = "install the Debian package skopeo, or set sallyport.registry.skopeo; name a resolver on port 53"
_IMAGES = "build the tars as `./run` does, and name them in sallyport.images"
_ROOTS = "install the Debian package ca-certificates, or set sallyport.upstream_roots to a PEM file that all may read"
_DNS = (
    'set sallyport.dns_upstreams to the addresses of resolvers, such as ["192.0.2.53:53", "[2001:db8::53]:53"], not on'
    " loopback and without an interface (fe80::1%eth0)"
)
_USERS = "set other numbers under sallyport.uids, or take that range away from its user"
_UPSTREAM = "make the namespace before the server starts, or unset sallyport.upstream_netns"
_PYTHON = "set sallyport.python to the CPython 3.13 that Sallyport is installed for"
_PACKAGES = "install what uv.lock names: `uv sync --frozen`"
_DOCKERD = "install the Debian package docker.io (20.10 or newer), or set sallyport.docker.binary"
_DOCKER = "start Docker and set sallyport.docker.socket, or set sallyport.docker.managed = true to have one of our own"


class StartRefused(Exception):
    """A check failed without which there would be no enforcement; the message is the reason."""


@dataclass(frozen=True, slots=True)
class DoctorQuestion:
    """One check. `remedy` is shown if the probe raises. A `vital` check runs at each start, and must be quick."""

    name: str
    remedy: str
    probe: Callable[[], str]
    vital: bool = False


def _runc(program: str) -> tuple[DoctorQuestion, ...]:
    return (DoctorQuestion("runc", _RUNC, lambda: probes.program(program), vital=True),)


def _runsc(program: str) -> tuple[DoctorQuestion, ...]:
    return (
        DoctorQuestion("runsc", _RUNSC, lambda: probes.runsc(program), vital=True),
        DoctorQuestion("gvisor", _RUNSC, lambda: probes.gvisor(program)),
    )


_PROGRAMS: dict[Runtime, Callable[[str], tuple[DoctorQuestion, ...]]] = {
    Runtime.RUNC: _runc,
    Runtime.RUNSC: _runsc,
}


def questions(config: HostConfig) -> tuple[DoctorQuestion, ...]:
    """Return all checks, except the one that needs a connection to Docker."""
    asked = [
        DoctorQuestion("permissions", _ROOT, probes.permissions, vital=True),
        DoctorQuestion("kernel", "", probes.kernel),
        DoctorQuestion("memory", "", probes.locked_memory),
        DoctorQuestion("nft", _NFT, probes.nft_program, vital=True),
        DoctorQuestion("namespaces", _NAMESPACE, probes.namespace),
        DoctorQuestion("slot", _SLOT, probes.slot, vital=True),
        DoctorQuestion("guard", _GUARD, lambda: probes.guard(config), vital=True),
        DoctorQuestion("upstream", _UPSTREAM, lambda: probes.upstream(config), vital=True),
        DoctorQuestion("cgroups", _CGROUPS, probes.cgroups, vital=True),
        DoctorQuestion("seccomp", _SECCOMP, probes.seccomp, vital=True),
    ]
    for runtime, program in config.programs.items():
        if runtime in config.runtimes:
            asked += _PROGRAMS[runtime](program)
            if PROFILES[runtime].user_namespace:
                asked.append(
                    DoctorQuestion("namespace", _OWN_USERS, lambda: probes.sandbox_namespace(config), vital=True)
                )
    if config.dockerd is None:
        asked.append(DoctorQuestion("docker", _DOCKER, lambda: probes.docker_answers(config.docker_socket), vital=True))
    else:
        binary = config.dockerd.binary
        asked.append(DoctorQuestion("dockerd", _DOCKERD, lambda: probes.program(binary), vital=True))
    return (
        *asked,
        DoctorQuestion("execd", _EXECD, lambda: probes.execd(config.execd)),
        *([DoctorQuestion("disk", _DISK, lambda: probes.disk(config), vital=True)] if config.disk_limits else []),
        DoctorQuestion("images", _IMAGES, lambda: probes.images(config), vital=True),
        DoctorQuestion("registries", _SKOPEO, lambda: probes.fetching(config)),
        DoctorQuestion("roots", _ROOTS, lambda: probes.roots(config.upstream_roots)),
        DoctorQuestion("dns", _DNS, lambda: probes.resolvers(config)),
        DoctorQuestion("users", _USERS, lambda: probes.users(config.uids), vital=True),
        DoctorQuestion("python", _PYTHON, lambda: probes.interpreter(config), vital=True),
        DoctorQuestion("packages", _PACKAGES, probes.packages, vital=True),
    )


def ask(question: DoctorQuestion) -> Check:
    """Run one check."""
    try:
        return Check(question.name, True, probes.attempt(question.probe))
    except CheckError as error:
        return Check(question.name, False, str(error), question.remedy)


async def refusal(config: HostConfig) -> None:
    """Run the vital checks concurrently.

    Raises:
        StartRefused: something is missing; nothing was started, nothing is left.
    """
    vital = [question for question in questions(config) if question.vital]
    for check in await asyncio.gather(*(asyncio.to_thread(ask, question) for question in vital)):
        if not check.ok:
            raise StartRefused(f"{check.name}: {check.detail}")


async def runtimes_known(config: HostConfig, docker: Docker) -> Check:
    """Check whether Docker knows the shimmed runtimes; the remedy is the exact text to add."""
    wanted = wrappers.entries(Path(config.run_dir) / "runtimes", config.runtimes)
    try:
        version = (await docker.version())["Version"]
        known, storage = await docker.runtimes(), await docker.storage()
    except DockerError as error:
        return Check("runtimes", False, str(error), _DOCKER)
    missing = {name: entry for name, entry in wanted.items() if name not in known}
    if (config.disk_limits or any(PROFILES[name].user_namespace for name in config.runtimes)) and storage != "overlay2":
        return Check("runtimes", False, f"Docker {version} has the storage driver {storage[:40]}", _STORAGE)
    if not missing:
        return Check("runtimes", True, f"Docker {version} knows {', '.join(sorted(wanted))}")
    detail = f"Docker {version} does not know {', '.join(sorted(missing))}"
    return Check("runtimes", False, detail, add_to_docker(missing))


def add_to_docker(entries: dict[str, dict[str, str]]) -> str:
    """Return the sentence that says what to add to Docker's configuration."""
    text = json.dumps({"runtimes": entries})[1:-1]
    return f"add to /etc/docker/daemon.json, inside its braces, and send dockerd a SIGHUP: {text}"


async def diagnose(config: HostConfig, docker: Docker | None) -> list[Check]:
    """Run all checks. Without `docker` connect to the host's Docker for them, unless hostd starts its own."""
    checks = [await asyncio.to_thread(ask, question) for question in questions(config)]
    if docker is not None:
        return [*checks, await runtimes_known(config, docker)]
    if config.dockerd is not None or not all(check.ok for check in checks if check.name == "docker"):
        return checks
    try:
        docker = await asyncio.to_thread(Docker, config.docker_socket)
    except DockerError as error:
        return [*checks, Check("runtimes", False, str(error), _DOCKER)]
    try:
        return [*checks, await runtimes_known(config, docker)]
    finally:
        docker.close()


def main(arguments: list[str]) -> int:
    """Print the findings; return 0 if all checks succeeded."""
    wire_form = arguments[:1] == ["--json"]
    files = arguments[1:] if wire_form else arguments
    if len(files) != 1:
        print("usage: python -m runtimes.checks.doctor [--json] HOST.json", file=sys.stderr)
        return 64
    try:
        config = HostConfig.model_validate_json(Path(files[0]).read_bytes())
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False, include_context=False)[0]
        place = ".".join(map(str, problem["loc"])) or "settings"
        checks = [Check("configuration", False, f"{place}: {problem['msg']}", "correct the settings file")]
    else:
        checks = asyncio.run(diagnose(config, None))
    print(
        json.dumps(codec.encode(Diagnosis(tuple(checks)))) if wire_form else "\n".join(check.line() for check in checks)
    )
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
