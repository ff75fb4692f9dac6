"""The control plane's clients of hostd, vaultd and auditd.

- A client connects when needed, and again after its connection ended. A call that found the connection closed before
  anything was sent is tried once on a new one. No other call is repeated.
- Nothing is sent to a server of another user than the daemon's.
- Each call has a time-out. `Unreachable` is raised for a daemon that does not answer, `wire.RemoteError` for a refusal.
- Values of secrets are passed through `Vaultd.open_sandbox` and `Vaultd.regrant` only. They are not kept or logged
  here.
"""

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from itertools import batched
from typing import Any

import wire
from audit.client import entry
from audit.records import record
from policy.selection import Selection
from vault.grants import Grant
from wire.api import hostd, vaultd
from wire.api.auditd import Record

CALL_TIMEOUT = 20.0
LAUNCH_TIMEOUT = 120.0
SNAPSHOT_TIMEOUT = 900.0
_log = logging.getLogger(__name__)

TOO_LARGE = wire.Code.TOO_LARGE
"""The code of a call that was not sent because it does not fit into a frame."""


_CALLED = {"hostd": "the host service", "vaultd": "the vault", "auditd": "the audit log"}
_REFUSED = {
    "docker": "Docker on this host failed",
    "network": "its network could not be made",
    "gateway": "its gateway did not start",
    "host": "the host could not do a step",
    "timeout": "a step took too long",
    "internal": "the host service failed",
}


class Unreachable(Exception):
    """The daemon does not answer. It is unknown whether the call was executed. `str()` is for users."""

    def __init__(self, daemon: str, cause: BaseException) -> None:
        super().__init__(f"{_CALLED.get(daemon, daemon)} does not answer")
        self.daemon = daemon
        _log.info("%s does not answer: %s", daemon, type(cause).__name__)


def explained(error: Unreachable | wire.RemoteError) -> str:
    """Describe a failure for a client, in words that need no knowledge of the processes. The log has the details."""
    if isinstance(error, Unreachable):
        return str(error)
    return _REFUSED.get(error.code, error.message)


class Daemon:
    """A daemon behind a unix socket."""

    name = "daemon"
    gives = wire.WHOLE

    def __init__(self, path: str | os.PathLike[str], uid: int) -> None:
        """Keep the socket's path; `uid` is the user that the daemon must run as."""
        self._path = os.fspath(path)
        self._uid = uid
        self._client: wire.Client | None = None
        self._lock = asyncio.Lock()

    async def ping(self) -> None:
        """Check whether the daemon answers."""
        await self.ask(wire.Ping(), timeout=5.0)

    async def close(self) -> None:
        """End the connection."""
        async with self._lock:
            client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def ask[Answer](self, request: wire.Request[Answer], timeout: float = CALL_TIMEOUT) -> Answer:
        """Send a request and return the answer.

        Raises:
            Unreachable: no connection, or no answer in time.
            wire.RemoteError: a refusal. This client itself refuses with `TOO_LARGE`.
        """
        try:
            return await (await self._connected()).ask(request, timeout=timeout)
        except wire.FrameError:
            raise wire.RemoteError(wire.Code.TOO_LARGE, f"the request is larger than {self.name} takes") from None
        except wire.WrongServer as error:
            _log.error("%s", error)
            raise Unreachable(self.name, error) from None
        except OSError as error:  # ConnectionError and TimeoutError are OSErrors.
            raise Unreachable(self.name, error) from None

    async def _connected(self) -> wire.Client:
        async with self._lock:
            if self._client is None or self._client.closed.is_set():
                async with asyncio.timeout(5.0):
                    self._client = await wire.Client.connect(self._path, self._uid, gives=self.gives)
            return self._client


class Hostd(Daemon):
    """The privileged daemon of the host."""

    name = "hostd"

    async def check_image(self, name: str) -> None:
        """Check that the host has an image; it refuses with `unknown_image` if not."""
        await self.ask(hostd.DescribeImage(name))

    async def images(self) -> tuple[str, ...]:
        """Return names of the host's images, the configured ones first. The number is limited."""
        return (await self.ask(hostd.Images())).images

    async def launch(self, launch: hostd.Launch) -> hostd.PolicyInForce:
        """Start a sandbox and return its policy. After a refusal nothing of it is left."""
        return await self.ask(launch, LAUNCH_TIMEOUT)

    async def configure(self, sandbox: str, selection: Selection, *, decided: bool) -> hostd.PolicyInForce:
        """Give a sandbox's gateway another policy; return the policy that is then in force.

        hostd compiles it under the operator's document of that moment.

        Args:
            decided: it is to be in force in any case. A gateway that is replaced in the meantime starts with it.
                Otherwise a gateway that does not confirm it keeps, or is replaced with, the former policy.
        """
        return await self.ask(hostd.Configure(sandbox, selection.to_text(), decided))

    async def claimable(self, sandboxes: Sequence[str]) -> frozenset[str]:
        """Return those of the idle members whose image may still be started."""
        found: set[str] = set()
        for some in batched(sandboxes, hostd.MOST_CLAIMABLE, strict=False):
            found.update((await self.ask(hostd.Claimable(some))).sandboxes)
        return frozenset(found)

    async def claim(self, sandbox: str, selection: Selection, env: Mapping[str, str]) -> hostd.PolicyInForce:
        """Give an idle member the policy of its claim. It refuses with `unknown_image` if it is not claimable.

        The output of the sandbox does not show values of `env`.
        """
        return await self.ask(hostd.ClaimMember(sandbox, selection.to_text(), env))

    async def policy(self, sandbox: str) -> str:
        """Return the digest of the policy that a sandbox's worker has confirmed, or an empty text."""
        return (await self.state(sandbox)).policy

    async def state(self, sandbox: str) -> hostd.HostSandboxState:
        """Return the state of one sandbox; hostd refuses with `unknown_sandbox` if it does not know it."""
        return (await self.ask(hostd.Inspect(sandbox))).state

    async def output(self, sandbox: str, lines: int, since: int | None = None) -> hostd.Printed:
        """Return the last lines that the entrypoint of a sandbox has written, only those after `since` (seconds)."""
        return await self.ask(hostd.ReadOutput(sandbox, lines, since))

    async def pause(self, sandbox: str) -> None:
        """Freeze a sandbox. It refuses with `not_running` if the sandbox has no process."""
        await self.ask(hostd.Pause(sandbox))

    async def resume(self, sandbox: str) -> None:
        """Let a paused sandbox run. After a refusal it is still paused."""
        await self.ask(hostd.Resume(sandbox))

    async def remove(self, sandbox: str, lines: int = 0) -> hostd.Removed:
        """Remove a sandbox; return what is left of it, which should be nothing. An unknown sandbox is no error.

        The answer has the last `lines` of its output, if it could be read.
        """
        return await self.ask(hostd.Remove(sandbox, lines), LAUNCH_TIMEOUT)

    async def states(self) -> tuple[hostd.HostSandboxState, ...]:
        """Return the states of all sandboxes that hostd knows."""
        return (await self.ask(hostd.List())).sandboxes

    async def take_snapshot(self, sandbox: str, snapshot: str) -> int:
        """Take a snapshot of a running sandbox; return its bytes. After a refusal nothing of it is left."""
        return (await self.ask(hostd.TakeSnapshot(sandbox, snapshot), SNAPSHOT_TIMEOUT)).bytes

    async def remove_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot. It refuses with `busy` if a sandbox uses it. An unknown snapshot is no error."""
        await self.ask(hostd.RemoveSnapshot(snapshot), LAUNCH_TIMEOUT)

    async def snapshots(self) -> tuple[hostd.HeldSnapshot, ...]:
        """Return the snapshots that hostd has, or is taking."""
        return (await self.ask(hostd.ListSnapshots())).snapshots


class Vaultd(Daemon):
    """The daemon that holds the secrets."""

    name = "vaultd"

    async def open_sandbox(
        self, sandbox: str, lineage: str, grants: Sequence[Grant], names: Sequence[str], metadata: Mapping[str, str]
    ) -> str:
        """Register a sandbox whose gateway may sign for `names`; return the root for its programs (PEM).

        `metadata` is that of its create call: the vault selects by it which secrets it may have.
        """
        known = dict(metadata)
        request = vaultd.OpenSandbox(sandbox, lineage, _forms(grants), names=tuple(names), metadata=known)
        return (await self.ask(request)).root_pem

    async def regrant(
        self,
        sandbox: str,
        grants: Sequence[Grant],
        names: Sequence[str],
        inline: Mapping[str, str] | None = None,
        keep: Sequence[str] = (),
        bounds: Sequence[Grant] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Replace the grants of a sandbox.

        Args:
            names: the names for which its gateway's next authority may sign.
            inline: if not None, the sandbox has these inline values, and of the former ones only those in `keep`. With
                None all former ones stay.
            bounds: the places where inline values may be granted. A value in `inline` gets these places. Another value
                keeps those of them that it had. With None it keeps all that it had.
            metadata: that of the create call that claims the sandbox from a pool; None: as before.
        """
        values = None if inline is None else {name: vaultd.Value(text) for name, text in inline.items()}
        kept = tuple(keep) if keep and inline is not None else None
        known = None if metadata is None else dict(metadata)
        await self.ask(vaultd.Regrant(sandbox, _forms(grants), values, kept, _bounds(bounds), tuple(names), known))

    async def narrow(
        self, sandbox: str, grants: Sequence[Grant], keep: Sequence[str] | None, bounds: Sequence[Grant] | None
    ) -> None:
        """Remove every grant that is not in `grants`, every inline value that is not in `keep` (None: none) and every
        place of inline values that is not in `bounds` (None: none).
        """
        kept = None if keep is None else tuple(keep)
        await self.ask(vaultd.Narrow(sandbox, _forms(grants), kept, _bounds(bounds)))

    async def close_sandbox(self, sandbox: str) -> None:
        """Remove all data about a sandbox. An unknown sandbox is no error."""
        await self.ask(vaultd.CloseSandbox(sandbox))


def _forms(grants: Sequence[Grant]) -> tuple[vaultd.GrantForm, ...]:
    return tuple(grant.form for grant in grants)


def _bounds(bounds: Sequence[Grant] | None) -> tuple[vaultd.GrantForm, ...] | None:
    return None if bounds is None else _forms(bounds)


class Auditd(Daemon):
    """The writer of the audit log."""

    name = "auditd"
    gives = wire.NARROW

    async def record(self, kind: str, decision: str, *, sandbox: str | None = None, **fields: Any) -> None:
        """Send a record of the control plane.

        Raises:
            Unreachable, wire.RemoteError: it was not accepted. The recorded change must then not be made.
        """
        await self.ask(Record(entry(record(kind, decision, sandbox=sandbox, **fields))))
