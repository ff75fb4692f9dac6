"""DSNs of PostgreSQL: where they are read from, what is refused, and that no password is shown."""

import json
import os
import subprocess
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from backends import Template, described, table

from lifecycle import running as note
from lifecycle.config import launch
from lifecycle.config.serve import DatabaseConfig, ServeConfig
from lifecycle.config.settings import DATABASE_DSN, Settings, SettingsError, parse
from lifecycle.database.dsn import described as shown
from lifecycle.database.dsn import parsed
from lifecycle.database.probe import problem
from lifecycle.sandboxes.registry import RegistryError, Sandbox, State
from testbed.ports import reserve_port
from tests.postgresql import Cluster, running

WORD = "the-password-of-a-test"
FULL = f"postgresql://sallyport:{WORD}@db.example/state?sslmode=verify-full&sslrootcert=/etc/ssl/db.pem"
ROW = Sandbox("one", State.RUNNING, "", "", 1.0, 1.0, None, "image", ("true",), "runc")


def settings(text: str = "", **environment: str) -> Settings:
    return parse(tomllib.loads(text), "test.toml", environment)


def in_file(path: Path, content: str = FULL, mode: int = 0o600) -> Settings:
    path.write_text(content)
    path.chmod(mode)
    return settings(f'[sallyport.database]\ndsn_file = "{path}"')


def test_without_a_dsn_the_database_is_sqlite() -> None:
    assert launch.database(settings()) is None
    text = '[sallyport.database]\ndsn = "postgresql://sallyport@db.example/state"'
    assert launch.database(settings(text, **{DATABASE_DSN: ""})) is None


def test_a_dsn_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    """The environment has precedence. All options are passed on."""
    found = launch.database(in_file(tmp_path / "dsn", f"  {FULL}\n"))
    assert DatabaseConfig(FULL, connections=4, connect_seconds=5, statement_seconds=5) == found
    text = f'[sallyport.database]\ndsn_file = "{tmp_path}/none"\nconnections = 9\nstatement_seconds = 1'
    words = f"host=/run/postgresql user=sallyport password={WORD}"
    found = launch.database(settings(text, **{DATABASE_DSN: words}))
    assert DatabaseConfig(words, connections=9, connect_seconds=5, statement_seconds=1) == found
    assert {"sslmode": "verify-full", "sslrootcert": "/etc/ssl/db.pem"}.items() <= parsed(FULL).items()


def test_no_text_has_the_password(tmp_path: Path) -> None:
    """Not the settings, not the configuration of `serve`, not the note of the running server."""
    given = in_file(tmp_path / "dsn")
    config = launch.serve_config(given, ())
    assert FULL in json.dumps(json.loads(config.text()))
    (tmp_path / "serve.json").write_text(config.text())
    assert config == ServeConfig.read(tmp_path / "serve.json")
    from_environment = settings("", **{DATABASE_DSN: FULL})
    text = f'[sallyport]\nrun_dir = "{tmp_path}/run"\nstate_dir = "{tmp_path}/state"'
    noted = parse(tomllib.loads(text), "x", {DATABASE_DSN: FULL})
    noted.run_dir.mkdir()
    note.note(noted)
    for shown_text in (repr(given), repr(config), repr(from_environment), repr(launch.database(given))):
        assert WORD not in shown_text
    assert WORD not in (noted.run_dir / note.NAME).read_text()
    assert "postgresql host=db.example dbname=state user=sallyport" == shown(parsed(FULL))


@pytest.mark.parametrize(
    "dsn",
    [
        FULL,
        f"postgres://sallyport:{WORD}@/state",
        f"host=db.example user=sallyport password = '{WORD}'",
        f"postgresql://sallyport@db.example/state?password={WORD}",
        f"postgresql://sallyport@db.example/state?sslpassword={WORD}",
        f"mysql://sallyport:{WORD}@db.example/state",
        f"{WORD}",
    ],
)
def test_the_settings_file_takes_no_password(dsn: str) -> None:
    """More users can read it. The refusal does not repeat it."""
    with pytest.raises(
        SettingsError, match=r"test.toml: sallyport.database.dsn must (have no password|be a DSN)"
    ) as caught:
        settings(f"[sallyport.database]\ndsn = {json.dumps(dsn)}")
    assert WORD not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "mode", "problem"),
    [
        (FULL, 0o640, "can be read or changed by other users"),
        (FULL, 0o602, "can be read or changed by other users"),
        ("", 0o600, "is empty"),
        (f"{FULL}&options={'x' * 5000}", 0o600, "over 4096 bytes"),
        (FULL.replace("sslmode", "sslmodus"), 0o600, "is not a DSN"),
        (f"{WORD} host=db.example", 0o600, "is not a DSN"),
        (f"postgresql://:{WORD}@db.example/state", 0o600, "names no user"),
        (f"host=db.example password={WORD}", 0o600, "names no user"),
    ],
)
def test_a_file_that_cannot_be_used_ends_the_start(tmp_path: Path, content: str, mode: int, problem: str) -> None:
    """The message names the file, and repeats nothing of it."""
    with pytest.raises(SettingsError, match=problem) as caught:
        launch.database(in_file(tmp_path / "dsn", content, mode))
    assert str(tmp_path / "dsn") in str(caught.value)
    assert not {WORD, "db.example", "sslmodus"} & set(str(caught.value).replace("=", " ").split())


def test_a_missing_file_and_two_dsns_end_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        launch.database(settings(f'[sallyport.database]\ndsn_file = "{tmp_path}/none"'))
    with pytest.raises(SettingsError, match="exclude each other"):
        settings(f'[sallyport.database]\ndsn = "postgresql://a@b/c"\ndsn_file = "{tmp_path}/none"')


@pytest.mark.parametrize(
    ("key", "values"), [("connections", (1, 33)), ("connect_seconds", (1, 61)), ("statement_seconds", (0, 301))]
)
def test_limits_are_bounded(key: str, values: tuple[int, int]) -> None:
    for value in values:
        with pytest.raises(SettingsError, match=f"sallyport.database.{key} must be a number from"):
            settings(f"[sallyport.database]\n{key} = {value}")


def test_a_wrong_password_is_not_shown(template: Template, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    name = template.cluster.create()
    with pytest.raises(RegistryError, match="password authentication failed") as caught:
        table(described(template.cluster.dsn(name, password=WORD)), tmp_path).open()
    assert WORD not in str(caught.value) + caplog.text


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    port = reserve_port()
    dsn = f"postgresql://sallyport:{WORD}@127.0.0.1:{port}/state"
    with pytest.raises(
        RegistryError, match=f"host=127.0.0.1 port={port} dbname=state user=sallyport failed: .*refused"
    ) as caught:
        table(described(dsn), tmp_path).open()
    assert WORD not in str(caught.value)


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Path]]:
    """Run a server on loopback that accepts TLS only. The second value is its certificate."""
    directory = tmp_path_factory.mktemp("tls")
    key, certificate = directory / "key.pem", directory / "certificate.pem"
    request = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subject = ["-subj", "/CN=db.test", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*request, *subject, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with running(port=reserve_port(), listen="127.0.0.1") as cluster:
        cluster.secure(key, certificate)
        yield cluster, certificate


def test_options_of_tls_are_passed_on(encrypted: tuple[Cluster, Path], tmp_path: Path) -> None:
    """Over TCP, with a verified name; another authority, or no TLS, is refused."""
    cluster, certificate = encrypted
    name = cluster.create()
    verified = cluster.dsn(name, "127.0.0.1", sslmode="verify-full", sslrootcert=str(certificate))
    rows = table(described(verified), tmp_path)
    rows.open()
    rows.put(ROW)
    assert ROW == rows.get("one")
    query = "SELECT bool_and(ssl) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE client_addr IS NOT NULL"
    assert [(True,)] == cluster.ask(query)
    rows.close()
    (tmp_path / "other.pem").write_bytes(certificate.read_bytes()[:200])
    for dsn, text in (
        (verified.replace("host=127.0.0.1", "host=localhost"), "does not match host name|localhost"),
        (
            cluster.dsn(name, "127.0.0.1", sslmode="verify-full", sslrootcert="/etc/ssl/certs/ca-certificates.crt"),
            "verify failed",
        ),
        (cluster.dsn(name, "127.0.0.1", sslmode="disable"), "no encryption"),
    ):
        with pytest.raises(RegistryError, match=text):
            table(described(dsn), tmp_path).open()


def test_the_user_of_serve_is_asked_before_the_start(template: Template, tmp_path: Path) -> None:
    """Nothing is said of a database that can be reached. A file that only another user can read is found."""
    cluster = template.cluster
    name, uid = cluster.create(), 700000001
    assert "" == problem(described(cluster.dsn(name)), uid)
    refused = problem(described(cluster.dsn(name, password=WORD)), uid)
    assert "password authentication failed" in refused
    assert WORD not in refused
    if os.geteuid() == 0:
        passfile = tmp_path / "passfile"
        passfile.write_text(f"*:*:*:*:{cluster.password}\n")
        passfile.chmod(0o600)
        dsn = cluster.dsn(name, passfile=str(passfile)).replace(f"password={cluster.password} ", "")
        tmp_path.chmod(0o711)
        assert "no password supplied" in problem(described(dsn), uid)


def test_a_server_that_hangs_is_a_problem(cluster: Cluster) -> None:
    cluster.stop()
    began = time.monotonic()
    assert "postgresql host=" in problem(described(cluster.dsn("postgres"), connect=2, statement=1), os.getuid())
    assert time.monotonic() - began < 10
