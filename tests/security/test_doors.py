"""Tests of the table of doors; `test_runtime_hardening.py` compares it with the answer at each place."""

from tests.security import hardening_probe
from tests.security.doors import DOORS


def test_the_table_has_each_door_and_where_it_opens() -> None:
    """A door that is open at no place has the reason in the table."""
    assert list(hardening_probe.DOORS) == list(DOORS)
    opening = {name for name, door in DOORS.items() if "open" in (door.host, door.opened)}
    assert {name for name, door in DOORS.items() if door.never} == set(DOORS) - opening
