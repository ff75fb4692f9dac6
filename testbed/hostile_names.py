"""Names with false DNS records: about their own addresses, about other names, and different for each query.

A policy may allow each of them; their records must not permit access to anything else.
"""

from collections import Counter

from dnslib import CNAME, QTYPE, RR, A

from testbed.internet import ADDRESSES, API, ATTACKER, METADATA_ADDRESS, STATUS, UP_ADDRESS

DOMAIN = "bank.example"
PUBLIC = ADDRESSES[STATUS]
REFUSED = {
    "rebind": METADATA_ADDRESS,
    "loopback": "127.0.0.1",
    "this-host": "0.0.0.0",
    "private": "10.0.0.5",
    "shared": "100.64.0.1",
    "documentation": "192.0.2.1",
    "multicast": "224.0.0.1",
    "benchmark": "198.18.0.1",
    "broadcast": "255.255.255.255",
    "the-host": UP_ADDRESS,
}
"""Names with one address each, which no sandbox may reach."""
HOSTILE = tuple(
    f"{label}.{DOMAIN}"
    for label in (*REFUSED, "mixed", "flip", "alias-inside", "alias-attacker", "loop", "chain", "foreign", "dotted")
)


class HostileNames:
    """Answers for `HOSTILE`; counts the queries for each name."""

    def __init__(self) -> None:
        self._asked: Counter[str] = Counter()

    def records(self, name: str) -> list[RR] | None:
        """Return the answer section for `name` (lower case, no trailing dot), or None if it is not one of these."""
        label, dot, parent = name.partition(".")
        if dot and parent == "chain.bank.example":
            depth = int(label)
            return [_alias(name, f"{depth + 1}.chain.{DOMAIN}" if depth < 40 else STATUS)]
        if name not in HOSTILE:
            return None
        self._asked[name] += 1
        if label in REFUSED:
            return [_address(name, REFUSED[label])]
        match label:
            case "mixed":
                return [_address(name, METADATA_ADDRESS), _address(name, PUBLIC), _address(name, "127.0.0.1")]
            case "flip":
                return [_address(name, PUBLIC if self._asked[name] % 2 else METADATA_ADDRESS, ttl=0)]
            case "alias-inside":
                return [_alias(name, f"inside.{DOMAIN}"), _address(f"inside.{DOMAIN}", METADATA_ADDRESS)]
            case "alias-attacker":
                return [_alias(name, ATTACKER), _address(ATTACKER, ADDRESSES[ATTACKER])]
            case "loop":
                return [_alias(name, f"loop2.{DOMAIN}"), _alias(f"loop2.{DOMAIN}", name)]
            case "chain":
                return [_alias(name, f"0.chain.{DOMAIN}")]
            case "dotted":
                return [_alias(name, f"evil\\046{DOMAIN}")]
            case _:  # an answer about its own name and, unrequested, about the API's
                return [_address(name, PUBLIC), _address(API, ADDRESSES[ATTACKER], ttl=86400)]


def _address(name: str, address: str, ttl: int = 60) -> RR:
    return RR(name, QTYPE.A, rdata=A(address), ttl=ttl)


def _alias(name: str, target: str) -> RR:
    return RR(name, QTYPE.CNAME, rdata=CNAME(target), ttl=60)
