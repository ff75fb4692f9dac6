"""No single layer is load-bearing alone (I8): this module runs the matrix of docs/threat-model.md.

Each run checks that nothing arrives with all layers on, and that something arrives with all layers of a path off. With
`--all` it also switches off each layer alone.
"""

import ast
from collections.abc import Iterator
from pathlib import Path as FilePath

import pytest

from lifecycle.posture.attempts import FarEnd
from tests.conftest import representatives
from tests.security.layers import substitutes
from tests.security.layers.defences import CLOSED, DEFENCES, HELD, PATHS, REFUSED, Defence, Path, tables
from tests.security.layers.matrix import Matrix, running, told, told_of
from tests.security.layers.substitutes import DYING
from tests.security.layers.suite import RUNTIMES, Seen, control
from tests.stacks import INTERNET

DOCUMENT = (FilePath(__file__).parents[2] / "docs" / "threat-model.md").read_text()
DEFENCE_NAMES = [defence.name for defence in DEFENCES]


@pytest.fixture(scope="module", name="matrix")
def _matrix() -> Iterator[Matrix]:
    with running(INTERNET) as matrix:
        yield matrix


def test_the_document_has_a_row_for_each_defence_and_each_path() -> None:
    rows, paths = tables(DOCUMENT)

    assert list(rows) == DEFENCE_NAMES
    assert list(paths) == [path.title for path in PATHS]


def switches(source: FilePath) -> set[str]:
    """Return the names that a substitute's code checks: in `off(NAME)`, `replaced(_, _, NAME, _)` and `NAME in off`."""
    tree = ast.parse(source.read_text())
    constants = {
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    asked: list[ast.expr] = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="replaced"), args=[_, _, name, _]):
                asked.append(name)
            case ast.Call(func=ast.Attribute(attr="off"), args=[name]):
                asked.append(name)
            case ast.Compare(left=name, comparators=[ast.Name(id="off")]):
                asked.append(name)
    named = [constants.get(one.id) if isinstance(one, ast.Name) else ast.literal_eval(one) for one in asked]
    return {str(one) for one in named}


def test_each_switch_has_a_row_and_a_path_and_each_defence_a_switch() -> None:
    here = FilePath(substitutes.__file__)
    found = switches(here) | switches(here.with_name("shim.py"))

    # `replaced` itself checks its argument, which has no constant name.
    assert found - {"None"} == set(DEFENCE_NAMES)
    assert {layer for path in PATHS for layer in path.layers} == set(DEFENCE_NAMES)
    assert len(DEFENCE_NAMES) == len(set(DEFENCE_NAMES))


def test_a_layer_is_on_one_path_with_those_that_stand_before_it() -> None:
    for defence in DEFENCES:
        for former in defence.behind:
            assert [path for path in PATHS if {former, defence.name} <= set(path.layers)], defence.name


def test_what_gets_out_with_one_layer_off_is_the_leak_of_a_path_of_that_layer_alone() -> None:
    alone = {path.layers[0]: f"fails: {'; '.join(path.leaks)}" for path in PATHS if len(path.layers) == 1}

    assert {one.name: one.cell for one in DEFENCES if one.cell.startswith("fails")} == alone


WORKING = Seen(alive=True, honest=True)


@pytest.mark.parametrize(
    ("seen", "cell"),
    [
        (WORKING, HELD),
        (Seen(refused="creation failed: sallyport: no seccomp allowlist"), REFUSED),
        (Seen(refused="creation failed: no room"), "not made: creation failed: no room"),
        (Seen(), "the worker died"),
        (Seen(honest=True), "the worker died"),
        (Seen({"this": 1}, honest=True), "the worker died"),
        (Seen(alive=True), f"{HELD}; {CLOSED}"),
        (Seen({"this": 1, "that": 2}, alive=True, honest=True), "fails: that; this"),
        (Seen({"this": 1}, alive=True), f"fails: this; {CLOSED}"),
    ],
)
def test_a_cell_says_held_of_a_sandbox_that_works_only(seen: Seen, cell: str) -> None:
    assert told(seen) == cell


def test_a_path_fails_when_all_that_it_is_about_arrives_from_a_sandbox_that_works() -> None:
    path = Path("name", (DEFENCE_NAMES[0],), ("this", "that"))

    assert told_of(path, Seen({"this": 1, "that": 1, "more": 1}, alive=True, honest=True)) == "fails"
    assert told_of(path, Seen({"this": 1, "that": 1}, alive=True)) == f"fails; {CLOSED}"
    for seen in (WORKING, Seen({"this": 1}, alive=True, honest=True), Seen({"this": 1, "that": 1}, honest=True)):
        assert told_of(path, seen) not in ("fails", f"fails; {CLOSED}")


@pytest.mark.system
def test_without_a_gate_the_same_attempts_reach_every_far_end(matrix: Matrix) -> None:
    assert set(FarEnd) == control(matrix.internet)


@pytest.mark.system
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_with_all_layers_nothing_arrives_and_each_check_finds_its_layer(runtime: str, matrix: Matrix) -> None:
    observed = matrix.observe(())

    assert told(observed.seen[runtime]) == HELD
    assert [] == [one.name for one in DEFENCES if not one.behind and not observed.acts[one.name]]


@pytest.mark.system
@pytest.mark.extended
@pytest.mark.parametrize("defence", DEFENCES, ids=lambda defence: defence.name)
def test_with_one_layer_off_its_own_check_fails_and_the_far_end_holds(defence: Defence, matrix: Matrix) -> None:
    row = matrix.row(defence)

    assert row[3].startswith("holds, fails: ")
    assert row[4:] == [defence.cell] * len(RUNTIMES)
    assert tables(DOCUMENT)[0][defence.name] == row


@pytest.mark.system
@pytest.mark.parametrize(
    "name",
    representatives([path.name for path in PATHS], "packets", "secrets", "a worker that is taken over", "the log"),
)
def test_with_all_layers_of_a_path_off_the_far_end_does_not_hold(name: str, matrix: Matrix) -> None:
    (path,) = (path for path in PATHS if path.name == name)
    row = matrix.path(path)

    assert row[1:] == [path.cell(runtime) for runtime in RUNTIMES]
    assert tables(DOCUMENT)[1][path.title] == row


@pytest.mark.system
@pytest.mark.extended
def test_no_row_is_as_expected_when_the_worker_dies(matrix: Matrix) -> None:
    dead = matrix.observe((), (DYING,)).seen

    for runtime in RUNTIMES:
        assert [] == [one.name for one in DEFENCES if told(dead[runtime]) == one.cell]
        assert [] == [path.name for path in PATHS if told_of(path, dead[runtime]) == path.cell(runtime)]
