"""The names of builds are those that the shell's tools compute, so a cache of an earlier version stays valid."""

import shutil
import subprocess
from pathlib import Path

import pytest

from frontdoor import names

ROOT = Path(__file__).resolve().parents[2]

SUM = "LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c1-16"
SHELL = {
    "execd": f"echo execd-$(find execd -name '*.go' -o -name 'go.*' | {SUM})",
    "code": f"echo code-interpreter-$(find images -type f -not -path '*/__pycache__/*' | {SUM}).tar",
    "clients": "echo clients-$(cat tests/clients/* | sha256sum | cut -c1-16)",
    **{name: f"echo {name}-$(sha256sum images/{name}.sh | cut -c1-16).tar" for name in ("base", "small", "java")},
}


@pytest.fixture(name="tree")
def _tree(tmp_path: Path) -> Path:
    for folder in ("execd", "images", "tests/clients"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def named(root: Path) -> dict[str, str]:
    found = {name: names.image(root, name) for name in ("base", "small", "java")}
    return found | {"execd": names.execd(root), "code": names.code_image(root), "clients": names.clients(root)}


def printed(root: Path) -> dict[str, str]:
    def run(command: str) -> str:
        done = subprocess.run(["bash", "-c", command], cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    return {name: run(command) for name, command in SHELL.items()}


def test_names_are_those_that_sha256sum_computes(tree: Path) -> None:
    assert printed(tree) == named(tree)


def test_a_name_depends_on_contents_and_paths_of_its_sources_only(tree: Path) -> None:
    before = named(tree)
    (tree / "execd" / "notes.txt").write_text("no source")
    (tree / "images" / "__pycache__").mkdir()
    (tree / "images" / "__pycache__" / "x.pyc").write_text("no source")
    assert before == named(tree)
    (tree / "execd" / "main.go").rename(tree / "execd" / "Main.go")
    (tree / "images" / "base.sh").write_text("changed")
    assert printed(tree) == named(tree)
    assert {"small", "java", "clients"} == {name for name, value in named(tree).items() if before[name] == value}
