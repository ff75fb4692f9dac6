"""Unit tests of keys, tokens and claims. The routes that use them are in `test_guesses`."""

import base64
import hmac

import pytest

from lifecycle.api.auth import Caller, Refusals
from lifecycle.api.credentials import Claim, KeyRing, Purpose, Tokens, digest

KEY, OTHER = "test-api-key-0123456789", "another-key-0123456789"
KEYS = KeyRing((digest(KEY), digest(OTHER)))
TOKENS = Tokens(b"k" * 32)
HERE, THERE = "192.0.2.1", "192.0.2.2"


def proves(*claims: Claim) -> bool:
    return Caller.at(HERE, Refusals()).proves(*claims)


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_each_key_is_taken(key: str) -> None:
    assert proves(KEYS.claim(key))


@pytest.mark.parametrize(
    "key",
    [
        "",
        " ",
        KEY[:-1],
        KEY + "x",
        KEY + " ",
        KEY.upper(),
        KEY + "\0",
        KEY + OTHER,
        digest(KEY),
        "é",
        "\udcff",
        "k" * 1_000_000,
    ],
    ids=range(12),
)
def test_no_other_key_is_taken(key: str) -> None:
    """Neither the stored digest nor text that is not UTF-8 is a key; the latter raises no exception."""
    assert not proves(KEYS.claim(key))


def test_a_key_of_any_bytes_is_taken() -> None:
    """A header is bytes. Bytes that are not UTF-8 become lone surrogates in the text."""
    assert proves(KeyRing((digest("k\udcff"),)).claim("k\udcff"))
    assert not proves(KeyRing((digest("k\udcff"),)).claim("k\udcfe"))


def test_an_empty_key_is_never_one_of_ours() -> None:
    """Even if the digest of the empty key is configured."""
    ring = KeyRing((digest(""), digest(KEY)))
    assert not ring.claim("").presented
    assert not ring._accepts("")
    assert not ring.occurs_in("") and not ring.occurs_in("a=; b")


def test_without_keys_nothing_is_claimed() -> None:
    ring = KeyRing(())
    assert (False, True) == (ring.required, KEYS.required)
    assert not ring.claim(KEY).presented
    assert not proves(ring.claim(KEY))
    assert not ring.occurs_in(KEY)


def test_all_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first key and a wrong one cause the same number of comparisons, all with `hmac.compare_digest`."""
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def seen(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", seen)
    for key, right in ((KEY, True), (OTHER, True), ("wrong", False)):
        compared.clear()
        assert right == proves(KEYS.claim(key))
        assert [(digest(key).encode(), known.encode()) for known in KEYS.digests] == compared
    compared.clear()
    for token in (TOKENS.egress("sbx-1"), TOKENS.egress("sbx-1")[:-1], "x"):
        proves(TOKENS.claim(Purpose.EGRESS, "sbx-1", token))
    assert [(32, 32)] * 3 == [(len(one), len(other)) for one, other in compared]


def basic(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    "value",
    [
        KEY,
        f"Bearer {KEY}",
        f"bearer  {KEY} ",
        f"a=1; key={KEY}; b=2",
        f'key="{KEY}"',
        f'key="{KEY}" ; b=2',
        f"key= {KEY} ;",
        f"Basic {basic(f'user:{KEY}')}",
        f"bAsIc {basic(f'{KEY}:')}",
        f"x {OTHER}",
    ],
)
def test_a_key_is_found_in_a_header_value(value: str) -> None:
    assert KEYS.occurs_in(value)


def test_a_key_of_two_words_is_found() -> None:
    assert KeyRing((digest("two words"),)).occurs_in("two words")


@pytest.mark.parametrize(
    "value",
    [
        "",
        ";;=;",
        f"x{KEY}",
        f"key={KEY}x",
        "Basic",
        "Basic !",
        "Basic /w==",
        f"Basic {basic('u:p')}",
        f"Other {basic(KEY)}",
    ],
)
def test_no_key_is_found_where_there_is_none(value: str) -> None:
    """Malformed Basic credentials raise no exception."""
    assert not KEYS.occurs_in(value)


def test_tokens_differ_by_key_purpose_and_sandbox_and_by_nothing_else() -> None:
    rings = (TOKENS, Tokens(b"l" * 32), Tokens(b"k" * 33))
    made = [
        token(name) for ring in rings for token in (ring.execd, ring.egress, ring.secure) for name in ("sbx-1", "sbx-2")
    ]
    assert 18 == len(set(made))
    assert {43} == {len(token) for token in made}
    assert TOKENS.egress("sbx-1") == Tokens(b"k" * 32).egress("sbx-1")
    assert "uyfmnaQpvka70NDMcp5UGBTQwJhlIe3sMEIlfXo8mMQ" == TOKENS.egress("sbx-1")


def test_a_token_opens_only_what_it_is_for() -> None:
    tokens = {Purpose.EXECD: TOKENS.execd, Purpose.EGRESS: TOKENS.egress, Purpose.SECURE: TOKENS.secure}
    for given_for, token in tokens.items():
        for purpose in Purpose:
            assert (purpose is given_for) == proves(TOKENS.claim(purpose, "sbx-1", token("sbx-1")))
            assert not proves(TOKENS.claim(purpose, "sbx-2", token("sbx-1")))


@pytest.mark.parametrize("wrong", ["", "x", "é", "\udcff", "t" * 1_000_000], ids=range(5))
def test_no_other_token_is_taken(wrong: str) -> None:
    right = TOKENS.secure("sbx-1")
    for token in (wrong, right + wrong if wrong else right[:-1], right + "=", right.swapcase()):
        assert not proves(TOKENS.claim(Purpose.SECURE, "sbx-1", token))
    claims = [TOKENS.claim(Purpose.SECURE, "sbx-1", token) for token in ("", "x")]
    assert [("sbx-1", False), ("sbx-1", True)] == [(claim.target, claim.presented) for claim in claims]


def test_a_short_token_key_is_refused_and_none_is_shown() -> None:
    with pytest.raises(ValueError, match="too short"):
        Tokens(b"k" * 31)
    assert "Tokens()" == repr(TOKENS)


def test_a_claim_does_not_show_what_was_presented() -> None:
    """Because a claim can be logged."""
    claims = (KEYS.claim(KEY), TOKENS.claim(Purpose.EGRESS, "sbx-1", "token-of-a-sandbox"))
    assert not any(word in repr(claims) for word in (KEY, "token-of-a-sandbox"))
