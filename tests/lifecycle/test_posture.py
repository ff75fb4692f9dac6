"""What `doctor --probe` makes of evidence, and what its own server shares with the operator's: programs only."""

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lifecycle import launch, settings
from lifecycle.posture import interrupts, probe, server
from lifecycle.posture.attempts import ATTEMPTS, Attempt
from lifecycle.posture.capture import Frame

OPERATOR = {
    "server": {"port": 8080},
    "sallyport": {
        "run_dir": "/run/operator",
        "state_dir": "/var/lib/operator",
        "upstream_netns": "/run/netns/operator",
        "allowed_addresses": ["10.0.0.0/8"],
        "host_addresses": {"git.corp.example": ["10.0.0.5"]},
        "runsc": "/opt/runsc",
        "allowed_runtimes": ["runsc"],
        "default_runtime": "runsc",
        "docker": {"managed": False, "socket": "/var/run/docker.sock"},
        "vault": {"master_key_file": "/etc/operator-key"},
    },
}


def test_its_server_shares_nothing_but_programs(tmp_path: Path) -> None:
    operator = settings.parse(OPERATOR, "(test)", {})
    host = launch.host_config(server.private(operator, tmp_path, "/run/netns/probe-up"), tmp_path)

    assert ("/opt/runsc", ["runsc"]) == (host["runsc"], host["runtimes"])
    assert "/run/netns/probe-up" == host["upstream_netns"]
    assert [] == host["allowed_addresses"]
    places = [host["run_dir"], host["state_dir"], host["docker_socket"], *list(host["dockerd"].values())[1:]]
    assert [] == [place for place in places if not place.startswith(f"{tmp_path}/")]
    assert "operator" not in str(server.private(operator, tmp_path, "").values)


class _Counter:
    """Hits and frames as they are told to be."""

    def __init__(self, *frames: Frame) -> None:
        self.hits, self._frames = 0, list(frames)

    def mark(self) -> int:
        return 0

    def since(self, _mark: int) -> list[Frame]:
        return self._frames


def _outcome(attempt: Attempt, control: int, *frames: Frame, fails: bool = False) -> probe.Outcome:
    def attempted(_probe: str) -> str:
        if fails:
            raise server.ServerError("no command can be run in the sandbox")
        return "sent"

    ground: Any = SimpleNamespace(wire=_Counter(*frames), host=_Counter())
    sandbox = cast(server.Sandbox, SimpleNamespace(runtime="runc", attempt=attempted))
    near: Any = _Counter()
    return probe._tried(ground, near, near, sandbox, attempt, control).outcome


_ARRIVED = Frame("192.0.2.2", "93.184.216.66", 17, 9999, b"")


@pytest.mark.parametrize(
    ("control", "frames", "fails", "outcome"),
    [
        (1, (), False, probe.Outcome.HELD),
        (1, (_ARRIVED,), False, probe.Outcome.ESCAPED),
        (0, (), False, probe.Outcome.UNTRIED),
        (1, (), True, probe.Outcome.UNTRIED),
        (1, (_ARRIVED,), True, probe.Outcome.ESCAPED),
    ],
    ids=["nothing arrives", "something arrives", "no control", "not run", "not run, but arrived"],
)
def test_only_what_was_tried_and_did_not_arrive_has_held(
    monkeypatch: pytest.MonkeyPatch, control: int, frames: tuple[Frame, ...], fails: bool, outcome: probe.Outcome
) -> None:
    monkeypatch.setattr(probe, "_SETTLE_SECONDS", 0.0)
    attempt = next(attempt for attempt in ATTEMPTS if attempt.probe == "udp")
    assert outcome == _outcome(attempt, control, *frames, fails=fails)


def test_a_second_interrupt_does_not_disturb_the_clearing_up() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with interrupts.unwinding():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
