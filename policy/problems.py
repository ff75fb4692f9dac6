"""All that is wrong with one file, collected while reading goes on.

- A problem is noted once for a place: what follows from it at the same place is not said again.
- At most `MAX_PROBLEMS` are kept. Reading ends with one `PolicyError` that has them all in the order of the file.
- `meant` finds what the author probably wanted to write.
"""

import difflib
from collections.abc import Callable, Iterable

MAX_PROBLEMS = 100
_SHOWN = 100


class PolicyError(ValueError):
    """A policy file is wrong. `str()` is the first problem as `file:line:column: problem`; both count from 1.

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
    """What was found in one file so far."""

    def __init__(self, found: Iterable[PolicyError] = ()) -> None:
        self._at: dict[tuple[int, int], PolicyError] = {}
        for error in found:
            self.note(error)

    def note(self, error: PolicyError) -> None:
        """Keep a problem, unless there is one at its place.

        Raises:
            PolicyError: there are more than anybody reads; with all of them.
        """
        self._at.setdefault((error.line, error.column), error)
        if len(self._at) >= MAX_PROBLEMS:
            self.check()

    def attempt[T](self, read: Callable[[], T], otherwise: T) -> T:
        """Return what `read` returns; if that is wrong, note why and return `otherwise`."""
        try:
            return read()
        except PolicyError as error:
            self.note(error)
            return otherwise

    def __len__(self) -> int:
        return len(self._at)

    def check(self) -> None:
        """Raise what was found, if anything was."""
        if self._at:
            first, *others = (self._at[place] for place in sorted(self._at))
            raise PolicyError(first.origin, first.line, first.column, first.problem, tuple(others)) from None


def meant(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean ...?` for a word that is nearly one of those known, else nothing."""
    near = difflib.get_close_matches(word[:_SHOWN], list(known), n=1, cutoff=0.7)
    return f"; did you mean {near[0]!a}?" if near else ""
