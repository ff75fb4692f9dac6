"""The fetcher: the process that speaks to the backends of secrets. `python -m vault.fetcher CONFIG.json`

vaultd asks it for one reference at a time, on the socket that hostd binds. hostd opens files and variables for it
(`vault.supply`).

- It has no master key, no sealed secret and no grant. What it reads goes to vaultd only: the kernel reports the uid of
  each caller.
- It hardens itself before it reads the first credential: not dumpable, no core, no new privileges, bounded descriptors.
- At most `MOST_READS` calls are under way. Each ends after `READ_SECONDS`.
- vaultd keeps refresh tokens that issuers replace: the fetcher asks it on the connection that vaultd has made.
- On SIGTERM it gives back what the backends made. When hostd's channel ends it ends at once and gives nothing back,
  because vaultd and its workers go on: their leases run out, and the next fetcher gets new ones.
- Lines on stderr have references, and never a value.
"""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

import wire
from policy.references import BackendKind, SecretReference
from vault.fetcher_config import FetcherConfig
from vault.hardening import NOT_LOCKED, harden
from vault.stores.backend import Backend, NoValueError
from vault.stores.command import CommandBackend
from vault.stores.supplied import SuppliedBackend
from vault.supply import HostSupplier, connect
from wire.api import fetcher
from wire.api.fetcher import BackendState, BackendStates, Fault, Fetched, KeptToken, Probed, Problem, Reading
from wire.api.vaultd import Value
from wire.errors import ConfigError
from wire.frames import close_all
from wire.serving import handler

CONTROL_FD: Final = "SALLYPORT_CONTROL_FD"
READ_SECONDS: Final = 7.0
CLOSE_SECONDS: Final = 5.0
KEEP_SECONDS: Final = 5.0
MOST_READS: Final = 32
_MOST_DESCRIPTORS: Final = 512
EXIT_CONFIG: Final = 78

_log = logging.getLogger("fetcher")


class Backends:
    """All configured backends, and vaultd's requests to them."""

    def __init__(
        self, backends: Mapping[BackendKind, Backend], keeper: "VaultKeeper", seconds: float = READ_SECONDS
    ) -> None:
        self._backends = backends
        self._keeper = keeper
        self._seconds = seconds
        self._reads = asyncio.Semaphore(MOST_READS)

    async def handle(
        self,
        client: wire.Client,
        request: fetcher.Fetch | fetcher.Probe | fetcher.Release | fetcher.Examine,
        fds: list[int],
    ) -> Fetched | Probed | BackendStates | None:
        """Answer one request of `wire.api.fetcher.SOCKET`."""
        close_all(fds)
        self._keeper.use(client)
        match request:
            case fetcher.Fetch():
                return await self.fetch(request.reference, request.sandbox)
            case fetcher.Probe():
                return Probed((await self._answer(request.reference, lambda backend, named: backend.probe(named)))[1])
            case fetcher.Release():
                await self.release(request.reference, request.sandbox)
                return None
            case fetcher.Examine():
                return await self.examine()

    async def fetch(self, text: str, sandbox: str) -> Fetched:
        """Read a reference."""
        found, problem = await self._answer(text, lambda backend, named: backend.read(named, sandbox))
        if found is None:
            return Fetched(None, problem)
        return Fetched(Reading(Value(found.value.reveal()), found.fresh, found.valid, found.shared), None)

    async def _answer[Found](
        self, text: str, ask: Callable[[Backend, SecretReference], Awaitable[Found]]
    ) -> tuple[Found | None, Problem | None]:
        """Ask the backend of a reference; return its answer, or the problem."""
        try:
            reference = SecretReference.parse(text)
        except ValueError as error:
            return None, Problem(Fault.UNCONFIGURED, str(error))
        backend = self._backends.get(reference.backend)
        if backend is None:
            return None, unconfigured(reference.backend)
        try:
            async with asyncio.timeout(self._seconds), self._reads:
                return await ask(backend, reference), None
        except NoValueError as error:
            _log.warning("%s: %s", reference, error)
            return None, error.problem
        except TimeoutError:
            _log.warning("%s: no answer in time", reference)
            return None, Problem(Fault.TIMEOUT, f"{reference.backend} did not answer in time")
        except Exception as error:  # noqa: BLE001 - fails closed: no value, and no text that could contain one
            _log.error("%s: %s", reference, type(error).__name__)
            return None, Problem(Fault.FAILED, f"{reference.backend} failed: {type(error).__name__}")

    async def release(self, text: str, sandbox: str) -> None:
        """Revoke what was made for a sandbox.

        Raises:
            wire.RequestError: it is not revoked.
        """
        reference = SecretReference.parse(text)
        if (backend := self._backends.get(reference.backend)) is None:
            return
        try:
            async with asyncio.timeout(self._seconds), self._reads:
                await backend.release(reference, sandbox)
        except (NoValueError, TimeoutError) as error:
            _log.warning("%s is not revoked: %s", reference, type(error).__name__)
            raise wire.RequestError(wire.Code.UNAVAILABLE, "not revoked") from None

    async def examine(self) -> BackendStates:
        """Ask each backend whether it can be used now."""
        return BackendStates(tuple([await self._state(kind) for kind in self._backends]))

    async def close(self) -> None:
        """Give back what the backends made, as far as that is possible in `CLOSE_SECONDS`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.gather(*(each.close() for each in self._backends.values()), return_exceptions=True)

    async def _state(self, kind: BackendKind) -> BackendState:
        backend, problem = self._backends[kind], None
        try:
            async with asyncio.timeout(self._seconds / len(self._backends)):
                await backend.examine()
        except NoValueError as error:
            problem = error.problem
        except TimeoutError:
            problem = Problem(Fault.TIMEOUT, "it did not answer in time")
        except Exception as error:  # noqa: BLE001 - fails closed: it counts as not usable
            problem = Problem(Fault.FAILED, type(error).__name__)
        return BackendState(str(kind), backend.about, problem)


class VaultKeeper:
    """Has vaultd keep refresh tokens; see `vault.stores.refresh_tokens.Keeper`.

    It asks on the connection of vaultd's last request.
    """

    def __init__(self) -> None:
        self._client: wire.Client | None = None

    def use(self, client: wire.Client) -> None:
        """Use this connection from now on. Its other end is vaultd."""
        self._client = client

    async def recall(self, name: str) -> KeptToken | None:
        """See `Keeper`."""
        return (await self._ask(fetcher.Recall(name))).kept

    async def keep(self, name: str, kept: KeptToken) -> None:
        """See `Keeper`."""
        await self._ask(fetcher.Keep(name, kept))

    async def _ask[Answer](self, request: wire.Request[Answer]) -> Answer:
        try:
            if self._client is None:
                raise ConnectionError
            return await self._client.ask(request, timeout=KEEP_SECONDS)
        except wire.RemoteError as error:
            reason = f"vaultd cannot keep the issuer's new refresh token: {error}"
        except (OSError, wire.FrameError):
            reason = "vaultd does not answer, and has to keep the refresh token"
        raise NoValueError(Fault.FAILED, reason)


def unconfigured(kind: BackendKind) -> Problem:
    """Return the problem of a backend that the operator has not configured."""
    key = {
        BackendKind.ENV: "sallyport.vault.environment",
        BackendKind.FILE: "sallyport.vault.file_directories",
        BackendKind.COMMAND: "sallyport.vault.commands",
        BackendKind.TOKEN: "sallyport.vault.tokens",
        BackendKind.VAULT: "sallyport.vault.hashicorp.address",
    }[kind]
    return Problem(Fault.UNCONFIGURED, f"no backend {kind}:// is configured: set {key}")


def backends_of(config: FetcherConfig, supplier: HostSupplier, keeper: VaultKeeper) -> dict[BackendKind, Backend]:
    """Return the configured backends."""
    found: dict[BackendKind, Backend] = {}
    if config.environment:
        about = f"{config.environment} variables of the server's environment"
        found[BackendKind.ENV] = SuppliedBackend(BackendKind.ENV, supplier, config.refresh_seconds, about)
    if config.file_directories:
        about = f"files in {config.file_directories} directories"
        found[BackendKind.FILE] = SuppliedBackend(BackendKind.FILE, supplier, config.refresh_seconds, about)
    if config.commands:
        found[BackendKind.COMMAND] = CommandBackend(config.commands, supplier, config.refresh_seconds)
    if config.tokens:
        from vault.stores.tokens import TokenBackend  # for the same reason

        found[BackendKind.TOKEN] = TokenBackend(config.tokens, supplier, config.refresh_seconds, config.roots, keeper)
    if config.hashicorp is not None:
        from vault.stores.hvac.backend import HvacBackend  # hvac takes 30 MB, which other backends do not need

        found[BackendKind.VAULT] = HvacBackend(config.hashicorp, supplier, config.refresh_seconds)
    return found


async def run(config: FetcherConfig, control: socket.socket, listener: socket.socket) -> None:
    """Serve until SIGTERM, SIGINT or the end of hostd's channel."""
    supplier = HostSupplier()
    host = await connect(control, supplier)
    keeper = VaultKeeper()
    backends = Backends(backends_of(config, supplier, keeper), keeper)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    serving = handler(fetcher.SOCKET, backends.handle)
    server = await wire.serve_unix(listener, serving, allowed_uids=frozenset({config.vaultd}))
    prepared = asyncio.create_task(backends.examine(), name="log-in")  # so that the first request does not wait for it
    ends = [asyncio.ensure_future(each.wait()) for each in (stop, host.closed)]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            await backends.close()
    finally:
        for task in (*ends, prepared, server):
            task.cancel()
        await asyncio.gather(*ends, prepared, server, return_exceptions=True)
        await host.close()


def main(arguments: list[str]) -> int:
    """Run the fetcher; return its exit status."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="fetcher %(levelname)s: %(message)s")
    if len(arguments) != 1:
        _log.error("usage: python -m vault.fetcher CONFIG.json")
        return EXIT_CONFIG
    try:
        if not harden():
            _log.warning(NOT_LOCKED)
        resource.setrlimit(resource.RLIMIT_NOFILE, (_MOST_DESCRIPTORS, _MOST_DESCRIPTORS))
        os.umask(0o077)
        config = FetcherConfig.read(Path(arguments[0]))
        control = socket.socket(fileno=int(os.environ.pop(CONTROL_FD, "")))
        control.set_inheritable(False)
        listener = wire.inherited_listener()
        asyncio.run(run(config, control, listener))
    except (ConfigError, ValueError) as error:
        _log.error("%s", error)
        return EXIT_CONFIG
    except OSError as error:
        _log.error("cannot run: %s: %s", type(error).__name__, error.strerror or error)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
