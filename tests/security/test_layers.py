"""No single layer is load-bearing alone (I8): the matrix of docs/threat-model.md, run."""

from collections.abc import Iterator
from pathlib import Path as FilePath

import pytest

from demo.attempts import FarEnd
from tests.security.layers.defences import DEFENCES, PATHS, Defence, Path, tables
from tests.security.layers.matrix import Matrix, running
from tests.security.layers.suite import RUNTIMES, control
from tests.stacks import INTERNET, PORT

DOCUMENT = (FilePath(__file__).parents[2] / "docs" / "threat-model.md").read_text()


@pytest.fixture(scope="module", name="matrix")
def _matrix() -> Iterator[Matrix]:
    with running(INTERNET, PORT + 2) as matrix:
        yield matrix


def test_the_document_has_a_row_for_each_defence_and_each_path() -> None:
    rows, paths = tables(DOCUMENT)

    assert [defence.name for defence in DEFENCES] == list(rows)
    assert [f"{path.name}: {', '.join(path.layers)}" for path in PATHS] == list(paths)


def test_a_layer_is_on_one_path_with_those_that_stand_before_it() -> None:
    for defence in DEFENCES:
        for former in defence.behind:
            assert [path for path in PATHS if {former, defence.name} <= set(path.layers)], defence.name


@pytest.mark.system
def test_without_a_gate_the_same_attempts_reach_every_far_end(matrix: Matrix) -> None:
    assert set(FarEnd) == control(matrix.internet)


@pytest.mark.system
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_with_all_layers_nothing_arrives_and_each_check_finds_its_layer(runtime: str, matrix: Matrix) -> None:
    observed = matrix.observe(())

    assert {} == observed.seen[runtime].leaks
    assert "HTTP/1.1 200" in observed.seen[runtime].answers["honest"]
    assert [] == [one.name for one in DEFENCES if not one.behind and not observed.acts[one.name]]


@pytest.mark.system
@pytest.mark.parametrize("defence", DEFENCES, ids=lambda defence: defence.name)
def test_with_one_layer_off_its_own_check_fails_and_the_far_end_holds(defence: Defence, matrix: Matrix) -> None:
    row = matrix.row(defence)

    assert row[3].startswith("holds, fails: ")
    assert [True, True] == [cell.startswith("held") for cell in row[4:]], row
    assert tables(DOCUMENT)[0][defence.name] == row


@pytest.mark.system
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_with_all_layers_of_a_path_off_the_far_end_does_not_hold(path: Path, matrix: Matrix) -> None:
    row = matrix.path(path)

    assert set(path.fails) == {runtime for runtime, cell in zip(RUNTIMES, row[1:], strict=True) if cell == "fails"}
    assert tables(DOCUMENT)[1][row[0]] == row
