"""Verdicts of `doctor --probe` on its evidence. Its own server shares only programs with the operator's server."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lifecycle.config import launch, settings
from lifecycle.posture import interrupts, probe, server, ways_out
from lifecycle.posture.attempts import ATTEMPTS, Attempt, ProbeError, Report, report
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
    """Hits and frames with values set by the test."""

    def __init__(self, *frames: Frame) -> None:
        self.hits, self._frames = 0, list(frames)

    def mark(self) -> int:
        return 0

    def since(self, _mark: int) -> list[Frame]:
        return self._frames


def _outcome(
    attempt: Attempt, control: probe.ControlResult, *frames: Frame, failure: Exception | None = None
) -> probe.ProbeOutcome:
    def attempted(_probe: str) -> Report:
        if failure:
            raise failure
        return {"udp/53": "sent"}

    network: Any = SimpleNamespace(wire=_Counter(*frames), host=_Counter())
    sandbox = cast(server.ProbeSandbox, SimpleNamespace(runtime="runc", attempt=attempted))
    near: Any = _Counter()
    return probe._tried(network, near, near, sandbox, attempt, control).outcome


_ARRIVED = Frame("192.0.2.2", "93.184.216.66", 17, 9999, b"")
_GOOD = probe.ControlResult(1)
_NOT_RUN = server.ServerError("no command can be run in the sandbox")
_CRASHED = ProbeError("probe udp ended with 1: KeyError")


@pytest.mark.parametrize(
    ("control", "frames", "failure", "outcome"),
    [
        (_GOOD, (), None, probe.ProbeOutcome.HELD),
        (_GOOD, (_ARRIVED,), None, probe.ProbeOutcome.ESCAPED),
        (probe.ControlResult(0, "it did not arrive"), (), None, probe.ProbeOutcome.UNTRIED),
        (probe.ControlResult(1, "probe udp ended with 1"), (), None, probe.ProbeOutcome.UNTRIED),
        (_GOOD, (), _NOT_RUN, probe.ProbeOutcome.UNTRIED),
        (_GOOD, (_ARRIVED,), _NOT_RUN, probe.ProbeOutcome.ESCAPED),
        (_GOOD, (), _CRASHED, probe.ProbeOutcome.UNTRIED),
        (_GOOD, (_ARRIVED,), _CRASHED, probe.ProbeOutcome.ESCAPED),
    ],
    ids=[
        *("nothing arrives", "something arrives", "no control", "crashed control", "not run", "not run, but arrived"),
        *("crashed", "crashed, but arrived"),
    ],
)
def test_only_what_was_tried_and_did_not_arrive_has_held(
    monkeypatch: pytest.MonkeyPatch,
    control: probe.ControlResult,
    frames: tuple[Frame, ...],
    failure: Exception | None,
    outcome: probe.ProbeOutcome,
) -> None:
    monkeypatch.setattr(probe, "_SETTLE_SECONDS", 0.0)
    attempt = next(attempt for attempt in ATTEMPTS if attempt.probe == "udp")
    assert outcome == _outcome(attempt, control, *frames, failure=failure)


_SENT = dict.fromkeys(ways_out.labels("udp"), "sent")


@pytest.mark.parametrize("name", [*ways_out.PROBES, "all"])
def test_a_report_has_each_try_of_its_probe(name: str) -> None:
    seen = dict.fromkeys(ways_out.labels(name), "refused EPERM")

    assert seen == report(name, 0, f"a warning\nreport {json.dumps(seen)}\n")
    assert [one.probe for one in ATTEMPTS] == list(ways_out.PROBES)
    for label in seen:
        with pytest.raises(ProbeError, match="other tries"):
            report(name, 0, f"report {json.dumps({one: 'sent' for one in seen if one != label})}")


@pytest.mark.parametrize(
    ("status", "printed", "why"),
    [
        (1, f"report {json.dumps(_SENT)}", "ended with 1"),
        (137, "Killed", "ended with 137: Killed"),
        (None, f"report {json.dumps(_SENT)}", "ended with None"),
        (0, "", "no report"),
        (0, "report {", "no report"),
        (0, f"report {json.dumps(_SENT)}\n" * 2, "no report"),
        (0, "report []", "other tries"),
        (0, f"report {json.dumps(_SENT | {'udp/54': 'sent'})}", "other tries"),
        (0, f"report {json.dumps(_SENT | {'udp/53': ''})}", "without an outcome"),
        (0, f"report {json.dumps(_SENT | {'udp/53': 'refused'})}", "without an outcome"),
        (0, f"report {json.dumps(_SENT | {'udp/53': None})}", "without an outcome"),
    ],
)
def test_what_is_no_report_is_a_failure(status: int | None, printed: str, why: str) -> None:
    with pytest.raises(ProbeError, match=why):
        report("udp", status, printed)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("-c", "import os; os.kill(os.getpid(), 9)"), "ended with -9"),
        (("/missing/ways_out.py", "one", "udp"), "ended with 2: .*No such file"),
        ((ways_out.__file__, "one", "udp"), "ended with 1: KeyError: 'attacker'"),
        ((ways_out.__file__, "one", "all"), "ended with 1: KeyError"),
        ((ways_out.__file__, "one", "unknown"), "ended with 1: KeyError: 'unknown'"),
        (("-c", ""), "no report"),
    ],
    ids=["killed", "not there", "crashed", "crashed among others", "no such probe", "said nothing"],
)
def test_a_probe_that_does_not_run_to_its_end_is_a_failure(words: tuple[str, ...], why: str) -> None:
    """With real processes. The crash comes from a missing target."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env={}, check=False)

    with pytest.raises(ProbeError, match=why):
        report("all" if "all" in words else "udp", done.returncode, done.stdout + done.stderr)


@pytest.mark.parametrize(
    ("name", "outcome"), [("udp", "sent"), ("dns-over-tls", "refused ECONNREFUSED")], ids=["sent", "refused"]
)
def test_a_probe_reports_what_the_system_answered(name: str, outcome: str) -> None:
    targets = json.dumps({"attacker": "127.0.0.1", "attacker_name": "a.example"})
    command = [sys.executable, ways_out.__file__, "one", name]
    done = subprocess.run(command, capture_output=True, text=True, env={"PROBE_TARGETS": targets}, check=False)

    assert dict.fromkeys(ways_out.labels(name), outcome) == report(name, done.returncode, done.stdout)


def test_a_second_interrupt_does_not_disturb_the_clearing_up() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with interrupts.unwinding():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
