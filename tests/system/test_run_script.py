"""The front door explains its commands and refuses invalid ones."""

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.anyone import as_anyone, own_directory
from tests.audit.conftest import Auditd

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
    """`./run sallyport` works on the server that `./run serve` runs. A relative path is relative to the caller's
    directory.
    """
    for name in ("built", "own"):
        places = f'[sallyport]\nstate_dir = "{tmp_path}/{name}"\nrun_dir = "{tmp_path}/run"\n'
        (tmp_path / f"{name}.toml").write_text(places)
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


@pytest.fixture(name="checkout", scope="module")
def _checkout() -> Iterator[Path]:
    """A copy that was never set up. Every user can read it, and only root can write it."""
    with tempfile.TemporaryDirectory(prefix="sallyport-checkout-") as name:
        Path(name).chmod(0o755)
        copy = Path(name, "checkout")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "dist"))
        yield copy


@pytest.mark.extended
def test_every_user_checks_policies_in_a_copy_that_was_never_set_up(checkout: Path, tmp_path: Path) -> None:
    """Without root, a runtime or a server. Everything is created in the user's own cache."""
    home = Path(tempfile.mkdtemp(prefix="sallyport-anyone-"))
    try:
        home.chmod(0o755)
        log = shutil.copytree(_written_log(tmp_path), home / "log")
        for path in (log, *log.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        cache = own_directory(home, "cache")
        places = {"XDG_CACHE_HOME": str(cache), "SALLYPORT_HOME": str(home / "none"), "HOME": "/nonexistent"}
        places |= {"SALLYPORT_RUN_DIR": str(home / "run")}  # No server of another test runs there.
        places |= {
            name: os.environ[name] for name in ("SSL_CERT_FILE", "PIP_INDEX_URL", "UV_INDEX_URL") if name in os.environ
        }

        def sallyport(*words: str | Path) -> subprocess.CompletedProcess[str]:
            return as_anyone(checkout / "run", "sallyport", *words, **places)

        example = checkout / "policies.example.yaml"
        done = sallyport("policy", "check", example)
        assert (0, True) == (done.returncode, f"{example}: good" in done.stdout), done.stderr
        assert not any(word in done.stderr for word in ("runsc", "docker", "execd", "image", "root"))
        done = sallyport("policy", "explain", example, "--policy", "agents", "--host", "other.test")
        assert (1, "") == (done.returncode, done.stderr)
        done = sallyport("audit", "verify", log)
        assert (0, True) == (done.returncode, done.stdout.startswith("ok: ")), done.stderr
        done = sallyport("vault", "list")
        assert (1, True) == (done.returncode, "the server is not running: ./run serve" in done.stderr)
        piped = f"set -o pipefail; {checkout}/run sallyport policy check {example} | head -1"
        done = as_anyone("bash", "-c", piped, **places)
        assert (f"{example}: good\n", "") == (done.stdout, done.stderr)
        assert not (home / "none").exists()
        assert not (checkout / ".venv").exists()

        done = as_anyone(checkout / "run", "sallyport", "policy", "check", example, HOME="/nonexistent")
        assert (1, True) == (done.returncode, "set XDG_CACHE_HOME" in done.stderr)
        done = as_anyone(checkout / "run", "serve", **places)
        assert (1, True) == (done.returncode, "needs root" in done.stderr)
    finally:
        shutil.rmtree(home)


def _written_log(directory: Path) -> Path:
    """A log with one record, as auditd writes it."""

    async def write() -> Path:
        daemon = await Auditd(directory).start()
        control = await daemon.attach(None)
        await control.accept("vault.put", "allow", secret="a-secret")
        assert 0 == await daemon.stop()
        return daemon.log

    return asyncio.run(write())
