import pytest

from tests.system.fence_judge import Turn, within_bounds

CALM_GOOD, CALM_BAD = Turn(10, 20, 0.5), Turn(10, 20.1, 0.5)
BUSY_GOOD, BUSY_BAD = Turn(10, 50, 0.49), Turn(10, 50.1, 0.49)


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([CALM_GOOD], True),
        ([CALM_BAD], False),
        ([BUSY_GOOD], True),
        ([BUSY_BAD], False),
        ([CALM_BAD, CALM_BAD, CALM_GOOD], False),
        ([CALM_BAD, CALM_GOOD, CALM_GOOD], True),
        ([CALM_BAD, BUSY_GOOD, BUSY_GOOD], True),
        ([CALM_BAD, BUSY_BAD, BUSY_BAD], False),
        ([BUSY_BAD, CALM_BAD, BUSY_GOOD], False),
    ],
)
def test_each_turn_counts_under_its_own_bound(turns: list[Turn], expected: bool) -> None:
    assert expected == within_bounds(turns)
