"""The documentation of the settings, written from the model: the table of docs/configuration.md and the file of
`init-config`.

`python -m lifecycle.config.reference` prints the table.
"""

import json
import textwrap
from collections.abc import Mapping
from typing import Any

from pydantic.fields import FieldInfo

from lifecycle.config.keys import KEYS, allowed

_WIDTH = 100


def table() -> str:
    """Return the table of all keys, in Markdown."""
    rows = ["| Key | Default | Unit | Bounds | Meaning |", "|---|---|---|---|---|"]
    for key, field in KEYS.items():
        bounds = allowed(key).removeprefix("a number ")
        rows.append(f"| `{key}` | {_shown(field)} | {_extra(field)['unit']} | {bounds} | {field.description} |")
    return "\n".join(rows) + "\n"


def toml() -> str:
    """Return a settings file in which every key is a comment, with its default or, without one, an example."""
    lines = ["# Settings of Sallyport. Each key is a comment: remove the # in front of a key to set it.", ""]
    tables: dict[str, list[str]] = {}
    for key in KEYS:
        tables.setdefault(key.rpartition(".")[0], []).append(key)
    for name, keys in tables.items():
        lines.append(f"[{name}]")
        for key in keys:
            lines += [*_about(key, KEYS[key]), f"#{key.rpartition('.')[2]} = {_value(KEYS[key])}", ""]
    return "\n".join(lines)


def _about(key: str, field: FieldInfo) -> list[str]:
    parts = [str(field.description)]
    if unit := _extra(field)["unit"]:
        parts.append(f"Unit: {unit}")
    if bounds := allowed(key):
        parts.append(f"Bounds: {bounds}")
    parts.append(f"Default: {_shown(field)}")
    return textwrap.wrap(". ".join(parts).replace("`", "") + ".", _WIDTH, initial_indent="# ", subsequent_indent="# ")


def _extra(field: FieldInfo) -> Mapping[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def _shown(field: FieldInfo) -> str:
    return str(_extra(field)["shown"] or f"`{_value(field)}`")


def _value(field: FieldInfo) -> str:
    """Return the default or the example as TOML. JSON writes these values in the same way, because tables are empty."""
    return json.dumps(_extra(field)["example"] if field.default is None else field.default)


if __name__ == "__main__":
    print(table(), end="")
