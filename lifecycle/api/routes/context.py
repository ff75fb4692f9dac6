"""The objects that the routes use: one instance per server, attached to the FastAPI application."""

from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from lifecycle.api.credentials import RouteKeys, Tokens
from lifecycle.api.rendered import Rendered
from lifecycle.egress.changes import Egress
from lifecycle.egress.routes import EgressApi
from lifecycle.sandboxes.bounds import SandboxLimits
from lifecycle.sandboxes.clock import Clock
from lifecycle.sandboxes.diagnostics import Diagnostics
from lifecycle.sandboxes.journal import Journal
from lifecycle.sandboxes.orchestrator import Orchestrator
from lifecycle.sandboxes.pools import Pools
from lifecycle.sandboxes.registry import Registry
from lifecycle.sandboxes.rows import Rows
from lifecycle.sandboxes.transaction import Creations
from lifecycle.snapshots.service import Snapshots

KEY_LABEL = "key_label"
"""The part of a request's state with the label of its API key."""


@dataclass(slots=True)
class Counters:
    """The counts of reported metrics events."""

    creates_reported: int = 0
    creates_failed: int = 0


@dataclass(frozen=True, slots=True)
class Context:
    """The parts of one server.

    Attributes:
        external_base: public base of endpoints, without a scheme, or empty.
        ignored_fields: top-level fields of request bodies that are dropped if their model does not know them.
    """

    registry: Registry
    rows: Rows
    orchestrator: Orchestrator
    creations: Creations
    pools: Pools
    clock: Clock
    egress: Egress
    egress_api: EgressApi
    diagnostics: Diagnostics
    tokens: Tokens
    route_keys: RouteKeys
    journal: Journal
    limits: SandboxLimits
    snapshots: Snapshots
    external_base: str = ""
    ignored_fields: frozenset[str] = frozenset()
    counters: Counters = field(default_factory=Counters)
    rendered: Rendered = field(default_factory=Rendered)


async def _context(request: Request) -> Context:  # a plain function would be called in a thread
    context = request.app.state.context
    assert isinstance(context, Context)  # noqa: S101 - narrows what Starlette keeps as Any
    return context


Server = Annotated[Context, Depends(_context)]
