"""The routes of the contract that this server does not offer.

Each answers with the contract's code, not with the 404 of an unknown route.
"""

from fastapi import APIRouter

from lifecycle.api.errors import ApiError
from lifecycle.api.routes.context import Server

router = APIRouter()


@router.get("/templates")
@router.post("/templates")
@router.get("/templates/{template}")
@router.delete("/templates/{template}")
async def templates(template: str = "") -> None:
    """MicroVM templates."""
    raise ApiError(501, "FSB::API_NOT_SUPPORTED", "Templates are not supported by this server.")


@router.post("/sandboxes/{sandbox}/snapshots")
async def create_snapshot(server: Server, sandbox: str) -> None:
    """Snapshots."""
    await server.rows.get(sandbox)
    raise ApiError(501, "SNAPSHOT::NOT_IMPLEMENTED", "Snapshots are not supported by this server yet.")


@router.get("/snapshots")
async def list_snapshots() -> None:
    """List snapshots."""
    raise ApiError(501, "SNAPSHOT::NOT_IMPLEMENTED", "Snapshots are not supported by this server yet.")


@router.get("/snapshots/{snapshot}")
@router.delete("/snapshots/{snapshot}")
async def snapshot(snapshot: str) -> None:
    """Report that the snapshot does not exist, because none exists."""
    raise ApiError(404, "SNAPSHOT::NOT_FOUND", f"Snapshot {snapshot[:80]} not found.")
