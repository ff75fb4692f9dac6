"""One server with each backend and a real HashiCorp Vault, for the modules that test with it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.system.backed import Setup


@pytest.fixture(scope="session", name="setup")
def _setup() -> "Iterator[Setup]":
    from tests.system.backed import backed

    with backed() as made:
        yield made
