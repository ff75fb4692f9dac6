"""A privileged container in any network namespace: every capability, no seccomp, the host's own tools.

It represents an attacker outside of the sandbox's confinement but inside its network namespace: only the other side
of the veth stops it. On runsc it shows the most that gVisor's kernel can do.
"""

import json
import os
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lifecycle.posture import ways_out
from lifecycle.posture.attempts import ProbeError, Report, report

_CAPABILITIES = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_BROADCAST",
    "CAP_NET_ADMIN",
    "CAP_NET_RAW",
    "CAP_IPC_LOCK",
    "CAP_IPC_OWNER",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
    "CAP_SYS_ADMIN",
    "CAP_MKNOD",
]
_OF_ITS_OWN_KERNEL = ("CAP_SYS_MODULE", "CAP_SYS_BOOT", "CAP_SYS_NICE", "CAP_SYS_RAWIO", "CAP_SYSLOG")
"""Additional capabilities on runsc, where they give no privilege on the host."""
_RUNSC_FLAGS = ("--network=sandbox", "--net-raw", "--allow-packet-socket-write", "--ignore-cgroups")
_HOST_DIRECTORIES = ("/usr", "/etc")


class Ended(RuntimeError):
    """The container has ended during a probe: Sallyport ends all processes in a slot that it removes."""


@contextmanager
def privileged(
    runtime: str, program: Path, *arguments: str, netns: str | None = None, resolver: str = "", **environment: str
) -> Iterator[list[str]]:
    """Yield the command that starts a container with a Python program in the foreground.

    `netns` None: a new network namespace.
    """
    name = f"sallyport-demo-{uuid.uuid4().hex[:12]}"
    with tempfile.TemporaryDirectory(prefix="sallyport-demo-") as directory:
        bundle = Path(directory)
        root = bundle / "rootfs"
        for place in ("usr", "etc", "proc", "sys", "dev", "tmp", "mnt", "run", "probe"):
            (root / place).mkdir(parents=True)
        for place in ("bin", "sbin", "lib", "lib64"):
            (root / place).symlink_to(f"usr/{place}")
        (bundle / "resolv.conf").write_text(
            f"nameserver {resolver}\noptions timeout:5 attempts:1\n" if resolver else ""
        )
        words = ["/usr/bin/python3", f"/probe/{program.name}", *arguments]
        config = _config(bundle, runtime, words, program.parent, netns, environment)
        (bundle / "config.json").write_text(json.dumps(config))
        real = ["runc"] if runtime == "runc" else [os.environ["SALLYPORT_RUNSC"], *_RUNSC_FLAGS]
        tool = [*real, "--root", str(bundle / "state")]
        try:
            yield [*tool, "run", "--bundle", str(bundle), name]
        finally:
            subprocess.run([*tool, "delete", "--force", name], capture_output=True, check=False)
            if runtime == "runsc":  # it leaves the network namespace of its helpers mounted
                subprocess.run(["umount", str(bundle / "state" / "null-netns")], capture_output=True, check=False)


def _config(
    bundle: Path, runtime: str, words: list[str], programs: Path, netns: str | None, environment: dict[str, str]
) -> dict[str, object]:
    def bind(source: str, destination: str) -> dict[str, object]:
        return {"source": source, "destination": destination, "type": "bind", "options": ["rbind", "ro"]}

    capabilities = [*_CAPABILITIES, *(_OF_ITS_OWN_KERNEL if runtime == "runsc" else ())]
    return {
        "ociVersion": "1.0.2",
        "root": {"path": "rootfs"},
        "process": {
            "user": {"uid": 0, "gid": 0},
            "cwd": "/",
            "args": words,
            "env": ["PATH=/usr/sbin:/usr/bin", *(f"{name}={value}" for name, value in environment.items())],
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]},
            *[bind(name, name) for name in _HOST_DIRECTORIES],
            bind(str(bundle / "resolv.conf"), "/etc/resolv.conf"),
            bind(str(programs), "/probe"),
        ],
        "linux": {
            "namespaces": [
                {"type": "pid"},
                {"type": "ipc"},
                {"type": "uts"},
                {"type": "mount"},
                {"type": "network", **({"path": netns} if netns else {})},
            ],
            "resources": {"devices": [{"allow": True, "access": "rwm"}]},
        },
    }


class PrivilegedContainer:
    """Runs `lifecycle.posture.ways_out` in the namespace at `netns`. Use as a context manager."""

    def __init__(self, netns: str, targets: dict[str, object], resolver: str, runtime: str = "runc") -> None:
        self._netns, self._resolver, self._runtime = netns, resolver, runtime
        self._targets = json.dumps(targets)
        self._resources = ExitStack()

    def __enter__(self) -> "PrivilegedContainer":
        program = Path(ways_out.__file__)
        with ExitStack() as resources:
            command = resources.enter_context(
                privileged(
                    self._runtime,
                    program,
                    "serve",
                    netns=self._netns,
                    resolver=self._resolver,
                    PROBE_TARGETS=self._targets,
                )
            )
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            resources.callback(self._end)
            self._resources = resources.pop_all()
        return self

    def attempt(self, name: str) -> Report:
        """Run one probe; return its report.

        Raises:
            Ended: it gave no answer.
            ProbeError: it did not run to its end.
        """
        assert self._process.stdin is not None and self._process.stdout is not None  # noqa: S101
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise Ended(f"the privileged container was ended in probe {name!r}")
        if answer.startswith("failed "):
            raise ProbeError(answer.strip())
        return report(name, 0, answer)

    def _end(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            if self._process.stdout is not None:
                self._process.stdout.close()

    def __exit__(self, *_: object) -> None:
        self._resources.close()
