"""Sandboxes created and removed in a loop leave everything as it was. For a thousand: `./run soak --creates 1000`."""

import pytest

from demo.soak import soak
from testbed.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.faults, pytest.mark.extended]

CREATES = 60


def test_many_lives_leave_processes_files_descriptors_and_memory_as_they_were(stack: Stack) -> None:
    """Both runtimes, four concurrently."""
    report = soak(stack, CREATES)

    assert [] == report.grown, "\n".join(report.lines())
    assert CREATES == len(report.millis)
