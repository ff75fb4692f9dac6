"""Diagnostics of sandboxes that exist and of removed ones: contents, bounds, parameters, retention.

The histories are in the state database (`lifecycle/database/histories.py`), with times as in
`lifecycle/sandboxes/moments.py`. The routes are those of `lifecycle/api/routes/diagnostics.py`.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from backends import table
from standins import IMAGE, World, world
from test_transactions import until

import wire
from lifecycle.sandboxes import reaper
from lifecycle.sandboxes.history import History
from lifecycle.sandboxes.registry import Registry, RegistryError, State
from wire.api.hostd import Launch, PolicyInForce
from wire.api.states import HostState

pytestmark = pytest.mark.slow

SECRET = "value-of-the-caller"
BODY: dict[str, Any] = {
    "image": {"uri": IMAGE},
    "entrypoint": ["sleep", "it's"],
    "resourceLimits": {"cpu": "500m", "memory": "256Mi"},
    "env": {"TOKEN": SECRET, "OTHER": "x"},
}
CONTENT = {"sandboxId", "kind", "scope", "delivery", "contentType", "content", "contentLength", "truncated"}


class Api:
    """The diagnostics of one server."""

    def __init__(self, world: World, client: httpx.AsyncClient) -> None:
        self.world = world
        self.client = client

    async def create(self, **changes: Any) -> str:
        answer = await self.client.post("/v1/sandboxes", json=BODY | changes)
        assert 202 == answer.status_code, answer.text
        return str(answer.json()["id"])

    async def get(self, sandbox: str, what: str, status: int = 200) -> httpx.Response:
        answer = await self.client.get(f"/v1/sandboxes/{sandbox}/diagnostics/{what}")
        assert status == answer.status_code, answer.text
        return answer

    async def json(self, sandbox: str, what: str) -> dict[str, Any]:
        answer = await self.get(sandbox, what)
        body: dict[str, Any] = answer.json()
        assert CONTENT <= body.keys() <= CONTENT | {"warnings"}
        assert ("inline", "text/plain; charset=utf-8", sandbox) == (
            body["delivery"],
            body["contentType"],
            body["sandboxId"],
        )
        assert len(body["content"].encode()) == body["contentLength"]
        assert "deprecation" not in answer.headers
        return body

    async def text(self, sandbox: str, what: str) -> str:
        answer = await self.get(sandbox, what)
        assert ("true", "text/plain; charset=utf-8") == (answer.headers["deprecation"], answer.headers["content-type"])
        return answer.text

    async def reasons(self, sandbox: str, scope: str = "all") -> list[str]:
        content = (await self.json(sandbox, f"events?scope={scope}"))["content"]
        return [line.split()[2].rstrip(":") for line in content.split("\n")]


@pytest.fixture
async def api(server: World, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Api]:
    monkeypatch.setattr(reaper, "OBSERVE_SECONDS", 0.02)
    async with server.client() as client:
        yield Api(server, client)


async def test_logs_are_the_end_of_the_output(api: Api) -> None:
    sandbox = await api.create()
    empty = await api.json(sandbox, "logs?scope=container")
    assert ("", False, "logs", "container") == (empty["content"], empty["truncated"], empty["kind"], empty["scope"])
    assert "(no logs)" == await api.text(sandbox, "logs")
    api.world.hostd.printed[sandbox] = "".join(f"line {number} é\n" for number in range(1, 101))
    body = await api.json(sandbox, "logs?scope=container")
    assert (False, 100) == (body["truncated"], len(body["content"].split("\n")))
    assert "warnings" not in body
    api.world.hostd.printed[sandbox] += "last\n"
    body = await api.json(sandbox, "logs?scope=%20ALL%20")
    assert (True, "all", "line 2 é", "last") == (
        body["truncated"],
        body["scope"],
        *(body["content"].split("\n")[place] for place in (0, -1)),
    )
    assert ["This server has no logs but the output of the container."] == body["warnings"]
    assert "line 100 é\nlast" == await api.text(sandbox, "logs?tail=2&container=other")
    assert 100 == len((await api.text(sandbox, "logs")).split("\n"))


@pytest.mark.parametrize(
    ("since", "seconds"),
    [("10m", 600), ("1h", 3600), ("45", 45), ("7s", 7), ("2d", 172800), ("soon", 600), ("-1", 600), ("", 600)],
)
async def test_since_is_a_duration_and_anything_else_ten_minutes(api: Api, since: str, seconds: int) -> None:
    sandbox = await api.create()
    await api.text(sandbox, f"logs?since={since}")
    asked = api.world.hostd.named("read_output")[-1]["since"]
    assert -2 <= asked - (api.world.clock()() - seconds) <= 2


async def test_control_characters_are_escaped_in_both_forms(api: Api) -> None:
    sandbox = await api.create()
    api.world.hostd.printed[sandbox] = "\x1b]0;title\x07 \x9b31m \u202e\u2066 \x00\r\nnext\tcolumn\n"
    for text in (await api.text(sandbox, "logs"), (await api.json(sandbox, "logs?scope=all"))["content"]):
        assert "\\u{1b}]0;title\\u{7} \\u{9b}31m \\u{202e}\\u{2066} \\u{0}\nnext\tcolumn" == text


async def test_events_are_the_states_with_their_reasons(api: Api) -> None:
    sandbox = await api.create()
    assert 202 == (await api.client.post(f"/v1/sandboxes/{sandbox}/pause")).status_code
    assert 202 == (await api.client.post(f"/v1/sandboxes/{sandbox}/resume")).status_code
    policy = {"defaultAction": "deny", "egress": [{"action": "allow", "target": "a.example"}]}
    assert 200 == (await api.client.put(f"/v1/sandboxes/{sandbox}/networkpolicy", json=policy)).status_code
    api.world.hostd.change(sandbox, generation=2, oom=True)
    await until(lambda: _has(api, sandbox, "OOM_KILL"))
    api.world.hostd.change(sandbox, state=HostState.EXITED, exit_code=3, worker_pid=None)
    await until(lambda: _has(api, sandbox, "OOM"))
    states = ["CONTAINER_STARTING", "CONTAINER_RUNNING", "CONTAINER_PAUSING", "CONTAINER_PAUSED"]
    states += ["CONTAINER_RUNNING", "POLICY_CHANGED", "GATEWAY_REPLACED", "OOM_KILL", "OOM"]
    assert states == await api.reasons(sandbox)
    network = ["POLICY_CHANGED", "GATEWAY_REPLACED"]
    assert network == await api.reasons(sandbox, "network")
    assert [name for name in states if name not in network] == await api.reasons(sandbox, "runtime")
    described = await api.text(sandbox, "inspect")
    assert "Exit code:        3\n" in described
    text = await api.text(sandbox, "events?limit=1")
    assert text.endswith("Z Failed   OOM: The sandbox was ended at its memory limit.")
    body = await api.json(sandbox, "events?scope=network")
    assert ("events", "network", False) == (body["kind"], body["scope"], body["truncated"])


async def _has(api: Api, sandbox: str, reason: str) -> bool:
    return reason in await api.reasons(sandbox)


async def test_of_more_than_fifty_events_the_newest_are_shown(api: Api) -> None:
    sandbox = await api.create()
    server = api.world.server
    assert server is not None
    for number in range(60):
        await server.registry.update(sandbox, lambda row, n=number: row.moved(State.RUNNING, f"R{n}", "", float(n)))
    body = await api.json(sandbox, "events?scope=all")
    lines = body["content"].split("\n")
    assert (True, 50) == (body["truncated"], len(lines))
    assert 62 <= len((await api.text(sandbox, "events?limit=500")).split("\n"))


async def test_a_removed_sandbox_keeps_its_diagnostics(api: Api) -> None:
    sandbox = await api.create()
    api.world.hostd.printed[sandbox] = "first\nlast\n"
    assert 204 == (await api.client.delete(f"/v1/sandboxes/{sandbox}")).status_code
    assert 404 == (await api.client.get(f"/v1/sandboxes/{sandbox}")).status_code
    body = await api.json(sandbox, "logs?scope=all")
    assert "first\nlast" == body["content"]
    assert body["warnings"][0].startswith("The sandbox was removed at ")
    assert "last" == await api.text(sandbox, "logs?tail=1&since=1s")
    content = (await api.json(sandbox, "events?scope=lifecycle"))["content"].split("\n")
    assert content[-1].endswith("REMOVED: Removed: deleted by the API.")
    described = await api.text(sandbox, "inspect")
    assert "State:            Removed: deleted by the API.\n" in described
    summary = await api.text(sandbox, "summary?tail=1&event_limit=2")
    assert "\nLOGS\n----\nlast\n" in summary
    assert described in summary


async def test_an_expired_sandbox_keeps_them_too(api: Api) -> None:
    sandbox = await api.create(timeout=60)
    api.world.hostd.printed[sandbox] = "text\n"
    api.world.offset += 61.0
    server = api.world.server
    assert server is not None
    server.reaper.wake()
    await until(lambda: _has(api, sandbox, "REMOVED"))
    assert "Removed: expired.\n" in await api.text(sandbox, "inspect")
    assert "text" == await api.text(sandbox, "logs")


async def test_after_the_retention_nothing_is_left(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper, "PURGE_SECONDS", 0.0)
    sandbox, other = await api.create(), await api.create()
    await api.client.delete(f"/v1/sandboxes/{sandbox}")
    api.world.offset += 86399.0
    await api.get(sandbox, "inspect")
    api.world.offset += 2.0
    await api.get(sandbox, "inspect", 404)
    server = api.world.server
    assert server is not None

    async def purged() -> bool:
        server.reaper.wake()
        return await server.registry.history(sandbox) is None

    await until(purged)
    await api.get(other, "inspect")


async def test_without_a_retention_nothing_is_kept_and_no_output_is_read() -> None:
    async with world(diagnostics_retention=0) as described, described.serving(), described.client() as client:
        api = Api(described, client)
        sandbox = await api.create()
        await api.get(sandbox, "events?scope=all")
        await client.delete(f"/v1/sandboxes/{sandbox}")
        await api.get(sandbox, "events?scope=all", 404)
        assert [0] == [call["lines"] for call in described.hostd.named("remove")]
        server = described.server
        assert server is not None
        assert await server.registry.history(sandbox) is None


@pytest.mark.parametrize("left", [False, True])
async def test_the_output_of_a_failed_start_is_not_kept(monkeypatch: pytest.MonkeyPatch, left: bool) -> None:
    """Also if its removal is `left` to the reaper, which reads the output. The cause is kept."""
    async with world(ingress=False) as described:
        hostd, launch = described.hostd, described.hostd._launch

        async def ends(request: Launch) -> PolicyInForce:
            answer = await launch(request)
            hostd.change(request.sandbox, state=HostState.EXITED, exit_code=127)
            hostd.printed[request.sandbox] = "output of a start\n"
            return answer

        monkeypatch.setattr(hostd, "_launch", ends)
        described.start_seconds = 5.0
        async with described.serving(), described.client() as client:
            api = Api(described, client)
            if left:
                hostd.fail["remove"] = wire.RequestError(wire.Code.DOCKER, "no")
            assert 500 == (await client.post("/v1/sandboxes", json=BODY)).status_code
            sandbox = hostd.named("launch")[-1]["sandbox"]
            hostd.fail.pop("remove", None)
            await until(lambda: _has(api, sandbox, "REMOVED"))
            assert left == (1000 in [call["lines"] for call in hostd.named("remove")])
            assert "(no logs)" == await api.text(sandbox, "logs")
            body = await api.json(sandbox, "logs?scope=container")
            assert body["warnings"][0].endswith("has not run. Its output was not kept.")
            events = await api.text(sandbox, "events")
            assert "The entrypoint ended with exit code 127." in events
            assert "output of a start" not in events


async def test_the_output_survives_a_removal_that_is_finished_later(api: Api) -> None:
    """hostd has removed the sandbox, and vaultd does not answer yet."""
    sandbox = await api.create()
    api.world.hostd.printed[sandbox] = "text\n"
    api.world.vaultd.fail["close_sandbox"] = wire.RequestError(wire.Code.INTERNAL, "no")
    assert 500 == (await api.client.delete(f"/v1/sandboxes/{sandbox}")).status_code
    del api.world.vaultd.fail["close_sandbox"]
    await until(lambda: _has(api, sandbox, "REMOVED"))
    assert "text" == await api.text(sandbox, "logs")


async def test_a_description_has_names_of_variables_and_no_value(api: Api) -> None:
    sandbox = await api.create(metadata={"label": "label-value"}, secureAccess=True)
    described = await api.text(sandbox, "inspect")
    lines = dict(line.split(":", 1) for line in described.split("\n"))
    assert "cpu 0.5, memory 256Mi, 256 processes, disk 1024Mi" == lines["Limits"].strip()
    assert "OTHER, TOKEN (values are not shown)" == lines["Environment"].strip()
    assert "sleep 'it'\"'\"'s'" == lines["Entrypoint"].strip()
    tokens = api.world.tokens
    whole = described + await api.text(sandbox, "summary") + await api.text(sandbox, "events")
    for secret in (SECRET, "label-value", tokens.execd(sandbox), "k" * 32):
        assert secret not in whole
    server = api.world.server
    assert server is not None
    assert SECRET not in repr(await server.registry.history(sandbox))


async def test_a_host_that_does_not_answer_fails_the_logs_only(api: Api) -> None:
    sandbox = await api.create()
    api.world.hostd.fail["read_output"] = wire.RequestError(wire.Code.DOCKER, "no")
    answer = await api.get(sandbox, "logs?scope=container", 500)
    assert "DOCKER::SANDBOX_QUERY_FAILED" == answer.json()["code"]
    assert "(The output cannot be read now: Docker on this host failed.)" in await api.text(sandbox, "summary")
    api.world.hostd.fail["inspect"] = wire.RequestError(wire.Code.INTERNAL, "no")
    assert "Container:        not known now: the host service failed" in await api.text(sandbox, "inspect")
    api.world.hostd.sandboxes.pop(sandbox)
    del api.world.hostd.fail["read_output"]
    body = await api.json(sandbox, "logs?scope=container")
    assert ("", 1) == (body["content"], len(body["warnings"]))


@pytest.mark.parametrize(
    ("query", "supported"),
    [
        ("logs?scope=lifecycle", "container, all"),
        ("logs?scope=", "container, all"),
        ("events?scope=container", "lifecycle, runtime, network, all"),
        ("events?scope=x%1b%5b31m", "lifecycle, runtime, network, all"),
    ],
)
async def test_another_scope_is_refused_with_the_supported_ones(api: Api, query: str, supported: str) -> None:
    answer = await api.get(await api.create(), query, 400)
    assert "DIAGNOSTICS_SCOPE_UNSUPPORTED" == answer.json()["code"]
    assert answer.json()["message"].endswith(f"supported are {supported}.")
    assert answer.json()["message"].isprintable()


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("logs?tail=0", 422),
        ("logs?tail=10001", 422),
        ("logs?tail=x", 422),
        ("logs?tail=1&tail=2", 400),
        ("logs?lines=1", 400),
        ("logs?since=" + "1" * 65, 422),
        ("logs?scope=all&tail=1", 400),
        ("logs?scope=all&since=1m", 400),
        ("logs?scope=all&container=a", 400),
        ("events?limit=0", 422),
        ("events?limit=501", 422),
        ("events?scope=all&limit=1", 400),
        ("events?tail=1", 400),
        ("inspect?tail=1", 400),
        ("summary?limit=1", 400),
        ("summary?tail=0", 422),
        ("summary?event_limit=501", 422),
        ("unknown", 404),
    ],
)
async def test_other_parameters_are_refused(api: Api, query: str, status: int) -> None:
    answer = await api.get(await api.create(), query, status)
    assert {"code", "message"} <= answer.json().keys()


@pytest.mark.parametrize("what", ["logs?scope=all", "logs", "events?scope=all", "events", "inspect", "summary"])
@pytest.mark.parametrize("sandbox", ["sbx-" + "0" * 24, "SBX", "a%00b", "..%2f..%2fetc"])
async def test_an_unknown_sandbox_has_none(api: Api, what: str, sandbox: str) -> None:
    await api.get(sandbox, what, 404)
    answer = await api.client.get(f"/v1/sandboxes/{sandbox}/diagnostics/{what}", headers={"OPEN-SANDBOX-API-KEY": "x"})
    assert 401 == answer.status_code


async def test_a_server_has_the_histories_of_its_own_sandboxes_only(api: Api) -> None:
    """Two servers on one database: the rule for rows holds for histories."""
    config = api.world.config
    other = Registry(table(config.database, config.state_dir / "sallyport.db", "srv-" + "9" * 24))
    await other.open()
    try:
        sandbox = await api.create()
        await api.get(sandbox, "inspect")
        assert await other.history(sandbox) is None
        await other.record(sandbox, lambda history: json.loads("broken"))
        await other.purge(1e12)
        await other.shift(1.0)
        await api.client.delete(f"/v1/sandboxes/{sandbox}")
        await other.purge(1e12)
        await api.get(sandbox, "inspect")
    finally:
        await other.close()


POOL: dict[str, Any] = {
    "name": "p",
    "template": {"spec": {"containers": [{"image": IMAGE}]}},
    "capacitySpec": {"bufferMin": 1, "bufferMax": 1, "poolMin": 0, "poolMax": 2},
}


async def _idle(api: Api) -> str:
    """Return an idle member of the pool, when there is one."""
    server = api.world.server
    assert server is not None

    async def found() -> list[str]:
        return [row.id for row in await server.registry.all() if row.idle and row.state is State.RUNNING]

    await until(found)
    return (await found())[0]


@pytest.mark.parametrize(
    ("env", "shown"), [({"TOKEN": SECRET}, "[env TOKEN]"), ({"SHORT": "abc"}, SECRET), ({}, SECRET)]
)
async def test_the_output_of_a_claimed_member_is_shown_without_values_of_its_claim(
    api: Api, env: dict[str, str], shown: str
) -> None:
    """hostd gets the variables of the claim. The member's own history before the claim is not shown."""
    assert 201 == (await api.client.post("/v1/pools", json=POOL)).status_code
    member = await _idle(api)
    for what in ("logs", "events", "inspect", "summary", "logs?scope=all"):
        await api.get(member, what, 404)
    claim = {"extensions": {"poolRef": "p"}, "entrypoint": ["mine"], "env": env}
    answer = await api.client.post("/v1/sandboxes", json=claim)
    assert (202, member) == (answer.status_code, answer.json()["id"]), answer.text
    api.world.hostd.printed[member] = f"said {SECRET}\n"
    text = f"said {shown}"
    described = await api.text(member, "inspect")
    assert "Entrypoint:       mine\n" in described
    assert f"Environment:      {', '.join(env) or 'none'} " in described
    reasons = ["CONTAINER_STARTING", "CONTAINER_RUNNING"]
    assert reasons == await api.reasons(member)
    assert text == await api.text(member, "logs")
    assert 204 == (await api.client.delete(f"/v1/sandboxes/{member}")).status_code
    assert text == await api.text(member, "logs")
    assert f"{text}\n" == (await _history(api, member)).output + "\n"


async def test_the_output_of_a_claimed_member_is_withheld_while_its_history_is_not_written(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that fails at that moment hides too much, never too little."""
    assert 201 == (await api.client.post("/v1/pools", json=POOL)).status_code
    member = await _idle(api)
    server = api.world.server
    assert server is not None

    async def failing(*_: Any) -> None:
        raise RegistryError("no")

    with monkeypatch.context() as patch:
        patch.setattr(server.registry, "record", failing)
        claim = {"extensions": {"poolRef": "p"}, "env": {"TOKEN": SECRET}}
        assert 202 == (await api.client.post("/v1/sandboxes", json=claim)).status_code
    api.world.hostd.printed[member] = f"said {SECRET}\n"
    assert "(no logs)" == await api.text(member, "logs")
    assert "not shown" in (await api.json(member, "logs?scope=all"))["warnings"][0]


async def test_of_an_idle_member_that_is_removed_nothing_is_kept(api: Api) -> None:
    await api.client.post("/v1/pools", json=POOL)
    member = await _idle(api)
    assert 204 == (await api.client.delete("/v1/pools/p")).status_code
    server = api.world.server
    assert server is not None

    async def gone() -> bool:
        return await server.registry.get(member) is None

    await until(gone)
    assert await server.registry.history(member) is None
    await api.get(member, "inspect", 404)


async def _history(api: Api, sandbox: str) -> History:
    assert api.world.server is not None
    history = await api.world.server.registry.history(sandbox)
    assert history is not None
    return history


async def test_the_output_survives_a_database_that_is_away_at_the_end(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sandbox is removed, and its row could not be: the next attempt has the output."""
    sandbox = await api.create()
    api.world.hostd.printed[sandbox] = "text\n"
    assert api.world.server is not None
    registry = api.world.server.registry
    with monkeypatch.context() as during:

        async def away(*_: object) -> bool:
            raise RegistryError("away")

        during.setattr(registry, "delete", away)
        assert 503 == (await api.client.delete(f"/v1/sandboxes/{sandbox}")).status_code
    await until(lambda: _has(api, sandbox, "REMOVED"))
    assert "text" == await api.text(sandbox, "logs")
