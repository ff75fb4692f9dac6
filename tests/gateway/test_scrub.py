"""No form of a secret passes, however the stream is cut, and everything else passes unchanged."""

import base64
import html
import json
from itertools import pairwise
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gateway.scrub import Patterns, Scrubber, scrub_bytes, scrub_header

VALUE = 's3cr/t+k"ey~ÄBC&D'
RAW = VALUE.encode()
secrets = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=8, max_size=24)


def in_chunks(patterns: Patterns, data: bytes, cuts: list[int]) -> bytes:
    scrubber = Scrubber(patterns)
    points = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    parts = [data[start:end] for start, end in pairwise(points)]
    return b"".join([*(scrubber.feed(part) for part in parts), scrubber.finish()])


FORMS = {
    "raw": RAW,
    "percent": quote(RAW, safe="").encode(),
    "percent-path": quote(RAW).encode(),
    "percent-lower": quote(RAW, safe="").replace("%2F", "%2f").replace("%2B", "%2b").replace("%C3", "%c3").encode(),
    "percent-all": "".join(f"%{byte:02x}" for byte in RAW).encode(),
    "form": quote_plus(RAW).encode(),
    "json": json.dumps(VALUE)[1:-1].encode(),
    "json-slash": json.dumps(VALUE).replace("/", "\\/")[1:-1].encode(),
    "json-utf8": json.dumps(VALUE, ensure_ascii=False)[1:-1].encode(),
    "json-all": "".join(f"\\u{ord(character):04x}" for character in VALUE).encode(),
    "html": html.escape(VALUE).encode(),
    "hex": RAW.hex().encode(),
    "hex-upper": RAW.hex().upper().encode(),
    "base64": base64.b64encode(RAW).rstrip(b"="),
    "base64-url": base64.urlsafe_b64encode(RAW).rstrip(b"="),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_each_form_is_taken_out_of_bodies_and_headers(form):
    patterns = Patterns([VALUE])
    assert b"<" + b"*" * len(form) + b">" == scrub_bytes(patterns, b"<" + form + b">")
    assert scrub_header(patterns, b"<" + form + b">").startswith(b"<[REDACTED]")


@given(secrets, st.binary(max_size=5), st.binary(max_size=5), st.booleans())
def test_base64_is_found_at_every_alignment(value, before, after, urlsafe):
    encode = base64.urlsafe_b64encode if urlsafe else base64.b64encode
    text = encode(before + value.encode() + after)
    out = scrub_bytes(Patterns([value]), text)
    assert len(text) == len(out)
    # At most the characters that hold only what surrounds the value are left.
    left = len(text) - out.count(b"*")
    assert left <= -(-len(before) * 8 // 6) + -(-len(after) * 8 // 6) + 4


@given(
    secrets,
    st.lists(st.integers(0, 2000), max_size=30),
    st.lists(st.sampled_from("vbcq "), max_size=8),
    st.integers(0, 24),
)
@settings(max_examples=200)
def test_the_output_does_not_depend_on_chunks(value, cuts, shape, cut):
    patterns = Patterns([value])
    pieces = {"v": value.encode(), "b": base64.b64encode(value.encode()), "c": value.encode()[:cut]}
    pieces |= {"q": quote(value, safe="").encode(), " ": b" x "}
    data = b"".join(pieces[one] for one in shape)
    whole = scrub_bytes(patterns, data)
    assert whole == in_chunks(patterns, data, cuts)
    assert len(data) == len(whole)
    assert value.encode() not in whole


@given(st.binary(max_size=400), st.lists(st.integers(0, 500), max_size=10))
def test_what_holds_no_secret_passes_unchanged(data, cuts):
    patterns = Patterns(["correct-horse-battery"])
    assume(not patterns.spans(data) and len(data) - patterns.partial(data) < 4)
    assert data == in_chunks(patterns, data, cuts)


@given(st.integers(1, 30), st.lists(st.integers(0, 300), max_size=20))
def test_periodic_values_are_taken_out_whole(repeats, cuts):
    patterns = Patterns(["abababab"])
    data = b"ab" * (4 + repeats)
    assert b"*" * len(data) == in_chunks(patterns, data, cuts)


def test_an_event_is_not_held_back():
    scrubber = Scrubber(Patterns(["correct-horse-battery"]))
    assert b"data: tick\n\n" == scrubber.feed(b"data: tick\n\n")


@pytest.mark.parametrize("length", range(4, len(RAW)))
def test_a_stream_cut_inside_a_value_shows_no_part_of_it(length):
    out = scrub_bytes(Patterns([VALUE]), b"> " + RAW[:length])
    assert b"> " + b"*" * length == out


def test_values_that_cannot_be_told_from_text_are_refused_without_being_quoted():
    with pytest.raises(ValueError, match="too short") as caught:
        Patterns(["abc"])
    assert "abc" not in str(caught.value)
    assert VALUE not in repr(Patterns([VALUE]))
