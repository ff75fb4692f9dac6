"""The document of a tree: its content, and the place of each mistake. Whole files are in `test_load`."""

import pytest

from policy.problems import PolicyError, Problems
from policy.schema import read_document
from policy.yaml_tree import parse


def read(text: str) -> list[tuple[int, int]]:
    """Return the places of all mistakes."""
    problems = Problems()
    try:
        read_document(parse(text, "(text)", problems), "(text)", problems)
    except PolicyError as error:
        return [(one.line, one.column) for one in error.problems]
    return []


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("version: 1\n", []),
        ("version: 2\n", [(1, 10)]),
        ("version: 1\nother: 1\n", [(2, 1)]),
        ("version: 1\ndefault: absent\n", [(2, 10)]),
        ("version: 1\npolicies:\n  a: {extends: [b]}\n", [(3, 17)]),
        ("version: 1\nfirst: 1\nsecond: 2\n", [(2, 1), (3, 1)]),
    ],
)
def test_each_mistake_has_its_place(text: str, places: list[tuple[int, int]]) -> None:
    assert places == read(text)
