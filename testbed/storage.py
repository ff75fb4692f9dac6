"""An object store in the test internet: versitygw, an independent server of the protocol of S3, with TLS.

It verifies each signature, those of chunks included, and answers with the errors of S3.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from testbed.internet import STORAGE, STORAGE_ADDRESS, Internet, InternetError
from testbed.with_parent import with_parent

REGION = "eu-west-1"
BUCKET = "ledgers"
_READY_SECONDS = 30.0


class Storage:
    """The running store with one bucket. Use as a context manager; `directory` has everything that it stores.

    Attributes:
        keys: access key id and secret key of its only account.
        host, address: its place in the internet.
    """

    def __init__(
        self,
        internet: Internet,
        directory: Path,
        keys: tuple[str, str],
        host: str = STORAGE,
        address: str = STORAGE_ADDRESS,
    ) -> None:
        self.internet, self.directory, self.keys, self.host, self.address = internet, directory, keys, host, address
        self.log = directory / "storage.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        (self.directory / "data" / BUCKET).mkdir(parents=True)
        certificate = str(self.internet.directory / f"{self.host}.pem")
        options = ("--cert", certificate, "--key", certificate, "--port", f"{self.address}:443", "--region", REGION)
        command = (*self._inside(), os.environ["SALLYPORT_STORAGE"], *options, "posix", str(self.directory / "data"))
        secret = {"ROOT_ACCESS_KEY": self.keys[0], "ROOT_SECRET_KEY": self.keys[1]}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(with_parent(*command), stdout=log, stderr=log, env=os.environ | secret)
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
        probe = f"import socket; socket.create_connection(('{self.address}', 443), 1).close()"
        while time.monotonic() < deadline:
            command = (*self._inside(), sys.executable, "-IS", "-c", probe)
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return
            time.sleep(0.1)
        raise InternetError(f"the object store did not start: {self.log.read_text()[-500:]}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the store."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stored(self, key: str) -> bytes | None:
        """Return the content of an object, None if there is none."""
        path = self.directory / "data" / BUCKET / key
        return path.read_bytes() if path.is_file() else None
