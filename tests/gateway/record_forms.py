"""Forms of records for a stand-in of the log: each use is one call of its `accept` or `note`."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PlainForm:
    """A form of records of the log `log`."""

    log: Any
    kind: str
    decision: str
    varying: tuple[str, ...]
    fields: dict[str, object]

    async def accept(self, *values: int | str) -> None:
        await self.log.accept(self.kind, self.decision, **self._all(values))

    def note(self, *values: int | str) -> None:
        self.log.note(self.kind, self.decision, **self._all(values))

    def _all(self, values: tuple[int | str, ...]) -> dict[str, object]:
        return {**self.fields, **dict(zip(self.varying, values, strict=True))}


class PlainForms:
    """Adds `form` to a log."""

    def form(self, kind: str, decision: str, varying: tuple[str, ...], **fields: object) -> PlainForm:
        return PlainForm(self, kind, decision, varying, fields)
