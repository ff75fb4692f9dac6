"""The errors of the lifecycle API: `{"code", "message"}` with a status and possibly headers.

- One code per situation. The `DOCKER::` names are kept because existing programs compare them.
- A message never contains a secret, a header value or a URL's query. Only the one about a failed start contains output
  of the sandbox, which its caller gets and nothing keeps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

UNKNOWN_ERROR = "GENERAL::UNKNOWN_ERROR"
INVALID_PARAMETER = "SANDBOX::INVALID_PARAMETER"
INVALID_METADATA = "SANDBOX::INVALID_METADATA_LABEL"
NOT_SUPPORTED = "SANDBOX::API_NOT_SUPPORTED"
NOT_FOUND = "DOCKER::SANDBOX_NOT_FOUND"


@dataclass(eq=False)
class ApiError(Exception):
    """An answer other than success. `stored` is the message for the state database, if it must not have all of it."""

    status: int
    code: str
    message: str
    headers: Mapping[str, str] = field(default_factory=dict)
    detail: list[dict[str, Any]] | None = None
    stored: str | None = None

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}"

    def body(self) -> dict[str, Any]:
        """Return the JSON body."""
        body: dict[str, Any] = {"code": self.code, "message": self.message}
        if self.detail is not None:
            body["detail"] = self.detail
        return body


def invalid(message: str) -> ApiError:
    """Return the error for a well-formed request with invalid content."""
    return ApiError(400, INVALID_PARAMETER, message)


def schema(message: str, location: tuple[str | int, ...] = ("body",), kind: str = "value_error") -> ApiError:
    """Return the error for a malformed request: 422 in FastAPI's shape, with code and message added."""
    return ApiError(422, INVALID_PARAMETER, message, detail=[{"loc": list(location), "msg": message, "type": kind}])


def unknown_sandbox(sandbox: str) -> ApiError:
    """Return the error for a sandbox that does not exist, or no longer exists."""
    return ApiError(404, NOT_FOUND, f"Sandbox {sandbox[:80]} not found.")


def busy(message: str, seconds: int = 1) -> ApiError:
    """Return the error for a reached limit; the caller can retry later."""
    return ApiError(429, "SANDBOX::TOO_MANY_REQUESTS", message, {"Retry-After": str(seconds)})


def unavailable(code: str, message: str) -> ApiError:
    """Return the error for a required daemon that does not answer."""
    return ApiError(503, code, message, {"Retry-After": "1"})


def no_database() -> ApiError:
    """Return the error for a state database that does not answer, or refuses a write."""
    return unavailable("DATABASE::UNAVAILABLE", "The state database does not answer.")
