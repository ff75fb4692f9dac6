"""Cancel keys: the gateway gives each client a key of its own, and knows the server's key behind it.

- A key is random and belongs to one live session. It is forgotten at the session's end. So the table has at most as
  many keys as the engine has flows.
- A cancel request goes only to the host and port of that session. A key that is not in the table leads nowhere.

The table belongs to one worker, so a key of another sandbox is never in it.
"""

import secrets
from dataclasses import dataclass

LENGTH = 8
"""The length of a key of the gateway: what protocol 3.0 has."""


@dataclass(frozen=True, slots=True)
class Cancellable:
    """A live session: where it goes, and the server's key for it."""

    host: str
    port: int
    server_key: bytes


class CancelKeys:
    """The keys of the live sessions of one worker."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, Cancellable] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def issue(self, session: Cancellable) -> bytes:
        """Return a new key for a session."""
        while True:
            # The first part is a process id: clients print it as a positive number.
            key = (1 + secrets.randbelow((1 << 31) - 1)).to_bytes(4) + secrets.token_bytes(LENGTH - 4)
            if key not in self._sessions:
                self._sessions[key] = session
                return key

    def find(self, key: bytes) -> Cancellable | None:
        """Return the live session of a key, None if there is none."""
        return self._sessions.get(key)

    def forget(self, key: bytes) -> None:
        """Forget a key. Repeated calls are permitted."""
        self._sessions.pop(key, None)
