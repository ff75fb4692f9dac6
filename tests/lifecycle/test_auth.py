"""Keys, tokens, claims, counts and what a browser may do, each by itself; the ways in are in `test_guesses`."""

import base64
import hmac
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle.auth import BrowserGuard, Caller, Claim, KeyRing, Purpose, Refusals, Tokens, digest, split_authority
from lifecycle.errors import ApiError

BURST = 20
KEY, OTHER = "test-api-key-0123456789", "another-key-0123456789"
KEYS = KeyRing((digest(KEY), digest(OTHER)))
TOKENS = Tokens(b"k" * 32)
HERE, THERE = "192.0.2.1", "192.0.2.2"


@dataclass
class Clock:
    """A clock that a test sets."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(name="clock")
def _clock() -> Clock:
    return Clock()


@pytest.fixture(name="refusals")
def _refusals(clock: Clock) -> Refusals:
    return Refusals(BURST, 0.5, clock)


def proves(*claims: Claim) -> bool:
    return Caller.at(HERE, Refusals()).proves(*claims)


# -- keys


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
    """The digest as it is stored is none, nor is text that is not UTF-8, which raises nothing."""
    assert not proves(KEYS.claim(key))


def test_a_key_of_any_bytes_is_taken() -> None:
    """A header is bytes: those that are not UTF-8 are lone surrogates in the text."""
    assert proves(KeyRing((digest("k\udcff"),)).claim("k\udcff"))
    assert not proves(KeyRing((digest("k\udcff"),)).claim("k\udcfe"))


def test_an_empty_key_is_never_one_of_ours() -> None:
    """Though its digest is configured."""
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
    """As many comparisons for the first key as for a wrong one, all of `hmac.compare_digest`."""
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
    """What claims to be Basic credentials and is none raises nothing."""
    assert not KEYS.occurs_in(value)


# -- tokens


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
    """It may be logged."""
    claims = (KEYS.claim(KEY), TOKENS.claim(Purpose.EGRESS, "sbx-1", "token-of-a-sandbox"))
    assert not any(word in repr(claims) for word in (KEY, "token-of-a-sandbox"))


# -- counts


@given(st.lists(st.tuples(st.floats(0, 3), st.booleans(), st.sampled_from([HERE, THERE])), max_size=120))
def test_the_attempts_of_an_address_are_bounded_by_time(steps: list[tuple[float, bool, str]]) -> None:
    """Whenever and however often: a burst, and then one for each two seconds; others are not touched."""
    clock = Clock()
    refusals = Refusals(BURST, 0.5, clock)
    compared = dict.fromkeys((HERE, THERE), 0)
    for pause, right, address in steps:
        clock.now += pause
        try:
            proven = Caller.at(address, refusals).proves(KEYS.claim(KEY if right else "wrong"))
        except ApiError as error:
            assert 429 == error.status
            continue
        assert right == proven
        compared[address] += not right
        assert compared[address] <= BURST + clock.now * 0.5
    assert Caller.at("192.0.2.3", refusals).proves(KEYS.claim(KEY))


def test_attempts_come_back_with_time_and_never_more_than_a_burst(refusals: Refusals, clock: Clock) -> None:
    """The wait that is named is enough, and less is not."""
    caller = Caller.at(HERE, refusals)
    for rest in (0.0, 10_000.0):
        clock.now += rest
        assert [False] * BURST == [caller.proves(KEYS.claim("wrong")) for _ in range(BURST)]
        with pytest.raises(ApiError) as refused:
            caller.proves(KEYS.claim(KEY))
        assert (429, "2") == (refused.value.status, refused.value.headers["Retry-After"])
    clock.now += 1.9
    with pytest.raises(ApiError) as refused:
        caller.proves(KEYS.claim(KEY))
    assert "1" == refused.value.headers["Retry-After"]
    clock.now += 0.1
    assert caller.proves(KEYS.claim(KEY))
    assert caller.proves(KEYS.claim(KEY))  # a right one costs nothing


def test_attempts_beyond_the_last_are_not_owed(refusals: Refusals, clock: Clock) -> None:
    for _ in range(5 * BURST):
        refusals.count(HERE, "api")
    clock.now += 2.0
    assert 0 == refusals.seconds(HERE, "api")


def test_a_claim_that_has_to_wait_is_not_compared(refusals: Refusals) -> None:
    """Neither then nor together with one at another target that may be tried."""
    asked: list[str] = []

    def claim(target: str, right: bool) -> Claim:
        return Claim(target, True, lambda: bool(asked.append(target)) or right)

    caller = Caller.at(HERE, refusals)
    for _ in range(BURST):
        refusals.count(HERE, "full")
    with pytest.raises(ApiError):
        caller.proves(claim("full", True), claim("free", False))
    assert ["free"] == asked
    assert caller.proves(claim("full", False), claim("free", True))
    assert ["free", "free"] == asked


def test_each_wrong_claim_counts_and_a_right_one_clears_the_rest(refusals: Refusals) -> None:
    """Two claims at one target are two attempts; all are compared, so time does not tell which was right."""
    asked: list[bool] = []

    def claim(right: bool, presented: bool = True) -> Claim:
        return Claim("api", presented, lambda: asked.append(right) or right)

    caller = Caller.at(HERE, refusals)
    assert caller.proves(claim(True), claim(False), claim(False, presented=False))
    assert [True, False] == asked
    assert 0 == len(refusals)
    for _ in range(BURST // 2):
        assert not caller.proves(claim(False), claim(False))
    with pytest.raises(ApiError):
        caller.proves(claim(True))


def test_what_is_not_presented_proves_nothing_and_costs_nothing(refusals: Refusals) -> None:
    caller = Caller.at(HERE, refusals)
    assert not caller.proves()
    assert not caller.proves(Claim("api", False, lambda: True))
    assert 0 == len(refusals)


def test_counts_are_bounded_in_number() -> None:
    """Addresses without end take no memory without end, and the latest are known."""
    refusals = Refusals(1, 0.5, Clock())
    first, again = "10.255.0.1", "10.255.0.2"
    for address in (first, again):
        refusals.count(address, "api")
    for number in range(8192):
        refusals.count(f"10.0.{number >> 8}.{number & 255}", "api")
        if number == 4000:
            refusals.count(again, "api")
    assert 8192 == len(refusals)
    assert [0, 0] == [refusals.seconds(address, "api") for address in (first, "10.0.0.0")]
    assert 0 < refusals.seconds(again, "api")
    with pytest.raises(ApiError):
        Caller.at("10.0.31.254", refusals).proves(KEYS.claim(KEY))


# -- callers


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:0:ffff::1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("192.0.2.1", "192.0.2.2", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        (None, "not an address", True),
        ("", "unknown", True),
        ("unknown", "192.0.2.1", False),
    ],
)
def test_addresses_of_one_machine_are_one_caller(one: str | None, other: str | None, same: bool) -> None:
    """A machine has as many IPv6 addresses as it likes; they are one."""
    refusals = Refusals()
    assert same == (Caller.at(one, refusals).peer == Caller.at(other, refusals).peer)


# -- browsers


@pytest.mark.parametrize(
    ("authority", "host"),
    [
        ("Example.ORG", "example.org"),
        (" example.org:8080 ", "example.org"),
        ("example.org:", "example.org"),
        ("[2001:DB8::1]:443", "2001:db8::1"),
        ("example.org:80:90", ""),
        ("example.org:x", ""),
        ("", ""),
    ],
)
def test_an_authority_is_split(authority: str, host: str) -> None:
    assert host == split_authority(authority)


@pytest.mark.parametrize(
    ("authority", "allowed"),
    [
        ("sallyport.test", True),
        ("SALLYPORT.test:1234", True),
        ("localhost:1", True),
        ("127.0.0.1:1", True),
        ("[::1]:1", True),
        ("192.0.2.1", True),
        ("sallyport.test.evil.test", False),
        ("evil.test", False),
        ("localhost.evil.test", False),
        ("127.0.0.1.evil.test", False),
        ("evil.test:x", False),
        ("", False),
        ("2130706433", False),
    ],
)
def test_only_hosts_of_ours_are_allowed(authority: str, allowed: bool) -> None:
    """A malformed name in the settings allows no malformed Host."""
    guard = BrowserGuard.of(("Sallyport.Test:99", "", "a:b:c"))
    assert allowed == guard.host_allowed(authority)


@pytest.mark.parametrize(
    ("origins", "allowed"),
    [
        ((), True),
        (("http://sallyport.test:8080",), True),
        (("HTTP://Sallyport.test:8080",), True),
        (("http://sallyport.test:8080", "http://evil.test"), False),
        (("http://evil.test", "http://sallyport.test:8080"), False),
        (("http://evil.test",), False),
        (("https://sallyport.test:8080",), False),
        (("http://sallyport.test",), False),
        (("http://sallyport.test:8080/",), False),
        (("null",), False),
        (("",), False),
    ],
)
def test_only_this_server_is_an_origin(origins: tuple[str, ...], allowed: bool) -> None:
    guard = BrowserGuard.of(())
    assert allowed == guard.origin_allowed(origins, "Sallyport.TEST:8080", "http")
