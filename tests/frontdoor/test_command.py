"""The paths of builds reach the command as settings; before a build, the settings have the future paths."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from frontdoor.builds import Built
from frontdoor.command import places_only, settings, write_built
from frontdoor.places import find

ROOT = Path(__file__).resolve().parents[2]
PLACES = find({"SALLYPORT_HOME": "/h", "SALLYPORT_RUN_DIR": "/r"}, "/checkout", 0)
BUILT = Built("/c/runsc", "/c/execd", "/c/base.tar", "/c/empty.tar", "/c/code.tar")


@pytest.mark.parametrize("with_code", [False, True])
def test_settings_name_what_was_built(with_code: bool) -> None:
    table = tomllib.loads(settings(PLACES, BUILT, "/usr/sbin/dockerd", with_code))["sallyport"]
    images = {image["name"]: image["tar"] for image in table["images"]}
    assert ("/h/state", "/r", "/checkout/.venv/bin/python") == (table["state_dir"], table["run_dir"], table["python"])
    assert ("/c/runsc", "/c/execd") == (table["runsc"], table["execd"])
    code = {"sallyport/code-interpreter": "/c/code.tar"} if with_code else {}
    assert {"sallyport/base": "/c/base.tar", "sallyport/empty": "/c/empty.tar", **code} == images
    assert {
        "managed": True,
        "binary": "/usr/sbin/dockerd",
        "data_root": "/h/docker",
        "log": "/h/dockerd.log",
    } == table["docker"]
    first = tomllib.loads(places_only(PLACES))["sallyport"]
    assert first == {name: table[name] for name in first}


def test_every_user_can_read_the_settings(tmp_path: Path) -> None:
    places = find({"SALLYPORT_HOME": str(tmp_path)}, "/checkout", 0)
    before = os.umask(0o077)
    try:
        write_built(places, BUILT)
    finally:
        os.umask(before)
    assert 0o644 == (tmp_path / "built.toml").stat().st_mode & 0o777
    assert ["built.toml"] == os.listdir(tmp_path)


def test_the_command_runs_in_the_callers_directory_with_the_settings(tmp_path: Path) -> None:
    """As `./run` executes frontdoor/__main__.py: in the same process, with settings even before a build."""
    program = tmp_path / "bin" / "sallyport"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho $$ "$PWD" "$1" "$3 $4"; cat "$2"\n')
    program.chmod(0o755)
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    environment = os.environ | {"RUN_CALLER": "/usr", "SALLYPORT_HOME": str(tmp_path), "SALLYPORT_RUN_DIR": "/r"}
    seen = []
    for _ in range(2):
        command = [str(program.with_name("python")), "-S", "-m", "frontdoor", "sallyport", "policy", "check"]
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
            out, _ = process.communicate()
            assert (0, f"{process.pid} /usr --defaults policy check") == (process.returncode, out.splitlines()[0])
            seen.append(tomllib.loads(out.partition("\n")[2]))
        (tmp_path / "built.toml").write_text("built = 1\n")
    assert [{"sallyport": {"state_dir": f"{tmp_path}/state", "run_dir": "/r"}}, {"built": 1}] == seen
