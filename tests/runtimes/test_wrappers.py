"""The wrappers that Docker executes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from runtimes.engine.profile import RUNSC
from runtimes.engine.shim import handled
from runtimes.engine.wrappers import write_daemon_json, write_wrappers


def test_a_wrapper_runs_the_real_runtime_with_our_flags(tmp_path: Path) -> None:
    entries = write_wrappers(tmp_path, tmp_path / "plans dir", "/usr/bin/python3", {"runc": "/r", "runsc": "/bin/echo"})
    text = Path(entries["sallyport-runsc"]["path"]).read_text()
    assert "'" + str(tmp_path / "plans dir") + "'" in text
    assert all(flag in text for flag in RUNSC.flags)


def test_a_wrapper_passes_arguments_as_they_are(tmp_path: Path) -> None:
    entries = write_wrappers(tmp_path, tmp_path, sys.executable, {"runc": "/bin/echo", "runsc": "/bin/echo"})
    words = ["--root", "/a b", "state", "$(id)"]
    done = subprocess.run([entries["sallyport-runc"]["path"], *words], capture_output=True, text=True, check=True)
    assert done.stdout == "--root /a b state $(id)\n"


@pytest.mark.parametrize(
    ("runtime", "command"),
    [(runtime, command) for runtime in ("runc", "runsc") for command in sorted(handled(runtime))],
)
@pytest.mark.parametrize("before", [[], ["--root", "/a b"], ["-unknown"], ["--log", "state"]])
def test_a_wrapper_never_passes_the_shim_by_with_what_it_checks(
    tmp_path: Path, runtime: str, command: str, before: list[str]
) -> None:
    entries = write_wrappers(tmp_path, tmp_path, "/bin/echo", {"runc": "/bin/false", "runsc": "/bin/false"})
    words = [*before, command, "--bundle", "/b", "id"]
    environment = {"IFS": "c", "PATH": "/nowhere"}
    path = entries[f"sallyport-{runtime}"]["path"]
    done = subprocess.run([path, *words], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.endswith(" ".join(["--", *words]) + "\n")


def test_runsc_has_no_raw_sockets_no_host_sockets_and_no_debugging() -> None:
    for flag in ("--network=sandbox", "--net-raw=false", "--host-uds=none", "--debug=false", "--strace=false"):
        assert flag in RUNSC.flags
    assert not any("TESTONLY" in flag for flag in RUNSC.flags)


def test_docker_gets_both_runtimes(tmp_path: Path) -> None:
    entries = write_wrappers(tmp_path, tmp_path, "/python", {"runc": "/runc", "runsc": "/runsc"})
    write_daemon_json(tmp_path / "daemon.json", entries)
    written = json.loads((tmp_path / "daemon.json").read_text())
    assert {"sallyport-runc", "sallyport-runsc"} == set(written["runtimes"])
