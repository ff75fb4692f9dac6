"""The egress part of a row, read so that it can always be enforced.

The release that wrote a row admitted it. Another release may have to enforce it. A part that this release cannot read
is left out with a reason and never guessed: a network policy becomes deny-all, a binding gets no secret.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lifecycle.egress.credential_vault import CredentialVault
from lifecycle.sandboxes.registry import Sandbox
from policy.api import ApiPolicy, ApiPolicyError, parse_network_policy
from policy.bindings import ApiBinding, parse_binding
from policy.compile import Dropped, Part
from vault.grants import MAX_GRANTS, Grant

_MALFORMED = (ApiPolicyError, AttributeError, KeyError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Stored:
    """The readable parts of a row, and the names of the others.

    Args:
        vault: without the bindings that cannot be read; None if there is no vault or no readable one.
        dropped: the parts that cannot be read.
    """

    network_policy: ApiPolicy | None
    vault: CredentialVault | None
    dropped: tuple[Dropped, ...] = ()

    @property
    def bindings(self) -> tuple[ApiBinding, ...]:
        """Return the readable bindings, to compile them."""
        return () if self.vault is None else self.vault.compiled_bindings()


def stored(row: Sandbox) -> Stored:
    """Read a row. This function does not raise."""
    policy, refused = _network_policy(row.network_policy)
    vault, unread = (None, []) if row.vault is None else _vault(row.vault)
    return Stored(policy, vault, (*refused, *unread))


def secrets(row: Sandbox) -> list[str] | None:
    """Return vaultd's names of the values of a row's vault; None if they cannot be read."""
    if row.vault is None:
        return []
    vault, _ = _vault(row.vault)
    return None if vault is None else vault.secrets()


def places(row: Sandbox) -> list[Grant] | None:
    """Return the hosts where a row's vault can use its values, in force or not; None if a part cannot be read."""
    read = stored(row)
    if any(item.part in (Part.VAULT, Part.BINDING) for item in read.dropped):
        return None
    found = [] if read.vault is None else sorted(read.vault.places(), key=lambda place: (place.secret, place.host))
    return None if len(found) > MAX_GRANTS else found


def _network_policy(document: Mapping[str, Any] | None) -> tuple[ApiPolicy | None, list[Dropped]]:
    if document is None:
        return None, []
    try:
        return parse_network_policy(document), []
    except ApiPolicyError as error:
        return ApiPolicy(), [Dropped(Part.NETWORK_POLICY, "", str(error))]


def _vault(document: Mapping[str, Any]) -> tuple[CredentialVault | None, list[Dropped]]:
    try:
        credentials = {str(name): int(revision) for name, revision in document["credentials"].items()}
        revision, items = int(document["revision"]), list(document["bindings"])
    except _MALFORMED:
        return None, [Dropped(Part.VAULT, "", "the stored credential vault cannot be read")]
    bindings: list[ApiBinding] = []
    unread: list[Dropped] = []
    for item in items:
        try:
            binding = parse_binding(item)
            CredentialVault(
                revision, credentials, (binding,)
            ).compiled_bindings()  # It refers to an existing credential.
        except _MALFORMED as error:
            name = str(item.get("name", ""))[:256] if isinstance(item, Mapping) else ""
            reason = str(error) if isinstance(error, ApiPolicyError) else "the stored binding cannot be read"
            unread.append(Dropped(Part.BINDING, name, reason))
        else:
            bindings.append(binding)
    return CredentialVault(revision, credentials, tuple(bindings)), unread
