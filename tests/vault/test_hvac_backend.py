"""`vault://` with a real HashiCorp Vault: its logins, its leases, and each way in which it gives no value.

The properties that it shares with other backends are in `test_backends.py`. A worker's channel is the far end; for
secrets with a lease it is the PostgreSQL whose accounts Vault makes.
"""

import asyncio
import base64
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import psycopg
import pytest
import requests
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

import wire
from testbed.ports import reserve_port
from tests.postgresql import Cluster
from tests.vault.backends import HOST, REFRESH, SANDBOX, VaultWorld, grant
from tests.vault.stand_in import https, send
from tests.vault.vault_server import Authority, VaultServer
from vault.client import Lease, ReleaseRefusedError, VaultClient
from vault.grants import SecretBinding
from vault.secret import Secret
from vault.stores import web
from vault.stores.backend import NoValueError
from vault.stores.hvac import login, session
from vault.stores.hvac.config import Auth, HashicorpServer
from vault.stores.hvac.session import VaultSession
from wire.api import vaultd
from wire.api.fetcher import Fault

CANARY = "canary-0d55e2"
OTHER_SANDBOX = "sbx-000000000000000000000002"
LOGIN = "vault://database/creds/agents-ro#username:password"


async def ask(worker: VaultClient, reference: str) -> Lease:
    return await worker.release(reference, HOST, 443, "https", method="GET", path="/")


async def refusal(worker: VaultClient, reference: str) -> tuple[wire.Code, str]:
    """Return code and reason of a refused release, which names its secret."""
    with pytest.raises(ReleaseRefusedError) as caught:
        await ask(worker, reference)
    assert CANARY not in caught.value.reason
    assert reference in caught.value.reason
    return caught.value.code, caught.value.reason.removeprefix(f"{reference} has no value; for the operator: ")


@pytest.fixture(name="world")
async def _world(
    request: pytest.FixtureRequest, vault_server: VaultServer, short_path: Path
) -> AsyncIterator[VaultWorld]:
    world: VaultWorld = getattr(request, "param", VaultWorld)(short_path)
    world.server = vault_server
    await world.start()
    await world.store(CANARY)
    yield world
    await world.stop()


def of(kind: type[VaultWorld]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("world", [kind], indirect=True, ids=[kind.__name__])


# Logins


def _segment(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


class Issuer:
    """Signs JWTs."""

    def __init__(self) -> None:
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        self.public = self._key.public_key().public_bytes(*form).decode()

    def jwt(self, **claims: Any) -> str:
        head = {"alg": "RS256", "typ": "JWT"}
        body = {"iat": int(time.time()), "exp": int(time.time()) + 600, **claims}
        signed = ".".join(_segment(json.dumps(part).encode()) for part in (head, body))
        return f"{signed}.{_segment(self._key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256()))}"


class JwtWorld(VaultWorld):
    """The login with a JWT, at a mount of another name."""

    def log_in(self) -> HashicorpServer:
        issuer, server = Issuer(), self.server
        server.app_role()
        server.ask("DELETE", "sys/auth/workload")
        server.ask("POST", "sys/auth/workload", type="jwt")
        server.ask("POST", "auth/workload/config", jwt_validation_pubkeys=[issuer.public])
        role = {"role_type": "jwt", "user_claim": "sub", "bound_audiences": ["vault"], "token_policies": ["sallyport"]}
        server.ask("POST", "auth/workload/role/gateway", **role)
        self.credential.write_text(issuer.jwt(sub="sallyport", aud="vault"))
        return self.settings(Auth.JWT, "gateway", mount="workload")


class KubernetesWorld(VaultWorld):
    """The login with a service account; the cluster's part is a stand-in that reviews its token."""

    def log_in(self) -> HashicorpServer:
        server, plugin, reviewed = self.server, "vault-plugin-auth-kubernetes", []
        account = "system:serviceaccount:agents:sallyport"
        claims = {"namespace": "agents", "service-account.name": "sallyport", "service-account.uid": "u-1"}
        token = Issuer().jwt(
            sub=account, **{f"kubernetes.io/serviceaccount/{key}": each for key, each in claims.items()}
        )

        def review(handler: BaseHTTPRequestHandler) -> None:
            asked = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
            reviewed.append(asked["spec"]["token"])
            user = {"username": account, "uid": "u-1", "groups": []}
            status = {"authenticated": asked["spec"]["token"] == token, "user": user}
            answer = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "status": status}
            send(handler, 201, json.dumps(answer).encode(), ("content-type", "application/json"))

        authority = Authority(self.directory, "cluster-authority")
        self._cluster = https(authority, review)
        port = self._cluster.__enter__()
        server.app_role()
        server.register("auth", plugin)
        server.ask("DELETE", "sys/auth/kubernetes")
        server.ask("POST", "sys/auth/kubernetes", type=plugin)
        server.ask(
            "POST",
            "auth/kubernetes/config",
            kubernetes_host=f"https://127.0.0.1:{port}",
            kubernetes_ca_cert=authority.path.read_text(),
            token_reviewer_jwt=token,
            disable_local_ca_jwt=True,
        )
        server.ask(
            "POST",
            "auth/kubernetes/role/gateway",
            bound_service_account_names=["sallyport"],
            bound_service_account_namespaces=["agents"],
            token_policies=["sallyport"],
        )
        self.credential.write_text(token)
        return self.settings(Auth.KUBERNETES, "gateway")

    async def stop(self) -> None:
        await super().stop()
        self._cluster.__exit__(None, None, None)


@pytest.mark.system
@pytest.mark.parametrize(
    "world", [VaultWorld, JwtWorld, KubernetesWorld], indirect=True, ids=lambda kind: kind.__name__
)
async def test_a_login_gives_a_value_and_a_refused_one_says_what_to_check(world: VaultWorld) -> None:
    worker = await world.opened(world.reference)
    assert Secret(CANARY) == (await ask(worker, world.reference)).value
    await worker.close()
    await world.vault.admin.close_sandbox(SANDBOX)
    world.vault.readings.settle()
    world.credential.write_text("not-the-credential")
    world.hvac._login._token = None
    world.hvac._documents.clear()
    worker = await world.opened(world.reference)
    code, reason = await refusal(worker, world.reference)
    assert (wire.Code.BACKEND, True) == (code, reason.startswith("login: Vault refuses the login: check role"))
    await worker.close()


@pytest.mark.system
async def test_a_replaced_credential_and_a_revoked_token_need_no_restart(world: VaultWorld) -> None:
    worker = await world.opened(world.reference)
    await ask(worker, world.reference)
    token = world.hvac._login._token
    assert token is not None
    world.server.ask("POST", "auth/token/revoke", token=token.text)
    _, secret = world.server.app_role()
    world.credential.write_text(secret)
    await world.store(CANARY + "-2")
    await world.follow()
    assert Secret(CANARY + "-2") == (await ask(worker, world.reference)).value
    await worker.close()


@pytest.mark.system
async def test_a_token_is_renewed_before_its_end_and_revoked_at_the_end_of_the_fetcher(
    world: VaultWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(login, "_MARGIN", 0.5)
    world.server.app_role(token_period="3s")
    await world.hvac.examine()
    token = world.hvac._login._token
    assert token is not None
    await asyncio.sleep(5)
    await world.hvac.examine()
    now = world.hvac._login._token
    assert now is not None
    assert (token.text, True) == (now.text, now.expires > token.expires + 2)
    await world.hvac.close()
    with pytest.raises(AssertionError, match="403"):
        world.server.ask("POST", "auth/token/lookup", token=token.text)


# No value


@pytest.mark.system
async def test_each_cause_without_a_value_has_its_reason_and_affects_one_secret(world: VaultWorld) -> None:
    """A path without permission, a field that is not there, a deleted version, and a path that does not exist."""
    world.server.ask("POST", "kv/data/agents/gone", data={"token": CANARY})
    world.server.ask("DELETE", "kv/data/agents/gone")
    causes = {
        "vault://kv/private/api#token": (
            wire.Code.FORBIDDEN,
            "denied: Vault does not let Sallyport read kv/data/private",
        ),
        "vault://kv/agents/api#absent": (wire.Code.UNKNOWN_SECRET, "missing: the secret in Vault has no field absent"),
        "vault://kv/agents/gone#token": (wire.Code.UNKNOWN_SECRET, "missing: Vault has nothing at kv/data/agents/gone"),
        "vault://other/agents/api#token": (wire.Code.FORBIDDEN, "denied: Vault does not let Sallyport read other/"),
    }
    worker = await world.opened(world.reference, *causes)
    for reference, (code, reason) in causes.items():
        assert (code, reason) == (code, (await refusal(worker, reference))[1][: len(reason)])
        assert code == (await refusal(worker, reference))[0]
    assert Secret(CANARY) == (await ask(worker, world.reference)).value
    await worker.close()


@pytest.mark.system
async def test_a_path_that_the_settings_do_not_allow_is_not_asked_for(world: VaultWorld) -> None:
    world.server.ask("POST", "kv/data/agents/secret", data={"token": CANARY})
    world.hvac._server = world.settings(Auth.APPROLE, world.hvac._server.role, allowed=("kv/agents/api", "kv/x/*"))
    worker = await world.opened(world.reference, "vault://kv/agents/secret#token")
    await ask(worker, world.reference)
    code, reason = await refusal(worker, "vault://kv/agents/secret#token")
    assert (wire.Code.FORBIDDEN, True) == (code, "sallyport.vault.hashicorp.allowed" in reason)
    await worker.close()


@pytest.mark.system
async def test_a_sealed_a_dead_and_a_stopped_vault_disturb_no_valid_value_and_have_their_reason(
    world: VaultWorld,
) -> None:
    """With each of them a held value goes on, for its own time; a new one is refused, in bounded time."""
    unread = "vault://kv/agents/api#other"
    worker = await world.opened(world.reference, unread)
    await ask(worker, world.reference)
    faults: dict[str, tuple[Callable[[], None], Callable[[], None], str]] = {
        "sealed": (world.server.seal, world.server.unseal, "sealed: Vault is sealed: unseal it"),
        "dead": (world.server.kill, world.server.start, "unreachable: Vault cannot be reached"),
        "stopped": (world.server.stop, world.server.resume, "timeout: "),
    }
    for begin, end, expected in faults.values():
        world.hvac._documents.clear()
        world.offset += 1.5  # the pause after a failure
        await asyncio.to_thread(begin)
        try:
            began = time.monotonic()
            code, reason = await refusal(worker, unread)
            assert (wire.Code.BACKEND, expected) == (code, reason[: len(expected)])
            assert time.monotonic() - began < 8
            world.offset += 20
            assert Secret(CANARY) == (await ask(worker, world.reference)).value
        finally:
            await asyncio.to_thread(end)
    world.offset += 1.5
    assert Secret("another-value") == (await ask(worker, unread)).value
    await worker.close()


@pytest.mark.system
async def test_no_value_of_kv_is_used_for_more_than_five_minutes_after_its_last_reading(world: VaultWorld) -> None:
    worker = await world.opened(world.reference)
    await ask(worker, world.reference)
    await asyncio.to_thread(world.server.kill)
    try:
        for _ in range(4):
            await world.follow()
            await ask(worker, world.reference)
        world.offset += REFRESH - 1
        assert 1 >= (await refusal_or_seconds(worker, world.reference))
        world.offset += 1
        assert "unreachable: " in (await refusal(worker, world.reference))[1]
    finally:
        await asyncio.to_thread(world.server.start)
    await worker.close()


async def refusal_or_seconds(worker: VaultClient, reference: str) -> float:
    """Return the seconds of a lease, 0 if there is none."""
    try:
        return (await ask(worker, reference)).expires - time.monotonic()
    except ReleaseRefusedError:
        return 0.0


@pytest.mark.system
@pytest.mark.parametrize("wrong", ["authority", "name"])
async def test_a_server_without_the_pinned_certificate_gets_no_token(
    world: VaultWorld, short_path: Path, wrong: str
) -> None:
    """The control is the world's own login. The operator's authority, or another name of the server."""
    other = Authority(short_path, "another-authority")
    server = world.settings(Auth.APPROLE, "r")
    if wrong == "authority":
        server = world.settings(Auth.APPROLE, "r", roots=str(other.path))
    else:
        address = server.address.replace("127.0.0.1", "localhost")
        server = HashicorpServer(address, server.roots, "", Auth.APPROLE, "", "r", ())
    assert_fault(server, Fault.TLS)


def assert_fault(server: HashicorpServer, fault: Fault) -> None:
    opened = VaultSession(server)
    with pytest.raises(NoValueError) as caught:
        opened.request("get", "kv/data/agents/api", "the-token")
    opened.close()
    assert fault == caught.value.fault
    assert "the-token" not in str(caught.value)


@pytest.mark.system
@pytest.mark.timed
async def test_the_first_release_of_a_kv_secret_costs_at_most_30_ms_more_than_a_sealed_one(
    world: VaultWorld, record_property: Any
) -> None:
    """Everything else of a first request is the same for both. The fetcher has logged in at its start."""
    count = 20
    kv = [f"vault://kv/agents/first-{number}#token" for number in range(count)]
    sealed = [f"first-{number}" for number in range(count)]
    for number in range(count):
        world.server.ask("POST", f"kv/data/agents/first-{number}", data={"token": CANARY})
        await world.vault.admin.put(sealed[number], Secret(CANARY), SecretBinding.make([HOST]))
    await world.vault.admin.ask(vaultd.Refer(tuple(grant(name, HOST).form for name in kv)))
    await world.vault.admin.open_sandbox(SANDBOX, "lin-1", [grant(name, HOST) for name in (*kv, *sealed)])
    worker = await world.vault.worker(SANDBOX, 1)
    await world.hvac.examine()
    taken: dict[str, list[float]] = {"kv": [], "sealed": []}
    for names in zip(kv, sealed, strict=True):
        for found, name in zip(taken.values(), names, strict=True):
            began = time.perf_counter()
            assert Secret(CANARY) == (await ask(worker, name)).value
            found.append((time.perf_counter() - began) * 1000)
    more = statistics.median(taken["kv"]) - statistics.median(taken["sealed"])
    record_property("milliseconds", f"{more:.1f}")
    assert more <= 30
    await worker.close()


@pytest.mark.system
def test_a_standby_node_forwards_and_its_redirect_takes_no_token_elsewhere(tmp_path: Path) -> None:
    """Two nodes with raft. The active one announces the address of a server that has a certificate of its authority.

    The standby node redirects there if a client forbids it to forward, and if the active node does not answer.
    """
    redirected: list[str] = []

    def note(handler: BaseHTTPRequestHandler) -> None:
        redirected.append(handler.path)
        send(handler, 200, b"{}")

    places = [tmp_path / name for name in ("elsewhere", "active", "standby")]
    for place in places:
        place.mkdir()
    port = reserve_port()
    active = VaultServer(places[1], announced=f"https://127.0.0.1:{port}")
    with https(active.authority, note, port), ExitStack() as running:
        running.callback(active.kill)
        active.start()
        active.mount_kv(2)
        active.ask("POST", "kv/data/agents/api", data={"token": CANARY})
        standby = VaultServer(places[2], active)
        running.callback(standby.kill)
        standby.start()
        opened = VaultSession(HashicorpServer(standby.address, str(active.authority.path), "", Auth.TOKEN, "", "", ()))
        running.callback(opened.close)
        assert CANARY == opened.request("get", "kv/data/agents/api", active.root).data["data"]["token"]
        opened._session.headers["X-Vault-No-Request-Forwarding"] = "true"
        assert_standby(opened, active.root)
        del opened._session.headers["X-Vault-No-Request-Forwarding"]
        active.kill()
        assert_standby(opened, active.root)
        assert [] == redirected
        followed = requests.get(  # the control
            f"{standby.address}/v1/kv/data/agents/api",
            headers={"X-Vault-Token": active.root},
            verify=active.authority.path,
            timeout=10,
        )
        assert (200, ["/v1/kv/data/agents/api"]) == (followed.status_code, redirected)


def assert_standby(opened: VaultSession, token: str) -> None:
    """The answer is known as that of a standby node."""
    with pytest.raises(NoValueError) as caught:
        opened.request("get", "kv/data/agents/api", token)
    assert Fault.STANDBY == caught.value.fault
    assert "look at the active node" in caught.value.reason


class GivenTokenWorld(VaultWorld):
    """The login with a token of the operator, which ends."""

    def log_in(self) -> HashicorpServer:
        self.server.app_role()
        self.credential.write_text(self.server.token("sallyport", ttl="2s", explicit_max_ttl="2s"))
        return self.settings(Auth.TOKEN, "")


@pytest.mark.system
@of(GivenTokenWorld)
async def test_an_expired_token_of_the_operator_has_its_reason_and_can_be_replaced(world: VaultWorld) -> None:
    await asyncio.sleep(2.5)
    worker = await world.opened(world.reference)
    code, reason = await refusal(worker, world.reference)
    assert (wire.Code.BACKEND, True) == (code, "put a new one into credential_file" in reason)
    world.credential.write_text(world.server.token("sallyport"))
    world.offset += 1.5  # the pause after a failure
    assert Secret(CANARY) == (await ask(worker, world.reference)).value
    await worker.close()


# Secrets with a lease


@pytest.fixture(scope="session", name="database")
def _database() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="p-") as directory:
        cluster = Cluster(Path(directory), port=reserve_port(), listen="127.0.0.1")
        cluster.start()
        yield cluster
        cluster.kill()


class LeasedWorld(VaultWorld):
    """Accounts of a PostgreSQL, which Vault makes and drops."""

    ttl, most = 600, 3600

    def prepare(self, database: Cluster) -> None:
        """Let Vault make accounts there."""
        server = self.server
        server.register("database", "postgresql-database-plugin")
        server.ask("DELETE", "sys/mounts/database")
        server.ask("POST", "sys/mounts/database", type="database")
        url = f"postgresql://{{{{username}}}}:{{{{password}}}}@127.0.0.1:{database.port}/postgres?sslmode=disable"
        server.ask(
            "POST",
            "database/config/agents",
            plugin_name="postgresql-database-plugin",
            allowed_roles=["agents-ro"],
            connection_url=url,
            username="postgres",
            password=database.password,
        )
        self.role(self.ttl, self.most)

    def role(self, ttl: int, most: int) -> None:
        """Set the times of the leases, in seconds."""
        create = "CREATE ROLE \"{{name}}\" WITH LOGIN PASSWORD '{{password}}' VALID UNTIL '{{expiration}}'"
        self.server.ask(
            "POST",
            "database/roles/agents-ro",
            db_name="agents",
            creation_statements=[create],
            default_ttl=f"{ttl}s",
            max_ttl=f"{most}s",
        )

    async def settled(self, seconds: float) -> None:
        """Let vaultd maintain its values for some time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.vault.readings.settle()
            await asyncio.sleep(0.2)
        await self.idle()


def accounts(database: Cluster) -> set[str]:
    """Return the accounts that Vault has made."""
    rows = database.ask("SELECT rolname FROM pg_roles WHERE rolname LIKE 'v-%'")
    return {row[0] for row in rows}


def logs_in(database: Cluster, login: str) -> bool:
    """Whether PostgreSQL accepts `user:password`."""
    user, _, password = login.partition(":")
    try:
        psycopg.connect(
            host="127.0.0.1", port=database.port, user=user, password=password, dbname="postgres", connect_timeout=5
        ).close()
    except psycopg.OperationalError:
        return False
    return True


async def gone(database: Cluster, user: str) -> bool:
    """Wait until an account does not exist any more."""
    for _ in range(100):
        if user not in accounts(database):
            return True
        await asyncio.sleep(0.1)
    return False


@pytest.mark.system
@of(LeasedWorld)
async def test_each_sandbox_has_an_account_of_its_own_that_ends_with_the_sandbox(
    world: LeasedWorld, database: Cluster
) -> None:
    world.prepare(database)
    names = [f"vault://database/creds/agents-ro#{field}" for field in ("username", "password", "username:password")]
    worker = await world.opened(*names)
    user, password, login = [(await ask(worker, name)).value.reveal() for name in names]
    assert f"{user}:{password}" == login
    assert logs_in(database, login)
    await world.vault.admin.open_sandbox(OTHER_SANDBOX, "lin-2", [grant(LOGIN, HOST)])
    second = await world.vault.worker(OTHER_SANDBOX, 1)
    other = (await ask(second, LOGIN)).value.reveal()
    assert other != login
    assert logs_in(database, other)
    await world.vault.admin.close_sandbox(SANDBOX)
    await world.settled(0.5)
    assert await gone(database, user)
    assert not logs_in(database, login)
    assert logs_in(database, other)
    await world.backends.close()
    assert await gone(database, other.partition(":")[0])
    await worker.close()
    await second.close()


@pytest.mark.system
@pytest.mark.parametrize("action", ["revoke_all", "freeze"])
@of(LeasedWorld)
async def test_an_operators_call_has_vault_end_the_accounts_that_it_covers(
    world: LeasedWorld, database: Cluster, action: str
) -> None:
    """The account of the other sandbox goes on. The next one of the sandbox is another one."""
    world.prepare(database)
    worker = await world.opened(LOGIN)
    await world.vault.admin.open_sandbox(OTHER_SANDBOX, "lin-2", [grant(LOGIN, HOST)])
    second = await world.vault.worker(OTHER_SANDBOX, 1)
    first, other = [(await ask(one, LOGIN)).value.reveal() for one in (worker, second)]
    began = time.monotonic()
    await getattr(world.vault.admin, action)(SANDBOX)
    assert time.monotonic() - began < 1
    if action == "freeze":
        assert await gone(database, first.partition(":")[0])
        assert (await refusal(worker, LOGIN))[0] is wire.Code.FROZEN
        await world.vault.admin.unfreeze(SANDBOX)
    again = (await ask(worker, LOGIN)).value.reveal()
    assert again != first
    assert await gone(database, first.partition(":")[0])
    assert [False, True, True] == [logs_in(database, login) for login in (first, again, other)]
    await worker.close()
    await second.close()


@pytest.mark.system
@of(LeasedWorld)
async def test_a_probe_of_a_secret_with_a_lease_makes_no_account(world: LeasedWorld, database: Cluster) -> None:
    world.prepare(database)
    await world.opened()
    await world.vault.admin.probe(LOGIN)
    assert {} == world.hvac._leases
    with pytest.raises(wire.RemoteError, match="denied: Vault does not let Sallyport read"):
        await world.vault.admin.probe("vault://no-such-mount/creds/agents-ro#password")


@pytest.mark.system
@of(LeasedWorld)
async def test_a_lease_is_renewed_in_use_and_replaced_before_its_last_end(
    world: LeasedWorld, database: Cluster
) -> None:
    """Its first time is six seconds, its last end is after fourteen."""
    world.prepare(database)
    world.role(6, 14)
    ended: list[object] = []

    async def note(names: object) -> None:
        ended.append(names)

    worker = await world.opened(LOGIN, on_revoke=note)
    first = await ask(worker, LOGIN)
    assert 6.5 > first.expires - time.monotonic()
    began, used = time.monotonic(), [first.value]
    while time.monotonic() < began + 15:
        await world.settled(0.3)
        lease = await ask(worker, LOGIN)
        assert logs_in(database, lease.value.reveal())
        if lease.value != used[-1]:
            assert time.monotonic() > began + 8  # the first lease was renewed
            assert [frozenset({LOGIN})] == ended
            used.append(lease.value)
    assert (2, 1) == (len(used), len(ended))
    await worker.close()


@pytest.mark.system
@of(LeasedWorld)
async def test_without_vault_no_secret_is_used_beyond_its_lease(world: LeasedWorld, database: Cluster) -> None:
    world.prepare(database)
    world.role(6, 6)
    worker = await world.opened(LOGIN)
    began = time.monotonic()
    first = await ask(worker, LOGIN)
    assert first.expires <= began + 6.5
    await asyncio.to_thread(world.server.stop)
    try:
        await world.settled(2)
        assert first.value == (await ask(worker, LOGIN)).value
        await asyncio.sleep(max(0.0, began + 6 - time.monotonic()))
        assert not worker.current(first)
        assert wire.Code.BACKEND == (await refusal(worker, LOGIN))[0]
    finally:
        await asyncio.to_thread(world.server.resume)
    await worker.close()


@pytest.mark.system
@of(LeasedWorld)
async def test_a_lease_ends_with_the_token_to_which_it_belongs(world: LeasedWorld, database: Cluster) -> None:
    world.server.app_role(token_period="", token_ttl="8s", token_max_ttl="8s")
    world.prepare(database)
    worker = await world.opened(LOGIN)
    lease = await ask(worker, LOGIN)
    assert 8.5 > lease.expires - time.monotonic()
    await worker.close()
    world.server.app_role(token_ttl="0", token_max_ttl="0")


# Servers that misbehave: each of these has the certificate of the pinned authority


def answers(status: int, body: bytes = b"{}", *headers: tuple[str, str]) -> Callable[[BaseHTTPRequestHandler], None]:
    return lambda handler: send(handler, status, body, *headers)


def _dribble(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("content-length", "1000")
    handler.end_headers()
    try:
        for _ in range(60):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.1)
    except OSError:
        pass


MISBEHAVING = {
    "redirect": (answers(307, b"", ("location", "https://127.0.0.1:1/v1/x")), Fault.STANDBY),
    "standby": (answers(473), Fault.STANDBY),
    "standby without an active node": (answers(474), Fault.STANDBY),
    "not initialised": (answers(501), Fault.SEALED),
    "sealed": (answers(503, b'{"errors": ["Vault is sealed"]}'), Fault.SEALED),
    "overloaded": (answers(503), Fault.FAILED),
    "limited": (answers(429), Fault.BUSY),
    "broken": (answers(500, b"<html>"), Fault.FAILED),
    "large": (answers(200, b" " * (web.MOST_BYTES + 1)), Fault.UNFIT),
    "slow": (_dribble, Fault.TIMEOUT),
}


@pytest.mark.parametrize("name", MISBEHAVING)
def test_an_answer_of_another_kind_is_a_fault(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MOST_SECONDS", 1.0)
    answer, fault = MISBEHAVING[name]
    authority = Authority(tmp_path, "authority")
    with https(authority, answer) as port:
        server = HashicorpServer(f"https://127.0.0.1:{port}", str(authority.path), "", Auth.TOKEN, "", "", ())
        began = time.monotonic()
        assert_fault(server, fault)
        assert time.monotonic() - began < 4


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{", b"[" * 100_000, b"\xff", b'{"data": 1}'], ids=repr)
def test_an_answer_that_is_no_object_has_no_data(body: bytes, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    with https(authority, answers(200, body)) as port:
        opened = VaultSession(
            HashicorpServer(f"https://127.0.0.1:{port}", str(authority.path), "", Auth.TOKEN, "", "", ())
        )
        answer = opened.request("get", "kv/data/a", "t")
        opened.close()
    assert (200, {}) == (answer.status, answer.data)


def test_each_request_has_the_namespace_and_its_token_and_nothing_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables that hvac or requests would read; cookies of a former answer."""
    for name in ("VAULT_TOKEN", "VAULT_NAMESPACE", "VAULT_ADDR"):
        monkeypatch.setenv(name, "of-the-environment")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "absent"))
    seen: list[dict[str, str]] = []

    def note(handler: BaseHTTPRequestHandler) -> None:
        seen.append({name.lower(): value for name, value in handler.headers.items()})
        send(handler, 200, b"{}", ("set-cookie", "a=b"))

    authority = Authority(tmp_path, "authority")
    with https(authority, note) as port:
        opened = VaultSession(
            HashicorpServer(f"https://127.0.0.1:{port}", str(authority.path), "team/a", Auth.TOKEN, "", "", ())
        )
        for token in ("first", "second", ""):
            opened.request("get", "kv/data/a", token)
        opened.close()
    assert ["first", "second", None] == [each.get("x-vault-token") for each in seen]
    assert ["team/a"] * 3 == [each.get("x-vault-namespace") for each in seen]
    assert [None] * 3 == [each.get("cookie") for each in seen]
    assert ["true"] * 3 == [each.get("x-vault-request") for each in seen]


def test_only_what_the_operator_lists_is_permitted() -> None:
    """Pure: each path exact, or a prefix and `*`; an empty list permits all."""

    def permitted(*allowed: str) -> list[str]:
        server = HashicorpServer("https://v:1", "", "", Auth.TOKEN, "", "", allowed)
        return [path for path in ("kv/a", "kv/a/b", "kv/ab", "db/a") if server.permits(path)]

    assert ["kv/a", "kv/a/b", "kv/ab", "db/a"] == permitted()
    assert ["kv/a"] == permitted("kv/a")
    assert ["kv/a/b", "db/a"] == permitted("kv/a/*", "db/a")
