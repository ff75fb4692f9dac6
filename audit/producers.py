"""Which component writes which kinds of record: the closed set that auditd enforces and `verify` judges.

Pure.

- A producer is named by auditd, from the channel a record arrives on, never by the record.
- A kind that a producer does not write is refused: a component that is taken over cannot write another one's records.
- `gateway` writes into the chain of its sandbox only, all others into the control chain; auditd writes into any.
"""

from collections.abc import Mapping
from typing import Any, Final

AUDITD: Final = "auditd"
GATEWAY: Final = "gateway"
HOSTD: Final = "root"
SERVE: Final = "serve"
VAULT: Final = "vault"

KINDS: Final[Mapping[str, frozenset[str]]] = {
    AUDITD: frozenset({"checkpoint", "gap"}),
    HOSTD: frozenset({"alarm", "drop"}),
    SERVE: frozenset(
        {
            *("lifecycle.create", "lifecycle.create_failed", "lifecycle.remove", "lifecycle.policies"),
            *("lifecycle.pause", "lifecycle.resume", "gateway.policy", "gateway.dropped", "gateway.restored"),
            *("vault.bind", "vault.revoke", "alarm"),
        }
    ),
    VAULT: frozenset(
        {
            *("vault.put", "vault.rotate", "vault.delete", "vault.open", "vault.regrant", "vault.close"),
            *("vault.intermediate", "vault.rekey", "secret.release", "gap"),
        }
    ),
    GATEWAY: frozenset(
        {
            *("dns", "flow", "connect", "request", "ingress", "secret.use", "gateway.configure", "gateway.guard"),
            "gap",
        }
    ),
}
"""Kinds by producer. `gap` of a producer says how many of its own notes it lost."""

WRITABLE: Final = frozenset[str]().union(*(kinds for producer, kinds in KINDS.items() if producer != AUDITD))
"""Kinds that some producer may send to auditd."""


def misplaced(record: Mapping[str, Any], control: str) -> str | None:
    """Say why auditd cannot have accepted `record` from its producer into its chain; None if it can have.

    Args:
        control: the name of the control chain.
    """
    producer, kind, chain = record["producer"], record["kind"], record["chain"]
    kinds = KINDS.get(producer)
    if kinds is None:
        return f"there is no producer {producer[:64]!r}"
    if kind not in kinds:
        return f"{producer} does not write records of kind {kind[:64]!r}"
    if producer != AUDITD and (producer == GATEWAY) == (chain == control):
        return f"{producer} does not write into chain {chain}"
    return None
