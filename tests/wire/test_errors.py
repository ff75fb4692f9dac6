"""Codes of faults, and the exceptions and messages with them."""

import pytest

from wire.errors import Code, RemoteError, RequestError


def test_each_code_is_one_fault_and_is_its_text_on_the_wire() -> None:
    assert len(Code.__members__) == len(set(Code))
    assert [name.lower() for name in Code.__members__] == [str(code) for code in Code]


def test_a_text_that_is_no_code_is_refused() -> None:
    assert Code.BUSY is Code("busy")
    with pytest.raises(ValueError):
        Code("Busy")


def test_an_error_has_its_code_and_its_sentence() -> None:
    refusal, remote = RequestError(Code.BUSY, "it is busy"), RemoteError(Code.BUSY, "it is busy")
    assert (Code.BUSY, "it is busy", "it is busy") == (refusal.code, refusal.message, str(refusal))
    assert (Code.BUSY, "it is busy", "busy: it is busy") == (remote.code, remote.message, str(remote))
