"""The snapshot calls: codes, states and messages of the contract; a complete snapshot or none after each failure.

The subject is `lifecycle/snapshots/`, its routes and its table on the schema of
`lifecycle/database/versions/v0006_snapshots.py`, with a stand-in for hostd and on both databases.
"""

import asyncio
import json
from typing import Any

import pytest
from standins import IMAGE, SNAPSHOT_BYTES, World, world
from test_transactions import until

import wire
from lifecycle.snapshots import service
from lifecycle.snapshots.snapshot import SnapshotBounds
from wire.api.states import HostState
from wire.ids import SNAPSHOT_ID

pytestmark = pytest.mark.slow

BODY: dict[str, Any] = {"image": {"uri": IMAGE}, "entrypoint": ["sleep", "1"], "resourceLimits": {}}
_NOWHERE = "00000000-0000-4000-8000-000000000000"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "SETTLE_SECONDS", 0.02)


async def _sandbox(client: Any, **body: Any) -> str:
    answer = await client.post("/v1/sandboxes", json=BODY | body)
    assert 202 == answer.status_code, answer.text
    return str(answer.json()["id"])


async def _snapshot(client: Any, sandbox: str, **body: Any) -> str:
    answer = await client.post(f"/v1/sandboxes/{sandbox}/snapshots", json=body)
    assert 202 == answer.status_code, answer.text
    return str(answer.json()["id"])


async def _state(client: Any, snapshot: str) -> tuple[str, str]:
    status = (await client.get(f"/v1/snapshots/{snapshot}")).json()["status"]
    return status["state"], status["reason"]


async def _settled(client: Any, snapshot: str) -> tuple[str, str]:
    async def done() -> bool:
        return (await _state(client, snapshot))[0] not in ("Creating", "Deleting")

    await until(done)
    return await _state(client, snapshot)


def _fault(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


async def test_a_snapshot_is_accepted_becomes_ready_and_is_removed(server: World) -> None:
    """The answers have the form, the reasons and the messages of the contract, and the header `Location`."""
    async with server.client() as client:
        sandbox = await _sandbox(client)
        server.hostd.hold["take_snapshot"] = asyncio.Event()
        answer = await client.post(f"/v1/sandboxes/{sandbox}/snapshots", json={"name": "first"})
        snapshot = answer.json()["id"]
        assert 202 == answer.status_code
        assert SNAPSHOT_ID.fullmatch(snapshot)
        assert f"/v1/snapshots/{snapshot}" == answer.headers["Location"]
        assert {"id", "sandboxId", "name", "status", "createdAt"} == answer.json().keys()
        status = answer.json()["status"]
        assert ("Creating", "snapshot_accepted", "Snapshot creation accepted.") == (
            status["state"],
            status["reason"],
            status["message"],
        )
        assert server.server is not None
        await server.server.context.snapshots.settle()  # hostd does not list it yet
        assert ("Creating", "snapshot_accepted") == await _state(client, snapshot)
        assert (409, "SNAPSHOT::INVALID_STATE") == _fault(await client.delete(f"/v1/snapshots/{snapshot}"))
        assert (409, "SNAPSHOT::NOT_READY") == _fault(
            await client.post("/v1/sandboxes", json={"snapshotId": snapshot, "resourceLimits": {}})
        )
        assert (409, "SNAPSHOT::RUNTIME_CREATE_CONFLICT") == _fault(
            await client.post(f"/v1/sandboxes/{sandbox}/snapshots")
        )
        server.hostd.hold.pop("take_snapshot").set()
        assert ("Ready", "snapshot_runtime_ready") == await _settled(client, snapshot)
        assert 204 == (await client.delete(f"/v1/snapshots/{snapshot}")).status_code
        assert {} == server.hostd.snapshots
        assert (404, "SNAPSHOT::NOT_FOUND") == _fault(await client.get(f"/v1/snapshots/{snapshot}"))
        assert (404, "SNAPSHOT::NOT_FOUND") == _fault(await client.delete(f"/v1/snapshots/{snapshot}"))
    kinds = [record["kind"] for record in server.auditd.records if record.get("snapshot") == snapshot]
    assert ["lifecycle.snapshot", "lifecycle.snapshot_delete"] == kinds


async def test_a_call_without_a_body_and_one_with_an_empty_one_name_nothing(server: World) -> None:
    """A snapshot without a name has no member `name`. An empty or long name, and null, are refused."""
    async with server.client() as client:
        sandbox = await _sandbox(client)
        for content in ("", "{}"):
            headers = {"Content-Type": "application/json"} if content else {}
            answer = await client.post(f"/v1/sandboxes/{sandbox}/snapshots", content=content, headers=headers)
            assert 202 == answer.status_code, answer.text
            assert "name" not in answer.json()
            await _settled(client, answer.json()["id"])
        for body in ({"name": ""}, {"name": "n" * 257}, {"name": None}):
            assert 422 == (await client.post(f"/v1/sandboxes/{sandbox}/snapshots", json=body)).status_code
        unknown = await client.post(f"/v1/sandboxes/{sandbox}/snapshots", json={"live": True})
        assert (400, "SANDBOX::INVALID_PARAMETER") == _fault(unknown)


async def test_only_a_running_sandbox_has_snapshots(server: World) -> None:
    """A paused sandbox is 409, an unknown one 404."""
    async with server.client() as client:
        sandbox = await _sandbox(client)
        await client.post(f"/v1/sandboxes/{sandbox}/pause")
        answer = await client.post(f"/v1/sandboxes/{sandbox}/snapshots")
        assert (409, "SNAPSHOT::INVALID_SOURCE_STATE") == _fault(answer)
        assert 404 == (await client.post("/v1/sandboxes/sbx-none/snapshots")).status_code
        assert [] == server.hostd.named("take_snapshot")


async def test_lists_have_the_filters_and_pages_of_the_contract(server: World) -> None:
    """The newest is first. Names and states are compared exactly; an unknown state matches nothing."""
    async with server.client() as client:
        one, other = await _sandbox(client), await _sandbox(client)
        made = []
        for sandbox, name in ((one, "a"), (one, "b"), (other, "a"), (one, "a")):
            made.append(await _snapshot(client, sandbox, name=name))
            await _settled(client, made[-1])

        async def listed(query: str) -> list[str]:
            answer = await client.get(f"/v1/snapshots{query}")
            return [item["id"] for item in answer.json()["items"]]

        assert made[::-1] == await listed("")
        assert [made[3], made[1], made[0]] == await listed(f"?sandboxId={one}")
        assert [made[3], made[0]] == await listed(f"?sandboxId={one}&name=a")
        assert made[::-1] == await listed("?state=Ready&state=Failed")
        assert [] == await listed("?state=ready")
        assert [] == await listed("?name=%00")
        page = (await client.get("/v1/snapshots?page=2&pageSize=3")).json()
        assert [made[0]] == [item["id"] for item in page["items"]]
        assert {"page": 2, "pageSize": 3, "totalItems": 4, "totalPages": 2, "hasNextPage": False} == page["pagination"]
        assert 422 == (await client.get("/v1/snapshots?pageSize=201")).status_code
        assert 400 == (await client.get("/v1/snapshots?sandbox=x")).status_code


async def test_a_restored_sandbox_inherits_nothing_but_the_files(server: World) -> None:
    """Expiry, metadata, extensions, policy, environment, token and CA of the source are not those of the restored."""
    async with server.client() as client:
        policy = {"defaultAction": "deny", "egress": [{"action": "allow", "target": "example.com"}]}
        source = await _sandbox(
            client,
            timeout=600,
            metadata={"team": "a"},
            env={"SECRET": "x"},
            networkPolicy=policy,
            extensions={"opensandbox.extensions.x": "1"},
        )
        snapshot = await _snapshot(client, source)
        await _settled(client, snapshot)
        answer = await client.post("/v1/sandboxes", json={"snapshotId": snapshot, "resourceLimits": {}})
        assert 202 == answer.status_code, answer.text
        assert ["tail", "-f", "/dev/null"] == answer.json()["entrypoint"]
        restored = (await client.get(f"/v1/sandboxes/{answer.json()['id']}")).json()
        assert snapshot == restored["snapshotId"]
        assert not {"image", "expiresAt", "metadata", "extensions"} & restored.keys()
        first, second = server.hostd.named("launch")
        assert (None, snapshot) == (first["snapshot"], second["snapshot"])
        assert {"OPENSANDBOX_ID": restored["id"]} == second["env"]
        assert first["execd_token_sha256"] != second["execd_token_sha256"]
        assert json.loads(second["selection"])["network_policy"] is None
        lineages = [call["lineage"] for call in server.vaultd.named("open_sandbox")]
        assert [source, restored["id"]] == lineages
    creates = [record for record in server.auditd.records if record["kind"] == "lifecycle.create"]
    assert [None, snapshot] == [record.get("snapshot") for record in creates]


async def test_restores_of_what_is_not_there_have_their_codes(server: World) -> None:
    """An unknown id is 404. A snapshot whose content is gone is 409, also if it goes between check and launch."""
    async with server.client() as client:
        for unknown in (_NOWHERE, "x", "../images"):
            answer = await client.post("/v1/sandboxes", json={"snapshotId": unknown, "resourceLimits": {}})
            assert (404, "SNAPSHOT::NOT_FOUND") == _fault(answer)
        snapshot = await _snapshot(client, await _sandbox(client))
        await _settled(client, snapshot)
        body = {"snapshotId": snapshot, "resourceLimits": {}}
        server.hostd.fail["launch"] = wire.RequestError(wire.Code.UNKNOWN_IMAGE, "gone meanwhile")
        assert (409, "SNAPSHOT::INVALID_RESTORE_CONFIG") == _fault(await client.post("/v1/sandboxes", json=body))
        server.hostd.fail.clear()
        server.hostd.snapshots.clear()
        assert (409, "SNAPSHOT::INVALID_RESTORE_CONFIG") == _fault(await client.post("/v1/sandboxes", json=body))
        server.hostd.fail_all = wire.RequestError(wire.Code.DOCKER, "docker is away")
        assert 503 == (await client.post("/v1/sandboxes", json=body)).status_code


async def test_a_snapshot_in_use_is_not_removed(server: World) -> None:
    """The removal is 409 and leaves the snapshot ready; after the end of the sandbox it succeeds."""
    async with server.client() as client:
        snapshot = await _snapshot(client, await _sandbox(client))
        await _settled(client, snapshot)
        answer = await client.post("/v1/sandboxes", json={"snapshotId": snapshot, "resourceLimits": {}})
        assert (409, "SNAPSHOT::DELETE_CONFLICT") == _fault(await client.delete(f"/v1/snapshots/{snapshot}"))
        assert ("Ready", "snapshot_runtime_ready") == await _state(client, snapshot)
        await client.delete(f"/v1/sandboxes/{answer.json()['id']}")
        assert 204 == (await client.delete(f"/v1/snapshots/{snapshot}")).status_code


async def test_a_removal_that_fails_can_be_repeated(server: World) -> None:
    """The answer is 500 with the contract's code, and the snapshot is ready again."""
    async with server.client() as client:
        snapshot = await _snapshot(client, await _sandbox(client))
        await _settled(client, snapshot)
        server.hostd.fail["remove_snapshot"] = wire.RequestError(wire.Code.DOCKER, "x")
        answer = await client.delete(f"/v1/snapshots/{snapshot}")
        assert (500, "DOCKER::SNAPSHOT_IMAGE_REMOVE_FAILED") == _fault(answer)
        assert ("Ready", "snapshot_delete_failed") == await _state(client, snapshot)
        server.hostd.fail.clear()
        assert 204 == (await client.delete(f"/v1/snapshots/{snapshot}")).status_code


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (wire.Code.TIMEOUT, "snapshot_runtime_timeout"),
        (wire.Code.TOO_LARGE, "snapshot_runtime_failed"),
        (wire.Code.IMAGE, "snapshot_runtime_failed"),
    ],
)
async def test_a_refused_snapshot_is_failed_and_can_be_removed(server: World, code: wire.Code, reason: str) -> None:
    """The state has the reason of the contract; the source can have another snapshot."""
    server.hostd.fail["take_snapshot"] = wire.RequestError(code, "it is larger than 1 bytes")
    async with server.client() as client:
        sandbox = await _sandbox(client)
        failed = await _snapshot(client, sandbox)
        assert ("Failed", reason) == await _settled(client, failed)
        server.hostd.fail.clear()
        assert ("Ready", "snapshot_runtime_ready") == await _settled(client, await _snapshot(client, sandbox))
        assert 204 == (await client.delete(f"/v1/snapshots/{failed}")).status_code
    codes = [record["code"] for record in server.auditd.records if record["kind"] == "lifecycle.snapshot_failed"]
    assert [str(code)] == codes


async def test_without_its_audit_record_nothing_is_taken_or_removed(server: World) -> None:
    """Both calls are 503, and hostd is not asked."""
    async with server.client() as client:
        sandbox = await _sandbox(client)
        snapshot = await _snapshot(client, sandbox)
        await _settled(client, snapshot)
        server.auditd.fail["record"] = wire.RequestError(wire.Code.UNAVAILABLE, "x")
        assert 503 == (await client.post(f"/v1/sandboxes/{sandbox}/snapshots")).status_code
        assert 503 == (await client.delete(f"/v1/snapshots/{snapshot}")).status_code
        assert (1, 0) == (len(server.hostd.named("take_snapshot")), len(server.hostd.named("remove_snapshot")))
        assert 1 == (await client.get("/v1/snapshots")).json()["pagination"]["totalItems"]


async def test_number_and_bytes_of_snapshots_have_limits() -> None:
    """Over either limit a snapshot is refused; after a removal there is room again."""
    for bounds in (SnapshotBounds(2, 1 << 30), SnapshotBounds(8, 2 * SNAPSHOT_BYTES)):
        async with world(snapshots=bounds) as described, described.serving() as server, server.client() as client:
            sandbox = await _sandbox(client)
            first = await _snapshot(client, sandbox)
            await _settled(client, first)
            await _settled(client, await _snapshot(client, sandbox))
            answer = await client.post(f"/v1/sandboxes/{sandbox}/snapshots")
            assert (409, "SNAPSHOT::QUOTA_EXCEEDED") == _fault(answer)
            await client.delete(f"/v1/snapshots/{first}")
            assert ("Ready", "snapshot_runtime_ready") == await _settled(client, await _snapshot(client, sandbox))


@pytest.mark.parametrize("completed", [True, False])
async def test_a_server_that_ends_during_a_creation_completes_it_or_lets_it_fail(completed: bool) -> None:
    """The next server finds the snapshot at hostd, and it is ready; or hostd has none, and it is failed."""
    async with world() as described:
        async with described.serving() as server, server.client() as client:
            server.hostd.hold["take_snapshot"] = asyncio.Event()
            snapshot = await _snapshot(client, await _sandbox(client))
        server.hostd.hold.pop("take_snapshot").set()
        if completed:
            server.hostd.snapshots[snapshot] = None
        else:
            server.hostd.snapshots.clear()
        async with described.serving() as server, server.client() as client:
            if completed:
                assert "Creating" == (await _state(client, snapshot))[0]
                server.hostd.snapshots[snapshot] = SNAPSHOT_BYTES
                assert ("Ready", "snapshot_runtime_ready") == await _settled(client, snapshot)
            else:
                assert ("Failed", "snapshot_recovery_missing_image") == await _settled(client, snapshot)


@pytest.mark.parametrize("used", [True, False])
async def test_a_server_that_ends_during_a_removal_completes_it_or_takes_it_back(used: bool) -> None:
    """The next server removes the snapshot; one that a sandbox uses is ready again."""
    async with world() as described:
        async with described.serving() as server, server.client() as client:
            sandbox = await _sandbox(client)
            snapshot = await _snapshot(client, sandbox)
            await _settled(client, snapshot)
            server.hostd.hold["remove_snapshot"] = asyncio.Event()
            removal = asyncio.create_task(client.delete(f"/v1/snapshots/{snapshot}"))
            await until(lambda: server.hostd.named("remove_snapshot"))
            removal.cancel()
            await asyncio.gather(removal, return_exceptions=True)
        server.hostd.snapshots[snapshot] = SNAPSHOT_BYTES
        if used:
            server.hostd.used[sandbox] = snapshot
        server.hostd.hold.clear()
        async with described.serving() as server, server.client() as client:
            if used:
                state = await _settled(client, snapshot)
                assert state in (("Ready", "snapshot_recovery_in_use"), ("Ready", "snapshot_delete_failed"))
            else:

                async def gone() -> bool:
                    answer = await client.get(f"/v1/snapshots/{snapshot}")
                    if answer.status_code == 200 and answer.json()["status"]["state"] == "Ready":
                        await client.delete(f"/v1/snapshots/{snapshot}")
                    return bool(answer.status_code == 404)

                await until(gone)
                assert {} == server.hostd.snapshots


async def test_content_of_a_failed_snapshot_is_removed(server: World) -> None:
    """hostd's answer was an error, but its Docker completed the image later."""
    server.hostd.fail["take_snapshot"] = wire.RequestError(wire.Code.DOCKER, "x")
    async with server.client() as client:
        snapshot = await _snapshot(client, await _sandbox(client))
        await _settled(client, snapshot)
        server.hostd.snapshots[snapshot] = SNAPSHOT_BYTES
        assert server.server is not None
        await server.server.context.snapshots.settle()
        assert {} == server.hostd.snapshots


async def test_a_sandbox_that_ended_meanwhile_has_a_failed_snapshot(server: World) -> None:
    """hostd refuses: the row says so and stays until it is removed."""
    async with server.client() as client:
        sandbox = await _sandbox(client)
        server.hostd.change(sandbox, state=HostState.PAUSED)
        assert ("Failed", "snapshot_runtime_failed") == await _settled(client, await _snapshot(client, sandbox))
