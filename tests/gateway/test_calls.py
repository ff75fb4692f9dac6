"""The numbers of the filter are those of Linux. `test_confine` tests the filter in a process."""

import socket

import pytest

from gateway import calls

NUMBERS = (
    *("AF_INET", "AF_INET6", "SOCK_STREAM", "SOCK_DGRAM", "SOCK_NONBLOCK", "SOCK_CLOEXEC", "SOL_SOCKET"),
    *("SO_KEEPALIVE", "SO_BINDTODEVICE", "IPPROTO_TCP", "IPPROTO_UDP", "TCP_NODELAY", "TCP_KEEPIDLE"),
    *("TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT"),
)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_that_of_the_kernel(name: str) -> None:
    assert int(getattr(socket, name)) == getattr(calls, name)


def test_a_worker_signals_itself_only_and_keeps_the_listener() -> None:
    rules = calls.checks(pid=41, pinned=7)
    assert ((calls.Argument(0, (41,)),),) == rules["tgkill"]
    assert ((calls.Argument(0, (7,), unlike=True),),) == rules["close"]
