"""auditd: the only process that writes the log. `python -m audit.auditd CONFIG.json`

- Only hostd attaches channels, ends chains and reads their heads. It names the producer of each channel. `serve`, the
  other client of the socket, is identified by its uid. A record that names its producer itself is refused.
- A producer can write only its own kinds (`producers`).
- A gateway puts its records into a ring (`shared_ring`). Its channel is for the times when the ring is closed.
- The requests that one producer can have waiting are limited: one `records` request, and as many `record` requests as
  `wire` reads ahead.
- The death of any process, also of auditd, loses no accepted record.

`commit` decides when records are written and synced; `sinks.file` manages the files.
"""

import asyncio
import json
import logging
import os
import resource
import signal
import socket
import stat
import sys
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, assert_never

import uvloop

from audit.batch import ChainEntry
from audit.commit import GroupCommit
from audit.drain import Drain
from audit.keys import KeyUnusable
from audit.producers import GATEWAY, HOSTD, KINDS, SERVE
from audit.records import Fields, RecordError, bounded, check_decision, escaped
from audit.shared_ring import Cursor
from audit.shares import CLOSED_SANDBOXES, CONTROL_SHARE, SANDBOX_SHARE, Retention
from audit.sinks.file import Log, LogUnwritable
from wire import NARROW, Client, Code, Done, RequestError, inherited_listener, serve_unix
from wire.api import auditd
from wire.api.auditd import (
    CONTROL_CHAIN,
    CURSOR_BYTES,
    RING_BYTES,
    RING_DESCRIPTORS,
    Accepted,
    Anchor,
    Attach,
    AttachRing,
    CloseRing,
    CloseSandbox,
    Heads,
    Record,
    Records,
)
from wire.frames import close_all
from wire.serving import handler

MAX_CHANNELS: Final = 16384

_log = logging.getLogger("auditd")

type _Control = Record | Records | Attach | AttachRing | CloseRing | CloseSandbox | Heads


@dataclass(frozen=True, slots=True)
class AuditConfig:
    """The configuration file.

    Read without pydantic: its import would double the start time, in which nothing is recorded.
    """

    directory: str
    uids: tuple[int, ...]
    host_uid: int = 0
    sync: str = "group"
    max_file_bytes: int = 64 * 1024 * 1024
    max_files: int = 0
    sandbox_share: int = SANDBOX_SHARE
    control_share: int = CONTROL_SHARE
    closed_sandboxes: int = CLOSED_SANDBOXES
    sandbox_bytes_per_second: int = 8 * 1024 * 1024

    @classmethod
    def parse(cls, text: bytes) -> "AuditConfig":
        """Read the content of the file, JSON.

        Raises:
            ValueError: the content is invalid; the message names the keys.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or set(data) - {field.name for field in fields(cls)}:
            raise ValueError("the configuration has unknown keys")
        least = {
            "host_uid": 0,
            "max_file_bytes": 65536,
            "max_files": 0,
            "sandbox_share": 65536,
            "control_share": 65536,
            "closed_sandboxes": 0,
            "sandbox_bytes_per_second": 0,
        }
        uids = data.get("uids")
        wrong = [] if isinstance(data.get("directory"), str) else ["directory"]
        wrong += [name for name, bound in least.items() if name in data and not _number(data[name], bound)]
        if not isinstance(uids, list) or not all(_number(uid, 0) for uid in uids):
            wrong.append("uids")
        if data.get("sync", "group") not in ("group", "always"):
            wrong.append("sync")
        if wrong:
            raise ValueError(f"the configuration has missing or invalid values: {', '.join(wrong)}")
        return cls(**{**data, "uids": tuple(data["uids"])})


def _number(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True, slots=True)
class ChannelOwner:
    """The owner of a channel: producer, sandbox and generation. Fixed when the channel is attached."""

    producer: str
    sandbox: str | None = None
    generation: int | None = None

    @property
    def chain(self) -> str:
        """The chain of the owner's records."""
        return self.sandbox or CONTROL_CHAIN

    def entry(self, asked: auditd.Entry) -> ChainEntry:
        """Return the record to append for a producer's request.

        Raises:
            RequestError: `INVALID`: the request is no valid record, or this producer must not write it.
        """
        try:
            if asked.kind not in KINDS[self.producer]:
                raise RecordError(f"{self.producer} does not write records of kind {asked.kind[:64]!r}")
            fields = escaped(bounded(asked.fields))
            record: Fields = {"kind": asked.kind, "decision": check_decision(asked.decision), **fields}
            if self.sandbox is not None and record.get("sandbox", self.sandbox) != self.sandbox:
                raise RecordError("the record names another sandbox than the channel's")
        except RecordError as error:
            raise RequestError(Code.INVALID, str(error)) from error
        record["producer"] = self.producer
        if self.sandbox is not None:
            record["sandbox"] = self.sandbox
        if self.generation is not None:
            record["generation"] = self.generation
        return ChainEntry(self.chain, record)


class Service:
    """The operations of the socket and of the channels."""

    def __init__(self, writer: GroupCommit, host_uid: int) -> None:
        """Pass records to `writer`. A client with the uid `host_uid` is hostd, any other is `serve`."""
        self._writer = writer
        self._host_uid = host_uid
        self._channels: dict[Client, ChannelOwner] = {}
        self._batching: set[Client] = set()

    async def control(self, client: Client, request: _Control, fds: list[int]) -> Done | Accepted | Anchor:
        """Answer one request from hostd or `serve` on the socket."""
        host = client.peer.uid == self._host_uid
        if isinstance(request, Attach) and host and len(fds) == 1:
            return self._attach(request, fds[0])
        if isinstance(request, AttachRing) and host and len(fds) == RING_DESCRIPTORS:
            return self._attach_ring(request, *fds)
        close_all(fds)
        match request:
            case Record() | Records():
                return await self._record(client, ChannelOwner(HOSTD if host else SERVE), request)
            case _ if not host:
                raise RequestError(Code.FORBIDDEN, "only hostd may attach channels, end chains and read their heads")
            case Attach() | AttachRing():
                raise RequestError(Code.INVALID, "this request has a fixed number of descriptors")
            case CloseRing(sandbox, generation):
                self._writer.remove_ring((sandbox, generation))
                return Done()
            case CloseSandbox(sandbox):
                for channel in [c for c, identity in self._channels.items() if identity.sandbox == sandbox]:
                    del self._channels[channel]
                    await channel.close()
                return Accepted(await self._writer.close_chain(sandbox))
            case Heads():
                return await self._writer.state()
            case _:
                assert_never(request)

    async def close(self) -> None:
        """End all channels."""
        for channel in list(self._channels):
            await channel.close()

    def _attach(self, request: Attach, fd: int) -> Done:
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                raise RequestError(Code.INVALID, "the descriptor is not a socket")
            self._channels = {c: identity for c, identity in self._channels.items() if not c.closed.is_set()}
            if len(self._channels) >= MAX_CHANNELS:
                raise RequestError(Code.BUSY, "auditd has as many channels as it can serve")
        except BaseException:
            os.close(fd)
            raise
        identity = ChannelOwner(request.producer, request.sandbox, request.generation)

        async def channel(client: Client, request: Record | Records, fds: list[int]) -> Accepted:
            close_all(fds)
            return await self._record(client, identity, request)

        client = Client(socket.socket(fileno=fd), handler(auditd.CHANNEL, channel), takes=NARROW, gives=NARROW)
        client.start()
        self._channels[client] = identity
        return Done()

    def _attach_ring(self, request: AttachRing, ring: int, cursor: int, wake: int) -> Done:
        key = request.sandbox, request.generation
        try:
            sizes = os.fstat(ring).st_size, os.fstat(cursor).st_size
            if sizes != (RING_BYTES, CURSOR_BYTES):
                raise RequestError(Code.INVALID, "the descriptors are not those of a ring")
            if self._writer.has_ring(key):
                close_all((ring, wake))
                return Done()
            mapped = Cursor(cursor)
        except BaseException:
            close_all((ring, wake))
            raise
        finally:
            os.close(cursor)
        owner = ChannelOwner(GATEWAY, *key)
        drain = Drain(ring, mapped, wake, key=key, entry=owner.entry, ready=self._writer.filled)
        drain.recover(self._writer.recovered(request.sandbox))
        self._writer.add_ring(drain)
        return Done()

    async def _record(self, client: Client, identity: ChannelOwner, request: Record | Records) -> Accepted:
        match request:
            case Record(asked, durable):
                return Accepted((await self._writer.submit(client, [identity.entry(asked)], durable=durable))[-1])
            case Records(many):
                entries = [identity.entry(asked) for asked in many]
        if client in self._batching:
            raise RequestError(Code.BUSY, "a `records` request of this producer is still being handled")
        self._batching.add(client)
        try:
            return Accepted((await self._writer.submit(client, entries, durable=False))[-1])
        finally:
            self._batching.discard(client)


def now() -> str:
    """Return the present time in the form of records: RFC 3339, milliseconds, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


async def run(config: AuditConfig, listener: socket.socket) -> None:
    """Serve on `listener` until SIGTERM or SIGINT."""
    log = Log.open(
        Path(config.directory),
        boot=Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip(),
        clock=now,
        max_file_bytes=config.max_file_bytes,
        retention=Retention(config.max_files, config.sandbox_share, config.control_share, config.closed_sandboxes),
    )
    writer = GroupCommit(log, always=config.sync == "always", pace=config.sandbox_bytes_per_second)
    service = Service(writer, config.host_uid)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    writer.start()
    accepting = await serve_unix(
        listener,
        handler(auditd.CONTROL, service.control),
        allowed_uids=frozenset(config.uids),
        takes=NARROW,
        descriptors_from=frozenset((config.host_uid,)),
    )
    try:
        await stop.wait()
    finally:
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)
        await service.close()
        await writer.close()


def main(arguments: list[str]) -> int:
    """Run auditd. `arguments` is the path of the configuration file."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(levelname)s: %(message)s")
    if len(arguments) != 1:
        _log.error("usage: python -m audit.auditd CONFIG.json")
        return 2
    os.umask(0o077)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a descriptor for each channel
    try:
        config = AuditConfig.parse(Path(arguments[0]).read_bytes())
        uvloop.run(run(config, inherited_listener()))
    except (OSError, ValueError, KeyUnusable, LogUnwritable) as error:
        _log.error("auditd cannot start: %s: %s", type(error).__name__, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
