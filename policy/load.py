"""Reads the operator's policy file.

- At most `yaml_tree.MAX_BYTES` are read.
- Every error, also for an unreadable file, is a `PolicyError` with file, line and column. It has all problems of the
  file, not only the first.
"""

from pathlib import Path

from policy.document import PolicyDocument
from policy.problems import Problems
from policy.schema import read_document
from policy.yaml_tree import MAX_BYTES, PolicyError, parse

__all__ = ["PolicyDocument", "PolicyError", "load", "load_text"]


def load(path: Path | str, origin: str | None = None) -> PolicyDocument:
    """Return the document of a file. `origin` is its name in errors.

    Raises:
        PolicyError: the file cannot be read or is invalid.
    """
    name = origin if origin is not None else str(path)
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise PolicyError(name, 1, 1, f"cannot be read: {error.strerror or 'unknown error'}") from error
    return load_text(data, name)


def load_text(text: str | bytes, origin: str = "(text)") -> PolicyDocument:
    """Return the document of a text.

    Raises:
        PolicyError: the text is invalid.
    """
    problems = Problems()
    return read_document(parse(text, origin, problems), origin, problems)
