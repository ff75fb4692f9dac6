"""Wrong credentials are counted and delayed on every route, and a right one does not avoid the delay."""

import ast
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from standins import IMAGE, KEY, World, world
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

import lifecycle
from lifecycle.api.auth import Refusals

BODY = {"image": {"uri": IMAGE}, "entrypoint": ["sleep", "1"], "resourceLimits": {}, "networkPolicy": {}}
BURST = 20

type Get = Callable[[str, dict[str, str]], Awaitable[int]]


@dataclass
class Way:
    """A route that checks a credential: a path below a sandbox or the API, and the header of the credential."""

    path: str
    header: str
    right: Callable[[World, str], str]
    secured: bool = False
    websocket: bool = False


def _key(_: World, __: str) -> str:
    return KEY


WAYS = {
    "a key at the API": Way("/v1/sandboxes", "OPEN-SANDBOX-API-KEY", _key),
    "a key at a policy route": Way("/v1/sandboxes/{id}/networkpolicy", "OPEN-SANDBOX-API-KEY", _key),
    "a key at an unknown route": Way("/v1/other", "OPEN-SANDBOX-API-KEY", _key),
    "a key at the egress API": Way("/v1/sandboxes/{id}/proxy/18080/policy", "OPEN-SANDBOX-API-KEY", _key),
    "a key as the egress token": Way("/v1/sandboxes/{id}/proxy/18080/policy", "OPENSANDBOX-EGRESS-AUTH", _key),
    "a key at the vault": Way("/sandboxes/{id}/proxy/18080/credential-vault", "OPEN-SANDBOX-API-KEY", _key),
    "an egress token": Way(
        "/v1/sandboxes/{id}/proxy/18080/policy",
        "OPENSANDBOX-EGRESS-AUTH",
        lambda server, name: server.tokens.egress(name),
    ),
    "execd's token": Way(
        "/v1/sandboxes/{id}/proxy/44772/ping",
        "X-EXECD-ACCESS-TOKEN",
        lambda server, name: server.tokens.execd(name),
    ),
    "a secure-access token": Way(
        "/v1/sandboxes/{id}/proxy/8000/x",
        "OpenSandbox-Secure-Access",
        lambda server, name: server.tokens.secure(name),
        secured=True,
    ),
    "a secure-access token of a WebSocket": Way(
        "/v1/sandboxes/{id}/proxy/8000/ws",
        "OpenSandbox-Secure-Access",
        lambda server, name: server.tokens.secure(name),
        secured=True,
        websocket=True,
    ),
    "execd's token of a WebSocket": Way(
        "/v1/sandboxes/{id}/proxy/44772/ws",
        "X-EXECD-ACCESS-TOKEN",
        lambda server, name: server.tokens.execd(name),
        websocket=True,
    ),
}


@dataclass
class Clock:
    """A clock that a test sets."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def timed() -> AsyncIterator[tuple[World, Clock]]:
    """Run a server that counts refusals by a clock of the test."""
    async with world() as described, described.serving() as server:
        assert server.server is not None
        clock = Clock()
        object.__setattr__(server.server.edge, "refusals", Refusals(BURST, 0.5, clock))
        yield server, clock


async def ask(server: World, client: httpx.AsyncClient, way: Way, path: str, credential: str) -> int:
    """Send a request by one route. Return the status; for a WebSocket the close code, or 101."""
    if not way.websocket:
        answer = await client.get(path, headers={way.header: credential})
        assert (answer.status_code == 429) == ("retry-after" in answer.headers)
        assert answer.status_code != 429 or 1 <= int(answer.headers["retry-after"]) <= 60
        return answer.status_code
    async with connect(f"ws://{server.domain}{path}", additional_headers={way.header: credential}, proxy=None) as ws:
        try:
            await ws.send("hello")
            await ws.recv()
        except ConnectionClosed as closed:
            assert closed.rcvd is not None
            return closed.rcvd.code
    return 101


@pytest.mark.parametrize("name", WAYS)
async def test_guesses_are_counted_on_every_way_in(timed: tuple[World, Clock], name: str) -> None:
    """After a burst the answers to right and wrong credentials are the same.

    After the wait the right one is accepted.
    """
    server, clock = timed
    way = WAYS[name]
    async with server.client() as owner, server.client(None) as client:
        made = (await owner.post("/v1/sandboxes", json={**BODY, "secureAccess": way.secured})).json()["id"]
        path = way.path.format(id=made)
        right, wait = way.right(server, made), 1013 if way.websocket else 429
        welcome = await ask(server, client, way, path, right)
        answers = [await ask(server, client, way, path, f"wrong-{number}") for number in range(BURST + 5)]
        assert wait not in answers[: BURST // 2]
        assert {wait} == set(answers[BURST:])
        assert wait == await ask(server, client, way, path, right)
        clock.now += 2.0
        assert welcome == await ask(server, client, way, path, right)
        clock.now += BURST / 0.5
        assert wait not in [await ask(server, client, way, path, f"again-{number}") for number in range(BURST // 2)]


async def test_ways_to_one_credential_share_their_count(timed: tuple[World, Clock]) -> None:
    """A client cannot use a burst of guesses of one key at each of several routes."""
    server, _ = timed
    keys = [way for name, way in WAYS.items() if name.startswith("a key")]
    async with server.client() as owner, server.client(None) as client:
        made = (await owner.post("/v1/sandboxes", json=BODY)).json()["id"]
        answers = [
            await ask(
                server, client, keys[number % len(keys)], keys[number % len(keys)].path.format(id=made), f"{number}"
            )
            for number in range(BURST + 5)
        ]
    assert {429} == set(answers[BURST:])


async def test_guesses_at_one_thing_do_not_shut_the_address_out_of_others(timed: tuple[World, Clock]) -> None:
    """Many clients can share an address. Those with tokens of their sandboxes continue while API keys are guessed."""
    server, _ = timed
    async with server.client() as owner, server.client(None) as client:
        made, other = [(await owner.post("/v1/sandboxes", json=BODY)).json()["id"] for _ in range(2)]
        egress = WAYS["an egress token"]
        wrong = [await ask(server, client, WAYS["a key at the API"], "/v1/sandboxes", f"{n}") for n in range(BURST + 1)]
        assert 429 == wrong[-1]
        for name in ("an egress token", "execd's token"):
            way = WAYS[name]
            assert 200 == await ask(server, client, way, way.path.format(id=made), way.right(server, made))
        with_both = {"OPEN-SANDBOX-API-KEY": "wrong", egress.header: server.tokens.egress(made)}
        assert 200 == (await client.get(egress.path.format(id=made), headers=with_both)).status_code
        assert 429 == await ask(server, client, egress, egress.path.format(id=made), "wrong")
        assert 200 == await ask(server, client, egress, egress.path.format(id=other), server.tokens.egress(other))
        assert 200 == (await client.get(f"/v1/sandboxes/{made}/proxy/8000/x")).status_code


async def test_what_presents_nothing_is_no_guess(timed: tuple[World, Clock]) -> None:
    """Calls without a credential are refused and block no client."""
    server, _ = timed
    async with server.client() as owner, server.client(None) as client:
        made = (await owner.post("/v1/sandboxes", json=BODY)).json()["id"]
        for _ in range(2 * BURST):
            assert 401 == (await client.get("/v1/sandboxes")).status_code
            assert 401 == (await client.get(f"/v1/sandboxes/{made}/proxy/18080/policy")).status_code
        assert 200 == (await owner.get("/v1/sandboxes")).status_code


def test_no_other_module_compares_credentials() -> None:
    """A new route must use `Caller.proves`, which counts, because nothing else compares credentials."""
    root = Path(next(iter(lifecycle.__path__)))
    found: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        names = {
            node.attr if isinstance(node, ast.Attribute) else node.id
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute | ast.Name)
        }
        if comparing := names & {"compare_digest", "_accepts", "_is_right", "_same", "digests"}:
            found[path.relative_to(root).as_posix()] = comparing
    assert {"_is_right"} == found.pop("api/auth.py")
    assert {"digests"} == found.pop("images.py")  # those of images
    assert ["api/credentials.py"] == list(found)
