"""The published, unmodified OpenSandbox SDK against a running server (daemons are stand-ins)."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import httpx
import pytest
from opensandbox import Sandbox, SandboxManager
from opensandbox.config import ConnectionConfig
from opensandbox.exceptions import SandboxApiException
from opensandbox.exceptions.sandbox import SandboxRateLimitException
from opensandbox.models.sandboxes import (
    PVC,
    Credential,
    CredentialAuth,
    CredentialBinding,
    CredentialBindingMutationSet,
    CredentialMatch,
    CredentialMutationSet,
    CredentialProxyConfig,
    InlineCredentialSource,
    LifecycleHook,
    NetworkPolicy,
    NetworkRule,
    PeriodicLifecycleHook,
    PlatformSpec,
    SandboxFilter,
    SandboxImageAuth,
    SandboxImageSpec,
    SandboxLifecycle,
    Volume,
)
from standins import BOUNDS, IMAGE, KEY, World, world

from lifecycle.sandboxes.ceilings import Ceilings, SandboxCeiling


def connection(server: World, **changes: object) -> ConnectionConfig:
    return ConnectionConfig(api_key=KEY, domain=server.domain, disable_metrics=True, **changes)


@pytest.fixture
async def sandbox(server: World) -> AsyncIterator[Sandbox]:
    made = await Sandbox.create(
        IMAGE,
        connection_config=connection(server),
        network_policy=NetworkPolicy(default_action="deny", egress=[NetworkRule(action="allow", target="example.org")]),
        metadata={"team": "a"},
        env={"X": "1"},
    )
    yield made
    await made.close()


async def test_a_reached_ceiling_is_a_rate_limit_with_a_time_to_come_back() -> None:
    bounds = replace(BOUNDS, ceilings=Ceilings(per_key=SandboxCeiling(sandboxes=1)))
    async with world(bounds=bounds) as described, described.serving() as server:
        made = await Sandbox.create(IMAGE, connection_config=connection(server))
        with pytest.raises(SandboxRateLimitException) as caught:
            await Sandbox.create(IMAGE, connection_config=connection(server))
        assert (True, timedelta(seconds=5)) == (caught.value.is_retryable, caught.value.retry_after)
        await made.kill()
        await (await Sandbox.create(IMAGE, connection_config=connection(server))).close()
        await made.close()


async def test_create_use_and_kill(server: World, sandbox: Sandbox) -> None:
    """A sandbox is created, healthy, shown with the values that were sent, and removed by kill."""
    info = await sandbox.get_info()
    assert "Running" == info.status.state
    assert ["tail", "-f", "/dev/null"] == info.entrypoint
    assert {"team": "a"} == info.metadata
    assert IMAGE == info.image.image
    assert await sandbox.is_healthy()
    assert [44772] == sorted(set(server.hostd.ports))
    await sandbox.kill()
    assert {} == server.hostd.sandboxes
    assert {} == server.vaultd.grants
    with pytest.raises(SandboxApiException) as caught:
        await sandbox.get_info()
    assert 404 == caught.value.status_code


@pytest.mark.parametrize("through_proxy", [False, True])
async def test_connect(server: World, sandbox: Sandbox, through_proxy: bool) -> None:
    """A second client connects, in both modes, and its endpoint keeps the mount prefix."""
    other = await Sandbox.connect(sandbox.id, connection_config=connection(server, use_server_proxy=through_proxy))
    endpoint = await other.get_endpoint(44772)
    assert f"{server.domain}/v1/sandboxes/{sandbox.id}/proxy/44772" == endpoint.endpoint
    assert server.tokens.execd(sandbox.id) == endpoint.headers["X-EXECD-ACCESS-TOKEN"]
    await other.close()


async def test_policy_through_the_sdk(server: World, sandbox: Sandbox) -> None:
    """A patched rule comes first, and the gateway receives it. Deletion is idempotent."""
    await sandbox.patch_egress_rules([NetworkRule(action="deny", target="bad.example.org")])
    policy = await sandbox.get_egress_policy()
    assert ["bad.example.org", "example.org"] == [rule.target for rule in policy.egress]
    assert 1 == len(server.hostd.named("configure"))
    for _ in range(2):
        await sandbox.delete_egress_rules(["bad.example.org", "example.org"])
    assert [] == (await sandbox.get_egress_policy()).egress


async def test_renew_and_list(server: World, sandbox: Sandbox) -> None:
    """A renewal moves the expiry. The manager finds the sandbox by metadata and state."""
    renewed = await sandbox.renew(timedelta(hours=2))
    manager = await SandboxManager.create(connection(server))
    found = await manager.list_sandbox_infos(SandboxFilter(metadata={"team": "a"}, states=["running"]))
    assert [sandbox.id] == [info.id for info in found.sandbox_infos]
    assert renewed.expires_at == found.sandbox_infos[0].expires_at
    patched = await manager.patch_sandbox_metadata(sandbox.id, {"team": None, "x": "y"})
    assert {"x": "y"} == patched.metadata
    assert [] == (await manager.list_sandbox_infos(SandboxFilter(metadata={"team": "a"}))).sandbox_infos
    await manager.close()


async def test_unknown_image(server: World) -> None:
    """A missing image is a client error that names it and the available images. Nothing remains."""
    with pytest.raises(SandboxApiException) as caught:
        await Sandbox.create("nowhere/x:1", connection_config=connection(server))
    assert (400, "DOCKER::SANDBOX_IMAGE_PULL_FAILED") == (caught.value.status_code, caught.value.error.code)
    assert "nowhere/x:1" in caught.value.error.message
    assert f"; available: {IMAGE}." in caught.value.error.message
    assert [] == server.vaultd.named("open_sandbox")


class Recording(httpx.AsyncHTTPTransport):
    """A transport that forwards requests and records the places of null in their bodies."""

    def __init__(self) -> None:
        super().__init__(trust_env=False)
        self.calls: set[str] = set()
        self.nulls: set[str] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Record and send one request."""
        if request.content:
            route = f"{request.method} {request.url.path.rpartition('/')[2]}"
            self.calls.add(route)
            self.nulls |= {f"{route}: {place}" for place in _nulls(json.loads(request.content), "")}
        return await super().handle_async_request(request)


def _nulls(value: Any, place: str) -> set[str]:
    if value is None:
        return {place}
    if isinstance(value, dict):
        return set().union(*(_nulls(item, f"{place}.{key}") for key, item in value.items()))
    return set().union(*(_nulls(item, f"{place}[]") for item in value)) if isinstance(value, list) else set()


async def test_what_the_sdk_sends_as_null_is_what_the_documents_list(server: World) -> None:
    """With every option of every call that has a body. None is refused as unknown or null."""
    wire = Recording()
    connected = connection(server, transport=wire)
    made = await Sandbox.create(
        SandboxImageSpec(IMAGE, auth=SandboxImageAuth(username="u", password="p")),
        timeout=None,
        env={"A": "b"},
        metadata={"a": "b"},
        resource={"cpu": "1", "memory": "64Mi"},
        resource_requests={"cpu": "100m"},
        platform=PlatformSpec(os="linux", arch="amd64"),
        network_policy=NetworkPolicy(default_action="deny", egress=[NetworkRule(action="allow", target="example.org")]),
        credential_proxy=CredentialProxyConfig(enabled=True),
        extensions={"opensandbox.extensions.a": "b"},
        secure_access=False,
        lifecycle=SandboxLifecycle(
            preStart=LifecycleHook(command=["true"]),
            periodic=[PeriodicLifecycleHook(name="n", schedule="@hourly", command=["true"])],
        ),
        entrypoint=["sleep", "60"],
        connection_config=connected,
    )
    hooks = {
        "preStart": {"command": ["true"]},
        "periodic": [{"name": "n", "schedule": "@hourly", "command": ["true"]}],
    }
    assert hooks == json.loads(server.hostd.named("launch")[0]["env"]["OPENSANDBOX_LIFECYCLE"])
    bare = await Sandbox.create(IMAGE, timeout=timedelta(minutes=5), connection_config=connected)
    assert "OPENSANDBOX_LIFECYCLE" not in server.hostd.named("launch")[1]["env"]
    binding = CredentialBinding(
        name="b",
        match=CredentialMatch(hosts=["example.org"], methods=["GET"]),
        auth=CredentialAuth(type="bearer", credential="c"),
    )
    credential = Credential(name="c", source=InlineCredentialSource(value="a-Value-of-a-credential"))
    await made.credential_vault.create(credentials=[credential], bindings=[binding])
    await made.credential_vault.patch(credentials=CredentialMutationSet(replace=[credential]))
    await made.credential_vault.patch(expected_revision=2, bindings=CredentialBindingMutationSet(delete=["b"]))
    await made.patch_egress_rules([NetworkRule(action="deny", target="bad.example.org")])
    await made.delete_egress_rules(["bad.example.org"])
    await bare.renew(timedelta(hours=1))
    manager = await SandboxManager.create(connected)
    await manager.patch_sandbox_metadata(made.id, {"a": None})
    volume = Volume(name="v", pvc=PVC(claimName="v"), mountPath="/v")
    mounted = await Sandbox.create(IMAGE, connection_config=connected, volumes=[volume])
    for sandbox in (made, bare, mounted):
        await sandbox.close()
    await manager.close()
    await wire.aclose()  # the SDK does not close a transport that it was given

    assert {
        *("POST sandboxes", "POST renew-expiration", "PATCH metadata", "PATCH policy", "DELETE policy"),
        *("POST credential-vault", "PATCH credential-vault"),
    } == wire.calls
    pvc = "POST sandboxes: .volumes[].pvc"
    assert {
        *("POST sandboxes: .timeout", "PATCH metadata: .a"),
        *(f"{pvc}.storageClass", f"{pvc}.storage", f"{pvc}.accessModes"),
    } == wire.nulls
