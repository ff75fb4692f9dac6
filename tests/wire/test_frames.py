"""Frames survive any segmentation, and damage is always detected."""

import os
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire import MAX_FDS, MAX_FRAME, FrameError, receive, send
from wire.frames import decode, encode

type Pair = tuple[socket.socket, socket.socket]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@pytest.fixture(name="pair")
def _pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    left.settimeout(5)
    right.settimeout(5)
    with left, right:
        yield left, right


@given(st.dictionaries(st.text(), json_values, max_size=5))
def test_a_message_comes_back_from_its_frame(message: dict[str, object]) -> None:
    assert message == decode(encode(message)[4:])


@given(st.binary(max_size=200))
def test_a_body_that_is_not_an_object_is_refused_and_nothing_else_is_raised(body: bytes) -> None:
    try:
        message = decode(body)
    except FrameError:
        return
    assert isinstance(message, dict)


def test_a_frame_arrives_whole_when_it_is_sent_byte_by_byte(pair: Pair) -> None:
    left, right = pair
    for byte in encode({"op": "ping"}):
        left.send(bytes([byte]))

    assert ({"op": "ping"}, []) == receive(right)


def test_descriptors_travel_with_their_frame(pair: Pair) -> None:
    left, right = pair
    reading, writing = os.pipe()
    send(left, {"op": "take"}, [writing])
    os.close(writing)
    received = receive(right)
    assert received is not None
    (fd,) = received[1]
    os.write(fd, b"through")
    os.close(fd)

    assert b"through" == os.read(reading, 100)
    assert b"" == os.read(reading, 100)
    os.close(reading)


def test_a_clean_end_is_none_and_a_cut_frame_is_an_error(pair: Pair) -> None:
    left, right = pair
    left.sendall(encode({"op": "ping"})[:7])
    left.shutdown(socket.SHUT_WR)
    with pytest.raises(FrameError):
        receive(right)

    assert receive(right) is None


def test_a_length_over_the_limit_is_refused_before_its_body_is_read(pair: Pair) -> None:
    left, right = pair
    left.sendall((MAX_FRAME + 1).to_bytes(4))
    with pytest.raises(FrameError, match="limit"):
        receive(right)


def test_descriptors_of_a_refused_frame_are_closed(pair: Pair) -> None:
    left, right = pair
    reading, writing = os.pipe()
    socket.send_fds(left, [(MAX_FRAME + 1).to_bytes(4)], [writing])
    os.close(writing)
    with pytest.raises(FrameError):
        receive(right)

    assert b"" == os.read(reading, 1)
    os.close(reading)


def test_more_descriptors_than_a_frame_may_carry_are_refused_by_the_sender(pair: Pair) -> None:
    with pytest.raises(FrameError, match="descriptors"):
        send(pair[0], {}, [0] * (MAX_FDS + 1))
