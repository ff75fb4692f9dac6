"""Unit tests of keys, tokens, claims, counts and the browser guard. The routes that use them are in `test_guesses`."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle.api.auth import BrowserGuard, Caller, Refusals, split_authority
from lifecycle.api.credentials import Claim, KeyRing, digest
from lifecycle.api.errors import ApiError

BURST = 20
KEY, OTHER = "test-api-key-0123456789", "another-key-0123456789"
KEYS = KeyRing((digest(KEY), digest(OTHER)))
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


# -- keys


# -- tokens


# -- counts


@given(st.lists(st.tuples(st.floats(0, 3), st.booleans(), st.sampled_from([HERE, THERE])), max_size=120))
def test_the_attempts_of_an_address_are_bounded_by_time(steps: list[tuple[float, bool, str]]) -> None:
    """For any sequence: one burst, then one attempt in two seconds. Other addresses are not affected."""
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
    """The wait in Retry-After is enough; a shorter one is not."""
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
    assert caller.proves(KEYS.claim(KEY))  # a right claim costs no attempt


def test_attempts_beyond_the_last_are_not_owed(refusals: Refusals, clock: Clock) -> None:
    for _ in range(5 * BURST):
        refusals.count(HERE, "api")
    clock.now += 2.0
    assert 0 == refusals.seconds(HERE, "api")


def test_a_claim_that_has_to_wait_is_not_compared(refusals: Refusals) -> None:
    """Neither alone nor together with a claim at another target that may be tried."""
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
    """Two claims at one target are two attempts. All are compared, so the time does not reveal which one was right."""
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
    """Any number of addresses uses bounded memory, and the latest addresses are kept."""
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
    """A machine can use many IPv6 addresses of its network; they count as one caller."""
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
    """A malformed name in the settings allows no malformed Host header."""
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
