"""The common base of all benchmarks: the demo's internet, fast hosts, a server, and the secret in its vault."""

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opensandbox.sync.sandbox import SandboxSync

from testbed.internet import Internet, InternetError, ip, whole_lines
from testbed.pki import write_host_certificate
from testbed.stack import Stack, code_image

SYSTEM_ROOTS = Path("/etc/ssl/certs/ca-certificates.crt")
CLIENT = Path(__file__).with_name("load.py")
_INSIDE = "/tmp/load.py"  # noqa: S108 - inside a sandbox
POLICY = Path(__file__).with_name("policy.yaml")
SPLICED, INSPECTED, INJECTED = (f"{name}.bank.example" for name in ("spliced", "inspected", "injected"))
PAGES = {
    f"{way}-page.bank.example": address
    for way, address in (("spliced", "93.184.216.51"), ("inspected", "93.184.216.52"), ("injected", "93.184.216.54"))
}
"""The hosts of the benchmark `gateway`, which nginx serves."""
HOSTS = {SPLICED: "93.184.216.41", INSPECTED: "93.184.216.42", INJECTED: "93.184.216.43"}
SECRET, PAGE_SECRET = "bench-token", "bench-page-token"


class BenchError(Exception):
    """A benchmark could not be carried out; the message says why."""


class BenchStack(Stack):
    """The demo's server, with the addresses of the benchmarks' hosts, and limits that no sample reaches."""

    disk = "512Mi"

    @property
    def settings(self) -> str:
        known = ", ".join(f'"{host}" = ["{address}"]' for host, address in (HOSTS | PAGES).items())
        limits = "connections = 2048, connection_rate = 10000, dial_rate = 10000"
        more = f"host_addresses = {{ {known} }}\ngateway_limits = {{ {limits} }}\n"
        return super().settings.replace("dns_upstreams =", f"{more}dns_upstreams =", 1)


class DensityStack(BenchStack):
    """The benchmarks' server, whose gateways trust the authorities of the system beside that of the internet."""

    @property
    def settings(self) -> str:
        both = self.directory / "roots.pem"
        both.write_text(f"{SYSTEM_ROOTS.read_text()}\n{self.internet.roots.read_text()}")
        return super().settings.replace(f'upstream_roots = "{self.internet.roots}"', f'upstream_roots = "{both}"')


class CodeStack(BenchStack):
    """The benchmarks' server, with the code-interpreter image."""

    @property
    def settings(self) -> str:
        return super().settings + code_image()


@dataclass(frozen=True, slots=True)
class Fixture:
    """The running parts."""

    internet: Internet
    stack: Stack
    token: str

    def notes(self, since: int = 0) -> list[dict[str, Any]]:
        """Return the far end's notes, from number `since` on."""
        return whole_lines(self.internet.directory / "far-end.jsonl")[since:]

    def create(self, runtime: str, more: Mapping[str, str] | None = None) -> SandboxSync:
        """Create a sandbox under the benchmarks' policy, with the unmodified SDK, and with `more` extensions."""
        return self.stack.create(runtime, policy="bench", more=more)

    def restore(self, runtime: str, snapshot: str) -> SandboxSync:
        """Create a sandbox that begins with a snapshot, under the benchmarks' policy."""
        return SandboxSync.create(
            snapshot_id=snapshot,
            connection_config=self.stack.connection,
            extensions={"sallyport.policy": "bench", "sallyport.runtime": runtime},
        )


@contextmanager
def fixture(directory: Path, prefix: str, stack_of: type[BenchStack] = BenchStack) -> Iterator[Fixture]:
    """Start everything below `directory`, with a server `stack_of`; stop it at the end.

    Raises:
        InternetError, StackError: it could not be started.
    """
    token = secrets.token_urlsafe(40)
    accounts = {"git": "a:b", "index": "a:b", "api": token}
    with (
        Internet(prefix, directory / "internet", accounts) as internet,
        _far_end(internet),
        stack_of(internet, directory / "sallyport", policy=POLICY) as stack,
    ):
        stack.sallyport("vault", "put", SECRET, "--host", INJECTED, stdin=token)
        stack.sallyport("vault", "put", PAGE_SECRET, "--host", list(PAGES)[-1], stdin=token)
        yield Fixture(internet, stack, token)


@contextmanager
def _far_end(internet: Internet) -> Iterator[None]:
    for host, address in HOSTS.items():
        write_host_certificate(internet.authority, host, internet.directory)
        ip("-n", internet.net, "addr", "add", f"{address}/32", "dev", "lo")
    pairs = [f"{host}={address}" for host, address in HOSTS.items()]
    program = (sys.executable, "-m", "bench.far_end", str(internet.directory))
    command = in_namespace(internet, internet.net, *program, *pairs)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is None or process.stdout.readline().strip() != b"ready":
                raise InternetError("the far end did not start")
            yield
        finally:
            process.kill()


def in_namespace(internet: Internet, namespace: str, *command: str) -> list[str]:
    """Return the command that runs `command` inside one of the internet's namespaces."""
    return ["nsenter", f"--net={internet.path(namespace)}", *command]


def put_client(sandbox: SandboxSync) -> None:
    """Copy the client into a sandbox."""
    sandbox.files.write_file(_INSIDE, CLIENT.read_text())


def run_client(sandbox: SandboxSync, hosts: list[str]) -> Any:
    """Run the client inside; return its result.

    Raises:
        BenchError: it failed.
    """
    command = f"python3 {_INSIDE} {' '.join(hosts)}"
    execution = sandbox.commands.run(command)
    printed = "".join(message.text for message in execution.logs.stdout)
    if execution.exit_code != 0:
        said = "".join(message.text for message in execution.logs.stderr)
        raise BenchError(f"{command[:60]}: exit {execution.exit_code}: {said.strip()[-300:]}")
    return json.loads(printed)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    """Wait for `condition`.

    Raises:
        BenchError: it did not become true in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise BenchError(f"{what}: not within {seconds:g} s")
        time.sleep(0.01)
