"""What a server makes once and keeps in its state directory: the key of the sandboxes' tokens, a key of signed routes,
and its identity.
"""

import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path

_IDENTITY = re.compile(r"srv-[0-9a-f]{24}")


def token_key(directory: Path) -> bytes:
    """Return the key from which the sandboxes' tokens are derived. It is created at the first start."""
    return _lasting(directory / "token-key", lambda: secrets.token_bytes(32))


def route_key(directory: Path) -> bytes:
    """Return the server's own key of signed routes. It is created at the first start without configured keys."""
    return _lasting(directory / "route-key", lambda: secrets.token_bytes(32))


def identity(directory: Path) -> str:
    """Return the identity of the server, which its rows in a shared database have. It is created at the first start.

    Raises:
        ValueError: the file contains something else.
    """
    path = directory / "server-id"
    text = _lasting(path, lambda: f"srv-{secrets.token_hex(12)}\n".encode()).decode("ascii", "replace").strip()
    if not _IDENTITY.fullmatch(text):
        raise ValueError(f"{path}: not the identity of a server; put back a copy of the file")
    return text


def _lasting(path: Path, make: Callable[[], bytes]) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        temporary = path.with_name(f"{path.name}.new")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(make())
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        return path.read_bytes()
