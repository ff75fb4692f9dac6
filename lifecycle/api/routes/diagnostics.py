"""`/sandboxes/{id}/diagnostics`: logs, events, inspect and summary.

- With `scope` logs and events are JSON. Without it they are plain text, which the API's specification calls deprecated.
- Of the parameters of the plain text `since` is lenient, as the specification says, and `container` has no effect: a
  sandbox has one container.
"""

import re
from enum import StrEnum
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from lifecycle.api.answers import DiagnosticsAnswer, answers
from lifecycle.api.errors import ApiError, invalid
from lifecycle.api.routes.context import Server
from lifecycle.api.routes.strict import StrictRoute
from lifecycle.sandboxes.diagnostics import MOST_LINES, Content
from lifecycle.sandboxes.history import EventKind
from policy.strict import quoted

router = APIRouter(route_class=StrictRoute)

_JSON_LINES, _JSON_EVENTS = 100, 50
_SINCE_SECONDS = 600
_SINCE = re.compile(r"([0-9]{1,9})([smhd]?)", re.ASCII)
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_EVENT_SCOPES: dict[str, EventKind | None] = {**{str(scope): scope for scope in EventKind}, "all": None}
_PART = "This server has no logs but the output of the container."
_IN_BOTH_FORMS = answers(200, DiagnosticsAnswer, 404, text=True)

type Name = Annotated[str | None, Query(max_length=64)]
type Tail = Annotated[int | None, Query(ge=1, le=MOST_LINES)]
type Limit = Annotated[int | None, Query(ge=1, le=500)]


class ContentKind(StrEnum):
    """The two kinds of content that have scopes."""

    LOGS = "logs"
    EVENTS = "events"


@router.get(
    "/sandboxes/{sandbox}/diagnostics/logs",
    response_model=None,
    responses=_IN_BOTH_FORMS,
)
async def logs(
    server: Server,
    sandbox: str,
    scope: Name = None,
    tail: Tail = None,
    since: Name = None,
    container: Annotated[str | None, Query(max_length=253)] = None,
) -> Response:
    """Return the end of the sandbox's output."""
    if scope is None:
        seconds = None if since is None else _seconds(since)
        return _text((await server.diagnostics.logs(sandbox, tail or 100, seconds)).text or "(no logs)")
    _check_alone(tail=tail, since=since, container=container)
    name = _scope(ContentKind.LOGS, scope, ("container", "all"))
    content = await server.diagnostics.logs(sandbox, _JSON_LINES)
    return _json(sandbox, ContentKind.LOGS, name, content, (_PART,) if name == "all" else ())


@router.get(
    "/sandboxes/{sandbox}/diagnostics/events",
    response_model=None,
    responses=_IN_BOTH_FORMS,
)
async def events(server: Server, sandbox: str, scope: Name = None, limit: Limit = None) -> Response:
    """Return the newest events of the sandbox."""
    if scope is None:
        return _text((await server.diagnostics.events(sandbox, limit or 50)).text)
    _check_alone(limit=limit)
    name = _scope(ContentKind.EVENTS, scope, tuple(_EVENT_SCOPES))
    content = await server.diagnostics.events(sandbox, _JSON_EVENTS, _EVENT_SCOPES[name])
    return _json(sandbox, ContentKind.EVENTS, name, content)


@router.get(
    "/sandboxes/{sandbox}/diagnostics/inspect", response_class=PlainTextResponse, responses=answers(200, None, 404)
)
async def inspect(server: Server, sandbox: str) -> Response:
    """Return a description of the sandbox."""
    return _text(await server.diagnostics.inspect(sandbox))


@router.get(
    "/sandboxes/{sandbox}/diagnostics/summary", response_class=PlainTextResponse, responses=answers(200, None, 404)
)
async def summary(server: Server, sandbox: str, tail: Tail = None, event_limit: Limit = None) -> Response:
    """Return description, events and output."""
    return _text(await server.diagnostics.summary(sandbox, tail or 50, event_limit or 20))


def _check_alone(**others: object) -> None:
    for name, value in others.items():
        if value is not None:
            raise invalid(f"query parameter {quoted(name)} cannot be combined with scope")


def _scope(kind: ContentKind, text: str, supported: tuple[str, ...]) -> str:
    name = text.strip().lower()
    if name not in supported:
        message = f"scope: {quoted(text[:40])} is not supported for {kind}; supported are {', '.join(supported)}."
        raise ApiError(400, "DIAGNOSTICS_SCOPE_UNSUPPORTED", message)
    return name


def _seconds(since: str) -> int:
    match = _SINCE.fullmatch(since.strip().lower())
    return int(match[1]) * _UNITS[match[2]] if match else _SINCE_SECONDS


def _text(text: str) -> Response:
    return PlainTextResponse(text, headers={"Deprecation": "true"})


def _json(sandbox: str, kind: ContentKind, scope: str, content: Content, warnings: tuple[str, ...] = ()) -> Response:
    body: dict[str, Any] = {
        "sandboxId": sandbox,
        "kind": kind,
        "scope": scope,
        "delivery": "inline",
        "contentType": "text/plain; charset=utf-8",
        "content": content.text,
        "contentLength": len(content.text.encode()),
        "truncated": content.truncated,
    }
    if told := (*content.warnings, *warnings):
        body["warnings"] = list(told)
    return JSONResponse(body)
