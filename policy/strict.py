"""A strict reader of callers' JSON, shared by the readers of request bodies.

- Text is UTF-8. Duplicate keys in an object, NaN, Infinity and data after the document are refused.
- `members` reads the keys of an object. An unknown key, a null and a value that is no object are refused.
- Errors name the place, such as `egress[0].methods`. They quote keys, shortened and escaped, and never a value.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Never

type Path = tuple[str | int, ...]

_SHOWN = 100


class StrictError(ValueError):
    """The document is refused; the text names the place and the problem."""


def decode(body: bytes) -> object:
    """Parse a JSON document.

    Raises:
        StrictError: the text is no JSON, or an object in it has a duplicate key.
    """
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_constant)
    except StrictError:
        raise
    except (ValueError, RecursionError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise StrictError("not valid JSON") from None


def members(value: object, known: Iterable[str], path: Path = (), *, fold: bool = False) -> dict[str, object]:
    """Return the members of an object by their known names.

    Args:
        known: the names that the object may have.
        path: the place of the object, for errors.
        fold: ignore letter case in names; two names that differ only in case are refused.

    Raises:
        StrictError: the value is no object, or has an unknown key or a null.
    """
    if not isinstance(value, dict):
        raise StrictError(located(path, "expected an object"))
    names = {name.lower() if fold else name: name for name in known}
    found: dict[str, object] = {}
    for key, item in value.items():
        name = names.get(key.lower() if fold else key)
        if name is None:
            raise StrictError(unknown((*path, key)))
        if name in found:
            raise StrictError(f"duplicate key {quoted(place((*path, name)))}")
        if item is None:
            raise StrictError(located((*path, name), "must not be null"))
        found[name] = item
    return found


def unknown(path: Path) -> str:
    """Return the text of the error about an unknown key."""
    return f"unknown field {quoted(place(path))}"


def place(path: Path) -> str:
    """Render a place: `("egress", 0, "methods")` is `egress[0].methods`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:_SHOWN]}" for part in path)
    return text.removeprefix(".")


def quoted(text: str) -> str:
    """Quote a caller's word for an error: one line of ASCII."""
    return json.dumps(text)


def located(path: Path, problem: str) -> str:
    """Return the text of an error at a place; for the document itself it is only the problem."""
    return f"{place(path)}: {problem}" if path else problem


def _object(items: list[tuple[str, Any]]) -> Mapping[str, Any]:
    found = dict(items)
    if len(found) != len(items):
        seen: set[str] = set()
        for key, _ in items:
            if key in seen:
                raise StrictError(f"duplicate key {quoted(key[:_SHOWN])}")
            seen.add(key)
    return found


def _constant(_: str) -> Never:
    raise StrictError("not valid JSON")
