"""The benchmark `losses`: a request that arrived is compared with the records."""

import pytest

from bench import losses
from bench.fixture import BenchError
from demo.chaos.kills import Part

RATES = {Part.WORKER: 10.0, Part.HOSTD: 20.0}
ARRIVED = {"/logged/worker/1", "/logged/worker/2", "/logged/hostd/1", "/logged/last/1"}


@pytest.mark.parametrize(
    ("known", "missing"),
    [
        (ARRIVED, (0, 0)),
        (ARRIVED - {"/logged/worker/2"}, (1, 0)),
        (set(), (2, 1)),
        (ARRIVED | {"/logged/hostd/2"}, (0, 0)),
    ],
)
def test_each_request_without_a_record_is_counted_at_its_kill(known: set[str], missing: tuple[int, int]) -> None:
    figures = {figure.name: figure.values[0] for figure in losses.figures(RATES, ARRIVED, known)}
    counts = tuple(figures[f"kill -9 of {part}: of these without a record"] for part in RATES)
    assert missing == counts
    assert (2, 1) == tuple(figures[f"kill -9 of {part}: requests that arrived"] for part in RATES)


def test_a_kill_around_which_no_request_arrived_shows_nothing() -> None:
    with pytest.raises(BenchError, match="no request arrived around the death of hostd"):
        list(losses.figures(RATES, {"/logged/worker/1"}, ARRIVED))
