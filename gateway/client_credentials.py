"""Handles credentials that the client itself put into a request, before the gateway puts secrets into it.

    Translated, AllowRequest  ->  GuardedRequest(request, stripped, forwarded) | Deny

- A request with a credential in a refused slot is denied as a whole. Of a slot to strip, exactly the header, cookie or
  query pair is left out. All other bytes of the request remain.
- Slots that the secrets of this request own are left to `gateway.compose`, which removes what the client sent there. So
  are slots that contain a placeholder of this request.
- In mode observe a request that would be denied is sent as it is, without a secret.

Pure. No result contains a value or a query.
"""

from dataclasses import dataclass, replace

from gateway.translate import Translated
from policy.client_credentials import examine
from policy.decision import AllowRequest, Deny, refuse_credentials


@dataclass(frozen=True, slots=True)
class GuardedRequest:
    """A request without the client's credentials, but for those that policy permits.

    Attributes:
        allowed: the decision; another one than policy's if mode observe lets the request pass.
        stripped, forwarded: the slots of the client's credentials that were left out, and that remain.
    """

    translated: Translated
    allowed: AllowRequest
    stripped: tuple[str, ...] = ()
    forwarded: tuple[str, ...] = ()


def guard(translated: Translated, allowed: AllowRequest) -> GuardedRequest | Deny:
    """Handle the credentials of the client in one request as policy says."""
    handling = allowed.client_credentials
    if handling is None:
        return GuardedRequest(translated, allowed)
    facts = translated.facts
    found = examine(handling, allowed.owned, translated.headers, facts.query)
    if found.refused:
        judged = refuse_credentials(allowed, found.refused)
        return judged if isinstance(judged, Deny) else GuardedRequest(translated, judged)
    if found.stripped:
        target = translated.target
        if found.query != facts.query:
            path = target.partition(b"?")[0]
            target = path + b"?" + found.query.encode("ascii") if found.query else path
        translated = replace(translated, headers=found.headers, target=target)
    return GuardedRequest(translated, allowed, found.stripped, found.forwarded)
