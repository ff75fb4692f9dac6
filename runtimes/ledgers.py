"""The pages that hold the counts of each sandbox while its workers are replaced (`gateway.ledger` writes them).

- A page is made once, at launch, and only opened for later workers. A missing page is not made again, and without it
  no worker is spawned.
- They are files, so that they also outlive hostd. Only root can read and write them.
"""

import os
from pathlib import Path

_SIZE = 4096


class Ledgers:
    """The pages of one hostd, in `directory`, which nothing else uses."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def create(self, sandbox: str) -> None:
        """Make the page of a new sandbox.

        Raises:
            OSError: it cannot be made, or exists already.
        """
        self._directory.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(self._directory / sandbox, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, _SIZE)  # so that a worker's write never fails because the disk is full
        finally:
            os.close(fd)

    def open(self, sandbox: str) -> int:
        """Return a descriptor of a sandbox's page.

        Raises:
            OSError: there is none.
        """
        return os.open(self._directory / sandbox, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)

    def remove(self, sandbox: str) -> tuple[str, ...]:
        """Remove a sandbox's page; return what is left."""
        path = self._directory / sandbox
        path.unlink(missing_ok=True)
        return (f"file {path}",) if os.path.lexists(path) else ()

    def sweep(self, keep: frozenset[str] = frozenset()) -> tuple[str, ...]:
        """Remove every page except those of `keep`; return what is left."""
        names = {path.name for path in self._directory.iterdir()} if self._directory.is_dir() else set()
        return tuple(item for name in sorted(names - keep) for item in self.remove(name))
