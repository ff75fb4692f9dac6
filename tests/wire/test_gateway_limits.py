"""The operator's limits of a gateway: each name has a default within its bounds, anything else is refused."""

import pytest

from wire.errors import ConfigError
from wire.gateway_limits import MOST, GatewayLimits, described


def test_what_is_not_given_has_its_default() -> None:
    assert GatewayLimits() == GatewayLimits.of({})
    assert GatewayLimits(dial_rate=7) == GatewayLimits.of({"dial_rate": 7})


@pytest.mark.parametrize("name", MOST)
def test_each_limit_has_bounds_and_the_default_is_within_them(name: str) -> None:
    assert 1 <= getattr(GatewayLimits(), name) <= MOST[name]
    for number in (1, MOST[name]):
        assert number == getattr(GatewayLimits.of({name: number}), name)
    for number in (0, -1, MOST[name] + 1):
        with pytest.raises(ConfigError, match=name):
            GatewayLimits.of({name: number})
    assert f"`{name}` from 1 to {MOST[name]} ({getattr(GatewayLimits(), name)})" in described()


def test_an_unknown_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="surprise"):
        GatewayLimits.of({"surprise": 1})
