"""`/snapshots`, and the snapshots of a sandbox."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse

from lifecycle.api import models
from lifecycle.api.answers import SnapshotAnswer, SnapshotsAnswer, answers
from lifecycle.api.routes.context import Server
from lifecycle.api.routes.strict import StrictRoute

router = APIRouter(route_class=StrictRoute)


@router.post("/sandboxes/{sandbox}/snapshots", status_code=202, responses=answers(202, SnapshotAnswer, 404, 409, 429))
async def create(server: Server, sandbox: str, body: models.CreateSnapshot | None = None) -> JSONResponse:
    """Create a snapshot of a running sandbox. The answer is sent before it is taken."""
    row = await server.snapshots.create(sandbox, None if body is None else body.name)
    return JSONResponse(models.snapshot_shown(row), 202, headers={"Location": f"/v1/snapshots/{row.id}"})


@router.get("/snapshots", responses=answers(200, SnapshotsAnswer))
async def list_snapshots(
    server: Server,
    sandbox: Annotated[str | None, Query(alias="sandboxId", max_length=256)] = None,
    name: Annotated[str | None, Query(max_length=256)] = None,
    state: Annotated[list[str] | None, Query(max_length=32)] = None,
    page: Annotated[int, Query(ge=1, le=1 << 40)] = 1,
    page_size: Annotated[int, Query(alias="pageSize", ge=1, le=200)] = 20,
) -> dict[str, Any]:
    """List snapshots, newest first. A state that does not exist matches none."""
    rows, total = await server.snapshots.page(sandbox, name, state or [], page, page_size)
    return {
        "items": [models.snapshot_shown(row) for row in rows],
        "pagination": models.pagination(page, page_size, total),
    }


@router.get("/snapshots/{snapshot}", responses=answers(200, SnapshotAnswer, 404))
async def get(server: Server, snapshot: str) -> dict[str, Any]:
    """Return a snapshot."""
    return models.snapshot_shown(await server.snapshots.get(snapshot))


@router.delete("/snapshots/{snapshot}", status_code=204, responses=answers(204, None, 404, 409))
async def delete(server: Server, snapshot: str) -> Response:
    """Remove a snapshot. The answer is sent after the removal."""
    await server.snapshots.delete(snapshot)
    return Response(status_code=204)
