"""A fixture with one compromised server for the tests of a module."""

from collections.abc import Iterator

import pytest

from demo.sandboxes import Secrets
from tests.conftest import ON_RUNC
from tests.security.compromise.stack import CompromisedStack
from tests.stacks import beside, put_secrets


@pytest.fixture(params=ON_RUNC, name="runtime")
def _runtime(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module", name="compromised")
def _compromised(values: Secrets) -> Iterator[CompromisedStack]:
    with beside(CompromisedStack, "compromised") as stack:
        assert isinstance(stack, CompromisedStack)
        put_secrets(stack, values)
        yield stack
