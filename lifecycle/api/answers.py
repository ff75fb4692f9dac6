"""What the routes of the lifecycle API answer, for its OpenAPI document.

The routes render their answers themselves (`models`). `tests/contracts/test_openapi.py` compares what the server sends
with these descriptions. An absent member is left out, never null, so a member is required or `NotRequired`.
"""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from pydantic import ConfigDict, Field, with_config

type Moment = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
type Responses = dict[int | str, dict[str, Any]]

_only_these = with_config(ConfigDict(extra="forbid"))


@_only_these
class FaultAnswer(TypedDict):
    """One fault of a malformed request."""

    loc: list[str | int]
    msg: str
    type: str


@_only_these
class ErrorAnswer(TypedDict):
    """Any answer but success. `detail` is there if the request is malformed (422)."""

    code: str
    message: str
    detail: NotRequired[list[FaultAnswer]]


@_only_these
class StatusAnswer(TypedDict):
    """The state of a sandbox."""

    state: str
    lastTransitionAt: Moment
    reason: NotRequired[str]
    message: NotRequired[str]


@_only_these
class CreatedAnswer(TypedDict):
    """A new sandbox. Without `expiresAt` it has no expiry."""

    id: str
    status: StatusAnswer
    createdAt: Moment
    entrypoint: list[str]
    expiresAt: NotRequired[Moment]
    metadata: NotRequired[dict[str, str]]
    extensions: NotRequired[dict[str, str]]
    platform: NotRequired[dict[str, str]]


@_only_these
class ReferenceAnswer(TypedDict):
    """The image that a sandbox was made from, as the caller wrote it."""

    uri: str


@_only_these
class AllocationAnswer(TypedDict):
    """The pool that a sandbox came from."""

    mode: Literal["pool"]
    poolRef: str
    state: Literal["allocated"]


@_only_these
class SandboxAnswer(CreatedAnswer):
    """A sandbox. It has `image` or `snapshotId`."""

    image: NotRequired[ReferenceAnswer]
    snapshotId: NotRequired[str]
    allocation: NotRequired[AllocationAnswer]


@_only_these
class PaginationAnswer(TypedDict):
    """Which part of a list an answer has."""

    page: int
    pageSize: int
    totalItems: int
    totalPages: int
    hasNextPage: bool


@_only_these
class SandboxesAnswer(TypedDict):
    """A part of the list of sandboxes."""

    items: list[SandboxAnswer]
    pagination: PaginationAnswer


@_only_these
class ExpiryAnswer(TypedDict):
    """The expiry of a sandbox."""

    expiresAt: Moment


@_only_these
class EndpointAnswer(TypedDict):
    """The address of a port, without a scheme, and the headers that requests to it need."""

    endpoint: str
    headers: NotRequired[dict[str, str]]


@_only_these
class PolicyRuleAnswer(TypedDict):
    """One rule of a network policy."""

    action: Literal["allow", "deny"]
    target: str


@_only_these
class PolicyAnswer(TypedDict):
    """A network policy. The first rule that matches decides."""

    egress: list[PolicyRuleAnswer]
    defaultAction: Literal["allow", "deny"]


@_only_these
class PolicyStatusAnswer(TypedDict):
    """The network policy of a sandbox. `reason` says what of it is not in force, or that nothing was changed."""

    status: Literal["ok"]
    mode: Literal["allow_all", "deny_all", "enforcing"]
    enforcementMode: Literal["dns+nft"]
    reason: NotRequired[str]
    policy: PolicyAnswer


@_only_these
class SnapshotAnswer(TypedDict):
    """A snapshot."""

    id: str
    sandboxId: str
    status: StatusAnswer
    createdAt: Moment
    name: NotRequired[str]


@_only_these
class SnapshotsAnswer(TypedDict):
    """A part of the list of snapshots."""

    items: list[SnapshotAnswer]
    pagination: PaginationAnswer


@_only_these
class CapacityAnswer(TypedDict):
    """The numbers of members of a pool."""

    bufferMax: int
    bufferMin: int
    poolMax: int
    poolMin: int


@_only_these
class PoolStatusAnswer(TypedDict):
    """The members that a pool has now. `message` is the problem of the last member that could not be made."""

    total: int
    allocated: int
    available: int
    revision: str
    message: NotRequired[str]


@_only_these
class PoolAnswer(TypedDict):
    """A pool."""

    name: str
    capacitySpec: CapacityAnswer
    status: PoolStatusAnswer
    createdAt: Moment


@_only_these
class PoolsAnswer(TypedDict):
    """All pools."""

    items: list[PoolAnswer]


@_only_these
class DiagnosticsAnswer(TypedDict):
    """Logs or events of a sandbox."""

    sandboxId: str
    kind: Literal["logs", "events"]
    scope: str
    delivery: Literal["inline"]
    contentType: Literal["text/plain; charset=utf-8"]
    content: str
    contentLength: int
    truncated: bool
    warnings: NotRequired[list[str]]


@_only_these
class HealthAnswer(TypedDict):
    """That the API answers."""

    status: Literal["healthy"]


@_only_these
class VersionAnswer(TypedDict):
    """The API's version, and the product's."""

    version: str
    contract: str
    product: str
    product_version: str


_WHY = {
    400: "A part of the request is not possible, or is not known.",
    401: "The API key is missing or wrong.",
    403: "The server has no API keys, and the request's Host or Origin is not its own.",
    404: "There is no such object.",
    409: "The object is in another state.",
    413: "The body is too large.",
    422: "A part of the request is malformed.",
    429: "A limit is reached. `Retry-After` has the time to wait, in seconds.",
    500: "The operation failed.",
    501: "This server does not have the operation.",
    503: "A part of the server does not answer. `Retry-After` has the time to wait, in seconds.",
}
ON_EACH_ROUTE: Responses = {
    status: {"model": ErrorAnswer, "description": _WHY[status]} for status in (400, 401, 403, 413, 422, 500, 503)
}


def answers(status: int, model: object = None, *errors: int, text: bool = False) -> Responses:
    """Return what a route answers in addition to `ON_EACH_ROUTE`: the parameter `responses` of its decorator.

    Args:
        model: the body of a success; None: an empty one, or only text.
        errors: further statuses, each with an `Error`.
        text: the body of a success can be plain text.
    """
    success: dict[str, Any] = {} if model is None else {"model": model}
    if text:
        success["content"] = {"text/plain": {"schema": {"type": "string"}}}
    further: Responses = {one: {"model": ErrorAnswer, "description": _WHY[one]} for one in errors}
    return {status: success, **further}
