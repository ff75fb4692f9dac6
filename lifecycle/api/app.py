"""The composition of one server: from a configuration to the ASGI application and its background tasks.

This module only connects the parts. Nothing runs at import, and there is no global state: a process can contain several
servers (tests do that).
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from lifecycle.about import PRODUCT
from lifecycle.api.answers import ON_EACH_ROUTE
from lifecycle.api.auth import BrowserGuard
from lifecycle.api.credentials import KeyRing, RouteKeys, Tokens
from lifecycle.api.document import document
from lifecycle.api.edge import Edge
from lifecycle.api.errors import INVALID_PARAMETER, UNKNOWN_ERROR, ApiError, invalid, no_database
from lifecycle.api.routes import diagnostics, endpoints, networkpolicy, pools, sandboxes, snapshots, system, unsupported
from lifecycle.api.routes.context import Context
from lifecycle.config.serve import ServeConfig
from lifecycle.daemon_clients import Auditd, Daemon, Hostd, Vaultd
from lifecycle.database.engine import PostgreSQL, SQLite
from lifecycle.database.snapshot_table import SnapshotTable
from lifecycle.database.table import SandboxTable
from lifecycle.egress.changes import Egress
from lifecycle.egress.policies import Policies
from lifecycle.egress.routes import EgressApi
from lifecycle.lasting import identity
from lifecycle.proxy.handover import hand_over
from lifecycle.proxy.ingress import WayIn
from lifecycle.proxy.readiness import reached
from lifecycle.proxy.server import Proxy
from lifecycle.sandboxes import starting
from lifecycle.sandboxes.clock import Clock
from lifecycle.sandboxes.diagnostics import Diagnostics
from lifecycle.sandboxes.history import OUTPUT_LINES
from lifecycle.sandboxes.journal import Journal
from lifecycle.sandboxes.locks import Locks
from lifecycle.sandboxes.members import Members
from lifecycle.sandboxes.orchestrator import Orchestrator
from lifecycle.sandboxes.pools import Pools
from lifecycle.sandboxes.reaper import Observer, Reaper
from lifecycle.sandboxes.registry import Registry, RegistryError, SchemaError
from lifecycle.sandboxes.rows import Rows
from lifecycle.sandboxes.transaction import Creations
from lifecycle.snapshots.rows import SnapshotRows
from lifecycle.snapshots.service import Snapshots
from policy.strict import place, unknown

POLICY_SECONDS = 0.5
_OPEN_SECONDS = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Server:
    """One server: `edge` is the application, `running` its lifespan."""

    edge: Edge
    context: Context
    policies: Policies
    registry: Registry
    daemons: tuple[Daemon, ...]
    reaper: Reaper
    observer: Observer
    adopted: asyncio.Event

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Open the registry and run the background tasks. End them at the end of the context.

        If a PostgreSQL is away, the API answers meanwhile, and the rest begins when it is back. hostd restarts this
        process also then, and waits for the API before it is ready itself.

        Raises:
            SchemaError, RegistryError: the database cannot be used.
        """
        opened = asyncio.Event()
        tasks: list[asyncio.Task[None]] = []
        try:
            await self.registry.open()
            opened.set()
        except SchemaError:
            raise
        except RegistryError:
            if not self.registry.remote:
                raise
            tasks.append(asyncio.create_task(self._open(opened), name="database"))
        try:
            tasks.append(asyncio.create_task(self._reap(), name="reaper"))
            tasks.append(asyncio.create_task(self._fill(), name="pools"))
            tasks.append(asyncio.create_task(self._observe(opened), name="observer"))
            tasks.append(asyncio.create_task(self._reload(opened), name="policies"))
            tasks.append(asyncio.create_task(self._settle(opened), name="snapshots"))
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.edge.proxy.close()
            closing = (self.context.creations.close(), self.context.egress.close(), self.context.snapshots.close())
            await asyncio.gather(*closing)
            for daemon in self.daemons:
                await daemon.close()
            await self.registry.close()

    async def _open(self, opened: asyncio.Event) -> None:
        while not opened.is_set():
            await asyncio.sleep(_OPEN_SECONDS)
            try:
                await self.registry.open()
            except SchemaError as error:
                _log.error("%s", error)
            except RegistryError:
                continue  # The database's own log has it.
            else:
                opened.set()

    async def _observe(self, opened: asyncio.Event) -> None:
        await opened.wait()
        await self.observer.run(self.adopted.set)

    async def _reap(self) -> None:
        await self.adopted.wait()  # Before that a removal could conflict with a change that an earlier process began.
        await self.reaper.run()

    async def _fill(self) -> None:
        await self.adopted.wait()
        await self.context.pools.run()

    async def _settle(self, opened: asyncio.Event) -> None:
        await opened.wait()
        await self.context.snapshots.run()

    async def _reload(self, opened: asyncio.Event) -> None:
        await opened.wait()
        while True:
            await asyncio.sleep(POLICY_SECONDS)
            try:
                await self.observer.follow()
            except Exception as error:  # noqa: BLE001 - closes: without this task no change of the file would apply
                _log.error("the policy file is not followed yet: %s", error if str(error) else type(error).__name__)


def build(
    config: ServeConfig,
    policies: Policies,
    tokens: Tokens,
    route_keys: RouteKeys,
    *,
    clock: Clock | None = None,
    start_seconds: float = starting.SECONDS,
) -> Server:
    """Compose a server. This needs a running event loop.

    Args:
        start_seconds: the limit of the wait for the entrypoint of a new sandbox.
    """
    way = WayIn(config.run_dir / "ingress", config.daemon_uids["hostd"])
    clock = clock or Clock()
    table = state_table(config, clock)
    registry = Registry(table)
    uids = config.daemon_uids
    hostd = Hostd(config.run_dir / "hostd.sock", uids["hostd"])
    vaultd = Vaultd(config.run_dir / "vault.sock", uids["vaultd"])
    auditd = Auditd(config.run_dir / "audit.sock", uids["auditd"])
    members = Members(registry)
    journal, locks, rows = Journal(auditd), Locks(), Rows(registry, clock)
    expiry_changed = asyncio.Event()
    keys = KeyRing(config.key_digests)
    egress = Egress(registry, rows, hostd, vaultd, policies=policies, journal=journal, locks=locks)
    egress_api = EgressApi(hostd, egress, tokens, keys)
    proxy = Proxy(
        rows,
        clock,
        egress_api,
        tokens,
        keys,
        route_keys,
        way,
        connections=config.proxy_connections,
        renew_interval=config.renew_interval,
    )
    orchestrator = Orchestrator(
        registry,
        rows,
        hostd,
        vaultd,
        journal=journal,
        locks=locks,
        clock=clock,
        expiry_changed=expiry_changed,
        forget=(proxy.forget, egress.forget),
        output_lines=OUTPUT_LINES if config.diagnostics_retention else 0,
    )
    creations = Creations(
        orchestrator,
        registry,
        hostd,
        vaultd,
        auditd,
        policies=policies,
        journal=journal,
        locks=locks,
        clock=clock,
        expiry_changed=expiry_changed,
        starting=starting.Starting(hostd, functools.partial(reached, way), start_seconds),
        settle=egress.reapply,
        tokens=tokens,
        members=members,
        hand_over=functools.partial(hand_over, way),
        bounds=config.bounds,
    )
    taken = Snapshots(
        SnapshotRows(registry, SnapshotTable(table.database, table.owner)),
        rows,
        hostd,
        journal=journal,
        clock=clock,
        bounds=config.snapshots,
    )
    context = Context(
        registry,
        rows,
        orchestrator,
        creations,
        Pools(registry, creations, orchestrator, members, hostd, journal=journal, clock=clock, limits=config.limits),
        clock,
        egress,
        egress_api,
        Diagnostics(registry, hostd, clock, config.diagnostics_retention),
        tokens,
        route_keys,
        journal,
        config.limits,
        taken,
        config.external_base,
        frozenset(config.ignored_fields),
    )
    observer = Observer(
        orchestrator,
        creations,
        egress,
        registry,
        hostd=hostd,
        vaultd=vaultd,
        policies=policies,
        journal=journal,
        locks=locks,
        clock=clock,
        expiry_changed=expiry_changed,
    )
    guard = BrowserGuard.of((config.host, *config.allowed_hosts))
    return Server(
        Edge(api(context), proxy, keys, guard),
        context,
        policies,
        registry,
        (hostd, vaultd, auditd),
        Reaper(orchestrator, registry, clock, expiry_changed, config.diagnostics_retention),
        observer,
        asyncio.Event(),
    )


def state_table(config: ServeConfig, clock: Clock) -> SandboxTable:
    """Return the tables of this server's rows, in the configured database, which is not opened yet.

    Raises:
        OSError: the server's identity cannot be read or made.
        ValueError: the DSN is none.
    """
    given = config.database
    database = (
        SQLite(config.state_dir / "sallyport.db")
        if given is None
        else PostgreSQL(
            given.dsn,
            connections=given.connections,
            connect_seconds=given.connect_seconds,
            statement_seconds=given.statement_seconds,
        )
    )
    return SandboxTable(database, identity(config.state_dir), clock, keeps=config.diagnostics_retention > 0)


def api(context: Context) -> FastAPI:
    """Build the FastAPI application: every route under `/` and under `/v1`. The OpenAPI document has those of `/v1`."""
    app = FastAPI(
        title=PRODUCT,
        version="0.1.0",  # of the API, as the contract says
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        responses=ON_EACH_ROUTE,
    )
    app.state.context = context
    setattr(app, "openapi", functools.partial(document, app))  # noqa: B010 - FastAPI's way; mypy refuses to assign a method
    app.include_router(system.root)
    for prefix in ("/v1", ""):  # Routes are compared in this order, and the SDKs call those below /v1.
        for module in (sandboxes, snapshots, diagnostics, endpoints, networkpolicy, pools, system):
            app.include_router(module.router, prefix=prefix, include_in_schema=prefix == "/v1")
        app.include_router(unsupported.router, prefix=prefix, include_in_schema=False)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RegistryError, _no_database)
    app.add_exception_handler(RequestValidationError, _schema_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unforeseen)
    return app


async def _api_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)  # noqa: S101 - narrows the type of Starlette's signature
    return JSONResponse(error.body(), error.status, headers=dict(error.headers))


async def _no_database(_: Request, __: Exception) -> JSONResponse:
    return await _api_error(_, no_database())


async def _schema_error(_: Request, error: Exception) -> JSONResponse:
    """Return 400 for an unknown field, else 422 in FastAPI's shape with code and message added.

    The caller's data is not repeated, because it may be secret. Names of fields are.
    """
    assert isinstance(error, RequestValidationError)  # noqa: S101 - as above
    errors = error.errors()
    for item in errors:
        if item["type"] == "extra_forbidden":
            return await _api_error(_, invalid(unknown(_in_body(item["loc"]))))
    detail = [{"loc": list(item["loc"]), "msg": _problem(item), "type": item["type"]} for item in errors[:32]]
    first = detail[0] if detail else {"loc": ["body"], "msg": "invalid"}
    where = place(_in_body(tuple(first["loc"]))) or "body"
    return JSONResponse(ApiError(422, INVALID_PARAMETER, f"{where}: {first['msg']}", detail=detail).body(), 422)


def _in_body(location: tuple[str | int, ...]) -> tuple[str | int, ...]:
    return location[1:] if location[:1] == ("body",) else location


def _problem(item: Mapping[str, Any]) -> str:
    """Describe a fault. For text that is no acceptable JSON this is the message of `strict`."""
    return str(item["ctx"]["error"] if item["type"] == "json_invalid" else item["msg"])


async def _http_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)  # noqa: S101 - as above
    return JSONResponse(
        ApiError(error.status_code, UNKNOWN_ERROR, str(error.detail)).body(), error.status_code, headers=error.headers
    )


async def _unforeseen(_: Request, __: Exception) -> JSONResponse:
    """Starlette raises the exception again after this handler, and `edge` logs it."""
    return JSONResponse(ApiError(500, UNKNOWN_ERROR, "Internal server error.").body(), 500)
