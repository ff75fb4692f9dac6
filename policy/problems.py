"""Collects the problems of one file during reading.

- Only the first problem of a place is noted. Further problems there are usually consequences of it.
- At most `MAX_PROBLEMS` are kept. Reading ends with one `PolicyError`, which has all of them in the order of the file.
- `meant` finds the word that the author probably intended.
"""

import difflib
from collections.abc import Callable, Iterable

MAX_PROBLEMS = 100
_SHOWN = 100


class PolicyError(ValueError):
    """A policy file is invalid. `str()` is the first problem as `file:line:column: problem`. Both count from 1.

    `problems` has this one and all others, in the order of the file.
    """

    def __init__(
        self, origin: str, line: int, column: int, problem: str, others: "tuple[PolicyError, ...]" = ()
    ) -> None:
        super().__init__(f"{origin}:{line}:{column}: {problem}")
        self.origin = origin
        self.line = line
        self.column = column
        self.problem = problem
        self.problems: tuple[PolicyError, ...] = (self, *others)


class Problems:
    """The problems of one file."""

    def __init__(self, found: Iterable[PolicyError] = ()) -> None:
        self._at: dict[tuple[int, int], PolicyError] = {}
        for error in found:
            self.note(error)

    def note(self, error: PolicyError) -> None:
        """Keep a problem, unless there is one at its place.

        Raises:
            PolicyError: there are `MAX_PROBLEMS` problems; it has all of them.
        """
        self._at.setdefault((error.line, error.column), error)
        if len(self._at) >= MAX_PROBLEMS:
            self.check()

    def attempt[T](self, read: Callable[[], T], otherwise: T) -> T:
        """Return the result of `read`; if it raises, note the problem and return `otherwise`."""
        try:
            return read()
        except PolicyError as error:
            self.note(error)
            return otherwise

    def __len__(self) -> int:
        return len(self._at)

    def check(self) -> None:
        """Raise the problems, if there are any."""
        if self._at:
            first, *others = (self._at[place] for place in sorted(self._at))
            raise PolicyError(first.origin, first.line, first.column, first.problem, tuple(others)) from None


def meant(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean ...?` for a word similar to a known one, otherwise an empty string."""
    near = difflib.get_close_matches(word[:_SHOWN], list(known), n=1, cutoff=0.7)
    return f"; did you mean {near[0]!a}?" if near else ""
