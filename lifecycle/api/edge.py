"""The outermost layer of the HTTP server, which every request passes.

- Each answer has `X-Request-ID`. Each error has `code` and `message`, also an unexpected one (500, without details).
- Keys are checked here, before anything is parsed. `_exempt` names the routes without a key.
- The `Caller` of a request is created here, once, so that its refused credentials are counted on every route.
- Without keys (insecure mode) the Host and Origin of a request must be this server's.
- Bodies of the API are read here, with limits on size and time. Only the proxy streams.

It contains no logic of sandboxes. It recognizes the proxy route and signed routes by their raw path and passes
everything else to FastAPI.
"""

import asyncio
import json
import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from lifecycle.api.auth import BrowserGuard, Caller, Refusals
from lifecycle.api.credentials import API_KEY_HEADER, KeyRing
from lifecycle.api.errors import UNKNOWN_ERROR, ApiError, no_database
from lifecycle.api.routes.context import KEY_LABEL
from lifecycle.proxy import signed
from lifecycle.proxy.headers import EGRESS_PORT
from lifecycle.proxy.server import ROUTE, Message, Proxy, Receive, Scope, Send, read_body, refuse_websocket
from lifecycle.sandboxes.registry import RegistryError

MAX_BODY = 4 * 1024 * 1024
BODY_SECONDS = 30.0
_OPEN = ("/health", "/version", "/docs", "/redoc", "/openapi.json")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,200}")

type App = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Edge:
    """The ASGI application that the server runs."""

    api: App
    proxy: Proxy
    keys: KeyRing
    guard: BrowserGuard
    refusals: Refusals = field(default_factory=Refusals)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, WebSocket or lifespan."""
        if scope["type"] == "lifespan":
            await self.api(scope, receive, send)
            return
        request_id = _request_id(scope)
        answer = _Answer(send, request_id)
        try:
            await self._serve(scope, receive, answer, request_id)
        except ApiError as error:
            await answer.refuse(scope, error)
        except RegistryError:
            if not answer.started:
                await answer.refuse(scope, no_database())
        except Exception as error:  # noqa: BLE001 - of an answer that has begun uvicorn sees that it ends too early
            _log.exception("request failed with %s", type(error).__name__, exc_info=False)
            if not answer.started:
                await answer.refuse(scope, ApiError(500, UNKNOWN_ERROR, "Internal server error."))

    async def _serve(self, scope: Scope, receive: Receive, send: "_Answer", request_id: str) -> None:
        raw = scope.get("raw_path") or scope["path"].encode()
        by_signature = signed.ROUTE.fullmatch(raw)
        route = by_signature or ROUTE.fullmatch(raw)
        self._check_browser(scope, to_sandbox=route is not None and route["port"] != str(EGRESS_PORT).encode())
        client = scope.get("client")
        caller = Caller.at(str(client[0]) if client else None, self.refusals)
        if route is not None:
            find = self.proxy.signed_target if by_signature else self.proxy.target
            await self.proxy.serve(scope, receive, send, await find(scope, route, caller), request_id)
            return
        if scope["type"] == "websocket":
            raise ApiError(404, UNKNOWN_ERROR, "Not Found")
        self._check_key(scope, raw.decode("latin-1"), caller)
        await self.api(scope, await _whole(receive), send)

    def _check_browser(self, scope: Scope, *, to_sandbox: bool) -> None:
        if self.keys.required:
            return
        authority = (_values(scope, b"host") or [""])[0]
        if not self.guard.host_allowed(authority):
            raise ApiError(403, "SANDBOX::FORBIDDEN_HOST", "This Host is not served without an API key.")
        scheme = {"ws": "http", "wss": "https"}.get(str(scope["scheme"]), str(scope["scheme"]))
        if not to_sandbox and not self.guard.origin_allowed(_values(scope, b"origin"), authority, scheme):
            raise ApiError(403, "SANDBOX::FORBIDDEN_ORIGIN", "Pages of other origins may not use this server.")

    def _check_key(self, scope: Scope, path: str, caller: Caller) -> None:
        if not self.keys.required or _exempt(path):
            return
        key = ",".join(_values(scope, API_KEY_HEADER.encode()))  # Two keys count as no key.
        claim = self.keys.claim(key)
        if caller.proves(claim):
            scope.setdefault("state", {})[KEY_LABEL] = self.keys.label(key)
            return
        if not claim.presented:
            raise ApiError(401, "MISSING_API_KEY", f"The header {API_KEY_HEADER.upper()} is required.")
        raise ApiError(401, "INVALID_API_KEY", "The API key is not valid.")


def _exempt(path: str) -> bool:
    return any(path == name or path.startswith(f"{name}/") for name in _OPEN)


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip(" \t") for key, value in scope["headers"] if key.lower() == name]


def _request_id(scope: Scope) -> str:
    given = _values(scope, b"x-request-id")
    if given and _REQUEST_ID.fullmatch(given[0]):
        return given[0]
    return secrets.token_hex(16)


async def _whole(receive: Receive) -> Receive:
    """Read the body and return a `receive` that gives it at once, and then the later messages."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await read_body(receive, MAX_BODY)
    except TimeoutError:
        raise ApiError(408, UNKNOWN_ERROR, "The request body did not arrive in time.") from None
    if body is None:
        raise ApiError(413, UNKNOWN_ERROR, f"The request body is over {MAX_BODY} bytes.")
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


class _Answer:
    """A `send` that adds the request id and records whether anything was sent."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id.encode("latin-1")
        self.started = False
        self.finished = False

    async def __call__(self, message: Message) -> None:
        if message["type"] in ("http.response.start", "websocket.accept", "websocket.http.response.start"):
            self.started = True
            headers = [(name, value) for name, value in message.get("headers") or [] if name.lower() != b"x-request-id"]
            message = {**message, "headers": [*headers, (b"x-request-id", self._request_id)]}
        await self._send(message)
        self.finished |= message["type"] == "http.response.body" and not message.get("more_body")

    async def refuse(self, scope: Scope, error: ApiError) -> None:
        """Send an error."""
        if scope["type"] == "websocket":
            await refuse_websocket(self, 1013 if error.status == 429 else 1011 if error.status >= 500 else 1008)
            return
        body = json.dumps(error.body()).encode()
        headers = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
        headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self({"type": "http.response.start", "status": error.status, "headers": headers})
        await self({"type": "http.response.body", "body": body})
