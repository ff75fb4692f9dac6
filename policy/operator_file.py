"""The operator's policy file as it is in force: read at the start, and again when it has changed.

- A file that can no longer be read keeps the last good document in force and is reported, never replaced by something
  weaker.
- Each process that compiles reads the file itself; none takes a document from another one.
"""

import logging
from pathlib import Path

from policy.document import PolicyDocument
from policy.load import PolicyError, load

_log = logging.getLogger(__name__)

type Stamp = tuple[int, int, int, int]
"""What distinguishes a changed file."""


class OperatorFile:
    """One file and the document in force. All methods block; not for several threads at once."""

    def __init__(self, document: PolicyDocument, path: Path | None = None, seen: Stamp | None = None) -> None:
        """Put `document` in force until `reload` reads another one; without a `path` for good."""
        self.document = document
        self._path = path
        self._seen = seen
        self.problem = ""
        """Why the file as it is now is not in force; empty if it is."""

    @classmethod
    def read(cls, path: Path) -> "OperatorFile":
        """Load the file.

        Raises:
            PolicyError: it cannot be read or is wrong.
        """
        seen = _stamp(path)  # before the file is read: a change meanwhile is seen at the next look
        return cls(load(path), path, seen)

    def reload(self) -> bool:
        """Read the file again if it changed, or could not be read; tells whether there is a new document."""
        if self._path is None:
            return False
        stamp = _stamp(self._path)
        if stamp is not None and stamp == self._seen:
            return False
        try:
            document = load(self._path)
        except Exception as error:  # noqa: BLE001 - closes: the last good document stays in force
            # A file that cannot be opened may be readable later without a change that its stamp shows.
            unreadable = isinstance(error, OSError) or isinstance(error.__cause__, OSError)
            self._seen = None if unreadable else stamp
            problem = str(error) if isinstance(error, PolicyError | OSError) else type(error).__name__
            if problem != self.problem:
                _log.error("the policy file is not in force, the last good one is: %s", problem)
            self.problem = problem
            return False
        self._seen, self.document, self.problem = stamp, document, ""
        _log.info("policy file reloaded")
        return True


def _stamp(path: Path) -> Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino
