"""A privileged runc container in any network namespace: every capability, no seccomp, the host's own tools.

It plays the attacker who has broken out of the sandbox's confinement but not out of its network namespace: what
stops him is what stands on the far side of the wire.
"""

import json
import subprocess
import tempfile
import uuid
from pathlib import Path

from lifecycle.posture import ways_out

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
_HOST_DIRECTORIES = ("/usr", "/etc")


class Ended(RuntimeError):
    """The container is gone in the middle of a probe: Sallyport ends whoever is in a slot that it removes."""


class PrivilegedContainer:
    """Runs `lifecycle.posture.ways_out` in the namespace at `netns`. Use as a context manager."""

    def __init__(self, netns: str, targets: dict[str, object], resolver: str) -> None:
        self._netns, self._targets, self._resolver = netns, targets, resolver
        self._name = f"sallyport-demo-{uuid.uuid4().hex[:12]}"

    def __enter__(self) -> "PrivilegedContainer":
        self._directory = tempfile.TemporaryDirectory(prefix="sallyport-demo-")
        bundle = Path(self._directory.name)
        root = bundle / "rootfs"
        for name in ("usr", "etc", "proc", "dev", "tmp", "run", "probe"):
            (root / name).mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            (root / name).symlink_to(f"usr/{name}")
        (bundle / "resolv.conf").write_text(f"nameserver {self._resolver}\noptions timeout:5 attempts:1\n")
        (bundle / "config.json").write_text(json.dumps(self._config(bundle)))
        self._process = subprocess.Popen(
            ["runc", "--root", str(bundle / "state"), "run", "--bundle", str(bundle), self._name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def _config(self, bundle: Path) -> dict[str, object]:
        def bind(source: str, destination: str) -> dict[str, object]:
            return {"source": source, "destination": destination, "type": "bind", "options": ["rbind", "ro"]}

        everything = dict.fromkeys(("bounding", "effective", "permitted"), _CAPABILITIES)
        return {
            "ociVersion": "1.0.2",
            "root": {"path": "rootfs"},
            "process": {
                "user": {"uid": 0, "gid": 0},
                "cwd": "/",
                "args": ["/usr/bin/python3", "/probe/ways_out.py", "serve"],
                "env": ["PATH=/usr/sbin:/usr/bin", f"PROBE_TARGETS={json.dumps(self._targets)}"],
                "capabilities": everything,
            },
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]},
                *[bind(name, name) for name in _HOST_DIRECTORIES],
                bind(str(bundle / "resolv.conf"), "/etc/resolv.conf"),
                bind(str(Path(ways_out.__file__).parent), "/probe"),
            ],
            "linux": {
                "namespaces": [
                    {"type": "pid"},
                    {"type": "ipc"},
                    {"type": "mount"},
                    {"type": "network", "path": self._netns},
                ],
                "resources": {"devices": [{"allow": True, "access": "rwm"}]},
            },
        }

    def attempt(self, name: str) -> str:
        """Run one probe; returns what it saw.

        Raises:
            Ended: it came to no answer.
        """
        assert self._process.stdin is not None and self._process.stdout is not None  # noqa: S101
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise Ended(f"the privileged container was ended in probe {name!r}")
        if not answer.startswith(f"done {name} "):
            raise RuntimeError(f"the privileged container did not answer probe {name!r}")
        return answer.removeprefix(f"done {name} ").strip()

    def __exit__(self, *_: object) -> None:
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
            state = str(Path(self._directory.name) / "state")
            subprocess.run(["runc", "--root", state, "delete", "--force", self._name], capture_output=True, check=False)
            self._directory.cleanup()
