"""The notes of the upstream servers are read while they are written."""

from pathlib import Path

from testbed.internet import whole_lines


def test_a_line_that_is_being_written_is_none_yet(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("")
    assert [] == whole_lines(path)
    path.write_text('{"a": 1}\n{"b": ')
    assert [{"a": 1}] == whole_lines(path)
