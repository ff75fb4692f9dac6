"""A sandbox has the variables and files with its placeholders before its first program runs, or it is not made.

It tests `lifecycle/sandboxes/transaction.py` and `lifecycle/proxy/handover.py`.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from standins import IMAGE, World, seed, world

import wire
from policy.compile import compile_named
from policy.load import load_text
from policy.placeholders import provided
from tests.lifecycle.test_pools import CLAIM, idle, made, rows
from wire.api.hostd import PolicyInForce
from wire.api.provided import Provided

POLICY = """
version: 1
default: open
policies:
  open: {rules: [{id: all, host: api.example.com}]}
  tools:
    rules:
      - id: api
        host: api.example.com
        substitutions:
          - {secret: token, env: TOKEN, form: "tok_{}", in: [header]}
          - secret: token
            file: ~/.netrc
            template: "machine api.example.com password {placeholder}"
            in: [basic]
            username: b
"""
BODY: dict[str, Any] = {
    "image": {"uri": IMAGE},
    "entrypoint": ["serve"],
    "env": {"A": "b"},
    "timeout": 600,
    "resourceLimits": {"cpu": "1", "memory": "256Mi"},
    "extensions": {"sallyport.policy": "tools"},
}


@pytest.fixture
async def server() -> AsyncIterator[World]:
    async with world(POLICY) as made_world, made_world.serving():
        yield made_world


def own(sandbox: str) -> Provided:
    """Return what the policy provides to this sandbox."""
    return provided(compile_named(load_text(POLICY), "tools"), seed(sandbox))


def inits(server: World) -> list[dict[str, Any]]:
    """Return the inits that execd has got."""
    return [json.loads(one.body) for one in server.hostd.program.seen if one.raw_path == b"/internal/init"]


async def test_a_new_sandbox_gets_its_placeholders_with_the_init_that_starts_its_entrypoint(server: World) -> None:
    """They are in no description of the container, and in no row."""
    async with server.client() as client:
        answer = await client.post("/v1/sandboxes", json=BODY)
    assert 202 == answer.status_code, answer.text
    ident = answer.json()["id"]
    (launch,) = server.hostd.named("launch")
    assert (True, {"A": "b", "OPENSANDBOX_ID": ident}) == (launch["held"], launch["env"])
    (init,) = inits(server)
    (file,) = own(ident).files
    assert own(ident).variables == init["envs"]
    assert [{"path": "~/.netrc", "content": file.content}] == init["files"]
    assert ["serve"] == init["entrypoint"]
    (row,) = await rows(server)
    assert own(ident).variables["TOKEN"] not in f"{row!r}{answer.text}"


async def test_hooks_of_a_sandbox_with_placeholders_start_with_its_entrypoint(server: World) -> None:
    """execd gets them with the same init."""
    hooks = {"preStart": {"command": ["prepare"]}}
    async with server.client() as client:
        answer = await client.post("/v1/sandboxes", json=BODY | {"lifecycle": hooks})
    assert 202 == answer.status_code, answer.text
    (init,) = inits(server)
    assert ["prepare"] == init["lifecycle"]["preStart"]["command"]
    assert {"TOKEN"} == set(init["envs"])


async def test_a_sandbox_without_placeholders_starts_at_once(server: World) -> None:
    """The control: no init is needed."""
    async with server.client() as client:
        answer = await client.post("/v1/sandboxes", json=BODY | {"extensions": {}})
    assert 202 == answer.status_code, answer.text
    (launch,) = server.hostd.named("launch")
    assert False is launch["held"]
    assert [] == inits(server)


async def test_a_claimed_member_gets_its_own_placeholders(server: World) -> None:
    """The seed of the member, under the policy of the claim."""
    await made(server, capacitySpec={"bufferMin": 2, "bufferMax": 2, "poolMin": 0, "poolMax": 8})
    body = CLAIM | {"extensions": {"poolRef": "p", "sallyport.policy": "tools"}, "env": {"A": "b"}}
    async with server.client() as client:
        claimed = [(await client.post("/v1/sandboxes", json=body)).json()["id"] for _ in range(2)]
    first, second = inits(server)
    assert [{"A": "b", **own(ident).variables} for ident in claimed] == [first["envs"], second["envs"]]
    assert first["envs"]["TOKEN"] != second["envs"]["TOKEN"]
    assert [file["content"] for file in first["files"]] == [file.content for file in own(claimed[0]).files]


@pytest.mark.parametrize("pooled", [False, True])
async def test_a_call_cannot_set_a_variable_that_its_policy_provides(server: World, pooled: bool) -> None:
    """Nothing is made, and no member is used up."""
    if pooled:
        await made(server)
    body = CLAIM | {"extensions": {"poolRef": "p", "sallyport.policy": "tools"}} if pooled else BODY
    async with server.client() as client:
        answer = await client.post("/v1/sandboxes", json=body | {"env": {"TOKEN": "mine"}})
    assert (400, True) == (answer.status_code, "TOKEN" in answer.json()["message"]), answer.text
    assert [] == inits(server)
    assert [True] * pooled == [row.idle for row in await rows(server)]
    if pooled:
        await idle(server, 1)


async def test_a_sandbox_that_cannot_get_its_placeholders_is_not_made(server: World) -> None:
    """It started without them, because hostd had a newer document than `serve`: nothing of it is left."""
    launch = server.hostd._launch

    async def newer(request: Any) -> PolicyInForce:
        in_force = await launch(request)
        return PolicyInForce(in_force.digest, own(request.sandbox))

    server.hostd._launch = newer  # type: ignore[method-assign]
    async with server.client() as client:
        answer = await client.post("/v1/sandboxes", json=BODY | {"extensions": {}})
    assert (503, True) == (answer.status_code, "policy changed" in answer.json()["message"]), answer.text
    assert ([], {}) == (await rows(server), server.hostd.sandboxes)


async def test_a_sandbox_whose_execd_refuses_the_files_is_not_made(server: World) -> None:
    """For example because its image has a directory at the path of a file."""
    server.hostd.program.init_status = 422
    async with server.client() as client:
        answer = await client.post("/v1/sandboxes", json=BODY)
    assert (500, True) == (answer.status_code, "file that the policy" in answer.json()["message"]), answer.text
    assert ([], {}) == (await rows(server), server.hostd.sandboxes)


async def test_hostd_that_fails_starts_nothing(server: World) -> None:
    """The control of the former tests."""
    server.hostd.fail["launch"] = wire.RequestError(wire.Code.INTERNAL, "no")
    async with server.client() as client:
        assert 500 == (await client.post("/v1/sandboxes", json=BODY)).status_code
    assert [] == inits(server)
