"""The routes of the contract that this server does not offer.

Each answers with the contract's code, not with the 404 of an unknown route.
"""

from fastapi import APIRouter

from lifecycle.api.errors import ApiError

router = APIRouter()


@router.get("/templates")
@router.post("/templates")
@router.get("/templates/{template}")
@router.delete("/templates/{template}")
async def templates(template: str = "") -> None:
    """MicroVM templates."""
    raise ApiError(501, "FSB::API_NOT_SUPPORTED", "Templates are not supported by this server.")
