"""The log as files: one sequence `audit-NNNNNN.jsonl`, all chains interleaved, and `heads.json` as its anchor.

    directory/  audit-000001.jsonl ...  heads.json  keys/ (`audit.keys`)  chains/, chains.json (`audit.shares`)  lock

- A `Log` is the only writer of its directory (flock). It is not thread-safe. `sync` may run in another thread, with a
  `Mark` that was taken before. `write_anchor`, `retire`, `prepare_epoch` and `destroy_former` may run in a further
  thread, one at a time.
- A batch is written completely, by one write(2), or not at all. After a failed or short write the file is truncated to
  its old size, no chain has changed, and `LogUnwritable` is raised. The next append tries again, without a restart.
- The anchor covers only bytes that are certainly on disk.
- `open` continues where the last writer stopped. An incomplete last line is truncated and kept in a `gap` record. The
  death of the writer loses no accepted record; after a crash of the host every open chain gets a `gap`.
- A log that differs from its signatures is left unchanged. The writer continues in a new file whose signed first line
  records this. No verification succeeds from then on, until an operator has moved the log away.
"""

import errno
import fcntl
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from audit.batch import Batch, ChainEntry, gap_entry, torn_record
from audit.chain import (
    CONTROL,
    ZERO,
    ChainHead,
    LineError,
    SignedAnchor,
    fingerprint,
    parse_line,
    read_anchor,
    sign_anchor,
)
from audit.keys import Keys, sync_directory, write_atomically
from audit.layout import HEADS_NAME, file_name, file_numbers
from audit.records import Fields
from audit.ring import hexadecimal
from audit.shares import SHARES_NAME, Kept, Retention, read_kept, split, sweep, write_kept
from audit.verifier import Verifier
from wire.api import auditd

CHECKPOINT_RECORDS: Final = 1000


class LogUnwritable(Exception):
    """The batch was not written: the disk is full, read-only or faulty."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The length of the log at one moment. Owns a descriptor of the newest file."""

    fd: int
    file: int
    offset: int
    log: str
    ts: str


def sync(mark: Mark) -> None:
    """Sync the log up to `mark` to disk, and close the mark's descriptor.

    Raises:
        OSError: the log may not be on disk.
    """
    try:
        os.fdatasync(mark.fd)
    finally:
        os.close(mark.fd)


class Log:
    """The open log of one directory; see the module's invariants. Use `Log.open`."""

    def __init__(
        self,
        directory: Path,
        keys: Keys,
        *,
        lock: int,
        boot: str,
        clock: Callable[[], str],
        max_file_bytes: int,
        retention: Retention,
    ) -> None:
        self._directory = directory
        self._keys = keys
        self._lock = lock
        self._boot = boot
        self._clock = clock
        self._max_file_bytes = max_file_bytes
        self._retention = retention
        self._kept: Kept | None = None
        self._anchor_lock = threading.Lock()
        self._anchored = Mark(-1, 1, 0, ZERO, "")
        self._fd = -1
        self._first = 1
        self._number = 0
        self._size = 0
        self._header_size = 0
        self._since: dict[str, int] = {}
        self._suspect: str | None = None
        self.heads: dict[str, ChainHead] = {}
        self.found: Mapping[str, int] = {}
        """The last sequence number of each chain that was open when this writer opened the log."""
        self.grown: Mapping[str, int] = {}
        """Bytes by chain that the last `append` wrote."""
        self.log = ZERO
        self.last_ts = ""

    @classmethod
    def open(
        cls, directory: Path, *, boot: str, clock: Callable[[], str], max_file_bytes: int, retention: Retention
    ) -> "Log":
        """Open or create the log in `directory` and continue it.

        Args:
            boot: the id of this boot of the host.
            clock: now, in RFC 3339 with milliseconds, UTC.
            max_file_bytes: at this size a new file is started.
            retention: the number of unchanged files, and the shares of retired ones.

        Raises:
            OSError: the log cannot be read or written, or another writer has locked it.
            audit.keys.KeyUnusable: there are records, but not their signing key.
            LogUnwritable: the disk is full.
        """
        directory.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            numbers = file_numbers(directory)
            heads = directory / HEADS_NAME
            data = heads.read_bytes() if heads.exists() else None
            keys = Keys.load(directory, create=not numbers and data is None)
            log = cls(
                directory,
                keys,
                lock=lock,
                boot=boot,
                clock=clock,
                max_file_bytes=max_file_bytes,
                retention=retention,
            )
            anchor = read_anchor(keys.ring.key, data) if data is not None else None
            fresh = anchor is not None and (anchor.first, anchor.file, anchor.offset, anchor.log) == (1, 1, 0, ZERO)
            if not numbers and (data is None or fresh):
                log._write_anchor(Mark(-1, 1, 0, ZERO, clock()), clean=False)
                log._begin_file(1, {"state": "new"})
            else:
                log._recover(numbers, anchor)
                log._change_epoch()
        except BaseException:
            os.close(lock)
            raise
        return log

    @property
    def position(self) -> tuple[int, int]:
        """The newest file's number and size. The pair grows with every append."""
        return self._number, self._size

    def append(
        self, entries: Sequence[ChainEntry], before: Callable[[Sequence[int]], None] = lambda _seqs: None
    ) -> list[int]:
        """Write `entries` in order; return their sequence numbers.

        Args:
            before: called with the sequence numbers immediately before the write. No other line is written between
                this call and the entries.

        Raises:
            LogUnwritable: none of the entries was written.
        """
        self._make_ready()
        batch = self._batch()
        seqs = [batch.add(entry) for entry in entries]
        for chain, count in Counter(entry.chain for entry in entries).items():
            since = self._since.get(chain, 0) + count
            if since >= CHECKPOINT_RECORDS:
                batch.checkpoint(chain, {"log": batch.log})
                since = 0
            batch.since[chain] = since
        before(seqs)
        self._write(batch)
        self.grown = batch.grown
        return seqs

    def checkpoint(self) -> None:
        """Sign the state of the whole log into the control chain. Raises `LogUnwritable`."""
        self._make_ready()
        self._write_checkpoint(CONTROL, {})

    def close_chain(self, chain: str) -> int:
        """End `chain` with a signed checkpoint; return its last sequence number. Raises `LogUnwritable`."""
        self._make_ready()
        seq = self._write_checkpoint(chain, {"closed": True})
        self._since.pop(chain, None)
        return seq

    def state(self) -> auditd.Anchor:
        """Return an anchor of the present state of the log."""
        return auditd.Anchor(
            version=auditd.ANCHOR_VERSION,
            ts=self._clock(),
            identity=fingerprint(self._keys.ring.keys[0]),
            key=fingerprint(self._keys.key.public_key()),
            file=self._number,
            offset=self._size,
            log=self.log,
            heads={chain: auditd.Head(head.seq, head.hash) for chain, head in self.heads.items()},
        )

    @property
    def retirable(self) -> bool:
        """Whether there are more files than the retention keeps unchanged."""
        return 0 < self._retention.max_files < self._number - self._first + 1

    def prepare_epoch(self) -> None:
        """Make the key for `begin_epoch`. Raises OSError."""
        self._keys.prepare()

    def begin_epoch(self) -> None:
        """Certify the next key in the log with the present one, and sign with the next key from then on.

        Raises:
            LogUnwritable: the certificate could not be written; the present key stays in use.
        """
        if (following := self._keys.following) is None:
            raise ValueError("no key was prepared")
        self._make_ready()
        self._write_checkpoint(CONTROL, {"next": hexadecimal(following.public_key())})
        self._keys.switch()

    def destroy_former(self) -> None:
        """Destroy the former key. The line of `begin_epoch` must be on disk. Raises OSError."""
        self._keys.destroy_former()

    def retire(self) -> None:
        """Split the oldest file if there are more files than the retention keeps unchanged.

        Raises:
            OSError, LineError: the file is unchanged; try again.
        """
        numbers = [number for number in file_numbers(self._directory) if number >= self._first]
        if not self._retention.max_files or len(numbers) <= self._retention.max_files:
            return
        oldest = numbers[0]
        kept = self._kept or self._read_kept(oldest)
        path = self._directory / file_name(oldest)
        if kept.file <= oldest:
            kept = split(self._directory, oldest, path, kept, self._retention, self._keys.key)
        self._kept = kept
        self._first = oldest + 1
        self._write_anchor(self._anchored, clean=False)
        for number in file_numbers(self._directory):
            if number < self._first:
                (self._directory / file_name(number)).unlink()
        sweep(self._directory, kept)

    def _read_kept(self, oldest: int) -> Kept:
        path = self._directory / SHARES_NAME
        if not path.exists():
            return Kept(oldest, oldest)
        kept = read_kept(self._keys.ring, path.read_bytes())
        if kept is None:
            raise LineError(f"{SHARES_NAME} is not signed by this log's key")
        return kept

    def mark(self) -> Mark:
        """Return a mark of the present end, for `sync`."""
        return Mark(os.dup(self._fd), self._number, self._size, self.log, self.last_ts)

    def write_anchor(self, mark: Mark) -> None:
        """Write a signed anchor of the log up to `mark`, which must be synced. Raises OSError."""
        self._write_anchor(mark, clean=False)

    def distrust(self, reason: str) -> None:
        """Make the next append start a new file: after a failed sync the content of the old one is uncertain."""
        self._suspect = reason

    def close(self) -> None:
        """Sign the orderly end. Lines after it, before the next `open`, are not from this writer."""
        try:
            with suppress(LogUnwritable):
                self.checkpoint()
            mark = self.mark()
            sync(mark)
            self._write_anchor(mark, clean=True)
        finally:
            os.close(self._fd)
            os.close(self._lock)

    def _batch(self) -> Batch:
        return Batch(self._keys.key, heads=self.heads, log=self.log, ts=self._clock(), last_ts=self.last_ts)

    def _write_checkpoint(self, chain: str, extra: Fields) -> int:
        batch = self._batch()
        seq = batch.checkpoint(chain, {"log": batch.log, **extra})
        self._write(batch)
        return seq

    def _write(self, batch: Batch) -> None:
        data = b"".join(batch.lines)
        try:
            written = os.write(self._fd, data)
            if written != len(data):
                raise OSError(errno.ENOSPC, "short write")
        except OSError as error:
            with suppress(OSError):  # if this fails too, `_make_ready` tries again before the next write
                os.ftruncate(self._fd, self._size)
            raise LogUnwritable(errno.errorcode.get(error.errno or 0, "EIO")) from error
        self._size += written
        self._commit(batch)

    def _commit(self, batch: Batch) -> None:
        for chain, head in batch.heads.items():
            if head is None:
                self.heads.pop(chain, None)
            else:
                self.heads[chain] = head
        self._since |= batch.since
        self.log = batch.log
        self.last_ts = batch.ts

    def _make_ready(self) -> None:
        """Rotate the file if necessary, and detect changes by other processes."""
        try:
            status = os.fstat(self._fd)
            if status.st_size > self._size:  # the rest of a failed write, or bytes of another process
                os.ftruncate(self._fd, self._size)
            if status.st_nlink == 0 or status.st_size < self._size:
                raise _Changed(f"{file_name(self._number)} was deleted or truncated by another process")
            if self._suspect is not None:
                self._begin_file(self._number + 1, {"state": "sync-failed"})
                reason, self._suspect = self._suspect, None
                try:
                    self._gap_in_all(reason)
                except LogUnwritable:
                    self._suspect = reason
                    raise
            elif self._size >= self._max_file_bytes and self._size > self._header_size:
                with suppress(LogUnwritable):  # then the old file continues to grow
                    self._begin_file(self._number + 1, {"state": "rotated"})
        except _Changed as error:
            self._begin_file(self._number + 1, {"state": "changed", "mismatch": str(error)})
        except OSError as error:
            raise LogUnwritable(errno.errorcode.get(error.errno or 0, "EIO")) from error

    def _gap_in_all(self, reason: str) -> None:
        self.append([gap_entry(chain, reason) for chain in sorted(self.heads.keys() | {CONTROL})])

    def _begin_file(self, number: int, extra: Fields) -> None:
        """Start file `number` with the checkpoint of everything before it, and retire the oldest."""
        path = self._directory / file_name(number)
        batch = self._batch()
        heads = {chain: [head.seq, head.hash] for chain, head in self.heads.items()}
        batch.checkpoint(CONTROL, {"heads": heads, "log": self.log, "file": number, "boot": self._boot, **extra})
        data = batch.lines[0]
        fd = -1
        try:
            if self._fd >= 0:
                os.fdatasync(self._fd)
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.ftruncate(fd, 0)  # it can have only an incomplete header
            if os.write(fd, data) != len(data):
                raise OSError(errno.ENOSPC, "short write")
            os.fdatasync(fd)
            sync_directory(self._directory)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
                with suppress(OSError):
                    path.unlink()
            raise LogUnwritable(errno.errorcode.get(error.errno or 0, "EIO")) from error
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._number, self._size, self._header_size = fd, number, len(data), len(data)
        self._commit(batch)
        with suppress(OSError):  # the anchor is then older than the log
            self._write_anchor(Mark(-1, number, self._size, self.log, self.last_ts), clean=False)

    def _write_anchor(self, mark: Mark, *, clean: bool) -> None:
        """Sign the length of the log; the synced length does not decrease."""
        with self._anchor_lock:
            if (mark.file, mark.offset) >= (self._anchored.file, self._anchored.offset):
                self._anchored = mark
            mark = self._anchored
            anchor = SignedAnchor(self._first, mark.file, mark.offset, mark.log, mark.ts, self._boot, clean)
            write_atomically(self._directory / HEADS_NAME, sign_anchor(self._keys.key, anchor), 0o600)

    def _recover(self, numbers: list[int], anchor: SignedAnchor | None) -> None:
        newest = max([*numbers, anchor.file if anchor else 0])
        self._first = anchor.first if anchor else min(numbers)
        if self._first > 1 and not (self._directory / SHARES_NAME).exists():  # a former version deleted the others
            write_kept(self._directory, self._keys.key, Kept(self._first, self._first))
        try:
            if anchor is None:
                raise _Changed("heads.json is missing or not signed by this log's key")
            if [n for n in numbers if n >= anchor.first] != list(range(anchor.first, newest + 1)):
                raise _Changed("files are missing")
            found = self._read_end(anchor, newest)
        except _Changed as error:
            self._begin_file(newest + 1, {"state": "changed", "mismatch": str(error)})
            return
        path = self._directory / file_name(newest)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.ftruncate(self._fd, found.offset)
        os.fdatasync(self._fd)
        self._number, self._size = newest, found.offset
        self.heads, self.log, self.last_ts = dict(found.heads), found.log, found.last_ts
        self.found = {chain: head.seq for chain, head in found.heads.items()}
        # Lines may follow from here on, so the mark of an orderly shutdown is withdrawn.
        self._write_anchor(self._mark_here(), clean=False)
        if found.offset == 0:
            self._begin_again(newest)
        else:
            self._write_checkpoint(CONTROL, {"boot": self._boot, "state": "restarted"})
        if found.torn:
            self.append([ChainEntry(CONTROL, torn_record(found.torn))])
        if not anchor.clean and anchor.boot != self._boot:
            self._gap_in_all("the host stopped without warning: records accepted just before may be missing")

    def _begin_again(self, number: int) -> None:
        os.close(self._fd)
        self._fd = -1
        self._begin_file(number, {"state": "restarted"})

    def _mark_here(self) -> Mark:
        return Mark(-1, self._number, self._size, self.log, self.last_ts or self._clock())

    def _read_end(self, anchor: SignedAnchor, newest: int) -> Verifier:
        """Verify from the anchor's file on; return the verifier, whose state is that of the log."""
        found = Verifier(self._keys.ring, replace(anchor, first=anchor.file))
        crashed = anchor.boot != self._boot and not anchor.clean
        for number in range(anchor.file, newest + 1):
            found.begin_file(number)
            with open(self._directory / file_name(number), "rb") as file:
                if not found.anchored:
                    found.lines(file.readlines(1))  # the header
                    found.trust(file)
                    file.seek(found.offset)
                for line in file:
                    if crashed and found.anchored and number == newest and not _parses(line):
                        found.torn = (
                            line + file.read()
                        )  # a crash of the host leaves arbitrary bytes after the last sync
                        break
                    found.line(line)
        found.finish()
        if not found.ok:
            raise _Changed(found.findings[0])
        if found.epoch >= 0 and not self._keys.resume_at(found.epoch):
            raise _Changed("the last lines belong to an epoch whose key is missing")
        return found

    def _change_epoch(self) -> None:
        """Begin a new epoch, or complete one whose beginning a crash has interrupted."""
        if not self._keys.switched:
            self.prepare_epoch()
            self.begin_epoch()
        sync(self.mark())
        self.destroy_former()


class _Changed(Exception):
    """The log differs from its signatures."""


def _parses(line: bytes) -> bool:
    try:
        parse_line(line)
    except LineError:
        return False
    return True
