"""Settings, hostd and the workers read an address and a port in the same way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import parse_upstream
from lifecycle.config.settings import SettingsError, parse
from wire.endpoints import parse_endpoint, routed
from wire.errors import ConfigError


def refused_by_settings(text: str) -> bool:
    try:
        parse({"sallyport": {"dns_upstreams": [text]}}, "x.toml", {})
    except SettingsError:
        return True
    return False


def refused_by_the_worker(text: str) -> bool:
    try:
        parse_upstream(text)
    except ConfigError:
        return True
    return False


REFUSED = [
    "1.2.3.4",
    "1.2.3.4:0",
    "1.2.3.4:65536",
    "1.2.3.4:+53",
    "::1:53",
    "[::1]",
    "a:53",
    "[1.2.3.4:53",
    "[1.2.3.4]:53",
    "2001:db8::53:53",
    "[2001:db8::53]53",
    "[[2001:db8::53]]:53",
    "[fe80::1%eth0]:53",
    "[fe80::1]:53",
    "[ff02::1]:53",
    "[2001:db8::53%2]:53",
    "224.0.0.1:53",
    "0.0.0.0:53",
    "[::]:53",
]


@pytest.mark.parametrize("text", ["", *REFUSED])
def test_what_is_no_endpoint_is_refused_wherever_it_is_configured(text: str) -> None:
    with pytest.raises(ValueError):
        parse_endpoint(text)
    assert (True, True) == (refused_by_settings(text), refused_by_the_worker(text))


def test_the_reason_is_said() -> None:
    with pytest.raises(ValueError, match="needs an interface"):
        parse_endpoint("[fe80::1%eth0]:53")
    with pytest.raises(ValueError, match="in brackets"):
        parse_endpoint("2001:db8::53:53")


@given(st.ip_addresses(), st.integers(1, 65535))
def test_settings_and_worker_take_the_same_endpoints(address: object, port: int) -> None:
    text = f"[{address}]:{port}" if ":" in str(address) else f"{address}:{port}"
    try:
        expected = routed(address)  # type: ignore[arg-type]
    except ValueError:
        assert (True, True) == (refused_by_settings(text), refused_by_the_worker(text))
        return
    assert (expected, port) == parse_endpoint(text)
    assert (False, expected, port) == (
        refused_by_settings(text),
        parse_upstream(text).address,
        parse_upstream(text).port,
    )


def test_an_ipv4_address_written_as_ipv6_is_one() -> None:
    assert "192.0.2.53" == str(parse_endpoint("[::ffff:192.0.2.53]:53")[0])
