"""A complete Sallyport beside the demo internet: the processes of `sallyport serve`, used through public interfaces."""

import http.client
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from opensandbox.config.connection_sync import ConnectionConfigSync
from opensandbox.sync.sandbox import SandboxSync

from runtimes.net.slot_pool import AHEAD
from testbed.internet import DNS_ADDRESS, Internet, whole_lines
from testbed.ports import reserve_port
from testbed.rings import settle
from testbed.traces import Traces, take
from testbed.with_parent import with_parent
from wire.api.hostd import HostSandboxState, Inspect, List
from wire.blocking import BlockingClient
from wire.errors import RemoteError
from wire.operations import Request, operation
from wire.sockets import ROOT

POLICY = Path(__file__).with_name("policy.yaml")
IMAGE = "sallyport/base"
EMPTY_IMAGE = "sallyport/empty"
CODE_IMAGE = "opensandbox/code-interpreter:v1.1.0"  # the name in the SDK's examples
CODE_ENTRYPOINT = ["/opt/code-interpreter/code-interpreter.sh"]
START_SECONDS = 300
STOP_SECONDS = 180
"""Long limits, because a new host imports every image first, and can have other load."""
_LIFETIME = timedelta(hours=2)  # longer than all tests: their session's sandboxes are created once


def code_image() -> str:
    """Return settings (TOML, to append) with the code-interpreter image."""
    return f"""
[[sallyport.images]]
name = "{CODE_IMAGE}"
tar = "{os.environ["SALLYPORT_CODE_IMAGE"]}"
env = {{JUPYTER_HOST = "http://127.0.0.1:44771", JUPYTER_TOKEN = "opensandboxcodeinterpreterjupyter"}}
"""


class StackError(Exception):
    """A step of the demo failed; the message says which."""


class Stack:
    """The running server. Use as a context manager; `directory` holds everything it writes except Docker's data."""

    disk = "128Mi"
    """The size of a sandbox's disk. All of it is allocated, which takes processor time in shared memory."""
    slots_ahead = AHEAD
    """The number of slots that the server has ready while nothing is launched."""

    def __init__(self, internet: Internet, directory: Path, policy: Path = POLICY, port: int = 0) -> None:
        """Without a port choose a random one."""
        self.internet, self.directory, self.policy, self.port = internet, directory, policy, port or reserve_port()
        home = Path(os.environ["SALLYPORT_HOME"])
        self.state, self.run = directory / "state", Path(os.environ["SALLYPORT_RUN_DIR"])
        self._docker_data = home / "docker"
        self._process: subprocess.Popen[bytes] | None = None
        self.log = directory / "serve.log"

    @property
    def stores(self) -> tuple[Path, Path]:
        """The directories of all permanent data: the server's and Docker's."""
        return self.state, self._docker_data

    @property
    def images(self) -> dict[str, str]:
        """The archives of the images that the settings name, by name."""
        return {IMAGE: os.environ["SALLYPORT_BASE_IMAGE"], EMPTY_IMAGE: os.environ["SALLYPORT_EMPTY_IMAGE"]}

    @property
    def settings(self) -> str:
        """The settings file, TOML."""
        environment = os.environ
        images = "".join(
            f'[[sallyport.images]]\nname = "{name}"\ntar = "{tar}"\n\n' for name, tar in self.images.items()
        )
        return f"""
[server]
host = "127.0.0.1"
port = {self.port}

[sallyport]
state_dir = "{self.state}"
run_dir = "{self.run}"
policy_file = "{self.policy}"
upstream_netns = "{self.internet.path(self.internet.up)}"
upstream_roots = "{self.internet.roots}"
dns_upstreams = ["{DNS_ADDRESS}:53"]
runsc = "{environment["SALLYPORT_RUNSC"]}"
execd = "{environment["SALLYPORT_EXECD"]}"
default_disk = "{self.disk}"

{images}[sallyport.docker]
managed = true
data_root = "{self._docker_data}"
"""

    def __enter__(self) -> "Stack":
        self.start()
        return self

    def start(self) -> None:
        """Start the server and wait until it answers; also after `kill`, to adopt what was left."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o711)
        self.config.write_text(self.settings)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                with_parent(*self.command, signal="TERM"),  # it then removes its sandboxes
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def kill(self) -> None:
        """Send SIGKILL to the process that was started here; nothing is removed."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def command(self) -> list[str]:
        """The command that starts the server."""
        return [sys.executable, "-m", "lifecycle.cli", "--config", str(self.config), "serve"]

    @property
    def config(self) -> Path:
        return self.directory / "sallyport.toml"

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise StackError(f"the server ended while starting:\n{self.tail()}")
            if self.healthy():
                return
            time.sleep(0.1)
        raise StackError(f"the server did not answer within {START_SECONDS} s:\n{self.tail()}")

    def healthy(self) -> bool:
        """Return whether the API answers now."""
        # Not httpx: a client of it reads all certificates of the system when it is made, which is too slow for each
        # call.
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def tail(self) -> str:
        """Return the last lines of the server's own log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def stop(self) -> None:
        """End the server like Ctrl-C does, and wait until everything that it started has ended."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise StackError(f"the server did not end within {STOP_SECONDS} s:\n{self.tail()}") from None
        finally:
            self._process = None

    @property
    def api_key(self) -> str:
        return (self.state / "lifecycle" / "api-key").read_text().strip()

    @property
    def connection(self) -> ConnectionConfigSync:
        """The SDK's configuration for a connection to this server."""
        return ConnectionConfigSync(domain=f"127.0.0.1:{self.port}", api_key=self.api_key)

    def create(
        self,
        runtime: str,
        image: str = IMAGE,
        policy: str | None = "agents",
        more: Mapping[str, str] | None = None,
        **options: Any,
    ) -> SandboxSync:
        """Create a sandbox with the unmodified SDK, under a named policy, with `more` extensions and `options`."""
        extensions = {"sallyport.runtime": runtime, **({"sallyport.policy": policy} if policy else {}), **(more or {})}
        return SandboxSync.create(
            image, connection_config=self.connection, extensions=extensions, timeout=_LIFETIME, **options
        )

    def connect(self, sandbox: str) -> SandboxSync:
        """Connect to an existing sandbox with the unmodified SDK."""
        return SandboxSync.connect(sandbox, connection_config=self.connection)

    def docker(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Docker's own client with the server's dockerd, as root of the host can."""
        command = ["docker", "-H", f"unix://{self.run / 'docker.sock'}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def permit_images(self, *names: str) -> None:
        """Add images that Docker has to those from which sandboxes can be started."""
        for name in names:
            self.sallyport("image", "add", f"docker:{name}")

    def remove_images(self, *names: str) -> None:
        """Remove images that `permit_images` added, from the list and from Docker."""
        for name in names:
            self.sallyport("image", "remove", name)
        self.docker("rmi", "-f", *names)

    def sallyport(self, *arguments: str, stdin: str = "") -> str:
        """Run the `sallyport` command line with this server; return its output."""
        done = subprocess.run(
            [sys.executable, "-m", "lifecycle.cli", "--config", str(self.config), *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise StackError(f"sallyport {' '.join(arguments)}: exit {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def ask[Answer](self, request: Request[Answer]) -> Answer:
        """Ask hostd directly, as root can.

        Raises:
            StackError: it refused.
            OSError: it does not answer.
        """
        with BlockingClient(self.run / "hostd.sock", ROOT, timeout=60) as client:
            try:
                return client.ask(request)
            except RemoteError as error:
                raise StackError(f"hostd refused {operation(request)}: {error}") from None

    def inspect(self, sandbox: str) -> HostSandboxState:
        """Return hostd's state of a sandbox."""
        return self.ask(Inspect(sandbox)).state

    def sandboxes(self) -> tuple[HostSandboxState, ...]:
        """Return hostd's state of every sandbox."""
        return self.ask(List()).sandboxes

    def worker_pid(self, sandbox: str) -> int:
        """Return the process id of a sandbox's worker.

        Raises:
            StackError: it has none now.
        """
        if (pid := self.inspect(sandbox).worker_pid) is None:
            raise StackError(f"{sandbox} has no worker")
        return pid

    def container(self, sandbox: str) -> str:
        """Return the id of a sandbox's container.

        Raises:
            StackError: it has none now.
        """
        if (container := self.inspect(sandbox).container) is None:
            raise StackError(f"{sandbox} has no container")
        return container

    def netns(self, sandbox: str, side: str) -> str:
        """Return the namespace file of a sandbox's slot; `side` is `sbx` or `gw`."""
        slot = self.inspect(sandbox).slot
        return str(self.run / "netns" / f"{slot}-{side}")

    def traces(self, sandbox: str) -> Traces:
        """Return the traces of `sandbox` on this host, to search for them after its removal."""
        container = self.container(sandbox)
        netns = [self.netns(sandbox, side) for side in ("sbx", "gw")]
        places = (self.run, self.state / "hostd", self.state / "vault", self._docker_data / "containers")
        return take(sandbox, container, netns, places, str(self.run / "docker.sock"))

    def audit_records(self) -> list[dict[str, Any]]:
        """Return every record of the audit log, in order, with all that was accepted before the call."""
        settle(self.run / "rings")
        records = []
        for path in sorted((self.state / "audit").glob("audit-*.jsonl")):
            records += whole_lines(path)
        return records
