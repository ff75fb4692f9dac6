"""Placeholders in the text of a request: found literally, in one pass, with the encoding of their surface."""

import json
from urllib.parse import parse_qsl, quote, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import substitute
from gateway.substitute import MAX_MATCHES, BodyForm, TooMany

LIMIT = 1 << 20
VALUES = {"__T__": "a b/c", "__T__LONG": "the longer one"}
SECRETS = st.text(st.sampled_from('a1"\\/&=+%;?# {}\u00e9\u20ac\U0001f600'), min_size=4, max_size=30)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"/x/__T__/y", b"/x/a%20b%2Fc/y"),
        (b"__T__LONG__T__", b"the%20longer%20onea%20b%2Fc"),
        (b"__t__", b"__t__"),
        (b"%5F_T__", b"%5F_T__"),
        (b"a=%__T__", b"a=%__T__"),
        (b"a=%2__T__", b"a=%2__T__"),
        (b"a=%2f__T__", b"a=%2fa%20b%2Fc"),
        (b"", b""),
    ],
)
def test_a_path_or_query_gets_values_that_cannot_leave_their_place(text: bytes, expected: bytes) -> None:
    assert expected == substitute.replaced_in_target(text, VALUES, LIMIT)


def test_an_escape_of_the_text_takes_no_character_of_a_value() -> None:
    """The client could otherwise have a server read the first characters of a secret as an octet."""
    assert b"%__T__" == substitute.replaced_in_target(b"%__T__", {"__T__": "41secret"}, LIMIT)
    assert b"%4__T__" == substitute.replaced_in_target(b"%4__T__", {"__T__": "1secret"}, LIMIT)


def test_an_inserted_value_is_not_read_again() -> None:
    values = {"__A__": "__B__", "__B__": "second-secret"}

    assert b"__B__ second-secret" == substitute.replaced_in_header(b"__A__ __B__", values, LIMIT)
    assert b"__B__&second-secret" == substitute.replaced_in_target(b"__A__&__B__", values, LIMIT)
    assert b"__B__ second-secret" == substitute.replaced_in_body(BodyForm.TEXT, b"__A__ __B__", values, LIMIT)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a": "__T__"}', b'{"a": "a b/c"}'),
        (b'{"__T__": 1}', b'{"a b/c": 1}'),
        (b'{"a": __T__}', b'{"a": __T__}'),
        (b'["\\"__T__", __T__, "__T__"]', b'["\\"a b/c", __T__, "a b/c"]'),
        (b'"\\\\__T__"', b'"\\\\a b/c"'),
        (b'"\\u__T__"', b'"\\u__T__"'),
        (b'"\\u004__T__"', b'"\\u004__T__"'),
        (b'"unfinished __T__', b'"unfinished a b/c'),
        (b"__T__", b"__T__"),
        (b'"a" __T__ "b"', b'"a" __T__ "b"'),
    ],
)
def test_in_json_only_strings_are_searched(body: bytes, expected: bytes) -> None:
    assert expected == substitute.replaced_in_body(BodyForm.JSON, body, VALUES, LIMIT)


@given(SECRETS, st.text(max_size=30))
def test_a_json_document_has_exactly_the_value_in_place_of_the_placeholder(value: str, around: str) -> None:
    document = {"first": f"{around}__T__", "__T__": [around, "__T__"], "other": 1}
    body = json.dumps(document).encode()
    replaced = json.loads(substitute.replaced_in_body(BodyForm.JSON, body, {"__T__": value}, LIMIT))

    expected = {"first": f"{around}{value}", value: [around, value], "other": 1}
    assert "__T__" in around or expected == replaced


@given(SECRETS, st.text(st.characters(exclude_categories=("Cs",)), max_size=30))
def test_a_form_has_exactly_the_value_in_place_of_the_placeholder(value: str, around: str) -> None:
    body = f"a={quote(around)}&b=__T__&c=1".encode()
    replaced = substitute.replaced_in_body(BodyForm.FORM, body, {"__T__": value}, LIMIT)

    assert "__T__" in around or [("a", around), ("b", value), ("c", "1")] == parse_qsl(
        replaced.decode(), keep_blank_values=True
    )


@given(SECRETS)
def test_a_target_has_exactly_the_value_in_one_place(value: str) -> None:
    replaced = substitute.replaced_in_target(b"/a/__T__/b", {"__T__": value}, LIMIT).decode("ascii")

    assert ["", "a", value, "b"] == [unquote(part) for part in replaced.split("/")]
    assert set(replaced).isdisjoint("?#;&=+ ")


@pytest.mark.parametrize(
    ("headers", "form"),
    [
        ((), BodyForm.TEXT),
        (((b"Content-Type", b"application/json"),), BodyForm.JSON),
        (((b"content-type", b"Application/Problem+JSON; charset=UTF-8"),), BodyForm.JSON),
        (((b"content-type", b"application/x-www-form-urlencoded"),), BodyForm.FORM),
        (((b"content-type", b"text/xml"),), BodyForm.TEXT),
        (((b"content-type", b'text/plain; charset="utf-16"'),), None),
        (((b"content-type", b"multipart/form-data; boundary=x"),), None),
        (((b"content-type", b"application/grpc+proto"),), None),
        (((b"content-encoding", b"gzip"),), None),
        (((b"content-encoding", b"identity"),), BodyForm.TEXT),
        (((b"content-type", b"text/plain"), (b"Content-Type", b"application/json")), None),
    ],
)
def test_the_form_of_a_body_is_what_its_headers_announce(
    headers: tuple[tuple[bytes, bytes], ...], form: BodyForm | None
) -> None:
    assert form is substitute.body_form(headers)


@pytest.mark.parametrize(
    "name", ["Host", "Content-Length", "Transfer-Encoding", "Connection", "Upgrade", "TE", "Trailer", "Forwarded"]
)
def test_a_header_that_frames_or_routes_keeps_its_placeholder(name: str) -> None:
    for spelling in (name, name.lower(), "Proxy-Authorization", "X-Forwarded-For", "x-forwarded-proto"):
        assert not substitute.takes_placeholders(spelling.encode())
    assert substitute.takes_placeholders(b"Authorization")


@pytest.mark.parametrize("value", ["a\rb", "a\nb", "a\0b", "a\x7fb", "a\x85b", "a\ud800b"])
def test_a_value_with_a_control_character_is_in_no_head_and_in_no_message(value: str) -> None:
    for replace in (substitute.replaced_in_target, substitute.replaced_in_header):
        with pytest.raises(ValueError, match="cannot be sent") as caught:
            replace(b"__T__", {"__T__": value}, LIMIT)
        assert value not in str(caught.value)
    with pytest.raises(ValueError, match="cannot be sent"):
        substitute.replaced_in_body(BodyForm.TEXT, b"__T__", {"__T__": "a\ud800b"}, LIMIT)


@pytest.mark.parametrize("value", [" a", "a ", "\u00e9"])
def test_a_header_takes_ascii_without_blanks_at_its_edges(value: str) -> None:
    with pytest.raises(ValueError, match="cannot be sent in a header"):
        substitute.replaced_in_header(b"__T__", {"__T__": value}, LIMIT)


def test_matches_and_results_have_limits() -> None:
    body = b"__T__" * (MAX_MATCHES + 1)
    with pytest.raises(TooMany):
        substitute.in_body(BodyForm.TEXT, body, ["__T__"])
    with pytest.raises(TooMany):
        substitute.replaced_in_body(BodyForm.TEXT, body, {"__T__": "x"}, LIMIT)
    with pytest.raises(TooMany):
        substitute.replaced_in_body(BodyForm.TEXT, b"__T__", {"__T__": "x" * 11}, 10)
    with pytest.raises(TooMany):  # matches that are none also cost time
        substitute.in_target(b"%__T__" * (10 * MAX_MATCHES + 1), ["__T__"])
    with pytest.raises(TooMany):
        substitute.in_body(BodyForm.JSON, b"__T__," * (10 * MAX_MATCHES + 1), ["__T__"])
    assert {"__T__"} == substitute.in_body(BodyForm.TEXT, b"__T__" * MAX_MATCHES, ["__T__"])


def test_a_body_is_utf8_or_not_over_the_edges_of_slices() -> None:
    text = ("x" * ((1 << 16) - 1) + "\u20ac").encode()

    assert substitute.is_utf8(text)
    assert not substitute.is_utf8(text[:-1])
    assert not substitute.is_utf8(b"\xff" + text)
