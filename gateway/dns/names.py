"""Limits how much data a sandbox can encode in the names that its gateway resolves: the policy's `dns` block.

- One `NameBudget` per worker covers every source of a name: DNS over UDP and TCP, the server name of a TLS flow, the
  Host of an HTTP flow. The other names of a flow (absolute target, `:authority`, WebSocket) must equal these.
- A name that policy contains literally can encode no data, so only the rate limits it. Below a wildcard, or where a
  default allows, also the length and number of labels, their entropy and the distinct names per hour are limited.
- A counted name is not counted again within its hour, also not from another source.
- A name with a placeholder of the sandbox is refused.
- The number of distinct names is in the sandbox's ledger. Of the names of a former worker only the number is known. For
  the rest of their hour it counts against every zone.

Times are arguments, in monotonic seconds. The module does not decide whether a name is allowed.
"""

import math
from collections import Counter

from gateway.ledger import Ledger
from gateway.placeholders import NONE, RULE, Placeholders
from policy.compiled import CompiledPolicy
from policy.decision import Deny
from policy.rules import Action, DnsSettings

PATIENCE = 2.0
"""The longest wait of a name above the rate, in seconds. DNS clients repeat a query after five seconds."""
RATE = "dns.query_rate"
_ENTROPY_OVER = 24
_WINDOW_SECONDS = 3600.0
_MAX_ZONES = 1024
_MAX_NAMES = 50_000


class NameBudget:
    """The budget of DNS names of one sandbox. `placeholders` are those of the sandbox; the worker sets them."""

    def __init__(self, ledger: Ledger) -> None:
        self.placeholders: Placeholders = NONE
        self._ledger = ledger
        self._former, self._former_since = ledger.names, ledger.names_since
        self._tokens: float | None = None
        self._refilled = 0.0
        self._zones: dict[str, tuple[float, set[str]]] = {}
        self._held = 0

    def take(self, settings: DnsSettings, now: float, patience: float = PATIENCE) -> float | None:
        """Take one token of the rate. Return the seconds to wait for it; None if these exceed `patience`."""
        burst = float(max(1, settings.query_burst))
        if self._tokens is None:
            self._tokens = burst
        else:
            self._tokens = min(burst, self._tokens + max(0.0, now - self._refilled) * settings.query_rate)
        self._refilled = now
        wait = max(0.0, (1 - self._tokens) / settings.query_rate)
        if wait > patience:
            return None
        self._tokens -= 1
        return wait

    def admit(self, policy: CompiledPolicy, host: str, now: float) -> Deny | None:
        """Count a canonical name that policy allows. Return a denial if it exceeds a bound or has a placeholder,
        otherwise None.
        """
        if (secret := self.placeholders.in_name(host)) is not None:
            return Deny(RULE, f"The name has the placeholder of secret {secret}.")
        zone = _zone(host, policy)
        if zone == host:
            return None
        settings = policy.dns
        free = host.removesuffix(f".{zone}")
        labels = free.split(".")
        if len(labels) > settings.max_labels:
            return Deny("dns.max_labels", f"This name has more than {settings.max_labels} labels in front of {zone}.")
        if len(free) > settings.max_name:
            return Deny("dns.max_name", f"This name has more than {settings.max_name} characters in front of {zone}.")
        for label in labels:
            if len(label) > settings.max_label:
                return Deny("dns.max_label", f"A label of this name is longer than {settings.max_label} characters.")
            if any(len(part) > _ENTROPY_OVER and 100 * entropy(part) > settings.entropy for part in label.split("-")):
                return Deny("dns.entropy", "A label of this name looks like data.")
        if not self._count(zone, host, settings, now):
            return Deny("dns.unique_names", f"This sandbox used too many distinct names below {zone} in an hour.")
        return None

    def _count(self, zone: str, host: str, settings: DnsSettings, now: float) -> bool:
        """Count `host` among the names below `zone`. False if the zone has too many names in this hour.

        A count is dropped only after its hour, so many zones cannot displace the count of one zone.
        """
        if len(self._zones) >= _MAX_ZONES or self._held >= _MAX_NAMES:
            self._expire(now)
        if zone not in self._zones and len(self._zones) >= _MAX_ZONES:
            return False
        since, seen = self._zones.get(zone, (now, set()))
        if now - since >= _WINDOW_SECONDS:
            self._held -= len(seen)
            since, seen = now, set()
        self._zones[zone] = (since, seen)
        if host in seen:
            return True
        former = self._former if now - self._former_since < _WINDOW_SECONDS else 0
        if len(seen) + former >= settings.unique_names or self._held >= _MAX_NAMES:
            return False
        self._ledger.name(now, _WINDOW_SECONDS)
        seen.add(host)
        self._held += 1
        return True

    def _expire(self, now: float) -> None:
        for zone, (since, seen) in list(self._zones.items()):
            if now - since >= _WINDOW_SECONDS:
                self._held -= len(seen)
                del self._zones[zone]


def over_bounds(policy: CompiledPolicy, host: str) -> Deny | None:
    """Return the denial that a canonical name gets as the first name of a sandbox, None if it gets none."""
    return NameBudget(Ledger.fresh()).admit(policy, host, 0.0)


def entropy(text: str) -> float:
    """Return the Shannon entropy of the characters of `text`, in bits per character."""
    size = len(text)
    return -sum(count / size * math.log2(count / size) for count in Counter(text).values())


def _zone(host: str, policy: CompiledPolicy) -> str:
    """Return the part of an allowed host that policy contains: the host, a wildcard's suffix, or two labels."""
    patterns = [
        *policy.always_allow,
        *(
            pattern.text
            for rules in policy.lists
            for rule in rules.of_host(host)
            if rule.action is Action.ALLOW
            for pattern in rule.hosts
        ),
    ]
    if host in patterns:
        return host
    suffixes = [text[2:] for text in patterns if text.startswith("*.") and host.endswith(text[1:])]
    return max(suffixes, key=len) if suffixes else ".".join(host.split(".")[-2:])
