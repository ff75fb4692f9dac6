"""docs/audit-records.md and its table agree with the records that the code writes."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from audit.describe import document
from audit.kinds import DESCRIBED, FIELDS, undescribed

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("vault", "gateway", "lifecycle", "runtimes", "audit")
WRITERS = {"form", "accept", "note", "count", "record", "_record", "_note", "_accept"}
type Functions = dict[str, list[ast.AST]]


def test_the_document_is_what_the_table_says() -> None:
    assert document() == (ROOT / "docs" / "audit-records.md").read_text()


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions(*paths: Path) -> Functions:
    """Return the functions and methods of some modules by name."""
    found: Functions = {}
    for path in paths:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(node.name, []).append(node)
    return found


def calls(package: str) -> Iterator[tuple[str, set[str]]]:
    """Yield kind and fields of each call in a package that writes a record with a constant kind."""
    paths = sorted((ROOT / package).rglob("*.py"))
    everywhere = functions(*paths)
    for path in paths:
        here = functions(path)
        for function in (node for nodes in here.values() for node in nodes):
            for node in ast.walk(function):
                match node:
                    case ast.Call(func=ast.Attribute(attr=name), args=[ast.Constant(value=str(kind)), *_]):
                        if name in WRITERS and kind in DESCRIBED:
                            yield kind, set(_fields(node, function, everywhere | here)) - {"durable", "timeout"}


def _fields(call: ast.Call, function: ast.AST, known: Functions) -> Iterator[str]:
    """Yield the keywords of a call and the keys of the dicts that it expands.

    Such a dict is a variable of the function, or the result of a function that it calls.
    """
    yield from _varying(call)
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg
            continue
        for node in ast.walk(keyword.value):
            match node:
                case ast.Name(id=name):
                    yield from _assigned(name, function, known)
                case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
                    for called in known.get(name, []) if name != "to_json" else []:
                        yield from _keys(called)


def _varying(call: ast.Call) -> Iterator[str]:
    """Yield the fields that each use of a form gives."""
    match call:
        case ast.Call(func=ast.Attribute(attr="form"), args=[_, _, ast.Tuple(elts=names), *_]):
            yield from (name.value for name in names if isinstance(name, ast.Constant) and isinstance(name.value, str))


def _assigned(name: str, function: ast.AST, known: Functions) -> Iterator[str]:
    """Yield the keys of the values that a function assigns to a variable."""
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                yield from _keys(value)
                for called in ast.walk(value):
                    if isinstance(called, ast.Call):
                        attr = called.func.attr if isinstance(called.func, ast.Attribute) else ""
                        yield from (key for one in known.get(attr, []) for key in _keys(one) if attr != "to_json")
            case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value) if target == name:
                yield from _keys(value)
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=target), slice=ast.Constant(value=str(key)))]):
                if target == name:
                    yield key


def _keys(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            yield from (key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def test_each_field_that_is_written_is_described() -> None:
    written = [call for package in PACKAGES for call in calls(package)]

    assert len(written) > 40
    assert [] == [(kind, more) for kind, fields in written if (more := undescribed(kind, frozenset(fields)))]


def test_each_field_that_is_described_is_written() -> None:
    """Each field is a keyword or a dict key in the package of some producer. auditd itself writes two fields."""
    named = {
        name
        for package in PACKAGES[:-1]
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(_tree(path))
        for name in _named(node)
    }
    assert {"torn", "state"} == FIELDS.keys() - named | {"torn", "state"}


def _named(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call):
        yield from (keyword.arg for keyword in node.keywords if keyword.arg is not None)
        yield from _varying(node)
    elif isinstance(node, ast.Dict):
        yield from _keys(node)
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        yield str(node.slice.value)
