"""Times as the API shows them. Pure."""

from datetime import UTC, datetime


def timestamp(seconds: float) -> str:
    """Render a time as RFC 3339 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
