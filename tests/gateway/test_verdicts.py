"""The values between an engine and an exchange are immutable."""

from dataclasses import FrozenInstanceError, fields, is_dataclass

import pytest

from gateway import verdicts
from gateway.verdicts import Answer, Forward, ForwardHead, Relay, ResponseHead

HEAD = ForwardHead(b"/x", b"", ((b"Host", b"a.example"),))
VALUES = [
    HEAD,
    Forward(HEAD, scrub=True),
    Answer(403, ((b"content-length", b"0"),), b""),
    ResponseHead(200, False, ()),
    Relay(200, "OK", (), buffered=False),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_what_was_judged_cannot_be_changed(value: object) -> None:
    assert is_dataclass(value)
    for field in fields(value):
        with pytest.raises(FrozenInstanceError):
            setattr(value, field.name, getattr(value, field.name))
    assert hash(value) == hash(value)


def test_each_value_of_the_module_is_frozen() -> None:
    kinds = [
        kind for kind in vars(verdicts).values() if isinstance(kind, type) and kind.__module__ == verdicts.__name__
    ]
    assert [] == [kind.__name__ for kind in kinds if not kind.__dataclass_params__.frozen]  # type: ignore[attr-defined]
