"""auditd: the one process that writes the log. `python -m audit.writer CONFIG.json`

- hostd alone attaches channels, ends chains and reads their heads. It names the producer of each channel; `serve`, the
  other user of the socket, is recognised by its uid. What a record says about that itself is refused.
- A producer writes the kinds of its own (`producers`) and nothing else.
- What one producer can have waiting is bounded: one `records` request, and as many `record`s as `wire` reads ahead.
- Killing any process, this one included, loses no accepted record.

It takes no decision about writing and syncing (`commit`), nor about files (`file_sink`).
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

from audit.batch import Entry
from audit.commit import GroupCommit
from audit.file_sink import Log, LogUnwritable
from audit.keys import KeyUnusable
from audit.producers import HOSTD, KINDS, SERVE
from audit.records import Fields, RecordError, bounded, check_decision, escaped
from audit.shares import CLOSED_SANDBOXES, CONTROL_SHARE, SANDBOX_SHARE, Retention
from wire import NARROW, Client, Code, Done, RequestError, inherited_listener, serve_unix
from wire.api import auditd
from wire.api.auditd import CONTROL_CHAIN, Accepted, Anchor, Attach, CloseSandbox, Heads, Record, Records
from wire.frames import close_all

MAX_CHANNELS: Final = 16384

_log = logging.getLogger("auditd")


@dataclass(frozen=True, slots=True)
class AuditConfig:
    """The configuration file.

    Read by hand: importing pydantic would take as long as everything else here, and nothing is recorded meanwhile.
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
            ValueError: it is not exactly a configuration; the message says where.
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
            raise ValueError(f"the configuration has no good {', '.join(wrong)}")
        return cls(**{**data, "uids": tuple(data["uids"])})


def _number(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose a channel is; fixed when it is attached."""

    producer: str
    sandbox: str | None = None
    generation: int | None = None

    @property
    def chain(self) -> str:
        """The chain its records go into."""
        return self.sandbox or CONTROL_CHAIN

    def entry(self, asked: auditd.Entry) -> Entry:
        """Return what this producer asks to record.

        Raises:
            RequestError: `INVALID`: it is not a record, or not one of this producer's.
        """
        try:
            if asked.kind not in KINDS[self.producer]:
                raise RecordError(f"{self.producer} does not write records of kind {asked.kind[:64]!r}")
            fields = escaped(bounded(asked.fields))
            record: Fields = {"kind": asked.kind, "decision": check_decision(asked.decision), **fields}
            if self.sandbox is not None and record.get("sandbox", self.sandbox) != self.sandbox:
                raise RecordError("this channel does not write about another sandbox")
        except RecordError as error:
            raise RequestError(Code.INVALID, str(error)) from error
        record["producer"] = self.producer
        if self.sandbox is not None:
            record["sandbox"] = self.sandbox
        if self.generation is not None:
            record["generation"] = self.generation
        return Entry(self.chain, record)


class Service:
    """The operations of the socket and of the channels."""

    def __init__(self, writer: GroupCommit, host_uid: int) -> None:
        """Serve records to `writer`; the user `host_uid` is hostd, any other is `serve`."""
        self._writer = writer
        self._host_uid = host_uid
        self._channels: dict[Client, Identity] = {}
        self._batching: set[Client] = set()

    async def control(
        self, client: Client, request: Record | Records | Attach | CloseSandbox | Heads, fds: list[int]
    ) -> Done | Accepted | Anchor:
        """Answer one request of the socket, from hostd or `serve`."""
        host = client.peer.uid == self._host_uid
        if isinstance(request, Attach) and host and len(fds) == 1:
            return self._attach(request, fds[0])
        close_all(fds)
        match request:
            case Record() | Records():
                return await self._record(client, Identity(HOSTD if host else SERVE), request)
            case _ if not host:
                raise RequestError(Code.FORBIDDEN, "only hostd may attach channels, end chains and read their heads")
            case Attach():
                raise RequestError(Code.INVALID, "attach brings exactly one descriptor")
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
                raise RequestError(Code.BUSY, "too many channels")
        except BaseException:
            os.close(fd)
            raise
        identity = Identity(request.producer, request.sandbox, request.generation)

        async def channel(client: Client, request: Record | Records, fds: list[int]) -> Accepted:
            close_all(fds)
            return await self._record(client, identity, request)

        client = Client(socket.socket(fileno=fd), auditd.CHANNEL.handler(channel), takes=NARROW, gives=NARROW)
        client.start()
        self._channels[client] = identity
        return Done()

    async def _record(self, client: Client, identity: Identity, request: Record | Records) -> Accepted:
        match request:
            case Record(asked, durable):
                return Accepted((await self._writer.submit(client, [identity.entry(asked)], durable=durable))[-1])
            case Records(many):
                entries = [identity.entry(asked) for asked in many]
        if client in self._batching:
            raise RequestError(Code.BUSY, "one request of many records at a time")
        self._batching.add(client)
        try:
            return Accepted((await self._writer.submit(client, entries, durable=False))[-1])
        finally:
            self._batching.discard(client)


def now() -> str:
    """Return the time as records have it: RFC 3339, milliseconds, UTC."""
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
        auditd.CONTROL.handler(service.control),
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
    """Run auditd with the configuration file that `arguments` names."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(levelname)s: %(message)s")
    if len(arguments) != 1:
        _log.error("usage: python -m audit.writer CONFIG.json")
        return 2
    os.umask(0o077)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a descriptor for each channel
    try:
        config = AuditConfig.parse(Path(arguments[0]).read_bytes())
        uvloop.run(run(config, inherited_listener()))
    except (OSError, ValueError, KeyUnusable, LogUnwritable) as error:
        _log.error("cannot run: %s: %s", type(error).__name__, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
