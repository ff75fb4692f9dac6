"""hostd passes the references of the operator's file on to vaultd: after each change, until it is done."""

import asyncio
from collections.abc import Iterator

import pytest

import wire
from runtimes import references
from runtimes.references import ReferenceFollower
from wire.api import compiler, vaultd
from wire.api.vaultd import GrantForm

USE = GrantForm("env://TOKEN", "a.example.org", 443, "https")


class Clients:
    """A replacement for `runtimes.daemons.Daemons`: `answers` are what the compiler says, `failures` of vaultd."""

    def __init__(self) -> None:
        self.uses: tuple[GrantForm, ...] | Exception = (USE,)
        self.failures: list[Exception] = []
        self.passed: list[tuple[GrantForm, ...]] = []

    async def reachable(self, name: str) -> None:
        assert name in ("compiler", "vaultd")

    def client(self, name: str) -> "Clients":
        return self

    async def ask(self, request: object, timeout: float) -> compiler.Referenced | None:
        match request:
            case compiler.References():
                if isinstance(self.uses, Exception):
                    raise self.uses
                return compiler.Referenced(self.uses)
            case vaultd.Refer():
                if self.failures:
                    raise self.failures.pop()
                self.passed.append(request.uses)
        return None


@pytest.fixture(name="clients")
def _clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clients]:
    monkeypatch.setattr(references, "_AGAIN_SECONDS", 0.01)
    yield Clients()


async def passed(clients: Clients, follower: ReferenceFollower) -> list[tuple[GrantForm, ...]]:
    task = follower._task
    assert task is not None
    await asyncio.wait_for(task, 5)
    return clients.passed


async def test_vaultd_gets_the_list_again_after_each_change(clients: Clients) -> None:
    follower = ReferenceFollower(clients)  # type: ignore[arg-type]
    follower.changed()
    assert [(USE,)] == await passed(clients, follower)
    clients.uses = ()
    follower.changed()
    assert [(USE,), ()] == await passed(clients, follower)
    await follower.close()


@pytest.mark.parametrize(
    "failure", [ConnectionError(), TimeoutError(), wire.RemoteError(wire.Code.AUDIT_UNAVAILABLE, "x")], ids=repr
)
async def test_a_list_that_vaultd_did_not_take_is_passed_again(clients: Clients, failure: Exception) -> None:
    clients.failures = [failure, failure]
    follower = ReferenceFollower(clients)  # type: ignore[arg-type]
    follower.changed()
    assert [(USE,)] == await passed(clients, follower)
    assert [] == clients.failures


async def test_if_the_compiler_refuses_no_reference_is_in_force(clients: Clients) -> None:
    follower = ReferenceFollower(clients)  # type: ignore[arg-type]
    clients.uses = wire.RemoteError(wire.Code.TOO_LARGE, "too many")
    follower.changed()
    assert [()] == await passed(clients, follower)


async def test_changes_during_a_pass_are_one_more_pass(clients: Clients) -> None:
    follower = ReferenceFollower(clients)  # type: ignore[arg-type]
    for _ in range(5):
        follower.changed()
    assert [(USE,)] == await passed(clients, follower)
