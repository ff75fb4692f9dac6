"""The front door says what it does and refuses what it cannot do."""

import os
import subprocess
from pathlib import Path

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
