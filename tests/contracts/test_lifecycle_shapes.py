"""The lifecycle API's shapes: errors, request ids, nulls, authentication, paging.

It also tests `lifecycle/sandboxes/creation.py` and `lifecycle/sandboxes/labels.py`, by calls of the API.
"""

import asyncio
import gzip
import json
import re
from typing import Any

import httpx
import pytest
from standins import IMAGE, KEY, World, world
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

import wire
from lifecycle.api import app
from lifecycle.api.credentials import digest
from lifecycle.api.errors import ApiError
from wire.api.states import HostState

pytestmark = pytest.mark.slow

BODY: dict[str, Any] = {"image": {"uri": IMAGE}, "entrypoint": ["sleep", "1"], "resourceLimits": {}, "timeout": None}
OPEN = {"defaultAction": "deny", "egress": [{"action": "allow", "target": "api.example.org"}]}
PAUSES = ("lifecycle.pause", "lifecycle.resume")


def nulls(value: Any) -> bool:
    if isinstance(value, dict):
        return any(nulls(item) for item in value.values())
    return any(nulls(item) for item in value) if isinstance(value, list) else value is None


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("GET", "/v1/nothing", None, 404, "GENERAL::UNKNOWN_ERROR"),
        ("PUT", "/v1/sandboxes", {}, 405, "GENERAL::UNKNOWN_ERROR"),
        ("POST", "/sandboxes", {"image": 1}, 422, "SANDBOX::INVALID_PARAMETER"),
        ("GET", "/v1/sandboxes/sbx-unknown", None, 404, "DOCKER::SANDBOX_NOT_FOUND"),
        ("DELETE", "/v1/sandboxes/..%2F..", None, 404, "GENERAL::UNKNOWN_ERROR"),
        ("GET", "/v1/sandboxes?metadata=x", None, 400, "INVALID_METADATA_FORMAT"),
        ("GET", "/v1/sandboxes?pageSize=0", None, 422, "SANDBOX::INVALID_PARAMETER"),
        ("GET", "/v1/templates", None, 501, "FSB::API_NOT_SUPPORTED"),
        ("GET", "/pools/x", None, 404, "KUBERNETES::POOL_NOT_FOUND"),
        ("GET", "/v1/snapshots/x", None, 404, "SNAPSHOT::NOT_FOUND"),
        ("GET", "/v1/sandboxes/sbx-x/proxy/0/", None, 400, "DOCKER::INVALID_PORT"),
        ("GET", "/v1/sandboxes/sbx-x/endpoints/x", None, 422, "SANDBOX::INVALID_PARAMETER"),
    ],
)
async def test_every_error_has_code_message_and_request_id(
    server: World, method: str, path: str, content: Any, status: int, code: str
) -> None:
    """An error of any kind is JSON with code and message, and echoes the request id."""
    async with server.client() as client:
        answer = await client.request(method, path, json=content, headers={"X-Request-ID": "my-id"})
    assert (status, code) == (answer.status_code, answer.json()["code"])
    assert answer.json()["message"]
    assert "my-id" == answer.headers["x-request-id"]
    assert 1 == len(answer.headers.get_list("date"))


async def test_schema_errors_do_not_repeat_what_was_sent(server: World) -> None:
    """A 422 names the place, not the value, because the value can be a secret."""
    async with server.client() as client:
        answer = await client.post("/v1/sandboxes", json={**BODY, "env": {"TOKEN": ["s3cr3t-value"]}})
    assert 422 == answer.status_code
    assert answer.json()["detail"]
    assert "s3cr3t-value" not in answer.text


async def test_a_request_id_is_made_when_none_is_sent(server: World) -> None:
    """Also for a success, and for an empty id."""
    async with server.client() as client:
        answer = await client.get("/health", headers={"X-Request-ID": ""})
    assert 32 == len(answer.headers["x-request-id"])


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"image": None}, 422, "SANDBOX::INVALID_PARAMETER"),
        ({"image": {"uri": " "}}, 422, "SANDBOX::INVALID_PARAMETER"),
        ({"entrypoint": []}, 422, "SANDBOX::INVALID_PARAMETER"),
        ({"entrypoint": None}, 422, "SANDBOX::INVALID_PARAMETER"),
        ({"entrypoint": [" "]}, 400, "DOCKER::INVALID_ENTRYPOINT"),
        ({"timeout": 59}, 422, "SANDBOX::INVALID_PARAMETER"),
        ({"timeout": 10**12}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"snapshotId": "x", "image": {}}, 404, "SNAPSHOT::NOT_FOUND"),
        ({"templateId": "x", "image": {}}, 400, "FSB::API_NOT_SUPPORTED"),
        ({"resourceLimits": {"memory": "1.5Gi"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"resourceLimits": {"cpu": "64"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"resourceLimits": {"gpu": "1"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"metadata": {"opensandbox.io/x": "1"}}, 400, "SANDBOX::INVALID_METADATA_LABEL"),
        ({"metadata": {"a b": "1"}}, 400, "SANDBOX::INVALID_METADATA_LABEL"),
        ({"platform": {"os": "windows", "arch": "amd64"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"env": {"OPENSANDBOX_LIFECYCLE": "x"}}, 422, "SANDBOX::INVALID_PARAMETER"),
        ({"env": {"EXECD_RUNTIME_INIT": "1"}}, 422, "SANDBOX::INVALID_PARAMETER"),
        ({"env": {"OPENSANDBOX_EGRESS_OTHER": "x"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        (
            {
                "env": {"OPENSANDBOX_EGRESS_MITMPROXY_SSL_INSECURE": "true"},
                "networkPolicy": {},
                "credentialProxy": {"enabled": True},
            },
            400,
            "SANDBOX::INVALID_PARAMETER",
        ),
        ({"env": {"A=B": "x"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"env": {"A": "x" * 131070}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"env": {"A": "\u00e9" * 65536}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"env": {f"A{n}": "x" * 131000 for n in range(9)}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"env": {f"A{n}": "\x7f" * 131000 for n in range(7)}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"entrypoint": ["echo", "\u00e9" * 65536]}, 400, "DOCKER::INVALID_ENTRYPOINT"),
        ({"entrypoint": ["echo"] + ["x" * 100_000] * 6}, 400, "DOCKER::INVALID_ENTRYPOINT"),
        ({"networkPolicy": {"defaultAction": "maybe"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"credentialProxy": {"enabled": True}}, 422, "SANDBOX::INVALID_PARAMETER"),
        ({"lifecycle": {"preStart": {"command": ["x", "\0"]}}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"lifecycle": {"preStart": {"command": ["x"] * 1000 + ["y" * 4096] * 16}}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"lifecycle": {"preStart": {"command": [" "]}}}, 422, "SANDBOX::INVALID_PARAMETER"),
        ({"lifecycle": {"preStart": {"command": ["x"]}}, "templateId": "t"}, 422, "SANDBOX::INVALID_PARAMETER"),
        ({"lifecycle": {"other": 1}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"networkPoolicy": {}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"networkPolicy": {"egress": [{"target": "a.test", "methods": []}]}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"metadata": None}, 422, "SANDBOX::INVALID_PARAMETER"),
        ({"resourceLimits": {"memroy": "64Mi"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"resourceRequests": {"Memory": "64Mi"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"extensions": {"sallyport.polcy": "x"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"extensions": {"Sallyport.Policy": "x"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"extensions": {"salyport.policy": "x"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"extensions": {"poolRef": "x"}, "image": {}}, 404, "KUBERNETES::POOL_NOT_FOUND"),
        ({"extensions": {"access.renew.extend.seconds": "10"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"extensions": {"sallyport.runtime": "kata"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"extensions": {"sallyport.policy": "nobody"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"extensions": {"sallyport.other": "x"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"volumes": [{"name": "x"}]}, 422, "SANDBOX::INVALID_PARAMETER"),
        ({"volumes": [{"name": "x", "mountPath": "/x"}]}, 400, "VOLUME::INVALID_BACKEND"),
    ],
)
async def test_what_cannot_be_made_is_refused(server: World, change: dict[str, Any], status: int, code: str) -> None:
    """A refused create changes nothing."""
    async with server.client() as client:
        answer = await client.post("/v1/sandboxes", json={**BODY, **change})
        assert (status, code) == (answer.status_code, answer.json()["code"]), answer.text
        assert 0 == (await client.get("/v1/sandboxes")).json()["pagination"]["totalItems"]
    assert [] == server.hostd.named("launch")


async def test_responses_hold_no_null_and_everything_promised(server: World) -> None:
    """Create, get and list omit absent fields. id, state, createdAt and entrypoint are always present."""
    async with server.client() as client:
        made = await client.post("/v1/sandboxes", json=BODY)
        identifier = made.json()["id"]
        shown = (await client.get(f"/sandboxes/{identifier}")).json()
        listed = (await client.get("/v1/sandboxes")).json()
        assert 202 == made.status_code
        assert f"/v1/sandboxes/{identifier}" == made.headers["location"]
        for body in (made.json(), shown, listed):
            assert not nulls(body)
        assert ["sleep", "1"] == shown["entrypoint"]
        assert {"uri": IMAGE} == shown["image"]
        assert "expiresAt" not in shown
        assert "metadata" not in shown
        assert {"page": 1, "pageSize": 20, "totalItems": 1, "totalPages": 1, "hasNextPage": False} == listed[
            "pagination"
        ]


async def test_extensions_are_echoed_only_if_they_are_the_clients(server: World) -> None:
    """The API's namespace and Sallyport's public keys are returned, others are not."""
    extensions = {"opensandbox.extensions.a": "1", "sallyport.runtime": "runsc", "other": "x"}
    async with server.client() as client:
        made = (await client.post("/v1/sandboxes", json={**BODY, "extensions": extensions})).json()
    assert {"opensandbox.extensions.a": "1", "sallyport.runtime": "runsc"} == made["extensions"]
    assert "runsc" == server.hostd.named("launch")[0]["runtime"]


async def test_limits_have_defaults_and_units(server: World) -> None:
    """`{}` means the server's defaults, not unlimited."""
    async with server.client() as client:
        await client.post("/v1/sandboxes", json=BODY)
        await client.post("/v1/sandboxes", json={**BODY, "resourceLimits": {"cpu": "100m", "memory": "64Mi"}})
    first, second = server.hostd.named("launch")
    assert (1_000_000_000, 512 << 20, 256) == (first["cpu_nanos"], first["memory_bytes"], first["pids"])
    assert (100_000_000, 64 << 20) == (second["cpu_nanos"], second["memory_bytes"])


@pytest.mark.parametrize("path", ["/health", "/version"])
async def test_open_routes_need_no_key(server: World, path: str) -> None:
    """Health and version need no key."""
    async with server.client(None) as client:
        assert 200 == (await client.get(path)).status_code


async def test_version_names_the_product_and_the_contract(server: World) -> None:
    """Clients compare only `version`, which is the contract's."""
    async with server.client(None) as client:
        answer = (await client.get("/version")).json()
    expected = {"version": "1.1.1", "contract": "OpenSandbox 1.1.1", "product": "Sallyport", "product_version": "0.1.0"}
    assert expected == answer


async def test_keys(server: World) -> None:
    """No key, a wrong key, and a right key together with a wrong one."""
    async with server.client(None) as client:
        assert "MISSING_API_KEY" == (await client.get("/v1/sandboxes")).json()["code"]
        wrong = await client.get("/v1/sandboxes", headers={"OPEN-SANDBOX-API-KEY": "x"})
        assert (401, "INVALID_API_KEY") == (wrong.status_code, wrong.json()["code"])
        twice = await client.get(
            "/v1/sandboxes", headers=[("OPEN-SANDBOX-API-KEY", KEY), ("OPEN-SANDBOX-API-KEY", "x")]
        )
        assert 401 == twice.status_code
        assert 401 == (await client.get("/v1/healthy")).status_code


NO_KEYS: list[dict[str, str | bytes]] = [
    {"OPEN-SANDBOX-API-KEY": ""},
    {"OPEN-SANDBOX-API-KEY": KEY.upper()},
    {"OPEN-SANDBOX-API-KEY": KEY[:-1]},
    {"OPEN-SANDBOX-API-KEY": f"{KEY},{KEY}"},
    {"OPEN-SANDBOX-API-KEY": f"Bearer {KEY}"},
    {"OPEN-SANDBOX-API-KEY": f"{KEY}\u00a0".encode("latin-1")},
    {"OPEN-SANDBOX-API-KEY": digest(KEY)},
    {"OPEN-SANDBOX-API-KEY": f"sha256:{digest(KEY)}"},
    {"OPEN-SANDBOX-API-KEY": "x" * 15_000},
    {"OPEN_SANDBOX_API_KEY": KEY},
    {"Authorization": f"Bearer {KEY}"},
    {"Cookie": f"OPEN-SANDBOX-API-KEY={KEY}"},
]


async def test_a_key_is_that_key_in_its_header(server: World) -> None:
    """No similar key is accepted, and none outside the header."""
    async with server.client(None) as client:
        for fields in NO_KEYS:
            answer = await client.get(f"/v1/sandboxes?OPEN-SANDBOX-API-KEY={KEY}&api_key={KEY}", headers=fields)
            assert 401 == answer.status_code, fields


@pytest.mark.filterwarnings("ignore:Duplicate Operation ID")  # from routes that answer several methods in one way
async def test_every_route_but_two_asks_for_the_key(server: World) -> None:
    """For all routes in the application's own description."""
    assert server.server is not None
    described = app.api(server.server.context).openapi()["paths"]
    open_to_all = []
    async with server.client(None) as client:
        for described_path, operations in described.items():
            for path in dict.fromkeys((described_path, described_path.removeprefix("/v1"))):
                for method in operations:
                    answer = await client.request(method.upper(), re.sub(r"\{.*?\}", "x", path))
                    if answer.status_code != 401:
                        open_to_all.append(path)
    assert len(described) >= 20
    assert ["/health", "/version"] == open_to_all


async def test_no_page_of_ours_runs_a_script(server: World) -> None:
    """Neither from this server nor from another one, because the script would have this server's origin."""
    async with server.client(None) as client:
        for path in ("/docs", "/redoc"):
            answer = await client.get(path)
            assert (200, "default-src 'none'") == (answer.status_code, answer.headers["content-security-policy"])
            assert "/openapi.json" in answer.text and "script" not in answer.text.lower()
        assert "paths" in (await client.get("/openapi.json")).json()


SPELLINGS = (
    *("/health/../v1/sandboxes", "/health%2f..%2fv1/sandboxes", "/docs/..%2fv1/sandboxes", "/health/..;/sandboxes"),
    *("//v1/sandboxes", "/v1//sandboxes", "/./v1/sandboxes", "/v1/sandboxes/", "/V1/SANDBOXES", "/v1/sandboxes%00"),
    *("/health%3f/v1/sandboxes", "/healthy", "/v1/health", "http://x/v1/sandboxes", "/v1/sandboxes?/health"),
    *("http://x/health/../v1/sandboxes", "/%76%31/sandboxes", "/v1/%73andboxes", "*", "/openapi.json/../sandboxes"),
    *("/v1/sandboxes/x/proxy/80/../../../sandboxes", "/sandboxes/x/proxy/80/..%2f..%2f..%2fsandboxes"),
    "/sandboxes/x/proxy/18080/../../../../v1/sandboxes",
)


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE", "TRACE", "get"])
async def test_no_spelling_of_a_path_avoids_the_key(server: World, method: str) -> None:
    """Any spelling of a path, also one similar to an open route, is refused or unknown without a key."""
    async with server.client() as owner:
        made = (await owner.post("/v1/sandboxes", json=BODY)).json()["id"]
        for target in SPELLINGS:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            answer = await asyncio.wait_for(reader.read(), 15)
            writer.close()
            assert answer.split()[1] in (b"400", b"401", b"404"), (target, answer)
            assert made.encode() not in answer
        assert 200 == (await owner.get(f"/v1/sandboxes/{made}")).status_code


async def test_what_a_caller_may_not_say_is_refused(server: World) -> None:
    """Fields that the caller must not set are refused by name like any unknown field, and nothing is made."""
    texts = ("owner", "tenant", "networkMode", "pidMode", "user", "runtime", "lineage", "policy_digest", "createdAt")
    numbers = ("isolation", "privileged", "cpu_nanos", "pids", "generation")
    bold: dict[str, Any] = dict.fromkeys(texts, "host") | dict.fromkeys(numbers, 1)
    bold |= {"id": "sbx-mine", "status": {"state": "Paused"}, "hostConfig": {"Binds": ["/:/host"]}}
    bold |= {"labels": {"a": "b"}, "execd_token_sha256": "0" * 64, "capAdd": ["SYS_ADMIN"], "gateway": {}}
    async with server.client() as client:
        for name, value in bold.items():
            answer = await client.post("/v1/sandboxes", json={**BODY, name: value})
            assert (400, "SANDBOX::INVALID_PARAMETER") == _coded(answer), name
            assert f'unknown field "{name}"' == answer.json()["message"]
    assert [] == server.hostd.named("launch")


FORMS: list[dict[str, str]] = [
    {"content-type": "text/plain"},
    {"content-type": "application/x-www-form-urlencoded"},
    {"content-type": "multipart/form-data; boundary=x"},
    {"content-type": ""},
    {"content-type": "application/x-yaml"},
    {"content-type": "application/json", "content-encoding": "gzip"},
]


async def test_only_json_is_read(server: World) -> None:
    """A form or a text, which a web page can send without a preflight request, makes nothing."""
    async with server.client() as client:
        for fields in FORMS:
            content = json.dumps(BODY).encode()
            if "content-encoding" in fields:
                content = gzip.compress(content)
            answer = await client.post("/v1/sandboxes", content=content, headers=fields)
            assert 400 <= answer.status_code < 500, fields
            assert {"code", "message"} <= answer.json().keys()
    assert [] == server.hostd.named("launch")


async def test_guessing_is_slowed(server: World) -> None:
    """After a burst of wrong keys a client must wait."""
    async with server.client("wrong") as client:
        answers = [await client.get("/v1/sandboxes") for _ in range(22)]
    assert {401, 429} == {answer.status_code for answer in answers}
    assert "retry-after" in answers[-1].headers


async def test_without_keys_no_web_page_may_drive_the_server() -> None:
    """Insecure mode: loopback names work with any key. A rebound name or a foreign origin does not."""
    async with world(key_digests=()) as described, described.serving() as server, server.client("any") as client:
        assert 200 == (await client.get("/v1/sandboxes")).status_code
        rebound = await client.get("/v1/sandboxes", headers={"Host": "evil.example"})
        assert 403 == rebound.status_code
        foreign = await client.get("/v1/sandboxes", headers={"Origin": "http://evil.example"})
        assert 403 == foreign.status_code
        own = await client.get("/v1/sandboxes", headers={"Origin": server.url})
        assert 200 == own.status_code


async def test_paging_and_filters(server: World) -> None:
    """Newest first, OR over states, AND over metadata with special characters. Pages after the last are empty."""
    async with server.client() as client:
        names = []
        for number in range(5):
            body = {**BODY, "metadata": {"n": str(number), "odd": "yes" if number % 2 else "no"}}
            names.append((await client.post("/v1/sandboxes", json=body)).json()["id"])
        pages = [
            [item["id"] for item in (await client.get(f"/v1/sandboxes?page={page}&pageSize=2")).json()["items"]]
            for page in (1, 2, 3, 4)
        ]
        assert [names[::-1][0:2], names[::-1][2:4], names[::-1][4:], []] == pages

        async def total(query: str) -> int:
            found = await client.get(f"/v1/sandboxes?{query}")
            return int(found.json()["pagination"]["totalItems"])

        assert 2 == await total("metadata=odd%3Dyes")
        assert 1 == await total("metadata=odd%3Dyes%26n%3D3")
        assert 0 == await total("metadata=odd%3Dye")
        assert 5 == await total("state=paused&state=RUNNING")
        assert 0 == await total("state=paused")


async def test_renewal_rules(server: World) -> None:
    """An earlier time is accepted, a past one is not, and a sandbox with manual cleanup cannot be renewed."""
    async with server.client() as client:
        manual = (await client.post("/v1/sandboxes", json=BODY)).json()["id"]
        timed = (await client.post("/v1/sandboxes", json={**BODY, "timeout": 3600})).json()

        async def renew(name: str, moment: str) -> httpx.Response:
            return await client.post(f"/v1/sandboxes/{name}/renew-expiration", json={"expiresAt": moment})

        far = "2099-01-01T00:00:00"
        assert (409, "DOCKER::INVALID_EXPIRATION") == _coded(await renew(manual, far))
        assert (400, "DOCKER::INVALID_EXPIRATION") == _coded(await renew(timed["id"], "2001-01-01T00:00:00Z"))
        assert "2099-01-01T00:00:00.000Z" == (await renew(timed["id"], far)).json()["expiresAt"]
        assert 200 == (await renew(timed["id"], timed["expiresAt"])).status_code
        assert 422 == (await renew(timed["id"], "soon")).status_code


def _coded(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


async def test_metadata_patch(server: World) -> None:
    """A merge patch sets, deletes and keeps. Reserved keys have the contract's error code."""
    async with server.client() as client:
        body = {**BODY, "metadata": {"a": "1", "b": "2"}}
        name = (await client.post("/v1/sandboxes", json=body)).json()["id"]
        path = f"/v1/sandboxes/{name}/metadata"
        assert {"b": "2", "c": "3"} == (await client.patch(path, json={"a": None, "c": "3"})).json()["metadata"]
        assert {"b": "2", "c": "3"} == (await client.patch(path, json={})).json()["metadata"]
        reserved = await client.patch(path, json={"opensandbox.io/x": "1"})
        assert (400, "INVALID_METADATA_LABEL") == _coded(reserved)
        invalid = await client.patch(path, json={"a b": "1"})
        assert (400, "SANDBOX::INVALID_METADATA_LABEL") == _coded(invalid)
        assert {"b": "2", "c": "3"} == (await client.get(f"/v1/sandboxes/{name}")).json()["metadata"]


async def test_pause_and_resume(server: World) -> None:
    """202 without a body, and the state is there with the answer. In any other state 409, and no record."""
    async with server.client() as client:
        name = (await client.post("/v1/sandboxes", json={**BODY, "timeout": 3600})).json()["id"]
        path = f"/v1/sandboxes/{name}"

        async def shown() -> dict[str, Any]:
            answer: dict[str, Any] = (await client.get(path)).json()
            return answer

        before = await shown()
        for op in ("pause", "resume"):
            assert (404, "DOCKER::SANDBOX_NOT_FOUND") == _coded(await client.post(f"/v1/sandboxes/sbx-{'0' * 24}/{op}"))
        assert (409, "DOCKER::SANDBOX_NOT_PAUSED") == _coded(await client.post(f"{path}/resume"))
        assert [] == [item["kind"] for item in server.auditd.records if item["kind"] in PAUSES]

        answer = await client.post(f"{path}/pause")
        assert (202, b"") == (answer.status_code, answer.content)
        paused = await shown()
        assert ("Paused", "CONTAINER_PAUSED") == (paused["status"]["state"], paused["status"]["reason"])
        assert (409, "DOCKER::SANDBOX_NOT_RUNNING") == _coded(await client.post(f"{path}/pause"))
        assert 1 == (await client.get("/v1/sandboxes?state=paused")).json()["pagination"]["totalItems"]

        answer = await client.post(f"{path}/resume")
        assert (202, b"") == (answer.status_code, answer.content)
        resumed = await shown()
        assert (409, "DOCKER::SANDBOX_NOT_PAUSED") == _coded(await client.post(f"{path}/resume"))
    assert "Running" == resumed.pop("status")["state"]
    before.pop("status"), paused.pop("status")
    assert before == paused == resumed
    assert [("lifecycle.pause", name), ("lifecycle.resume", name)] == [
        (item["kind"], item["sandbox"]) for item in server.auditd.records if item["kind"] in PAUSES
    ]


async def test_a_paused_sandbox_is_not_called(server: World) -> None:
    """HTTP gets 409, a WebSocket the close code of a refusal. Endpoints and the egress API are as before."""
    async with server.client() as client:
        name = (await client.post("/v1/sandboxes", json=BODY)).json()["id"]
        path = f"/v1/sandboxes/{name}"
        assert 200 == (await client.get(f"{path}/proxy/8000/hello")).status_code
        assert 202 == (await client.post(f"{path}/pause")).status_code
        for port in (8000, 44772):
            assert (409, "DOCKER::SANDBOX_NOT_RUNNING") == _coded(await client.get(f"{path}/proxy/{port}/hello"))
            assert 200 == (await client.get(f"{path}/endpoints/{port}")).status_code
        async with connect(f"ws://127.0.0.1:{server.port}{path}/proxy/8000/ws", proxy=None) as socket:
            with pytest.raises(ConnectionClosed) as closed:
                await socket.recv()
        assert closed.value.rcvd is not None
        assert 1008 == closed.value.rcvd.code
        place = (await client.get(f"{path}/endpoints/18080")).json()
        for part in ("policy", "healthz"):
            answer = await client.get(f"http://{place['endpoint']}/{part}", headers=place["headers"])
            assert 200 == answer.status_code
        assert 200 == (await client.put(f"{path}/networkpolicy", json=OPEN)).status_code
        assert 202 == (await client.post(f"{path}/resume")).status_code
        assert 200 == (await client.get(f"{path}/proxy/8000/hello")).status_code
        assert OPEN["egress"] == (await client.get(f"{path}/networkpolicy")).json()["policy"]["egress"]


async def test_a_request_that_is_older_than_a_pause_gets_409(server: World) -> None:
    """It read the row before the pause, and the gateway refuses its connection after it."""
    assert server.server is not None
    proxy = server.server.edge.proxy
    async with server.client() as client:
        name = (await client.post("/v1/sandboxes", json=BODY)).json()["id"]
        row = await server.server.registry.get(name)
        assert row is not None
        assert 202 == (await client.post(f"/v1/sandboxes/{name}/pause")).status_code
    with pytest.raises(ApiError) as refused:
        await proxy._connect(row, 8000)
    assert (409, "DOCKER::SANDBOX_NOT_RUNNING") == (refused.value.status, refused.value.code)


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        (wire.Code.NOT_RUNNING, 409, {"pause": "SANDBOX_NOT_RUNNING", "resume": "SANDBOX_NOT_PAUSED"}),
        (wire.Code.HOST, 500, {"pause": "SANDBOX_PAUSE_FAILED", "resume": "SANDBOX_RESUME_FAILED"}),
    ],
)
async def test_a_refused_pause_or_resume_changes_nothing(
    code: wire.Code, status: int, said: dict[str, str], server: World
) -> None:
    async with server.client() as client:
        name = (await client.post("/v1/sandboxes", json=BODY)).json()["id"]
        path = f"/v1/sandboxes/{name}"
        for op, state in (("pause", "Running"), ("resume", "Paused")):
            server.hostd.fail[op] = wire.RequestError(code, "no")
            assert (status, f"DOCKER::{said[op]}") == _coded(await client.post(f"{path}/{op}"))
            assert state == (await client.get(path)).json()["status"]["state"]
            server.hostd.fail.clear()
            assert 202 == (await client.post(f"{path}/{op}")).status_code


async def test_without_the_log_nothing_is_paused_or_resumed(server: World) -> None:
    async with server.client() as client:
        name = (await client.post("/v1/sandboxes", json=BODY)).json()["id"]
        for op in ("pause", "resume"):
            server.auditd.fail["record"] = wire.RequestError(wire.Code.UNAVAILABLE, "no")
            refused = await client.post(f"/v1/sandboxes/{name}/{op}")
            assert (503, "AUDIT::UNAVAILABLE") == _coded(refused)
            assert [] == server.hostd.named(op)
            server.auditd.fail.clear()
            assert 202 == (await client.post(f"/v1/sandboxes/{name}/{op}")).status_code


async def test_a_container_that_another_program_paused_can_be_resumed(server: World) -> None:
    assert server.server is not None
    async with server.client() as client:
        name = (await client.post("/v1/sandboxes", json=BODY)).json()["id"]
        server.hostd.change(name, state=HostState.PAUSED)  # for example by Docker's own command
        await server.server.observer.observe()
        assert (409, "DOCKER::SANDBOX_NOT_RUNNING") == _coded(await client.post(f"/v1/sandboxes/{name}/pause"))
        assert 202 == (await client.post(f"/v1/sandboxes/{name}/resume")).status_code
        assert HostState.RUNNING is server.hostd.sandboxes[name].state


async def test_metrics_events(server: World) -> None:
    """Accepted with an empty answer, refused if malformed."""
    async with server.client() as client:
        event = {"eventType": "sandbox.create", "createDurationMs": 5, "success": True}
        answer = await client.post("/v1/metrics/events", json=event)
        assert (204, b"") == (answer.status_code, answer.content)
        assert 422 == (await client.post("/v1/metrics/events", json={})).status_code


async def test_endpoint_of_each_port(server: World) -> None:
    """Tokens are returned only with their own port. The base is the caller's Host and mount prefix."""
    async with server.client() as client:
        name = (await client.post("/sandboxes", json=BODY)).json()["id"]
        plain = (await client.get(f"/sandboxes/{name}/endpoints/8000")).json()
        assert {"endpoint": f"{server.domain}/sandboxes/{name}/proxy/8000"} == plain
        egress = (await client.get(f"/v1/sandboxes/{name}/endpoints/18080?use_server_proxy=true")).json()
        assert f"{server.domain}/v1/sandboxes/{name}/proxy/18080" == egress["endpoint"]
        assert {"OPENSANDBOX-EGRESS-AUTH": server.tokens.egress(name)} == egress["headers"]
        both = await client.get(f"/v1/sandboxes/{name}/endpoints/80?use_server_proxy=true&expires=1")
        assert (400, "SANDBOX::INVALID_PARAMETER") == _coded(both)
        signed = await client.get(f"/v1/sandboxes/{name}/endpoints/80?expires=1")
        assert (400, "SANDBOX::INVALID_PARAMETER") == _coded(signed)


async def test_an_oversized_body_is_refused(server: World) -> None:
    """The refusal comes before the body is parsed."""
    async with server.client() as client:
        answer = await client.post("/v1/sandboxes", content=json.dumps({"x": "y" * (5 << 20)}))
    assert 413 == answer.status_code


@pytest.mark.parametrize(("pairs", "status"), [(64, 200), (65, 400), (1400, 400)])
async def test_a_filter_names_no_more_than_a_sandbox_can_have(server: World, pairs: int, status: int) -> None:
    """Each pair is a separate condition for the database, which accepts a thousand."""
    wanted = "%26".join(f"{number:x}%3D" for number in range(pairs))
    async with server.client() as client:
        assert status == (await client.get(f"/v1/sandboxes?metadata={wanted}")).status_code
