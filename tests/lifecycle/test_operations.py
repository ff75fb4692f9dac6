"""The documents and `init-config` agree with the model of the settings, and no other place sets a default."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from lifecycle import cli
from lifecycle.config import launch, reference
from lifecycle.config.keys import KEYS, NOT_APPLICABLE, allowed, defaults
from lifecycle.config.settings import Settings, parse, read

ROOT = Path(__file__).resolve().parents[2]


def uncommented(text: str) -> str:
    """Return the file with each key in force."""
    return re.sub(r"^#(?=[a-z_]+ = )", "", text, flags=re.MULTILINE)


def flat(table: dict[str, object], prefix: str = "") -> set[str]:
    """Return the keys of a file."""
    found: set[str] = set()
    for name, value in table.items():
        key = f"{prefix}{name}"
        found |= {key} if key in KEYS or not isinstance(value, dict) else flat(value, f"{key}.")
    return found


def test_the_table_is_the_one_of_the_model() -> None:
    """If this fails, replace the table by the output of `python -m lifecycle.config.reference`."""
    assert f"\n\n{reference.table()}\n" in (ROOT / "docs" / "configuration.md").read_text()
    assert frozenset() == NOT_APPLICABLE & set(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_described(key: str) -> None:
    """Each key has a description, and each number has limits."""
    assert KEYS[key].description
    assert not isinstance(defaults()[key], int) or isinstance(defaults()[key], bool) or allowed(key)


def test_a_new_file_changes_nothing(tmp_path: Path) -> None:
    """The file has every key, all as comments."""
    path = tmp_path / "new.toml"
    assert 0 == cli.main(["init-config", "--output", str(path)])
    assert {} == read(path, {}).values
    assert set(KEYS) == flat(tomllib.loads(uncommented(path.read_text())))


def test_a_new_file_is_accepted_with_every_key_in_force(capsys: pytest.CaptureFixture[str]) -> None:
    """Every daemon gets the same settings as without a file, except for keys that have only an example."""
    assert 0 == cli.main(["init-config"])
    text = uncommented(capsys.readouterr().out)
    written = parse(tomllib.loads(text), "new.toml", {})
    assert set(KEYS) == set(written.values)
    constant = {key: value for key, value in written.values.items() if defaults()[key] is not None}
    assert len(constant) > 50
    assert constant == {key: defaults()[key] for key in constant}
    empty, place = parse({}, "x", {}), Path("/launch")
    same = Settings(constant, "x")
    assert launch.serve_config(empty, ()) == launch.serve_config(same, ())
    assert launch.host_config(empty, place) == launch.host_config(same, place)
    assert launch.audit_config(empty) == launch.audit_config(same)


def test_no_file_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.toml"
    path.write_text("[server]\nport = 1\n")
    assert 0 != cli.main(["init-config", "--output", str(path)])
    assert "[server]\nport = 1\n" == path.read_text()
    assert f"{path} exists" in capsys.readouterr().err


def test_a_default_stands_in_the_model_only() -> None:
    """No call that reads a key's value passes its own default."""
    for path in sorted((ROOT / "lifecycle").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "get" == node.func.attr:
                first = node.args[0] if node.args else None
                key = first.value if isinstance(first, ast.Constant) else None
                assert key not in KEYS or len(node.args) == 1, f"{path.name}:{node.lineno}"
