"""vaultd: the process that holds the master key. `python -m vault.vaultd CONFIG.json`

This is the composition: configuration, key, files, socket, audit channel. Its answers are in `operations` (the socket)
and `channels` (the workers).

- It hardens itself before it reads the key, and runs as an unprivileged uid that owns its directory.
- A wrapped key is opened once for each start and for each change of the key, by a process of its own
  (`vault.wrapping`). vaultd loads no module of a token and speaks to no Vault.
- There is one of it: a lock on the directory is held. A directory sealed with another key is refused, untouched; so is
  one that is older than its head.
- Where the master key has a successor, everything is sealed with that one before anything is answered.
- The fetcher asks on vaultd's connection to it, and only for the refresh tokens that vaultd keeps for it.
- When auditd's channel ends this process ends, with status 75: its supervisor starts it again with a new channel.
- Lines on stderr hold names, never a value.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import wire
from audit.client import AuditClient
from vault.budgets import Budgets
from vault.channels import Channels
from vault.config import VaultConfig
from vault.custody import Custody
from vault.fetching import FetcherClient, NoFetcher
from vault.freeze import Freezes
from vault.hardening import NOT_LOCKED, harden
from vault.head import HeadError, StoreHead
from vault.kept_tokens import KeepingOperations, KeptTokens
from vault.keyring import ENVIRONMENT, KEY_FD, NEXT_ENVIRONMENT, NEXT_KEY_FD, Keyring, MasterKeyError, load, source_of
from vault.limit_record import ReferenceLimits
from vault.operations import VaultOperations
from vault.readings import Readings
from vault.sources import Sources
from vault.stores.directory import SealedDirectory, SealedRecordError
from vault.stores.sealed import FileStore
from vault.wrapping.asking import Wrapping
from vault.wrapping.sources import DESCRIPTORS, WRAPPING, KeySource
from wire.api import vaultd
from wire.errors import ConfigError
from wire.frames import close_all
from wire.serving import handler

AUDIT_FD = "SALLYPORT_AUDIT_FD"
HEAD_FD = "SALLYPORT_VAULT_HEAD_FD"
EXIT_AUDIT_ENDED = 75  # EX_TEMPFAIL: start me again
EXIT_CONFIG = 78  # EX_CONFIG: starting me again will not help
_KEY_CHECK = "keycheck"
_INDEXED = b"indexed"
"""The metadata of the key check of a vault whose directories have an index; older ones had none there."""

_log = logging.getLogger(__name__)


class Vault:
    """vaultd's files, opened: the composition of store, lineages and sandboxes under one lock."""

    def __init__(self, directory: Path, keyring: Keyring, head: StoreHead | None = None) -> None:
        """Open (or make) the vault in `directory`.

        Raises:
            MasterKeyError: the vault was sealed with another key.
            SealedRecordError: an index is missing or does not open.
            HeadError: the vault is older than `head`.
            OSError: it cannot be opened, or another process has it.
        """
        directory.mkdir(mode=0o700, exist_ok=True)
        with contextlib.ExitStack() as opened:
            lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            opened.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

            def part(path: Path, purpose: str, *, adopt: bool) -> SealedDirectory:
                found = SealedDirectory(path, keyring, purpose, head, adopt=adopt)
                opened.callback(found.close)
                return found

            try:
                self._root = part(directory, "vault", adopt=True)
            except SealedRecordError:
                raise MasterKeyError(f"{directory}: sealed with another master key") from None
            older = self._check_key(directory)
            self.store = FileStore(directory / "secrets", keyring, head=head, adopt=older)
            opened.callback(self.store.close)
            sandboxes = part(directory / "sandboxes", "sandboxes", adopt=older)
            lineages = part(directory / "lineages", "lineages", adopt=older)
            budgets = part(directory / "budgets", "budgets", adopt=older)
            tokens = part(directory / "tokens", "tokens", adopt=older)
            self.kept_tokens = KeptTokens(tokens)
            self._parts = (lineages, sandboxes, self.store.directory, budgets, tokens, self._root)
            if older:
                for each in (lineages, sandboxes, self.store.directory):
                    each.adopt()
                self._root.write(_KEY_CHECK, _INDEXED, b"")
            self.rekey(keyring)
            self.custody = Custody(
                self.store,
                sandboxes,
                lineages,
                freezes=Freezes(self._root),
                budgets=Budgets(budgets),
                limits=ReferenceLimits(self._root),
            )
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Give lock and descriptors back."""
        self._opened.close()

    def rekey(self, keyring: Keyring) -> None:
        """Seal everything with the successor of `keyring`, where it has one; what is broken off goes on when repeated.

        Raises:
            OSError: not all of it could be written.
        """
        if keyring.successor is not None:
            for part in self._parts:
                part.reseal(keyring.successor)

    def _check_key(self, directory: Path) -> bool:
        """Check that the vault is of this key; return whether it is from before there was an index."""
        try:
            metadata, _ = self._root.read(_KEY_CHECK)
        except FileNotFoundError:
            if any((directory / part).exists() for part in ("secrets", "sandboxes", "lineages")):
                raise MasterKeyError(f"{directory}: the record that tells its key is missing") from None
            self._root.write(_KEY_CHECK, _INDEXED, b"")
            return False
        except SealedRecordError:
            raise MasterKeyError(f"{directory}: sealed with another master key") from None
        if self._root.indexed == (metadata != _INDEXED):
            raise SealedRecordError(f"{directory}: the index is missing, or not of this vault")
        return metadata != _INDEXED


async def run(config: VaultConfig, keyring: Keyring, audit_fd: int, head: StoreHead, listener: socket.socket) -> int:
    """Serve on `listener` until SIGTERM, SIGINT or the end of the audit channel; return the exit status."""
    vault = Vault(config.directory, keyring, head)
    if vault.store.damaged:
        _log.error("damaged secrets, refused until deleted: %s", ", ".join(vault.store.damaged))
    audit = AuditClient.from_fd(audit_fd)
    keeping = KeepingOperations(vault.kept_tokens, audit)
    fetcher = NoFetcher() if config.fetcher is None else FetcherClient(config.fetcher, keeping.handle)
    readings = Readings(fetcher, vault.custody, time.monotonic)
    channels = Channels(vault.custody, Sources(vault.custody, readings), audit)
    readings.changed = channels.revoke_everywhere

    async def rekey(credentials: Mapping[KeySource, int]) -> None:
        vault.rekey(await successor(config, credentials))

    operations = VaultOperations(vault.custody, channels, readings, audit, rekey)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = await wire.serve_unix(
        listener,
        handler(vaultd.CONTROL, operations.handle),
        allowed_uids=config.uids,
        descriptors_from=frozenset((0, os.geteuid())),
    )
    if frozen := vault.custody.freezes.forms:
        _log.warning("%d freezes are in force: sallyport vault list shows them", len(frozen))
    _log.info("ready: %d secrets, %d sandboxes", len(vault.store.list_infos()), len(vault.custody.names()))
    try:
        async with asyncio.TaskGroup() as group:
            tasks = (group.create_task(_end_with(audit, stop)), group.create_task(readings.maintain()))
            await stop.wait()
            for task in tasks:
                task.cancel()
        status = 0 if audit.available else EXIT_AUDIT_ENDED
    finally:
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)
        await channels.close()
        await readings.close()
        await fetcher.close()
        await audit.close()
        vault.close()
    if status == EXIT_AUDIT_ENDED:
        _log.error("the audit channel has ended: nothing can be released; ending")
    return status


async def successor(config: VaultConfig, credentials: Mapping[KeySource, int]) -> Keyring:
    """Return the keyring as it is stored now, without waiting on the event loop.

    Raises:
        MasterKeyError: it cannot be opened.
    """
    own = {source: os.dup(fd) for source, fd in credentials.items()}  # the thread goes on when the caller does not

    def read() -> Keyring:
        try:
            return load(config.master_key_file, os.environ, Wrapping(config.wrapping, config.directory, own))
        finally:
            close_all(list(own.values()))

    return await asyncio.to_thread(read)


async def _end_with(audit: AuditClient, stop: asyncio.Event) -> None:
    await audit.wait_closed()
    stop.set()


def main(arguments: list[str]) -> int:
    """Run vaultd; return its exit status."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="vaultd %(levelname)s %(name)s: %(message)s")
    if len(arguments) != 1:
        _log.error("usage: python -m vault.vaultd CONFIG.json")
        return EXIT_CONFIG
    try:
        if not harden():
            _log.warning(NOT_LOCKED)
        os.umask(0o077)
        config = VaultConfig.read(Path(arguments[0]))
        audit_fd = _audit_fd(os.environ.get(AUDIT_FD))
        listener = _listener()
        head = _head(os.environ.get(HEAD_FD))
        with _credentials(config) as credentials:
            wrapping = Wrapping(config.wrapping, config.directory, credentials)
            keyring = load(config.master_key_file, os.environ, wrapping)
        for name in (ENVIRONMENT, NEXT_ENVIRONMENT):
            os.environ.pop(name, None)
        _warn_of_plain_key(config)
        return asyncio.run(run(config, keyring, audit_fd, head, listener))
    except (ConfigError, HeadError, MasterKeyError, SealedRecordError) as error:
        _log.error("%s", error)
        return EXIT_CONFIG
    except OSError as error:
        _log.error("cannot run: %s: %s", type(error).__name__, error.strerror or error)
        return 1


@contextlib.contextmanager
def _credentials(config: VaultConfig) -> Iterator[dict[KeySource, int]]:
    """Hand out the descriptors that hostd has opened for the key. After the block they are closed."""
    numbers = {source: os.environ.pop(name) for source, name in DESCRIPTORS.items() if name in os.environ}
    files = [os.environ[name] for name in (KEY_FD, NEXT_KEY_FD) if name in os.environ]
    try:
        found = {source: int(number) for source, number in numbers.items()}
        opened = [*found.values(), *map(int, files)]
        for fd in opened:
            os.set_inheritable(fd, False)
    except (OSError, ValueError):
        raise ConfigError("a variable names no inherited descriptor of the master key") from None
    try:
        yield found
    finally:
        close_all(opened)
        for name in (KEY_FD, NEXT_KEY_FD):
            os.environ.pop(name, None)


def _listener() -> socket.socket:
    try:
        return wire.inherited_listener()
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _warn_of_plain_key(config: VaultConfig) -> None:
    wanted, path = config.wrapping.source, config.master_key_file
    if wanted in WRAPPING and path is not None and (found := source_of(path)) != wanted:
        _log.warning("the master key is %s, not of %s: run `sallyport vault rekey`", found or "a plain file", wanted)


def _audit_fd(text: str | None) -> int:
    try:
        fd = int(text or "")
        if fd < 3 or not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise ValueError
    except (ValueError, OSError):
        raise ConfigError(f"{AUDIT_FD} names no inherited socket") from None
    os.set_inheritable(fd, False)
    return fd


def _head(text: str | None) -> StoreHead:
    if text is None:
        _log.warning("an older copy of the whole vault would not be noticed: %s is not set", HEAD_FD)
        return StoreHead()
    try:
        fd = int(text)
        if fd < 3 or not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError
    except (ValueError, OSError):
        raise ConfigError(f"{HEAD_FD} names no inherited file") from None
    os.set_inheritable(fd, False)
    return StoreHead(fd)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
