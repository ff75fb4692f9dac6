"""Every way out of a sandbox, tried from inside and from a privileged container beside it: nothing arrives."""

from collections.abc import Iterator

import pytest

from demo.attempts import ATTEMPTS, Attempt
from demo.far_end import FarEndWatch
from demo.internet import Internet
from demo.sandboxes import DemoSandbox, Secrets
from demo.stack import Stack

pytestmark = pytest.mark.system

OTHER = {"runsc": "runc", "runc": "runsc"}
PRIVILEGED = tuple(attempt for attempt in ATTEMPTS if attempt.privileged and not attempt.noticed)
NOTICED = tuple(attempt for attempt in ATTEMPTS if attempt.noticed)


@pytest.fixture(scope="module", name="watches")
def _watches(internet: Internet, stack: Stack, sandboxes: dict[str, DemoSandbox]) -> Iterator[dict[str, FarEndWatch]]:
    with (
        FarEndWatch(internet, stack, sandboxes["runsc"], sandboxes["runc"]) as runsc,
        FarEndWatch(internet, stack, sandboxes["runc"], sandboxes["runsc"]) as runc,
    ):
        yield {"runsc": runsc, "runc": runc}


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.probe)
def test_the_control_of_each_attempt_does_arrive(attempt: Attempt, controls: dict[str, int]) -> None:
    """Without a gate each probe reaches its far end: what is denied elsewhere can succeed."""
    assert controls[attempt.probe] > 0


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.probe)
def test_nothing_arrives_from_the_workload(
    attempt: Attempt,
    runtime: str,
    sandboxes: dict[str, DemoSandbox],
    watches: dict[str, FarEndWatch],
    controls: dict[str, int],
) -> None:
    row = sandboxes[runtime].attack(attempt, watches[runtime], controls[attempt.probe])

    assert row.as_expected, row.observed


def test_nothing_arrives_from_a_privileged_container_in_the_same_namespace(
    runtime: str,
    sandboxes: dict[str, DemoSandbox],
    watches: dict[str, FarEndWatch],
    controls: dict[str, int],
) -> None:
    rows = sandboxes[runtime].privileged_attacks(PRIVILEGED, watches[runtime], controls)

    assert len(PRIVILEGED) == len(rows)
    assert [] == [row for row in rows if not row.as_expected]


@pytest.mark.parametrize("attempt", NOTICED, ids=lambda attempt: attempt.probe)
def test_nothing_arrives_from_one_that_changes_the_namespace_and_it_is_cut_off(
    attempt: Attempt, runtime: str, internet: Internet, stack: Stack, values: Secrets, controls: dict[str, int]
) -> None:
    sandbox, other = DemoSandbox(stack, runtime, values), DemoSandbox(stack, runtime, values)
    try:
        with FarEndWatch(internet, stack, sandbox, other) as watch:
            rows = sandbox.noticed_attack(attempt, watch, controls[attempt.probe])
    finally:
        sandbox.close()
        other.close()

    assert [] == [row for row in rows if not row.as_expected]


def test_no_form_of_a_secret_can_be_found_in_a_sandbox(runtime: str, sandboxes: dict[str, DemoSandbox]) -> None:
    """The search finds what was planted for it, and no secret."""
    sandboxes[runtime].work()
    (row,) = sandboxes[runtime].leak_search()

    assert row.as_expected, row.observed
