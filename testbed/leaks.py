"""Finds a secret in all its forms: raw, base64 at each alignment, hexadecimal, percent, JSON, reversed, compressed."""

import base64
import bz2
import json
import lzma
import zlib
from collections.abc import Callable, Iterable
from urllib.parse import quote

import zstandard

MOST_UNPACKED = 64 << 20


def forms_of(value: str) -> list[bytes]:
    """Return the encodings of `value` to search for, each long enough not to occur by chance."""
    raw = value.encode()
    forms = {raw, raw[::-1], raw.hex().encode(), raw.hex().upper().encode()}
    forms.add(quote(value, safe="").encode())
    forms.add(json.dumps(value)[1:-1].encode())
    forms |= {"".join(f"%{byte:{kind}}" for byte in raw).encode() for kind in ("02x", "02X")}
    forms |= {"".join(f"\\u{ord(character):{kind}}" for character in value).encode() for kind in ("04x", "04X")}
    forms |= {value.encode("utf-16-le"), value.encode("utf-16-be")}
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for shift in range(3):
            encoded = encode(b"\0" * shift + raw)
            # The first and last group depend on neighbouring bytes; the part between them is equal at each position.
            forms.add(encoded[4 if shift else 0 : len(encoded) // 4 * 4 - 4])
    return [form for form in forms if len(form) >= 12]


def leaks_in(texts: Iterable[bytes], forms: list[bytes]) -> int:
    """Return how many of `texts`, unchanged or decompressed, contain any of `forms`."""
    return sum(1 for text in texts if any(form in view for view in _views(text) for form in forms))


class Search:
    """Looks for several secrets at once, in any number of texts.

    Secrets that begin with the same long and random text are cheap: only a text with a form of this beginning is
    searched for the forms of each.
    """

    PART = "a part of a secret"
    """The name of a beginning that none of the secrets follows."""

    def __init__(self, beginning: str) -> None:
        self._beginning = forms_of(beginning)
        self._marked: dict[str, list[bytes]] = {}
        self._others: dict[str, list[bytes]] = {}
        self._longest = max(map(len, self._beginning))
        self._text = beginning

    def add(self, name: str, value: str) -> None:
        """Look for a secret, too."""
        self.add_forms(name, forms_of(value), marked=self._text in value)

    def add_forms(self, name: str, forms: Iterable[bytes], *, marked: bool = False) -> None:
        """Look for a secret in these forms, too, beside those that it has already."""
        forms = list(forms)
        self._longest = max(self._longest, *map(len, forms))
        (self._marked if marked else self._others).setdefault(name, []).extend(forms)

    def names_in(self, pieces: Iterable[bytes]) -> set[str]:
        """Return the names of the secrets that are in a text, which comes in pieces."""
        found: set[str] = set()
        tail = b""
        for piece in pieces:
            found |= self._names_in(tail + piece if tail else piece)
            tail = piece[-self._longest :] if len(piece) >= self._longest else (tail + piece)[-self._longest :]
        return found - {self.PART} if found & self._marked.keys() else found  # the end of a piece can cut one

    def names_in_file(self, head: bytes, pieces: Callable[[], Iterable[bytes]]) -> set[str]:
        """Return the names of the secrets in a file that begins with `head`, as it is and unpacked."""
        found = self.names_in(pieces())
        if any(head.startswith(magic) for magic, _ in _PACKED):
            for view in _views(b"".join(pieces())):
                found |= self._names_in(view)
        return found

    def _names_in(self, text: bytes) -> set[str]:
        found = {name for name, forms in self._others.items() if any(form in text for form in forms)}
        if any(form in text for form in self._beginning):
            marked = {name for name, forms in self._marked.items() if any(form in text for form in forms)}
            found |= marked or {self.PART}
        return found


def _unzip(text: bytes) -> bytes:
    return zlib.decompressobj(wbits=47).decompress(text, MOST_UNPACKED)  # of zlib or gzip


def _unzstd(text: bytes) -> bytes:
    with zstandard.ZstdDecompressor().stream_reader(text) as reader:
        return bytes(reader.read(MOST_UNPACKED))


_PACKED: list[tuple[bytes, Callable[[bytes], bytes]]] = [
    (b"\x1f\x8b", _unzip),
    (b"\x78\x9c", _unzip),
    (b"\x28\xb5\x2f\xfd", _unzstd),
    (b"BZh", lambda text: bz2.BZ2Decompressor().decompress(text, MOST_UNPACKED)),
    (b"\xfd7zXZ", lambda text: lzma.LZMADecompressor().decompress(text, MOST_UNPACKED)),
]


def _views(text: bytes) -> Iterable[bytes]:
    yield text
    for magic, unpack in _PACKED:
        if text.startswith(magic):
            try:
                yield unpack(text)
            except (OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError, EOFError):
                continue
