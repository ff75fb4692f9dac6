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
import re
import resource
import signal
import socket
import stat
import sys
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import uvloop

from audit.batch import Entry
from audit.chain import CONTROL
from audit.commit import GroupCommit
from audit.file_sink import Log, LogUnwritable
from audit.keys import KeyUnusable
from audit.producers import GATEWAY, HOSTD, KINDS, SERVE, VAULT
from audit.records import Fields, RecordError, bounded, check_decision, escaped
from audit.shares import CLOSED_SANDBOXES, CONTROL_SHARE, SANDBOX_SHARE, Retention
from wire import NARROW, Client, Message, RequestError, inherited_listener, serve_unix
from wire.frames import close_all

MAX_ITEMS: Final = 128  # records in one request
MAX_CHANNELS: Final = 16384
_IDENT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")

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
    """Who a channel belongs to; fixed when it is attached."""

    producer: str
    sandbox: str | None = None
    generation: int | None = None

    @property
    def chain(self) -> str:
        """The chain its records go into."""
        return self.sandbox or CONTROL

    def entry(self, kind: object, decision: object, fields: object) -> Entry:
        """Return what this producer asks to record.

        Raises:
            RecordError: it is not a record.
        """
        if not (isinstance(kind, str) and isinstance(decision, str) and isinstance(fields, dict)):
            raise RecordError("a record needs kind, decision and fields")
        if kind not in KINDS[self.producer]:
            raise RecordError(f"{self.producer} does not write records of kind {kind[:64]!r}")
        record: Fields = {"kind": kind, "decision": check_decision(decision), **escaped(bounded(fields))}
        record["producer"] = self.producer
        if self.sandbox is not None:
            if record.get("sandbox", self.sandbox) != self.sandbox:
                raise RecordError("this channel does not write about another sandbox")
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

    async def control(self, client: Client, op: str, parameters: Message, fds: list[int]) -> Message:
        """Answer one request of the socket, from hostd or `serve`."""
        host = client.peer.uid == self._host_uid
        if op == "attach" and len(fds) == 1 and host:
            return self._attach(parameters, fds[0])
        close_all(fds)
        match op:
            case "attach" | "close_sandbox" | "heads" if not host:
                raise RequestError("forbidden", f"{op} is an operation of hostd")
            case "attach":
                raise RequestError("invalid", "attach brings exactly one descriptor")
            case "ping":
                return {}
            case "record" | "records":
                return await self._record(client, Identity(HOSTD if host else SERVE), op, parameters)
            case "close_sandbox":
                sandbox = _identifier(parameters, "sandbox")
                for channel in [c for c, identity in self._channels.items() if identity.sandbox == sandbox]:
                    del self._channels[channel]
                    await channel.close()
                return {"seq": await self._writer.close_chain(sandbox)}
            case "heads":
                return await self._writer.state()
            case _:
                raise RequestError("unknown_op", f"unknown operation {op[:64]!r}")

    async def close(self) -> None:
        """End all channels."""
        for channel in list(self._channels):
            await channel.close()

    def _attach(self, parameters: Message, fd: int) -> Message:
        try:
            sandbox = None if parameters.get("sandbox") is None else _identifier(parameters, "sandbox")
            producer = _identifier(parameters, "producer")
            if producer != (VAULT if sandbox is None else GATEWAY):
                raise RequestError("invalid", "a channel is vaultd's, or that of a sandbox's gateway")
            generation = parameters.get("generation")
            if generation is not None and (type(generation) is not int or not 1 <= generation < 2**53):
                raise RequestError("invalid", "generation is a positive integer")
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                raise RequestError("invalid", "the descriptor is not a socket")
            self._channels = {c: who for c, who in self._channels.items() if not c.closed.is_set()}
            if len(self._channels) >= MAX_CHANNELS:
                raise RequestError("busy", "too many channels")
        except BaseException:
            os.close(fd)
            raise
        identity = Identity(producer, sandbox, generation)

        async def channel(client: Client, op: str, parameters: Message, fds: list[int]) -> Message:
            close_all(fds)
            return await self._record(client, identity, op, parameters)

        client = Client(socket.socket(fileno=fd), channel, takes=NARROW, gives=NARROW)
        client.start()
        self._channels[client] = identity
        return {}

    async def _record(self, client: Client, identity: Identity, op: str, parameters: Message) -> Message:
        try:
            match op:
                case "record":
                    entries = [_entry(identity, parameters)]
                case "records":
                    items = parameters.get("records")
                    if not isinstance(items, list) or not 1 <= len(items) <= MAX_ITEMS:
                        raise RecordError("records is a list of some records")
                    entries = [_entry(identity, item) for item in items]
                case "ping":
                    return {}
                case _:
                    raise RequestError("unknown_op", f"unknown operation {op[:64]!r}")
        except RecordError as error:
            raise RequestError("invalid", str(error)) from error
        durable = parameters.get("durable") is True
        if op == "record":
            return {"seq": (await self._writer.submit(client, entries, durable=durable))[-1]}
        if client in self._batching:
            raise RequestError("busy", "one request of many records at a time")
        self._batching.add(client)
        try:
            return {"seq": (await self._writer.submit(client, entries, durable=durable))[-1]}
        finally:
            self._batching.discard(client)


def _entry(identity: Identity, item: Any) -> Entry:
    if not isinstance(item, dict):
        raise RecordError("a record is an object")
    return identity.entry(item.get("kind"), item.get("decision"), item.get("fields", {}))


def _identifier(parameters: Message, name: str) -> str:
    value = parameters.get(name)
    if not isinstance(value, str) or not _IDENT.fullmatch(value) or (name == "sandbox" and value == CONTROL):
        raise RequestError("invalid", f"{name} is not an identifier")
    return value


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
        service.control,
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
