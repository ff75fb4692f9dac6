"""`command://`: what a program gets, and the bounds of its time, output and processes."""

import os
import time
from pathlib import Path

import pytest

from policy.references import BackendKind, SecretReference
from vault.secret import Secret
from vault.stores.backend import NoValueError
from vault.stores.command import Command, CommandBackend
from wire.api.fetcher import Fault, Material

CANARY = "canary-3fa9b1"
REFERENCE = SecretReference(BackendKind.COMMAND, "name")


class Supplier:
    """A replacement for what hostd opens."""

    async def text(self, material: Material, name: str = "") -> str:
        return f"{material}-{name}\n"


def backend(script: str, seconds: float = 6.0, **environment: str) -> CommandBackend:
    commands = {"name": Command(("/bin/sh", "-c", script), environment)}
    return CommandBackend(commands, Supplier(), 60, seconds)


async def fault(tested: CommandBackend) -> NoValueError:
    with pytest.raises(NoValueError) as caught:
        await tested.read(REFERENCE, "sbx-1")
    assert CANARY not in str(caught.value)
    return caught.value


async def test_a_command_gets_the_environment_of_the_settings_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the fetcher's environment it gets nothing. Standard input is empty, the directory is the root."""
    monkeypatch.setenv("OF_THE_FETCHER", "x")
    names = "env | cut -d= -f1 | grep -vx '_\\|PWD\\|OLDPWD\\|SHLVL' | sort | tr '\\n' ,"
    tested = backend(
        f'echo "$({names})$PLAIN,$FILE,$VAR,$(cat)$(pwd)"',
        PLAIN="text",
        FILE="file://a",
        VAR="env://B",
    )
    found = await tested.read(REFERENCE, "sbx-1")
    assert Secret("FILE,LANG,PATH,PLAIN,VAR,text,file-a,environment-B,/") == found.value
    assert (60, 300, True) == (found.fresh, found.valid, found.shared)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (f"echo {CANARY}; echo {CANARY} >&2; exit 3", Fault.FAILED),
        (f"echo {CANARY}; kill -9 $$", Fault.FAILED),
        ("printf ''", Fault.UNFIT),
        (f"printf '{CANARY}\\n\\n'", Fault.UNFIT),
        (f"printf '{CANARY}\\377'", Fault.UNFIT),
        (f"yes {CANARY}", Fault.UNFIT),
        (f"echo {CANARY}; sleep 60", Fault.TIMEOUT),
        (f"setsid sleep 3 & echo {CANARY}", Fault.TIMEOUT),
    ],
    ids=["status", "signal", "nothing", "two lines", "not UTF-8", "endless", "late", "output kept open"],
)
async def test_a_command_that_fails_or_does_not_end_gives_no_value(script: str, expected: Fault) -> None:
    began = time.monotonic()
    assert expected == (await fault(backend(script, seconds=1.0))).fault
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("end", ["", "; exit 1", "; sleep 60", "; yes"])
async def test_no_process_of_a_command_is_left(tmp_path: Path, end: str) -> None:
    """A process in the background keeps no pipe and ignores the end of its parent."""
    pid = tmp_path / "pid"
    tested = backend(f"sleep 300 >/dev/null 2>&1 & echo $! >{pid}; echo {CANARY}{end}", seconds=1.0)
    if end:
        await fault(tested)
    else:
        await tested.read(REFERENCE, "sbx-1")
    left = Path(f"/proc/{pid.read_text().strip()}/stat")
    deadline = time.monotonic() + 5
    while left.exists() and left.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline


async def test_a_program_that_cannot_be_executed_is_named_without_a_read() -> None:
    for argv in (("/nonexistent/program",), ("/etc/hostname",)):
        tested = CommandBackend({"name": Command(argv, {})}, Supplier(), 60)
        assert Fault.FAILED == (await fault(tested)).fault
        if os.geteuid() != 0 or not Path(argv[0]).exists():
            with pytest.raises(NoValueError, match="cannot execute the program of name"):
                await tested.examine()


async def test_a_name_without_a_command_is_missing() -> None:
    with pytest.raises(NoValueError) as caught:
        await backend("true").read(SecretReference(BackendKind.COMMAND, "other"), "sbx-1")
    assert Fault.MISSING == caught.value.fault
