"""The limits of one sandbox's gateway: names, defaults and bounds. The operator changes them by name.

A worker enforces all of them except `connection_rate`. hostd derives the kernel's limits from them, so that the
kernel refuses nothing that a worker permits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Limits of one gateway. Times in seconds, sizes in bytes, rates per second; a burst is twice its rate.

    Attributes:
        connections: redirected TCP connections at once.
        connection_rate: new TCP connections of the sandbox. The kernel drops those beyond it.
        first_bytes: until the ClientHello or request head must be complete.
        connect: for one upstream address; at most two seconds while another one is left.
        dial_rate: upstream connections, refilled evenly. A worker lets those beyond it wait.
        idle: of a flow, without a byte in either direction.
        total: of a spliced flow.
        scrub_body_bytes: largest response body that is searched for secrets.
        request_body_bytes: largest request body into which a secret is put, or that is signed. All of a sandbox: four
            times as much.
    """

    connections: int = 512
    connection_rate: int = 200
    first_bytes: int = 10
    connect: int = 5
    dial_rate: int = 50
    idle: int = 900
    total: int = 86400
    scrub_body_bytes: int = 8 * 1024 * 1024
    request_body_bytes: int = 8 * 1024 * 1024

    @classmethod
    def of(cls, given: Mapping[str, int]) -> "GatewayLimits":
        """Return the defaults with the changes of `given`.

        Raises:
            ConfigError: a name is unknown, or a number is out of its bounds.
        """
        if unknown := set(given) - set(MOST):
            raise ConfigError(f"unknown limit {min(unknown)[:64]!r}")
        for name, number in given.items():
            if not 1 <= number <= MOST[name]:
                raise ConfigError(f"{name} is not a number from 1 to {MOST[name]}")
        return cls(**given)


_CEILINGS: Final = GatewayLimits(
    connections=4096,
    connection_rate=10000,
    first_bytes=10,
    connect=30,
    dial_rate=10000,
    idle=86400,
    total=30 * 86400,
    scrub_body_bytes=1 << 30,
    request_body_bytes=1 << 28,
)
MOST: Final[Mapping[str, int]] = {item.name: getattr(_CEILINGS, item.name) for item in fields(GatewayLimits)}
"""The largest value of each limit; the smallest is 1."""


def described() -> str:
    """Return name, bounds and default of each limit, as a text for documents."""
    standard = GatewayLimits()
    return ", ".join(f"`{name}` from 1 to {most} ({getattr(standard, name)})" for name, most in MOST.items())
