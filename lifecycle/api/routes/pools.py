"""`/pools`: sandboxes that stand ready for create calls with `extensions.poolRef`."""

from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from lifecycle.api import models
from lifecycle.api.answers import PoolAnswer, PoolsAnswer, answers
from lifecycle.api.routes.context import Server
from lifecycle.api.routes.strict import StrictRoute
from lifecycle.sandboxes.creation import capacity_of, pool_of
from lifecycle.sandboxes.pool import Count

router = APIRouter(route_class=StrictRoute)


@router.post("/pools", status_code=201, responses=answers(201, PoolAnswer, 409))
async def create(server: Server, body: models.CreatePool) -> JSONResponse:
    """Create a pool. Its members are made after the answer."""
    found = await server.pools.create(pool_of(body, server.limits, server.clock()))
    return JSONResponse(models.pool(found, Count()), 201, headers={"Location": f"/v1/pools/{found.name}"})


@router.get("/pools", responses=answers(200, PoolsAnswer))
async def list_pools(server: Server) -> dict[str, Any]:
    """List all pools, by name."""
    return {"items": [models.pool(*item) for item in await server.pools.all()]}


@router.get("/pools/{pool}", responses=answers(200, PoolAnswer, 404))
async def get(server: Server, pool: str) -> dict[str, Any]:
    """Return a pool."""
    return models.pool(*await server.pools.get(pool))


@router.put("/pools/{pool}", responses=answers(200, PoolAnswer, 404))
async def resize(server: Server, pool: str, body: models.ResizePool) -> dict[str, Any]:
    """Change the capacity of a pool."""
    return models.pool(*await server.pools.resize(pool, capacity_of(body.capacity_spec)))


@router.delete("/pools/{pool}", status_code=204, responses=answers(204, None, 404))
async def delete(server: Server, pool: str) -> Response:
    """Delete a pool. Its idle members are removed after the answer, and claimed sandboxes stay."""
    await server.pools.delete(pool)
    return Response(status_code=204)
