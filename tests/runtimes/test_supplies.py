"""The files that hostd opens for vaultd."""

import os
from pathlib import Path

from runtimes.supplies import opened


def test_what_is_there_and_a_file_is_opened_and_nothing_is_read(tmp_path: Path) -> None:
    """A missing file is left out: vaultd says what it needs. A link is followed: mounts of secrets have them."""
    file, link, pipe = tmp_path / "pin", tmp_path / "link", tmp_path / "pipe"
    file.write_text("482915")
    link.symlink_to(file)
    os.mkfifo(pipe)
    files = {"A_FD": file, "B_FD": tmp_path / "missing", "C_FD": tmp_path, "D_FD": pipe, "E_FD": link}
    found = opened({name: str(path) for name, path in files.items()})
    try:
        assert {"A_FD", "E_FD"} == found.keys()
        assert [0, 0] == [os.lseek(fd, 0, os.SEEK_CUR) for fd in found.values()]
        assert not any(os.get_inheritable(fd) for fd in found.values())
    finally:
        for fd in found.values():
            os.close(fd)
