"""Each file and test that a document names exists, and each claim of the threat model names a test."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/compatibility.md", "docs/threat-model.md")
_PATH = re.compile(r"`((?:tests|docs|gateway|runtimes|lifecycle|policy|audit|vault|wire|demo)/[\w./-]+)`")
_DEFINED = re.compile(r"\b(?:def|func) (\w+)\(")
_TEST = re.compile(r"`((?:test_|Test[A-Z])\w+)`")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_and_test_that_is_named_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    files = (*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "execd").rglob("*_test.go"))
    sources = "".join(path.read_text() for path in files)

    assert [] == [path for path in _PATH.findall(text) if not (ROOT / path).exists()]
    assert set() == set(_TEST.findall(text)) - set(_DEFINED.findall(sources))


def _claims() -> list[str]:
    """Return the rows of the table of claims."""
    table = (ROOT / "docs/threat-model.md").read_text().split("\n## Claims")[1].split("\n## ")[0]
    return [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| Claim")]


def _extended() -> tuple[set[str], set[str]]:
    """Return the test functions, and the modules, that run only with --all."""
    functions, modules = set(), set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0]):
                if "mark.extended" in ast.unparse(node.value):
                    modules.add(str(path.relative_to(ROOT)))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                marks = map(ast.unparse, node.decorator_list)
                functions |= {node.name} if "pytest.mark.extended" in marks else set()
    return functions, modules


def test_every_claim_of_the_threat_model_has_a_test_in_each_run() -> None:
    functions, modules = _extended()
    tests = {row: {*_TEST.findall(row)} - functions | {*_PATH.findall(row)} - modules for row in _claims()}

    assert functions
    assert modules
    assert [] == [row for row, left in tests.items() if "Ways out" not in row and not left]


def test_every_claim_of_the_threat_model_names_a_test() -> None:
    rows = _claims()

    assert len(rows) > 10
    assert [] == [row for row in rows if not ("Ways out" in row or _TEST.search(row) or "`tests/" in row)]


def test_every_compromised_component_has_a_test_of_what_holds() -> None:
    section = (ROOT / "docs/threat-model.md").read_text().split("## If a component")[1].split("## One layer off")[0]
    rows = [line.split("|")[-2] for line in section.splitlines() if line.startswith("| ")][1:]

    assert len(rows) > 8
    assert [] == [row for row in rows if not (_TEST.search(row) or "`tests/" in row)]
