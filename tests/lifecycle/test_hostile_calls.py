"""Calls that nobody means well, each judged by what the next honest caller gets."""

import json
import logging
from typing import Any

import pytest
from standins import IMAGE, World, world

from lifecycle import models
from lifecycle.proxy_headers import ISOLATION, to_client

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


OWN = "/v1/sandboxes/sbx-1/proxy/8000"


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        ("a=1", "a=1"),
        ("a=1; Path=/; HttpOnly", f"a=1; Path={OWN}/; HttpOnly"),
        ("a=1;path=/v1/sandboxes/sbx-2;Secure", f"a=1; Path={OWN}/v1/sandboxes/sbx-2;Secure"),
        (f"a=1; Path={OWN}/app", f"a=1; Path={OWN}/app"),
        (f"a=1; Path={OWN}1/app", f"a=1; Path={OWN}{OWN}1/app"),
        ("a=1; Path=/one; pAtH = /two", f"a=1; Path={OWN}/one; Path={OWN}/two"),
        ("a=Path=/; Domain=example.test; Max-Age=5", "a=Path=/; Max-Age=5"),
        ("", ""),
    ],
)
def test_a_cookie_is_for_the_port_that_set_it(sent: str, told: str) -> None:
    """All sandboxes and the API have one host: a cookie for all of it would be another sandbox's to read."""
    headers = to_client([(b"Set-Cookie", sent.encode())], OWN.encode())
    assert [(b"Set-Cookie", told.encode()), ISOLATION] == headers


@pytest.mark.parametrize(
    "name", ["Strict-Transport-Security", "Alt-Svc", "Clear-Site-Data", "NEL", "Report-To", "Service-Worker-Allowed"]
)
def test_what_is_about_the_whole_host_is_not_for_a_sandbox_to_say(name: str) -> None:
    """It would be kept for the API and every other sandbox, too."""
    assert [ISOLATION] == to_client([(name.encode(), b"value")], OWN.encode())
