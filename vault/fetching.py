"""vaultd's client of the fetcher, which speaks to the backends of secrets.

- A call connects if there is no connection, and compares the uid of the fetcher with the configured one.
- Each call ends within `FETCH_SECONDS`, which is less than a worker waits for its release.
- Without a fetcher every call fails with a reason. A failure never has a value.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import wire
from vault.stores.port import StoreError
from wire.api import fetcher
from wire.api.fetcher import BackendState, Fault, Problem, Reading
from wire.operations import Request
from wire.serving import Handler, handler

FETCH_SECONDS = 8.0
_CODES = {
    Fault.MISSING: wire.Code.UNKNOWN_SECRET,
    Fault.UNCONFIGURED: wire.Code.FORBIDDEN,
    Fault.DENIED: wire.Code.FORBIDDEN,
}
"""Of definite faults. A worker refuses only requests that would carry the secret; after others it refuses its hosts."""


_NONE = Problem(Fault.UNCONFIGURED, "the operator has configured no backend of secrets")


class BackendError(StoreError):
    """A backend gave no value."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(f"{problem.fault}: {problem.reason}")
        self.problem = problem
        self.code = _CODES.get(problem.fault, wire.Code.BACKEND)


class FetcherPort(Protocol):
    """The part of the fetcher that vaultd uses. Each call raises BackendError."""

    async def fetch(self, reference: str, sandbox: str) -> Reading:
        """Read a reference."""
        ...

    async def probe(self, reference: str) -> None:
        """Say whether there is such a secret, without making one."""
        ...

    async def release(self, reference: str, sandbox: str) -> None:
        """Tell that a sandbox no longer uses a value that was made for it."""
        ...

    async def examine(self) -> tuple[BackendState, ...]:
        """Return the state of each backend."""
        ...

    async def close(self) -> None:
        """End the connection."""
        ...


class NoFetcher:
    """No backend is configured."""

    async def fetch(self, reference: str, sandbox: str) -> Reading:
        """See `FetcherPort`."""
        raise BackendError(_NONE)

    async def probe(self, reference: str) -> None:
        """See `FetcherPort`."""
        raise BackendError(_NONE)

    async def release(self, reference: str, sandbox: str) -> None:
        """See `FetcherPort`."""

    async def examine(self) -> tuple[BackendState, ...]:
        """See `FetcherPort`."""
        return ()

    async def close(self) -> None:
        """See `FetcherPort`."""


@dataclass(frozen=True, slots=True)
class FetcherPlace:
    """The socket of the fetcher, and the uid of the process that serves it."""

    socket: Path
    uid: int


class FetcherClient:
    """See `FetcherPort`. `keeping` answers what the fetcher asks on the connection (`wire.api.fetcher.KEEPING`)."""

    def __init__(self, place: FetcherPlace, keeping: Handler[Any], seconds: float = FETCH_SECONDS) -> None:
        self._place = place
        self._handler = handler(fetcher.KEEPING, keeping)
        self._seconds = seconds
        self._client: wire.Client | None = None
        self._connecting = asyncio.Lock()

    async def fetch(self, reference: str, sandbox: str) -> Reading:
        """See `FetcherPort`."""
        answer = await self._ask(fetcher.Fetch(reference, sandbox))
        if answer.problem is not None:
            raise BackendError(answer.problem)
        assert answer.reading is not None  # noqa: S101 - for mypy: the type allows one of both only
        return answer.reading

    async def probe(self, reference: str) -> None:
        """See `FetcherPort`."""
        if (problem := (await self._ask(fetcher.Probe(reference))).problem) is not None:
            raise BackendError(problem)

    async def release(self, reference: str, sandbox: str) -> None:
        """See `FetcherPort`."""
        await self._ask(fetcher.Release(reference, sandbox))

    async def examine(self) -> tuple[BackendState, ...]:
        """See `FetcherPort`."""
        return (await self._ask(fetcher.Examine())).backends

    async def close(self) -> None:
        """End the connection."""
        if self._client is not None:
            await self._client.close()

    async def _ask[Answer](self, request: Request[Answer]) -> Answer:
        try:
            async with asyncio.timeout(self._seconds):
                client = await self._connected()
                return await client.ask(request, timeout=None)
        except TimeoutError:
            raise BackendError(Problem(Fault.TIMEOUT, "the backend did not answer in time")) from None
        except wire.RemoteError as error:
            fault = Fault.BUSY if error.code is wire.Code.BUSY else Fault.FAILED
            raise BackendError(Problem(fault, f"the fetcher refuses: {error.code}")) from None
        except (OSError, wire.FrameError):
            raise BackendError(Problem(Fault.UNREACHABLE, "the fetcher is down; hostd starts it again")) from None

    async def _connected(self) -> wire.Client:
        async with self._connecting:
            if self._client is None or self._client.closed.is_set():
                self._client = await wire.Client.connect(self._place.socket, self._place.uid, self._handler)
            return self._client
