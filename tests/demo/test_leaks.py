"""The leak search finds a secret in every form that it supports; otherwise an empty result would mean nothing."""

import base64
import gzip
import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.leaks import forms_of, leaks_in

SECRET = 'bot:S3cret/with+signs=and"quotes'

FORMS = {
    "raw": SECRET.encode(),
    "reversed": SECRET[::-1].encode(),
    "hexadecimal": SECRET.encode().hex().encode(),
    "percent-encoded": quote(SECRET, safe="").encode(),
    "a JSON string": json.dumps({"x": SECRET}).encode(),
    "UTF-16": SECRET.encode("utf-16-le"),
    "basic credentials": base64.b64encode(b"user:" + SECRET.encode() + b":tail"),
    "compressed": gzip.compress(b"before " + SECRET.encode() + b" after"),
}


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS.keys())
def test_it_is_found_as(text: bytes) -> None:
    framed = text if text.startswith(b"\x1f\x8b") else b"<<" + text + b">>"

    assert 1 == leaks_in([framed], forms_of(SECRET))


@given(before=st.binary(max_size=20), after=st.binary(max_size=20))
def test_it_is_found_in_base64_at_any_alignment(before: bytes, after: bytes) -> None:
    assert 1 == leaks_in([base64.b64encode(before + SECRET.encode() + after)], forms_of(SECRET))


def test_other_text_is_not_taken_for_it() -> None:
    assert 0 == leaks_in([b"bot:S3cret", b"", b"with+signs", bytes(range(256)) * 8], forms_of(SECRET))
