"""The ledger of one sandbox: counts in a page of shared memory, which outlives the worker.

- The page is a file of hostd that each worker of the sandbox maps. A count is stored at once, without a message, so it
  survives the death of the worker in the next instruction.
- hostd makes the page once, at launch. A worker without a page of the right size is not started: it would not know
  the counts of earlier generations.
- Each number is one aligned word, written by one store, so it is never half written.
- hostd treats any change of the page as a sign of life (`runtimes.process.liveness`). It does not read the counts.

Times are seconds of the host's monotonic clock, which all generations share. A compromised worker can falsify only the
counts of its own sandbox.

Pure: `gateway.ledger_page` maps the page.
"""

from collections.abc import Buffer
from typing import Final

SIZE: Final = 4096
_REFLECTIONS, _SENT, _REFUSED, _TOKENS, _REFILLED, _NAMES, _NAMES_SINCE, _BEATS, _MATCHES, _MATCHED_AT = range(10)


class Ledger:
    """The counts of one sandbox. All are 0 at its launch."""

    def __init__(self, memory: Buffer) -> None:
        """Use `memory` of `SIZE` bytes.

        Raises:
            ValueError: it has another size.
        """
        view = memoryview(memory)
        if view.nbytes != SIZE:
            raise ValueError("a ledger is one page")
        self._counts, self._values = view.cast("Q"), view.cast("d")

    @classmethod
    def fresh(cls) -> "Ledger":
        """Return a ledger in private memory, which ends with this process."""
        return cls(bytearray(SIZE))

    @property
    def reflections(self) -> int:
        """Responses that ended with the apparent beginning of a secret."""
        return self._counts[_REFLECTIONS]

    @reflections.setter
    def reflections(self, value: int) -> None:
        self._counts[_REFLECTIONS] = value

    def matches(self, now: float, forgotten: float) -> float:
        """Return the pieces of responses in which a secret was found, less `forgotten` of them per second."""
        return max(0.0, self._values[_MATCHES] - max(0.0, now - self._values[_MATCHED_AT]) * forgotten)

    def match(self, now: float, forgotten: float) -> None:
        """Count one more piece. A death between the two writes leaves a higher count, not a lower one."""
        count = self.matches(now, forgotten) + 1
        self._values[_MATCHED_AT], self._values[_MATCHES] = now, count

    @property
    def sent(self) -> int:
        """Bytes sent upstream."""
        return self._counts[_SENT]

    @sent.setter
    def sent(self, value: int) -> None:
        self._counts[_SENT] = value

    @property
    def exhausted_at(self) -> int:
        """The limit of bytes that was reached, -1 if none was."""
        return self._counts[_REFUSED] - 1

    @exhausted_at.setter
    def exhausted_at(self, value: int) -> None:
        self._counts[_REFUSED] = value + 1

    @property
    def tokens(self) -> float | None:
        """Requests left in the bucket at the time `refilled`; None before the first request under a limit."""
        return self._values[_TOKENS] if self._values[_REFILLED] else None

    @property
    def refilled(self) -> float:
        """The time of the value `tokens`, in seconds."""
        return self._values[_REFILLED]

    def refill(self, tokens: float | None, at: float) -> None:
        """Set `tokens` and their time; None resets them. A death between the writes leaves fewer tokens, not more."""
        if tokens is None:
            self._values[_REFILLED] = 0.0
            return
        if tokens < self._values[_TOKENS]:
            self._values[_TOKENS], self._values[_REFILLED] = tokens, at
        else:
            self._values[_REFILLED], self._values[_TOKENS] = at, tokens

    def beat(self) -> None:
        """Change the page, as a sign that the worker's event loop runs."""
        self._counts[_BEATS] = (self._counts[_BEATS] + 1) & 0xFFFF_FFFF_FFFF_FFFF

    @property
    def names(self) -> int:
        """Distinct DNS names since `names_since`, over all generations."""
        return self._counts[_NAMES]

    @property
    def names_since(self) -> float:
        """The start of the window in which names are counted, in seconds."""
        return self._values[_NAMES_SINCE]

    def name(self, now: float, window: float) -> None:
        """Count one more distinct name. The count starts at 0 again after `window` seconds."""
        if now - self._values[_NAMES_SINCE] >= window:
            self._counts[_NAMES] = 0
            self._values[_NAMES_SINCE] = now
        self._counts[_NAMES] += 1
