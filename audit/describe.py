"""`python -m audit.describe`: prints docs/audit-records.md, which describes each kind and field of a record.

Pure but for its output. `tests/audit/test_describe.py` compares the file with it.
"""

import json
import sys
from collections.abc import Iterator

from audit.kinds import COMMON, DESCRIBED, FIELDS, SIGNED, Kind
from audit.producers import KINDS
from audit.records import BOOLEANS, INTEGERS, LISTS, MAX_ITEMS, TEXTS

_HEAD = f"""\
# Audit records

This page is generated: `python -m audit.describe >docs/audit-records.md`. A test compares it with the code.

The log is JSON Lines, one record a line. A record has the fields of every record, and those of its kind that apply.
A text above its bound is truncated; `<field>_sha256` and `<field>_length` then describe the whole text. A list has at
most {MAX_ITEMS} items; a longer one also has `<field>_length`. Control and invisible characters are written as
`\\u{{hex}}`. No field contains the value of a secret.
"""


def document() -> str:
    """Return the text of docs/audit-records.md."""
    return "\n".join((_HEAD, *_common(), *_kinds(), *_fields()))


def type_of(name: str) -> str:
    """Return the type of a field in the words of the document, with its bound.

    Raises:
        KeyError: there is no such field.
    """
    if name in INTEGERS:
        return "integer"
    if name in BOOLEANS:
        return "boolean"
    if name in LISTS:
        return f"list of texts, {LISTS[name]} characters each"
    return f"text, {TEXTS[name]} characters"


def _common() -> Iterator[str]:
    yield from ("## Fields of every record", "", "| Field | Type | Meaning |", "|---|---|---|")
    yield from (f"| `{name}` | {kind} | {meaning} |" for name, (kind, meaning) in COMMON.items())
    yield ""


def _kinds() -> Iterator[str]:
    yield from ("## Kinds", "")
    for name, kind in DESCRIBED.items():
        yield from _section(name, kind)


def _section(name: str, kind: Kind) -> Iterator[str]:
    by = ", ".join(f"`{producer}`" for producer, kinds in KINDS.items() if name in kinds)
    fields = ", ".join(f"`{field}`" for field in sorted(kind.fields)) or "none beside those of every record"
    example = {"kind": name, "decision": kind.decision, **kind.example}
    yield from (f"### `{name}`", "", kind.meaning, "", f"- Producer: {by}", f"- Fields: {fields}", "")
    yield from ("```json", json.dumps(example, ensure_ascii=False), "```", "")


def _fields() -> Iterator[str]:
    yield from ("## Fields of the kinds", "", "| Field | Type | Meaning |", "|---|---|---|")
    yield from (f"| `{name}` | {type_of(name)} | {meaning} |" for name, meaning in FIELDS.items())
    yield from ("", "Fields that only a `checkpoint` has:", "", "| Field | Type | Meaning |", "|---|---|---|")
    yield from (f"| `{name}` | {kind} | {meaning} |" for name, (kind, meaning) in SIGNED.items())
    yield ""


if __name__ == "__main__":
    sys.stdout.write(document())
