"""What is written down of each sandbox, so that a hostd that was killed leaves enough to adopt it, or to remove it.

- One file per sandbox in a directory of root's alone; replaced as a whole, before the step that it describes.
- It holds no secret: a policy, names and numbers.
- A file that is not exactly a record counts as none: what it was about is then removed, not adopted.

It outlives processes, not the host: there is no sync to disk, because no sandbox survives a crash of the host.
"""

import logging
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from runtimes.spec import SandboxId
from wire.api.hostd import Runtime

_log = logging.getLogger(__name__)

type Phase = Literal["launching", "running", "removing"]


class SandboxRecord(BaseModel):
    """One sandbox. Only one in phase `running` may be adopted; the others were half made or half removed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)

    sandbox: SandboxId
    runtime: Annotated[Runtime, Field(strict=False)]
    phase: Phase
    generation: int = Field(ge=1)
    uid: int | None
    slot: int | None
    sandbox_inode: int | None
    gateway_inode: int | None
    container: str | None
    policy: str
    selection: str
    compiled: dict[str, Any]


class RecordStore:
    """All records of one hostd."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, record: SandboxRecord) -> None:
        """Write a record in place of the sandbox's former one.

        Raises:
            OSError: the former one is still there.
        """
        temporary = self._directory / f"{record.sandbox}.new"
        with open(temporary, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(record.model_dump_json())
        temporary.rename(self._directory / f"{record.sandbox}.json")

    def remove(self, sandbox: str) -> None:
        """Forget a sandbox, known or not."""
        for suffix in ("json", "new"):
            (self._directory / f"{sandbox}.{suffix}").unlink(missing_ok=True)

    def read_all(self) -> tuple[SandboxRecord, ...]:
        """Return every record; what is none is reported and left out."""
        found = []
        for path in sorted(self._directory.glob("*.json")):
            try:
                record = SandboxRecord.model_validate_json(path.read_bytes())
            except (ValidationError, OSError):
                _log.error("%s is no record of a sandbox", path.name)
                continue
            if record.sandbox == path.stem:
                found.append(record)
        return tuple(found)

    def keep(self, sandboxes: frozenset[str]) -> None:
        """Remove every file but the records of these sandboxes."""
        for path in self._directory.iterdir():
            if path.suffix != ".json" or path.stem not in sandboxes:
                path.unlink()
