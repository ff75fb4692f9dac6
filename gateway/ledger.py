"""What one sandbox has used up, kept outside its worker: numbers in a page of shared memory.

- The page is a file of hostd's that each worker of the sandbox maps: a count is kept the moment it is made, without a
  message, and a worker that dies in the next instruction has not forgotten it.
- hostd makes the page once, at launch. A worker that gets none, or one of another size, is not born: nothing is let
  out by a worker that does not know what was used before it.
- Each number is one aligned word, written by one store: it is never half written.
- hostd takes any change of the page for a sign of life (`runtimes.liveness`), and knows no word of it.

Times are of the host's monotonic clock, which all generations share. What a worker that is taken over writes here
counts for its own sandbox alone.
"""

import mmap
import os
from typing import Final

SIZE: Final = 4096
_REFLECTIONS, _SENT, _REFUSED, _TOKENS, _REFILLED, _NAMES, _NAMES_SINCE, _BEATS, _MATCHES, _MATCHED_AT = range(10)


class Ledger:
    """The numbers of one sandbox; all are 0 at its launch."""

    def __init__(self, memory: bytearray | mmap.mmap) -> None:
        """Use `memory`, which has `SIZE` bytes.

        Raises:
            ValueError: it has not.
        """
        if len(memory) != SIZE:
            raise ValueError("a ledger is one page")
        view = memoryview(memory)
        self._counts, self._values = view.cast("Q"), view.cast("d")

    @classmethod
    def fresh(cls) -> "Ledger":
        """A ledger that ends with this process."""
        return cls(bytearray(SIZE))

    @classmethod
    def from_fd(cls, fd: int) -> "Ledger":
        """Map the file `fd`, and close it.

        Raises:
            OSError, ValueError: it is not a ledger.
        """
        try:
            if os.fstat(fd).st_size != SIZE:
                raise ValueError("a ledger is one page")
            return cls(mmap.mmap(fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE))
        finally:
            os.close(fd)

    @property
    def reflections(self) -> int:
        """Responses that ended with what looks like the beginning of a secret."""
        return self._counts[_REFLECTIONS]

    @reflections.setter
    def reflections(self, value: int) -> None:
        self._counts[_REFLECTIONS] = value

    def matches(self, now: float, forgotten: float) -> float:
        """Pieces of responses in which a secret was found; so many of them are forgotten in a second."""
        return max(0.0, self._values[_MATCHES] - max(0.0, now - self._values[_MATCHED_AT]) * forgotten)

    def match(self, now: float, forgotten: float) -> None:
        """Count one piece more. Dying between both writes errs to more of them."""
        count = self.matches(now, forgotten) + 1
        self._values[_MATCHED_AT], self._values[_MATCHES] = now, count

    @property
    def sent(self) -> int:
        """Bytes that went up."""
        return self._counts[_SENT]

    @sent.setter
    def sent(self, value: int) -> None:
        self._counts[_SENT] = value

    @property
    def exhausted_at(self) -> int:
        """The limit of bytes that was found too small, -1 for none."""
        return self._counts[_REFUSED] - 1

    @exhausted_at.setter
    def exhausted_at(self, value: int) -> None:
        self._counts[_REFUSED] = value + 1

    @property
    def tokens(self) -> float | None:
        """Requests left in the bucket at `refilled`; None while none was ever taken under a limit."""
        return self._values[_TOKENS] if self._values[_REFILLED] else None

    @property
    def refilled(self) -> float:
        """When `tokens` was true."""
        return self._values[_REFILLED]

    def refill(self, tokens: float | None, at: float) -> None:
        """Set `tokens` and when they were so many; None forgets them. Dying between both errs to fewer tokens."""
        if tokens is None:
            self._values[_REFILLED] = 0.0
            return
        if tokens < self._values[_TOKENS]:
            self._values[_TOKENS], self._values[_REFILLED] = tokens, at
        else:
            self._values[_REFILLED], self._values[_TOKENS] = at, tokens

    def beat(self) -> None:
        """Change the page: the worker's loop does something."""
        self._counts[_BEATS] = (self._counts[_BEATS] + 1) & 0xFFFF_FFFF_FFFF_FFFF

    @property
    def names(self) -> int:
        """Distinct DNS names since `names_since`, all generations together."""
        return self._counts[_NAMES]

    @property
    def names_since(self) -> float:
        """When the counting of names began."""
        return self._values[_NAMES_SINCE]

    def name(self, now: float, window: float) -> None:
        """Count one distinct name more; what is older than `window` seconds is forgotten as a whole."""
        if now - self._values[_NAMES_SINCE] >= window:
            self._counts[_NAMES] = 0
            self._values[_NAMES_SINCE] = now
        self._counts[_NAMES] += 1
