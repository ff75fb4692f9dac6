"""The sources of secrets, each with the real parts behind it: what a test can store, replace and remove there.

A world runs vaultd in the test's process. All but the sealed one have the fetcher's part and hostd's part, too,
connected by their own sockets.
"""

import asyncio
import base64
import json
import os
import socket
import stat
from abc import ABC, abstractmethod
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import wire
from policy.references import BackendKind
from runtimes.spec import SuppliesConfig
from runtimes.supplies import Supplies
from tests.vault.conftest import InProcess, attach
from tests.vault.rotating_issuer import Issuer, RotatingIssuer
from tests.vault.stand_in import https, send
from tests.vault.vault_server import Authority, VaultServer
from vault.client import OnRevoke, VaultClient
from vault.fetcher import Backends, VaultKeeper, backends_of
from vault.fetcher_config import FetcherConfig
from vault.fetching import FetcherClient, FetcherPlace
from vault.grants import Grant, SecretBinding
from vault.kept_tokens import KeepingOperations
from vault.secret import Secret
from vault.stores.backend import Backend
from vault.stores.command import Command, CommandBackend
from vault.stores.hvac.backend import HvacBackend
from vault.stores.hvac.config import Auth, HashicorpServer
from vault.stores.token_config import TokenKind, TokenSource
from vault.stores.tokens import TokenBackend
from vault.supply import HostSupplier, connect
from wire.api import fetcher, vaultd
from wire.serving import handler

HOST, OTHER = "api.good.test", "api.bad.test"
SANDBOX = "sbx-000000000000000000000001"
REFRESH = 60


class World(ABC):
    """One source, and a vaultd that uses it. `reference` is the secret's name in a policy."""

    reference: str
    absent: str
    """A name that the source does not have."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.offset = 0.0
        self.vault = InProcess(directory, frozenset({os.geteuid()}))
        base = self.vault.monotonic
        self.vault.monotonic = lambda: base() + self.offset

    @abstractmethod
    async def store(self, value: str) -> None:
        """Store the secret, or replace its value."""

    @abstractmethod
    async def remove(self) -> None:
        """Remove the secret."""

    async def start(self) -> None:
        """Start everything."""
        await self.vault.start()

    async def stop(self) -> None:
        """End everything."""
        await self.vault.stop()

    async def refer(self, *names: str) -> None:
        """Let the operator's policy file name these secrets for `HOST`. A sealed secret has its own binding."""
        assert not any("://" in name for name in names)

    async def opened(self, *names: str, on_revoke: OnRevoke | None = None) -> VaultClient:
        """Open a sandbox with a grant of these secrets at both hosts; return its worker's channel."""
        await self.refer(*names)
        grants = [grant(name, host) for name in names for host in self.grantable]
        await self.vault.admin.open_sandbox(SANDBOX, "lin-1", grants)
        return await attach(self.vault.admin, SANDBOX, 1, on_revoke)

    grantable: tuple[str, ...] = (HOST, OTHER)
    """The hosts for which `serve` can open a sandbox with the secret."""

    def forget(self) -> None:  # noqa: B027 - most sources keep nothing
        """Let the time pass for which the source itself keeps what it has read."""

    async def follow(self) -> None:
        """Let the time pass after which the source is asked again, and wait for its answer."""
        self.forget()
        self.offset += REFRESH
        self.vault.readings.settle()
        await self.idle()

    async def idle(self) -> None:
        """Wait until no request to the source is under way."""
        readings = self.vault.readings
        while readings._fetching or readings._tasks:
            await asyncio.gather(*readings._fetching.values(), *readings._tasks, return_exceptions=True)
            await asyncio.sleep(0)


class SealedWorld(World):
    """The sealed store."""

    reference, absent = "token", "absent"
    grantable = (HOST,)

    async def store(self, value: str) -> None:
        if self.vault.vault.store.list_infos():
            await self.vault.admin.rotate(self.reference, Secret(value))
        else:
            await self.vault.admin.put(self.reference, Secret(value), SecretBinding.make([HOST]))

    async def remove(self) -> None:
        await self.vault.admin.delete(self.reference)


class BackendWorld(World):
    """A backend in the fetcher."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.supplies = SuppliesConfig(environment=[], directories=[], credential=None)
        self.config = FetcherConfig(os.geteuid(), REFRESH, 0, 0)
        self.reads: list[str] = []

    async def start(self) -> None:
        await self.begin_fetcher()
        place = FetcherPlace(self.directory / "f", os.geteuid())
        self.vault.fetcher = FetcherClient(place, self._keep, seconds=5)
        await super().start()

    async def begin_fetcher(self) -> None:
        """Start the fetcher and its channel to hostd."""
        near, far = socket.socketpair()
        self.hostd = Supplies(self.supplies)
        self._host = wire.Client(near, handler(fetcher.REPORTS, self.hostd.answer), takes=wire.NARROW)
        self._host.start()
        supplier = HostSupplier()
        self._control = await connect(far, supplier)
        self.keeper = VaultKeeper()
        self.backends = Backends(self.backends_with(supplier), self.keeper)
        await self.start_fetcher()

    def backends_with(self, supplier: HostSupplier) -> dict[BackendKind, Backend]:
        """Return the backends of the fetcher."""
        return backends_of(self.config, supplier, self.keeper)

    async def _keep(self, client: wire.Client, request: fetcher.Recall | fetcher.Keep, fds: list[int]) -> object:
        return await KeepingOperations(self.vault.vault.kept_tokens, self.vault.audit).handle(client, request, fds)

    async def start_fetcher(self) -> None:
        """Serve the fetcher's socket."""

        async def handle(client: wire.Client, request: fetcher.Fetch, fds: list[int]) -> object:
            if isinstance(request, fetcher.Fetch):
                self.reads.append(request.reference)
            return await self.backends.handle(client, request, fds)

        own = frozenset({os.geteuid()})
        listener = wire.bind_unix(self.directory / "f")
        self._server = await wire.serve_unix(listener, handler(fetcher.SOCKET, handle), allowed_uids=own)

    async def stop_fetcher(self) -> None:
        """End the fetcher's socket and its connections."""
        self._server.cancel()
        await asyncio.gather(self._server, return_exceptions=True)
        (self.directory / "f").unlink()

    async def stop(self) -> None:
        await super().stop()
        await self.vault.fetcher.close()
        if (self.directory / "f").exists():
            await self.stop_fetcher()
        await self.backends.close()
        await self._control.close()
        await self._host.close()

    async def refer(self, *names: str) -> None:
        uses = tuple(grant(name, HOST).form for name in names)
        await self.vault.admin.ask(vaultd.Refer(uses))


class EnvironmentWorld(BackendWorld):
    """`env://`: a variable that hostd took out of its environment. A real one has other values only after a restart."""

    reference, absent = "env://SALLYPORT_TEST_TOKEN", "env://SALLYPORT_TEST_ABSENT"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        names = [each.partition("://")[2] for each in (self.reference, self.absent)]
        self.supplies = self.supplies.model_copy(update={"environment": names})
        self.config = FetcherConfig(os.geteuid(), REFRESH, 2, 0)

    async def store(self, value: str) -> None:
        self.hostd.variables["SALLYPORT_TEST_TOKEN"] = value.encode()

    async def remove(self) -> None:
        self.hostd.variables.pop("SALLYPORT_TEST_TOKEN", None)


class FileWorld(BackendWorld):
    """`file://`, laid out like a mount of Kubernetes: links below the directory, replaced as a whole."""

    reference, absent = "file://api-token", "file://absent"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.mount = directory / "mount"
        self.mount.mkdir(mode=stat.S_IRWXU)
        (self.mount / "api-token").symlink_to("..data/api-token")
        self.supplies = self.supplies.model_copy(update={"directories": [str(self.mount)]})
        self.config = FetcherConfig(os.geteuid(), REFRESH, 0, 1)
        self._version = 0

    async def store(self, value: str) -> None:
        self._version += 1
        version = self.mount / f"..{self._version}"
        version.mkdir()
        (version / "api-token").write_text(value + "\n")
        link = self.mount / "..data.new"
        link.symlink_to(version.name)
        link.rename(self.mount / "..data")

    async def remove(self) -> None:
        (self.mount / "api-token").unlink()


def grant(secret: str, host: str) -> Grant:
    """Return the grant of a secret at a host, over https."""
    return Grant.make(secret, host, 443, "https")


class CommandWorld(BackendWorld):
    """`command://`: a program of the operator, with a credential from a file that hostd opens."""

    reference, absent = "command://api-token", "command://absent"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        mount = directory / "mount"
        mount.mkdir(mode=stat.S_IRWXU)
        (mount / "password").write_text("for-the-command\n")
        self.value = directory / "value"
        argv = ("/bin/sh", "-c", f'test "$PASSWORD" = for-the-command && cat {self.value}')
        self.supplies = self.supplies.model_copy(update={"directories": [str(mount)]})
        commands = {"api-token": Command(argv, {"PASSWORD": "file://password"})}
        self.config = FetcherConfig(os.geteuid(), REFRESH, 0, 0, commands)

    async def store(self, value: str) -> None:
        self.value.write_text(value + "\n")

    async def remove(self) -> None:
        """Take the command out of the settings: a command cannot say that a secret is gone."""
        (backend,) = self.backends._backends.values()
        assert isinstance(backend, CommandBackend)
        backend._commands = {}


class TokenWorld(BackendWorld):
    """`token://`: a token of a stand-in for an issuer, which does not say when it ends."""

    reference, absent = "token://api", "token://absent"
    expires_in: int | None = None

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        authority = Authority(directory, "issuer")
        self._serving = https(authority, self._issue)
        self._token = ""
        url = f"https://127.0.0.1:{self._serving.__enter__()}/token"
        os.environ["SALLYPORT_TEST_CLIENT"] = "for-the-issuer"
        self.supplies = self.supplies.model_copy(update={"environment": ["SALLYPORT_TEST_CLIENT"]})
        source = TokenSource(TokenKind.CLIENT_CREDENTIALS, "env://SALLYPORT_TEST_CLIENT", url, "client")
        self.config = FetcherConfig(os.geteuid(), REFRESH, 0, 0, tokens={"api": source}, roots=str(authority.path))

    def _issue(self, request: BaseHTTPRequestHandler) -> None:
        request.rfile.read(int(request.headers["content-length"]))
        good = request.headers["authorization"] == f"Basic {base64.b64encode(b'client:for-the-issuer').decode()}"
        answer: dict[str, object] = {"access_token": self._token, "token_type": "Bearer"}
        answer |= {} if self.expires_in is None else {"expires_in": self.expires_in}
        answer = answer if good else {"error": "invalid_client"}
        send(request, 200 if good else 401, json.dumps(answer).encode())

    @property
    def _backend(self) -> TokenBackend:
        (backend,) = self.backends._backends.values()
        assert isinstance(backend, TokenBackend)
        return backend

    async def store(self, value: str) -> None:
        self._token = value

    def forget(self) -> None:
        self._backend._held.clear()

    async def remove(self) -> None:
        """Take the token out of the settings: an issuer cannot say that a secret is gone."""
        self._backend._sources = {}

    async def stop(self) -> None:
        await super().stop()
        self._serving.__exit__(None, None, None)
        os.environ.pop("SALLYPORT_TEST_CLIENT", None)


class RefreshWorld(BackendWorld):
    """`token://`: access tokens of a refresh token that its issuer replaces each time."""

    reference, absent = "token://api", "token://absent"

    def __init__(self, directory: Path, client: str = "confidential", issuer: Issuer | None = None) -> None:
        super().__init__(directory)
        self.stand_in = RotatingIssuer(directory)
        self.issuer = issuer or self.stand_in
        self.mount = directory / "mount"
        self.mount.mkdir(mode=stat.S_IRWXU)
        self.supplies = self.supplies.model_copy(update={"directories": [str(self.mount)]})
        self.client = client
        secret = "file://client-secret" if client == "confidential" else ""
        (self.mount / "client-secret").write_text(self.issuer.secret + "\n")
        self.log_in()
        source = TokenSource(
            TokenKind.REFRESH_TOKEN, "file://login", self.issuer.url, client, client_secret=secret, scope="openid"
        )
        roots = str(self.issuer.authority.path)
        self.config = FetcherConfig(os.geteuid(), REFRESH, 0, 0, tokens={"api": source}, roots=roots)

    def log_in(self) -> str:
        """Store the refresh token of a new login, like an operator."""
        token = self.issuer.log_in(self.client)
        (self.mount / "login").write_text(token + "\n")
        return token

    async def store(self, value: str) -> None:
        self.stand_in.answer["expires_in"] = None
        self.stand_in.next_token = value

    def forget(self) -> None:
        self.tokens._held.clear()

    @property
    def tokens(self) -> TokenBackend:
        """The backend in the fetcher."""
        (backend,) = self.backends._backends.values()
        assert isinstance(backend, TokenBackend)
        return backend

    async def remove(self) -> None:
        """Take the token out of the settings: an issuer cannot say that a secret is gone."""
        self.tokens._sources = {}

    async def obtained(self) -> str:
        """Have a new access token obtained; return it."""
        self.forget()
        return (await self.vault.fetcher.fetch(self.reference, SANDBOX)).value.text

    async def restart_fetcher(self) -> None:
        """Start a fetcher without the memory of the former one, as after its death."""
        await self.stop_fetcher()
        await self._control.close()
        await self._host.close()
        await self.begin_fetcher()

    async def stop(self) -> None:
        await super().stop()
        self.stand_in.kill()


class VaultWorld(BackendWorld):
    """`vault://`: KV version 2 of a real server, with the documented policy and AppRole."""

    reference, absent = "vault://kv/agents/api#token", "vault://kv/agents/absent#token"
    version = 2
    server: VaultServer
    """Set before the start."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.credential = directory / "credential"
        self.supplies = self.supplies.model_copy(update={"credential": str(self.credential)})

    async def start(self) -> None:
        self.server.mount_kv(self.version)
        self.config = FetcherConfig(os.geteuid(), REFRESH, 0, 0, {}, self.log_in())
        await super().start()

    def log_in(self) -> HashicorpServer:
        """Prepare the login; return what the settings say."""
        role, secret = self.server.app_role()
        self.credential.write_text(secret + "\n")
        return self.settings(Auth.APPROLE, role)

    def settings(self, auth: Auth, role: str, **others: Any) -> HashicorpServer:
        """Return the settings of the server with a login."""
        given = {"namespace": "", "mount": "", "allowed": (), "roots": str(self.server.authority.path), **others}
        return HashicorpServer(address=self.server.address, auth=auth, role=role, **given)

    @property
    def hvac(self) -> HvacBackend:
        """The backend in the fetcher."""
        (backend,) = self.backends._backends.values()
        assert isinstance(backend, HvacBackend)
        return backend

    async def store(self, value: str) -> None:
        fields = {"token": value, "other": "another-value"}
        if self.version == 2:
            self.server.ask("POST", "kv/data/agents/api", data=fields)
        else:
            self.server.ask("POST", "kv/agents/api", **fields)

    async def remove(self) -> None:
        self.server.ask("DELETE", "kv/metadata/agents/api" if self.version == 2 else "kv/agents/api")

    def forget(self) -> None:
        self.hvac._documents.clear()


class OldVaultWorld(VaultWorld):
    """`vault://`: KV version 1, with a token of the operator."""

    version = 1

    def log_in(self) -> HashicorpServer:
        self.server.ask("PUT", "sys/policies/acl/one", policy='path "kv/agents/*" { capabilities = ["read"] }')
        self.credential.write_text(self.server.token("one", ttl="1h") + "\n")
        return self.settings(Auth.TOKEN, "")
