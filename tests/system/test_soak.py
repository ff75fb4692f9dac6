"""Sandboxes made and removed in a loop leave everything as it was. The thousand: `./run soak --creates 1000`."""

import pytest

from demo.soak import soak
from testbed.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.faults]

CREATES = 60


def test_many_lives_leave_processes_files_descriptors_and_memory_as_they_were(stack: Stack) -> None:
    """Both runtimes, four at once."""
    report = soak(stack, CREATES)

    assert [] == report.grown, "\n".join(report.lines())
    assert CREATES == len(report.millis)
