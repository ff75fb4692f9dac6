"""`/sandboxes/{id}/networkpolicy`: the egress policy under the API key.

Its writes equal those of `/policy` on port 18080.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Body, Header

from lifecycle.api.answers import PolicyStatusAnswer, answers
from lifecycle.api.errors import INVALID_PARAMETER, UNKNOWN_ERROR, ApiError, invalid
from lifecycle.api.models import NetworkPolicy, RuleModel
from lifecycle.api.routes.context import Server
from lifecycle.api.routes.strict import StrictRoute
from lifecycle.egress.changes import EgressError, user_policy
from lifecycle.egress.routes import policy_status
from lifecycle.sandboxes.registry import Sandbox
from policy.api import ApiPolicyError, parse_delete, parse_network_policy, parse_patch

router = APIRouter(route_class=StrictRoute)
_PATH = "/sandboxes/{sandbox}/networkpolicy"
Force = Annotated[str, Header(alias="OpenSandbox-Egress-Force")]


@router.get(_PATH, responses=answers(200, PolicyStatusAnswer, 404))
async def read(server: Server, sandbox: str) -> dict[str, Any]:
    """Return the policy."""
    row = await server.rows.get(sandbox)
    try:
        return _shown(row, server.egress.shortfall.reason(sandbox))
    except EgressError as error:
        raise _refused(error) from None


@router.put(_PATH, responses=answers(200, PolicyStatusAnswer, 404, 409))
async def replace(server: Server, sandbox: str, body: NetworkPolicy, force: Force = "") -> dict[str, Any]:
    """Set the policy."""
    await server.rows.get(sandbox)
    try:
        policy = parse_network_policy(body.document())
        return _shown(await server.egress.replace(sandbox, policy, force=force == "revoke"))
    except (ApiPolicyError, EgressError) as error:
        raise _refused(error) from None


@router.patch(_PATH, responses=answers(200, PolicyStatusAnswer, 404, 409))
async def patch(
    server: Server, sandbox: str, body: Annotated[list[RuleModel], Body(max_length=4096)], force: Force = ""
) -> dict[str, Any]:
    """Insert rules before the existing ones."""
    await server.rows.get(sandbox)
    try:
        rules = parse_patch([rule.document() for rule in body])
        return _shown(await server.egress.patch(sandbox, rules, force=force == "revoke"))
    except (ApiPolicyError, EgressError) as error:
        raise _refused(error) from None


@router.delete(_PATH, responses=answers(200, PolicyStatusAnswer, 404, 409))
async def delete(
    server: Server, sandbox: str, body: Annotated[list[str], Body(max_length=4096)], force: Force = ""
) -> dict[str, Any]:
    """Remove the rules with the given targets."""
    await server.rows.get(sandbox)
    try:
        row, found = await server.egress.delete(sandbox, parse_delete(body), force=force == "revoke")
    except (ApiPolicyError, EgressError) as error:
        raise _refused(error) from None
    return _shown(row, None if found else "no matching targets found")


def _shown(row: Sandbox, reason: str | None = None) -> dict[str, Any]:
    return policy_status(user_policy(row), reason=reason, full=True)


def _refused(error: ApiPolicyError | EgressError) -> ApiError:
    if error.status >= 500:
        return ApiError(error.status, UNKNOWN_ERROR, str(error))
    if error.status == 409:
        return ApiError(409, "DOCKER::SANDBOX_NOT_RUNNING", str(error))
    return invalid(str(error)) if error.status == 400 else ApiError(error.status, INVALID_PARAMETER, str(error))
