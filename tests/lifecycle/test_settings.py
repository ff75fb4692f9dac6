"""Settings: unknown keys are refused by path, the environment has precedence, the daemons can read their files."""

import base64
import json
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from audit.auditd import AuditConfig
from lifecycle import cli
from lifecycle.config import launch, master_key
from lifecycle.config.serve import ServeConfig
from lifecycle.config.settings import (
    ACTIVE_ROUTE_KEY,
    API_KEY,
    CONFIG_PATH,
    INSECURE,
    ROUTE_KEYS,
    Settings,
    SettingsError,
    detect_resolvers,
    parse,
    read,
)
from lifecycle.serve import route_keys
from policy import compiler
from policy.references import BackendKind
from runtimes.spec import HostConfig
from vault.config import VaultConfig
from vault.fetcher_config import FetcherConfig
from vault.stores.command import Command
from vault.stores.hvac.config import Auth
from vault.stores.token_config import TokenKind, TokenSource
from vault.wrapping.sources import KeySource, Pkcs11Token, WrappingConfig
from wire.errors import ConfigError

ROUTE_KEY = base64.b64encode(b"a key of signed routes").decode()
OTHER_ROUTE_KEY = base64.b64encode(b"another key of signed routes").decode()


TOKEN = "{name = 'x', kind = 'jwt', client = 'i', audience = 'a', credential = 'env://A'}"
LOGIN = "{name = 'login', kind = 'refresh-token', client = 'c', url = 'https://i.test/', credential = 'env://A'}"


def settings(text: str = "", **environment: str) -> Settings:
    return parse(tomllib.loads(text), "test.toml", environment)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[server]\nprot = 1", "server.prot"),
        ("[nothing]\nx = 1", "nothing"),
        ("[sallyport.docker]\nx = 1", "sallyport.docker.x"),
        ("[kubernetes]\nnamespace = 'x'", "kubernetes"),
        ("[tenants]\nx = 1", "tenants"),
        ("[server]\nport = true", "server.port"),
        ("[server]\nport = 0", "server.port"),
        ("[runtime]\ntype = 'kubernetes'", "runtime.type"),
        ("[sallyport]\nstate_dir = 'relative'", "sallyport.state_dir"),
        ("[storage]\nallowed_host_paths = '/srv'", "storage.allowed_host_paths"),
        ("[storage]\nallowed_host_paths = ['srv']", "storage.allowed_host_paths"),
        ("[storage]\nallowed_host_paths = ['/srv/../etc']", "storage.allowed_host_paths"),
        ("[storage]\nvolume_default_size = '63Mi'", "storage.volume_default_size"),
        ("[sallyport]\nmax_volumes = 1001", "sallyport.max_volumes"),
        ("[sallyport]\ndefault_memory = 'much'", "sallyport.default_memory"),
        ("[sallyport]\nimages = [{name = 'x'}]", "sallyport.images"),
        ("[sallyport]\nimages = [{name = 'x', tar = '/x', env = ['A=b']}]", "sallyport.images"),
        ("[sallyport]\nimages = [{name = 'X', tar = '/x'}]", "sallyport.images"),
        ("[sallyport.registry]\nallowed = ['*']", "sallyport.registry.allowed"),
        ("[sallyport.registry]\nallowed = 'ubuntu'", "sallyport.registry.allowed"),
        ("[sallyport.registry]\nsecrets = {registry = 'login'}", "sallyport.registry.secrets"),
        ("[sallyport.registry]\nsecrets = {'r.example.com/a' = 'login'}", "sallyport.registry.secrets"),
        ("[sallyport]\nmax_image = '1Ki'", "sallyport.max_image"),
        ("[sallyport]\nimages = [{name = 'x', tar = '/x', env = {A = 1}}]", "sallyport.images"),
        ("[sallyport]\nimages = [{name = 'x', tar = '/x', env = {A = '$B'}}]", "sallyport.images"),
        ("[sallyport]\nimages = [{name = 'x', tar = '/x', run = 'y'}]", "sallyport.images"),
        ("[sallyport]\ndns_upstreams = ['x']", "sallyport.dns_upstreams"),
        ("[sallyport]\nhost_addresses = {'a.example' = ['x']}", "sallyport.host_addresses"),
        ("[sallyport]\nhost_addresses = {'a.example' = ['::1', 'fe80::1%eth0']}", "sallyport.host_addresses"),
        ("[sallyport]\nallowed_runtimes = ['runsc']", "sallyport.default_runtime"),
        ("[sallyport]\ngateway_limits = {dial_rate = 0}", "sallyport.gateway_limits is wrong: dial_rate"),
        ("[sallyport]\ngateway_limits = {connection_rate = 10001}", "from 1 to 10000"),
        ("[sallyport]\ngateway_limits = {dial_rate = 5.0}", "sallyport.gateway_limits"),
        ("[sallyport]\ngateway_limits = {dial_rates = 5}", "unknown limit 'dial_rates'"),
        ("[sallyport.vault]\nenvironment = ['A-B']", "sallyport.vault.environment"),
        ("[sallyport.vault]\nenvironment = ['A', 'A']", "sallyport.vault.environment"),
        ("[sallyport.vault]\nfile_directories = ['run']", "sallyport.vault.file_directories"),
        ("[sallyport.vault]\ncommands = [{name = 'x'}]", "sallyport.vault.commands"),
        ("[sallyport.vault]\ncommands = [{name = 'x', argv = ['pass']}]", "absolute path of a program"),
        ("[sallyport.vault]\ncommands = [{name = 'x', argv = []}]", "absolute path of a program"),
        ("[sallyport.vault]\ncommands = [{name = 'x/y', argv = ['/a']}]", "a name of its own"),
        (f"[sallyport.vault]\ncommands = [{', '.join(2 * ["{name = 'x', argv = ['/a']}"])}]", "a name of its own"),
        ("[sallyport.vault]\ncommands = [{name = 'x', argv = ['/a'], run = 'y'}]", "and nothing else"),
        ("[sallyport.vault]\ncommands = [{name = 'x', argv = ['/a'], env = {A = 'vault://a/b#c'}}]", "env://NAME"),
        ("[sallyport.vault]\ncommands = [{name = 'x', argv = ['/a'], env = {A = 'file://../b'}}]", "sallyport.vault"),
        ("[sallyport.vault]\ntokens = [{name = 'x', kind = 'jwt'}]", "sallyport.vault.tokens"),
        ("[sallyport.vault]\ntokens = [{name = 'x', kind = 'saml', credential = 'env://A'}]", "kind is one of"),
        (f"[sallyport.vault]\ntokens = [{', '.join(2 * [TOKEN])}]", "a name of its own"),
        (f"[sallyport.vault]\ntokens = [{LOGIN}, {LOGIN.replace('login', 'other')}]", "the same refresh token"),
        (f"[sallyport.vault]\ntokens = [{TOKEN.replace('}', ', secret = 1}')}]", "no such key"),
        (f"[sallyport.vault]\ntokens = [{TOKEN.replace('}', ', seconds = true}')}]", "not with such a value"),
        (f"[sallyport.vault]\ntokens = [{TOKEN.replace('env://A', 'plain')}]", "credential is env://NAME or"),
        ("[sallyport.vault]\nrefresh_seconds = 4", "sallyport.vault.refresh_seconds"),
        ("[sallyport.vault]\nrefresh_seconds = 301", "sallyport.vault.refresh_seconds"),
        ("[sallyport.vault.hashicorp]\naddress = 'http://vault.example.com:8200'", "sallyport.vault.hashicorp.address"),
        ("[sallyport.vault.hashicorp]\naddress = 'https://user:word@v:8200'", "sallyport.vault.hashicorp.address"),
        ("[sallyport.vault.hashicorp]\naddress = 'https://v:8200/v1'", "sallyport.vault.hashicorp.address"),
        ("[sallyport.vault.hashicorp]\naddress = 'https://v:port'", "sallyport.vault.hashicorp.address"),
        ("[sallyport.vault.hashicorp]\nauth = 'ldap'", "sallyport.vault.hashicorp.auth"),
        ("[sallyport.vault.hashicorp]\nauth_mount = '../sys'", "sallyport.vault.hashicorp.auth_mount"),
        ("[ingress.secure_access]\nactive_key = 'ab'", "ingress.secure_access.active_key"),
        ("[ingress.secure_access]\nactive_key = 'a'", "ingress.secure_access: the active key"),
        (f"[ingress.secure_access]\nkeys = [{{key_id = 'a', key = '{ROUTE_KEY}'}}]", "the active key"),
        ("[ingress.secure_access]\nkeys = [{key_id = 'a'}]", "ingress.secure_access.keys each key has key_id and key"),
        ("[ingress.secure_access]\nkeys = [{key_id = 'a', key = 'c2hvcnQ='}]", "at least 16 bytes"),
        ("[ingress.secure_access]\nkeys = [{key_id = 'a', key = '#hidden'}]", "must be base64"),
        (f"[ingress.secure_access]\nkeys = [{{key_id = 'A', key = '{ROUTE_KEY}'}}]", "key_id must be one of"),
        (
            f"[ingress.secure_access]\nkeys = [{', '.join(2 * [f"{{key_id = 'a', key = '{ROUTE_KEY}'}}"])}]",
            "no two keys",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_its_path(text: str, problem: str) -> None:
    """The message names the key."""
    with pytest.raises(SettingsError) as caught:
        settings(text)
    assert problem in str(caught.value)


def test_keys_without_a_meaning_here_are_reported() -> None:
    """A file of the reference server is accepted, and the keys without an effect are reported."""
    read_ = settings("[docker]\nnetwork_mode = 'bridge'\n[egress]\nimage = 'x'")
    assert ["docker.network_mode", "egress.image"] == [remark.split()[1] for remark in read_.remarks]


def test_the_environment_replaces_the_keys() -> None:
    """Also if the variable is empty. Without a key the server runs only with the explicit switch, and on loopback."""
    assert ("file-key-0123456789",) == settings("[server]\napi_key = 'file-key-0123456789'").api_keys
    assert ("env",) == settings("[server]\napi_key = 'file'", **{API_KEY: "env"}).api_keys
    emptied = settings("[server]\napi_key = 'file'", **{API_KEY: ""})
    assert ((), False) == (emptied.api_keys, emptied.insecure)
    assert settings("", **{API_KEY: "", INSECURE: "YES"}).insecure
    assert not settings("[server]\napi_key = 'k'", **{INSECURE: "YES"}).insecure
    with pytest.raises(SettingsError):
        settings("[server]\nhost = '0.0.0.0'", **{INSECURE: "YES"})


IN_A_FILE = f"[ingress.secure_access]\nactive_key = 'b'\nkeys = [{{key_id = 'b', key = '{ROUTE_KEY}'}}]"


def test_the_environment_replaces_the_keys_of_signed_routes() -> None:
    """In the reference server's form. Both variables empty: the server makes a key."""
    found = settings(IN_A_FILE).route_keys
    assert found is not None
    assert ("b", {"b": b"a key of signed routes"}) == (found.active, found.keys)
    both = f" a={OTHER_ROUTE_KEY}, b={ROUTE_KEY},"
    found = settings(IN_A_FILE, **{ROUTE_KEYS: both, ACTIVE_ROUTE_KEY: " a "}).route_keys
    assert found is not None
    assert ("a", {"a", "b"}) == (found.active, set(found.keys))
    assert settings("").route_keys is None
    assert settings(IN_A_FILE, **{ROUTE_KEYS: "", ACTIVE_ROUTE_KEY: ""}).route_keys is None


@pytest.mark.parametrize(
    "environment",
    [
        {ACTIVE_ROUTE_KEY: "b"},
        {ROUTE_KEYS: f"b={ROUTE_KEY}"},
        {ROUTE_KEYS: f"b={ROUTE_KEY}", ACTIVE_ROUTE_KEY: "a"},
        {ROUTE_KEYS: "b=hidden-key", ACTIVE_ROUTE_KEY: "b"},
        {ROUTE_KEYS: f"b={ROUTE_KEY},b={ROUTE_KEY}", ACTIVE_ROUTE_KEY: "b"},
        {ROUTE_KEYS: ROUTE_KEY, ACTIVE_ROUTE_KEY: "b"},
    ],
)
def test_keys_of_signed_routes_in_the_environment_are_whole_or_refused(environment: dict[str, str]) -> None:
    """The message names the variable and contains no key."""
    with pytest.raises(SettingsError) as caught:
        settings(IN_A_FILE, **environment)
    assert ROUTE_KEYS in str(caught.value)
    assert ROUTE_KEY not in str(caught.value) and "hidden" not in str(caught.value)


def test_keys_of_signed_routes_reach_serve(tmp_path: Path) -> None:
    """Through its file. Without configured keys it makes one, which stays, and only its user can read it."""
    path = tmp_path / "serve.json"
    given = settings(IN_A_FILE)
    path.write_text(launch.serve_config(given, ("k",)).text())
    config = replace(ServeConfig.read(path), state_dir=tmp_path)
    assert given.route_keys == route_keys(config)
    made = route_keys(replace(config, route_keys=None))
    assert made == route_keys(replace(config, route_keys=None))
    assert ("0", 32) == (made.active, len(made.keys["0"]))
    assert 0o600 == (tmp_path / "route-key").stat().st_mode & 0o777


def test_keys_are_not_shown() -> None:
    """Neither in a representation nor in an error."""
    assert ROUTE_KEY not in repr(launch.serve_config(settings(IN_A_FILE), ()))
    assert "hidden-key" not in repr(settings("", **{API_KEY: "hidden-key"}))


def test_lookup(tmp_path: Path) -> None:
    """The order is the option, the variable, the home directory, the defaults."""
    for name, port in (("a.toml", 1), ("b.toml", 2), (".sandbox.toml", 3)):
        (tmp_path / name).write_text(f"[server]\nport = {port}\n")
    home = {"HOME": str(tmp_path)}
    assert 1 == read(tmp_path / "a.toml", home | {CONFIG_PATH: str(tmp_path / "b.toml")}).port
    assert 2 == read(None, home | {CONFIG_PATH: str(tmp_path / "b.toml")}).port
    assert 3 == read(None, home).port
    defaults = read(None, {"HOME": str(tmp_path / "none")})
    assert ("127.0.0.1", 8080) == (defaults.host, defaults.port)


@pytest.fixture
def short() -> Iterator[Path]:
    """Make a directory whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="slp") as name:
        yield Path(name)


def test_files_are_what_the_daemons_read(short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every file passes its daemon's own check, is readable by root only, and contains no API key."""
    (short / "roots.pem").write_text("x")
    (short / "roots.pem").chmod(0o644)
    config = short / "settings.toml"
    config.write_text(
        f'[sallyport]\nstate_dir = "{short}/state"\nrun_dir = "{short}/run"\n'
        f'upstream_roots = "{short}/roots.pem"\ndns_upstreams = ["192.0.2.53:53"]\n'
    )
    assert 0 == cli.main(["--config", str(config), "serve", "--write-only"])
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert "export OPEN_SANDBOX_DOMAIN=127.0.0.1:8080" == lines[0]
    shell = ["sh", "-c", f'{lines[1]}; printf %s "$OPEN_SANDBOX_API_KEY"']
    key = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
    assert key == (short / "state/lifecycle/api-key").read_text().strip()
    assert key not in printed
    directory = short / "run/launch"
    HostConfig.model_validate_json((directory / "host.json").read_text())
    AuditConfig.parse((directory / "auditd.json").read_bytes())
    VaultConfig.read(directory / "vaultd.json")
    compiler.configured((directory / "compiler.json").read_text())
    serve = ServeConfig.read(directory / "serve.json")
    assert serve == launch.serve_config(read(config, {}), (key,))
    for path in [*directory.iterdir(), short / "state/lifecycle/api-key"]:
        assert 0o600 == path.stat().st_mode & 0o777
        assert key not in path.read_text() or path.name == "api-key"


@pytest.mark.parametrize("place", ["/dev/shm/run", "/proc/1", "link/run"])
def test_a_run_directory_that_a_containers_start_hides_is_refused(
    place: str, short: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (short / "link").symlink_to("/dev/shm")
    config = short / "settings.toml"
    config.write_text(f'[sallyport]\nstate_dir = "{short}/state"\nrun_dir = "{short / place}"\n')
    assert 0 != cli.main(["--config", str(config), "serve", "--write-only"])
    assert "run_dir is below /dev or /proc" in capsys.readouterr().err


BACKENDS = """
[sallyport.vault]
environment = ["A"]
file_directories = ["/run/credentials/sallyport.service"]
commands = [{name = "c", argv = ["/bin/true"], env = {B = "env://A"}}]
refresh_seconds = 5
tokens = [
  {name = "t", kind = "jwt", client = "i", audience = "a", credential = "env://A"},
  {name = "u", kind = "refresh-token", client = "c", client_secret = "env://A", url = "https://i.test/", credential = "env://B"},
]

[sallyport.vault.hashicorp]
address = "https://vault.example.com:8200/"
role = "r"
credential_file = "/etc/secret-id"
allowed = ["kv/*"]
"""


def test_the_fetcher_is_told_names_and_hostd_what_to_open(short: Path, tmp_path: Path) -> None:
    """Without a backend there is no fetcher."""
    assert not launch.backends(settings())
    assert launch.vault_config(settings())["fetcher"] is None
    configured = settings(BACKENDS)
    assert set(BackendKind) == launch.backends(configured)
    path = tmp_path / "fetcher.json"
    path.write_text(json.dumps(launch.fetcher_config(configured)))
    read_ = FetcherConfig.read(path)
    assert (700000002, 5, 1, 1) == (read_.vaultd, read_.refresh_seconds, read_.environment, read_.file_directories)
    assert {"c": Command(("/bin/true",), {"B": "env://A"})} == read_.commands
    assert {
        "t": TokenSource(TokenKind.JWT, "env://A", client="i", audience="a"),
        "u": TokenSource(TokenKind.REFRESH_TOKEN, "env://B", "https://i.test/", "c", client_secret="env://A"),
    } == read_.tokens
    assert str(configured.upstream_roots) == read_.roots
    assert read_.hashicorp is not None
    assert ("https://vault.example.com:8200", Auth.APPROLE) == (read_.hashicorp.address, read_.hashicorp.auth)
    assert str(configured.upstream_roots) == read_.hashicorp.roots
    supplies = launch.host_config(configured, short)["supplies"]
    directories = ["/run/credentials/sallyport.service"]
    assert {"environment": ["A"], "directories": directories, "credential": "/etc/secret-id"} == supplies
    assert "/etc/secret-id" not in path.read_text()


@pytest.mark.parametrize("key", ["role", "credential_file"])
def test_a_login_without_a_part_is_refused_by_its_key(key: str) -> None:
    text = "\n".join(line for line in BACKENDS.splitlines() if not line.startswith(key))
    with pytest.raises(SettingsError, match=f"sallyport.vault.hashicorp.{key} is missing"):
        launch.fetcher_config(settings(text))


def test_the_fetchers_file_is_strict(tmp_path: Path) -> None:
    path = tmp_path / "fetcher.json"
    good = launch.fetcher_config(settings(BACKENDS))
    for wrong in (good | {"token": "x"}, {**good, "vaultd": "0"}, {**good, "hashicorp": {"address": "x"}}, []):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match=r"fetcher\.json"):
            FetcherConfig.read(path)
    with pytest.raises(ConfigError, match="No such file"):
        FetcherConfig.read(tmp_path / "absent")


KEY_SOURCES = """
[sallyport.vault]
key_source = "pkcs11"
[sallyport.vault.pkcs11]
module = "/usr/lib/softhsm/libsofthsm2.so"
token_label = "sallyport"
key_label = "master"
pin_file = "/etc/sallyport/pin"
environment = {SOFTHSM2_CONF = "/etc/softhsm2.conf"}
[sallyport.vault.transit]
address = "https://vault.example.com:8200/"
role = "r-1"
credential_file = "/etc/sallyport/secret-id"
key = "master"
"""


def test_vaultd_is_told_the_sources_of_its_key_and_hostd_what_to_open(tmp_path: Path, short: Path) -> None:
    """Neither of the files has PIN or credential. The note of the running server has the same sources."""
    configured = settings(KEY_SOURCES)
    path = tmp_path / "vaultd.json"
    path.write_text(json.dumps(launch.vault_config(configured)))
    wrapping = VaultConfig.read(path).wrapping
    environment = {"SOFTHSM2_CONF": "/etc/softhsm2.conf"}
    module = "/usr/lib/softhsm/libsofthsm2.so"
    assert Pkcs11Token(module, "sallyport", "master", "/etc/sallyport/pin", environment) == wrapping.pkcs11
    assert wrapping.transit is not None
    assert ("transit", "master", KeySource.PKCS11) == (wrapping.transit.engine, wrapping.transit.key, wrapping.source)
    assert "https://vault.example.com:8200" == wrapping.transit.server.address
    host = HostConfig.model_validate(launch.host_config(configured, short))
    assert {
        "SALLYPORT_PKCS11_PIN_FD": "/etc/sallyport/pin",
        "SALLYPORT_TRANSIT_CREDENTIAL_FD": "/etc/sallyport/secret-id",
    } == host.vault_files
    noted = {"sallyport": {"vault": master_key.note(configured)}}
    assert wrapping == master_key.wrapping(parse(json.loads(json.dumps(noted)), "the note", {}))
    path.write_text(json.dumps(launch.vault_config(configured) | {"wrapping": {"source": "file"}}))
    with pytest.raises(ConfigError, match="wrapping"):
        VaultConfig.read(path)


def test_without_more_settings_the_key_is_a_plain_file(short: Path) -> None:
    assert WrappingConfig() == master_key.wrapping(settings())
    assert {} == launch.host_config(settings(), short)["vault_files"]


@pytest.mark.parametrize(
    "key", ["token_label", "key_label", "pin_file", "module", "role", "credential_file", 'key = "master"']
)
def test_a_source_of_the_key_needs_all_of_its_settings(key: str) -> None:
    text = "\n".join(line for line in KEY_SOURCES.splitlines() if not line.startswith(key))
    missing = "key" if key.startswith("key =") else key
    with pytest.raises(SettingsError, match=rf"sallyport\.vault\.(pkcs11|transit)\.{missing} is missing"):
        launch.vault_config(settings(text))


def test_hostd_opens_the_credential_of_systemd_for_vaultd(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configured = settings("[sallyport.vault]\nkey_source = 'credential'")
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    assert {} == launch.host_config(configured, short)["vault_files"]
    with pytest.raises(SettingsError, match="LoadCredential=sallyport-master-key"):
        master_key.prepare(configured)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(short))
    assert launch.vault_config(configured)["master_key_file"] is None
    assert {
        "SALLYPORT_MASTER_KEY_FD": f"{short}/sallyport-master-key",
        "SALLYPORT_MASTER_KEY_NEXT_FD": f"{short}/sallyport-master-key-next",
    } == launch.host_config(configured, short)["vault_files"]
    (short / "sallyport-master-key").touch()
    master_key.prepare(configured)


def test_a_key_is_not_changed_under_settings_that_the_server_does_not_have() -> None:
    other = settings(KEY_SOURCES.replace('"master"', '"other"'))
    assert not master_key.differs(settings(KEY_SOURCES), settings(KEY_SOURCES))
    assert master_key.differs(settings(KEY_SOURCES), other)
    assert master_key.differs(settings(), settings(KEY_SOURCES))


def test_the_api_server_and_hostd_bound_launches_alike() -> None:
    """hostd does not rely on `serve` for this limit."""
    read_ = settings("[sallyport]\nlaunch_concurrency = 7")
    assert 7 == launch.serve_config(read_, ()).bounds.launches
    assert 7 == HostConfig.model_validate(launch.host_config(read_, Path("/launch"))).launch_concurrency


def test_only_hostd_knows_the_bounds_of_volumes() -> None:
    """Without a setting no path of the host is allowed."""
    named = settings("[storage]\nallowed_host_paths = ['/srv/a']\n[sallyport]\nmax_volume = '64Mi'\nmax_volumes = 2")
    for read_, paths, most in ((settings(""), [], 64), (named, ["/srv/a"], 2)):
        bounds = HostConfig.model_validate(launch.host_config(read_, Path("/launch"))).volumes
        assert (paths, most, 1 << 30) == (bounds.allowed_host_paths, bounds.max_count, bounds.default_bytes)
        assert "volume" not in launch.serve_config(read_, ()).text()


def test_a_key_may_be_given_as_its_digest() -> None:
    """Then no file or process of the server contains the key."""
    digest = "ab" * 32
    config = launch.serve_config(settings("", **{API_KEY: f"sha256:{digest}"}), (f"sha256:{digest}",))
    assert (digest,) == config.key_digests


def test_the_servers_file_is_strict(tmp_path: Path) -> None:
    """Unknown keys are refused in this file too."""
    path = tmp_path / "serve.json"
    document = json.loads(launch.serve_config(settings(), ()).text())
    path.write_text(json.dumps(document | {"other": 1}))
    with pytest.raises(ConfigError):
        ServeConfig.read(path)


def test_resolvers_of_the_host(tmp_path: Path) -> None:
    """Resolvers on loopback, or with an interface in their address, are unusable for a gateway."""
    path = tmp_path / "resolv.conf"
    path.write_text(
        "nameserver 127.0.0.53\nnameserver ::1\nnameserver fe80::1%eth0\nnameserver fe80::2\nnameserver ns.example\n"
        "nameserver 192.0.2.1\nnameserver 2001:db8::1\noptions x\n"
    )
    assert ("192.0.2.1:53", "[2001:db8::1]:53") == detect_resolvers(path)


def test_policy_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`policy explain` takes the file and the parts of a request. Its exit status is the decision."""
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\npolicies:\n  a:\n    rules:\n      - {id: x, host: files.example.org}\n")
    assert 0 == cli.main(["policy", "check", str(path)])
    assert 0 == cli.main(["policy", "explain", str(path), "--host", "files.example.org", "--path", "/x"])
    assert 1 == cli.main(
        ["policy", "explain", str(path), "--host", "other.example.org", "--method", "POST", "--policy", "a"]
    )
    assert "DENY" in capsys.readouterr().out


def test_the_operators_file_wins_key_by_key(tmp_path: Path) -> None:
    """It has precedence over the build's file. Lists and tables are replaced as a whole; other tables' keys stay."""
    built, own = tmp_path / "built.toml", tmp_path / "own.toml"
    built.write_text(
        '[sallyport]\nrunsc = "/built/runsc"\nexecd = "/built/execd"\nimages = [{name = "b", tar = "/b.tar"}]\n'
        '[sallyport.docker]\nmanaged = true\ndata_root = "/built/docker"\n'
    )
    own.write_text('[sallyport]\nrunsc = "/own/runsc"\nimages = []\n[sallyport.docker]\nmanaged = false\n')
    both = read(own, {}, built)
    assert ("/own/runsc", "/built/execd") == (both.program("runsc", ""), both.execd())
    assert ((), False) == (both.get("sallyport.images"), both.get("sallyport.docker.managed"))
    assert Path("/built/docker") == both.get("sallyport.docker.data_root")
    alone = read(None, {"HOME": str(tmp_path / "none")}, built)
    assert ("/built/runsc", True) == (alone.program("runsc", ""), alone.get("sallyport.docker.managed"))


def test_both_files_are_checked_and_distinguished(tmp_path: Path) -> None:
    """An error names its file. Settings that depend on each other are checked together."""
    built, own = tmp_path / "built.toml", tmp_path / "own.toml"
    own.write_text("")
    built.write_text("[sallyport]\nnonsense = 1\n")
    with pytest.raises(SettingsError, match=r"built\.toml: unknown key sallyport\.nonsense"):
        read(own, {}, built)
    built.write_text('[sallyport]\ndefault_runtime = "runsc"\n')
    own.write_text('[sallyport]\nallowed_runtimes = ["runsc"]\n')
    assert "runsc" == read(own, {}, built).default_runtime
    with pytest.raises(SettingsError, match=r"missing\.toml"):
        read(own, {}, tmp_path / "missing.toml")


def test_every_command_sees_what_serve_sees(short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--defaults` and `--config`, before or after the command, name the same server."""
    (short / "built.toml").write_text(f'[sallyport]\nstate_dir = "{short}/state"\nrun_dir = "{short}/run"\n')
    (short / "own.toml").write_text('[server]\nport = 18998\n[sallyport]\ndns_upstreams = ["192.0.2.53:53"]\n')
    own = str(short / "own.toml")
    assert 0 == cli.main(["--defaults", str(short / "built.toml"), "serve", "--config", own, "--write-only"])
    assert "127.0.0.1:18998" in capsys.readouterr().out
    assert (short / "run/launch/host.json").is_file()
    assert 0 != cli.main(["--defaults", str(short / "built.toml"), "--config", own, "audit", "tail"])
    assert f"{short}/state/audit" in capsys.readouterr().err
    assert 0 != cli.main(["--defaults", str(short / "built.toml"), "--config", own, "vault", "list"])
    assert f"{short}/run/vault.sock" in capsys.readouterr().err


def test_the_registries_are_those_of_the_settings(tmp_path: Path) -> None:
    """Docker Hub is one of them, by its usual name."""
    path = tmp_path / "sallyport.toml"
    path.write_text(
        "[sallyport.registry]\nallowed = ['r.example.com:5000/a/*', 'ubuntu']\nsecrets = {'docker.io' = 's'}\n"
    )
    registries = launch.host_config(read(path, {}), tmp_path)["registries"]
    assert ["r.example.com:5000/a/*", "ubuntu"] == registries["allowed"]
    assert {"docker.io": "s"} == registries["secrets"]
    assert 16 << 30 == registries["max_bytes"]
