"""Callers' JSON has only one interpretation."""

import pytest

from policy.strict import StrictError, decode, members, place


@pytest.mark.parametrize(
    "body",
    [b"", b"{} {}", b'{"a": 1, "a": 1}', b'{"x": {"a": 1, "a": 1}}', b"NaN", b"[Infinity]", b"\xff", b"[" * 100_000],
)
def test_a_document_that_can_be_read_in_two_ways_is_refused(body: bytes) -> None:
    with pytest.raises(StrictError):
        decode(body)


def test_a_document_is_read() -> None:
    assert {"a": [1, "x"]} == decode(b'{"a": [1, "x"]}')


def test_only_known_members_are_taken() -> None:
    assert {"a": 1} == members({"a": 1}, ("a", "b"))
    for value in ({"c": 1}, {"A": 1}, {"a": None}, [], "a"):
        with pytest.raises(StrictError):
            members(value, ("a", "b"))


def test_names_that_differ_in_case_only_are_one_where_case_is_folded() -> None:
    assert {"aB": 1} == members({"AB": 1}, ("aB",), fold=True)
    with pytest.raises(StrictError, match="duplicate"):
        members({"AB": 1, "ab": 1}, ("aB",), fold=True)


def test_an_error_names_its_place_and_no_value() -> None:
    with pytest.raises(StrictError) as caught:
        members({"more": "hidden"}, (), ("egress", 0))
    assert 'unknown field "egress[0].more"' == str(caught.value)
    assert "a[1].b" == place(("a", 1, "b"))
