"""`sallyport audit tail`, `verify` and `anchor`: they read the log and never change it.

- Exit codes: 0 no problem, 1 the log was changed, 2 the log cannot be read or an argument is invalid.
- `tail` prints a line with an invalid hash as damaged. It omits no line silently.
"""

import heapq
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TextIO

from audit import render
from audit.anchors import read_anchors
from audit.chain import CHECKPOINT, CONTROL, LineError, fingerprint, parse_line
from audit.keys import PUBLIC_NAME, KeyUnusable, load_public
from audit.layout import HEADS_NAME, file_name, file_numbers, read_verifier, share_chains, signature
from audit.shares import DIRECTORY, share_lines
from audit.verifier import Verifier
from wire import anchors
from wire.anchors import AnchorError
from wire.api.auditd import Anchor

type Output = Literal["text", "json", "ecs"]

OK, TAMPERED, UNUSABLE = 0, 1, 2
_POLL_SECONDS = 0.2
_TS = b'"ts":"'


def verify(
    directory: str | Path,
    *,
    key: str | Path | None = None,
    anchors: Sequence[Path] = (),
    kept: Sequence[Path] = (),
    out: TextIO | None = None,
) -> int:
    """Check the whole log and print a report; return the exit code.

    Args:
        key: a copy of the log's first public key from another place. The default is the key beside the log; its
            fingerprint is printed for comparison.
        anchors: files of anchors to compare with; each must be readable.
        kept: the files in which hostd keeps anchors; missing ones are ignored.
    """
    out = out or sys.stdout
    try:
        outside = [*_anchors(anchors), *_anchors(path for path in kept if os.path.exists(path))]
    except (OSError, AnchorError) as error:
        print(f"anchors: {error}", file=sys.stderr)
        return UNUSABLE
    verifier = _verified(Path(directory), key, outside)
    if verifier is None:
        return UNUSABLE
    _report(verifier, out)
    return OK if verifier.ok else TAMPERED


def anchor(
    directory: str | Path,
    *,
    key: str | Path | None = None,
    kept: Sequence[Path] = (),
    output: Path | None = None,
    out: TextIO | None = None,
) -> int:
    """Verify the log and print an anchor, to be kept on another machine; return the exit code.

    Args:
        key: as for `verify`.
        kept: as for `verify`.
        output: append the anchor to this file instead.
    """
    try:
        outside = list(_anchors(path for path in kept if os.path.exists(path)))
    except (OSError, AnchorError) as error:
        print(f"anchors: {error}", file=sys.stderr)
        return UNUSABLE
    verifier = _verified(Path(directory), key, outside)
    if verifier is None:
        return UNUSABLE
    if not verifier.ok:
        _report(verifier, sys.stderr)
        return TAMPERED
    line = anchors.line(verifier.state()).decode("ascii")
    if output is None:
        (out or sys.stdout).write(line)
        return OK
    try:
        with open(output, "a", encoding="ascii") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        print(f"{output}: {error.strerror}", file=sys.stderr)
        return UNUSABLE
    return OK


def _anchors(paths: Iterable[Path]) -> Iterator[Anchor]:
    for path in paths:
        yield from read_anchors(path.read_bytes())


def _verified(directory: Path, key: str | Path | None, anchors: Sequence[Anchor]) -> Verifier | None:
    """Read the whole log. None if it cannot be read; the reason is printed."""
    for attempt in (1, 2, 3):
        try:
            if not file_numbers(directory) and not (directory / HEADS_NAME).exists():
                print(f"{directory}: there is no audit log here", file=sys.stderr)
                return None
            identity = load_public(Path(key) if key is not None else directory / PUBLIC_NAME)
            before = signature(directory)
            verifier = read_verifier(directory, identity, anchors)
            if verifier.ok or attempt == 3 or before == signature(directory):
                return verifier
        except FileNotFoundError as error:  # auditd has just retired its oldest file
            if attempt == 3:
                _unusable(directory, error)
                return None
        except (OSError, KeyUnusable) as error:
            _unusable(directory, error)
            return None
    return None


def _unusable(directory: Path, error: Exception) -> int:
    """Print why the log cannot be read, and what to do."""
    reason = str(error)
    if isinstance(error, PermissionError):
        reason = "may be read by root only: run this command as root, or on a copy that you may read"
    elif isinstance(error, FileNotFoundError) and not directory.exists():
        reason = "there is no audit log here"
    elif isinstance(error, OSError):
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    print(f"{directory}: {reason}", file=sys.stderr)
    return UNUSABLE


def _report(verifier: Verifier, out: TextIO) -> None:
    for text in verifier.findings:
        print(f"TAMPERED: {text}", file=out)
    if verifier.suppressed:
        print(f"TAMPERED: and {verifier.suppressed} more", file=out)
    for text in verifier.notes:
        print(f"note: {text}", file=out)
    verdict = "ok" if verifier.ok else "NOT what was written"
    print(
        f"{verdict}: {verifier.records} records, {verifier.checkpoints} signed checkpoints, "
        f"{len(verifier.heads)} open chains, {verifier.pins.count} anchors, "
        f"epoch {verifier.epoch + 1}, key {fingerprint(verifier.ring.keys[0])}",
        file=out,
    )


def tail(
    directory: str | Path,
    *,
    denied: bool = False,
    sandbox: str | None = None,
    follow: bool = False,
    output: Output = "text",
    out: TextIO | None = None,
    until: Callable[[], bool] = lambda: False,
) -> int:
    """Print records, oldest first; return the exit code.

    Args:
        denied: print only denials, also those that mode `observe` did not enforce.
        sandbox: print only records of this sandbox, also those of the control plane about it.
        follow: continue with new records, until interrupted or `until()` is true.
        output: a readable line, the record as JSON, or ECS as JSON.
    """
    out = out or sys.stdout
    directory = Path(directory)
    try:
        if not file_numbers(directory):
            print(f"{directory}: there is no audit log here", file=sys.stderr)
            return UNUSABLE
        for name, line in chain(_retired(directory, sandbox), _lines(directory, follow=follow, until=until)):
            try:
                record = parse_line(line)
            except LineError as error:
                print(f"!! {name}: damaged line: {error}", file=out)
                continue
            if _wanted(record, denied=denied, sandbox=sandbox):
                print(_shown(record, output), file=out, flush=follow)
    except KeyboardInterrupt:
        return OK
    except BrokenPipeError:  # of the output, not of the log
        raise
    except (OSError, ValueError) as error:
        return _unusable(directory, error)
    return OK


def _wanted(record: dict[str, Any], *, denied: bool, sandbox: str | None) -> bool:
    if sandbox is not None and record.get("sandbox") != sandbox:
        return False
    if denied:
        return record["decision"] in ("deny", "observe")
    return bool(record["kind"] != CHECKPOINT)


def _shown(record: dict[str, Any], output: Output) -> str:
    match output:
        case "json":
            return json.dumps(record, ensure_ascii=True)
        case "ecs":
            return json.dumps(render.ecs(record), ensure_ascii=True)
        case "text":
            return render.line(record)


def _retired(directory: Path, sandbox: str | None) -> Iterator[tuple[str, bytes]]:
    """Yield the kept lines of retired files, in the order of their times."""
    kept = share_chains(directory)
    wanted = [name for name in kept.chains if sandbox in (None, name) or name == CONTROL]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, len(wanted) + 256)), hard))  # all are open at once
    shares = [_named(name, share_lines(directory, name, kept.chains[name])) for name in wanted]
    yield from heapq.merge(*shares, key=lambda item: _time(item[1]))


def _named(chain: str, lines: Iterator[bytes]) -> Iterator[tuple[str, bytes]]:
    return ((f"{DIRECTORY}/{chain}", line) for line in lines)


def _time(line: bytes) -> bytes:
    begin = line.find(_TS) + len(_TS)
    return line[begin : line.find(b'"', begin)]


def _lines(directory: Path, *, follow: bool, until: Callable[[], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield the complete lines of all files; with `follow`, wait for more."""
    first = share_chains(directory).file
    number = min(number for number in file_numbers(directory) if number >= first)
    while True:
        pending = b""
        with open(directory / file_name(number), "rb") as file:
            last_round = False
            while True:
                for chunk in file:
                    pending += chunk
                    if pending.endswith(b"\n"):
                        yield file_name(number), pending
                        pending = b""
                later = [n for n in file_numbers(directory) if n > number]
                if last_round or (later and not follow):
                    break
                if later:  # read again: lines written between the last read and the rotation
                    last_round = True
                    continue
                if not follow or until():
                    return
                out_of_date = not (directory / file_name(number)).exists()
                if out_of_date:
                    return
                time.sleep(_POLL_SECONDS)
        if not later:
            return
        number = later[0]
