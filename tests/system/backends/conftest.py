"""The server with each backend and a real HashiCorp Vault. It ends with the last test here."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.system.backends.world import Setup


@pytest.fixture(scope="package", name="setup")
def _setup() -> "Iterator[Setup]":
    from tests.system.backends.world import backed

    with backed() as made:
        yield made
