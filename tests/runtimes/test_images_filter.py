"""The filter of the jail, executed by a small interpreter of classic BPF. `runtimes.images.filter`."""

import struct

import pytest

from runtimes.images.filter import REFUSED, filter_program

X86_64 = 0xC000003E
ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
THREAD = 0x3D0F00


def answer(number: int, argument: int = 0, arch: int = X86_64) -> int:
    """Return what the filter answers to a call."""
    data = struct.pack("=IIQQ", number, arch, 0, argument)
    program = list(struct.iter_unpack("=HBBI", filter_program()))
    place = value = 0
    while True:
        code, yes, no, constant = program[place]
        place += 1
        match code:
            case 0x20:
                (value,) = struct.unpack_from("=I", data, constant)
            case 0x06:
                return int(constant)
            case _:
                holds = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[code]
                place += yes if holds else no


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_is_not_needed_is_refused(name: str) -> None:
    assert EPERM == answer(REFUSED[name])


@pytest.mark.parametrize("number", [0, 1, 2, 41, 42, 57, 59, 231, 257, 262, 318, 332, 439])
def test_files_sockets_and_processes_are_permitted(number: int) -> None:
    assert ALLOW == answer(number)


@pytest.mark.parametrize("flag", [0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000])
def test_a_process_in_a_new_namespace_is_refused_and_a_thread_is_not(flag: int) -> None:
    assert ALLOW == answer(56, THREAD)
    assert EPERM == answer(56, THREAD | flag)
    assert ENOSYS == answer(435), "its flags are in memory: libraries then use clone"


def test_calls_of_other_forms_are_refused() -> None:
    assert EPERM == answer(0x40000000 | 165)
    assert KILL == answer(21, arch=0x40000003)
