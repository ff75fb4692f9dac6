"""The table of the kinds of records has each kind and each field once."""

import pytest

from audit.describe import type_of
from audit.kinds import COMMON, DESCRIBED, FIELDS, SIGNED, undescribed
from audit.producers import KINDS
from audit.records import record


def test_each_kind_is_described_once() -> None:
    assert frozenset().union(*KINDS.values()) == DESCRIBED.keys()


def test_each_field_of_a_kind_has_one_type_and_one_meaning() -> None:
    used = frozenset().union(*(kind.fields for kind in DESCRIBED.values()))
    assert used == FIELDS.keys() | SIGNED.keys()
    assert not (COMMON.keys() & used)
    assert {} == {name: meaning for name, meaning in FIELDS.items() if not (meaning and type_of(name))}


@pytest.mark.parametrize("kind", [name for name in DESCRIBED if name != "checkpoint"])
def test_an_example_is_a_record(kind: str) -> None:
    described = DESCRIBED[kind]
    written = record(kind, described.decision, **described.example)
    assert described.example == {name: written[name] for name in described.example}
    assert frozenset() == undescribed(kind, frozenset(written))


def test_a_field_of_another_kind_is_not_described() -> None:
    assert {"lease_seconds"} == undescribed("dns", frozenset({"host", "host_sha256", "sandbox", "lease_seconds"}))
