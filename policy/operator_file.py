"""The operator's policy file: read at the start, and again after each change.

- If the file becomes unreadable or invalid, the last good document stays in force, and the problem is reported.
- Each process that compiles policies reads the file itself. No process accepts a document from another one.
"""

import logging
from pathlib import Path

from policy.document import PolicyDocument
from policy.load import PolicyError, load

_log = logging.getLogger(__name__)

type Stamp = tuple[int, int, int, int]
"""The identity of a version of the file: it differs after a change."""


class OperatorFile:
    """One file, and the document in force. All methods block. Not thread-safe."""

    def __init__(self, document: PolicyDocument, path: Path | None = None, seen: Stamp | None = None) -> None:
        """Put `document` in force until `reload` reads another one; without a `path` permanently."""
        self.document = document
        self._path = path
        self._seen = seen
        self.problem = ""
        """Why the present file is not in force; empty if it is."""

    @classmethod
    def read(cls, path: Path) -> "OperatorFile":
        """Load the file.

        Raises:
            PolicyError: the file cannot be read or is invalid.
        """
        seen = _stamp(path)  # taken before the read, so that the next call sees a change during the read
        return cls(load(path), path, seen)

    def reload(self) -> bool:
        """Read the file again if it has changed, or could not be read. True if there is a new document."""
        if self._path is None:
            return False
        stamp = _stamp(self._path)
        if stamp is not None and stamp == self._seen:
            return False
        try:
            document = load(self._path)
        except Exception as error:  # noqa: BLE001 - fails closed: the last good document stays in force
            # A file that cannot be opened may become readable without a change of its stamp.
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
