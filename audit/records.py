"""The fields of an audit record, and their canonical bytes.

Pure: no IO, no clock, no randomness.

- The field names are a closed list, each with a type and a limit. An unknown name or a wrong type is an error of the
  caller (`RecordError`). A *value* from traffic never raises: it is truncated and escaped.
- A text above its limit is truncated. `<field>_sha256` and `<field>_length` then describe the whole text.
- A path has no query.
- `bounded` is idempotent. The client applies it to keep frames small, and auditd applies it because it trusts no
  client. auditd applies `escape` once, when a record becomes a line.
- A written value has no control, bidi, zero-width, private or surrogate character: these become `\\u{hex}`. A
  literal `\\u{` becomes `\\u{5c}u{`, so the form is unambiguous and `unescape` gives back the exact value.
- Canonical bytes are ASCII JSON with sorted keys, no spaces, no floats, integers within 2**53.

Records contain no secrets: callers pass a secret's name, never its value.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from audit.producers import WRITABLE

type Value = str | int | bool | list[str] | dict[str, Any]
type Fields = dict[str, Value]

MAX_INTEGER = 2**53 - 1
MAX_ITEMS = 64


class RecordError(ValueError):
    """A kind, decision or field does not exist, or a field has a value of the wrong type."""


class Decision(StrEnum):
    """The decision of a record. `OBSERVE`: allowed only because the policy is in mode observe."""

    ALLOW = "allow"
    DENY = "deny"
    OBSERVE = "observe"
    INFO = "info"


_DECISIONS: Mapping[str, str] = {decision.value: decision.value for decision in Decision}

TEXTS: Mapping[str, int] = {
    # the decision and its rule
    "rule": 256,
    "reason": 512,
    "observed": 256,  # the rule that would have denied, in mode observe
    "entry": 255,  # of the operator's always_deny or always_allow
    "policy": 128,  # digest
    "policy_name": 128,
    "mode": 32,
    "treatment": 32,
    "engine": 32,
    "action": 64,
    "actor": 128,
    # sandbox and request
    "sandbox": 64,  # from producers of the control plane; for a sandbox's own channel auditd adds it
    "lineage": 64,
    "peer": 128,
    "flow": 64,  # the worker's id of a connection
    "request_id": 64,  # the gateway's id of a request
    "client_request_id": 128,  # the client's id of a request: untrusted
    "client_trace": 128,
    # the destination; `gateway.described` defines these names
    "host": 255,
    "asked_host": 255,
    "peer_name": 255,
    "scheme": 16,
    "method": 32,
    "path": 2048,
    "database": 63,
    "user": 63,
    "destination": 64,  # of the packet
    "address": 64,  # the dialled one
    "sni": 255,
    "alpn": 64,
    "protocol": 32,
    "qtype": 16,
    "rcode": 16,
    "user_agent": 256,
    "fingerprint": 128,
    "tls_version": 16,
    # secrets: names only
    "binding": 128,
    "secret": 256,
    "injection": 32,
    # control plane
    "name": 255,
    "runtime": 32,
    "image": 255,
    "pool": 264,
    "alias": 255,
    "source": 512,
    "snapshot": 64,
    "state": 64,
    "code": 64,
    "error": 512,
    "digest": 128,
    "detail": 512,
    "volume": 253,
    "torn": 2048,  # bytes that auditd truncated at the end of a log after a crash
}
INTEGERS = frozenset(
    {
        *("port", "status", "bytes_up", "bytes_down", "count", "duration_ms", "ttl", "lease_seconds", "revision"),
        *(
            "pid",
            "slot",
            "exit_code",
            "cpu_nanos",
            "memory_bytes",
            "disk_bytes",
            "requests",
            "attempt",
            "target_generation",
            "expires",
        ),
    }
)
BOOLEANS = frozenset({"plaintext", "oom", "truncated", "durable_lost", "websocket"})
LISTS: Mapping[str, int] = {
    "addresses": 64,
    "secrets": 256,
    "hosts": 255,
    "injections": 128,
    "stripped": 72,
    "forwarded": 72,
    "protocols": 32,
    "volumes": 512,
}

_COMPANION = re.compile(r"([a-z_]+)_(sha256|length)")
_HEX = re.compile(r"[0-9a-f]{64}")


def check_kind(kind: str) -> str:
    """Return `kind` if a producer may write it (see `audit.producers`).

    Raises:
        RecordError: the kind does not exist.
    """
    if kind in WRITABLE:
        return kind
    raise RecordError(f"unknown record kind {kind[:64]!r}")


def bounded(fields: Mapping[str, object]) -> Fields:
    """Check names and types of `fields`, and truncate their values. Fields with the value None are omitted.

    Raises:
        RecordError: a name is unknown, or a value has the wrong type.
    """
    out: Fields = {}
    for name, value in fields.items():
        if type(value) is str and len(value) <= TEXTS.get(name, -1) and name != "path":
            out[name] = value
            continue
        if type(value) is int and -MAX_INTEGER <= value <= MAX_INTEGER and name in INTEGERS:
            out[name] = value
            continue
        if value is None:
            continue
        if isinstance(value, bytes):
            value = value.decode("utf-8", "surrogateescape")
        if name in TEXTS and isinstance(value, str):
            _text(out, name, str(value), TEXTS[name])
        elif name in INTEGERS and isinstance(value, int) and not isinstance(value, bool):
            out[name] = _integer(value)
        elif name in BOOLEANS and isinstance(value, bool):
            out[name] = value
        elif name in LISTS and isinstance(value, list | tuple):
            _list(out, name, value)
        elif not _companion(out, name, value):
            raise RecordError(f"field {name[:64]!r} does not exist or cannot hold a {type(value).__name__}")
    return out


def record(kind: str, decision: str, **fields: object) -> Fields:
    """Return the record that a producer sends to auditd: kind, decision, and bounded fields.

    Raises:
        RecordError: see `check_kind` and `bounded`, or `decision` is no `Decision`.
    """
    return {"kind": check_kind(kind), "decision": check_decision(decision), **bounded(fields)}


def check_decision(decision: str) -> str:
    """Return `decision` as a plain text.

    Raises:
        RecordError: it is not a `Decision`.
    """
    try:
        return _DECISIONS[decision]
    except (KeyError, TypeError):
        raise RecordError(f"unknown decision {str(decision)[:64]!r}") from None


def _text(out: Fields, name: str, value: str, limit: int) -> None:
    if name == "path" and ("?" in value or "#" in value):
        value = re.split("[?#]", value, maxsplit=1)[0]
    if len(value) > limit:
        out[f"{name}_sha256"] = hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()
        out[f"{name}_length"] = len(value)
        value = value[:limit]
    out[name] = value


def _integer(value: int) -> int:
    return max(-MAX_INTEGER, min(MAX_INTEGER, value))


def _list(out: Fields, name: str, value: list[object] | tuple[object, ...]) -> None:
    items: list[str] = []
    for item in value[:MAX_ITEMS]:
        if not isinstance(item, str):
            raise RecordError(f"field {name!r} is a list of texts, and cannot hold a {type(item).__name__}")
        items.append(str(item)[: LISTS[name]])
    out[name] = items
    if len(value) > MAX_ITEMS:
        out[f"{name}_length"] = len(value)


def _companion(out: Fields, name: str, value: object) -> bool:
    """Copy `<field>_sha256` and `<field>_length`, which `bounded` made in the client."""
    match = _COMPANION.fullmatch(name)
    if match is None or not (match[1] in TEXTS or (match[1] in LISTS and match[2] == "length")):
        return False
    if match[2] == "sha256" and isinstance(value, str) and _HEX.fullmatch(value):
        out[name] = value
        return True
    if match[2] == "length" and isinstance(value, int) and not isinstance(value, bool):
        out[name] = _integer(value)
        return True
    return False


_INERT = re.compile(r"[ -\[\]-~]*")  # printable ASCII without the backslash
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0") | {chr(c) for c in range(0xFE00, 0xFE10)}
_ESCAPED = re.compile(r"\\u\{([0-9a-f]{1,6})\}")


def escape(value: str) -> str:
    """Return `value` with an escape for every character that is invisible or could control a terminal."""
    if _INERT.fullmatch(value):
        return value
    out: list[str] = []
    for index, char in enumerate(value):
        if char == "\\":
            out.append(r"\u{5c}" if value.startswith("u{", index + 1) else char)
        elif unicodedata.category(char) in _UNSAFE or char in _INVISIBLE or 0xE0100 <= ord(char) <= 0xE01EF:
            out.append(f"\\u{{{ord(char):x}}}")
        else:
            out.append(char)
    return "".join(out)


def unescape(value: str) -> str:
    """Return the original value of an escaped text."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), value)


def escaped(fields: Mapping[str, Value]) -> Fields:
    """Return `fields` with every text escaped."""
    out: Fields = {}
    for name, value in fields.items():
        if isinstance(value, str):
            out[name] = escape(value)
        elif isinstance(value, list):
            out[name] = [escape(item) for item in value]
        else:
            out[name] = value
    return out


_encode = json.JSONEncoder(ensure_ascii=True, allow_nan=False, sort_keys=True, separators=(",", ":")).encode


def canonical(value: Mapping[str, Any]) -> bytes:
    """Return the canonical JSON of `value`."""
    return _encode(value).encode("ascii")
