"""Fixtures of the control plane's tests: a running server with stand-ins (see standins.py)."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from backends import _backend, _cluster, _template, pytest_generate_tests
from places import Place, running
from standins import World, world

__all__ = ["_backend", "_cluster", "_template", "pytest_generate_tests"]


@pytest.fixture
async def server() -> AsyncIterator[World]:
    """Run a server that requires an API key."""
    async with world() as described, described.serving() as running:
        yield running


@pytest.fixture
async def place(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    """Run a server without a port. Tests can kill it and start it again."""
    async with running(monkeypatch.setattr) as there:
        yield there
