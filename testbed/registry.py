"""A registry of images in the test internet: Debian's `docker-registry`, with TLS and a login.

Images come into it from files, by skopeo, from inside its own namespace.
"""

import base64
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import bcrypt

from testbed.internet import REGISTRY, REGISTRY_ADDRESS, Internet, InternetError
from testbed.with_parent import with_parent

USER = "builder"
_READY_SECONDS = 30.0


def registry_program() -> str:
    """Return the registry's program: that of the host, or the unpacked one that the environment names."""
    return shutil.which("docker-registry") or os.environ["SALLYPORT_REGISTRY"]


class Registry:
    """The running registry. Use as a context manager; `directory` has everything that it stores."""

    def __init__(self, internet: Internet, directory: Path, password: str) -> None:
        self.internet, self.directory, self.password = internet, directory, password
        self.log = directory / "registry.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True)
        certificate = self.internet.directory / f"{REGISTRY}.pem"
        users = self.directory / "htpasswd"
        users.touch(mode=0o600)
        users.write_bytes(f"{USER}:".encode() + bcrypt.hashpw(self.password.encode(), bcrypt.gensalt(4)) + b"\n")
        config = self.directory / "config.yml"
        config.write_text(
            f"""
version: 0.1
log: {{accesslog: {{disabled: false}}}}
storage: {{filesystem: {{rootdirectory: {self.directory / "data"}}}, delete: {{enabled: true}}}}
http: {{addr: "{REGISTRY_ADDRESS}:443", tls: {{certificate: {certificate}, key: {certificate}}}}}
auth: {{htpasswd: {{realm: bank, path: {users}}}}}
"""
        )
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                with_parent(*self._inside(), registry_program(), "serve", str(config)), stdout=log, stderr=log
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def _inside(self) -> tuple[str, ...]:
        return ("nsenter", f"--net={self.internet.path(self.internet.net)}")

    def _wait(self) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        probe = f"import socket; socket.create_connection(('{REGISTRY_ADDRESS}', 443), 1).close()"
        while time.monotonic() < deadline:
            command = (*self._inside(), sys.executable, "-IS", "-c", probe)
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return
            time.sleep(0.1)
        raise InternetError(f"the registry did not start: {self.log.read_text()[-500:]}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the registry."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def push(self, source: str, name: str, *options: str) -> str:
        """Copy an image, `docker-archive:FILE` or `oci:DIRECTORY`, into the registry; return its digest there."""
        target = f"docker://{REGISTRY}/{name}"
        login = f"{USER}:{self.password}"
        self._skopeo("copy", *options, f"--dest-creds={login}", "--dest-tls-verify=false", source, target)
        shown = self._skopeo("inspect", "--format={{.Digest}}", f"--creds={login}", "--tls-verify=false", target)
        return shown.strip()

    def _skopeo(self, *arguments: str) -> str:
        hosts = self.directory / "hosts"
        hosts.write_text(f"{REGISTRY_ADDRESS} {REGISTRY}\n")
        script = 'mount --bind "$0" /etc/hosts && exec skopeo --insecure-policy "$@"'
        command = ("unshare", "--mount", *self._inside(), "sh", "-c", script, str(hosts), *arguments)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise InternetError(f"skopeo: {done.stderr.strip()[-500:]}")
        return done.stdout

    @property
    def requests(self) -> list[str]:
        """The lines of its log about requests."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if "/v2/" in line]

    @property
    def login(self) -> str:
        """The login, as the vault stores it."""
        return f"{USER}:{self.password}"

    @property
    def encoded_login(self) -> str:
        """The login, as a header has it."""
        return base64.b64encode(self.login.encode()).decode()
