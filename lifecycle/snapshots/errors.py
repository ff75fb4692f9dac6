"""The errors of the snapshot calls, with the codes of the contract."""

from lifecycle.api.errors import ApiError


def unknown_snapshot(snapshot: str) -> ApiError:
    """Return the error for a snapshot that does not exist."""
    return ApiError(404, "SNAPSHOT::NOT_FOUND", f"Snapshot {snapshot[:80]} not found.")


def conflict(code: str, message: str) -> ApiError:
    """Return the error for a call that the present state does not permit."""
    return ApiError(409, f"SNAPSHOT::{code}", message)


def no_artifact(snapshot: str) -> ApiError:
    """Return the error for a restore of a snapshot whose content is not there."""
    return conflict("INVALID_RESTORE_CONFIG", f"The content of snapshot {snapshot[:80]} is gone from this host.")
