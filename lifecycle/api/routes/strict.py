"""The route class of the lifecycle API, which refuses a call with content that its route does not read.

- An unknown query parameter, and a repeated one of which only one counts, is a 400 that names it.
- A body is strict JSON (`policy.strict`), and its model refuses unknown fields. A route without a body accepts an
  empty one or `{}`.
- Fields that the operator lists are dropped, at the top level of a model that does not know them, and only there.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from typing import Any, get_args, get_origin

from fastapi import Request, Response
from fastapi.routing import APIRoute

from lifecycle.api.errors import invalid
from lifecycle.api.models import Model
from lifecycle.api.routes.context import Context
from policy.strict import StrictError, decode, quoted

_LARGE = 64 * 1024
"""Bytes. A body of this size or more is parsed in a thread, so that it does not delay other requests."""

_log = logging.getLogger(__name__)


class StrictRoute(APIRoute):
    """A route that reads all of a call or refuses it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler behind the checks."""
        handler = super().get_route_handler()
        single = {field.alias for field in self.dependant.query_params}
        several = {field.alias for field in self.dependant.query_params if _is_list(field.field_info.annotation)}
        body_type = self.body_field.field_info.annotation if self.body_field is not None else None
        known = frozenset[str]()
        if isinstance(body_type, type) and issubclass(body_type, Model):
            known = frozenset(field.alias or name for name, field in body_type.model_fields.items())

        async def strict(request: Request) -> Response:
            for name in request.query_params:
                if name not in single:
                    raise invalid(f"unknown query parameter {quoted(name[:100])}")
                if name not in several and len(request.query_params.getlist(name)) > 1:
                    raise invalid(f"query parameter {quoted(name)} is given more than once")
            if self.body_field is None and (await request.body()).strip() not in (b"", b"{}"):
                raise invalid("this call takes no body")
            return await handler(_StrictRequest(request, known))

        return strict


class _StrictRequest(Request):
    """A request with strictly parsed JSON. `known` are the fields of its model, if it has one."""

    def __init__(self, request: Request, known: frozenset[str]) -> None:
        super().__init__(request.scope, request.receive)
        self._original = request
        self._known = known

    async def body(self) -> bytes:
        return await self._original.body()

    async def json(self) -> Any:
        """Parse the body.

        Raises:
            json.JSONDecodeError: the refusal, in the form that FastAPI converts into a schema error.
        """
        body = await self.body()
        try:
            content = decode(body) if len(body) < _LARGE else await asyncio.to_thread(decode, body)
        except StrictError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None
        context = self.app.state.context
        if self._known and isinstance(content, dict) and isinstance(context, Context):
            for name in context.ignored_fields - self._known & content.keys():
                del content[name]
                _log.info("request field %s is ignored, as the settings say", name)
        return content


def _is_list(annotation: object) -> bool:
    return any(get_origin(part) is list for part in (annotation, *get_args(annotation)))
