"""Properties of `vault.secret`."""

import copy
import json
import logging
import pickle
from collections.abc import Callable

import pytest

from vault.secret import MAX_SECRET_BYTES, Secret, text_problem, value_problem

CANARY = "canary-4f1d8a"


@pytest.mark.parametrize("show", [repr, str, lambda s: "%s" % s, lambda s: f"{s!r}", lambda s: repr([s, {"a": s}])])  # noqa: UP031
def test_what_shows_a_secret_shows_a_fixed_text(show: Callable[[object], str]) -> None:
    """No text form contains the value."""
    shown = show(Secret(CANARY))
    assert CANARY not in shown
    assert "hidden" in shown


@pytest.mark.parametrize(
    "use",
    [
        lambda s: f"{s}",
        lambda s: "{}".format(s),  # noqa: UP032
        lambda s: format(s, ">10"),
        pickle.dumps,
        copy.copy,
        copy.deepcopy,
        json.dumps,
        hash,
        lambda s: s.__getstate__(),
        lambda s: s.__reduce__(),
    ],
)
def test_what_would_carry_a_secret_away_raises_without_it(use: Callable[[object], object]) -> None:
    """Formatting, copying, pickling, JSON and hashing raise an error without the value."""
    with pytest.raises(TypeError) as caught:
        use(Secret(CANARY))
    assert CANARY not in str(caught.value)


def test_a_logged_secret_is_hidden(caplog: pytest.LogCaptureFixture) -> None:
    """A log line with a secret as its argument does not contain the value."""
    logging.getLogger("x").warning("value %s", Secret(CANARY))
    assert "value Secret(hidden)" in caplog.text


def test_secrets_are_equal_exactly_when_their_texts_are() -> None:
    """Equality compares values. A secret never equals a plain text."""
    assert Secret("a") == Secret("a")
    assert Secret("a") != Secret("b")
    assert Secret("a") != "a"
    assert Secret("\ud800") == Secret("\ud800")


def test_an_identity_is_equal_for_equal_texts_under_one_key_only() -> None:
    """It contains nothing of the text, and two keys give unrelated identities."""
    one, other = bytes(32), bytes(31) + b"1"
    assert Secret(CANARY).identity(one) == Secret(CANARY).identity(one)
    assert Secret(CANARY).identity(one) != Secret(CANARY + "x").identity(one)
    assert Secret(CANARY).identity(one) != Secret(CANARY).identity(other)
    assert 32 == len(Secret("\ud800").identity(one))


def test_a_secret_does_not_change() -> None:
    """Attributes can be neither set nor deleted."""
    secret = Secret("a")
    with pytest.raises(AttributeError):
        secret._text = "b"
    with pytest.raises(AttributeError):
        del secret._text
    assert "a" == secret.reveal()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("two words", None),
        ("X-RN0-xrn", None),
        ("pässwörd", None),
        ("", "the value is empty"),
        ("a\n", "the value contains a line break or NUL"),
        ("a\rb", "the value contains a line break or NUL"),
        ("a\0b", "the value contains a line break or NUL"),
        (" a", "the value begins or ends with white space"),
        ("a\t", "the value begins or ends with white space"),
        ("\ud800", "the value is not valid Unicode text"),
        ("x" * 7, "the value is shorter than 8 characters: it could not be taken out of responses"),
        ("é" * 7, "the value is shorter than 8 characters: it could not be taken out of responses"),
        ("x" * 8, None),
        ("x" * MAX_SECRET_BYTES, None),
        ("x" * (MAX_SECRET_BYTES + 1), f"the value is over {MAX_SECRET_BYTES} bytes"),
        ("é" * (MAX_SECRET_BYTES // 2 + 1), f"the value is over {MAX_SECRET_BYTES} bytes"),
    ],
)
def test_values_that_break_a_header_are_named(text: str, problem: str | None) -> None:
    """Each kind of unusable value is refused with a message that does not quote it."""
    assert problem == value_problem(text)


def test_an_inline_value_may_have_line_breaks() -> None:
    """The API stores inline values verbatim. The rendered header is checked there."""
    assert text_problem("-----BEGIN\nX\n") is None
