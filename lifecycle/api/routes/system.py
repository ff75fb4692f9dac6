"""`/health`, `/version` and the metrics events of clients."""

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse

from lifecycle.about import API_VERSION, CONTRACT, PRODUCT, VERSION
from lifecycle.api.answers import HealthAnswer, VersionAnswer, answers
from lifecycle.api.models import MetricsEvent
from lifecycle.api.routes.context import Server
from lifecycle.api.routes.strict import StrictRoute

root = APIRouter()
router = APIRouter(route_class=StrictRoute)


@root.get("/health", responses=answers(200, HealthAnswer))
async def health() -> dict[str, str]:
    """Report that the API answers."""
    return {"status": "healthy"}


@root.get("/version", responses=answers(200, VersionAnswer))
async def version() -> dict[str, str]:
    """Return the API's version and the product's. Clients compare `version`."""
    return {"version": API_VERSION, "contract": CONTRACT, "product": PRODUCT, "product_version": VERSION}


@root.get("/docs", response_class=HTMLResponse, include_in_schema=False)
@root.get("/redoc", response_class=HTMLResponse, include_in_schema=False)
async def docs() -> HTMLResponse:
    """Return a link to the schema. FastAPI's own pages would run a script of another server in this origin."""
    page = '<!doctype html><title>Sallyport</title><a href="/openapi.json">OpenAPI schema</a>'
    return HTMLResponse(page, headers={"Content-Security-Policy": "default-src 'none'"})


@router.post("/metrics/events", status_code=204, responses=answers(204))
async def metrics_event(server: Server, event: MetricsEvent) -> Response:
    """Count an event that a client reports."""
    server.counters.creates_reported += 1
    server.counters.creates_failed += not event.success
    return Response(status_code=204)
