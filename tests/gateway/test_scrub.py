"""No form of a secret is relayed, however the stream is split, and all other bytes are unchanged."""

import base64
import html
import json
import shutil
import subprocess
from collections.abc import Callable
from itertools import pairwise
from urllib.parse import quote, quote_plus

import markupsafe
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from gateway.scrub.forms import MIN_COLUMN, Patterns
from gateway.scrub.stream import Scrubber, scrub_bytes, scrub_header

VALUE = 's3cr/t+k"ey~ÄBC&D'
RAW = VALUE.encode()
secrets = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=8, max_size=24)
tokens = st.text("abcXYZ0189+/=&<>\"'\\%-_.~ $", min_size=8, max_size=40)


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
    "percent-twice": quote(quote(RAW, safe="")).encode(),
    "form": quote_plus(RAW).encode(),
    "json": json.dumps(VALUE)[1:-1].encode(),
    "json-slash": json.dumps(VALUE).replace("/", "\\/")[1:-1].encode(),
    "json-utf8": json.dumps(VALUE, ensure_ascii=False)[1:-1].encode(),
    "json-all": "".join(f"\\u{ord(character):04x}" for character in VALUE).encode(),
    "json-go": json.dumps(VALUE)[1:-1].replace("&", "\\u0026").encode(),
    "json-dotnet": json.dumps(VALUE)[1:-1].replace('\\"', "\\u0022").replace("+", "\\u002B").encode(),
    "json-in-json": json.dumps(json.dumps(VALUE))[3:-3].encode(),
    "repr": repr(RAW)[2:-1].encode(),
    "html": html.escape(VALUE).encode(),
    "html-go": VALUE.replace("&", "&amp;").replace("+", "&#43;").replace('"', "&#34;").encode(),
    "html-handlebars": VALUE.replace("&", "&amp;").replace("/", "&#x2F;").replace('"', "&quot;").encode(),
    "html-in-json": json.dumps(html.escape(VALUE))[1:-1].replace("&", "\\u0026").encode(),
    "html-jinja": str(markupsafe.escape(VALUE)).encode(),
    "utf-16-le": VALUE.encode("utf-16-le"),
    "utf-16-be": VALUE.encode("utf-16-be"),
    "utf-32-le": VALUE.encode("utf-32-le"),
    "utf-32-be": VALUE.encode("utf-32-be"),
    "json in utf-16": json.dumps(VALUE)[1:-1].encode("utf-16-le"),
    "latin-1": VALUE.encode("latin-1"),
    "hex": RAW.hex().encode(),
    "hex-upper": RAW.hex().upper().encode(),
    "base64": base64.b64encode(RAW).rstrip(b"="),
    "base64-url": base64.urlsafe_b64encode(RAW).rstrip(b"="),
    "base64-percent": quote(base64.b64encode(RAW).rstrip(b"="), safe="").encode(),
    "base64-utf-16": base64.b64encode(RAW).rstrip(b"=").decode().encode("utf-16-le"),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_each_form_is_taken_out_of_bodies_and_headers(form):
    patterns = Patterns([VALUE])
    stars = bytes(octet and ord("*") for octet in form)
    assert (b"<" + stars + b">").rstrip(b"\0") == scrub_bytes(patterns, b"<" + form + b">").rstrip(b"\0")
    assert scrub_header(patterns, b"<" + form + b">").startswith(
        (b"<[REDACTED]", b"<\0[REDACTED]", b"<\0\0\0[REDACTED]")
    )


def percent(octets: bytes, case: str) -> str:
    return "".join(f"%{octet:{case}}" for octet in octets)


ESCAPES: list[Callable[[str], str]] = [
    lambda character: character,
    lambda character: percent(character.encode(), "02X"),
    lambda character: percent(character.encode(), "02x"),
    lambda character: percent(character.encode(), "02x").replace("%", "%25"),
    lambda character: "".join(f"\\u{unit:04x}" for unit in _units(character)),
    lambda character: "".join(f"\\u{unit:04X}" for unit in _units(character)),
    lambda character: "".join(f"\\\\u{unit:04x}" for unit in _units(character)),
    lambda character: f"\\u{{{ord(character):x}}}",
    lambda character: "".join(f"\\x{octet:02x}" for octet in character.encode()),
    lambda character: f"&#{ord(character)};",
    lambda character: f"&#x{ord(character):X};",
    lambda character: f"&#x{ord(character):x};",
    lambda character: f"&#{ord(character):04};",
    lambda character: html.escape(character),
    lambda character: json.dumps(character)[1:-1],
    lambda character: json.dumps(json.dumps(character))[1:-1][2:-2],
    lambda character: quote_plus(character),
    lambda character: "".join(f"%{unit:02X}" if unit < 0x100 else f"%u{unit:04X}" for unit in _units(character)),
    lambda character: "".join(f"\\{octet:03o}" for octet in character.encode()),
    lambda character: f"\\U{ord(character):08x}",
]


def _units(character: str) -> list[int]:
    data = character.encode("utf-16-be")
    return [int.from_bytes(data[index : index + 2], "big") for index in range(0, len(data), 2)]


@pytest.mark.parametrize("escape", range(len(ESCAPES)))
def test_each_escape_is_taken_out_where_every_character_is_in_it(escape: int) -> None:
    """With characters of one to four octets."""
    value = 'a/b&c"d+e~Ä中\U0001f600'
    shown = "".join(map(ESCAPES[escape], value)).encode()
    assert b"<" + b"*" * len(shown) + b">" == scrub_bytes(Patterns([value]), b"<" + shown + b">")


BLANKS = "correct horse battery staple"
LOWER, UPPER = 'a"bcdefgh', "zzzzzzzzz"
OCTETS = b"pass\xffword-0000"
PASSED: dict[str, tuple[list[str], bytes]] = {
    "one blank as a plus sign, the others raw": ([BLANKS], b"correct+horse battery staple"),
    "the last blank as a plus sign": ([BLANKS], b"correct horse battery+staple"),
    "a character that is in the first value only": ([LOWER, UPPER], b"a%22bcdefgh"),
    "a character that is in the last value only": (['z"bcdefgh', "aaaaaaaaa"], b"z%22bcdefgh"),
    "an octet that is no UTF-8": ([OCTETS.decode("utf-8", "surrogateescape")], OCTETS),
    "an octet that is no UTF-8, escaped": ([OCTETS.decode("utf-8", "surrogateescape")], quote(OCTETS).encode()),
    "hex of an octet that is no UTF-8": ([OCTETS.decode("utf-8", "surrogateescape")], OCTETS.hex().encode()),
}


@pytest.mark.parametrize("case", PASSED)
def test_a_form_is_taken_out_whatever_else_is_looked_for(case: str) -> None:
    values, form = PASSED[case]
    assert b"<" + b"*" * len(form) + b">" == scrub_bytes(Patterns(values), b"<" + form + b">")


@pytest.mark.parametrize("values", [["aäbcdefgh", "zzzzzzzzz"], ["aaaaaaaaa", "zäbcdefgh"]], ids=["first", "last"])
def test_a_line_end_ends_no_match_while_any_value_is_not_ascii(values: list[str]) -> None:
    assert 0 == Patterns(values).hold(b"line\n")


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_escaped_forms_are_found_however_far_apart_they_are(number: int) -> None:
    """At and beside the borders of the parts in which escapes are searched."""
    patterns = Patterns(["correct-horse-battery"])
    form = b"correct%2Dhorse%2Dbattery"
    middle = number * patterns.longest
    for between in range(max(0, middle - 30), middle + 30):
        data = form + b"." * between + form
        last = len(form) + between
        assert [(0, len(form)), (last, last + len(form))] == patterns.spans(data)


def test_four_times_as_much_is_kept_of_what_ends_with_nul_bytes() -> None:
    patterns = Patterns(["correct-horse-battery"])
    near = patterns.context(b"")
    assert near >= patterns.longest + MIN_COLUMN + len("\r\n") + 8  # a match, the run before it, and a wrap
    for at, kept in {1: 4 * near, near: 4 * near, near + 1: near, 4 * near: near}.items():
        data = bytearray(b"a" * 4 * near)
        data[-at] = 0
        assert kept == patterns.context(bytes(data))


def test_a_wrap_at_the_bound_is_no_line_end_in_utf_32_either() -> None:
    """The line before it is at the very beginning of the searched text."""
    patterns = Patterns(["correct-horse-battery"])
    for end in ("\n", "\r\n"):
        for behind in range(patterns.longest - 5, patterns.longest + 5):
            text = "." * 50 + "A" * MIN_COLUMN + end + "b" * behind
            assert len(text) - patterns.longest - 2 == patterns.hold(text.encode())
            assert 4 * patterns.hold(text.encode()) == patterns.hold(text.encode("utf-32-le"))


@pytest.mark.parametrize("rest", ["", "-end", "\x83-end"])
@pytest.mark.parametrize("escape", ["\\xc3\\x83", "\\xc3", "%c3%83", "%C3", "\\303\\203"])
def test_an_escape_that_is_the_beginning_of_another_hides_no_end(rest: str, escape: str) -> None:
    """U+00C3 is C3 83 in UTF-8: its number is its own first octet."""
    shown = "0000000" + escape + rest.replace("\x83", "\\x83")
    out = in_chunks(Patterns([f"0000000Ã{rest}"]), f"{shown}\n".encode(), [])
    assert set(out[:-1]) <= set(b"*\0")


@pytest.mark.slow
@given(
    st.one_of(secrets, tokens),
    st.data(),
    st.sampled_from(["utf-8", "utf-16-le", "utf-16-be", "utf-32-le"]),
    st.lists(st.integers(0, 3000), max_size=30),
    st.sampled_from(["", "<", "%", "\\", "&", "&#", "x=", '{"a":"', "%2", "a"]),
)
@settings(max_examples=150)
def test_each_character_may_be_escaped_in_its_own_way(value, data, charset, cuts, before):
    """Text around it, also the introducer of an escape, does not hide it, and is relayed."""
    chosen = [data.draw(st.sampled_from(ESCAPES))(character) for character in value]
    shown = "".join(chosen)
    front, back, body = (text.encode(charset) for text in (before, "\n", f"{before}{shown}\n"))
    out = in_chunks(Patterns([value]), body, cuts)
    assert len(body) == len(out)
    assert set(out[len(front) : len(out) - len(back)]) <= set(b"*\0")


@pytest.mark.parametrize("value", [".0+XY%c-0000", "%25Y.&Y9a/a%b", "a0%9/9%1X09%9"])
def test_an_end_inside_an_escape_is_a_beginning_whatever_the_value_holds(value: str) -> None:
    """The bytes of an unfinished escape can also be characters of the value."""
    patterns = Patterns([value])
    shown = quote(value, safe="").encode()
    for end in range(12, len(shown)):
        assert len(b"zz ") == patterns.partial(b"zz " + shown[:end])


@pytest.mark.parametrize("charset", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("character", ["\u010d", "\u0d0a", "\u0a00", "\U000d0000"])
def test_a_byte_of_a_character_is_no_line_end(character: str, charset: str) -> None:
    """The value is found wherever the body is split."""
    value = f"pass{character}word-{character}-0000"
    body = f"{value}.".encode(charset)
    end = len(body) - len(".".encode(charset))
    for cut in range(len(body)):
        out = in_chunks(Patterns([value]), body, [cut])
        assert set(out[:end]) <= set(b"*\0")


def test_what_common_encoders_make_of_it_is_found():
    """Node if it is installed. The table above has the forms of others."""
    made = []
    if (node := shutil.which("node")) is not None:
        script = "const v=process.argv[1];console.log(JSON.stringify(v)+encodeURIComponent(v)+encodeURI(v)+escape(v))"
        made.append(subprocess.run([node, "-e", script, VALUE], check=True, capture_output=True).stdout)
    made += [html.escape(VALUE).encode(), json.dumps({VALUE: [VALUE]}).encode(), quote(VALUE).encode()]
    for body in made:
        out = scrub_bytes(Patterns([VALUE]), body)
        assert b"s3cr" not in out and b"BC" not in out


@given(st.one_of(secrets, tokens), st.integers(MIN_COLUMN, 80), st.binary(max_size=70), st.binary(max_size=70))
@example("correct-horse-battery-staple", 76, b"x" * 50, b"y" * 30)
@settings(max_examples=25)
def test_wrapped_base64_is_found_at_every_column(value, column, before, after):
    for end in ("\n", "\r\n", "\\n", "\\r\\n"):
        text = base64.b64encode(before + value.encode() + after).decode()
        lines = [text[index : index + column] for index in range(0, len(text), column)]
        body = f'{{"a": "\n{end.join(lines)}"}}\n\n'.encode()
        out = in_chunks(Patterns([value]), body, list(range(0, len(body), 7)))
        whole = scrub_bytes(Patterns([value]), body)
        assert whole == out
        left = out.decode().partition("\n")[2].replace(end, "").rstrip('"}\n')
        kept = len(left) - left.count("*")
        assert kept <= -(-len(before) * 8 // 6) + -(-len(after) * 8 // 6) + 4


@given(secrets, st.binary(max_size=5), st.binary(max_size=5), st.booleans())
def test_base64_is_found_at_every_alignment(value, before, after, urlsafe):
    encode = base64.urlsafe_b64encode if urlsafe else base64.b64encode
    text = encode(before + value.encode() + after)
    out = scrub_bytes(Patterns([value]), text)
    assert len(text) == len(out)
    # Only characters that encode nothing but the text around the value can remain.
    left = len(text) - out.count(b"*")
    assert left <= -(-len(before) * 8 // 6) + -(-len(after) * 8 // 6) + 4


@pytest.mark.slow
@given(
    secrets,
    st.lists(st.integers(0, 2000), max_size=30),
    st.lists(st.sampled_from("vbcqnwz "), max_size=8),
    st.integers(0, 24),
)
@settings(max_examples=200)
def test_the_output_does_not_depend_on_chunks(value, cuts, shape, cut):
    patterns = Patterns([value])
    pieces = {"v": value.encode(), "b": base64.b64encode(value.encode()), "c": value.encode()[:cut]}
    pieces |= {"q": quote(value, safe="").encode(), " ": b" x ", "n": b"\n", "z": bytes(5)}
    pieces["w"] = base64.encodebytes(b"wrapped, so that it is more than a line of it: " + value.encode())
    data = b"".join(pieces[one] for one in shape)
    whole = scrub_bytes(patterns, data)
    assert whole == in_chunks(patterns, data, cuts)
    assert len(data) == len(whole)
    assert value.encode() not in whole


@given(st.binary(max_size=400), st.lists(st.integers(0, 500), max_size=10))
def test_what_holds_no_secret_passes_unchanged(data, cuts):
    patterns = Patterns(["correct-horse-battery"])
    assume(not patterns.spans(data) and patterns.partial(data) == len(data))
    assert data == in_chunks(patterns, data, cuts)


@given(st.integers(1, 30), st.lists(st.integers(0, 300), max_size=20))
def test_periodic_values_are_taken_out_whole(repeats, cuts):
    patterns = Patterns(["abababab"])
    data = b"ab" * (4 + repeats)
    assert b"*" * len(data) == in_chunks(patterns, data, cuts)


@given(tokens, tokens, st.lists(st.sampled_from(["v", "e", "h", "x", "\n", "0"]), max_size=40))
@settings(max_examples=50)
def test_what_is_held_back_depends_on_no_value(value, other, shape):
    """The delay of the value, its beginning or an encoding is that of another value of the same length."""
    other = (other * 8)[: len(value)]
    pieces = {"v": value.encode(), "e": quote(value).encode(), "h": value[:5].encode(), "x": b"and so on "}
    pieces |= {"\n": b"\n", "0": bytes(3)}
    first, second = Scrubber(Patterns([value])), Scrubber(Patterns([other]))
    for one in shape:
        assert len(first.feed(pieces[one])) == len(second.feed(pieces[one]))


@pytest.mark.parametrize("size", [1 << 16, 1 << 20])
@pytest.mark.parametrize("fill", [b"\0", b"a", b"A=\n", b"%41", b"\\\\", b"&#43;", b"correct-"])
def test_what_is_held_back_is_bounded(size, fill):
    patterns = Patterns(["correct-horse-battery"])
    scrubber = Scrubber(patterns)
    out = sum(len(scrubber.feed(fill * (4096 // len(fill)))) for _ in range(size // 4096))
    assert size - out < 4096 + 8 * patterns.longest


def test_an_event_is_not_held_back():
    scrubber = Scrubber(Patterns(["correct-horse-battery"]))
    assert b"data: tick\n\n" == scrubber.feed(b"data: tick\n\n")
    assert b'{"tick": "tock"}\n' == scrubber.feed(b'{"tick": "tock"}\n')


@pytest.mark.parametrize("length", range(4, len(VALUE)))
def test_a_stream_cut_inside_a_value_shows_no_part_of_it(length):
    scrubber = Scrubber(Patterns([VALUE]))
    part = VALUE[:length].encode()
    assert b"> " + b"*" * len(part) == scrubber.feed(b"> " + part) + scrubber.finish()
    assert (1, 0) == (scrubber.partials, scrubber.matches)


def test_a_stream_cut_inside_a_form_shows_no_part_of_it():
    for name, form in FORMS.items():
        cut = form[: len(form) * 2 // 3]
        out = scrub_bytes(Patterns([VALUE]), b"> " + cut)
        assert b"> " == out.replace(b"\0", b"").rstrip(b"*"), name


def test_each_piece_in_which_a_value_is_found_counts_once():
    value = VALUE.replace("Ä", "")  # another value would not release the line at a line end
    raw = value.encode()
    scrubber = Scrubber(Patterns([value]))
    counts = []
    for line in (b"nothing\n", b"a " + raw + b" b\n", b"c\n", raw + b" " + raw + b"\n", quote(value).encode() + b" \n"):
        scrubber.feed(line)
        counts.append(scrubber.matches)
    scrubber.finish()
    assert [0, 1, 1, 2, 3] == counts
    assert (3, 0) == (scrubber.matches, scrubber.partials)


def test_values_that_look_like_text_are_refused_without_being_quoted():
    with pytest.raises(ValueError, match="needs at least 8 characters") as caught:
        Patterns(["7-chars"])
    assert "7-chars" not in str(caught.value)
    assert VALUE not in repr(Patterns([VALUE]))
