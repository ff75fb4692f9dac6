"""The API's message when a part of the server fails: it says what failed for the client, without the part's name."""

import re
from typing import Any

import pytest
from standins import IMAGE, World

import wire

BODY: dict[str, Any] = {"image": {"uri": IMAGE}, "entrypoint": ["sleep", "1"], "resourceLimits": {}}
POLICY = {"defaultAction": "deny", "egress": [{"action": "allow", "target": "a.example"}]}
INTERNALS = re.compile(
    r"hostd|vaultd|auditd|zygote|watchdog|worker|[a-z]Error\b|[a-z]Exception\b|Errno|/run/|\.sock|\.py\b|netns"
)
INSIDE = "worker 7 of the zygote: ConnectionResetError [Errno 104] at /run/sallyport/netns/7 (hostd.py)"
CODES = ("docker", "network", "gateway", "host", "timeout", "internal")


async def _answers(server: World) -> list[str]:
    """Return the error messages of all routes that call another part of the server. A sandbox must exist."""
    said = []
    async with server.client() as client:
        listed = (await client.get("/v1/sandboxes")).json()["items"]
        path = f"/v1/sandboxes/{listed[0]['id']}"
        for answer in (
            await client.post("/v1/sandboxes", json=BODY),
            await client.post(f"{path}/pause"),
            await client.post(f"{path}/resume"),
            await client.put(f"{path}/networkpolicy", json=POLICY),
            await client.get(f"{path}/networkpolicy"),
            await client.get(f"{path}/proxy/8000/"),
            await client.delete(path),
        ):
            if answer.status_code >= 400:
                said.append(answer.text)
    return said


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("part", ["hostd", "vaultd", "auditd"])
async def test_no_message_names_a_part_that_refuses(server: World, part: str, code: str) -> None:
    """For any error text of the part."""
    async with server.client() as client:
        assert (await client.post("/v1/sandboxes", json=BODY)).is_success
    standin = getattr(server, part)
    standin.fail_all = wire.RequestError(code, INSIDE)
    said = await _answers(server)
    assert said
    assert standin.failed
    assert [] == [text for text in said if INTERNALS.search(text)]


@pytest.mark.parametrize("part", ["hostd", "vaultd", "auditd"])
async def test_no_message_names_a_part_that_is_gone(server: World, part: str) -> None:
    """The part's socket is missing."""
    async with server.client() as client:
        assert (await client.post("/v1/sandboxes", json=BODY)).is_success
    assert server.server is not None
    for daemon in server.server.daemons:
        if daemon.name == part:
            await daemon.close()
            daemon._path = "/nonexistent/hostd.sock"
    said = await _answers(server)
    assert said
    assert [] == [text for text in said if INTERNALS.search(text)]
