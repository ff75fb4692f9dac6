"""Renders records: as one readable line, and in the Elastic Common Schema for a SIEM.

Pure. Values are escaped in the record and stay escaped, so a rendered line cannot control a terminal.
"""

from collections.abc import Mapping
from typing import Any, Final

_COMMON: Final = frozenset(
    {"ts", "chain", "seq", "prev", "hash", "kind", "decision", "producer", "sandbox", "generation", "signature", "key"}
)
_TARGET: Final = ("method", "scheme", "host", "port", "path")
_ECS: Final[Mapping[str, str]] = {
    "host": "destination.domain",
    "port": "destination.port",
    "destination": "destination.ip",
    "address": "destination.nat.ip",
    "peer_name": "tls.server.x509.alternative_names",
    "scheme": "url.scheme",
    "path": "url.path",
    "method": "http.request.method",
    "status": "http.response.status_code",
    "bytes_up": "source.bytes",
    "bytes_down": "destination.bytes",
    "rule": "rule.id",
    "policy_name": "rule.ruleset",
    "reason": "event.reason",
    "user_agent": "user_agent.original",
    "sni": "tls.client.server_name",
    "tls_version": "tls.version",
    "qtype": "dns.question.type",
    "rcode": "dns.response_code",
    "request_id": "http.request.id",
}
_ECS_CATEGORY: Final[Mapping[str, str]] = {
    "dns": "network",
    "flow": "network",
    "connect": "network",
    "drop": "network",
    "ingress": "network",
    "request": "web",
}
_ECS_OUTCOME: Final[Mapping[str, str]] = {"allow": "success", "observe": "success", "deny": "failure"}


def line(record: Mapping[str, Any]) -> str:
    """Return one line: time, decision, chain, kind, destination, and every other field as name=value."""
    who = record.get("sandbox") or record["producer"]
    parts = [str(record["ts"]), f"{record['decision'].upper():<7}", f"{who}#{record['seq']}", str(record["kind"])]
    target = _target(record)
    if target:
        parts.append(target)
    for name in sorted(record.keys() - _COMMON - set(_TARGET)):
        value = record[name]
        parts.append(f"{name}={_value(value)}")
    return " ".join(parts)


def _target(record: Mapping[str, Any]) -> str:
    method, scheme, host, port, path = (record.get(name) for name in _TARGET)
    place = _text(host or "")
    if port is not None:
        place += f":{port}"
    if scheme is not None:
        place = f"{scheme}://{place}"
    return " ".join(part for part in (_text(method or ""), f"{place}{_text(path or '')}") if part)


def _value(value: object) -> str:
    if isinstance(value, dict):
        return f"({len(value)})"
    if isinstance(value, list):
        return ",".join(_value(item) for item in value)
    return _text(value) or '""'


def _text(value: object) -> str:
    """Return an unambiguous text: quoted if it has blanks, with escaped quotes."""
    text = str(value).replace('"', r"\u{22}")
    return f'"{text}"' if " " in text else text


def ecs(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record as an ECS 8 event with dotted names. Fields that ECS does not have are below `sallyport.`."""
    kind = str(record["kind"])
    event: dict[str, Any] = {
        "@timestamp": record["ts"],
        "ecs.version": "8.11.0",
        "event.kind": "event",
        "event.dataset": "sallyport.audit",
        "event.action": kind,
        "event.category": [_ECS_CATEGORY.get(kind, "configuration")],
        "event.type": ["denied" if record["decision"] == "deny" else "allowed" if _permits(record) else "info"],
        "event.outcome": _ECS_OUTCOME.get(record["decision"], "unknown"),
        "event.sequence": record["seq"],
        "event.hash": record["hash"],
    }
    for name, value in record.items():
        if name in _ECS:
            event[_ECS[name]] = value
        elif name not in ("ts", "hash"):
            event[f"sallyport.{name}"] = value
    if kind == "dns" and "host" in record:
        event["dns.question.name"] = event.pop("destination.domain")
    return event


def _permits(record: Mapping[str, Any]) -> bool:
    return record["decision"] in ("allow", "observe")
