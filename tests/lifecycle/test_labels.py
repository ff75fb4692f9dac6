"""Labels of sandboxes: their alphabet, patches and filters."""

import pytest

from lifecycle.api.errors import ApiError
from lifecycle.sandboxes.labels import MAX_LABELS, check, parse_filter, patched

FULL = {f"k{number}": "v" for number in range(MAX_LABELS)}


@pytest.mark.parametrize("metadata", [{}, {"a": ""}, {"a.b/c_d": "E-1"}, {"a" * 63: "b" * 63}, FULL])
def test_a_label_is_taken(metadata: dict[str, str]) -> None:
    check(metadata)


@pytest.mark.parametrize(
    "metadata",
    [
        *({key: "v"} for key in ("", "-a", "a-", "a b", "/a", "a/", "A/b", "a" * 64, "opensandbox.io/a", "\u00e9")),
        *({"a": value} for value in ("-v", "v v", "v" * 64, "v\n")),
        {**FULL, "more": "v"},
    ],
)
def test_another_label_is_refused(metadata: dict[str, str]) -> None:
    with pytest.raises(ApiError) as caught:
        check(metadata)
    assert 400 == caught.value.status


def test_a_patch_sets_and_removes() -> None:
    before = {"a": "1", "b": "2"}
    assert {"b": "3", "c": "4"} == patched(before, {"a": None, "b": "3", "c": "4", "absent": None})
    assert {"a": "1", "b": "2"} == before


def test_a_patch_keeps_the_bounds() -> None:
    assert FULL | {"k0": "w"} == patched(FULL, {"k0": "w"})
    for patch in ({"more": "v"}, {"opensandbox.io/a": None}):
        with pytest.raises(ApiError):
            patched(FULL, patch)


def test_a_filter_is_pairs_that_are_decoded_once() -> None:
    assert {} == parse_filter("")
    assert {"a": "1 2", "b/c": "", "d": "=%41"} == parse_filter("a=1+2&b%2Fc=&d==%2541")


@pytest.mark.parametrize("text", ["a", "=1", "a=1&", "a=%4", "&".join(["a=1"] * (MAX_LABELS + 1))])
def test_another_filter_is_refused(text: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_filter(text)
    assert (400, "INVALID_METADATA_FORMAT") == (caught.value.status, caught.value.code)
