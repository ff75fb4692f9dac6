"""The table of doors itself; `test_runtime_hardening.py` compares it with what each place answers."""

from tests.security import hardening_probe
from tests.security.doors import DOORS


def test_the_table_has_each_door_and_where_it_opens() -> None:
    """A door that opens nowhere is there with the reason."""
    assert list(hardening_probe.DOORS) == list(DOORS)
    opening = {name for name, door in DOORS.items() if "open" in (door.host, door.opened)}
    assert {name for name, door in DOORS.items() if door.never} == set(DOORS) - opening
