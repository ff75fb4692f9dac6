"""The guard's rules on a real kernel, by who dials what."""

import socket
import subprocess
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path

import pytest

from runtimes import netns
from runtimes.nft import GuardPlan, render_guard

pytestmark = pytest.mark.system

_FIRST, _LAST = 700001000, 700005095


@pytest.fixture
def upstream(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "upstream"
    netns.create_sandbox(path)
    yield path
    netns.delete(path)


def _dials(path: Path, uid: int, address: str, port: int) -> bool:
    command = ["setpriv", f"--reuid={uid}", "--clear-groups", "bash", "-c", f"exec 3<>/dev/tcp/{address}/{port}"]
    done = netns.inside(path, lambda: subprocess.run(command, capture_output=True, timeout=60, check=False))
    return done.returncode == 0


def _listener(path: Path) -> socket.socket:
    return netns.inside(path, lambda: socket.create_server(("127.0.0.1", 0)))


@pytest.mark.parametrize("uid", [_FIRST, _LAST])
def test_a_worker_reaches_no_local_address(upstream: Path, uid: int) -> None:
    with _listener(upstream) as listener:
        port = listener.getsockname()[1]
        assert _dials(upstream, uid, "127.0.0.1", port)
        netns.load_rules(upstream, render_guard(GuardPlan(_FIRST, _LAST)).replace("flags owner;", ""))
        assert not _dials(upstream, uid, "127.0.0.1", port)


@pytest.mark.parametrize("uid", [0, _FIRST - 1, _LAST + 1])
def test_nobody_else_is_touched(upstream: Path, uid: int) -> None:
    netns.load_rules(upstream, render_guard(GuardPlan(_FIRST, _LAST)).replace("flags owner;", ""))
    with _listener(upstream) as listener:
        assert _dials(upstream, uid, "127.0.0.1", listener.getsockname()[1])


def test_a_range_that_the_operator_named_is_open(upstream: Path) -> None:
    plan = GuardPlan(_FIRST, _LAST, allowed=(ip_network("127.0.0.0/8"),))
    netns.load_rules(upstream, render_guard(plan).replace("flags owner;", ""))
    with _listener(upstream) as listener:
        assert _dials(upstream, _FIRST, "127.0.0.1", listener.getsockname()[1])


def test_a_workers_connections_are_counted(upstream: Path) -> None:
    plan = GuardPlan(_FIRST, _LAST, allowed=(ip_network("127.0.0.0/8"),), connections=2)
    netns.load_rules(upstream, render_guard(plan).replace("flags owner;", ""))
    with _listener(upstream) as listener:
        port = listener.getsockname()[1]
        held = " ".join(f"exec {fd}<>/dev/tcp/127.0.0.1/{port} && echo {fd};" for fd in range(3, 9))
        command = ["setpriv", f"--reuid={_FIRST}", "--clear-groups", "bash", "-c", held]
        done = netns.inside(
            upstream, lambda: subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        )
        assert ["3", "4"] == done.stdout.split()
