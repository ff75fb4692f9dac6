"""The audit log as hostd sees it: chains of sandboxes that are gone are ended, and anchors are kept.

- hostd alone ends chains. A round compares the open chains with the sandboxes that exist. What a round missed (auditd
  was down, a launch failed, hostd was killed) the next round finds: nothing has to be remembered.
- Each round appends an anchor, auditd's statement of where its log stands, to a file that only root can write.
  `sallyport audit verify` compares the log with it: auditd cannot alter unnoticed what was anchored.
- The anchors take two files of at most `MAX_BYTES` each. The first anchor of a file names the heads of all open
  chains, the others those that changed.
- Another log than the one anchored before, or a log that has become shorter, is an alarm.
"""

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, Final

import wire
from runtimes.alarms import Finding
from runtimes.daemons import Daemons
from runtimes.finish import finished
from runtimes.kept_lines import KeptLines

MAX_BYTES: Final = 8 * 1024 * 1024
_ROUND_SECONDS = 10.0
_RETRY_SECONDS = 1.0
_CALL_SECONDS = 5.0
_CONTROL = "control"
_CHAIN = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_HASH = re.compile(r"[0-9a-f]{64}")
_TEXTS = ("ts", "identity", "key", "log")
_NUMBERS = ("file", "offset")

_log = logging.getLogger(__name__)


class Chains:
    """Ends chains and keeps anchors, from `start` to `stop`."""

    def __init__(
        self,
        daemons: Daemons,
        path: Path,
        known: Callable[[], Container[str]],
        tell: Callable[[Finding], None],
    ) -> None:
        """Keep anchors in `path`; `known` returns the sandboxes that exist, `tell` raises an alarm."""
        self._daemons = daemons
        self._kept = KeptLines(path, MAX_BYTES)
        self._known = known
        self._tell = tell
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._last: dict[str, Any] | None = None
        self._done = True

    def start(self) -> None:
        """Begin with a round."""
        self._wake.set()
        self._task = asyncio.create_task(self._rounds(), name="chains")

    def wake(self) -> None:
        """Do a round soon: a sandbox is gone."""
        self._wake.set()

    async def stop(self) -> None:
        """Do a last round, if auditd answers."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CALL_SECONDS):
                await self._round()

    async def _rounds(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ROUND_SECONDS):
                    await self._wake.wait()
            self._wake.clear()
            if not await finished(self._round()):  # one that is cut off might write after the last one
                await asyncio.sleep(_RETRY_SECONDS)
                self._wake.set()

    async def _round(self) -> bool:
        """Keep an anchor and end the chains of sandboxes that are gone; return whether all of it was done."""
        try:
            auditd = self._daemons.client("auditd")
            anchor = _checked(await auditd.call("heads", timeout=_CALL_SECONDS))
            await self._keep(anchor)
            gone = [chain for chain in anchor["heads"] if chain != _CONTROL and chain not in self._known()]
            for chain in gone:
                await auditd.call("close_sandbox", timeout=_CALL_SECONDS, sandbox=chain)
        except (OSError, ValueError, wire.RemoteError) as error:
            if self._done:
                _log.warning("the audit log is not anchored, or a chain not ended: %s", error or type(error).__name__)
            self._done = False
            return False
        self._done = True
        return True

    async def _keep(self, anchor: dict[str, Any]) -> None:
        if self._last is None:
            self._last = await asyncio.to_thread(_newest, self._kept)
        last = self._last
        if last is not None and last["identity"] != anchor["identity"]:
            self._tell(Finding("audit.replaced", "the audit log is not the one that was anchored before"))
            last = None
        elif last is not None and (anchor["file"], anchor["offset"]) < (last["file"], last["offset"]):
            self._tell(Finding("audit.shortened", "the audit log is shorter than it was when it was anchored"))
            last = None
        if last is not None and last["log"] == anchor["log"]:
            return
        known: Mapping[str, object] = {} if last is None else last["heads"]
        changed = {chain: head for chain, head in anchor["heads"].items() if known.get(chain) != head}
        await asyncio.to_thread(self._kept.append, _line(anchor | {"heads": changed}), _line(anchor))
        self._last = anchor


def _line(anchor: Mapping[str, Any]) -> bytes:
    return json.dumps(anchor, sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n"


def _newest(kept: KeptLines) -> dict[str, Any] | None:
    """Return the newest anchor that was kept; its heads are those that changed then."""
    for line in reversed(kept.read()):
        with contextlib.suppress(ValueError):
            return _checked(json.loads(line))
    return None


def _checked(answer: Any) -> dict[str, Any]:
    """Return auditd's answer if it is an anchor.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(answer, dict):
        raise ValueError("auditd's answer is no anchor")
    anchor = {name: answer.get(name) for name in ("version", *_TEXTS, *_NUMBERS, "heads")}
    heads = anchor["heads"]
    good = (
        anchor["version"] == 1
        and all(isinstance(anchor[name], str) and len(str(anchor[name])) <= 64 for name in _TEXTS)
        and all(_is_number(anchor[name]) for name in _NUMBERS)
        and isinstance(heads, dict)
        and all(_CHAIN.fullmatch(chain) and _is_head(head) for chain, head in heads.items())
    )
    if not good:
        raise ValueError("auditd's answer is no anchor")
    return anchor


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _is_head(head: object) -> bool:
    return (
        isinstance(head, list)
        and len(head) == 2
        and _is_number(head[0])
        and isinstance(head[1], str)
        and _HASH.fullmatch(head[1]) is not None
    )
