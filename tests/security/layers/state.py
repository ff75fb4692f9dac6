"""The file that says which defences are off and what is provoked.

Root writes it; every substituted process reads it.
"""

import json
from collections.abc import Iterable
from pathlib import Path

NAME = "layers.json"


class State:
    """The switches, read from the file at each question, or frozen, because a worker cannot open a file."""

    path: Path | None = None
    frozen: dict[str, list[str]] | None = None

    def _read(self) -> dict[str, list[str]]:
        if self.frozen is not None:
            return self.frozen
        if self.path is None or not self.path.exists():
            return {}
        document: dict[str, list[str]] = json.loads(self.path.read_text())
        return document

    def off(self, defence: str) -> bool:
        return defence in self._read().get("off", [])

    def provoked(self, what: str) -> bool:
        return what in self._read().get("provoked", [])

    def place(self, name: str) -> str:
        """Return a path or address that the substitutes need."""
        return self._read()["places"][name]  # type: ignore[index,return-value]

    def freeze(self) -> None:
        self.frozen = self._read()


STATE = State()


def write(
    run: Path, off: Iterable[str] = (), provoked: Iterable[str] = (), places: dict[str, str] | None = None
) -> None:
    path = run / NAME
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps({"off": sorted(off), "provoked": sorted(provoked), "places": places or {}}))
    temporary.chmod(0o644)
    temporary.rename(path)
