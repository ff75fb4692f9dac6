"""Finds a secret in all its forms: raw, base64 at each alignment, hexadecimal, percent, JSON, reversed."""

import base64
import gzip
import json
import zlib
from collections.abc import Iterable
from urllib.parse import quote


def forms_of(value: str) -> list[bytes]:
    """Return the encodings of `value` to search for, each long enough not to occur by chance."""
    raw = value.encode()
    forms = {raw, raw[::-1], raw.hex().encode(), raw.hex().upper().encode()}
    forms.add(quote(value, safe="").encode())
    forms.add(json.dumps(value)[1:-1].encode())
    forms.add(value.encode("utf-16-le"))
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for shift in range(3):
            encoded = encode(b"\0" * shift + raw)
            # The first and last group depend on neighbouring bytes; the part between them is equal at each position.
            forms.add(encoded[4 if shift else 0 : len(encoded) // 4 * 4 - 4])
    return [form for form in forms if len(form) >= 12]


def leaks_in(texts: Iterable[bytes], forms: list[bytes]) -> int:
    """Return how many of `texts`, unchanged or decompressed, contain any of `forms`."""
    return sum(1 for text in texts if any(form in view for view in _views(text) for form in forms))


def _views(text: bytes) -> Iterable[bytes]:
    yield text
    for magic, decompress in ((b"\x1f\x8b", gzip.decompress), (b"\x78\x9c", zlib.decompress)):
        if text.startswith(magic):
            try:
                yield decompress(text)
            except (OSError, zlib.error, EOFError):
                continue
