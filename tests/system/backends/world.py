"""A server with every backend of secrets, a real HashiCorp Vault and a real PostgreSQL; and canaries in all of them.

A canary is a secret that a test uses, and then looks for. Each kind of credential has one, and each source of secrets.
"""

import asyncio
import base64
import json
import resource
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from opensandbox.sync.sandbox import SandboxSync

from demo.sandboxes import Secrets
from testbed.internet import API, DATABASE, DATABASE_ADDRESS, REGISTRY, REGISTRY_ADDRESS, STATUS
from testbed.leaks import Search
from testbed.stack import Stack
from tests.client_certificates import Issued, authority, key_pem
from tests.postgresql import Cluster, running
from tests.stacks import VAULTD, beside, removed
from tests.system.backends.mirror_server import Mirror, mirroring
from tests.vault.authorization_server import AuthorizationServer
from tests.vault.stand_in import https, send
from tests.vault.vault_server import Authority, VaultServer
from vault.client import AdminClient
from vault.grants import SecretBinding
from vault.secret import Secret

VARIABLE = "SALLYPORT_TEST_TOKEN"
SOURCES = {
    "sealed": "sealed://api-token",
    "env": f"env://{VARIABLE}",
    "file": "file://api-token",
    "command": "command://api-token",
    "kv": "vault://kv/agents/api#token",
    "token": "token://api-token",
}
LOGIN = "token://login"
TOKEN_SECONDS = 12
"""An access token of that one is obtained again after five seconds."""
ROTATED = "vault://kv/agents/rotated#token"
FIRSTS = 5
"""Sandboxes for each kind of secret, in the measurement of first requests."""
USER = "ledger_app"
DYNAMIC = "vault://database/creds/agents-ro#username:password"
_POLICY = """
version: 1
policies:
"""
_RULE = """
  {name}:
    rules:
      - {{id: api, host: {host}, inject: {{secret: "{secret}", as: {kind}}}}}
      - {{id: other, host: {other}, inspect: true}}
"""
_EVERY_KIND = f"""
  other:
    rules:
      - {{id: status, host: {STATUS}, inspect: true}}
  every-kind:
    rules:
      - {{id: inline, host: {REGISTRY}, paths: ["/inline/*"]}}
      - {{id: bearer, host: {REGISTRY}, paths: ["/bearer/*"], inject: {{secret: c-bearer, as: bearer}}}}
      - {{id: basic, host: {REGISTRY}, paths: ["/basic/*"], inject: {{secret: c-basic, as: basic}}}}
      - {{id: header, host: {REGISTRY}, paths: ["/header/*"],
         inject: {{secret: "env://CANARY_HEADER", as: api-key, header: X-Key}}}}
      - {{id: query, host: {REGISTRY}, paths: ["/query/*"],
         inject: {{secret: "command://query", as: query, name: key}}}}
      - {{id: cookie, host: {REGISTRY}, paths: ["/cookie/*"],
         inject: {{secret: "file://cookie", as: cookie, name: sid}}}}
      - id: placed
        host: {REGISTRY}
        paths: ["/placed/*"]
        substitutions: {{secret: c-placed, placeholder: __PLACED__, in: [path, query, header, body]}}
      - id: variable
        host: {REGISTRY}
        paths: ["/variable/*"]
        substitutions: {{secret: "vault://kv/agents/variable#token", env: API_TOKEN, in: [header]}}
      - id: netrc
        host: {REGISTRY}
        paths: ["/netrc/*"]
        substitutions:
          secret: "file://netrc"
          file: ~/.netrc
          template: "machine {REGISTRY} login bot password {{placeholder}}\\n"
          in: [basic]
          username: bot
      - {{id: kv, host: {REGISTRY}, paths: ["/kv/*"], inject: {{secret: "vault://kv/agents/bearer#token", as: bearer}}}}
      - {{id: dynamic, host: {REGISTRY}, paths: ["/dynamic/*"], inject: {{secret: "{DYNAMIC}", as: basic}}}}
      - {{id: oauth, host: {REGISTRY}, paths: ["/oauth/*"], inject: {{secret: "token://oauth", as: bearer}}}}
      - {{id: jwt, host: {REGISTRY}, paths: ["/jwt/*"], inject: {{secret: "token://jwt", as: bearer}}}}
      - {{id: app, host: {REGISTRY}, paths: ["/app/*"], inject: {{secret: "token://app", as: bearer}}}}
      - id: aws
        host: {REGISTRY}
        paths: ["/aws/*"]
        inject: {{secret: c-aws, as: aws-sigv4, region: eu-west-1, service: dynamodb}}
      - id: hmac
        host: {REGISTRY}
        paths: ["/hmac/*"]
        inject: {{secret: c-hmac, as: hmac, header: X-Signature, sign: "{{method}} {{target}}"}}
      - id: certificate
        host: {REGISTRY}
        paths: ["/certificate/*"]
        inject: {{secret: c-certificate, as: client-certificate}}
      - id: ledger
        host: {DATABASE}
        schemes: [postgres]
        databases: [ledger]
        inject: {{secret: c-ledger, as: postgres}}
"""


class WithBackends(Stack):
    """A Sallyport with each backend. `more` is added to its settings file; `issuer` has the authorities of tokens."""

    more, issuer = "", Path("/nonexistent")

    @property
    def settings(self) -> str:
        policy = self.directory / "policies.yaml"
        names = {name: (API, secret, "bearer", STATUS) for name, secret in {**SOURCES, "rotated": ROTATED}.items()}
        for number in range(FIRSTS):
            names[f"first-kv-{number}"] = API, f"vault://kv/agents/first-{number}#token", "bearer", STATUS
            names[f"first-sealed-{number}"] = API, f"first-{number}", "bearer", STATUS
        names["refreshed"] = REGISTRY, LOGIN, "bearer", STATUS
        rules = [
            _RULE.format(name=name, host=host, secret=secret, kind=kind, other=other)
            for name, (host, secret, kind, other) in names.items()
        ]
        policy.write_text(_POLICY + "".join(rules) + _EVERY_KIND)
        policy.chmod(0o644)
        self.policy = policy
        roots = self.directory / "roots.pem"
        roots.write_text(self.internet.roots.read_text() + self.issuer.read_text())
        roots.chmod(0o644)
        return super().settings.replace(str(self.internet.roots), str(roots)) + self.more


class Canaries:
    """The secrets, by name. `values` are those that begin with the same random text."""

    CREDENTIALS = frozenset({"oauth secret", "jwt key", "app key", "secret id", "token of Vault"})
    """What only the fetcher uses: it obtains other secrets with them."""
    OF_VARIABLES = frozenset({"header", "oauth secret"})
    SEALED = frozenset({"bearer", "basic", "placed", "aws", "hmac", "certificate key", "ledger", "inline"})

    def __init__(self) -> None:
        # Characters that encodings change; each place of a request permits them.
        self.beginning = f"canary+{secrets.token_hex(8)}={secrets.token_hex(6)}"
        marked = (
            *("bearer", "basic", "header", "query", "cookie", "placed", "variable", "netrc", "kv"),
            *("aws", "hmac", "ledger", "inline", "oauth secret", "oauth token", "app token", "secret id"),
        )
        self.values = {name: f"{self.beginning}-{secrets.token_hex(8)}" for name in marked}
        self.jwt_key = ec.generate_private_key(ec.SECP256R1())
        self.app_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.root = authority("Partners")
        self.certificate: Issued = self.root.issue("agent")
        self.search = Search(self.beginning)
        for name, value in self.values.items():
            self.search.add(name, value)
        ec_number = self.jwt_key.private_numbers().private_value
        certificate_number = self.certificate.key.private_numbers().private_value  # type: ignore[union-attr]
        self._key("jwt key", key_pem(self.jwt_key), ec_number, 32)
        self._key("certificate key", key_pem(self.certificate.key), certificate_number, 32)
        self._key("app key", key_pem(self.app_key), self.app_key.private_numbers().d, 256)
        self.search.add_forms("token of Vault", [b"hvs.CAES"])

    def _key(self, name: str, pem: str, number: int, size: int) -> None:
        """Look for a key: the lines of its PEM with private parts, and its number as OpenSSL and others hold it."""
        lines = [line.encode() for line in pem.splitlines() if not line.startswith("-") and len(line) == 64]
        private = number.to_bytes(size, "big")
        self.search.add_forms(name, [*lines[1 if len(lines) < 9 else 9 :][:2], private, private[::-1]])
        self.search.add_forms(name, [private.hex().encode(), base64.b64encode(private)[:-4]])


@dataclass
class Setup:
    """A server, its Vault, and the value that the API's host accepts."""

    stack: Stack
    server: VaultServer
    value: str
    file: Path
    database: Cluster
    mirror: Mirror
    canaries: Canaries = field(repr=False)
    issuer: AuthorizationServer
    issued: list[str]
    """The clients to which the test's own issuer gave tokens, in order."""

    def arrived(self, mark: str) -> list[dict[str, Any]]:
        """Return the requests of a mark that reached their server."""
        return [note for note in self.stack.internet.notes() if mark in note.get("target", "")]


@contextmanager
def backed() -> Iterator[Setup]:
    """Run everything."""
    value, canaries, issued = secrets.token_urlsafe(30), Canaries(), list[str]()
    with (
        tempfile.TemporaryDirectory(prefix="sallyport-vault-") as name,
        pytest.MonkeyPatch.context() as patch,
        ExitStack() as servers,
    ):
        place = Path(name)
        place.chmod(0o711)
        server = VaultServer(place)
        servers.callback(server.kill)
        server.start()
        file, query, credential = place / "files" / "api-token", place / "for-query", place / "secret-id"
        command = place / "for-command"
        file.parent.mkdir(mode=0o700)
        files = {file: value, command: value, query: canaries.values["query"]}
        files |= {file.with_name(each): canaries.values[each] for each in ("cookie", "netrc")}
        files |= {file.with_name("jwt-key"): key_pem(canaries.jwt_key)}
        files |= {file.with_name("app-key"): key_pem(canaries.app_key)}
        for path, content in files.items():
            path.write_text(content + "\n")
            path.chmod(0o444 if path.parent == place else 0o400)
        issuer = place / "issuer"
        issuer.mkdir()
        tokens, logins = Authority(issuer, "issuer"), AuthorizationServer(issuer, TOKEN_SECONDS)
        servers.callback(logins.kill)
        roots = issuer / "roots.pem"
        roots.write_text(tokens.path.read_text() + logins.authority.path.read_text())
        file.with_name("login").write_text(logins.log_in("confidential") + "\n")
        file.with_name("client-secret").write_text(logins.secret + "\n")
        port = servers.enter_context(
            https(tokens, _issuer({"c": (value, value), **_oauth(canaries)}, canaries, issued))
        )
        fill(server, value, canaries)
        role, _ = server.app_role()
        chosen = {"secret_id": canaries.values["secret id"]}
        server.ask("POST", "auth/approle/role/sallyport/custom-secret-id", metadata="{}", **chosen)
        credential.write_text(canaries.values["secret id"] + "\n")
        credential.chmod(0o400)
        patch.setattr(WithBackends, "issuer", roots)
        patch.setattr(
            WithBackends,
            "more",
            f"""
[sallyport.vault]
environment = ["{VARIABLE}", "CANARY_HEADER", "CANARY_OAUTH"]
file_directories = ["{file.parent}"]
commands = [
  {{name = "api-token", argv = ["/bin/cat", "{command}"]}},
  {{name = "query", argv = ["/bin/cat", "{query}"]}},
]
refresh_seconds = 5

[[sallyport.vault.tokens]]
name = "api-token"
kind = "client-credentials"
client = "c"
credential = "env://{VARIABLE}"
url = "https://127.0.0.1:{port}/token"

[[sallyport.vault.tokens]]
name = "oauth"
kind = "client-credentials"
client = "oauth"
credential = "env://CANARY_OAUTH"
url = "https://127.0.0.1:{port}/token"

[[sallyport.vault.tokens]]
name = "login"
kind = "refresh-token"
client = "confidential"
client_secret = "file://client-secret"
credential = "file://login"
url = "{logins.url}"

[[sallyport.vault.tokens]]
name = "jwt"
kind = "jwt"
client = "the-issuer"
audience = "{REGISTRY}"
credential = "file://jwt-key"

[[sallyport.vault.tokens]]
name = "app"
kind = "github-app"
client = "the-app"
installation = "7"
credential = "file://app-key"
url = "https://127.0.0.1:{port}/"

[sallyport.vault.hashicorp]
address = "{server.address}"
ca_file = "{server.authority.path}"
role = "{role}"
credential_file = "{credential}"
allowed = ["kv/agents/*", "database/creds/agents-*"]
""",
        )
        with cores_permitted(), pytest.MonkeyPatch.context() as environment:
            environment.setenv(VARIABLE, value)
            environment.setenv("CANARY_HEADER", canaries.values["header"])
            environment.setenv("CANARY_OAUTH", canaries.values["oauth secret"])
            stack = servers.enter_context(beside(WithBackends, "backends", Secrets(git="a:b", index="a:b", api=value)))
        internet = stack.internet
        netns = internet.path(internet.net)
        database = servers.enter_context(_database(stack, server, canaries))
        certificate = internet.directory / f"{REGISTRY}.pem"
        mirror = servers.enter_context(mirroring(netns, REGISTRY_ADDRESS, certificate, canaries.root.pem))
        asyncio.run(seal(stack, value, canaries))
        yield Setup(stack, server, value, file, database, mirror, canaries, logins, issued)


async def seal(stack: Stack, value: str, canaries: Canaries) -> None:
    """Store what the policies name in the sealed store."""
    held = dict.fromkeys(("api-token", *(f"first-{number}" for number in range(FIRSTS))), (API, value))
    held |= {f"c-{each}": (REGISTRY, canaries.values[each]) for each in ("bearer", "placed", "hmac")}
    held |= {
        "c-basic": (REGISTRY, f"bot:{canaries.values['basic']}"),
        "c-aws": (REGISTRY, f"AKIDCANARY:{canaries.values['aws']}"),
        "c-certificate": (REGISTRY, canaries.certificate.value),
    }
    client = await AdminClient.connect(stack.run / "vault.sock", VAULTD)
    for name, (host, text) in held.items():
        await client.put(name, Secret(text), SecretBinding.make([host]))
    login = Secret(f"{USER}:{canaries.values['ledger']}")
    await client.put("c-ledger", login, SecretBinding.make([DATABASE], [5432], ["postgres"]))
    await client.close()


@contextmanager
def cores_permitted() -> Iterator[None]:
    """Let processes that are started meanwhile dump cores, if nothing else prevents it."""
    former = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (former[1], former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, former)


def fill(server: VaultServer, value: str, canaries: Canaries) -> None:
    """Write what the policies name into Vault's KV store."""
    server.mount_kv(2)
    held = dict.fromkeys(("api", "rotated", *(f"first-{number}" for number in range(FIRSTS))), value)
    held |= {"bearer": canaries.values["kv"], "variable": canaries.values["variable"]}
    for path, text in held.items():
        server.ask("POST", f"kv/data/agents/{path}", data={"token": text})


def _oauth(canaries: Canaries) -> dict[str, tuple[str, str]]:
    return {"oauth": (canaries.values["oauth secret"], canaries.values["oauth token"])}


def _issuer(clients: dict[str, tuple[str, str]], canaries: Canaries, issued: list[str]) -> Any:
    """Return a server of tokens. It knows clients with their secrets and tokens, and one GitHub App."""
    logins = {f"{client}:{secret}": token for client, (secret, token) in clients.items()}

    def issue(request: BaseHTTPRequestHandler) -> None:
        request.rfile.read(int(request.headers.get("content-length") or 0))
        scheme, _, shown = request.headers["authorization"].partition(" ")
        if request.path == "/app/installations/7/access_tokens":
            jwt.decode(shown, canaries.app_key.public_key(), ["RS256"], issuer="the-app")
            end = f"{datetime.now(UTC) + timedelta(hours=1):%Y-%m-%dT%H:%M:%SZ}"
            send(request, 201, json.dumps({"token": canaries.values["app token"], "expires_at": end}).encode())
            return
        login = ":".join(map(unquote_plus, base64.b64decode(shown).decode().split(":", 1)))  # RFC 6749, 2.3.1
        token = logins.get(login) if scheme == "Basic" else None
        answer = {"access_token": token, "token_type": "Bearer", "expires_in": 3600}
        issued.extend([login.partition(":")[0]] if token else [])
        send(request, 200 if token else 401, json.dumps(answer if token else {}).encode())

    return issue


@contextmanager
def _database(stack: Stack, server: VaultServer, canaries: Canaries) -> Iterator[Cluster]:
    """Run a PostgreSQL in the test internet, in which Vault makes accounts over the server's unix socket."""
    internet = stack.internet
    with running(listen=DATABASE_ADDRESS, netns=internet.path(internet.net)) as cluster:
        cluster.ask(f"CREATE ROLE {USER} LOGIN PASSWORD '{canaries.values['ledger']}'")
        cluster.ask(f"CREATE DATABASE ledger OWNER {USER}")
        certificate = internet.directory / f"{DATABASE}.pem"
        cluster.secure(certificate, certificate)
        server.register("database", "postgresql-database-plugin")
        server.ask("POST", "sys/mounts/database", type="database")
        where = f"host={cluster.directory} port={cluster.port} dbname=postgres sslmode=disable"
        server.ask(
            "POST",
            "database/config/agents",
            plugin_name="postgresql-database-plugin",
            allowed_roles=["agents-ro"],
            connection_url="user={{username}} password={{password}} " + where,
            username="postgres",
            password=cluster.password,
        )
        create = "CREATE ROLE \"{{name}}\" WITH LOGIN PASSWORD '{{password}}' VALID UNTIL '{{expiration}}'"
        server.ask(
            "POST",
            "database/roles/agents-ro",
            db_name="agents",
            creation_statements=[create],
            default_ttl="30m",
            max_ttl="1h",
        )
        yield cluster


def sandbox_of(stack: Stack, runtime: str, policy: str | None, **options: Any) -> AbstractContextManager[SandboxSync]:
    """Use a sandbox, and remove it."""
    return removed(stack.create(runtime, policy=policy, **options))


def asked(sandbox: SandboxSync, host: str, path: str) -> str:
    """Return the page of a request and its status."""
    done = sandbox.commands.run(f"curl -sS --max-time 20 -w ' %{{http_code}}' https://{host}{path} 2>&1")
    return done.text.replace("\n", " ").strip()
