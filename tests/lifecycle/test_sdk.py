"""The published, unmodified OpenSandbox SDK against a running server (daemons are stand-ins)."""

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from opensandbox import Sandbox, SandboxManager
from opensandbox.config import ConnectionConfig
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.sandboxes import NetworkPolicy, NetworkRule, SandboxFilter
from standins import IMAGE, KEY, World


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


async def test_create_use_and_kill(server: World, sandbox: Sandbox) -> None:
    """A sandbox is created, healthy, shown with what was sent, and gone after kill."""
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
    """A patched rule comes first and is what the gateway was given; deletion is idempotent."""
    await sandbox.patch_egress_rules([NetworkRule(action="deny", target="bad.example.org")])
    policy = await sandbox.get_egress_policy()
    assert ["bad.example.org", "example.org"] == [rule.target for rule in policy.egress]
    assert 1 == len(server.hostd.named("configure"))
    for _ in range(2):
        await sandbox.delete_egress_rules(["bad.example.org", "example.org"])
    assert [] == (await sandbox.get_egress_policy()).egress


async def test_renew_and_list(server: World, sandbox: Sandbox) -> None:
    """Renewal moves the expiry; the manager finds the sandbox by metadata and state."""
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
    """An image that is not there is a client error that names it and those that are there, and nothing is left."""
    with pytest.raises(SandboxApiException) as caught:
        await Sandbox.create("nowhere/x:1", connection_config=connection(server))
    assert (400, "DOCKER::SANDBOX_IMAGE_PULL_FAILED") == (caught.value.status_code, caught.value.error.code)
    assert "nowhere/x:1" in caught.value.error.message
    assert f"; available: {IMAGE}." in caught.value.error.message
    assert [] == server.vaultd.named("open_sandbox")
