"""Calls that nobody means well, each judged by what the next honest caller gets."""

import json
import logging
from typing import Any

import pytest
from standins import IMAGE, World, world

from lifecycle import models

BODY: dict[str, Any] = {"image": {"uri": IMAGE}, "entrypoint": ["sleep", "1"], "resourceLimits": {}, "timeout": 600}


@pytest.mark.parametrize("moment", ["9999-12-31T23:59:59.999999Z", "9999-12-31T23:59:59-23:59", "2200-01-01T00:00:00Z"])
async def test_an_expiry_that_cannot_be_told_is_refused(server: World, moment: str) -> None:
    """One sandbox with an expiry past the last date would make the list fail for everybody."""
    async with server.client() as client:
        made = (await client.post("/v1/sandboxes", json=BODY)).json()
        route = f"/v1/sandboxes/{made['id']}"
        answer = await client.post(f"{route}/renew-expiration", json={"expiresAt": moment})
        assert (400, "DOCKER::INVALID_EXPIRATION") == (answer.status_code, answer.json()["code"])
        assert made["expiresAt"] == (await client.get(route)).json()["expiresAt"]
        assert 200 == (await client.get("/v1/sandboxes")).status_code


async def test_an_unforeseen_failure_is_told_in_our_words(
    server: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller gets code and message, the log the kind of failure; neither gets what the failure says."""

    def fail(*_: object) -> None:
        raise ValueError("a value of somebody's")

    monkeypatch.setattr(models, "shown", fail)
    async with server.client() as client:
        made = (await client.post("/v1/sandboxes", json=BODY)).json()
        with caplog.at_level(logging.INFO):
            answer = await client.get(f"/v1/sandboxes/{made['id']}")
    assert 500 == answer.status_code
    assert {"code": "GENERAL::UNKNOWN_ERROR", "message": "Internal server error."} == json.loads(answer.text)
    assert "ValueError" in caplog.text
    assert "somebody" not in caplog.text


@pytest.mark.parametrize("port", ["18080", "018080", "00018080"])
async def test_the_egress_api_has_one_spelling(port: str) -> None:
    """Without keys a page of another origin may reach a sandbox's ports, but not the API that port 18080 is."""
    async with world(key_digests=()) as described, described.serving() as server, server.client() as client:
        made = (await client.post("/v1/sandboxes", json=BODY)).json()
        page = {"Origin": "http://elsewhere.test"}
        route = f"/v1/sandboxes/{made['id']}/proxy"
        assert 200 == (await client.get(f"{route}/8000/", headers=page)).status_code
        assert (await client.get(f"{route}/{port}/healthz", headers=page)).status_code in (403, 422)
