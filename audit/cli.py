"""`sallyport audit tail` and `sallyport audit verify`: reading the log, never changing it.

- Exit codes: 0 fine, 1 the log is not what was written, 2 it cannot be read (or was asked for wrongly).
- `tail` shows lines whose own hash holds; others are shown as damaged, never silently left out.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

from audit import render
from audit.chain import CHECKPOINT, LineError, Verifier, fingerprint, parse_line
from audit.keys import PUBLIC_NAME, KeyUnusable, load_public
from audit.layout import HEADS_NAME, file_name, file_numbers, verify_directory

type Output = Literal["text", "json", "ecs"]

OK, TAMPERED, UNUSABLE = 0, 1, 2
_POLL_SECONDS = 0.2


def verify(directory: str | Path, *, key: str | Path | None = None, out: TextIO | None = None) -> int:
    """Check the whole log and print a report; return the exit code.

    Args:
        key: a copy of the public key kept elsewhere; by default the one beside the log, whose fingerprint is printed
            so that it can be compared.
    """
    out = out or sys.stdout
    directory = Path(directory)
    for attempt in (1, 2, 3):
        try:
            if not file_numbers(directory) and not (directory / HEADS_NAME).exists():
                print(f"{directory}: there is no audit log here", file=sys.stderr)
                return UNUSABLE
            public_key = load_public(Path(key) if key is not None else directory / PUBLIC_NAME)
            verifier = Verifier(public_key)
            verify_directory(directory, verifier)
            break
        except FileNotFoundError as error:  # a live writer has just retired its oldest file
            if attempt == 3:
                return _unusable(directory, error)
        except (OSError, KeyUnusable) as error:
            return _unusable(directory, error)
    _report(verifier, out)
    return OK if verifier.ok else TAMPERED


def _unusable(directory: Path, error: Exception) -> int:
    """Say why the log cannot be read, and what to do."""
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
        f"{len(verifier.heads)} open chains, key {fingerprint(verifier.public_key)}",
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
        denied: only denials, and what mode `observe` would have denied.
        sandbox: only this sandbox's, control-plane records about it included.
        follow: go on printing as records arrive, until interrupted or `until()`.
        output: a line for people, the record as it is, or ECS; the latter two one JSON object per line.
    """
    out = out or sys.stdout
    directory = Path(directory)
    try:
        if not file_numbers(directory):
            print(f"{directory}: there is no audit log here", file=sys.stderr)
            return UNUSABLE
        for number, line in _lines(directory, follow=follow, until=until):
            try:
                record = parse_line(line)
            except LineError as error:
                print(f"!! {file_name(number)}: damaged line: {error}", file=out)
                continue
            if _wanted(record, denied=denied, sandbox=sandbox):
                print(_shown(record, output), file=out, flush=follow)
    except KeyboardInterrupt:
        return OK
    except BrokenPipeError:  # of the output, not of the log
        raise
    except OSError as error:
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


def _lines(directory: Path, *, follow: bool, until: Callable[[], bool]) -> Iterator[tuple[int, bytes]]:
    """Yield whole lines of all files; with `follow`, wait for more."""
    number = file_numbers(directory)[0]
    while True:
        pending = b""
        with open(directory / file_name(number), "rb") as file:
            last_round = False
            while True:
                for chunk in file:
                    pending += chunk
                    if pending.endswith(b"\n"):
                        yield number, pending
                        pending = b""
                later = [n for n in file_numbers(directory) if n > number]
                if last_round or (later and not follow):
                    break
                if later:  # once more: what was written between the last read and the rotation
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
