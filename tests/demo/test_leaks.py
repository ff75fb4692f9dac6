"""The leak search finds a secret in every form that it supports; otherwise an empty result would mean nothing."""

import base64
import bz2
import gzip
import json
import lzma
import os
import zlib
from pathlib import Path
from urllib.parse import quote

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from testbed.leaks import Search, forms_of, leaks_in
from testbed.memory import data_of, memory_of

SECRET = 'bot:S3cret/with+signs=and"quotes'

FORMS = {
    "raw": SECRET.encode(),
    "reversed": SECRET[::-1].encode(),
    "hexadecimal": SECRET.encode().hex().encode(),
    "percent-encoded": quote(SECRET, safe="").encode(),
    "a JSON string": json.dumps({"x": SECRET}).encode(),
    "UTF-16": SECRET.encode("utf-16-le"),
    "basic credentials": base64.b64encode(b"user:" + SECRET.encode() + b":tail"),
    "percent-encoded as a whole": "".join(f"%{byte:02x}" for byte in SECRET.encode()).encode(),
    "escapes of JSON": "".join(f"\\u{ord(character):04X}" for character in SECRET).encode(),
    "UTF-16, the other order": SECRET.encode("utf-16-be"),
}
_LONG = b"before " + SECRET.encode() + b" after"
COMPRESSED = {
    "gzip": gzip.compress(_LONG),
    "zlib": zlib.compress(_LONG),
    "zstd": zstandard.ZstdCompressor().compress(_LONG),
    "bzip2": bz2.compress(_LONG),
    "xz": lzma.compress(_LONG),
}


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS.keys())
def test_it_is_found_as(text: bytes) -> None:
    assert 1 == leaks_in([b"<<" + text + b">>"], forms_of(SECRET))


@pytest.mark.parametrize("text", COMPRESSED.values(), ids=COMPRESSED.keys())
def test_it_is_found_in_what_is_compressed(text: bytes) -> None:
    assert 1 == leaks_in([text], forms_of(SECRET))
    assert 0 == leaks_in([text[: len(text) // 4]], forms_of(SECRET))


@given(before=st.binary(max_size=20), after=st.binary(max_size=20))
def test_it_is_found_in_base64_at_any_alignment(before: bytes, after: bytes) -> None:
    assert 1 == leaks_in([base64.b64encode(before + SECRET.encode() + after)], forms_of(SECRET))


def test_other_text_is_not_taken_for_it() -> None:
    assert 0 == leaks_in([b"bot:S3cret", b"", b"with+signs", bytes(range(256)) * 8], forms_of(SECRET))


BEGINNING = "a-canary+/0123456789abcdef"


@pytest.fixture(name="search")
def _search() -> Search:
    search = Search(BEGINNING)
    search.add("one", BEGINNING + "-first")
    search.add("two", "Basic " + BEGINNING + "-second")
    search.add("other", SECRET)
    return search


def test_a_search_names_the_secrets_that_it_finds(search: Search) -> None:
    one, two = (base64.b64encode(f"x{BEGINNING}-{name}".encode()) for name in ("first", "second"))
    assert {"one"} == search.names_in([b"<", one, b">"])
    assert {"one", "other"} == search.names_in([one, SECRET.encode()])
    assert {Search.PART} == search.names_in([two])
    assert set() == search.names_in([b"a-canary", one[:20]])


@given(at=st.integers(0, 40))
def test_a_search_finds_a_secret_across_pieces(at: int) -> None:
    search = Search(BEGINNING)
    search.add("one", BEGINNING + "-first")
    text = b"before " + BEGINNING.encode() + b"-first after"
    assert {"one"} == search.names_in([text[:at], text[at : at + 3], text[at + 3 :]])


def test_a_search_unpacks_a_file(search: Search) -> None:
    packed = gzip.compress(SECRET.encode())
    assert {"other"} == search.names_in_file(packed[:8], lambda: [packed[:9], packed[9:]])


def test_the_memory_of_a_process_has_what_it_holds() -> None:
    held = os.urandom(24)
    pieces = list(memory_of(os.getpid()))
    assert any(held in piece for piece in pieces)
    assert not any(os.urandom(24) in piece for piece in pieces)


def test_the_data_of_a_sparse_file_is_read_without_its_holes(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.seek(1 << 30)
        file.write(b"planted")
        file.truncate(1 << 31)
    with path.open("rb") as file:
        data = b"".join(data_of(file.fileno()))
    assert b"planted" in data
    assert len(data) < 1 << 20
