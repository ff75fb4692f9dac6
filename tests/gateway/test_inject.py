"""A binding owns its header: the request has the binding's value only, whatever the client sent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.inject import inject, slot

CLIENT = (
    (b"authorization", b"Bearer mine"),
    (b"AUTHORIZATION", b"Basic bWluZQ=="),
    (b"X_Api_Key", b"mine"),
    (b"x-api-key", b"mine"),
    (b"Proxy-Authorization", b"mine"),
    (b"Accept", b"*/*"),
)


def test_every_copy_of_the_slot_is_replaced_by_one():
    headers = inject(CLIENT, [("Authorization", "Bearer secret"), ("X-Api-Key", "other")])
    assert ((b"Accept", b"*/*"), (b"Authorization", b"Bearer secret"), (b"X-Api-Key", b"other")) == headers


def test_proxy_credentials_are_removed_without_any_injection():
    assert CLIENT[:4] + CLIENT[5:] == inject(CLIENT, [])


@pytest.mark.parametrize("value", ["", "a\r\nb", "a\nb", "a\rb", "a\0b", "a\x1bb", "a\x7f"])
def test_a_value_that_is_no_header_value_is_not_sent(value):
    with pytest.raises(ValueError, match="has a control character") as caught:
        inject((), [("X-Key", value)])
    assert not value or value not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["Host", "connection", "Content_Length", "Transfer-Encoding", "a b", "", "Proxy-Authorization", "ü"]
)
def test_a_header_that_frames_or_routes_is_no_slot(name):
    with pytest.raises(ValueError, match="cannot be sent in this header"):
        inject((), [(name, "secret")])


def test_bytes_that_are_no_text_pass_in_other_headers_and_never_in_a_slot():
    assert ((b"X-\xff", b"\xff"), (b"X-Key", b"a\xffb")) == inject(((b"X-\xff", b"\xff"),), [("X-Key", "a\udcffb")])
    with pytest.raises(ValueError, match="cannot be sent in this header"):
        inject((), [("X-\udcff", "secret")])


def test_two_plans_for_one_slot_are_an_error():
    with pytest.raises(ValueError, match="two injections"):
        inject((), [("X-Key", "a"), ("x_key", "b")])


@given(st.lists(st.tuples(st.sampled_from([b"X-Key", b"x_key", b"X-KEY", b"y"]), st.binary(max_size=5))).map(tuple))
def test_there_is_exactly_one_value_in_the_slot(headers):
    result = inject(headers, [("X-Key", "secret")])
    assert [b"secret"] == [value for name, value in result if slot(name) == "x-key"]


@pytest.mark.parametrize(
    "name",
    [
        *("Host", "Connection", "Content-Length", "Transfer-Encoding", "Upgrade", "TE", "Trailer", "Expect"),
        *("Keep-Alive", "Proxy-Authorization", "Proxy-Connection", "Proxy-Authenticate"),
        *("Content-Encoding", "Content-Type", "Accept-Encoding", "Range", "If-Range"),
        *("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"),
    ],
)
def test_no_header_of_the_connection_takes_a_secret(name):
    """In any case, and with `_` for `-`."""
    for spelling in (name, name.lower(), name.upper(), name.replace("-", "_")):
        with pytest.raises(ValueError, match="cannot be sent in this header"):
            inject((), [(spelling, "secret")])


def test_a_value_has_no_control_character_but_the_tab():
    for octet in range(0x100):
        value = f"a{chr(octet)}b"
        if (octet < 0x20 and octet != 0x09) or octet == 0x7F:
            with pytest.raises(ValueError, match="has a control character"):
                inject((), [("X-Key", value)])
        else:
            assert ((b"X-Key", value.encode()),) == inject((), [("X-Key", value)])
