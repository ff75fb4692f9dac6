"""The kinds of servers that the system and security tests run, each with the demo's internet.

The root conftest imports this module inside its fixtures, so that the fast tests do not import it.
"""

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from opensandbox.exceptions import SandboxException
from opensandbox.sync.sandbox import SandboxSync

from audit.kinds import DESCRIBED, undescribed
from demo.sandboxes import Secrets
from policy.compiled import CompiledPolicy
from testbed.internet import API, GIT, INDEX, PREFIX, Internet
from testbed.stack import EMPTY_IMAGE, Stack, code_image
from tests import docker_data
from vault.grants import SecretBinding
from wire.api.hostd import Configure
from wire.api.vaultd import Put, Value
from wire.blocking import BlockingClient

INTERNET = PREFIX
VAULTD = 700000002
"""The user of vaultd."""
MEMORY, DISK = "/dev/shm", "/var/tmp"
"""Places of a server's files. Docker's are in memory, where an import takes a third of the processor time."""


class WithCode(Stack):
    """A Sallyport that also has the code-interpreter image, under the name that the image's SDK documents."""

    @property
    def settings(self) -> str:
        return super().settings + code_image()


class Second(Stack):
    """A separate Sallyport with the empty image only. Tests can kill it."""

    @property
    def images(self) -> dict[str, str]:
        return {EMPTY_IMAGE: os.environ["SALLYPORT_EMPTY_IMAGE"]}


class Unwatched(Stack):
    """A Sallyport whose hostd does not watch: sandboxes stay when their layers are removed."""

    slots_ahead = 0

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.unwatched", str(self.config)]


class Governed(Stack):
    """A Sallyport whose hostd accepts a compiled policy; the product's hostd does not."""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.governed", str(self.config)]

    def configure(self, sandbox: str, policy: CompiledPolicy, **limits: int) -> None:
        """Give a sandbox's gateway another policy and limits without the API. Return when they are in force.

        The registry also gets the policy's digest. Otherwise `serve` would soon restore the registry's policy.
        """
        with closing(sqlite3.connect(self.state / "lifecycle" / "sallyport.db", timeout=10)) as database, database:
            database.execute("UPDATE sandboxes SET policy_digest = ? WHERE id = ?", (policy.digest, sandbox))
        selection = json.dumps({"given": policy.to_json(), "limits": limits})
        self.ask(Configure(sandbox, selection, decided=False))


def undescribed_records(records: Iterable[Mapping[str, Any]]) -> set[tuple[str, frozenset[str]]]:
    """Return the kind, and the undescribed fields, of each record that docs/audit-records.md does not describe."""
    found = set()
    for record in records:
        kind, fields = str(record["kind"]), frozenset(record)
        if more := undescribed(kind, fields) if kind in DESCRIBED else fields:
            found.add((kind, more))
    return found


def put_secrets(stack: Stack, values: Secrets) -> None:
    """Store the secrets that the demo's policy injects."""
    with BlockingClient(stack.run / "vault.sock", VAULTD, timeout=60) as vault:
        for name, host, value in (
            ("git-login", GIT, values.git),
            ("index-login", INDEX, values.index),
            ("api-token", API, values.api),
        ):
            vault.ask(Put(name, Value(value), SecretBinding.make([host]).form))


@contextmanager
def scratch(name: str, below: str = MEMORY) -> Iterator[Path]:
    """Make a directory that other users can enter, for one server and its Docker data."""
    with tempfile.TemporaryDirectory(prefix=f"sallyport-{name}-", dir=below) as directory:
        place = Path(directory)
        place.chmod(0o711)
        yield place


@contextmanager
def beside(kind: type[Stack], name: str, values: Secrets | None = None, below: str = MEMORY) -> Iterator[Stack]:
    """Run a server of `kind` beside the session's, with its state below `below`. Its upstreams accept `values`."""
    run = Path(f"{os.environ['SALLYPORT_RUN_DIR']}-{name}")
    far = values or Secrets(git="a:b", index="a:b", api="c")
    accounts = {"git": far.git, "index": far.index, "api": far.api}
    with ExitStack() as places:
        place = places.enter_context(scratch(name))
        files = place if below == MEMORY else places.enter_context(scratch(name, below))
        monkeypatch = places.enter_context(pytest.MonkeyPatch.context())
        monkeypatch.setenv("SALLYPORT_HOME", str(place / "home"))
        monkeypatch.setenv("SALLYPORT_RUN_DIR", str(run))
        with Internet(f"{INTERNET}-{name}", place / "internet", accounts) as internet:
            try:
                stack = kind(internet, files / "stack")
                docker_data.provide(place / "home" / "docker", stack.images, MEMORY)
                with stack:
                    yield stack
            finally:
                subprocess.run(["rm", "-rf", str(run), str(place / "home")], check=False)


@contextmanager
def removed(sandbox: SandboxSync) -> Iterator[SandboxSync]:
    """Use a sandbox, and remove it."""
    try:
        yield sandbox
    finally:
        with suppress(SandboxException):
            sandbox.kill()
        sandbox.close()
