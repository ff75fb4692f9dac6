"""Valid and invalid identifiers."""

import pytest

from wire.ids import MOST_GENERATION, check_digest, check_generation, check_sandbox


@pytest.mark.parametrize("text", ["a", "0", "sbx-1", "a-", "a" * 63])
def test_an_id_is_lower_case_letters_digits_and_hyphens(text: str) -> None:
    check_sandbox(text)


@pytest.mark.parametrize(
    "text", ["", "-a", "A", "a.b", "a/b", "..", "a_b", "a\n", "a\0", "\u0661", "\u00e9", "a" * 64, " a"]
)
def test_no_other_text_is_an_id(text: str) -> None:
    with pytest.raises(ValueError, match="sandbox id"):
        check_sandbox(text)


@pytest.mark.parametrize(
    ("number", "good"), [(0, False), (1, True), (MOST_GENERATION, True), (MOST_GENERATION + 1, False)]
)
def test_a_generation_begins_with_1_and_is_exact_in_json(number: int, good: bool) -> None:
    try:
        check_generation(number)
    except ValueError as refused:
        assert not good
        assert "a generation is a number" in str(refused)
    else:
        assert good


@pytest.mark.parametrize("text", ["a" * 63, "a" * 65, "A" * 64, "g" * 64, "a" * 64 + "\n"])
def test_a_digest_is_64_lower_case_digits(text: str) -> None:
    check_digest("0123456789abcdef" * 4)
    with pytest.raises(ValueError, match="SHA-256"):
        check_digest(text)
