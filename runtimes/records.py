"""The records of sandboxes. After a kill of hostd, the next hostd adopts or removes each sandbox by its record.

- Each sandbox has one file, in a directory of root. It is replaced as a whole, before the step that it describes.
- A record has a policy, names, numbers, the seed of the sandbox's placeholders, and the variables of its claim from a
  pool. It has no other secret.
- A file that is not exactly a record counts as missing: its sandbox is removed, not adopted.

Records are not synced to disk, because no sandbox survives a crash of the host.
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
    """One sandbox. Only a sandbox in phase `running` can be adopted: in another phase it is incomplete."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)

    sandbox: SandboxId
    runtime: Annotated[Runtime, Field(strict=False)]
    phase: Phase
    generation: int = Field(ge=1)
    uid: int | None
    slot: int | None
    sandbox_inode: int | None
    gateway_inode: int | None
    rules: str
    container: str | None
    policy: str
    selection: str
    compiled: dict[str, Any]
    seed: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)
    images: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    """Name and id of the image that it was started from, empty after a restore; None: a former release started it."""
    given: dict[str, str] = Field(default={}, repr=False)
    """The variables of its claim from a pool."""


class RecordStore:
    """All records of one hostd."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, record: SandboxRecord) -> None:
        """Replace the record of a sandbox.

        Raises:
            OSError: the former record is still there.
        """
        temporary = self._directory / f"{record.sandbox}.new"
        with open(temporary, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(record.model_dump_json())
        temporary.rename(self._directory / f"{record.sandbox}.json")

    def remove(self, sandbox: str) -> None:
        """Remove the record of a sandbox, if it has one."""
        for suffix in ("json", "new"):
            (self._directory / f"{sandbox}.{suffix}").unlink(missing_ok=True)

    def read_all(self) -> tuple[SandboxRecord, ...]:
        """Return every record. Other files are logged and left out."""
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
        """Remove every file except the records of these sandboxes."""
        for path in self._directory.iterdir():
            if path.suffix != ".json" or path.stem not in sandboxes:
                path.unlink()
