"""Shares: the records of each chain that are kept after their file of the log is retired.

    chains/<chain>.<file>.jsonl   lines of one chain, the newest of them from file <file>
    chains.json                   signed: the list of these files, with the begin and end of each

- A retired file of the log is split by chain. The newest lines of each chain are kept, up to its share. So a chain that
  grows fast displaces only its own old lines.
- A chain loses its oldest lines first, so the rest still ends at the signed head.
- Above a number of closed chains, the chain that was closed first is deleted as a whole.
- Lines are on disk, and `chains.json` lists them, before their original file is deleted. After a crash the split of a
  file is repeated, with the same result.

`sinks.file` decides which files are retired. The order between lines of different chains is lost, except for their
times. It is signed while the original file exists.
"""

import json
import os
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from audit.chain import CHECKPOINT, CONTROL, ChainHead, LineError, fingerprint, parse_line
from audit.keys import sync_directory, write_atomically
from audit.records import canonical
from audit.ring import Ring
from wire.ids import SANDBOX_ID

SHARES_NAME: Final = "chains.json"
DIRECTORY: Final = "chains"
SANDBOX_SHARE: Final = 8 * 1024 * 1024
CONTROL_SHARE: Final = 256 * 1024 * 1024
CLOSED_SANDBOXES: Final = 1000
SMALL: Final = 64 * 1024
"""A segment below this size, in bytes, is joined with the following one."""
_CONTEXT: Final = b"sallyport-audit-chains-v1\0"
_CHAIN: Final = b'"chain":"'
_BUFFER: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Retention:
    """The retention: the number of unchanged files (0: all), and the shares of the retired ones."""

    max_files: int = 0
    sandbox_share: int = SANDBOX_SHARE
    control_share: int = CONTROL_SHARE
    closed_sandboxes: int = CLOSED_SANDBOXES


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of a chain's lines. `seq` and `hash` are those of its last line (0 and zeros: the chain is closed)."""

    file: int
    size: int
    seq: int
    hash: str


@dataclass(frozen=True, slots=True)
class Share:
    """The kept lines of one chain. `seq` and `hash` are those of the line before its oldest segment."""

    seq: int
    hash: str
    segments: tuple[Segment, ...]

    @property
    def closed(self) -> bool:
        """Whether the last line closes the chain."""
        return self.segments[-1].seq == 0

    @property
    def head(self) -> ChainHead:
        """The head of the chain after its last line."""
        return ChainHead(self.segments[-1].seq, self.segments[-1].hash)


@dataclass(slots=True)
class Kept:
    """The content of `chains.json`."""

    file: int = 1  # the oldest file that is not split
    began: int = 1  # the first file that was split; those before it were deleted by a former version
    expired: int = 0  # the number of closed chains that were deleted
    policy: dict[str, int] = field(default_factory=dict)
    chains: dict[str, Share] = field(default_factory=dict)


def segment_name(chain: str, file: int) -> str:
    """Return the name of a segment."""
    return f"{chain}.{file:06d}.jsonl"


def read_kept(ring: Ring, data: bytes) -> Kept | None:
    """Return the content of `data`, None if no key of this log has signed it."""
    try:
        body = json.loads(data)
        signature = b64decode(body.pop("signature"), validate=True)
        ring.keys[ring.places[body["key"]]].verify(signature, _CONTEXT + canonical(body))
        return parse_kept(data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, InvalidSignature):
        return None


def parse_kept(data: bytes) -> Kept:
    """Return the content of `data` without a check of its signature.

    Raises:
        ValueError: `data` is malformed.
    """
    try:
        body = json.loads(data)
        chains: dict[str, Share] = {}
        for chain, one in body["chains"].items():
            chains[chain] = Share(one["seq"], one["hash"], tuple(Segment(**part) for part in one["segments"]))
            if not SANDBOX_ID.fullmatch(chain) or not chains[chain].segments:
                raise ValueError("not a chain's share")
            if not all(type(number) is int for part in chains[chain].segments for number in (part.file, part.size)):
                raise ValueError("not a segment")
        return Kept(body["file"], body["began"], body["expired"], body["policy"], chains)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{SHARES_NAME} cannot be read") from error


def _written(key: Ed25519PrivateKey, kept: Kept) -> bytes:
    body: dict[str, Any] = {"version": 1, "key": fingerprint(key.public_key()), **asdict(kept)}
    signature = b64encode(key.sign(_CONTEXT + canonical(body))).decode("ascii")
    return canonical({**body, "signature": signature}) + b"\n"


def split(directory: Path, file: int, path: Path, kept: Kept, retention: Retention, key: Ed25519PrivateKey) -> Kept:
    """Split `path`, the log's file number `file`, by chain. Return the new shares, which are on disk.

    Raises:
        OSError, LineError: the split failed; the old shares are unchanged.
    """
    place = directory / DIRECTORY
    place.mkdir(mode=0o700, exist_ok=True)
    totals: dict[str, int] = {}
    with open(path, "rb") as lines:
        for line in lines:
            chain = _chain(line)
            totals[chain] = totals.get(chain, 0) + len(line)
    after = Kept(file + 1, kept.began, kept.expired, asdict(retention), dict(kept.chains))
    parts = {chain: _Part(place, chain, file, total, _most(chain, retention)) for chain, total in totals.items()}
    for chain, part in parts.items():
        if (share := kept.chains.get(chain)) is not None:
            part.join(share)
    with open(path, "rb") as lines:
        for line in lines:
            parts[_chain(line)].add(line)
    for chain, part in parts.items():
        after.chains[chain] = part.end()
    closed = sorted((share.segments[-1].file, chain) for chain, share in after.chains.items() if share.closed)
    for _, chain in closed[: max(0, len(closed) - retention.closed_sandboxes)]:
        del after.chains[chain]
        after.expired += 1
    sync_directory(place)
    write_kept(directory, key, after)
    return after


def write_kept(directory: Path, key: Ed25519PrivateKey, kept: Kept) -> None:
    """Sign and write `chains.json`. Raises OSError."""
    write_atomically(directory / SHARES_NAME, _written(key, kept), 0o600)


def sweep(directory: Path, kept: Kept) -> None:
    """Delete the files that are in no chain's share."""
    place = directory / DIRECTORY
    if not place.exists():
        return
    names = {segment_name(chain, one.file) for chain, share in kept.chains.items() for one in share.segments}
    for path in place.iterdir():
        if path.name not in names:
            path.unlink()


def share_lines(directory: Path, chain: str, share: Share) -> Iterator[bytes]:
    """Yield the kept lines of a chain, oldest first."""
    for segment in share.segments:
        with open(directory / DIRECTORY / segment_name(chain, segment.file), "rb") as file:
            yield from file


def _most(chain: str, retention: Retention) -> int:
    return retention.control_share if chain == CONTROL else retention.sandbox_share


def _chain(line: bytes) -> str:
    begin = line.find(_CHAIN) + len(_CHAIN)
    chain = line[begin : line.find(b'"', begin)].decode("ascii")
    if not SANDBOX_ID.fullmatch(chain):
        raise LineError("a line has no chain")
    return chain


class _Part:
    """The lines of one chain in a file that is being split, and their segment."""

    def __init__(self, place: Path, chain: str, file: int, total: int, most: int) -> None:
        self._path = place / segment_name(chain, file)
        self._place, self._chain, self._file, self._most = place, chain, file, most
        self._skip = max(0, total - most)  # bytes of this file above the share
        self._full = total >= most
        self._before: tuple[Segment, ...] = ()
        self._begin: ChainHead | None = None
        self._last = b""
        self._buffer = bytearray()
        self._size = 0
        self._path.unlink(missing_ok=True)

    def join(self, share: Share) -> None:
        """Continue the kept lines of the chain. A small last segment becomes the beginning of this one."""
        if self._full:
            return
        self._before, self._begin = share.segments, ChainHead(share.seq, share.hash)
        if share.segments[-1].size < SMALL:
            self._before = share.segments[:-1]
            small = self._place / segment_name(self._chain, share.segments[-1].file)
            self._buffer += small.read_bytes()

    def add(self, line: bytes) -> None:
        """Add a line."""
        if self._skip >= len(line):
            self._skip -= len(line)
            return
        self._skip = 0
        if self._begin is None:
            record = parse_line(line)
            self._begin = ChainHead(record["seq"] - 1, record["prev"])
        self._last = line
        self._buffer += line
        if len(self._buffer) >= _BUFFER:
            self._flush(sync=False)

    def end(self) -> Share:
        """Write the segment to disk, and drop older segments above the share."""
        self._flush(sync=True)
        record = parse_line(self._last)
        closed = record["kind"] == CHECKPOINT and record.get("closed") is True
        head = ChainHead() if closed else ChainHead(record["seq"], record["hash"])
        segments = [*self._before, Segment(self._file, self._size, head.seq, head.hash)]
        begin = self._begin or ChainHead()
        while len(segments) > 1 and sum(segment.size for segment in segments[1:]) >= self._most:
            dropped = segments.pop(0)
            begin = ChainHead(dropped.seq, dropped.hash)
        return Share(begin.seq, begin.hash, tuple(segments))

    def _flush(self, *, sync: bool) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._path, flags, 0o600)
        try:
            if os.write(fd, self._buffer) != len(self._buffer):
                raise OSError("short write")
            if sync:
                os.fdatasync(fd)
        finally:
            os.close(fd)
        self._size += len(self._buffer)
        self._buffer.clear()
