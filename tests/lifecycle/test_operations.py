"""docs/configuration.md says what the code does: its table of settings is compared with it."""

import re
import tomllib
from pathlib import Path

import pytest

from lifecycle import launch
from lifecycle.setting_keys import KEYS, NOT_APPLICABLE
from lifecycle.settings import parse

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "configuration.md").read_text()
ROWS: list[tuple[str, str]] = re.findall(r"^\| `([a-z_]+\.[a-z_.]+)` \| (\S[^|]*) \| \S[^|]* \|$", TEXT, re.MULTILINE)
PLACES = {"state_dir/": "/var/lib/sallyport/state/", "run_dir/": "/run/sallyport/"}


def _defaults() -> dict[str, str]:
    """The defaults that are values, as TOML; those said in words are not here."""
    found = {}
    for key, text in ROWS:
        written = re.fullmatch(r"`([^`]*)`", text.split(";")[0].strip())
        if written is None:
            continue
        value = written[1]
        for short, place in PLACES.items():
            value = value.replace(short, place)
        try:
            tomllib.loads(f"x = {value}")
        except tomllib.TOMLDecodeError:
            value = f'"{value}"'
        found[key] = value
    return found


def test_every_key_is_explained_in_the_order_of_the_code() -> None:
    """One row each, none for a key that does not exist or has no effect."""
    assert list(KEYS) == [key for key, _ in ROWS]
    assert frozenset() == NOT_APPLICABLE & set(KEYS)


@pytest.mark.parametrize(("key", "value"), _defaults().items())
def test_a_default_is_a_value_of_its_key(key: str, value: str) -> None:
    """Written into a file it would be accepted."""
    KEYS[key](tomllib.loads(f"x = {value}")["x"])


def test_the_defaults_are_those_of_the_code() -> None:
    """Every daemon is told the same with the table's defaults written into a file as with an empty one."""
    assert len(_defaults()) > 45
    written = parse(tomllib.loads("\n".join(f"{key} = {value}" for key, value in _defaults().items())), "x", {})
    empty = parse({}, "x", {})
    place = Path("/launch")
    assert launch.serve_config(empty, ()) == launch.serve_config(written, ())
    assert launch.host_config(empty, place) == launch.host_config(written, place)
    assert launch.audit_config(empty) == launch.audit_config(written)
    assert launch.vault_config(empty) == launch.vault_config(written)
    assert launch.compiler_config(empty) == launch.compiler_config(written)
