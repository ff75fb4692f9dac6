"""The front door says what it does and refuses what it cannot do."""

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
