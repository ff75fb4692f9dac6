"""PostgreSQL alone: databases that are refused, servers that do not answer, crashes, and several `serve` on one."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import httpx
import psycopg
import pytest
import standins
from backends import Template, described, table
from injection import CRASHES, Injection
from places import BODY, SETTLE_SECONDS, Place, running, settled, wrong
from psycopg.conninfo import conninfo_to_dict
from standins import KEY, world
from test_faults_at_each_step import OPERATIONS, run
from test_faults_of_claims_and_snapshots import CLAIM, creations, fill, snapshots
from test_transactions import BODY as CREATE

from lifecycle.config.serve import DatabaseConfig
from lifecycle.database import engine
from lifecycle.database.engine import PostgreSQL
from lifecycle.lasting import identity
from lifecycle.sandboxes import transaction
from lifecycle.sandboxes.registry import _INTERRUPT_SECONDS, Registry, RegistryError, Sandbox, SchemaError, State
from tests.postgresql import Cluster

pytestmark = pytest.mark.slow

ROW = Sandbox("one", State.RUNNING, "", "", 1.0, 1.0, None, "image", ("true",), "runc")


class TestPostgreSQLRefuses:
    """Databases that this release does not use."""

    def test_a_table_of_another_program(self, template: Template, tmp_path: Path) -> None:
        name = template.cluster.create()
        template.cluster.ask("CREATE TABLE sandboxes (id TEXT)", name)
        with pytest.raises(SchemaError, match="of another program"):
            table(described(template.cluster.dsn(name)), tmp_path).open()
        assert [] == template.cluster.ask("SELECT * FROM sandboxes", name)

    def test_another_encoding(self, template: Template, tmp_path: Path) -> None:
        template.cluster.ask("CREATE DATABASE narrow ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
        with pytest.raises(RegistryError, match="its encoding is SQL_ASCII; create it with ENCODING 'UTF8'"):
            table(described(template.cluster.dsn("narrow")), tmp_path).open()

    def test_a_role_that_may_create_nothing(self, template: Template, tmp_path: Path) -> None:
        name = template.cluster.create()
        template.cluster.ask("CREATE ROLE reader LOGIN PASSWORD 'words'", name)
        with pytest.raises(RegistryError, match="permission denied for schema public") as caught:
            table(described(template.cluster.dsn(name, user="reader", password="words")), tmp_path).open()
        assert "words" not in str(caught.value)


class TestPostgreSQLThatDoesNotAnswer:
    """What a call costs then. SQLite has no server."""

    async def test_a_restart_costs_no_call(self, cluster: Cluster, tmp_path: Path) -> None:
        """The pooled connections are replaced before their use."""
        registry = Registry(table(described(cluster.dsn(cluster.create())), tmp_path))
        await registry.open()
        await registry.put(ROW)
        cluster.kill()
        with pytest.raises(RegistryError, match=r"Connection refused|closed the connection"):
            await registry.get("one")
        cluster.start()
        await asyncio.sleep(1.1)  # the interval between connects
        assert ROW == await registry.get("one")
        cluster.kill()
        cluster.start()
        assert ROW == await registry.get("one")
        assert await registry.delete("one")
        await registry.close()

    async def test_a_server_that_hangs_ends_each_call_in_time(self, cluster: Cluster, tmp_path: Path) -> None:
        """Also those in the queue, which are then never made; and the registry works on afterwards."""
        registry = Registry(table(described(cluster.dsn(cluster.create()), connect=2, statement=1), tmp_path))
        await registry.open()
        await registry.put(ROW)
        cluster.stop()
        began = time.monotonic()
        writes = [registry.put(replace(ROW, id=f"row{number}")) for number in range(4)]
        found = await asyncio.gather(*writes, registry.get("one"), return_exceptions=True)
        took = time.monotonic() - began
        cluster.resume()
        assert [RegistryError] * 5 == [type(one) for one in found]
        assert took < 2 * 5 + 1, took
        deadline = time.monotonic() + 20
        while True:
            try:
                assert ROW == await registry.get("one")
                break
            except RegistryError:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.2)
        assert {"one"} <= {row.id for row in await registry.all()} <= {"one", "row0"}
        await registry.close()

    async def test_a_commit_that_hangs_ends_in_time(self, cluster: Cluster, tmp_path: Path) -> None:
        """Here in a trigger at the commit. The limit of the server is longer than ours."""
        name = cluster.create()
        rows = table(described(cluster.dsn(name), statement=60), tmp_path)
        registry = Registry(rows)
        await registry.open()
        await registry.put(ROW)
        function = (
            "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(30); RETURN NULL; END'"
        )
        trigger = "CREATE CONSTRAINT TRIGGER wait AFTER UPDATE ON sandboxes DEFERRABLE INITIALLY DEFERRED"
        cluster.ask(function, name)
        cluster.ask(f"{trigger} FOR EACH ROW EXECUTE FUNCTION wait()", name)
        assert isinstance(rows._database, PostgreSQL)
        rows._database.patience = 1.0
        began = time.monotonic()
        with pytest.raises(RegistryError, match="does not answer"):
            await registry.update("one", lambda row: replace(row, reason="changed"))
        await asyncio.sleep(2 * _INTERRUPT_SECONDS)
        assert ROW == await registry.get("one")
        assert [ROW] == await registry.all()  # in the thread that waited for the commit
        assert time.monotonic() - began < 10
        await registry.close()

    async def test_a_lock_of_another_program_is_not_waited_for(self, cluster: Cluster, tmp_path: Path) -> None:
        name = cluster.create()
        registry = Registry(table(described(cluster.dsn(name), statement=1), tmp_path))
        await registry.open()
        await registry.put(ROW)
        with psycopg.connect(cluster.dsn(name)) as other:
            other.execute("LOCK TABLE sandboxes")
            with pytest.raises(RegistryError, match="timeout"):
                await registry.put(ROW)
        await registry.put(ROW)
        await registry.close()

    async def test_the_number_of_connections_is_bounded(self, cluster: Cluster, tmp_path: Path) -> None:
        name = cluster.create()
        registry = Registry(table(described(cluster.dsn(name)), tmp_path))
        await registry.open()
        await registry.put(ROW)
        found = await asyncio.gather(
            *(registry.get("one") for _ in range(100)), *(registry.put(ROW) for _ in range(20))
        )
        assert [ROW] * 100 == found[:100]
        query = f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{name}' AND pid <> pg_backend_pid()"  # noqa: S608
        assert 2 <= cluster.ask(query)[0][0] <= 4
        await registry.close()
        deadline = time.monotonic() + 10
        while [(0,)] != cluster.ask(query):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


class TestACrash:
    """All processes of PostgreSQL are killed at each step of a request, and started again after it."""

    @pytest.fixture
    def fault(
        self, template: Template, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Callable[[int, str], Injection]]:
        monkeypatch.setattr(engine, "_RETRY_SECONDS", 0.0)  # No connect fails after the restart.
        monkeypatch.setattr(transaction, "_ABANDONED_SECONDS", 0.05)
        monkeypatch.setattr(standins, "DATABASE", described(cluster.dsn(cluster.create(template.name))))

        def fault(number: int, mode: str) -> Injection:
            return Injection(number, mode, crash=cluster.kill, recover=cluster.restart)

        yield fault
        cluster.restart()

    @pytest.fixture
    async def stored(
        self, fault: Callable[[int, str], Injection], monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[tuple[Place, Callable[[int, str], Injection]]]:
        async with running(monkeypatch.setattr) as place:
            yield place, fault
            fault(-1, "").recover()

    @pytest.mark.parametrize("mode", CRASHES)
    @pytest.mark.parametrize("name", ["delete", "renew", "pause", "resume", "put", "open-vault"])
    async def test_a_change_is_whole_or_did_not_happen(
        self, name: str, mode: str, stored: tuple[Place, Callable[[int, str], Injection]]
    ) -> None:
        place, fault = stored
        operation, found = OPERATIONS[name], []
        for number in count():
            injection = fault(number, mode)
            wronged, answer = await run(place, operation, injection)
            found += wronged
            assert answer is not None
            if answer.status_code != operation.status:
                assert (503, "1") == (answer.status_code, answer.headers["Retry-After"]), answer.text
            if not injection.fired:
                break
        assert [] == found
        assert operation.status == answer.status_code

    @pytest.mark.parametrize("mode", CRASHES)
    async def test_a_creation_is_whole_or_did_not_happen(
        self, mode: str, stored: tuple[Place, Callable[[int, str], Injection]]
    ) -> None:
        """A caller with an error has no sandbox. Without the first row nothing is launched."""
        place, fault = stored
        found: list[str] = []
        for number in count():
            injection = fault(number, mode)
            answer = await place.with_fault(injection, lambda: place.http("POST", "", BODY))
            assert answer is not None
            said = f"{mode} at {injection.seen[-1]}"
            if answer.status_code != 202:
                code = (answer.status_code, answer.json()["code"], answer.headers["Retry-After"])
                assert (503, "DATABASE::UNAVAILABLE", "1") == code, answer.text
            if injection.seen == ["registry.put"]:
                assert [] == place.world.hostd.named("launch")
            injection.recover()
            told = {answer.json()["id"]} if answer.status_code == 202 else set()
            deadline = time.monotonic() + SETTLE_SECONDS
            while (await ids(place)) != told and time.monotonic() < deadline:  # noqa: ASYNC110 - other tasks' state
                await asyncio.sleep(0.02)
            found += [f"{said}: {item}" for item in await settled(place)]
            assert told == await ids(place), said
            for name in told:
                assert 204 == (await place.http("DELETE", f"/{name}")).status_code
            assert [] == await wrong(place)
            if not injection.fired:
                break
        assert [] == found
        assert len(injection.seen) >= 6

    @pytest.mark.parametrize("mode", CRASHES)
    async def test_a_snapshot_and_its_removal_are_whole_or_did_not_happen(
        self, mode: str, stored: tuple[Place, Callable[[int, str], Injection]]
    ) -> None:
        place, fault = stored
        await snapshots(place, mode, fault)

    @pytest.mark.parametrize("mode", CRASHES)
    async def test_a_claim_is_whole_or_did_not_happen(
        self, mode: str, fault: Callable[[int, str], Injection], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with running(monkeypatch.setattr, ingress=True) as place:
            await fill(place)
            await creations(place, mode, CLAIM, 1, fault)
            fault(-1, "").recover()


async def ids(place: Place) -> set[str]:
    """Return the ids of all rows, as soon as the database answers."""
    while True:
        try:
            return set(await place.rows())
        except RegistryError:
            await asyncio.sleep(0.02)


async def test_while_the_database_is_away_calls_get_503_and_sandboxes_stay(
    template: Template, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that needs no row is answered. Afterwards the server works on without a restart."""
    config = described(cluster.dsn(cluster.create(template.name)))
    async with world(database=config) as made, made.serving() as server, server.client() as client:
        name = (await client.post("/v1/sandboxes", json=CREATE)).json()["id"]
        launched = len(server.hostd.named("launch"))
        cluster.kill()
        try:
            later = (datetime.now(UTC) + timedelta(days=1)).isoformat()
            for method, path, content in (
                ("GET", "", None),
                ("POST", "", CREATE),
                ("GET", f"/{name}", None),
                ("DELETE", f"/{name}", None),
                ("PATCH", f"/{name}/metadata", {"a": "b"}),
                ("POST", f"/{name}/renew-expiration", {"expiresAt": later}),
                ("GET", f"/{name}/endpoints/80", None),
                ("GET", f"/{name}/networkpolicy", None),
                ("GET", f"/{name}/proxy/18080/policy", None),
                ("GET", f"/{name}/proxy/8080/", None),
            ):
                answer = await client.request(method, f"/v1/sandboxes{path}", json=content)
                assert (503, "1") == (answer.status_code, answer.headers["Retry-After"]), (method, path, answer.text)
                assert "DATABASE::UNAVAILABLE" == answer.json()["code"]
                assert cluster.password not in answer.text
            assert 200 == (await client.get("/health")).status_code
            assert ([name], launched) == ([*server.hostd.sandboxes], len(server.hostd.named("launch")))
        finally:
            cluster.restart()
        deadline = time.monotonic() + 10
        while (answer := await client.get(f"/v1/sandboxes/{name}")).status_code == 503:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        assert (200, "Running") == (answer.status_code, answer.json()["status"]["state"])
        assert 204 == (await client.delete(f"/v1/sandboxes/{name}")).status_code
        assert {} == server.hostd.sandboxes


async def test_a_slow_creation_without_an_answer_leaves_nothing(
    template: Template, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database goes away within the time of the answer. The caller gets no id, so the sandbox is removed."""
    monkeypatch.setattr(transaction, "_ABANDONED_SECONDS", 0.05)
    config = described(cluster.dsn(cluster.create(template.name)))
    bounds = replace(standins.BOUNDS, answer_seconds=3.0)
    async with world(database=config, bounds=bounds) as made, made.serving() as server, server.client() as client:
        server.hostd.hold["launch"], server.hostd.reached["launch"] = asyncio.Event(), asyncio.Event()
        call = asyncio.create_task(client.post("/v1/sandboxes", json=CREATE))
        await server.hostd.reached["launch"].wait()
        await asyncio.to_thread(cluster.kill)
        answer = await call
        assert (503, "DATABASE::UNAVAILABLE") == (answer.status_code, answer.json()["code"])
        await asyncio.to_thread(cluster.restart)
        await asyncio.sleep(1.1)  # the interval between connects
        server.hostd.hold["launch"].set()
        deadline = time.monotonic() + 20
        while (await client.get("/v1/sandboxes")).json().get("items") != [] or server.hostd.sandboxes:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert {} == server.vaultd.grants


async def test_a_start_without_the_database_is_completed_when_it_is_back(template: Template, cluster: Cluster) -> None:
    """hostd restarts `serve` at any time. The API answers, and the sandboxes of before are adopted later."""
    config = described(cluster.dsn(cluster.create(template.name)))
    async with world(database=config) as made:
        async with made.serving() as server, server.client() as client:
            name = (await client.post("/v1/sandboxes", json=CREATE)).json()["id"]
        cluster.kill()
        later = made.build()
        transport = httpx.ASGITransport(later.edge)
        headers = {"OPEN-SANDBOX-API-KEY": KEY}
        async with later.running(), httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as api:
            answers = [await api.get("/v1/sandboxes"), await api.post("/v1/sandboxes", json=CREATE)]
            assert [(503, "1")] * 2 == [(answer.status_code, answer.headers["Retry-After"]) for answer in answers]
            assert not later.adopted.is_set()
            assert [name] == [*made.hostd.sandboxes]
            await asyncio.to_thread(cluster.restart)
            async with asyncio.timeout(20):
                await later.adopted.wait()
            assert 200 == (await api.get(f"/v1/sandboxes/{name}")).status_code
            assert 204 == (await api.delete(f"/v1/sandboxes/{name}")).status_code


async def test_servers_on_one_database_do_not_disturb_each_other(template: Template, cluster: Cluster) -> None:
    """Each has its own hosts and state directory. Their lists, expiries, removals and restarts are separate."""
    config = described(cluster.dsn(cluster.create(template.name)))
    async with world(database=config) as first, world(database=config) as second:
        async with first.serving(), second.serving(), first.client() as one, second.client() as two:
            mine = (await one.post("/v1/sandboxes", json=CREATE)).json()["id"]
            theirs = (await two.post("/v1/sandboxes", json={**CREATE, "timeout": 60})).json()["id"]
            for client, own, other in ((one, mine, theirs), (two, theirs, mine)):
                listed = (await client.get("/v1/sandboxes")).json()
                assert ([own], 1) == ([item["id"] for item in listed["items"]], listed["pagination"]["totalItems"])
                for method in ("GET", "DELETE"):
                    assert 404 == (await client.request(method, f"/v1/sandboxes/{other}")).status_code
        second.offset = 120  # while it is down, its sandbox expires
        async with first.serving(), first.client() as one:
            assert "Running" == (await one.get(f"/v1/sandboxes/{mine}")).json()["status"]["state"]
            rows = cluster.ask("SELECT id FROM sandboxes", config_name(config))
            assert {(mine,), (theirs,)} == set(rows)
            async with second.serving(), second.client() as two:
                deadline = time.monotonic() + 10
                while second.hostd.sandboxes:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.05)
                assert 0 == (await two.get("/v1/sandboxes")).json()["pagination"]["totalItems"]
            assert "Running" == (await one.get(f"/v1/sandboxes/{mine}")).json()["status"]["state"]
        assert ([mine], []) == ([*first.hostd.sandboxes], [*second.hostd.sandboxes])
        owners = {identity(made.config.state_dir) for made in (first, second)}
        assert 2 == len(owners)


def config_name(config: DatabaseConfig) -> str:
    """Return the name of the database of a configuration."""
    return str(conninfo_to_dict(config.dsn)["dbname"])
