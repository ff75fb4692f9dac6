"""The fields of records that describe the deciding policy."""

import pytest

from gateway.described import of_address, of_policy
from policy.decision import AllowAddress, Deny


def test_without_a_policy_nothing_is_said_of_it() -> None:
    assert {} == of_policy(None, "default")


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (None, ("allow", {})),
        (AllowAddress("r"), ("allow", {"rule": "r"})),
        (AllowAddress("r", Deny("d", "why")), ("observe", {"rule": "r", "observed": "d", "reason": "why"})),
    ],
)
def test_an_address_is_recorded_with_what_was_said_of_it(
    allowed: AllowAddress | None, expected: tuple[str, dict[str, str]]
) -> None:
    assert expected == of_address(allowed)
