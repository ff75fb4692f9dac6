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
import signal
from collections.abc import Mapping
from dataclasses import dataclass
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
        self._running = asyncio.Semaphore(MOST_COMMANDS)
        self.about = ", ".join(sorted(commands))

    async def read(self, reference: SecretReference, sandbox: str) -> BackendValue:
        """See `Backend`."""
        command = self._commands.get(reference.path)
        if command is None:
            raise NoValueError(Fault.MISSING, "sallyport.vault.commands has no command of this name: add it")
        environment = {name: await self._variable(text) for name, text in command.environment.items()}
        async with self._running:
            output = await self._run(command.argv, _BASE | environment)
        return unleased(without_newline(decoded(output, MOST_BYTES)), self._refresh)

    async def release(self, reference: SecretReference, sandbox: str) -> None:
        """See `Backend`."""

    async def examine(self) -> None:
        """See `Backend`."""
        for name, command in self._commands.items():
            if not os.access(command.argv[0], os.X_OK):
                raise NoValueError(Fault.FAILED, f"the fetcher's user cannot execute the program of {name}")

    async def close(self) -> None:
        """See `Backend`."""

    async def _variable(self, text: str) -> str:
        if not is_reference(text):
            return text
        reference = SecretReference.parse(text)
        return without_newline(await self._supplier.text(_MATERIAL[reference.backend], reference.path))

    async def _run(self, argv: tuple[str, ...], environment: Mapping[str, str]) -> bytes:
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise NoValueError(Fault.FAILED, f"the command cannot be executed: {error.strerror}") from None
        assert process.stdout is not None  # noqa: S101 - for mypy: it is a pipe
        try:
            async with asyncio.timeout(self._seconds):
                output = bytearray()
                while len(output) <= MOST_BYTES and (part := await process.stdout.read(MOST_BYTES + 1 - len(output))):
                    output += part
                if len(output) <= MOST_BYTES:
                    await process.wait()
        except TimeoutError:
            raise NoValueError(Fault.TIMEOUT, f"the command did not end in {self._seconds:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if len(output) <= MOST_BYTES and process.returncode != 0:
            raise NoValueError(
                Fault.FAILED, f"the command ended with status {process.returncode}: run it as the fetcher's user"
            )
        return bytes(output)
