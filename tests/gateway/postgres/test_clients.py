"""Real PostgreSQL clients reach a real server through the gateway, which logs in for them.

The login is that of `gateway/engines/postgres/login.py` and `gateway/engines/postgres/scram.py`. psycopg's libpq is of
PostgreSQL 18: TLS without a request for it, protocol 3.2 and cancel requests inside TLS are real.
"""

import asyncio
import contextlib
import hashlib
import os
import signal
import socket
import ssl
import struct
import time
from pathlib import Path

import psycopg
import pytest
from psycopg import pq

from gateway.budget import Over
from gateway.engines.port import EngineLimits
from gateway.startup import SSL_REQUEST, cancel_packet
from tests.gateway.postgres.conftest import HOST, PASSWORD, PORT, USER, Rig, allowing, impostor, served
from tests.gateway.postgres.test_startup import GSS_REQUEST, startup
from tests.postgresql import Cluster, programs

pytestmark = pytest.mark.slow

_MIB = 1 << 20


async def answer(rig: Rig, data: bytes) -> bytes:
    """Return everything that the gateway answers to these bytes, which a client sends without TLS."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_a_client_without_a_password_gets_the_session_of_the_rules_user(rig: Rig) -> None:
    async with await rig.connect(user="someone") as connection:
        cursor = await connection.execute("SELECT current_user, current_database(), 6 * 7")
        assert (USER, "postgres", 42) == await cursor.fetchone()
        cursor = await connection.execute("SELECT ssl, version FROM pg_stat_ssl WHERE pid = pg_backend_pid()")
        assert (True, "TLSv1.3") == await cursor.fetchone()
    assert 1 == rig.dials


@pytest.mark.parametrize(
    "more",
    [
        {"password": "of-the-client"},
        {"sslnegotiation": "direct"},
        {"max_protocol_version": "3.2"},
        {"sslmode": "require"},
        {"channel_binding": "disable"},
        {"dbname": "other", "application_name": "a job", "client_encoding": "UTF8"},
    ],
    ids=str,
)
async def test_each_way_of_libpq_to_begin_works(rig: Rig, more: dict[str, str]) -> None:
    async with await rig.connect(**more) as connection:
        cursor = await connection.execute("SELECT current_database(), current_setting('application_name')")
        assert (more.get("dbname", "postgres"), more.get("application_name", "")) == await cursor.fetchone()
        assert 30000 == connection.pgconn.full_protocol_version


async def test_psql_works(rig: Rig) -> None:
    psql = [str(programs() / "psql"), "-X", "-A", "-t", "-w", rig.dsn(), "-c", "SELECT current_user"]
    process = await asyncio.create_subprocess_exec(*psql, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert f"{USER}\n".encode() == out


async def test_the_login_is_bound_to_the_servers_certificate(rig: Rig, database: Cluster) -> None:
    """A server with another certificate for the same name that relays everything: the real one sees another binding."""
    async with await rig.connect(user="anyone") as connection:
        assert not connection.closed
    heard: list[bytes] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up, down = await asyncio.open_connection("127.0.0.1", database.port)
        down.write(SSL_REQUEST)
        await up.readexactly(1)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        await down.start_tls(context)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                heard.append(data)
                sink.write(data)

        await asyncio.gather(pump(reader, down), pump(up, writer))

    async with impostor(rig, relay):
        text = await rig.refusal()
    assert "channel binding" in text
    assert any(b"SCRAM-SHA-256-PLUS" in data for data in heard)


async def test_large_values_pass_unchanged_and_are_not_collected(rig: Rig) -> None:
    size = 48 * _MIB
    before = _resident()
    async with await rig.connect() as connection:
        raw = connection.pgconn
        raw.send_query(f"SELECT repeat('y', {size // 2}) || repeat('z', {size // 2})".encode())
        await asyncio.sleep(1.5)  # the client reads nothing: the gateway and the server wait
        assert _resident() - before < 24 * _MIB
        loop = asyncio.get_running_loop()
        while raw.is_busy():
            ready = asyncio.Event()
            loop.add_reader(raw.socket, ready.set)
            await ready.wait()
            loop.remove_reader(raw.socket)
            raw.consume_input()
        found = raw.get_result()
        assert found is not None
        value = found.get_value(0, 0)
        assert value is not None
        assert hashlib.sha256(b"y" * (size // 2) + b"z" * (size // 2)).digest() == hashlib.sha256(value).digest()
        while raw.get_result() is not None:
            pass
        sent = "x" * size
        cursor = await connection.execute("SELECT length(%s), md5(%s) = md5(repeat('x', %s))", (sent, sent, size))
        assert (size, True) == await cursor.fetchone()
    await asyncio.gather(*rig.flows)
    end = rig.records("request", "info")[-1]
    assert int(str(end["bytes_up"])) > 2 * size
    assert int(str(end["bytes_down"])) > size


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_the_records_say_who_logged_in_where_and_for_how_long(rig: Rig) -> None:
    async with await rig.connect(dbname="other"):
        pass
    await asyncio.gather(*rig.flows)
    where = {"host": HOST, "port": PORT, "scheme": "postgres", "database": "other", "engine": "postgres"}
    kinds = [(kind, verdict) for kind, verdict, _ in rig.audit.records]
    assert [("request", "allow"), ("connect", "info"), ("secret.use", "allow"), ("request", "info")] == kinds
    allowed, use, end = (
        rig.records("request", "allow")[0],
        rig.records("secret.use", "allow")[0],
        rig.audit.records[-1][2],
    )
    assert where.items() <= allowed.items()
    assert {**where, "secret": "db-login", "binding": "agents/db", "user": USER}.items() <= use.items()
    assert {**where, "peer_name": HOST, "address": "127.0.0.1", "error": None}.items() <= end.items()
    assert "user" not in allowed
    assert all(PASSWORD not in str(fields) for _, _, fields in rig.audit.records)


@pytest.mark.parametrize("more", [{}, {"max_protocol_version": "3.2"}], ids=["3.0", "3.2"])
async def test_a_running_query_is_cancelled_with_a_key_of_the_gateway(rig: Rig, more: dict[str, str]) -> None:
    """The cancel request comes inside TLS."""
    async with await rig.connect(**more) as connection, await rig.connect() as other:
        query = asyncio.create_task(connection.execute("SELECT pg_sleep(60)"))
        await asyncio.sleep(0.5)
        await connection.cancel_safe(timeout=20)
        with pytest.raises(psycopg.errors.QueryCanceled):
            await query
        assert (1,) == await (await other.execute("SELECT 1")).fetchone()
        backends = [one[0] for one in await (await other.execute("SELECT pid FROM pg_stat_activity")).fetchall()]
        assert connection.pgconn.backend_pid not in backends
    assert [USER] * 2 == [one["user"] for one in rig.records("secret.use", "allow")]
    assert ["cancel request"] == [one["reason"] for one in rig.records("request", "allow") if "reason" in one]


async def test_a_cancel_request_in_the_clear_works(rig: Rig) -> None:
    """psql of PostgreSQL 15 sends it when it is interrupted."""
    psql = [str(programs() / "psql"), "-X", "-w", rig.dsn(), "-c", "SELECT pg_sleep(60)"]
    process = await asyncio.create_subprocess_exec(*psql, stderr=asyncio.subprocess.PIPE)
    await rig.logged_in.wait()
    await asyncio.sleep(1)
    process.send_signal(signal.SIGINT)
    _, said = await asyncio.wait_for(process.communicate(), 20)
    assert b"canceling statement due to user request" in said
    assert ["cancel request"] == [one["reason"] for one in rig.records("request", "allow") if "reason" in one]


async def test_a_key_of_no_live_session_cancels_nothing(rig: Rig) -> None:
    async with await rig.connect() as connection:
        pid = connection.pgconn.backend_pid
        wrong = cancel_packet(struct.pack("!I", pid) + b"kkkk")
        dials = rig.dials
        assert b"" == await answer(rig, wrong)
        assert dials == rig.dials
    assert b"" == await answer(rig, cancel_packet(struct.pack("!I", pid) + b"kkkk"))


async def test_another_database_is_refused_before_a_dial(rig: Rig) -> None:
    rig.policy = allowing("ledger")
    text = await rig.refusal(dbname="payroll")
    assert "Denied by policy rule default: db.test is allowed, but not this database" in text
    assert 0 == rig.dials
    assert ["payroll"] == [one["database"] for one in rig.records("request", "deny")]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (startup("user", "app"), b"needs TLS"),
        (GSS_REQUEST + startup("user", "app"), b"before the answer"),
        (SSL_REQUEST + startup("user", "app"), b"before the answer"),
        (SSL_REQUEST + b"\x16\x03\x01", b"before the answer"),
    ],
)
async def test_a_client_that_does_not_wait_or_has_no_tls_is_refused(rig: Rig, data: bytes, expected: bytes) -> None:
    assert expected in await answer(rig, data)
    assert 0 == rig.dials


async def test_encryption_by_gssapi_is_declined_once(rig: Rig) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(GSS_REQUEST)
    assert b"N" == await reader.readexactly(1)
    writer.write(GSS_REQUEST)
    assert b"before the answer" in await reader.read()
    writer.close()
    async with await rig.connect(gssencmode="prefer") as connection:
        assert not connection.closed


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"replication": "database"}, "replication are not supported"),
        ({"options": "-c role=postgres"}, "parameter options is not relayed"),
    ],
)
async def test_a_startup_option_that_is_not_relayed_is_refused(rig: Rig, more: dict[str, str], expected: str) -> None:
    assert expected in await rig.refusal(**more)
    assert 0 == rig.dials
    assert ["postgres"] == [one["rule"] for one in rig.records("request", "deny")]


async def test_a_client_that_sends_before_the_session_is_ready_is_refused(rig: Rig) -> None:
    """Such as a password: the gateway asks for none. Nothing of it reaches the server."""
    context = ssl.create_default_context(cafile=str(rig.root))
    with socket.create_connection(("127.0.0.1", rig.port)) as plain:
        said = await asyncio.to_thread(_impatient, plain, context)
    assert b"before the session was ready" in said
    assert [] == [one for one in rig.records("request", "info") if "error" not in one and one.get("bytes_up")]


def _impatient(plain: socket.socket, context: ssl.SSLContext) -> bytes:
    plain.sendall(SSL_REQUEST)
    assert b"S" == plain.recv(1)
    with context.wrap_socket(plain, server_hostname=HOST) as client:
        query = b"DROP TABLE x\0"
        client.sendall(startup("user", "x", "database", "postgres") + b"Q" + struct.pack("!I", 4 + len(query)) + query)
        said = b""
        while data := client.recv(65536):
            said += data
    return said


WAYS = {
    "hashed:canary-of-hashed": "an MD5 hash",
    "cleartext:canary-in-the-clear": "the password in the clear",
    "trusted:canary-of-trusted": "without a SCRAM login",
}


@pytest.mark.parametrize("secret", WAYS)
async def test_a_server_that_asks_for_the_password_itself_does_not_get_it(rig: Rig, secret: str) -> None:
    rig.secret = secret
    text = await rig.refusal()
    assert WAYS[secret] in text
    assert "canary" not in text


async def test_a_wrong_password_is_explained_without_it(rig: Rig) -> None:
    rig.secret = f"{USER}:wrong-canary-{PASSWORD}"
    text = await rig.refusal()
    assert f'password authentication failed for user "{USER}"' in text
    assert "db-login" in text
    assert PASSWORD not in text
    await asyncio.gather(*rig.flows)
    assert "the server refused the session: 28P01" == rig.records("request", "info")[0]["error"]


async def test_a_server_without_a_certificate_for_the_host_gets_nothing(rig: Rig) -> None:
    async def talk(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read(1)

    root = type(rig.upstream_root).root("Another Root")
    leaves = {"another root": root.leaf(HOST), "another name": rig.upstream_root.leaf("www.test")}
    for leaf in leaves.values():
        async with impostor(rig, talk, leaf) as made:
            assert "no TLS with a certificate for db.test" in await rig.refusal()
            assert not made.heard
    async with impostor(rig, talk, answer=b"N") as made:
        assert "does not offer TLS" in await rig.refusal()
    assert [] == rig.records("secret.use", "allow")


async def test_bytes_before_tls_are_not_read_as_messages(rig: Rig) -> None:
    """A server, or someone before it, that sends a message together with its answer to the TLS request."""

    async def talk(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read(1)

    async with impostor(rig, talk, answer=b"SR\0\0\0\x08\0\0\0\0"):
        assert "no TLS with a certificate" in await rig.refusal()
    assert [] == rig.records("secret.use", "allow")


@pytest.mark.parametrize("failing", ["request", "connect", "secret.use"])
async def test_nothing_happens_without_its_record(rig: Rig, failing: str) -> None:
    rig.audit.failing = frozenset({failing})
    assert "audit log takes no records" in await rig.refusal()
    assert (0 if failing == "request" else 1) == rig.dials


async def test_a_vault_that_refuses_or_fails_is_told_apart(rig: Rig) -> None:
    rig.refused = "the secret is not bound to this host"
    assert "Denied by policy rule agents/db: the secret is not bound to this host" in await rig.refusal()
    rig.refused, rig.suspended = None, "the operator has frozen the secret db-login"
    assert "the operator has frozen the secret db-login" in await rig.refusal()
    rig.suspended, rig.broken_vault = None, True
    assert "vault gives no login now" in await rig.refusal()
    rig.broken_vault, rig.secret = False, "short:passwd"
    assert "shorter than 8 characters" in await rig.refusal()
    rig.secret = "no-colon-in-this-value"
    assert "is not user:password" in await rig.refusal()


async def test_a_budget_that_is_used_up_refuses_the_session(rig: Rig) -> None:
    rig.over = Over("too many requests", 7)
    assert "too many requests" in await rig.refusal()
    assert 0 == rig.dials


async def test_a_revocation_or_another_policy_ends_the_session(rig: Rig) -> None:
    for end in ("other secret", "revoke", "other policy"):
        async with await rig.connect() as connection:
            assert 0 == rig.engine.revoke(frozenset({"other"}))
            assert 0 == rig.engine.recheck()
            assert (1,) == await (await connection.execute("SELECT 1")).fetchone()
            if end == "other secret":
                continue
            if end == "revoke":
                assert 1 == rig.engine.revoke(frozenset({"db-login"}))
            else:
                rig.policy = allowing("ledger")
                assert 1 == rig.engine.recheck()
            with pytest.raises(psycopg.OperationalError):
                await connection.execute("SELECT 1")
    await asyncio.gather(*rig.flows)


async def test_another_login_in_the_policy_ends_the_session(rig: Rig) -> None:
    async with await rig.connect() as connection:
        rig.policy = allowing(username="app")
        assert 1 == rig.engine.recheck()
        with pytest.raises(psycopg.OperationalError):
            await connection.execute("SELECT 1")


@pytest.mark.parametrize("end", ["revoke", "policy"])
async def test_a_secret_that_is_revoked_while_it_is_fetched_is_not_used(rig: Rig, end: str) -> None:
    def change() -> None:
        if end == "revoke":
            assert 1 == rig.engine.revoke(frozenset({"db-login"}))
        else:
            rig.policy = allowing("ledger")

    rig.on_login = change
    text = await rig.refusal()
    assert end == "revoke" or "the policy changed" in text
    await asyncio.gather(*rig.flows)
    assert "secret.use" not in [kind for kind, _, _ in rig.audit.records] or end == "policy"


async def test_a_session_without_traffic_ends(tmp_path: Path, rig: Rig, database: Cluster) -> None:
    quick = Rig(tmp_path, database.port, rig.upstream_root, rig.sandbox_root, limits=EngineLimits(idle_seconds=1))
    async with served(quick), await quick.connect() as connection:
        began = time.monotonic()
        for _ in range(4):
            await asyncio.sleep(0.4)
            await connection.execute("SELECT 1")
        await asyncio.sleep(2)
        with pytest.raises(psycopg.OperationalError):
            await connection.execute("SELECT 1")
        assert time.monotonic() - began > 3
        await asyncio.gather(*quick.flows)
        assert ["idle"] == [one["error"] for one in quick.records("request", "info")]


async def test_a_client_that_begins_slowly_or_is_one_too_many_is_ended(
    tmp_path: Path, rig: Rig, database: Cluster
) -> None:
    limits = EngineLimits(handshake_seconds=1, flows=1)
    quick = Rig(tmp_path, database.port, rig.upstream_root, rig.sandbox_root, limits=limits)
    context = ssl.create_default_context(cafile=str(rig.root))
    async with served(quick):
        reader, writer = await asyncio.open_connection("127.0.0.1", quick.port)
        writer.write(SSL_REQUEST)
        assert b"S" == await reader.readexactly(1)
        await writer.start_tls(context, server_hostname=HOST)
        began = time.monotonic()
        with contextlib.suppress(OSError):
            assert b"" == await reader.read()
        assert time.monotonic() - began < 10
        writer.close()
        async with await quick.connect():
            assert "unexpected eof" in await quick.refusal()
    assert pq.version() >= 170000
