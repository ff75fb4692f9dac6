"""`/health`, `/version` and the metrics events of clients."""

from fastapi import APIRouter, Response

from lifecycle.models import MetricsEvent
from lifecycle.routes.context import Server

API_VERSION = "1.1.1"
"""The release of the OpenSandbox API this server speaks; clients compare it."""

root = APIRouter()
router = APIRouter()


@root.get("/health")
async def health() -> dict[str, str]:
    """Say that the API answers."""
    return {"status": "healthy"}


@root.get("/version")
async def version() -> dict[str, str]:
    """Say which API this is."""
    return {"version": API_VERSION}


@router.post("/metrics/events", status_code=204)
async def metrics_event(server: Server, event: MetricsEvent) -> Response:
    """Count what a client reports."""
    server.counters.creates_reported += 1
    server.counters.creates_failed += not event.success
    return Response(status_code=204)
