"""The tree of a text: scalars, places, and refusals."""

from typing import Any

import pytest

from policy.problems import PolicyError, Problems
from policy.yaml_tree import parse


def value(text: str) -> Any:
    """Return the value of the key `a`."""
    return parse(text, "(text)", Problems()).value["a"][1].value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("true", True), ("false", False), ("null", None), ("12", 12), ("no", "no"), ("on", "on"), ("1:30", "1:30")),
        *(("0443", "0443"), ("1.5", "1.5"), ("2026-01-01", "2026-01-01"), ("'12'", "12"), ('"true"', "true")),
    ],
)
def test_a_scalar_is_what_it_looks_like(text: str, expected: object) -> None:
    found = value(f"a: {text}\n")
    assert (expected, type(expected)) == (found, type(found))


def test_a_node_knows_its_place() -> None:
    key, node = parse("a:\n  b: c\n", "(text)", Problems()).value["a"][1].value["b"]
    assert (2, 3, 2, 6) == (key.line, key.column, node.line, node.column)


@pytest.mark.parametrize(
    "text", ["a: &x 1\n", "a: !!str 1\n", "a: 1\na: 2\n", "1: a\n", "a: {b: 1, b: 2}\n", "a: *x\n"]
)
def test_a_forbidden_construct_is_noted_at_its_place(text: str) -> None:
    problems = Problems()
    parse(text, "(text)", problems)
    assert 1 == len(problems)


@pytest.mark.parametrize("text", ["", "--- a\n--- b\n", "a: [\n", "a: \0\n", "[" * 500 + "]" * 500])
def test_a_text_that_is_no_tree_is_refused(text: str) -> None:
    with pytest.raises(PolicyError):
        parse(text, "(text)", Problems())
