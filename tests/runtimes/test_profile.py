"""The profiles of the runtimes. No other module distinguishes one runtime from another."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from runtimes.engine.profile import PROFILES, RUNC, RUNSC, RuntimeProfile
from wire.api.hostd import Runtime

ROOT = Path(__file__).resolve().parents[2]


def compared(source: str) -> list[str]:
    """Return the comparisons with the name of a runtime, match statements included."""
    found = []
    for node in ast.walk(ast.parse(source)):
        sides: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        if any(isinstance(side, ast.Constant) and side.value in PROFILES for side in sides):
            found.append(ast.unparse(node))
    return found


def test_each_runtime_that_can_be_asked_for_has_a_profile() -> None:
    assert tuple(Runtime) == tuple(PROFILES)
    assert all(name == profile.name for name, profile in PROFILES.items())


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_a_runtime_without_a_kernel_of_its_own_is_fenced_by_the_hosts(profile: RuntimeProfile) -> None:
    """Rights over the host's kernel are never allowed, and all of its defences are required."""
    assert profile.isolation or (profile.user_namespace and profile.seccomp and not profile.inner_limits)
    assert not profile.size_flag or profile.size_flag in profile.flags


def test_what_each_runtime_declares() -> None:
    runc = (RUNC.user_namespace, RUNC.seccomp, RUNC.isolation, RUNC.inner_limits, RUNC.size_flag, RUNC.flags)
    runsc = (RUNSC.user_namespace, RUNSC.seccomp, RUNSC.isolation, RUNSC.inner_limits, RUNSC.size_flag)
    assert (True, True, False, False, "", ()) == runc
    assert (False, False, True, True, "--overlay2=root:self") == runsc


PROPERTIES = ("user_namespace", "seccomp", "isolation", "inner_limits", "listeners", "kills_by_number")


@pytest.mark.parametrize("name", PROPERTIES)
def test_each_property_of_a_runtime_is_independent_of_the_others(name: str) -> None:
    """The declared runtimes cannot show it: several of their properties are always equal."""
    properties = dict.fromkeys(PROPERTIES, False)
    profile = RuntimeProfile("x", flags=("--a",), size_flag="--b", **properties | {name: True})
    assert ("x", ("--a",), "--b") == (profile.name, profile.flags, profile.size_flag)
    assert properties | {name: True} == {one: getattr(profile, one) for one in properties}


@pytest.mark.parametrize("package", ["runtimes", "lifecycle"])
def test_nothing_compares_with_the_name_of_a_runtime(package: str) -> None:
    assert ['x == "runc"'] == [text.replace("'", '"') for text in compared("x == 'runc'")]
    assert {} == {
        str(path.relative_to(ROOT)): found
        for path in (ROOT / package).rglob("*.py")
        if (found := compared(path.read_text()))
    }


def test_the_shim_starts_without_slow_modules() -> None:
    """The shim starts for each container."""
    slow = "{'typing', 'dataclasses', 'pydantic'}"
    code = f"import sys; sys.path.append({str(ROOT)!r}); import runtimes.engine.shim; print({slow} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-IS", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
