"""`/sandboxes`: create, list, get, delete, metadata, pause, resume, renew."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from lifecycle.api import models
from lifecycle.api.answers import CreatedAnswer, ExpiryAnswer, SandboxAnswer, SandboxesAnswer, answers
from lifecycle.api.errors import ApiError
from lifecycle.api.rendered import answer
from lifecycle.api.routes.context import KEY_LABEL, Context, Server
from lifecycle.api.routes.strict import StrictRoute
from lifecycle.sandboxes.creation import plan
from lifecycle.sandboxes.labels import parse_filter
from lifecycle.sandboxes.moments import timestamp
from lifecycle.sandboxes.registry import Sandbox
from lifecycle.sandboxes.transaction import Creation, Creations
from lifecycle.snapshots.snapshot import Snapshot

router = APIRouter(route_class=StrictRoute)


@router.post("/sandboxes", status_code=202, responses=answers(202, CreatedAnswer, 404, 409, 429, 501))
async def create(server: Server, body: models.Create, request: Request) -> JSONResponse:
    """Create a sandbox."""
    key_label = str(getattr(request.state, KEY_LABEL, ""))
    creation = await server.creations.begin(plan(body, server.limits, await _source(server, body)), key_label)
    return _AnswerWithId(await _unless_gone(server.creations, creation, request), server.creations, creation)


async def _source(server: Context, body: models.Create) -> Snapshot | ApiError | None:
    """Return the snapshot that the body names, or the error that it causes, which other errors can precede."""
    snapshot = (body.snapshot_id or "").strip()
    if not snapshot:
        return None
    try:
        return await server.snapshots.source(snapshot)
    except ApiError as error:
        return error


class _AnswerWithId(JSONResponse):
    """The answer of a creation. If the caller disconnects before the answer is sent, the sandbox is removed."""

    def __init__(self, row: Sandbox, creations: Creations, creation: Creation) -> None:
        super().__init__(models.created(row), 202, headers={"Location": f"/v1/sandboxes/{row.id}"})
        self._creations = creations
        self._creation = creation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Its first step is executed here, so that nothing can happen between the check and the answer.
        gone = asyncio.Task(_disconnected(receive), loop=asyncio.get_running_loop(), eager_start=True)
        if gone.done() and not self._creation.abandoned:
            self._creations.abandon(self._creation)
        gone.cancel()
        await super().__call__(scope, receive, send)


async def _unless_gone(creations: Creations, creation: Creation, request: Request) -> Sandbox:
    """Wait for the creation. If the caller disconnects meanwhile, remove the sandbox."""
    finish = asyncio.create_task(creations.finish(creation))
    gone = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({finish, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            creations.abandon(creation)
        return await finish
    except asyncio.CancelledError:
        creations.abandon(creation)
        raise
    finally:
        gone.cancel()
        finish.cancel()
        await asyncio.gather(gone, finish, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@router.get("/sandboxes", response_model=None, responses=answers(200, SandboxesAnswer))
async def list_sandboxes(
    server: Server,
    state: Annotated[list[str] | None, Query(max_length=32)] = None,
    metadata: Annotated[str | None, Query(max_length=8192)] = None,
    page: Annotated[int, Query(ge=1, le=1 << 40)] = 1,
    page_size: Annotated[int, Query(alias="pageSize", ge=1, le=200)] = 20,
) -> Response:
    """List sandboxes, newest first."""
    wanted = {} if metadata is None else parse_filter(metadata)
    rows, total = await server.registry.page(state or [], wanted, page, page_size)
    pagination = models.pagination(page, page_size, total)
    return answer(server.rendered.page(rows, pagination))


@router.get("/sandboxes/{sandbox}", response_model=None, responses=answers(200, SandboxAnswer, 404))
async def get(server: Server, sandbox: str) -> Response:
    """Return a sandbox."""
    return answer(server.rendered.one(await server.rows.get(sandbox)))


@router.delete("/sandboxes/{sandbox}", status_code=204, responses=answers(204, None, 404))
async def delete(server: Server, sandbox: str) -> Response:
    """Remove a sandbox. The answer is sent after the removal."""
    await server.orchestrator.remove(sandbox, "deleted by the API", idle=False)
    return Response(status_code=204)


@router.patch("/sandboxes/{sandbox}/metadata", responses=answers(200, SandboxAnswer, 404, 409))
async def patch_metadata(
    server: Server, sandbox: str, patch: Annotated[dict[str, str | None], Body()]
) -> dict[str, Any]:
    """Merge the patch into the metadata."""
    return models.shown(await server.orchestrator.patch_metadata(sandbox, patch))


@router.post("/sandboxes/{sandbox}/pause", status_code=202, responses=answers(202, None, 404, 409))
async def pause(server: Server, sandbox: str) -> Response:
    """Pause a sandbox."""
    await server.orchestrator.pause(sandbox)
    return Response(status_code=202)


@router.post("/sandboxes/{sandbox}/resume", status_code=202, responses=answers(202, None, 404, 409))
async def resume(server: Server, sandbox: str) -> Response:
    """Resume a sandbox."""
    await server.orchestrator.resume(sandbox)
    return Response(status_code=202)


@router.post("/sandboxes/{sandbox}/renew-expiration", responses=answers(200, ExpiryAnswer, 404, 409))
async def renew(server: Server, sandbox: str, body: models.Renew) -> dict[str, str]:
    """Set the expiry."""
    row = await server.orchestrator.renew(sandbox, body.expires_at)
    return {"expiresAt": timestamp(row.expires_at or 0)}
