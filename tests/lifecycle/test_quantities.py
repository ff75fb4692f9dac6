"""Resource limits: requested and resulting values, and refusals."""

import pytest

from lifecycle.api.errors import ApiError
from lifecycle.sandboxes.quantities import Resources, resolve

GIB = 1 << 30
DEFAULTS = Resources(1_000_000_000, GIB, 256, 2 * GIB)
MAXIMA = Resources(4_000_000_000, 4 * GIB, 4096, 8 * GIB)


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ({}, 2 * GIB),
        ({"disk": "4Gi"}, 4 * GIB),
        ({"ephemeral-storage": "1Gi"}, GIB),
        ({"disk": "4Gi", "ephemeral-storage": "1Gi"}, GIB),
    ],
)
def test_a_disk_is_as_large_as_asked_for(asked: dict[str, str], given: int) -> None:
    assert given == resolve(asked, DEFAULTS, MAXIMA).disk_bytes


@pytest.mark.parametrize("size", ["9Gi", "63Mi", "0", "-1", "unlimited", ""])
@pytest.mark.parametrize("key", ["disk", "ephemeral-storage"])
def test_a_disk_that_cannot_be_is_refused(key: str, size: str) -> None:
    with pytest.raises(ApiError):
        resolve({key: size}, DEFAULTS, MAXIMA)


def test_without_disk_limits_a_request_for_one_is_refused() -> None:
    defaults, maxima = Resources(1, GIB, 1, None), Resources(1, GIB, 1, None)
    assert None is resolve({}, defaults, maxima).disk_bytes
    with pytest.raises(ApiError):
        resolve({"disk": "1Gi"}, defaults, maxima)
