"""Request bodies that an engine collects before it sends them: each has a limit, and all of a sandbox together.

The bytes of a body count until it is released: when it was handed on, or its request has ended.
"""

from gateway.engines.port import EngineLimits

_BODIES = 4
"""How many bodies of the largest size one sandbox can have at once."""


class BodyRefused(Exception):
    """A body is too large (413), or larger than what is left for the sandbox (503)."""

    def __init__(self, status: int) -> None:
        super().__init__(str(status))
        self.status = status


class Bodies:
    """The bodies of one sandbox. `limits` can be replaced."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.held = 0
        """The bytes of all bodies."""

    def collect(self) -> "Collected":
        """Return a new body, which is empty."""
        return Collected(self)


class Collected:
    """One body. Its repr shows no content."""

    __slots__ = ("_bodies", "_count", "_parts")

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._parts: list[bytes] = []
        self._count = 0

    def count(self, size: int) -> None:
        """Count bytes that the caller keeps.

        Raises:
            BodyRefused: they are above a limit. Nothing counts any more.
        """
        limit = self._bodies.limits.request_body_bytes
        self._count += size
        self._bodies.held += size
        if self._count > limit or self._bodies.held > _BODIES * limit:
            status = 413 if self._count > limit else 503
            self.release()
            raise BodyRefused(status)

    def add(self, data: bytes) -> None:
        """Take bytes of the body.

        Raises:
            BodyRefused: see `count`.
        """
        self.count(len(data))
        self._parts.append(data)

    def whole(self) -> bytes:
        """Return the body. It still counts."""
        whole = b"".join(self._parts)
        self._parts = [whole]
        return whole

    def release(self) -> None:
        """Forget the body."""
        self._bodies.held -= self._count
        self._count = 0
        self._parts.clear()

    def __repr__(self) -> str:
        return f"Collected({self._count} bytes)"
