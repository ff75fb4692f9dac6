"""The kinds of records that each component may write. auditd enforces this, and `verify` checks it.

Pure.

- auditd names the producer by the channel of the record. The record cannot name it.
- auditd refuses other kinds, so a compromised component cannot write the records of another one.
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
    HOSTD: frozenset({"alarm", "drop", "image.fetch", "image.add", "image.alias", "image.remove", "volume.remove"}),
    SERVE: frozenset(
        {
            *("lifecycle.create", "lifecycle.create_failed", "lifecycle.remove", "lifecycle.policies"),
            *("lifecycle.claim", "lifecycle.pool", "lifecycle.signed_route"),
            *("lifecycle.pause", "lifecycle.resume"),
            *("lifecycle.snapshot", "lifecycle.snapshot_failed", "lifecycle.snapshot_delete"),
            *("gateway.policy", "gateway.dropped", "gateway.restored"),
            *("vault.bind", "vault.revoke", "alarm"),
        }
    ),
    VAULT: frozenset(
        {
            *("vault.put", "vault.rotate", "vault.delete", "vault.open", "vault.regrant", "vault.close"),
            *("vault.limit", "vault.unlimit"),
            *("vault.freeze", "vault.unfreeze", "vault.revoke_all", "vault.reset", "vault.refer", "vault.keep"),
            *("vault.intermediate", "vault.rekey", "secret.release", "gap"),
        }
    ),
    GATEWAY: frozenset(
        {
            *("dns", "flow", "connect", "request", "ingress", "secret.use", "gateway.configure", "gateway.guard"),
            *("gateway.pause", "gateway.resume", "gap"),
        }
    ),
}
"""Kinds by producer. A producer's `gap` has the number of its own lost notes."""

WRITABLE: Final = frozenset[str]().union(*(kinds for producer, kinds in KINDS.items() if producer != AUDITD))
"""Kinds that some producer may send to auditd."""


def misplacement(record: Mapping[str, Any], control: str) -> str | None:
    """Return why auditd cannot have accepted `record` from its producer into its chain; None if it can.

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
