"""An anchor of the audit log as a line of text. hostd and operators keep anchors where auditd cannot write.

Pure.

    {"version": 1, "ts": "...", "identity": "<fingerprint>", "key": "<fingerprint>", "file": 7, "offset": 81234,
     "log": "<log hash>", "heads": {"control": [412, "<hash>"], "sbx-..": [17, "<hash>"]}}
"""

import json
from typing import Any

from wire import codec
from wire.api.auditd import Anchor


class AnchorError(ValueError):
    """The text is no anchor."""


def line(anchor: Anchor) -> bytes:
    """Return the line of an anchor, with its end."""
    body: dict[str, Any] = {**_object(anchor), "heads": {c: [head.seq, head.hash] for c, head in anchor.heads.items()}}
    return codec.canonical_json(body) + b"\n"


def read_line(text: bytes) -> Anchor:
    """Return the anchor of a line.

    Raises:
        AnchorError: the line is no anchor.
    """
    try:
        body = json.loads(text)
        heads = {chain: {"seq": seq, "hash": digest} for chain, (seq, digest) in body["heads"].items()}
        return codec.decode(Anchor, {**body, "heads": heads})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # CodecError is a ValueError
        raise AnchorError("a line of the file is no anchor") from None


def _object(anchor: Anchor) -> dict[str, codec.Json]:
    encoded = codec.encode(anchor)
    return encoded if isinstance(encoded, dict) else {}
