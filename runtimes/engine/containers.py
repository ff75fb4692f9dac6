"""The container of a sandbox: its command, environment, files and limits, derived from the launch specification.

- execd replaces the image's entrypoint, and starts the requested one.
- Trust anchors, resolver, hosts, host name and machine id are files of Sallyport, at fixed read-only mounts. The
  request cannot move them.
- Each container has its own launch file. By a change of it execd recognizes a restore; by the secret whose hash it
  holds, it recognizes the host. No process knows the secret of a container that is started, not restored.
- A process belongs to a container if its command line has the container's id: shim, runtime, its helpers.
- Every user inside can read all mounted files: nothing here is secret.
"""

import os
import secrets
import signal
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from runtimes.engine import seccomp
from runtimes.engine.docker import (
    CAPABILITIES,
    ISOLATION_CAPABILITIES,
    Bind,
    ContainerPlan,
    Layout,
    VolumeBind,
    container_name,
)
from runtimes.engine.java_store import java_store
from runtimes.engine.profile import PROFILES
from runtimes.engine.trust import CA_BUNDLE, CA_VARIABLES
from runtimes.engine.wrappers import runtime_name
from runtimes.net.plan import RESOLV_CONF, hosts_file
from wire.api.hostd import Launch

JAVA_STORE = "/opt/opensandbox/java-cacerts"
EXECD = "/opt/opensandbox/execd"
LAUNCH = "/opt/opensandbox/launch"
_KERNEL_THREADS = 1024
_FEWEST_PROCESSES = 64
_LEAVE_SECONDS = 1.0
_END_SECONDS = 2.0
_MOUNTED = {
    CA_BUNDLE: "ca-bundle.pem",
    "/etc/ssl/certs/ca-certificates.crt": "ca-bundle.pem",
    JAVA_STORE: "java-cacerts",
    "/etc/ssl/certs/java/cacerts": "java-cacerts",
    "/etc/resolv.conf": "resolv.conf",
    "/etc/hosts": "hosts",
    "/etc/hostname": "hostname",
    "/etc/machine-id": "machine-id",
    LAUNCH: "launch",
}


def environment(sandbox: str, requested: Mapping[str, str]) -> dict[str, str]:
    """Return the container's environment. The request's values win, except for the variables of the trust anchors.

    CACERT_UPDATES prevents Debian's Java packages from writing their own trust store where Sallyport's is mounted:
    that would make their installation in a sandbox fail.
    """
    own = {"OPENSANDBOX_ID": sandbox, "EXECD_ENVS": "/opt/opensandbox/.env", "CACERT_UPDATES": "disabled"}
    return {**own, **requested, **dict.fromkeys(CA_VARIABLES, CA_BUNDLE)}


def command(token_sha256: str, entrypoint: Sequence[str], *, held: bool) -> list[str]:
    """Return the container's command line. A `held` one starts no program before execd's first init."""
    options = ["--await-init"] if held else []
    return [
        EXECD,
        "--init",
        *options,
        "--launch-file",
        LAUNCH,
        "--access-token-sha256",
        token_sha256,
        "--",
        *entrypoint,
    ]


def write_files(directory: Path, spec: Launch, ca_bundle: str) -> Path:
    """Write the files that will be mounted into a new `directory`; return it. Programs inside trust `ca_bundle`.

    Raises:
        OSError: it exists, or cannot be written.
    """
    directory.mkdir(mode=0o755)
    os.chmod(directory, 0o755)  # noqa: S103 - the container's root reads it through runsc's gofer
    (directory / "java-cacerts").write_bytes(java_store(ca_bundle))
    texts = {
        "ca-bundle.pem": ca_bundle,
        "resolv.conf": RESOLV_CONF,
        "hosts": hosts_file(spec.sandbox),
        "hostname": f"{spec.sandbox}\n",
        "machine-id": f"{secrets.token_hex(16)}\n",
        "launch": f"{secrets.token_hex(32)}\n",
    }
    for name, text in texts.items():
        (directory / name).write_text(text)
    for path in directory.iterdir():
        path.chmod(0o644)
    return directory


def process_limits(spec: Launch) -> tuple[int, int | None]:
    """Return the limit of the container's cgroup, and that of each user inside (None: it is not enforced inside).

    gVisor hangs when the host gives it no more threads. So on gVisor the sandbox's kernel enforces the limit, where a
    fork then fails as it should, and the host's limit is larger.
    """
    if PROFILES[spec.runtime].inner_limits:
        return spec.pids + _KERNEL_THREADS, max(spec.pids, _FEWEST_PROCESSES)
    return spec.pids, None


def plan_container(
    spec: Launch, image: str, files: Path, execd: Path, volumes: Sequence[VolumeBind] = ()
) -> ContainerPlan:
    """Return the container of `spec`. `image` is the id that was inspected, `files` the result of `write_files`."""
    pids, processes = process_limits(spec)
    return ContainerPlan(
        name=container_name(spec.sandbox),
        sandbox=spec.sandbox,
        runtime=runtime_name(spec.runtime),
        image=image,
        command=command(spec.execd_token_sha256, spec.entrypoint, held=spec.held),
        env=environment(spec.sandbox, spec.env),
        hostname=spec.sandbox,
        binds=(Bind(execd, EXECD), *(Bind(files / name, destination) for destination, name in _MOUNTED.items())),
        volumes=tuple(volumes),
        seccomp=seccomp.profile_json(),
        capabilities=ISOLATION_CAPABILITIES if spec.isolation else CAPABILITIES,
        cpu_nanos=spec.cpu_nanos,
        memory_bytes=spec.memory_bytes,
        pids=pids,
        processes=processes,
    )


def keep_tmp_on_disk(layout: Layout) -> None:
    """Put an empty file into /tmp of a container that was not started yet, if its image has this directory.

    runsc mounts a file system in memory over an empty /tmp. It would be in no snapshot, and its content would not count
    as disk space.
    """
    found = (directory / "tmp" for directory in layout.lower if os.path.lexists(directory / "tmp"))
    if layout.layer is None or (image := next(found, None)) is None or not stat.S_ISDIR(image.lstat().st_mode):
        return
    status, own = image.lstat(), layout.layer / "diff" / "tmp"
    own.mkdir(mode=0o700, exist_ok=True)
    (own / ".sallyport").touch(mode=0o644)
    os.chown(own, status.st_uid, status.st_gid, follow_symlinks=False)
    os.chmod(own, stat.S_IMODE(status.st_mode))
    os.utime(own, ns=(status.st_atime_ns, status.st_mtime_ns))


def processes(container: str) -> tuple[int, ...]:
    """Return the processes on the host that have container id `container` in their command line."""
    needle, found = container.encode(), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if needle in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(int(name))
        except OSError:
            continue
    return tuple(found)


def end_processes(container: str) -> tuple[str, ...]:
    """Wait until the processes of a removed container have ended, kill those that do not; return what is left.

    Blocks for at most some seconds. After a failed start, or a death of Docker, the container's shim can stay for
    ever.
    """
    began = time.monotonic()
    while left := processes(container):
        waited = time.monotonic() - began
        if waited > _LEAVE_SECONDS + _END_SECONDS:
            break
        for pid in left if waited > _LEAVE_SECONDS else ():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
    return tuple(f"process {pid} of container {container[:12]}" for pid in left)
