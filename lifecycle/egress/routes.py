"""The egress API of port 18080, which the server answers and no sandbox sees: /healthz, /policy, /credential-vault.

- Every route but /healthz needs the sandbox's egress token (or an API key, which has more rights).
  `/credential-vault/_active` is refused for every caller.
- Errors are one line of plain text with the contract's wording. Success is compact JSON and a newline.
- A body is read completely, with limits on size and time, before any lock is taken.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import wire
from lifecycle.api.auth import Caller
from lifecycle.api.credentials import API_KEY_HEADER, EGRESS_HEADER, KeyRing, Purpose, Tokens
from lifecycle.api.errors import ApiError, no_database
from lifecycle.daemon_clients import Hostd, Unreachable
from lifecycle.egress.changes import Egress, EgressError, user_policy, vault_of
from lifecycle.egress.credential_vault import CredentialVault, VaultText
from lifecycle.sandboxes.registry import RegistryError, Sandbox, State
from policy.api import ApiPolicy, ApiPolicyError, decode_json, parse_delete, parse_network_policy, parse_patch
from policy.strict import StrictError, decode

MAX_BODY = 1024 * 1024
BODY_SECONDS = 15.0
_POLICY_METHODS = "GET, POST, PUT, PATCH, DELETE"
_VAULT_METHODS = "GET, POST, PATCH, DELETE"

type Body = Callable[[int], Awaitable[bytes | None]]
"""Read the request body up to a limit. Return None if it is longer."""


@dataclass(frozen=True, slots=True)
class EgressRequest:
    """A request that the proxy route found under /proxy/18080. `path` is raw, without query."""

    sandbox: Sandbox
    method: str
    path: str
    headers: Mapping[str, str] = field(repr=False)
    caller: Caller
    body: Body


@dataclass(frozen=True, slots=True)
class EgressAnswer:
    """An HTTP answer."""

    status: int
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)


def text(status: int, message: str, **headers: str) -> EgressAnswer:
    """Return an error or another line of plain text."""
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return EgressAnswer(status, f"{message}\n".encode(), headers={"X-Content-Type-Options": "nosniff", **fields})


def document(status: int, content: object) -> EgressAnswer:
    """Return a JSON document."""
    body = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
    return EgressAnswer(status, body, "application/json")


def policy_status(policy: ApiPolicy, *, reason: str | None = None, full: bool = False) -> dict[str, Any]:
    """Return the PolicyStatus document, keys in the contract's order."""
    status: dict[str, Any] = {"status": "ok", "mode": policy.status_mode(), "enforcementMode": "dns+nft"}
    if reason is not None:
        status["reason"] = reason
    if full:
        status["policy"] = policy.to_wire()
    return status


class EgressApi:
    """The egress APIs of one server."""

    def __init__(self, hostd: Hostd, egress: Egress, tokens: Tokens, keys: KeyRing) -> None:
        self._hostd = hostd
        self._egress = egress
        self._tokens = tokens
        self._keys = keys

    async def handle(self, request: EgressRequest) -> EgressAnswer:
        """Answer one request. It does not raise."""
        try:
            return await self._route(request)
        except VaultText as error:
            return text(error.status, error.text)
        except EgressError as error:
            return text(error.status, error.text)
        except RegistryError:
            refusal = no_database()
            return text(refusal.status, refusal.message, **refusal.headers)

    async def _route(self, request: EgressRequest) -> EgressAnswer:
        path = request.path or "/"
        if path == "/healthz":
            return await self._health(request.sandbox)
        if path == "/credential-vault/_active":
            return text(403, "forbidden") if request.method == "GET" else text(405, "method not allowed", Allow="GET")
        known = path in ("/policy", "/credential-vault") or path.startswith("/credential-vault/")
        if not known:
            return text(404, "404 page not found")
        token = request.headers.get(EGRESS_HEADER, "")
        try:
            authorised = request.caller.proves(
                self._tokens.claim(Purpose.EGRESS, request.sandbox.id, token),
                self._keys.claim(token),  # Older Go clients send the API key instead of the token.
                self._keys.claim(request.headers.get(API_KEY_HEADER, "")),
            )
        except ApiError as error:
            return text(error.status, error.message, **error.headers)
        if not authorised:
            return text(401, "unauthorized")
        if path == "/policy":
            return await self._policy(request)
        if path == "/credential-vault":
            return await self._vault(request)
        return self._vault_part(request, path.removeprefix("/credential-vault/"))

    async def _health(self, sandbox: Sandbox) -> EgressAnswer:
        if sandbox.state not in (State.RUNNING, State.PAUSED) or sandbox.reason == "GATEWAY_DOWN":
            return text(503, "mitmproxy not ready")
        try:
            await self._hostd.ping()
        except (Unreachable, wire.RemoteError):
            return text(503, "mitmproxy not ready")
        return EgressAnswer(200, b"ok")

    # -- /policy

    async def _policy(self, request: EgressRequest) -> EgressAnswer:
        sandbox = request.sandbox
        if request.method == "GET":
            reason = self._egress.shortfall.reason(sandbox.id)
            return document(200, policy_status(user_policy(sandbox), reason=reason, full=True))
        if request.method not in ("POST", "PUT", "PATCH", "DELETE"):
            return text(405, "method not allowed", Allow=_POLICY_METHODS)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await request.body(MAX_BODY)
        except TimeoutError:
            return text(400, "failed to read body: timed out")
        if body is None:
            return text(400, "failed to read body: request body too large")
        force = request.headers.get("opensandbox-egress-force", "") == "revoke"
        try:
            match request.method:
                case "POST" | "PUT":
                    return await self._replace(sandbox.id, body, force=force)
                case "PATCH":
                    return await self._patch(sandbox.id, body, force=force)
                case _:
                    return await self._delete(sandbox.id, body, force=force)
        except ApiPolicyError as error:
            return text(error.status, str(error))

    async def _replace(self, sandbox: str, body: bytes, *, force: bool) -> EgressAnswer:
        reset = not body.strip()
        policy = ApiPolicy() if reset else parse_network_policy(decode_json(body, "invalid policy: "))
        row = await self._egress.replace(sandbox, policy, force=force)
        if reset:
            return document(200, {"status": "ok", "mode": "deny_all", "reason": "policy reset to default deny-all"})
        return document(200, policy_status(user_policy(row)))

    async def _patch(self, sandbox: str, body: bytes, *, force: bool) -> EgressAnswer:
        if not body.strip():
            return text(400, "empty body")
        rules = parse_patch(decode_json(body, "invalid patch rules: "))
        row = await self._egress.patch(sandbox, rules, force=force)
        return document(200, policy_status(user_policy(row)))

    async def _delete(self, sandbox: str, body: bytes, *, force: bool) -> EgressAnswer:
        if not body.strip():
            return text(400, "empty body")
        targets = parse_delete(decode_json(body, "invalid delete targets: "))
        row, found = await self._egress.delete(sandbox, targets, force=force)
        reason = None if found else "no matching targets found"
        return document(200, policy_status(user_policy(row), reason=reason))

    # -- /credential-vault

    async def _vault(self, request: EgressRequest) -> EgressAnswer:
        sandbox = request.sandbox
        match request.method:
            case "GET":
                return document(200, _vault_of(sandbox).state())
            case "DELETE":
                await self._egress.delete_vault(sandbox.id)
                return EgressAnswer(204)
            case "POST" | "PATCH":
                if not sandbox.credential_proxy:
                    raise VaultText(412, "credential vault requires transparent mitmproxy")
                try:
                    async with asyncio.timeout(BODY_SECONDS):
                        body = await request.body(MAX_BODY)
                except TimeoutError:
                    raise VaultText(400, "failed to read body: timed out") from None
                if body is None:
                    raise VaultText(400, "failed to read body: request body too large")
                content = _json(body)
                if request.method == "POST":
                    return document(201, (await self._egress.create_vault(sandbox.id, content)).state())
                return document(200, (await self._egress.patch_vault(sandbox.id, content)).state())
            case _:
                return text(405, "method not allowed", Allow=_VAULT_METHODS)

    def _vault_part(self, request: EgressRequest, rest: str) -> EgressAnswer:
        kind, slash, name = rest.partition("/")
        if kind not in ("credentials", "bindings") or (slash and not name):
            return text(404, "not found")
        if request.method != "GET":
            return text(405, "method not allowed", Allow="GET")
        vault = _vault_of(request.sandbox)
        items = vault.shown_credentials() if kind == "credentials" else vault.shown_bindings()
        if not slash:
            return document(200, {"revision": vault.revision, kind: items})
        wanted = unquote(name).strip()
        for item in items:
            if item["name"] == wanted:
                return document(200, item)
        return text(404, f"{kind.removesuffix('s')} not found")


def _vault_of(sandbox: Sandbox) -> CredentialVault:
    vault = vault_of(sandbox)
    if vault is None:
        raise VaultText(404, "credential vault not found")
    return vault


def _json(body: bytes) -> object:
    """Parse JSON strictly.

    Raises:
        VaultText: it is refused. The text contains no value of the body.
    """
    try:
        return decode(body)
    except StrictError as error:
        raise VaultText(400, f"invalid JSON: {error}") from None
