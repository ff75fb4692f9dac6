"""Every body of the lifecycle, egress and vault APIs: the server refuses all input that it does not read (I4).

For each route, the test makes all bodies that differ from a valid one in one place: an unknown, misspelt or
differently written key, a null, an empty list, an empty object, at every depth. The server must refuse each with a
4xx that names the place. Otherwise its effect must be no wider than that of the valid body, or of that body without
the place.

It tests `lifecycle/api/routes/strict.py`.
"""

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from standins import IMAGE, World, world

from lifecycle.api import app
from policy.compiled import CompiledPolicy
from policy.strict import place
from tests.mutations import Mutation, Path, mutations, one_of_each, permitted

pytestmark = pytest.mark.slow

SECRET = "s3cr3t-Value-of-the-credential"
RULES: list[dict[str, str]] = [
    {"action": "deny", "target": "bad.example.org"},
    {"action": "allow", "target": "api.example.org"},
    {"action": "allow", "target": "*.example.org"},
]
CREDENTIALS = [
    {"name": "c", "source": {"type": "inline", "value": SECRET}},
    {"name": "d", "source": {"value": "another-Value-of-a-credential"}},
]
BINDING: dict[str, Any] = {
    "name": "b",
    "match": {
        "hosts": ["api.example.org"],
        "schemes": ["https"],
        "ports": [443],
        "methods": ["GET"],
        "paths": ["/v1/*"],
    },
    "auth": {"type": "apiKey", "name": "X-Key", "credential": "c"},
}
OTHER: dict[str, Any] = {
    "name": "o",
    "match": {"hosts": ["www.example.org"], "methods": ["GET"], "paths": ["/a"]},
    "auth": {"type": "customHeaders", "headers": [{"name": "x-one", "credential": "c"}]},
}
PLAIN: dict[str, Any] = {
    "name": "p",
    "match": {"hosts": ["cdn.example.org"], "methods": ["GET"], "paths": ["/p"]},
    "auth": {"type": "bearer", "credential": "d"},
}
HOOKS = {
    "preStart": {"command": ["x"], "timeoutSeconds": 5},
    "periodic": [{"name": "n", "schedule": "@hourly", "command": ["x"], "timeoutSeconds": 5}],
}
PVC = {
    "claimName": "c",
    "createIfNotExists": False,
    "deleteOnSandboxTermination": True,
    "storageClass": "s",
    "storage": "1Gi",
    "accessModes": ["ReadWriteOnce"],
}
VOLUMES: list[dict[str, Any]] = [
    {"name": "v", "mountPath": "/v", "readOnly": True, "subPath": "s", "host": {"path": "/v"}},
    {"name": "w", "mountPath": "/w", "pvc": PVC},
]
OSSFS = {
    "bucket": "abc",
    "endpoint": "e.example.org",
    "version": "2.0",
    "options": ["o"],
    "accessKeyId": "i",
    "accessKeySecret": SECRET,
}
CREATE: dict[str, Any] = {
    "image": {"uri": IMAGE, "auth": {"username": "u", "password": "p"}},
    "entrypoint": ["sleep", "1"],
    "timeout": 600,
    "resourceLimits": {"cpu": "500m", "memory": "64Mi"},
    "resourceRequests": {"cpu": "100m"},
    "env": {"A": "b"},
    "metadata": {"a": "b"},
    "networkPolicy": {"defaultAction": "deny", "egress": RULES},
    "credentialProxy": {"enabled": True},
    "secureAccess": True,
    "platform": {"os": "linux", "arch": "amd64"},
    "lifecycle": HOOKS,
    "volumes": VOLUMES,
    "extensions": {"sallyport.policy": "agents", "access.renew.extend.seconds": "300"},
}
OPEN_DEFAULT: dict[str, Any] = {
    **{key: CREATE[key] for key in ("image", "entrypoint", "resourceLimits")},
    "networkPolicy": {"defaultAction": "allow", "egress": RULES[:1]},
}
OPERATOR = """
version: 1
default: base
always_deny: [evil.example.org]
policies:
  base:
    rules:
      - {id: pkgs, host: files.example.org}
  agents:
    extends: [base]
    rules:
      - {id: api, host: api.example.org, methods: [GET], paths: ["/v1/*"]}
"""

type Route = tuple[str, str]

POOL: dict[str, Any] = {
    "name": "p",
    "template": {
        "spec": {
            "containers": [
                {
                    "name": "c",
                    "image": IMAGE,
                    "command": ["tail"],
                    "args": ["-f", "/dev/null"],
                    "resources": {"limits": {"cpu": "1"}},
                }
            ],
            "runtimeClassName": "runc",
        }
    },
    "capacitySpec": {"bufferMin": 0, "bufferMax": 0, "poolMin": 0, "poolMax": 1},
}
LIFECYCLE: dict[Route, list[Any]] = {
    ("POST", "/sandboxes"): [CREATE, OPEN_DEFAULT],
    ("POST", "/sandboxes/{sandbox}/renew-expiration"): [{"expiresAt": "2099-01-01T00:00:00Z"}],
    ("PATCH", "/sandboxes/{sandbox}/metadata"): [{"a": "c"}],
    ("PUT", "/sandboxes/{sandbox}/networkpolicy"): [
        {"defaultAction": "deny", "egress": RULES},
        {"defaultAction": "allow", "egress": RULES},
    ],
    ("PATCH", "/sandboxes/{sandbox}/networkpolicy"): [RULES[:2]],
    ("DELETE", "/sandboxes/{sandbox}/networkpolicy"): [["api.example.org"]],
    ("POST", "/sandboxes/{sandbox}/snapshots"): [{"name": "n"}],
    ("POST", "/pools"): [POOL],
    ("PUT", "/pools/{pool}"): [{"capacitySpec": POOL["capacitySpec"]}],
    ("POST", "/metrics/events"): [
        {"eventType": "sandbox.create", "createDurationMs": 5, "success": True, "sandboxId": "s", "image": "i"}
    ],
}
"""Valid bodies. A separate test checks that no route is missing."""
REFUSED: list[dict[str, Any]] = [{**CREATE, "volumes": [{"name": "o", "mountPath": "/o", "ossfs": OSSFS}]}]
"""Known fields that are not offered: these bodies are refused, and so is each mutation of them."""
POLICY: dict[Route, list[Any]] = {
    ("PUT", "/policy"): LIFECYCLE["PUT", "/sandboxes/{sandbox}/networkpolicy"],
    ("POST", "/policy"): LIFECYCLE["PUT", "/sandboxes/{sandbox}/networkpolicy"],
    ("PATCH", "/policy"): LIFECYCLE["PATCH", "/sandboxes/{sandbox}/networkpolicy"],
    ("DELETE", "/policy"): LIFECYCLE["DELETE", "/sandboxes/{sandbox}/networkpolicy"],
}
VAULT: dict[Route, list[Any]] = {
    ("POST", "/credential-vault"): [{"credentials": CREDENTIALS, "bindings": [BINDING, OTHER, PLAIN]}],
    ("PATCH", "/credential-vault"): [
        {
            "expectedRevision": 1,
            "credentials": {
                "add": [{**CREDENTIALS[0], "name": "n"}],
                "replace": [CREDENTIALS[0]],
                "delete": ["d"],
            },
            "bindings": {"add": [OTHER], "replace": [BINDING], "delete": ["p"]},
        }
    ],
}
BASE_VAULT = {"credentials": CREDENTIALS, "bindings": [BINDING, PLAIN]}
OPEN_KEYS = ("env", "metadata", "extensions")

HOSTS = [f"{name}.example.org" for name in ("api", "www", "cdn", "bad", "evil", "files", "other")] + ["else.test"]
PATHS = ("/v1/x", "/a", "/p", "/")


def powers(server: World, sandbox: str) -> frozenset[str]:
    """Return the permissions of a sandbox: those of its policy, and its grants."""
    policy = CompiledPolicy.from_json(server.hostd.policies[sandbox])
    return permitted(policy, HOSTS, PATHS) | {f"has {grant}" for grant in server.vaultd.grants[sandbox]}


@pytest.fixture
async def ruled() -> AsyncIterator[World]:
    """Run a server under an operator's document."""
    async with world(OPERATOR) as described, described.serving() as running:
        yield running


class Caller:
    """The client of one server, with a sandbox that has the policy and vault of the base."""

    def __init__(self, server: World, client: httpx.AsyncClient) -> None:
        self.server = server
        self.client = client
        self.sandbox = ""

    async def renewed(self, *, vault: bool) -> None:
        """Replace the sandbox by a new one."""
        body = {**OPEN_DEFAULT, "networkPolicy": {"egress": RULES}, "credentialProxy": {"enabled": True}}
        self.sandbox = (await self.client.post("/v1/sandboxes", json={**body, "timeout": 600})).json()["id"]
        if vault:
            made = await self.egress("POST", "/credential-vault", BASE_VAULT)
            assert 201 == made.status_code, made.text

    async def egress(self, method: str, path: str, body: Any) -> httpx.Response:
        return await self.client.request(method, f"/v1/sandboxes/{self.sandbox}/proxy/18080{path}", json=body)

    async def lifecycle(self, method: str, path: str, body: Any) -> httpx.Response:
        return await self.client.request(method, f"/v1{path.format(sandbox=self.sandbox, pool='p')}", json=body)

    async def pool(self, route: Route, body: Any) -> httpx.Response:
        """Send a body about a pool, which gives no permission to a sandbox. No pool is left."""
        if route[0] == "PUT":
            await self.lifecycle("POST", "/pools", POOL)
        answer = await self.lifecycle(*route, body)
        for made in (await self.client.get("/v1/pools")).json()["items"]:
            await self.client.delete(f"/v1/pools/{made['name']}")
        return answer

    async def call(self, route: Route, body: Any) -> tuple[httpx.Response, frozenset[str]]:
        """Send a body to a sandbox that no call has changed.

        Return the answer and the sandbox's permissions after it.
        """
        method, path = route
        if path.startswith("/pools"):
            return await self.pool(route, body), frozenset()
        if not self.sandbox:
            await self.renewed(vault=route == ("PATCH", "/credential-vault"))
        send = self.lifecycle if route in LIFECYCLE else self.egress
        answer = await send(method, path, body)
        if not answer.is_success:
            return answer, frozenset()
        sandbox, self.sandbox = self.sandbox, ""
        return answer, powers(self.server, answer.json()["id"] if route == ("POST", "/sandboxes") else sandbox)


WHOLE = pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.extended)], ids=["some", "all"])
"""One mutation of each kind at each place of a body, or all."""


def drawn(route: Route, body: Any, *, whole: bool) -> list[Mutation]:
    """Return the mutations of a body, without those of maps with free keys."""

    def is_open(path: Path) -> bool:
        return path[-1:] in {(key,) for key in OPEN_KEYS} or (route[1].endswith("/metadata") and not path)

    found = mutations(body, is_open)
    return list(found) if whole else one_of_each(found)


def names_the_place(answer: httpx.Response, mutation: Mutation) -> bool:
    """Return whether a refusal names the place: a key's whole path, or for a value a key that contains it."""
    if mutation.kind in ("unknown", "misspelt", "case"):
        return place(mutation.path) in answer.text
    keys = [part.removesuffix("s").lower() for part in mutation.path if isinstance(part, str)]
    return not keys or any(key in answer.text.lower() for key in keys)


@WHOLE
@pytest.mark.parametrize("route", [*LIFECYCLE, *POLICY, *VAULT], ids=" ".join)
async def test_what_is_not_read_is_refused_or_opens_nothing(ruled: World, route: Route, whole: bool) -> None:
    """One change at one place of a valid body."""
    kinds = set()
    async with ruled.client() as client:
        caller = Caller(ruled, client)
        for body in (LIFECYCLE | POLICY | VAULT)[route]:
            valid, bound = await caller.call(route, body)
            assert valid.is_success, valid.text
            for mutation in drawn(route, body, whole=whole):
                answer, opened = await caller.call(route, mutation.document)
                assert answer.status_code < 500, (mutation, answer.text)
                if answer.status_code >= 400:
                    kinds.add(mutation.kind)
                    assert names_the_place(answer, mutation), (mutation, answer.text)
                    continue
                assert mutation.kind not in ("unknown", "misspelt"), (mutation, answer.text)
                if not opened <= bound:
                    assert mutation.kind.startswith("empty"), (mutation, opened - bound)
                    _, without = await caller.call(route, mutation.without)
                    assert opened <= without, (mutation, opened - without)
    assert kinds


@WHOLE
@pytest.mark.parametrize("body", REFUSED, ids=["ossfs"])
async def test_what_is_not_offered_stays_refused(ruled: World, body: dict[str, Any], whole: bool) -> None:
    """A field of the contract without an effect here is refused by name, and so is any error in it."""
    async with ruled.client() as client:
        assert 400 == (await client.post("/v1/sandboxes", json=body)).status_code
        found = mutations(body, lambda path: path[:1] != ("volumes",))
        for mutation in found if whole else one_of_each(found):
            if mutation.path[0] == "volumes" and len(mutation.path) > 1:
                answer = await client.post("/v1/sandboxes", json=mutation.document)
                refused = 400 <= answer.status_code < 500
                assert refused or mutation.kind.startswith("empty"), (mutation, answer.text)


async def test_every_route_with_a_body_is_here(server: World) -> None:
    """By the application's own description. Every route of the server reads strictly."""
    assert server.server is not None
    described = app.api(server.server.context).openapi()["paths"]
    bodies = {
        (method.upper(), path.removeprefix("/v1"))
        for path, operations in described.items()
        for method, operation in operations.items()
        if "requestBody" in operation
    }
    assert bodies == {(method, path) for method, path in LIFECYCLE}


PLACES = [
    (("POST", "/sandboxes"), b'{"image": {"uri": "a", "uri": "b"}}'),
    (("POST", "/sandboxes"), b'{"networkPolicy": {"defaultAction": "deny"}, "networkPolicy": {}}'),
    (("POST", "/sandboxes"), b'{"env": {"A": "1", "A": "2"}}'),
    (("PUT", "/sandboxes/{sandbox}/networkpolicy"), b'{"defaultAction": "deny", "defaultAction": "allow"}'),
    (("PUT", "/policy"), b'{"egress": [], "Egress": [{"action": "allow", "target": "*.example.org"}]}'),
    (("PUT", "/policy"), b'{"defaultAction": "deny", "defaultAction": "allow"}'),
    (("POST", "/credential-vault"), b'{"credentials": [], "credentials": []}'),
]


@pytest.mark.parametrize(("route", "text"), PLACES)
async def test_a_key_that_is_given_twice_is_refused(ruled: World, route: Route, text: bytes) -> None:
    """The server does not choose one of the values."""
    async with ruled.client() as client:
        caller = Caller(ruled, client)
        await caller.renewed(vault=False)
        base = "/v1" if route in LIFECYCLE else "/v1/sandboxes/{sandbox}/proxy/18080"
        url = f"{base}{route[1]}".format(sandbox=caller.sandbox)
        answer = await client.request(route[0], url, content=text, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500
    assert "duplicate key" in answer.text


async def test_a_null_policy_denies_all(ruled: World) -> None:
    """On create it does not mean "no policy", which would be the operator's default. On `/policy` it is a reset."""
    async with ruled.client() as client:
        caller = Caller(ruled, client)
        body = {key: OPEN_DEFAULT[key] for key in ("image", "entrypoint", "resourceLimits")}
        absent, default = await caller.call(("POST", "/sandboxes"), body)
        null, opened = await caller.call(("POST", "/sandboxes"), {**body, "networkPolicy": None})
        assert (202, 202) == (absent.status_code, null.status_code)
        assert (True, frozenset()) == (bool(default), opened)
        reset, opened = await caller.call(("PUT", "/policy"), None)
        assert (200, frozenset()) == (reset.status_code, opened)


async def test_a_query_parameter_that_is_not_read_is_refused(server: World) -> None:
    """A misspelt filter would list everything."""
    async with server.client() as client:
        for query in ("stat=Paused", "State=Paused", "metadat=a%3Db", "page_size=1", "page=1&page=2", "zzz"):
            answer = await client.get(f"/v1/sandboxes?{query}")
            assert (400, "SANDBOX::INVALID_PARAMETER") == (answer.status_code, answer.json()["code"]), query
            assert re.split("[=&]", query)[0] in answer.json()["message"]
        for route in ("sandboxes", "snapshots"):
            assert 200 == (await client.get(f"/v1/{route}?state=Paused&state=Running")).status_code
            assert 200 == (await client.get(f"/v1/{route}?{'&'.join(['state=Paused'] * 32)}")).status_code
            assert 400 <= (await client.get(f"/v1/{route}?{'&'.join(['state=Paused'] * 33)}")).status_code < 500


async def test_a_call_without_a_body_takes_none(server: World) -> None:
    """The server would not read the body's content."""
    async with server.client() as client:
        name = (await client.post("/v1/sandboxes", json=OPEN_DEFAULT)).json()["id"]
        assert 400 == (await client.post(f"/v1/sandboxes/{name}/resume", json={"a": 1})).status_code
        assert 409 == (await client.post(f"/v1/sandboxes/{name}/resume", json={})).status_code
        assert 400 == (await client.request("DELETE", f"/v1/sandboxes/{name}", json={"dryRun": True})).status_code
        assert 204 == (await client.delete(f"/v1/sandboxes/{name}")).status_code


async def test_the_operator_names_fields_that_may_be_ignored() -> None:
    """Only those, at the top of a body, and never a field that the server reads."""
    fields = ("newField", "networkPolicy", "b")
    async with world(ignored_fields=fields) as described, described.serving() as server, server.client() as client:
        made = await client.post("/v1/sandboxes", json={**OPEN_DEFAULT, "newField": {"a": 1}})
        assert 202 == made.status_code, made.text
        assert "bad.example.org" in str(server.hostd.policies[made.json()["id"]])
        for body in ({**OPEN_DEFAULT, "newfield": 1}, {**OPEN_DEFAULT, "image": {"uri": IMAGE, "newField": 1}}):
            assert 400 == (await client.post("/v1/sandboxes", json=body)).status_code
        path = f"/v1/sandboxes/{made.json()['id']}/metadata"
        assert {"b": "1"} == (await client.patch(path, json={"b": "1"})).json()["metadata"]
