"""The permitted contents of a record. No value from traffic can be read as more than one value."""

import hashlib
import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit.records import (
    INTEGERS,
    MAX_INTEGER,
    TEXTS,
    RecordError,
    bounded,
    canonical,
    check_kind,
    escape,
    escaped,
    record,
    unescape,
)

ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()))  # including surrogates


@given(ANY_TEXT | st.text(alphabet="\\u{5c}x1b"))
def test_an_escaped_value_gives_back_the_exact_value(value: str) -> None:
    assert unescape(escape(value)) == value


@given(ANY_TEXT)
def test_an_escaped_value_holds_nothing_that_acts_or_hides(value: str) -> None:
    assert [c for c in escape(value) if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}] == []


@given(st.dictionaries(st.sampled_from(sorted(TEXTS)), ANY_TEXT))
def test_a_line_is_printable_ascii_and_one_object(fields: dict[str, str]) -> None:
    line = canonical(escaped(bounded(fields)))
    assert all(0x20 <= byte <= 0x7E for byte in line)
    assert json.loads(line) == escaped(bounded(fields))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ('plain /a\\b "q" }{', 'plain /a\\b "q" }{'),
        ("\r\n", r"\u{d}\u{a}"),
        ("\x1b[2J\x07\x7f\x9b", r"\u{1b}[2J\u{7}\u{7f}\u{9b}"),
        ("\u202etxt\u2066", r"\u{202e}txt\u{2066}"),
        ("a\u200bb\ufeff", r"a\u{200b}b\u{feff}"),
        ("\ud800", r"\u{d800}"),
        ("\u2028\u2029", r"\u{2028}\u{2029}"),
        ("bücher 東京", "bücher 東京"),
        (r"\u{1b}", r"\u{5c}u{1b}"),
        ("a\ufe0fb\U000e0101", r"a\u{fe0f}b\u{e0101}"),
    ],
)
def test_escape_shows_dangerous_characters_and_keeps_others(value: str, shown: str) -> None:
    assert escape(value) == shown


def test_undecodable_bytes_are_kept_visibly() -> None:
    assert escaped(bounded({"host": b"a\xff.example"})) == {"host": r"a\u{dcff}.example"}


@pytest.mark.parametrize("path", ["/a/b?token=hunter2", "/a/b?x#y", "/a/b#token=hunter2"])
def test_a_path_never_carries_its_query(path: str) -> None:
    assert bounded({"path": path}) == {"path": "/a/b"}


def test_a_ten_megabyte_field_is_cut_and_its_hash_kept() -> None:
    value = "/" + "\ud800é" * 5_000_000
    assert bounded({"path": value}) == {
        "path": value[:2048],
        "path_sha256": hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest(),
        "path_length": len(value),
    }


@given(st.dictionaries(st.sampled_from(sorted(TEXTS)), st.text(max_size=3000) | st.none()))
def test_bounding_twice_changes_nothing(fields: dict[str, str | None]) -> None:
    assert bounded(bounded(fields)) == bounded(fields)


def test_none_means_absent() -> None:
    assert record("dns", "deny", host="a.example", address=None) == {
        "kind": "dns",
        "decision": "deny",
        "host": "a.example",
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"nonsense": "x"},
        {"seq": 1},
        {"prev": "0" * 64},
        {"chain": "control"},
        {"producer": "x"},
        {"ts": "x"},
        {"generation": 2},
        {"host": 1},
        {"port": "443"},
        {"port": True},
        {"port": 1.5},
        {"plaintext": 1},
        {"addresses": "x"},
        {"addresses": [1]},
        {"host_sha256": "zz"},
        {"port_sha256": "0" * 64},
        {"nonsense_length": 1},
    ],
)
def test_an_unknown_field_or_type_is_the_programmers_mistake(fields: dict[str, object]) -> None:
    with pytest.raises(RecordError):
        bounded(fields)


@pytest.mark.parametrize(
    "kind", ["checkpoint", "lifecycle", "lifecycle.", "other.x", "dns\n", "gateway.A", "gateway.other", ""]
)
def test_a_kind_outside_the_list_is_refused(kind: str) -> None:
    with pytest.raises(RecordError):
        check_kind(kind)


@pytest.mark.parametrize("kind", ["dns", "secret.release", "lifecycle.create", "vault.rotate", "gateway.guard"])
def test_a_kind_in_the_list_is_taken(kind: str) -> None:
    assert check_kind(kind) == kind


def test_a_decision_outside_the_list_is_refused() -> None:
    with pytest.raises(RecordError):
        record("dns", "maybe")


@given(st.sampled_from(sorted(INTEGERS)), st.integers())
def test_integers_stay_exact_for_every_reader(name: str, value: int) -> None:
    assert abs(bounded({name: value})[name]) <= MAX_INTEGER  # type: ignore[arg-type]


def test_canonical_bytes_do_not_depend_on_order() -> None:
    assert canonical({"b": 1, "a": "é"}) == canonical({"a": "é", "b": 1}) == b'{"a":"\\u00e9","b":1}'


def test_canonical_bytes_have_no_floats_that_are_not_numbers() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical({"a": float("nan")})


def test_a_list_is_kept_in_its_order_and_cut_to_its_bound() -> None:
    hosts = [f"{number}.example" for number in range(70)]
    assert {"hosts": ["b.example", "a.example"]} == bounded({"hosts": ("b.example", "a.example")})
    assert {"hosts": hosts[:64], "hosts_length": 70} == bounded({"hosts": hosts})


def test_an_unknown_kind_is_named_in_the_refusal() -> None:
    with pytest.raises(RecordError, match="unknown record kind 'none'"):
        record("none", "info")
