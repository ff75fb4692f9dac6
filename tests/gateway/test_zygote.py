"""A fork request is exactly one, or nothing is forked."""

from typing import Any

import pytest

from gateway.birth import Descriptors, Order
from gateway.zygote import RefusedError, parse_fork

REQUEST: dict[str, Any] = {
    "id": 1,
    "op": "fork",
    "sandbox": "sbx-1",
    "generation": 1,
    "uid": 700001000,
    "gid": 700001000,
    "cgroup": ["/sys/fs/cgroup/x"],
}
FDS = [10, 11, 12, 13, 14, 15, 16, 17]


def test_a_whole_request_is_an_order() -> None:
    expected = Order("sbx-1", 1, 700001000, 700001000, ("/sys/fs/cgroup/x",), Descriptors(*FDS))
    assert expected == parse_fork(REQUEST, FDS)


@pytest.mark.parametrize(
    "changes",
    [
        {"uid": 0},
        {"gid": 0},
        {"uid": 2**32 - 1},
        {"uid": "700001000"},
        {"uid": True},
        {"generation": 0},
        {"generation": None},
        {"sandbox": "a/b"},
        {"sandbox": ""},
        {"cgroup": "/x"},
        {"cgroup": ["relative"]},
        {"cgroup": [1]},
        {"surprise": 1},
    ],
)
def test_anything_else_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RefusedError):
        parse_fork(REQUEST | changes, FDS)


@pytest.mark.parametrize("fds", [[], FDS[:7], [*FDS, 18]])
def test_another_number_of_descriptors_is_refused(fds: list[int]) -> None:
    with pytest.raises(RefusedError):
        parse_fork(REQUEST, fds)
