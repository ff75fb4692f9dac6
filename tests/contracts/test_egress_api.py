"""The egress API on port 18080: exact texts and order.

It tests `lifecycle/egress/credential_vault.py`.
"""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from standins import IMAGE, KEY, World, world

import wire
from vault.grants import Grant

SECRET = "s3cr3t-Value-of-the-credential"
POLICY = {"defaultAction": "deny", "egress": [{"action": "allow", "target": "api.example.org"}]}
BODY: dict[str, Any] = {
    "image": {"uri": IMAGE},
    "entrypoint": ["sleep", "1"],
    "resourceLimits": {},
    "networkPolicy": POLICY,
    "credentialProxy": {"enabled": True},
}
VAULT: dict[str, Any] = {
    "credentials": [{"name": "c", "source": {"type": "inline", "value": SECRET}}],
    "bindings": [{"name": "b", "match": {"hosts": ["API.example.org"]}, "auth": {"type": "bearer", "credential": "c"}}],
}


class Api:
    """The egress API of one sandbox."""

    def __init__(self, server: World, client: httpx.AsyncClient, sandbox: str) -> None:
        self.server = server
        self.client = client
        self.sandbox = sandbox

    async def call(self, method: str, path: str, content: Any = None, **headers: str) -> httpx.Response:
        fields = {"OPENSANDBOX-EGRESS-AUTH": self.server.tokens.egress(self.sandbox)}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        body = {"content": content} if isinstance(content, (bytes, str)) else {"json": content}
        return await self.client.request(
            method, f"/v1/sandboxes/{self.sandbox}/proxy/18080{path}", headers=fields, **body
        )

    @property
    def lists(self) -> str:
        """Return the gateway's policy as text."""
        return str(self.server.hostd.policies[self.sandbox])


@pytest.fixture
async def api(server: World) -> AsyncIterator[Api]:
    """Return a sandbox's egress API. The caller has no API key."""
    async with server.client() as owner:
        name = (await owner.post("/v1/sandboxes", json=BODY)).json()["id"]
    async with server.client(None) as client:
        yield Api(server, client, name)


async def test_health_needs_no_token(api: Api) -> None:
    """The answer has no newline."""
    answer = await api.call("GET", "/healthz", OPENSANDBOX_EGRESS_AUTH="")
    assert (200, b"ok") == (answer.status_code, answer.content)


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "text"),
    [
        ("GET", "/other", None, 404, "404 page not found\n"),
        ("OPTIONS", "/policy", None, 405, "method not allowed\n"),
        ("PATCH", "/policy", b"", 400, "empty body\n"),
        ("PATCH", "/policy", [], 400, "invalid patch rules: empty array\n"),
        ("DELETE", "/policy", [], 400, "invalid delete targets: empty array\n"),
        ("PUT", "/policy", {"defaultAction": "x"}, 400, 'invalid policy: unsupported defaultAction "x"\n'),
        ("PUT", "/policy", b"y" * (1024 * 1024 + 1), 400, "failed to read body: request body too large\n"),
        ("GET", "/credential-vault", None, 404, "credential vault not found\n"),
        ("DELETE", "/credential-vault", None, 404, "credential vault not found\n"),
        ("GET", "/credential-vault/credentials/x", None, 404, "credential vault not found\n"),
        ("GET", "/credential-vault/x", None, 404, "not found\n"),
        ("GET", "/credential-vault/_active", None, 403, "forbidden\n"),
    ],
)
async def test_refusals_are_one_line_of_text(
    api: Api, method: str, path: str, content: Any, status: int, text: str
) -> None:
    """The texts are exactly the contract's, and nosniff is set."""
    answer = await api.call(method, path, content)
    assert (status, text) == (answer.status_code, answer.text)
    assert "text/plain; charset=utf-8" == answer.headers["content-type"]
    assert "nosniff" == answer.headers["x-content-type-options"]


async def test_a_token_is_needed(api: Api) -> None:
    """A missing token, a wrong one and another sandbox's are refused. An API key is accepted."""
    for token in ("", "x", api.server.tokens.egress("sbx-other"), api.server.tokens.execd(api.sandbox)):
        answer = await api.call("GET", "/policy", OPENSANDBOX_EGRESS_AUTH=token)
        assert (401, "unauthorized\n") == (answer.status_code, answer.text)
    with_key = await api.call("GET", "/policy", OPENSANDBOX_EGRESS_AUTH="", OPEN_SANDBOX_API_KEY=KEY)
    assert 200 == with_key.status_code


async def test_policy_documents(api: Api) -> None:
    """Key order, arrays, modes and reasons."""
    answer = await api.call("GET", "/policy")
    assert (
        '{"status":"ok","mode":"enforcing","enforcementMode":"dns+nft","policy":{"egress":'
        '[{"action":"allow","target":"api.example.org"}],"defaultAction":"deny"}}\n'
    ) == answer.text
    reset = await api.call("POST", "/policy", b" ")
    assert '{"status":"ok","mode":"deny_all","reason":"policy reset to default deny-all"}\n' == reset.text
    nothing = await api.call("DELETE", "/policy", ["x.example"])
    assert "no matching targets found" == nothing.json()["reason"]
    assert [] == (await api.call("GET", "/policy")).json()["policy"]["egress"]


async def test_a_patch_is_prepended_and_in_force_when_answered(api: Api) -> None:
    """Patch rules come first, in their order. The first rule of each target is kept. Both APIs behave the same."""
    rules = [{"action": "deny", "target": "Z.example."}, {"action": "deny", "target": "api.example.org"}]
    assert 200 == (await api.call("PATCH", "/policy", rules)).status_code
    policy = (await api.call("GET", "/policy")).json()["policy"]
    assert [("deny", "Z.example."), ("deny", "api.example.org")] == [
        (rule["action"], rule["target"]) for rule in policy["egress"]
    ]
    assert "z.example" in api.lists
    async with api.server.client() as owner:
        path = f"/v1/sandboxes/{api.sandbox}/networkpolicy"
        patched = await owner.patch(path, json=[{"action": "allow", "target": "z.example"}])
        assert ["z.example", "api.example.org"] == [rule["target"] for rule in patched.json()["policy"]["egress"]]
        removed = await owner.request("DELETE", path, json=["z.example", "unknown.example"])
        assert ["api.example.org"] == [rule["target"] for rule in removed.json()["policy"]["egress"]]
        assert "dns+nft" == removed.json()["enforcementMode"]
        assert 401 == (await owner.get(path, headers={"OPEN-SANDBOX-API-KEY": "x"})).status_code


async def test_a_gateway_that_does_not_confirm_keeps_the_former_policy(api: Api) -> None:
    """The answer is 500, and a later read returns the former policy."""
    api.server.hostd.fail["configure"] = wire.RequestError(wire.Code.UNAVAILABLE, "x")
    answer = await api.call("PATCH", "/policy", [{"action": "allow", "target": "new.example"}])
    assert (500, True) == (answer.status_code, answer.text.startswith("failed to apply nftables policy: "))
    del api.server.hostd.fail["configure"]
    policy = (await api.call("GET", "/policy")).json()["policy"]
    assert ["api.example.org"] == [rule["target"] for rule in policy["egress"]]
    assert "new.example" not in api.lists


async def test_vault_life(api: Api) -> None:
    """Created, shown without values, changed by revisions, revoked. The value is stored only at vaultd."""
    made = await api.call("POST", "/credential-vault", VAULT)
    assert 201 == made.status_code, made.text
    match = {
        "hosts": ["api.example.org"],
        "schemes": ["https"],
        "methods": ["GET", "POST", "PUT", "PATCH", "DELETE"],
        "paths": ["/*"],
    }
    binding = {"name": "b", "revision": 1, "match": match, "auth": {"type": "bearer"}}
    credential = {"name": "c", "sourceType": "inline", "revision": 1}
    assert {"revision": 1, "credentials": [credential], "bindings": [binding]} == made.json()
    assert credential == (await api.call("GET", "/credential-vault/credentials/c")).json()
    assert {"revision": 1, "bindings": [binding]} == (await api.call("GET", "/credential-vault/bindings")).json()
    assert 409 == (await api.call("POST", "/credential-vault", VAULT)).status_code

    vaultd = api.server.vaultd
    assert [SECRET] == list(vaultd.inline[api.sandbox].values())
    name = next(iter(vaultd.inline[api.sandbox]))
    assert [Grant.make(name, "api.example.org", 443, "https")] == vaultd.grants[api.sandbox]
    assert name in api.lists
    assert SECRET not in api.lists
    for record in api.server.auditd.records:
        assert SECRET not in str(record)

    wrong = await api.call("PATCH", "/credential-vault", {"expectedRevision": 7})
    assert (409, "expectedRevision 7 does not match current revision 1\n") == (wrong.status_code, wrong.text)
    rotated = {"credentials": {"replace": [{"name": "c", "source": {"value": "another-value"}}]}}
    assert 2 == (await api.call("PATCH", "/credential-vault", rotated)).json()["revision"]
    assert ["another-value"] == list(vaultd.inline[api.sandbox].values())
    added = {"credentials": {"add": [{"name": "d", "source": {"value": "third-value"}}]}}
    assert 3 == (await api.call("PATCH", "/credential-vault", added)).json()["revision"]
    assert ["another-value", "third-value"] == sorted(vaultd.inline[api.sandbox].values())

    uncover = await api.call("PUT", "/policy", {})
    assert (400, True) == (uncover.status_code, uncover.text.startswith("credential vault policy validation: "))

    gone = await api.call("DELETE", "/credential-vault")
    assert (204, b"") == (gone.status_code, gone.content)
    assert ({}, []) == (vaultd.inline[api.sandbox], vaultd.grants[api.sandbox])
    assert 404 == (await api.call("GET", "/credential-vault")).status_code
    database = (api.server.config.state_dir / "sallyport.db").read_bytes()
    assert SECRET.encode() not in database


async def test_a_value_goes_to_another_host_only_when_it_is_given_again(api: Api) -> None:
    """A wider binding and a new one are refused without the value, and accepted with it. A narrower one needs none."""
    rules = [{"action": "allow", "target": target} for target in ("api.example.org", "b.example.org")]
    assert 200 == (await api.call("POST", "/policy", {"egress": rules})).status_code
    assert 201 == (await api.call("POST", "/credential-vault", VAULT)).status_code
    (old,) = VAULT["bindings"]
    name = VAULT["credentials"][0]["name"]
    wide = {**old, "match": {**old["match"], "hosts": ["api.example.org", "b.example.org"]}}
    more = {**old, "name": "more", "match": {"hosts": ["b.example.org"]}}
    again = {"replace": [{"name": name, "source": {"value": "another-value"}}]}
    calls = len(api.server.vaultd.named("regrant"))
    for change in ({"replace": [wide]}, {"add": [more]}):
        refused = await api.call("PATCH", "/credential-vault", {"bindings": change})
        assert 400 == refused.status_code
        assert "give its value again" in refused.text
    assert calls == len(api.server.vaultd.named("regrant"))
    widened = await api.call("PATCH", "/credential-vault", {"bindings": {"replace": [wide]}, "credentials": again})
    assert 200 == widened.status_code, widened.text
    assert 200 == (await api.call("PATCH", "/credential-vault", {"bindings": {"replace": [old]}})).status_code
    back = await api.call("PATCH", "/credential-vault", {"bindings": {"replace": [wide]}})
    assert 400 == back.status_code


async def test_revocation_works_with_the_gateway_down(api: Api) -> None:
    """A revocation reaches vaultd first. The gateway gets its policy when it works again."""
    await api.call("POST", "/credential-vault", VAULT)
    api.server.hostd.fail["configure"] = wire.RequestError(wire.Code.UNAVAILABLE, "x")
    assert 204 == (await api.call("DELETE", "/credential-vault")).status_code
    assert {} == api.server.vaultd.inline[api.sandbox]
    del api.server.hostd.fail["configure"]
    assert api.server.server is not None
    await api.server.server.observer.observe()
    assert "inline:" not in api.lists


async def test_a_vault_that_is_not_activated_is_not_made(api: Api) -> None:
    """The answer is 412, there is no vault, and vaultd no longer has the value."""
    api.server.hostd.fail["configure"] = wire.RequestError(wire.Code.UNAVAILABLE, "x")
    answer = await api.call("POST", "/credential-vault", VAULT)
    assert (412, "credential proxy is not ready\n") == (answer.status_code, answer.text)
    assert {} == api.server.vaultd.inline[api.sandbox]
    assert 404 == (await api.call("GET", "/credential-vault")).status_code


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"extra": 1}, 'unknown field "extra"'),
        (
            {"credentials": [{"name": "c", "source": {"value": "x", "ttl": 1}}]},
            'unknown field "credentials[0].source.ttl"',
        ),
        (
            {"bindings": [{**VAULT["bindings"][0], "match": {"hosts": ["api.example.org"], "method": ["GET"]}}]},
            'unknown field "bindings[0].match.method"',
        ),
        (
            {"bindings": [{**VAULT["bindings"][0], "match": {"hosts": ["api.example.org"], "methods": []}}]},
            'binding "b": match.methods cannot be empty',
        ),
        ({"bindings": None}, "bindings: must not be null"),
        ({"credentials": [{"name": " ", "source": {"value": "x"}}]}, "credential name cannot be blank"),
        ({"credentials": [{"name": "c", "source": {"value": ""}}]}, 'credential "c" inline value cannot be empty'),
        ({"credentials": []}, 'binding "b" references unknown credential "c"'),
        ({"credentials": [{"name": "c", "source": {"value": "a\nb"}}]}, "cannot be sent in a header"),
        ({"credentials": [{"name": "c", "source": {"value": "a\x1bb"}}]}, "cannot be sent in a header"),
        ({"credentials": [{"name": "c", "source": {"value": "a\x7fb"}}]}, "cannot be sent in a header"),
        (
            {"bindings": [{**VAULT["bindings"][0], "match": {"hosts": ["other.example.org"]}}]},
            'binding "b" host "other.example.org" is not allowed by egress policy',
        ),
        (
            {
                "bindings": [
                    {
                        **VAULT["bindings"][0],
                        "auth": {
                            "type": "passthrough",
                            "substitutions": [{"credential": "d", "placeholder": "p", "in": ["path"]}],
                        },
                    }
                ]
            },
            'binding "b" references unknown credential "d"',
        ),
    ],
)
async def test_vaults_that_are_refused(api: Api, change: dict[str, Any], text: str) -> None:
    """The answer is 400 with the contract's text, and vaultd receives nothing."""
    answer = await api.call("POST", "/credential-vault", {**VAULT, **change})
    assert 400 == answer.status_code
    assert text in answer.text
    assert [] == api.server.vaultd.named("regrant")


def full_vault(number: int, value: str) -> dict[str, Any]:
    """Return a vault with `number` credentials, each with its own binding."""
    names = [f"n{position}" for position in range(number)]
    return {
        "credentials": [{"name": name, "source": {"type": "inline", "value": f"{value}-{name}"}} for name in names],
        "bindings": [
            {
                "name": name,
                "match": {"hosts": ["api.example.org"], "paths": [f"/{name}"]},
                "auth": {"type": "bearer", "credential": name},
            }
            for name in names
        ],
    }


async def test_a_full_vault_can_still_be_changed(api: Api) -> None:
    """The limit is 256. While all values are replaced, vaultd also has the old ones. One more credential is refused."""
    most = full_vault(256, "the-first-value")
    assert 201 == (await api.call("POST", "/credential-vault", most)).status_code
    change = {"credentials": {"replace": full_vault(256, "the-second-value")["credentials"]}}
    changed = await api.call("PATCH", "/credential-vault", change)
    assert 200 == changed.status_code, changed.text
    assert 256 == len(api.server.vaultd.inline[api.sandbox])
    assert {"the-second-value"} == {
        value.rpartition("-")[0] for value in api.server.vaultd.inline[api.sandbox].values()
    }
    assert 204 == (await api.call("DELETE", "/credential-vault")).status_code
    hosts = [f"h{number}.api.example.org" for number in range(257)]
    assert (
        200
        == (
            await api.call("POST", "/policy", {"egress": [{"action": "allow", "target": "*.api.example.org"}]})
        ).status_code
    )
    wide = {**VAULT, "bindings": [{**VAULT["bindings"][0], "match": {"hosts": hosts}}]}
    refused = await api.call("POST", "/credential-vault", wide)
    assert (400, "at most 256 pairs of a credential and a host\n") == (refused.status_code, refused.text)


async def test_without_credential_proxy_there_is_no_vault(server: World) -> None:
    """The answer is 412 with the contract's text."""
    async with server.client() as client:
        body = {key: value for key, value in BODY.items() if key != "credentialProxy"}
        api = Api(server, client, (await client.post("/v1/sandboxes", json=body)).json()["id"])
        answer = await api.call("POST", "/credential-vault", VAULT)
        assert (412, "credential vault requires transparent mitmproxy\n") == (answer.status_code, answer.text)


OPERATOR = """
version: 1
default: base
policies:
  base:
    rules:
      - {id: pkgs, host: files.example.org}
  agents:
    extends: [base]
    rules:
      - {id: api, host: api.corp.example.org, inject: {secret: api-token, as: bearer}}
"""


async def test_operator_policies() -> None:
    """A named policy has its grants. Without a name the default is used. A changed file is soon in force."""
    async with world(OPERATOR) as described, described.serving() as server, server.client() as client:
        plain = {key: BODY[key] for key in ("image", "entrypoint", "resourceLimits")}
        default = (await client.post("/v1/sandboxes", json=plain)).json()["id"]
        named = (
            await client.post("/v1/sandboxes", json={**plain, "extensions": {"sallyport.policy": "agents"}})
        ).json()["id"]
        assert [] == server.vaultd.grants[default]
        wanted = Grant.make("api-token", "api.corp.example.org", 443, "https")
        assert [wanted] == server.vaultd.grants[named]
        assert "files.example.org" in str(server.hostd.policies[default])
        assert "allow_all" == (await Api(server, client, named).call("GET", "/policy")).json()["mode"]
        path = server.config.run_dir / "policies.yaml"
        path.write_text(OPERATOR.replace("files.example.org", "other.example.org"))
        assert server.server is not None
        if await server.policies.reload():
            await server.server.observer.recompile()
        assert "other.example.org" in str(server.hostd.policies[default])
