"""What vaultd answers on its socket, and to whom.

- Who asks is told by the kernel: uid 0 may do everything, the other allowed uids (serve) only what concerns sandboxes.
- Whatever gives more than before (a secret stored, replaced or granted) is on record first, or does not happen.
  Whatever takes away happens even without a log, and is recorded when that is possible.
- A check made before a record was awaited is made again after it.
- No error message or record holds a value.
"""

import os
import socket
import stat
from collections.abc import Callable, Mapping
from typing import Any

import wire
from audit.client import AuditUnavailable
from vault.authority import ANY
from vault.channels import Audit, Channels
from vault.custody import Custody, CustodyError, SandboxState
from vault.grants import MAX_GRANTS, Grant, GrantError, SecretBinding, host_pattern, inline_name, secret_name
from vault.keyring import MasterKeyError
from vault.secret import Secret
from vault.store import StoreError, check_value

MAX_PATTERNS = 1024
_SANDBOX_OPS = frozenset({"ping", "has", "open_sandbox", "regrant", "narrow", "close_sandbox"})


class Operations:
    """Answers on vaultd's socket."""

    def __init__(
        self,
        custody: Custody,
        channels: Channels,
        audit: Audit,
        rekey: Callable[[], None],
        administrators: frozenset[int] = frozenset({0}),
    ) -> None:
        self._custody = custody
        self._store = custody.store
        self._channels = channels
        self._audit = audit
        self._rekey = rekey
        self._administrators = administrators

    async def handle(self, connection: wire.Client, op: str, parameters: wire.Message, fds: list[int]) -> wire.Message:
        """Answer one request; see `wire.Handler`."""
        try:
            if op not in _SANDBOX_OPS and connection.peer.uid not in self._administrators:
                raise wire.RequestError(wire.Code.FORBIDDEN, f"uid {connection.peer.uid} may not do this")
            if op == "attach":
                return await self._attach(parameters, fds)
            return await self._answer(op, parameters, f"uid:{connection.peer.uid}")
        except GrantError as error:
            raise wire.RequestError(wire.Code.INVALID, str(error)) from None
        except (StoreError, CustodyError) as error:
            raise wire.RequestError(error.code, str(error)) from None
        except MasterKeyError as error:
            raise wire.RequestError(wire.Code.MASTER_KEY, str(error)) from None
        except AuditUnavailable:
            raise wire.RequestError(wire.Code.AUDIT_UNAVAILABLE, "the audit log did not accept the record") from None
        except OSError as error:
            raise wire.RequestError(wire.Code.STORAGE, f"the vault's files: {error.strerror}") from None
        finally:
            wire.frames.close_all(fds)

    async def _answer(self, op: str, parameters: wire.Message, actor: str) -> wire.Message:
        match op:
            case "ping":
                return {}
            case "has":
                return {"exists": self._has(secret_name(_take(parameters, "name")["name"]))}
            case "list":
                _take(parameters)
                return {"secrets": [info.to_json() for info in self._store.list_infos()]}
            case "put":
                return await self._put(parameters, actor)
            case "rotate":
                return await self._rotate(parameters, actor)
            case "delete":
                return await self._delete(parameters, actor)
            case "rekey":
                _take(parameters)
                await self._audit.accept("vault.rekey", "info", durable=True, actor=actor)
                self._rekey()
                return {}
            case "open_sandbox":
                return await self._open(parameters, actor)
            case "regrant":
                return await self._regrant(parameters, actor)
            case "narrow":
                return await self._narrow(parameters, actor)
            case "close_sandbox":
                return await self._close(parameters, actor)
            case _:
                raise wire.RequestError(wire.Code.UNKNOWN_OP, "no such operation")

    async def _put(self, parameters: wire.Message, actor: str) -> wire.Message:
        parts = dict(parameters)
        name, value = secret_name(parts.pop("name", None)), _secret(parts.pop("value", None))
        binding = SecretBinding.from_json(parts)
        check_value(value)
        if self._has(name):
            raise wire.RequestError(wire.Code.EXISTS, "a secret already has this name; rotate or delete it")
        await self._audit.accept(
            "vault.put", "info", durable=True, secret=name, hosts=sorted(binding.hosts), actor=actor
        )
        return {"version": self._store.put(name, value, binding).version}

    async def _rotate(self, parameters: wire.Message, actor: str) -> wire.Message:
        parts = _take(parameters, "name", "value")
        name, value = secret_name(parts["name"]), _secret(parts["value"])
        self._store.info(name)
        check_value(value)
        await self._audit.accept("vault.rotate", "info", durable=True, secret=name, actor=actor)
        info = self._store.rotate(name, value)
        await self._channels.revoke_everywhere(name, self._custody.users(name))
        return {"version": info.version}

    async def _delete(self, parameters: wire.Message, actor: str) -> wire.Message:
        name = secret_name(_take(parameters, "name")["name"])
        self._store.delete(name)
        self._audit.note("vault.delete", "info", secret=name, actor=actor)
        await self._channels.revoke_everywhere(name, self._custody.users(name))
        return {}

    async def _open(self, parameters: wire.Message, actor: str) -> wire.Message:
        parts = _take(parameters, "sandbox", "lineage", optional=("grants", "inline", "bounds", "names"))
        planned = self._custody.plan(
            _text(parts["sandbox"]),
            _text(parts["lineage"]),
            _grants(parts["grants"]),
            _inline(parts["inline"]) or {},
            _bounds(parts["bounds"]),
            _patterns(parts["names"]),
        )
        await self._audit.accept("vault.open", "info", **_about(planned), lineage=planned.lineage, actor=actor)
        return {"root_pem": self._custody.open(planned)}

    async def _regrant(self, parameters: wire.Message, actor: str) -> wire.Message:
        parts = _take(parameters, "sandbox", "grants", optional=("inline", "keep", "bounds", "names"))
        sandbox, grants, inline = _text(parts["sandbox"]), _grants(parts["grants"]), _inline(parts["inline"])
        keep, bounds, names = _names(parts["keep"]), _bounds(parts["bounds"]), _patterns(parts["names"])
        planned = self._custody.replan(sandbox, grants, inline, keep, bounds, names)
        if self._custody.narrows(planned):
            self._audit.note("vault.regrant", "info", **_about(planned), actor=actor)
        else:
            await self._audit.accept("vault.regrant", "info", durable=True, **_about(planned), actor=actor)
            planned = self._custody.replan(sandbox, grants, inline, keep, bounds, names)
        return await self._replace(planned)

    async def _narrow(self, parameters: wire.Message, actor: str) -> wire.Message:
        parts = _take(parameters, "sandbox", "grants", optional=("keep", "bounds"))
        planned = self._custody.narrowed(
            _text(parts["sandbox"]), _grants(parts["grants"]), _names(parts["keep"]), _bounds(parts["bounds"])
        )
        self._audit.note("vault.regrant", "info", **_about(planned), actor=actor)
        return await self._replace(planned)

    async def _replace(self, planned: SandboxState) -> wire.Message:
        sandbox = planned.sandbox
        try:
            ended = self._custody.regrant(planned)
        except OSError:
            await self._channels.revoke(sandbox, None)
            raise
        await self._channels.revoke(sandbox, ended)
        return {}

    async def _close(self, parameters: wire.Message, actor: str) -> wire.Message:
        sandbox = _text(_take(parameters, "sandbox")["sandbox"])
        known = self._custody.known(sandbox)
        try:
            self._custody.close(sandbox)
        finally:
            await self._channels.detach(sandbox)
        if known:
            self._audit.note("vault.close", "info", sandbox=sandbox, actor=actor)
        return {}

    async def _attach(self, parameters: wire.Message, fds: list[int]) -> wire.Message:
        parts = _take(parameters, "sandbox", "generation")
        generation = parts["generation"]
        if not isinstance(generation, int) or isinstance(generation, bool) or not 1 <= generation < 2**31:
            raise wire.RequestError(wire.Code.INVALID, "a generation is a number from 1")
        if len(fds) != 1 or not stat.S_ISSOCK(os.fstat(fds[0]).st_mode):
            raise wire.RequestError(wire.Code.INVALID, "attach comes with one socket")
        sock = socket.socket(fileno=fds.pop())
        if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
            sock.close()
            raise wire.RequestError(wire.Code.INVALID, "attach comes with one unix stream socket")
        await self._channels.attach(_text(parts["sandbox"]), generation, sock)
        return {}

    def _has(self, name: str) -> bool:
        try:
            self._store.info(name)
        except StoreError as error:
            return error.code != wire.Code.UNKNOWN_SECRET
        return True


def _take(parameters: wire.Message, *required: str, optional: tuple[str, ...] = ()) -> dict[str, Any]:
    missing = [key for key in required if key not in parameters]
    if missing or not set(parameters) <= {*required, *optional}:
        raise wire.RequestError(wire.Code.INVALID, f"parameters are {', '.join((*required, *optional)) or 'none'}")
    return {key: parameters.get(key) for key in (*required, *optional)}


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > 256:
        raise wire.RequestError(wire.Code.INVALID, "a name is a text")
    return value


def _secret(value: object) -> Secret:
    if not isinstance(value, str):
        raise wire.RequestError(wire.Code.INVALID, "a value is a text")
    return Secret(value)


def _grants(items: object) -> list[Grant]:
    if items is None:
        return []
    if not isinstance(items, list) or len(items) > MAX_GRANTS:
        raise wire.RequestError(wire.Code.INVALID, f"grants are a list of at most {MAX_GRANTS}")
    return [Grant.from_json(item) for item in items]


def _bounds(items: object) -> list[Grant] | None:
    return None if items is None else _grants(items)


def _patterns(items: object) -> list[str] | None:
    if items is None:
        return None
    if not isinstance(items, list) or len(items) > MAX_PATTERNS:
        raise wire.RequestError(wire.Code.INVALID, f"names to sign for are a list of at most {MAX_PATTERNS}")
    return [ANY if item == ANY else host_pattern(item) for item in items]


def _inline(items: object) -> dict[str, Secret] | None:
    if items is None:
        return None
    if not isinstance(items, Mapping) or len(items) > MAX_GRANTS:
        raise wire.RequestError(wire.Code.INVALID, f"inline secrets are an object of at most {MAX_GRANTS}")
    return {inline_name(name): _secret(value) for name, value in items.items()}


def _names(items: object) -> list[str] | None:
    if items is None:
        return None
    if not isinstance(items, list) or len(items) > MAX_GRANTS:
        raise wire.RequestError(wire.Code.INVALID, f"kept names are a list of at most {MAX_GRANTS}")
    return [inline_name(name) for name in items]


def _about(state: SandboxState) -> dict[str, Any]:
    return {
        "sandbox": state.sandbox,
        "secrets": sorted({grant.secret for grant in state.grants}),
        "hosts": sorted({grant.host for grant in state.grants}),
        "count": len(state.grants),
    }
