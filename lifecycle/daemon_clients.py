"""Our calls to hostd, vaultd and auditd.

- A connection is made when needed and again after it ended; a call that found the connection dead before anything was
  sent is tried once on a new one, no other call is ever repeated here.
- A server of another user than the daemon's is sent nothing.
- Each call has a time-out. A daemon that cannot be reached is `Unreachable`; what it refuses is `wire.RemoteError`.
- Values of secrets pass through `Vaultd.open_sandbox` and `Vaultd.regrant` only; nothing here keeps or logs them.
"""

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
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
_log = logging.getLogger(__name__)

TOO_LARGE = wire.Code.TOO_LARGE
"""The code of a call that was not sent: it does not fit into a frame."""


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
    """The daemon does not answer: whether the call was carried out is not known. `str()` is for users."""

    def __init__(self, daemon: str, cause: BaseException) -> None:
        super().__init__(f"{_CALLED.get(daemon, daemon)} does not answer")
        self.daemon = daemon
        _log.info("%s does not answer: %s", daemon, type(cause).__name__)


def explained(error: Unreachable | wire.RemoteError) -> str:
    """Say to a client what failed, in words that need no knowledge of our parts; the log has the details."""
    if isinstance(error, Unreachable):
        return str(error)
    return _REFUSED.get(error.code, error.message)


class Daemon:
    """A daemon behind a unix socket."""

    name = "daemon"
    gives = wire.WHOLE

    def __init__(self, path: str | os.PathLike[str], uid: int) -> None:
        """Keep where it is; `uid` is the user it must run as."""
        self._path = os.fspath(path)
        self._uid = uid
        self._client: wire.Client | None = None
        self._lock = asyncio.Lock()

    async def ping(self) -> None:
        """Ask whether it is there."""
        await self.ask(wire.Ping(), timeout=5.0)

    async def close(self) -> None:
        """End the connection."""
        async with self._lock:
            client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def ask[Answer](self, request: wire.Request[Answer], timeout: float = CALL_TIMEOUT) -> Answer:
        """Ask and return the answer.

        Raises:
            Unreachable: no connection, or no answer in time.
            wire.RemoteError: refused; with `TOO_LARGE` by ourselves.
        """
        try:
            return await (await self._connected()).ask(request, timeout=timeout)
        except wire.FrameError:
            raise wire.RemoteError(wire.Code.TOO_LARGE, f"the request is larger than {self.name} takes") from None
        except wire.WrongServer as error:
            _log.error("%s", error)
            raise Unreachable(self.name, error) from None
        except OSError as error:  # ConnectionError and TimeoutError are OSErrors
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
        """Find out whether the host has an image; refused with `unknown_image` if not."""
        await self.ask(hostd.DescribeImage(name))

    async def images(self) -> tuple[str, ...]:
        """Names of images this host has, the configured ones first; not all, where there are a great many."""
        return (await self.ask(hostd.Images())).images

    async def launch(self, launch: hostd.Launch) -> str:
        """Start a sandbox and return the digest of its policy; a refusal means that nothing of it is left."""
        return (await self.ask(launch, LAUNCH_TIMEOUT)).digest

    async def configure(self, sandbox: str, selection: Selection, *, decided: bool) -> str:
        """Give a sandbox's gateway another policy; returns the digest of the one that is in force then.

        It is compiled by hostd, under the operator's document as it is at that moment.

        Args:
            decided: it is to be in force whatever happens: a gateway that is replaced meanwhile begins with it. Else
                a gateway that does not confirm it keeps, or is replaced with, what it had.
        """
        return (await self.ask(hostd.Configure(sandbox, selection.to_text(), decided))).digest

    async def policy(self, sandbox: str) -> str:
        """The digest of the policy that a sandbox's worker has confirmed, or empty."""
        return (await self.ask(hostd.Inspect(sandbox))).state.policy

    async def remove(self, sandbox: str) -> tuple[str, ...]:
        """Remove a sandbox; returns what is left of it, which should be nothing. Unknown ones are no error."""
        return (await self.ask(hostd.Remove(sandbox), LAUNCH_TIMEOUT)).residue

    async def states(self) -> tuple[hostd.HostSandboxState, ...]:
        """The states of all sandboxes that hostd knows."""
        return (await self.ask(hostd.List())).sandboxes


class Vaultd(Daemon):
    """The daemon that holds the secrets."""

    name = "vaultd"

    async def open_sandbox(self, sandbox: str, lineage: str, grants: Sequence[Grant], names: Sequence[str]) -> str:
        """Register a sandbox, whose gateway may sign for `names`; returns the root its programs are to trust (PEM)."""
        return (await self.ask(vaultd.OpenSandbox(sandbox, lineage, _forms(grants), names=tuple(names)))).root_pem

    async def regrant(
        self,
        sandbox: str,
        grants: Sequence[Grant],
        names: Sequence[str],
        inline: Mapping[str, str] | None = None,
        keep: Sequence[str] = (),
        bounds: Sequence[Grant] | None = None,
    ) -> None:
        """Replace the grants of a sandbox.

        Args:
            names: what its gateway's next authority may sign for.
            inline: if not None: these inline values, and of the former ones only those named in `keep`, are the
                sandbox's from now on. With None all former ones stay.
            bounds: where inline values may be granted. A value in `inline` gets these places, another one keeps those
                of them that it had; with None all of those that it had.
        """
        values = None if inline is None else {name: vaultd.Value(text) for name, text in inline.items()}
        kept = tuple(keep) if keep and inline is not None else None
        await self.ask(vaultd.Regrant(sandbox, _forms(grants), values, kept, _bounds(bounds), tuple(names)))

    async def narrow(
        self, sandbox: str, grants: Sequence[Grant], keep: Sequence[str] | None, bounds: Sequence[Grant] | None
    ) -> None:
        """Take away every grant that is not in `grants`, every inline value that is not in `keep` (None: none) and
        every place of inline values that is not in `bounds` (None: none).
        """
        kept = None if keep is None else tuple(keep)
        await self.ask(vaultd.Narrow(sandbox, _forms(grants), kept, _bounds(bounds)))

    async def close_sandbox(self, sandbox: str) -> None:
        """Forget everything of a sandbox; unknown ones are no error."""
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
        """Have a record of the control plane accepted.

        Raises:
            Unreachable, wire.RemoteError: it was not accepted; what it is about must then not happen.
        """
        await self.ask(Record(entry(record(kind, decision, sandbox=sandbox, **fields))))
