"""User metadata: validation of keys and values, patches, and the filter of the list call."""

import re
from collections.abc import Mapping
from urllib.parse import unquote_plus

from lifecycle.api.errors import INVALID_METADATA, ApiError

RESERVED_PREFIX = "opensandbox.io/"
MAX_LABELS = 64
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)
_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*", re.ASCII)


def check(metadata: Mapping[str, str], *, reserved_code: str = INVALID_METADATA) -> None:
    """Refuse the reserved prefix, and keys and values outside the alphabet of labels.

    Raises:
        ApiError: 400, with the name of the key.
    """
    if len(metadata) > MAX_LABELS:
        raise ApiError(400, INVALID_METADATA, f"metadata: at most {MAX_LABELS} keys.")
    for key, value in metadata.items():
        prefix, slash, name = key.rpartition("/")
        if key.startswith(RESERVED_PREFIX):
            raise ApiError(
                400, reserved_code, f"metadata key {key[:80]!r}: the prefix {RESERVED_PREFIX!r} is reserved."
            )
        if not _NAME.fullmatch(name) or (slash and (len(prefix) > 253 or not _PREFIX.fullmatch(prefix))):
            raise ApiError(400, INVALID_METADATA, f"metadata key {key[:80]!r} is not a valid label key.")
        if value and not _NAME.fullmatch(value):
            raise ApiError(400, INVALID_METADATA, f"metadata value of {key[:80]!r} is not a valid label value.")


def patched(metadata: Mapping[str, str], patch: Mapping[str, str | None]) -> dict[str, str]:
    """Apply a flat JSON merge patch.

    Raises:
        ApiError: 400 for an invalid key or value.
    """
    check({key: value or "" for key, value in patch.items()}, reserved_code="INVALID_METADATA_LABEL")
    merged = dict(metadata)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = value
    if len(merged) > MAX_LABELS:
        raise ApiError(400, INVALID_METADATA, f"metadata: at most {MAX_LABELS} keys.")
    return merged


def parse_filter(text: str) -> dict[str, str]:
    """Parse the `metadata` parameter (already decoded once): a query string whose parts are decoded a second time.

    Raises:
        ApiError: 400 `INVALID_METADATA_FORMAT` for a segment without `=`, without a key, or with an invalid escape, and
            for more segments than the limit of labels.
    """
    if text.count("&") >= MAX_LABELS:
        raise ApiError(400, "INVALID_METADATA_FORMAT", f"metadata: at most {MAX_LABELS} pairs.")
    wanted: dict[str, str] = {}
    for segment in text.split("&"):
        if not segment and not text:
            continue
        key, equals, value = segment.partition("=")
        if not equals or not key or re.search(r"%(?![0-9A-Fa-f]{2})", segment):
            raise ApiError(400, "INVALID_METADATA_FORMAT", "metadata: expected key=value pairs joined by '&'.")
        wanted[unquote_plus(key)] = unquote_plus(value)
    return wanted
