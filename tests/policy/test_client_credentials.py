"""Credentials that the client itself sends: where they are found, and what is left of a request."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.client_credentials import (
    DEFAULT,
    ClientCredentials,
    Examined,
    Handling,
    Owned,
    SlotHandling,
    examine,
    made,
    refusal,
    slot_name,
    strictest,
)
from policy.injection import InjectionKind, InjectionPlan, SubstitutionPlan, Surface

REFUSE, STRIP, ALLOW = Handling.REFUSE, Handling.STRIP, Handling.ALLOW
OPEN = ClientCredentials(ALLOW, ALLOW, ALLOW)
CUT = ClientCredentials(STRIP, STRIP, STRIP)
PLAIN = ((b"Accept", b"*/*"), (b"User-Agent", b"x"))


def of(
    *headers: tuple[bytes, bytes], query: str = "", handling: ClientCredentials = DEFAULT, owned: str = ""
) -> Examined:
    slots = (slot if ":" in slot else f"header:{slot}" for slot in owned.split())
    return examine(handling, Owned(frozenset(slots)), headers, query)


def named(**slots: Handling) -> dict[str, Handling]:
    return {name.replace("__", ":").replace("_", "-"): handling for name, handling in slots.items()}


def test_a_request_without_credentials_stays_as_it_is() -> None:
    for handling in (DEFAULT, OPEN, CUT):
        assert Examined((), (), (), PLAIN, "a=1&b;c") == of(*PLAIN, query="a=1&b;c", handling=handling)


@pytest.mark.parametrize(
    "name", [b"Authorization", b"AUTHORIZATION", b"X-Api-Key", b"x_api_key", b"PRIVATE-TOKEN", b"X-Corp-Token"]
)
@pytest.mark.parametrize("value", [b"Bearer x", b"Basic eDp5", b"x", b""])
def test_a_header_is_refused_whatever_its_value(name: bytes, value: bytes) -> None:
    found = of(*PLAIN, (name, value))
    assert (f"header:{name.decode().lower().replace('_', '-')}",) == found.refused
    assert () == found.stripped == found.forwarded


@pytest.mark.parametrize("query", ["key=x", "a=1&access_token=x", "a=1;token", "%74oken=x", "b&auth[token]=1"])
def test_a_query_key_is_refused(query: str) -> None:
    assert 1 == len(of(query=query).refused)


def test_cookies_are_stripped() -> None:
    found = of((b"Cookie", b"a=1; b=2"), *PLAIN, (b"cookie", b"c"))
    assert Examined((), ("cookie",), (), PLAIN, "") == found


def test_what_is_stripped_leaves_all_other_bytes() -> None:
    headers = ((b"A", b"1"), (b"Authorization", b"x"), (b"a", b" 2"), (b"X-Api-Key", b"y"), (b"Cookie", b"z=1"))
    found = of(*headers, query="a=%31;token=x&&b==&sig;c", handling=CUT)
    assert ((b"A", b"1"), (b"a", b" 2")) == found.headers
    assert "a=%31&&b==;c" == found.query
    assert ("header:authorization", "header:x-api-key", "cookie", "query:token", "query:sig") == found.stripped
    assert "" == of(query="token=x&key=y", handling=CUT).query


def test_what_is_allowed_stays_and_is_named() -> None:
    headers = ((b"Authorization", b"x"), (b"Cookie", b"z=1"))
    found = of(*headers, query="token=x", handling=OPEN)
    assert Examined((), (), ("header:authorization", "cookie", "query:token"), headers, "token=x") == found


def test_an_owned_slot_is_left_to_the_injection() -> None:
    headers = ((b"authorization", b"x"), (b"X_Api_Key", b"y"))
    found = of(*headers, (b"Cookie", b"s=1; t=2"), query="Key=1", owned="authorization x-api-key cookie:s query:key")
    assert () == found.refused
    assert ("cookie",) == found.stripped
    assert (*headers, (b"Cookie", b"s=1")) == found.headers
    assert "Key=1" == found.query
    assert ("header:x-api-key",) == of((b"X-Api-Key", b"y"), owned="authorization").refused
    assert ("query:*token",) == of(query="access_token=x", owned="query:token").refused


def test_the_plans_of_a_request_own_their_slots() -> None:
    plans = [
        InjectionPlan("b", "s", InjectionKind.API_KEY, "X_own-Key"),
        InjectionPlan("b", "s", InjectionKind.QUERY, "Key"),
        InjectionPlan("b", "s", InjectionKind.COOKIE, "Sid"),
        SubstitutionPlan("b", "s", "{T}", (Surface.HEADER, Surface.BODY)),
        SubstitutionPlan("b", "s", "{Q}", (Surface.QUERY, Surface.PATH)),
    ]
    owned = Owned.by(plans)
    assert (
        Owned(frozenset({"header:x-own-key", "query:key", "cookie:Sid"}), frozenset({b"{T}"}), frozenset({"{Q}"}))
        == owned
    )
    assert Owned() == Owned.by(())


@pytest.mark.parametrize(
    ("header", "query", "refused"),
    [
        ((b"Authorization", b"Bearer {T}"), "", ()),
        ((b"Authorization", b"{T}"), "", ()),
        ((b"X-Api-Key", b"{T}"), "", ()),
        ((b"Authorization", b"Bearer own{T}"), "", ("header:authorization",)),
        ((b"Authorization", b"Bearer own {T}"), "", ("header:authorization",)),
        ((b"Authorization", b"Bearer  {T}"), "", ("header:authorization",)),
        ((b"Authorization", b"Bearer {T}, Basic own"), "", ("header:authorization",)),
        ((b"X-Api-Key", b"{t}"), "", ("header:x-api-key",)),
        ((b"X-Api-Key", b"{Q}"), "", ("header:x-api-key",)),
        ((b"X-Own", b"1"), "token={Q}&sig={Q}", ()),
        ((b"X-Own", b"1"), "token={T}", ("query:token",)),
        ((b"X-Own", b"1"), "token={Q}&token=own", ("query:token",)),
        ((b"X-Own", b"1"), "token={Q}own", ("query:token",)),
    ],
)
def test_a_placeholder_alone_is_no_credential_of_the_client(
    header: tuple[bytes, bytes], query: str, refused: tuple[str, ...]
) -> None:
    """On its own surface, and with nothing beside it but the name of a scheme."""
    owned = Owned(in_headers=frozenset({b"{T}"}), in_query=frozenset({"{Q}"}))
    assert refused == examine(DEFAULT, owned, (header,), query).refused


@pytest.mark.parametrize(
    ("name", "login", "refused"),
    [
        (b"Authorization", b"bot:{T}", ()),
        (b"Authorization", b"own-key:{T}", ("header:authorization",)),
        (b"Authorization", b"bot:{T}x", ("header:authorization",)),
        (b"Authorization", b"bot", ("header:authorization",)),
        (b"X-Api-Key", b"bot:{T}", ("header:x-api-key",)),
    ],
)
def test_a_login_is_the_policys_with_its_user_name_and_placeholder(
    name: bytes, login: bytes, refused: tuple[str, ...]
) -> None:
    """With another user name the client could use an account of its own: some servers read no password."""
    owned = Owned.by([SubstitutionPlan("b", "s", "{T}", (Surface.BASIC,), "bot")])
    header = name, b"Basic " + base64.b64encode(login)
    assert refused == examine(DEFAULT, owned, (header,), "").refused


def test_a_cookie_with_a_placeholder_stays_beside_others() -> None:
    owned = Owned(in_headers=frozenset({b"{T}"}))
    found = examine(DEFAULT, owned, ((b"Cookie", b"a=1; sid={T}; b={T}x"),), "")
    assert ((b"Cookie", b"sid={T}"),) == found.headers


def test_a_single_slot_has_its_own_handling() -> None:
    handling = made(
        {}, named(header__x_api_key=ALLOW, header__x_trace=REFUSE, query__sig=STRIP, cookie__theme=ALLOW), DEFAULT
    )
    found = of(
        (b"X-Api-Key", b"1"), (b"Cookie", b"theme=dark; session=x; theme=light"), query="Sig=1&a", handling=handling
    )
    assert ("cookie", "query:sig") == found.stripped
    assert ("header:x-api-key", "cookie:theme") == found.forwarded
    assert ((b"X-Api-Key", b"1"), (b"Cookie", b"theme=dark; theme=light")) == found.headers
    assert "a" == found.query
    assert ("header:x-trace",) == of((b"X-Trace", b"1"), handling=handling).refused
    assert () == of((b"X-Trace", b"1")).refused


@pytest.mark.parametrize("value", [b"theme=dark, session=x", b'theme="a; session=x"', b"theme=dark,session=x"])
def test_a_cookie_that_can_be_read_as_two_has_no_name(value: bytes) -> None:
    handling = made({}, {"cookie:theme": ALLOW}, DEFAULT)
    assert ("cookie",) == of((b"Cookie", value), handling=handling).stripped
    assert ("cookie",) == of((b"Cookie", value), owned="cookie:theme").stripped


def test_the_names_of_slots() -> None:
    assert "header:x-api-key" == slot_name("header:X_Api-Key")
    assert "query:X-Amz-Signature" == slot_name("query:X-Amz-Signature")
    assert "cookie:Session" == slot_name("cookie:Session")
    for text in (
        *("", "x-api-key", "header:", "header:host", "header:content_length", "header:a b", "header:cookie", "cookie:"),
        *("cookie:a=b", "cookie:a;b", "query:", "query:a&b", "query:a;b", "query:a b", "query:-", "body:x", "headers"),
    ):
        with pytest.raises(ValueError, match=r"slot|header|cookie"):
            slot_name(text)
    with pytest.raises(ValueError, match="canonical"):
        SlotHandling("header:X-A", REFUSE)
    with pytest.raises(ValueError, match="sorted"):
        ClientCredentials(slots=(SlotHandling("header:b", REFUSE), SlotHandling("header:a", REFUSE)))


def test_the_strictest_of_several_handlings_decides() -> None:
    one = made({"headers": ALLOW, "query": STRIP}, {"header:x-a": ALLOW, "query:sig": ALLOW}, DEFAULT)
    other = made({"headers": STRIP, "cookies": ALLOW}, {"cookie:c": REFUSE}, DEFAULT)

    assert one == strictest([one])
    both = strictest([one, other])
    assert both == strictest([other, one])
    assert "headers strip, cookies strip, query refuse, cookie:c refuse, header:x-a strip, query:sig refuse" == str(
        both
    )


def test_a_refusal_names_slots_and_what_to_do() -> None:
    told = refusal(("header:" + "x" * 64,) * 9)
    assert "client_credentials" in told
    assert len(told) <= 512


_NAMES = st.sampled_from([b"Authorization", b"X-Api-Key", b"Cookie", b"Accept", b"x_auth_token", b"X-A"])
_VALUES = st.sampled_from([b"", b"a=1", b"a=1; b=2", b"b", b"Bearer x"])
_QUERIES = st.lists(st.sampled_from(["&", ";", "a=1", "token=x", "sig", "%74oken", "b"]), max_size=8).map("".join)
_HANDLINGS = st.builds(ClientCredentials, *(st.sampled_from(Handling) for _ in range(3)))


@given(st.lists(st.tuples(_NAMES, _VALUES), max_size=5).map(tuple), _QUERIES, _HANDLINGS)
def test_nothing_is_left_to_strip_or_refuse_in_what_remains(
    headers: tuple[tuple[bytes, bytes], ...], query: str, handling: ClientCredentials
) -> None:
    """What is forwarded has the allowed slots only, and is found so again."""
    found = examine(handling, Owned(), headers, query)
    again = examine(handling, Owned(), found.headers, found.query)

    assert () == again.stripped
    assert (found.refused, found.forwarded) == (again.refused, again.forwarded)
    assert (found.headers, found.query) == (again.headers, again.query)
