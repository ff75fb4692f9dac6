"""The tables of docs/tests.md: each module of product and front door has tests and each test module is in its folder.

Also a property of the whole suite: the fast tests start without the imports of the system tests.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
PACKAGES = ("wire", "policy", "audit", "vault", "gateway", "runtimes", "lifecycle", "frontdoor")
PRODUCT = {
    path.relative_to(ROOT).as_posix()
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if path.name != "__init__.py"
}
_ROW = re.compile(r"^\| (.+?) \| (.+) \|$", re.MULTILINE)
_CODE = re.compile(r"`([^`]+)`")


def rows() -> dict[str, list[str]]:
    """Return the rows of both tables by their first column: modules and subjects."""
    text = (ROOT / "docs" / "tests.md").read_text()
    found = {first.strip("`"): _CODE.findall(second) for first, second in _ROW.findall(text)}
    return {first: tests for first, tests in found.items() if tests}


@cache
def imported(path: Path) -> frozenset[Path]:
    """Return the project's files that a file imports by name, directly or through a package that re-exports them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {_file(name.name, path) for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(_file(node.module, path))
            for name in node.names:
                found.add(_file(f"{node.module}.{name.name}", path) or _handed_on(node.module, name.name))
    return frozenset(found - {None})


@cache
def _file(name: str, importer: Path) -> Path | None:
    for base in (ROOT, importer.parent, TESTS / "lifecycle"):  # tests.lifecycle.conftest adds its folder to the path
        place = base / name.replace(".", "/")
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                return path
    return None


@cache
def _handed_on(package: str, name: str) -> Path | None:
    path = ROOT / package.replace(".", "/") / "__init__.py"
    if path.is_file():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and name in {one.name for one in node.names}:
                return _file(node.module, path)
    return None


def helpers(path: Path) -> set[Path]:
    """Return a test module, the conftests above it except the root's, and the modules of tests/ that they import."""
    waiting, found = [path, *_conftests(path)], set()
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += [other for other in imported(one) if other.is_relative_to(TESTS)]
    return found


def _conftests(path: Path) -> Iterator[Path]:
    for folder in path.parents:
        if folder == TESTS:
            return
        if (folder / "conftest.py").is_file():
            yield folder / "conftest.py"


@cache
def reached(path: Path) -> set[str]:
    """Return the modules that a test module or its helpers import, and the modules that these import in turn."""
    direct = {one for helper in helpers(path) for one in imported(helper)}
    composed = {two for one in direct if _name(one) in PRODUCT for two in imported(one)}
    return {_name(one) for one in direct | composed} & PRODUCT


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""


def has_cause(test: str, module: str) -> bool:
    """Return whether a test module reaches a module or names it, because it tests the module in another process."""
    path = TESTS / test
    text = path.read_text()
    return module in reached(path) or module in text or module.removesuffix(".py").replace("/", ".") in text


def test_each_module_has_tests() -> None:
    table = rows()
    assert set() == PRODUCT - table.keys()
    gone = {first for first in table if first.endswith(".py")} - PRODUCT
    assert set() == gone


def test_each_test_module_is_listed_and_exists() -> None:
    listed = {test for tests in rows().values() for test in tests}
    there = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    assert (set(), set()) == (there - listed, listed - there)


def test_each_listed_test_reaches_its_module() -> None:
    table = {module: tests for module, tests in rows().items() if module in PRODUCT}
    assert [] == [(module, test) for module, tests in table.items() for test in tests if not has_cause(test, module)]


def pure_modules() -> list[str]:
    """Return the modules and packages that the import contract on purity lists."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (modules,) = (one["source_modules"] for one in contracts if one["name"].startswith("pure modules "))
    return list(modules)


def of_its_name(module: str) -> bool:
    """Return whether a test file named after the module imports it.

    The file is `test_<module>.py` or `test_<folder>_<module>.py` among the package's tests.
    """
    package, *folders, name = module.split(".")
    names = {f"test_{name}.py", *(f"test_{folder}_{name}.py" for folder in folders[-1:])}
    place = module.replace(".", "/")
    return any(
        one.startswith((f"{place}.py", f"{place}/"))
        for path in (TESTS / package).rglob("test_*.py")
        if path.name in names
        for one in map(_name, imported(path))
    )


def test_each_pure_module_has_a_test_module_of_its_name() -> None:
    assert [] == [module for module in pure_modules() if not of_its_name(module)]


def public_classes() -> Iterator[tuple[str, str]]:
    """Yield each public class of product and front door, with its module."""
    for module in sorted(PRODUCT):
        for node in ast.walk(ast.parse((ROOT / module).read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name, module


def test_a_public_class_name_has_one_meaning() -> None:
    """Requests in `wire.api` are an exception: they have the names of operations, which two processes can share."""
    found: dict[str, list[str]] = {}
    for name, module in public_classes():
        found.setdefault(name, []).append(module)
    repeated = {name: modules for name, modules in found.items() if len(modules) > 1}
    assert {} == {
        name: modules for name, modules in repeated.items() if not all(one.startswith("wire/api/") for one in modules)
    }


def test_the_root_conftest_imports_nothing_heavy() -> None:
    """It imports only the standard library and pytest.

    Otherwise each run of a single fast test waits for more imports.
    """
    program = (
        "import sys, pytest; before = set(sys.modules); import tests.conftest; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ["tests"] == done.stdout.split()
