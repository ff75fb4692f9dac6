"""The backend `command://name`: the output of a program that the operator configures, such as `op read` or `pass show`.

- A reference has only the name of a command. Program and arguments come from the settings; there is no shell.
- The program gets the environment that the settings give it, and nothing of the fetcher's. A variable of it can be a
  reference to `env://` or `file://`.
- Its time and its output are bounded. Every process of its group is killed at the end. Its error output is discarded,
  because it can have a secret.
- One line break at the end of the output is not part of the value.
"""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

from policy.references import BackendKind, SecretReference, is_reference
from vault.stores.backend import BackendValue, NoValueError, unleased
from vault.stores.supplied import Supplier, decoded, without_newline
from wire.api.fetcher import Fault, Material

MOST_BYTES: Final = 64 * 1024
MOST_COMMANDS: Final = 4
SECONDS: Final = 6.0
_BASE: Final = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
_MATERIAL: Final = {BackendKind.ENV: Material.ENVIRONMENT, BackendKind.FILE: Material.FILE}


@dataclass(frozen=True, slots=True)
class Command:
    """One command of the settings. `argv[0]` is an absolute path."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


class CommandBackend:
    """See `vault.stores.backend.Backend`."""

    def __init__(
        self, commands: Mapping[str, Command], supplier: Supplier, refresh: int, seconds: float = SECONDS
    ) -> None:
        self._commands = commands
        self._supplier = supplier
        self._refresh = refresh
        self._seconds = seconds
        self._threads = ThreadPoolExecutor(MOST_COMMANDS, "command")
        self.about = ", ".join(sorted(commands))

    async def read(self, reference: SecretReference, sandbox: str) -> BackendValue:
        """See `Backend`."""
        command, environment = await self._prepared(reference)
        output = await self._run(command.argv, _BASE | environment)
        return unleased(without_newline(decoded(output, MOST_BYTES)), self._refresh)

    async def probe(self, reference: SecretReference) -> None:
        """See `Backend`."""
        command, _ = await self._prepared(reference)
        _check_executable(reference.path, command)

    async def release(self, reference: SecretReference, sandbox: str) -> None:
        """See `Backend`."""

    async def examine(self) -> None:
        """See `Backend`."""
        for name, command in self._commands.items():
            _check_executable(name, command)

    async def close(self) -> None:
        """See `Backend`."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _prepared(self, reference: SecretReference) -> tuple[Command, dict[str, str]]:
        """Return a command, and the variables of its settings. Raises NoValueError."""
        command = self._commands.get(reference.path)
        if command is None:
            raise NoValueError(Fault.MISSING, "sallyport.vault.commands has no command of this name: add it")
        return command, {name: await self._variable(text) for name, text in command.environment.items()}

    async def _variable(self, text: str) -> str:
        if not is_reference(text):
            return text
        reference = SecretReference.parse(text)
        return without_newline(await self._supplier.text(_MATERIAL[reference.backend], reference.path))

    async def _run(self, argv: tuple[str, ...], environment: Mapping[str, str]) -> bytes:
        work = partial(_output, argv, environment, self._seconds)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _check_executable(name: str, command: Command) -> None:
    if not os.access(command.argv[0], os.X_OK):
        raise NoValueError(Fault.FAILED, f"the fetcher's user cannot execute the program of {name}")


def _output(argv: tuple[str, ...], environment: Mapping[str, str], seconds: float) -> bytes:
    """Return what a program printed, or its begin if that is over `MOST_BYTES`. No process of its group is left.

    Raises:
        NoValueError: it was not started, has failed, or has not ended in time.
    """
    until = time.monotonic() + seconds
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise NoValueError(Fault.FAILED, f"the command cannot be executed: {error.strerror}") from None
    assert process.stdout is not None  # noqa: S101 - for mypy: it is a pipe
    ended = os.pidfd_open(process.pid)
    output = bytearray()
    try:
        while len(output) <= MOST_BYTES:
            _readable(process.stdout.fileno(), until)
            part = os.read(process.stdout.fileno(), MOST_BYTES + 1 - len(output))
            if not part:
                _readable(ended, until)
                break
            output += part
    except TimeoutError:
        raise NoValueError(Fault.TIMEOUT, f"the command did not end in {seconds:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # not waited for yet, so its number is its own
        os.close(ended)
        process.stdout.close()
        status = process.wait()
    if len(output) <= MOST_BYTES and status != 0:
        raise NoValueError(Fault.FAILED, f"the command ended with status {status}: run it as the fetcher's user")
    return bytes(output)


def _readable(fd: int, until: float) -> None:
    """Wait until a descriptor can be read. Raises TimeoutError at `until` (`time.monotonic()`)."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
        raise TimeoutError
