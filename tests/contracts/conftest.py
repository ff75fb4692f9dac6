"""Fixtures of the contracts' tests: a server with stand-ins (see standins.py), and a sandbox on each runtime."""

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import ON_RUNC

sys.path.append(str(Path(__file__).parent.parent / "lifecycle"))

from backends import _backend, _cluster, _template, pytest_generate_tests
from standins import World, world

__all__ = ["_backend", "_cluster", "_template", "pytest_generate_tests"]

if TYPE_CHECKING:
    from opensandbox.sync.sandbox import SandboxSync

    from testbed.stack import Stack


@pytest.fixture
async def server() -> AsyncIterator[World]:
    """Run a server that requires an API key."""
    async with world() as described, described.serving() as running:
        yield running


@pytest.fixture(scope="module", params=ON_RUNC, name="sandbox")
def _sandbox(request: pytest.FixtureRequest, stack: "Stack") -> "Iterator[SandboxSync]":
    sandbox = stack.create(request.param)
    try:
        yield sandbox
    finally:
        sandbox.kill()
        sandbox.close()
