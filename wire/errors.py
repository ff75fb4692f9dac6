"""Why one process refuses another's request: a closed set of codes, one for each fault.

A code is for programs, the message is a sentence for people. Neither holds a secret.
"""

from enum import StrEnum


class Code(StrEnum):
    """The fault of a request, of the state that it met, or of the process that was asked."""

    # the request
    INVALID = "invalid"  # it is not one: a parameter is missing, unknown, of another type or out of its bounds
    UNKNOWN_OP = "unknown_op"
    FORBIDDEN = "forbidden"
    TOO_LARGE = "too_large"

    # what it names
    UNKNOWN_SANDBOX = "unknown_sandbox"
    UNKNOWN_IMAGE = "unknown_image"
    UNKNOWN_SECRET = "unknown_secret"  # noqa: S105 - a code
    EXISTS = "exists"
    NOT_BOUND = "not_bound"  # the secret may not be used there
    NOT_GRANTED = "not_granted"  # the sandbox may not have the secret
    EXPIRED = "expired"
    STALE_GENERATION = "stale_generation"
    DAMAGED = "damaged"  # what is stored cannot be read

    # the state that it met
    BUSY = "busy"
    FULL = "full"
    RATE_LIMITED = "rate_limited"
    UNAVAILABLE = "unavailable"  # what the request needs does not answer
    AUDIT_UNAVAILABLE = "audit_unavailable"
    RESIDUE = "residue"  # something is left of what was removed

    # the step that failed
    DOCKER = "docker"
    IMAGE = "image"  # it cannot be used
    DISK = "disk"
    NETWORK = "network"
    GATEWAY = "gateway"
    HOST = "host"
    STORAGE = "storage"
    MASTER_KEY = "master_key"
    TIMEOUT = "timeout"
    INTERNAL = "internal"
    MALFORMED = "malformed"  # the answer itself: its code is not in this list


class RequestError(Exception):
    """A request that cannot be fulfilled: the code and the sentence that the peer gets, without secrets."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class RemoteError(Exception):
    """The peer refused a request."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
