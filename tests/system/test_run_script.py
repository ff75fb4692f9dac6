"""The front door says what it does and refuses what it cannot do."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "run", *arguments], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


def test_help_names_every_command() -> None:
    done = _run("help")

    assert 0 == done.returncode
    for command in ("demo", "test", "serve", "doctor", "clean"):
        assert f"\n  {command}" in done.stdout


def test_an_unknown_command_is_an_error() -> None:
    done = _run("frobnicate")

    assert 2 == done.returncode
    assert "usage" in done.stderr


def test_the_command_line_sees_what_was_built_and_files_of_the_callers_directory(tmp_path: Path) -> None:
    """`./run sallyport` works on the server that `./run serve` runs; a relative name is one of the caller's."""
    (tmp_path / "built.toml").write_text(f'[sallyport]\nstate_dir = "{tmp_path}/built"\n')
    (tmp_path / "own.toml").write_text(f'[sallyport]\nstate_dir = "{tmp_path}/own"\n')
    seen = []
    for options in ((), ("--config", "own.toml")):
        done = subprocess.run(
            [ROOT / "run", "sallyport", *options, "audit", "tail"],
            cwd=tmp_path,
            env=os.environ | {"SALLYPORT_HOME": str(tmp_path), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        seen.append(done.stderr.split(":")[0])

    assert [f"{tmp_path}/built/audit", f"{tmp_path}/own/audit"] == seen


def test_clean_removes_what_run_made_and_only_that(tmp_path: Path) -> None:
    """A mount and a process that name its directories go too; a copy of the script, so that no .venv goes."""
    script = tmp_path / "checkout" / "run"
    script.parent.mkdir()
    script.write_bytes((ROOT / "run").read_bytes())
    script.chmod(0o755)
    home, run_dir = tmp_path / "home", tmp_path / "run"
    for directory in (home / "cache", run_dir / "netns"):
        directory.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", str(run_dir / "netns")], check=True)
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", f"{run_dir}/x"])
    bystander = subprocess.Popen(["sleep", "300"])
    places = {"SALLYPORT_HOME": str(home), "SALLYPORT_RUN_DIR": str(run_dir), "SALLYPORT_TEST_INTERNET": "spclean"}
    environment = {**os.environ, **places}
    try:
        done = subprocess.run([script, "clean"], env=environment, capture_output=True, text=True, check=False)

        assert 0 == done.returncode, done.stderr
        assert (False, False) == (home.exists(), run_dir.exists())
        assert -signal.SIGTERM == sleeper.wait(60)
        assert bystander.poll() is None
    finally:
        for process in (sleeper, bystander):
            process.kill()
            process.wait()
