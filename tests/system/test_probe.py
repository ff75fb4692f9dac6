"""`sallyport doctor --probe` reports what holds and what does not, and leaves nothing on the machine."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lifecycle.config import settings
from lifecycle.posture import probe, server
from lifecycle.posture.attempts import ATTEMPTS
from testbed.census import command_lines
from testbed.ungate import Ungated

pytestmark = [pytest.mark.system, pytest.mark.faults]

RUNTIMES = ("runc", "runsc")
MARK = "sallyport-probe-"
OPEN = ("by-name", "by-address", "by-port", "forged-host", "forged-sni", "udp", "quic", "dns-over-tls")
CRASHES = "sed -i 's/^def af_vsock.*/&\\n    missing()/; s/^def io_uring.*/&\\n    os.kill(os.getpid(), 9)/' "


def _document(*runtimes: str) -> dict[str, Any]:
    environment = os.environ
    return {
        "sallyport": {
            "runsc": environment["SALLYPORT_RUNSC"],
            "execd": environment["SALLYPORT_EXECD"],
            "images": [{"name": "sallyport/base", "tar": environment["SALLYPORT_BASE_IMAGE"]}],
            "allowed_runtimes": list(runtimes),
        }
    }


def _toml(path: Path, runtimes: tuple[str, ...]) -> Path:
    table = _document(*runtimes)["sallyport"]
    (image,) = table["images"]
    path.write_text(
        f"""
[sallyport]
runsc = "{table["runsc"]}"
execd = "{table["execd"]}"
images = [{{ name = "{image["name"]}", tar = "{image["tar"]}" }}]
allowed_runtimes = {list(runtimes)}
"""
    )
    return path


def _left(place: Path) -> list[str]:
    """Return what names a probe below `place`: directories, mounts, processes."""
    mark = f"{place}/{MARK}"
    found = [str(path) for path in place.glob(f"{MARK}*")]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if mark in line]
    return found + [line for line in command_lines().values() if mark in line]


def _namespaces() -> set[str]:
    """Return those of every probe on this machine."""
    return {path.name for path in Path("/run/netns").glob(f"{MARK}*")}


@pytest.fixture(autouse=True, name="place")
def _place(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of the probes. Nothing is left there."""
    # Created now. Otherwise the first use would create it in this directory, and it would be removed with it.
    tmp_path_factory.getbasetemp()
    before = _namespaces()
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o711)
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr("tempfile.tempdir", name)
        yield Path(name)
        assert [] == _left(Path(name))
    deadline = time.monotonic() + 300
    while left := _namespaces() - before:  # Namespaces of other processes end with their probe.
        assert time.monotonic() < deadline, left
        time.sleep(1)


def _command(path: Path, *runtimes: str) -> list[str]:
    return [sys.executable, "-m", "lifecycle.cli", "--config", str(_toml(path, runtimes)), "doctor", "--probe"]


@pytest.mark.parametrize("runtimes", [("runc",), pytest.param(RUNTIMES, marks=pytest.mark.extended)], ids=len)
def test_every_way_is_held_on_each_allowed_runtime(runtimes: tuple[str, ...], tmp_path: Path) -> None:
    done = subprocess.run(_command(tmp_path / "settings.toml", *runtimes), capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    held = {tuple(line.split(maxsplit=1)[1].split(":")[0].split(maxsplit=1)) for line in lines if line[:4] == "held"}

    assert [] == [line for line in lines if line.startswith(("ESCAPED", "untried", "FAIL"))]
    assert set() == {(runtime, attempt.title) for runtime in runtimes for attempt in ATTEMPTS} - held
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "posture: every way held" == lines[-1]


@pytest.mark.extended
def test_a_slot_without_its_layers_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot of the first sandbox is opened and not watched. The report names what gets out.

    Two of its probes do not run to their end. The report says that they were not tried.
    """
    opened: list[Ungated] = []
    create = server.ProbeServer.create

    def create_and_open(self: server.ProbeServer, runtime: str) -> server.ProbeSandbox:
        sandbox = create(self, runtime)
        if not opened:
            net = f"{self.run_dir.parent.name}-net"
            internet = SimpleNamespace(net=net, path=lambda name: f"/run/netns/{name}")
            stack = SimpleNamespace(netns=lambda name, _side: self.netns(name, "gateway"))
            opened.append(Ungated(internet, stack, sandbox.name))  # type: ignore[arg-type]
            opened[0].__enter__()
            assert (0, "") == sandbox.run(f"{CRASHES} {server._SCRIPT}")
        return sandbox

    monkeypatch.setattr(server, "HOSTD", "tests.unwatched")
    monkeypatch.setattr(server.ProbeServer, "create", create_and_open)
    said: list[str] = []
    held = probe.probe(settings.parse(_document("runc"), "(test)", {}), said.append)

    titles = [attempt.title for attempt in ATTEMPTS if attempt.probe in OPEN]
    assert not held
    assert [] == [title for title in titles if not any(f"ESCAPED runc   {title}" in line for line in said)], said
    assert [
        "untried runc   a vsock socket: probe af-vsock ended with 1: NameError: name 'missing' is not defined",
        "untried runc   an io_uring: probe io-uring ended with -1",
    ] == [line for line in said if "vsock" in line or "io_uring" in line]


@pytest.mark.extended
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_probe_clears_up(number: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen(_command(tmp_path / "settings.toml", "runc"), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line.startswith("held") for line in process.stdout)
        process.send_signal(number)
        process.stdout.read()
        assert 130 == process.wait(120)
