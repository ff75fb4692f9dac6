"""The parts of a container."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

from runtimes.engine.containers import (
    CA_BUNDLE,
    JAVA_STORE,
    LAUNCH,
    command,
    end_processes,
    environment,
    plan_container,
    process_limits,
    write_files,
)
from tests.runtimes.test_spec import launch_of


def test_a_request_cannot_make_the_sandbox_trust_another_ca() -> None:
    env = environment("sbx-1", {"SSL_CERT_FILE": "/mine", "PATH": "/x", "OPENSANDBOX_ID": "other"})
    assert (CA_BUNDLE, "/x", "other") == (env["SSL_CERT_FILE"], env["PATH"], env["OPENSANDBOX_ID"])


def test_execd_starts_the_entrypoint() -> None:
    assert command("00", ["sh", "-c", "x"], held=False)[-4:] == ["--", "sh", "-c", "x"]


def test_mounted_files_are_readable_by_every_user_inside(tmp_path: Path) -> None:
    previous = os.umask(0o077)
    try:
        files = write_files(tmp_path / "sbx-1", launch_of(), "pem")
    finally:
        os.umask(previous)
    assert [0o755] == [files.stat().st_mode & 0o777]
    assert {0o644} == {path.stat().st_mode & 0o777 for path in files.iterdir()}


def test_the_container_runs_the_image_that_was_looked_at(tmp_path: Path) -> None:
    spec = launch_of()
    plan = plan_container(spec, "sha256:1", tmp_path, Path("/execd"))
    assert ("sha256:1", "sallyport-runc") == (plan.image, plan.runtime)
    mounted = {"/etc/resolv.conf", "/etc/hosts", "/etc/hostname", "/etc/machine-id", CA_BUNDLE, JAVA_STORE, LAUNCH}
    assert mounted <= {bind.destination for bind in plan.binds}


def test_each_container_has_a_launch_and_a_machine_id_of_its_own(tmp_path: Path) -> None:
    spec = launch_of()
    files = [write_files(tmp_path / name, spec, "pem") for name in ("one", "two")]
    for name, form in (("launch", "[0-9a-f]{64}\n"), ("machine-id", "[0-9a-f]{32}\n")):
        texts = [(place / name).read_text() for place in files]
        assert len(set(texts)) == 2 and all(re.fullmatch(form, text) for text in texts)
    arguments = command("00", ["x"], held=False)
    assert LAUNCH == arguments[arguments.index("--launch-file") + 1]


def test_gvisor_counts_the_sandboxs_processes_itself() -> None:
    runc, runsc = (launch_of(pids=100, runtime=name) for name in ("runc", "runsc"))
    assert ((100, None), (1124, 100)) == (process_limits(runc), process_limits(runsc))


def test_processes_that_name_a_removed_container_are_ended() -> None:
    """No other process is found: the id in its command line identifies a shim that was left behind."""
    container, other = "c0ffee" * 10 + "aaaa", "c0ffee" * 10 + "bbbb"
    script = "import sys; print(flush=True); sys.stdin.read()"
    pair = [
        subprocess.Popen([sys.executable, "-c", script, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for name in (container, other)
    ]
    with pair[0], pair[1]:
        try:
            for process in pair:
                assert process.stdout is not None and process.stdout.readline()
            reaper = threading.Thread(target=pair[0].wait)
            reaper.start()
            assert () == end_processes(container)
            reaper.join()
            assert (-signal.SIGKILL, None) == (pair[0].returncode, pair[1].poll())
        finally:
            for process in pair:
                process.kill()
