"""The OpenAPI document of the lifecycle API, which `/openapi.json` answers.

- It has the routes under `/v1`. Each of them exists without this prefix, too.
- It does not have the proxy and signed routes: what these take and answer is that of the program in the sandbox.
- Requests are those of `models`, answers those of `answers`.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from lifecycle.api.credentials import API_KEY_HEADER

_DESCRIPTION = (
    "Creates and manages sandboxes. Each route under /v1 also exists without this prefix. The server refuses a request "
    "with a field or query parameter that is not described here. A field that is null is refused, unless its "
    "description permits null."
)
_SCHEME = "apiKey"


def document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of `app`. The first call makes it."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, description=_DESCRIPTION, routes=app.routes)
        scheme = {"type": "apiKey", "in": "header", "name": API_KEY_HEADER.upper()}
        made["components"]["securitySchemes"] = {_SCHEME: scheme}
        for path, operations in made["paths"].items():
            for operation in operations.values():
                if path.startswith("/v1/"):
                    operation["security"] = [{_SCHEME: []}]
                for status, answer in operation["responses"].items():
                    _correct(status, answer)
        app.openapi_schema = made
    return app.openapi_schema


def _correct(status: str, answer: dict[str, Any]) -> None:
    """Correct what FastAPI assumes: errors have the content type of a success, and an empty body is JSON."""
    content = answer.get("content", {})
    if status[0] in "45":
        answer["content"] = {"application/json": next(iter(content.values()))}
    elif content == {"application/json": {"schema": {}}}:
        del answer["content"]
