"""The errors of requests between processes: a closed set of codes, one for each fault.

Programs use the code; the message is a sentence for people. Neither contains a secret.
"""

from enum import StrEnum


class Code(StrEnum):
    """The fault: of the request, of the present state, or of the process that handles it."""

    # the request
    INVALID = "invalid"  # a parameter is missing, unknown, of another type or out of its bounds
    UNKNOWN_OP = "unknown_op"
    FORBIDDEN = "forbidden"
    TOO_LARGE = "too_large"

    # the object of the request
    UNKNOWN_SANDBOX = "unknown_sandbox"
    UNKNOWN_IMAGE = "unknown_image"
    UNKNOWN_SECRET = "unknown_secret"  # noqa: S105 - a code
    UNKNOWN_VOLUME = "unknown_volume"
    EXISTS = "exists"
    NOT_BOUND = "not_bound"  # the secret may not be used there
    NOT_GRANTED = "not_granted"  # the sandbox may not have the secret
    EXPIRED = "expired"
    EXHAUSTED = "exhausted"  # the secret was used as often as its limits allow
    STALE_GENERATION = "stale_generation"
    DAMAGED = "damaged"  # what is stored cannot be read
    PATH_FORBIDDEN = "path_forbidden"  # the operator does not allow this path of the host
    PATH_MISSING = "path_missing"
    PATH_KIND = "path_kind"  # it is neither a directory nor a plain file
    SUB_PATH = "sub_path"  # a path below a volume is a link, leaves the volume, or is not usable
    VOLUME_SIZE = "volume_size"

    # the present state
    BUSY = "busy"
    NOT_RUNNING = "not_running"  # no process of the sandbox is left
    FULL = "full"
    RATE_LIMITED = "rate_limited"
    FROZEN = "frozen"  # the operator has stopped the use of the secret
    BACKEND = "backend"  # a backend of secrets gives no value now
    UNAVAILABLE = "unavailable"  # a part that the request needs does not answer
    AUDIT_UNAVAILABLE = "audit_unavailable"
    RESIDUE = "residue"  # a removed object still has parts

    # the failed step
    DOCKER = "docker"
    IMAGE = "image"  # the image cannot be used
    DISK = "disk"
    PATH = "path"  # a directory of the host cannot be made or mounted
    VOLUME = "volume"  # a named volume cannot be made, mounted or removed
    NETWORK = "network"
    GATEWAY = "gateway"
    HOST = "host"
    STORAGE = "storage"
    MASTER_KEY = "master_key"
    TIMEOUT = "timeout"
    INTERNAL = "internal"
    MALFORMED = "malformed"  # the answer has a code that is not in this list


class ConfigError(ValueError):
    """A configuration is invalid. The message names the file or the key, and never contains a value."""


class RequestError(Exception):
    """A request cannot be fulfilled. The peer gets the code and the message, which contains no secret."""

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
