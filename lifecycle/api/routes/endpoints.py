"""`/sandboxes/{id}/endpoints/{port}`: the address of a port for a client, and the headers it needs.

Every endpoint is the server's own proxy route, with and without `use_server_proxy`. No port of a sandbox is published.
With `expires` it is a signed route (`lifecycle.proxy.signed`), which needs no secure-access token. It is in the audit
log, without its signature, before the caller has it.
"""

import re
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from lifecycle.api.answers import EndpointAnswer, answers
from lifecycle.api.errors import ApiError, invalid
from lifecycle.api.routes.context import Server
from lifecycle.api.routes.strict import StrictRoute
from lifecycle.proxy.headers import EGRESS_PORT, EXECD_PORT
from lifecycle.proxy.signed import LATEST, signed

router = APIRouter(route_class=StrictRoute)
_AUTHORITY = re.compile(r"[A-Za-z0-9._~\[\]:-]{1,255}")


@router.get("/sandboxes/{sandbox}/endpoints/{port}", responses=answers(200, EndpointAnswer, 404))
async def endpoint(
    server: Server,
    sandbox: str,
    port: int,
    request: Request,
    use_server_proxy: Annotated[bool, Query()] = False,
    expires: Annotated[str | None, Query(max_length=64)] = None,
) -> dict[str, Any]:
    """Return the endpoint of a port. A sandbox has its endpoints from the moment that its creation was accepted."""
    if not 1 <= port <= 65535:
        raise ApiError(400, "DOCKER::INVALID_PORT", "The port must be between 1 and 65535.")
    until = None if expires is None else _expiry(expires, server.clock())
    if until is not None and use_server_proxy:
        raise invalid("expires cannot be combined with use_server_proxy.")
    row = await server.rows.get(sandbox)
    prefix = "/v1" if request.url.path.startswith("/v1/") else ""
    base = server.external_base or _host(request) + prefix
    headers: dict[str, str] = {}
    if port == EXECD_PORT:
        headers["X-EXECD-ACCESS-TOKEN"] = server.tokens.execd(row.id)
    elif port == EGRESS_PORT:
        headers["OPENSANDBOX-EGRESS-AUTH"] = server.tokens.egress(row.id)
    path = f"sandboxes/{row.id}/proxy/{port}"
    if until is not None:
        await server.journal.record("lifecycle.signed_route", "allow", sandbox=row.id, port=port, expires=until)
        path = signed(server.route_keys, row.id, port, until)
    elif row.secure_access:
        headers["OpenSandbox-Secure-Access"] = server.tokens.secure(row.id)
    body: dict[str, Any] = {"endpoint": f"{base}/{path}"}
    if headers:
        body["headers"] = headers
    return body


def _expiry(text: str, now: float) -> int:
    if not re.fullmatch(r"[0-9]{1,20}", text, re.ASCII) or int(text) > LATEST:
        raise invalid("expires must be a time in seconds since 1970, of 64 bits.")
    if int(text) <= now:
        raise invalid("expires must be in the future.")
    return int(text)


def _host(request: Request) -> str:
    host = request.headers.get("host", "")
    if not _AUTHORITY.fullmatch(host):
        raise invalid("The Host header is not usable as an endpoint.")
    return host
