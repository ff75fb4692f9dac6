"""The search for placeholders of the sandbox. `exchange_cases` has requests, through each engine."""

import base64
import itertools
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dns.names import NameBudget
from gateway.ledger import Ledger
from gateway.placeholders import NONE, RULE, BodySearch, Placeholders, refusal
from policy.compiled import DENY_ALL

FIRST, SECOND = "ghp_" + "aB3" * 12, "tok-" + "Zy9" * 12
KNOWN = Placeholders({FIRST: "first", SECOND: "second"})


@given(st.binary(max_size=100), st.binary(max_size=100), st.lists(st.integers(1, 250), max_size=6))
def test_a_placeholder_in_a_body_is_found_over_any_split(before: bytes, after: bytes, places: list[int]) -> None:
    """In the piece in which it ends. The rest of the body has none."""
    body = before + SECOND.encode() + after
    cuts = [0, *sorted({place for place in places if place < len(body)}), len(body)]
    search = BodySearch(KNOWN)
    found = [search.find(body[begin:end]) for begin, end in itertools.pairwise(cuts)]
    end = len(before) + len(SECOND)
    holding = next(number for number, cut in enumerate(cuts[1:]) if cut >= end)
    assert "second" == found[holding]
    assert [None] * holding == found[:holding]


@given(st.binary(max_size=200), st.integers(0, len(FIRST) - 1))
def test_a_part_of_a_placeholder_is_none(around: bytes, cut: int) -> None:
    """One character is missing."""
    search = BodySearch(KNOWN)
    assert None is search.find(around + FIRST[:cut].encode())
    assert None is search.find(b"\0" + FIRST[cut + 1 :].encode())


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        (f"/a/{FIRST}".encode(), ()),
        (f"/?{FIRST}=1".encode(), ()),
        (b"/?a=" + "".join(f"%{ord(one):02x}" for one in FIRST).encode(), ()),
        (b"/", ((b"X-A", f"b {FIRST}".encode()),)),
        (b"/", ((FIRST.encode(), b"1"),)),
        (b"/", ((b"X-A", quote(f"/{FIRST}", safe="").encode().replace(b"B", b"%42")),)),
        (b"/", ((b"Authorization", b"Basic " + base64.b64encode(f"u:{FIRST}".encode())),)),
        (b"/", ((b"authorization", b"bASIC   " + base64.b64encode(f"{FIRST}:".encode()).rstrip(b"=")),)),
    ],
)
def test_a_placeholder_in_a_head_is_found(target: bytes, headers: tuple[tuple[bytes, bytes], ...]) -> None:
    """By the name of its secret. A sandbox without placeholders finds none."""
    assert "first" == KNOWN.in_head(target, headers)
    assert None is NONE.in_head(target, headers)


def test_other_texts_are_no_placeholders() -> None:
    """Of another sandbox, in another case, broken escapes and credentials."""
    other = FIRST.replace("aB3", "aB4").encode()
    headers = (
        (b"Authorization", b"Basic !!"),
        (b"A", b"Basic"),
        (b"B", b"%"),
        (b"C", FIRST.lower().encode()),
        (b"D", b"Basic " + base64.b64encode(b"\xff:" + other)),
    )
    assert None is KNOWN.in_head(b"/%zz?a=" + other, headers)


def test_a_name_with_a_placeholder_is_denied_before_it_counts() -> None:
    """In lower case, as names are."""
    names = NameBudget(Ledger.fresh())
    host = f"x{FIRST.lower()}.example.com"
    denied = names.admit(DENY_ALL, host, 0.0)
    assert denied is None or RULE != denied.rule
    names.placeholders = KNOWN
    denied = names.admit(DENY_ALL, host, 0.0)
    assert denied is not None
    assert (RULE, True) == (denied.rule, "secret first" in denied.reason)


def test_no_text_shows_a_placeholder() -> None:
    """Denials and debugging output name the secret, or a number."""
    assert "Placeholders(2)" == repr(KNOWN)
    assert "first" in refusal("first").reason
