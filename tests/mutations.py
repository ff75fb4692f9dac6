"""Documents that differ from a valid one at one place, as a typing error or a faulty program makes them.

Also the requests that a policy permits, to detect that a change made the policy wider.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from policy.client_credentials import CLASSES, Handling
from policy.compiled import CompiledPolicy
from policy.decision import Deny, decide_request
from policy.destination import decide_address
from policy.facts import AddressSource, Destination, RequestFacts, Scheme

_SPOKEN = ((443, Scheme.HTTPS), (80, Scheme.HTTP), (8443, Scheme.HTTPS), (8080, Scheme.HTTP))
_METHODS = ("GET", "POST", "DELETE")
_ADDRESSES = ("93.184.216.34", "93.184.217.1", "198.51.100.1", "10.0.0.1")

type Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Mutation:
    """One changed document.

    Attributes:
        kind: `unknown`, `misspelt`, `case`, `null`, `empty list` or `empty object`.
        path: the changed place, with the key as it is in the changed document.
        without: the valid document without the value at that place.
    """

    kind: str
    path: Path
    document: Any
    without: Any


def mutations(document: Any, is_open: Callable[[Path], bool] = lambda path: False) -> Iterator[Mutation]:
    """Yield the mutations at every place of `document`.

    `is_open` returns whether a place is a map with free keys.
    """
    for path, item in _nodes(document, ()):
        if isinstance(item, dict) and not is_open(path):
            for value in (1, None, []):
                yield Mutation("unknown", (*path, "zzz"), _set(document, (*path, "zzz"), value), document)
            for key in item:
                rest = {name: value for name, value in item.items() if name != key}
                without = _set(document, path, rest)
                for kind, name in _names(key):
                    if name not in item:
                        changed = _set(document, path, {**rest, name: item[key]})
                        yield Mutation(kind, (*path, name), changed, without)
        if path:
            without = _removed(document, path)
            for kind, value in (("null", None), ("empty list", []), ("empty object", {})):
                if value != item:
                    yield Mutation(kind, path, _set(document, path, value), without)


def one_of_each(drawn: Iterable[Mutation]) -> list[Mutation]:
    """Return the first mutation of each kind at each place; of changed keys, the first of each kind at each object."""
    found: dict[tuple[str, str], Mutation] = {}
    for mutation in drawn:
        is_key = mutation.kind in ("unknown", "misspelt", "case")
        found.setdefault((mutation.kind, repr(mutation.path[:-1] if is_key else mutation.path)), mutation)
    return [*found.values()]


def permitted(policy: CompiledPolicy, hosts: Iterable[str], paths: Iterable[str]) -> frozenset[str]:
    """Return the permitted requests, the secrets that they carry, and the addresses that may be dialled."""
    literals = [Destination(None, ip_address(text), 443, Scheme.HTTPS, AddressSource.LITERAL) for text in _ADDRESSES]
    found = {f"dials {one.address}" for one in literals if not isinstance(decide_address(policy, one), Deny)}
    for host, (port, scheme), method, path in itertools.product(hosts, _SPOKEN, _METHODS, paths):
        facts = RequestFacts(host, port, scheme, method, path)
        if not isinstance(decision := decide_request(policy, facts), Deny):
            found.add(f"sends {facts}")
            found |= {f"sends {facts} with {plan.place}={plan.secret}" for plan in decision.plans}
            if decision.observed is not None:
                continue  # it gets no secret, and is sent as it is
            handling = decision.client_credentials
            found |= {
                f"forwards {kind} of the client in {facts}"
                for kind in CLASSES
                if handling is not None and getattr(handling, kind) is Handling.ALLOW
            }
    return frozenset(found)


def _names(key: str) -> Iterator[tuple[str, str]]:
    for name in {key.upper(), key.lower(), key[0].swapcase() + key[1:]} - {key}:
        yield "case", name
    slips = {re.sub("([A-Z])", r"_\1", key).lower(), f"{key}s"}
    for place in range(len(key)):  # leave out a letter, double it, or exchange it with the next
        slip = (key[:place], key[: place + 1] + key[place], key[:place] + key[place : place + 2][::-1])[place % 3]
        slips.add(slip + key[place + (1, 1, 2)[place % 3] :])
    for name in sorted(slips - {key, ""}):
        yield "misspelt", name


def _nodes(item: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    yield path, item
    if isinstance(item, dict):
        for key, value in item.items():
            yield from _nodes(value, (*path, key))
    if isinstance(item, list):
        for index, value in enumerate(item):
            yield from _nodes(value, (*path, index))


def _set(document: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    changed = json.loads(json.dumps(document))  # a deep copy: equal parts are not shared either
    _parent(changed, path)[path[-1]] = value
    return changed


def _removed(document: Any, path: Path) -> Any:
    changed = json.loads(json.dumps(document))  # a deep copy: equal parts are not shared either
    del _parent(changed, path)[path[-1]]
    return changed


def _parent(document: Any, path: Path) -> Any:
    for part in path[:-1]:
        document = document[part]
    return document
