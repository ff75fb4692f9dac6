"""The program `sallyport` as a process: the positions of options, its output, and its end if the output is not read."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lifecycle import about, cli, running
from lifecycle.config import settings
from lifecycle.config.settings import Settings, parse
from runtimes.process.predecessor import lock, start_time

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "policies.example.yaml"
START = "import sys; from lifecycle.command import main; sys.argv[0] = 'sallyport'; sys.exit(main())"
PROGRAM = [sys.executable, "-c", START]


def _run(*words: str, home: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | options
    environment = {"PATH": os.environ["PATH"], "HOME": str(home)}
    return subprocess.run([*PROGRAM, *words], cwd=ROOT, env=environment, text=True, check=False, timeout=60, **options)


def _leaves(parser: argparse.ArgumentParser, *words: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield words
    for name, sub in groups[0].choices.items() if groups else ():
        yield from _leaves(sub, *words, name)


INTERRUPTIBLE = ("env", "--default-signal=INT")
"""A shell starts background processes with SIGINT ignored, and the test session can be one of them."""
LEAVES = sorted(_leaves(cli.parser()))
NEEDED = {
    ("policy", "explain"): ["--host", "a.example"],
    ("vault", "put"): ["name", "--host", "a.example"],
    ("vault", "rotate"): ["name"],
    ("vault", "delete"): ["name"],
    ("vault", "reset"): ["name"],
    ("vault", "check"): ["env://NAME"],
    ("vault", "limit"): ["env://NAME", "--max-uses", "1"],
    ("vault", "unlimit"): ["env://NAME"],
    ("image", "add"): ["tool.tar"],
    ("image", "alias"): ["name", "alias"],
    ("image", "show"): ["name"],
    ("image", "remove"): ["name"],
    ("volume", "remove"): ["name"],
}


def test_every_command_is_known_here() -> None:
    """A control for the tests below: their list has every command."""
    first = {"serve", "doctor", "init-config", "policy", "vault", "image", "volume", "audit"}
    assert first == {words[0] for words in LEAVES}
    assert 29 == len(LEAVES)


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_config_stands_before_or_after_every_word(words: tuple[str, ...]) -> None:
    """Also after the command's own arguments."""
    line = [*words, *NEEDED.get(words, [])]
    for place in (*range(len(words) + 1), len(line)):
        options = cli.parser().parse_args([*line[:place], "--config", "own.toml", *line[place:]])
        assert Path("own.toml") == options.config
        assert options.command == words[0]
    assert cli.parser().parse_args(line).config is None


def test_the_version_is_that_of_the_package_and_names_the_contract(tmp_path: Path) -> None:
    """`/version` reports the same version (test_operations)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert about.VERSION == project["version"]
    assert "lifecycle.command:main" == project["scripts"]["sallyport"]
    done = _run("--version", home=tmp_path)
    assert (0, f"sallyport {about.VERSION} (API: OpenSandbox {about.API_VERSION})\n") == (done.returncode, done.stdout)


PRINTING = {
    "help": ["--help"],
    "version": ["--version"],
    "help of a command": ["vault", "put", "--help"],
    "check": ["policy", "check", str(EXAMPLE)],
    "explain": ["policy", "explain", str(EXAMPLE), "--host", "a.example"],
    "a wrong file": ["policy", "check", str(ROOT / "pyproject.toml")],
    "no file": ["policy", "check", "/nonexistent"],
    "no settings": ["--config", "/nonexistent", "audit", "tail"],
    "no log": ["audit", "verify", "/nonexistent"],
    "no server": ["vault", "list"],
    "a wrong option": ["policy", "check", "--wrong"],
}


ONE_CLOSED = [(what, closed) for closed in ("stdout", "stderr") for what in PRINTING]
IN_EACH_RUN = {("check", "stdout"), ("check", "stderr"), ("no file", "stdout"), ("no file", "stderr")}


@pytest.mark.parametrize(
    ("what", "closed"),
    [
        *((what, "both") for what in PRINTING),
        *(pytest.param(*one, marks=[] if one in IN_EACH_RUN else pytest.mark.extended) for one in ONE_CLOSED),
    ],
)
def test_an_output_that_nothing_reads_causes_no_traceback(what: str, closed: str, tmp_path: Path) -> None:
    """As with `| head -1` and `2>&1 | head -1`, until the interpreter has ended."""
    read, write = os.pipe()
    os.close(read)
    streams = {name: write for name in ("stdout", "stderr") if closed in (name, "both")}
    done = _run(*PRINTING[what], home=tmp_path, **streams)
    os.close(write)
    assert "Traceback" not in (done.stderr or "")
    assert "Error" not in (done.stderr or "").replace("PolicyError", "")
    assert done.returncode in (0, 1, 2, 141)
    if closed == "both":
        assert 141 == done.returncode


@pytest.mark.parametrize("what", ["check", "help", "explain"])
def test_an_output_that_cannot_be_written_is_a_plain_message(what: str, tmp_path: Path) -> None:
    """With a full disk the command fails."""
    with open("/dev/full", "w") as full:
        done = _run(*PRINTING[what], home=tmp_path, stdout=full)
    assert (74, "sallyport: the output cannot be written: No space left on device\n") == (done.returncode, done.stderr)


def test_an_output_that_is_closed_from_the_start_is_no_fault(tmp_path: Path) -> None:
    """As with a redirection to `>&-`."""
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *PROGRAM, *PRINTING["check"]]
    done = subprocess.run(command, cwd=ROOT, env={"HOME": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert (0, "") == (done.returncode, done.stderr)


def test_an_interrupt_while_the_program_is_loaded_is_silent(tmp_path: Path) -> None:
    """The process ends by the signal."""
    command = [*INTERRUPTIBLE, sys.executable, "-X", "importtime", *PROGRAM[1:], *PRINTING["check"]]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if line.endswith(" argparse\n"))
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert -signal.SIGINT == process.returncode
    assert "Traceback" not in rest


def test_an_interrupt_of_a_command_under_way_is_silent(tmp_path: Path) -> None:
    """The command waits for its file when the interrupt arrives."""
    os.mkfifo(tmp_path / "fifo")
    command = [*INTERRUPTIBLE, *PROGRAM, "policy", "check", str(tmp_path / "fifo")]
    with (
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
        open(tmp_path / "fifo", "w"),  # returns when the command has opened it
    ):
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (130, "", "") == (process.returncode, out, err)


def test_a_missing_server_is_said_with_what_starts_it(tmp_path: Path) -> None:
    """The message is the same if the socket is missing and if no process listens on it."""
    config = tmp_path / "own.toml"
    config.write_text(f'[sallyport]\nrun_dir = "{tmp_path}"\n')
    done = _run("vault", "list", "--config", str(config), home=tmp_path)
    assert 1 == done.returncode
    assert "the server is not running: ./run serve" in done.stderr


@pytest.mark.parametrize("words", [["check"], ["explain", "--host", "a.example"]])
def test_a_policy_file_that_is_named_needs_no_settings(words: list[str], tmp_path: Path) -> None:
    """Broken settings of the user do not prevent the read of a named file. Without a name the command fails."""
    (tmp_path / ".sandbox.toml").write_text("nonsense")
    assert _run("policy", *words, str(EXAMPLE), home=tmp_path).returncode in (0, 1)
    assert 2 == _run("policy", *words, home=tmp_path).returncode


# ---- the running server's settings


def _server(directory: Path, **more: str) -> Settings:
    addresses = {"allowed_addresses": ["10.0.0.7"], "host_addresses": {"inner.example": ["10.0.0.7"]}}
    keys = {"run_dir": str(directory / "run"), "state_dir": str(directory / "served"), **addresses, **more}
    return parse({"sallyport": keys, "server": {"port": 18999, "api_key": "canary-0123456789abcdef"}}, "own.toml", {})


@pytest.fixture(name="base")
def _base(tmp_path: Path) -> Settings:
    (tmp_path / "run").mkdir(mode=0o755)
    running.note(_server(tmp_path, policy_file=str(EXAMPLE)))
    return parse({"sallyport": {"run_dir": str(tmp_path / "run"), "policy_file": "/other"}}, "(defaults)", {})


def test_the_running_servers_settings_are_found(base: Settings, tmp_path: Path) -> None:
    """The note has all settings that the commands need and no secret. A setting that it lacks counts as not set."""
    found = running.settings_of(base)
    assert (tmp_path / "served", EXAMPLE, 18999) == (found.state_dir, found.policy_file, found.port)
    assert tmp_path / "served" / "vault" / "master-key" == found.master_key_file
    assert ("10.0.0.7",) == found.get("sallyport.allowed_addresses")
    assert {"inner.example": ("10.0.0.7",)} == found.get("sallyport.host_addresses")
    text = (base.run_dir / running.NAME).read_text()
    assert "canary" not in text
    assert 0o644 == (base.run_dir / running.NAME).stat().st_mode & 0o777
    running.note(_server(tmp_path))
    assert running.settings_of(base).policy_file is None


def test_a_note_in_a_directory_that_others_can_write_is_not_believed(base: Settings) -> None:
    base.run_dir.chmod(0o1771)
    assert running.settings_of(base) is base


def test_a_second_server_in_the_same_place_leaves_the_note(base: Settings, tmp_path: Path) -> None:
    """The second server will not start, because the first one holds the lock."""
    held = lock(base.run_dir)
    running.note(_server(tmp_path, policy_file="/of/the/second"))
    assert EXAMPLE == running.settings_of(base).policy_file
    os.close(held)
    running.note(_server(tmp_path, policy_file="/of/the/second"))
    assert Path("/of/the/second") == running.settings_of(base).policy_file


def _stale(place: Path) -> None:
    note = json.loads(place.read_text())
    note["pid"] = 2**22 + 1
    place.write_text(json.dumps(note))


def _reused(place: Path) -> None:
    note = json.loads(place.read_text())
    note["pid"], note["started"] = os.getppid(), str(int(start_time(os.getppid()) or 0) + 1)
    place.write_text(json.dumps(note))


def _linked(place: Path) -> None:
    place.rename(place.with_name("elsewhere"))
    place.symlink_to("elsewhere")


def _of_another_user(place: Path) -> None:
    os.chown(place, 12345, 12345)


def _in_a_directory_of_another_user(place: Path) -> None:
    os.chown(place.parent, 12345, 12345)


def _of_another_release(place: Path) -> None:
    place.write_text(place.read_text().replace("run_dir", "run_directory"))


UNTRUE = {
    "of a server that ended": _stale,
    "of a number that is used again": _reused,
    "a link": _linked,
    "a second name of another file": lambda place: os.link(place, place.with_name("other")),
    "that others may write": lambda place: place.chmod(0o666),
    "in a directory that others may write": lambda place: place.parent.chmod(0o777),
    "of another release": _of_another_release,
    "rubbish": lambda place: place.write_text("[1"),
    "of another shape": lambda place: place.write_text('["pid"]'),
    "a directory": lambda place: (place.unlink(), place.mkdir()),
    "a pipe": lambda place: (place.unlink(), os.mkfifo(place)),
    "gone": lambda place: place.unlink(),
}
UNTRUE_BY_ROOT = {"of another user": _of_another_user, "where another user rules": _in_a_directory_of_another_user}


@pytest.mark.parametrize("what", [*UNTRUE, *(pytest.param(what, marks=pytest.mark.system) for what in UNTRUE_BY_ROOT)])
def test_a_note_that_may_be_untrue_counts_for_nothing(base: Settings, what: str) -> None:
    """The command then uses the settings that `serve` would use."""
    assert running.settings_of(base) is not base
    (UNTRUE | UNTRUE_BY_ROOT)[what](base.run_dir / running.NAME)
    assert running.settings_of(base) is base


def test_settings_that_are_named_are_not_replaced(
    base: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `--config` or by the environment. The note is only for commands without named settings."""
    defaults, own = tmp_path / "defaults.toml", tmp_path / "own.toml"
    defaults.write_text(f'[sallyport]\nrun_dir = "{base.run_dir}"\n')
    own.write_text(f'[sallyport]\nstate_dir = "{tmp_path}/own"\n')
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(settings.CONFIG_PATH, raising=False)
    assert 2 == cli.main(["--defaults", str(defaults), "audit", "verify"])
    assert f"{tmp_path}/served/audit: there is no audit log" in capsys.readouterr().err
    assert 2 == cli.main(["--defaults", str(defaults), "audit", "verify", "--config", str(own)])
    assert f"{tmp_path}/own/audit: there is no audit log" in capsys.readouterr().err
    monkeypatch.setenv(settings.CONFIG_PATH, str(own))
    assert 2 == cli.main(["--defaults", str(defaults), "audit", "verify"])
    assert f"{tmp_path}/own/audit: there is no audit log" in capsys.readouterr().err


def test_an_unknown_setting_is_answered_with_the_one_that_was_meant() -> None:
    """For a key and for a table."""
    for document, hint in (
        ({"server": {"prot": 1}}, "did you mean 'server.port'?"),
        ({"sallyport": {"policy_fil": "/x"}}, "did you mean 'sallyport.policy_file'?"),
        ({"sallyport": {"dokcer": {"managed": True}}}, "did you mean 'sallyport.docker'?"),
    ):
        with pytest.raises(settings.SettingsError) as caught:
            parse(document, "own.toml", {})
        assert str(caught.value).endswith(hint)
