"""Output and exit status of `policy check` and `policy explain`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from policy.cli import check, explain
from policy.compiled import SecretUse
from policy.facts import Scheme
from tests.kinds import HOST, KINDS, Kind, document

EXAMPLE = Path(__file__).parents[2] / "policies.example.yaml"


def test_check_lists_a_good_file(capsys: pytest.CaptureFixture[str]) -> None:
    """Policies, and the destinations of each secret."""
    assert 0 == check(EXAMPLE)

    printed = capsys.readouterr().out
    assert "policy agents: 32 rules, enforce" in printed
    assert "client credentials in agents/api: headers refuse, cookies strip, query refuse\n" in printed
    assert "in agents/tickets: headers refuse, cookies allow, query refuse, header:x-session-token allow" in printed
    assert "secret api-token -> https://api.corp-example.com:443 as bearer (agents/api)" in printed
    assert "secret chat-token -> https://chat.corp-example.com:443 as substitution (agents/chat)" in printed
    assert "gives env BUILDS_TOKEN with a placeholder of secret builds-token" in printed
    assert "gives file ~/.netrc with a placeholder of secret builds-password" in printed


def test_check_says_where_a_file_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error, with exit code 2."""
    file = tmp_path / "p.yaml"
    file.write_text("version: 1\nallowd: []\n")

    assert 2 == check(file)
    assert capsys.readouterr().err.startswith(f"{file}:2:1: unknown key 'allowd'")


ASKED = {
    "an allowed request": (
        ("agents", "api.corp-example.com", 443, "https", "GET", "/v1/x?canary"),
        0,
        "inject   Authorization",
    ),
    "a credential in the query": (
        ("agents", "api.corp-example.com", 443, "https", "GET", "/v1/x?token=canary"),
        1,
        "request  DENY   client-credentials",
    ),
    "credentials of the client": (
        ("agents", "tickets.corp-example.com", 443, "https"),
        0,
        "client   credentials of its own: headers refuse, cookies allow",
    ),
    "a placeholder": (
        ("agents", "chat.corp-example.com", 443, "https", "POST", "/bot__CHAT_TOKEN__/send"),
        0,
        "the vault releases chat-token for it, if it has the placeholder",
    ),
    "the place of a placeholder": (
        ("agents", "chat.corp-example.com", 443, "https", "POST", "/bot__CHAT_TOKEN__/send"),
        0,
        "inject   placeholder '__CHAT_TOKEN__' in path from secret chat-token as substitution (agents/chat)",
    ),
    "a denied path": (("agents", "api.corp-example.com", 443, "https", "GET", "/v2"), 1, "request  DENY   default"),
    "a denied name": (("agents", "other.test", 443, "https"), 1, "name     DENY   default"),
    "a denied port": (("agents", "api.corp-example.com", 80, "http"), 1, "flow     DENY   default"),
    "a spliced flow": (("agents", "time.corp-example.com", 443, "https"), 0, "relayed unopened"),
    "an observed denial": (("trial", "other.test", 443, "https"), 0, "would be denied by default"),
    "the built-in policy": (("deny-all", "other.test", 443, "https"), 1, "name     DENY   default"),
}
LEDGER = ("agents", "db.corp-example.com", 5432, "postgres")
SESSIONS: dict[str, tuple[str | None, int, str]] = {
    "an allowed session": ("ledger", 0, "session  allow   agents/ledger"),
    "its login": ("ledger", 0, "inject   the login from secret ledger-login as postgres (agents/ledger)"),
    "its condition": ("ledger", 0, "- the server logs in with SCRAM-SHA-256 over TLS"),
    "another database": ("payroll", 1, "session  DENY   default"),
    "no database": (None, 2, "a session needs --database"),
}


@pytest.mark.parametrize("case", ASKED)
def test_explain_answers_as_the_gateway_decides(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code and the important line. The query is never printed."""
    arguments, code, line = ASKED[case]

    assert code == explain(EXAMPLE, *arguments)
    printed = capsys.readouterr().out
    assert line in printed
    assert "canary" not in printed


@pytest.mark.parametrize("case", SESSIONS)
def test_explain_judges_database_sessions(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    database, code, line = SESSIONS[case]

    assert code == explain(EXAMPLE, *LEDGER, database=database)
    printed = capsys.readouterr()
    assert line in printed.out + printed.err


PLACES: dict[str, tuple[tuple[str, int], dict[str, Any], int, str]] = {
    "an address of a rule": (("93.184.216.34", 443), {}, 0, "allow   agents/appliance: 93.184.216.34 is dialled"),
    "on another port": (("93.184.216.34", 8443), {}, 1, "DENY   default"),
    "an address that is always denied": (("198.51.100.7", 443), {}, 1, "DENY   always-deny:3"),
    "what a name resolves to": (("time.corp-example.com", 443), {"address": "8.8.8.8"}, 0, "allow   resolved"),
    "a private address": (("time.corp-example.com", 443), {"address": "10.0.0.5"}, 1, "DENY   address-class:private"),
    "one that the operator opened": (
        ("time.corp-example.com", 443),
        {"address": "10.0.0.5", "exceptions": ["10.0.0.0/8"]},
        0,
        "allow   resolved: 10.0.0.5 is dialled",
    ),
    "one that the operator mapped": (
        ("time.corp-example.com", 443),
        {"mapped": {"time.corp-example.com": ["10.0.0.5"]}},
        0,
        "allow   mapped: 10.0.0.5 is dialled",
    ),
    "a mapped one that is always denied": (
        ("time.corp-example.com", 443),
        {"mapped": {"time.corp-example.com": ["198.51.100.7"]}},
        1,
        "DENY   always-deny:3",
    ),
}


@pytest.mark.parametrize("case", PLACES)
def test_explain_judges_addresses_as_the_gateway_does(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    (host, port), more, code, line = PLACES[case]

    assert code == explain(EXAMPLE, "agents", host, port, "https", **more)
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("policy", "host", "scheme"),
    [("none", "a.test", "https"), ("agents", "not a host", "https"), ("agents", "a.test", "ftp")],
)
def test_an_invalid_question_is_distinguished_from_a_denial(
    policy: str, host: str, scheme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 2."""
    assert 2 == explain(EXAMPLE, policy, host, 443, scheme)
    assert capsys.readouterr().err


class Stored:
    """The vault of a test: it says the same of each secret."""

    def __init__(self, lack: str, unknown: str = "") -> None:
        self.lack, self.unknown = lack, unknown
        self.asked: set[tuple[str, str, int]] = set()

    def remark(self, use: SecretUse, uses: Iterable[SecretUse] = ()) -> str:
        self.asked.add((use.secret, use.host, use.port))
        return self.lack


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        (Stored("the vault has no such secret"), "note: api-token: the vault has no such secret"),
        (Stored("", "the server does not run"), "secrets: not checked: the server does not run"),
        (Stored(""), None),
    ],
)
def test_check_says_what_the_vault_lacks_and_the_file_is_good_nevertheless(
    stored: Stored, said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 0 == check(EXAMPLE, stored)
    printed = capsys.readouterr().out
    assert said in printed if said else not {"note:", "not checked"} & set(printed.split())
    assert stored.asked


@pytest.mark.parametrize("unknown", ["", "the server does not run"])
def test_explain_says_what_the_vault_lacks_for_the_request(unknown: str, capsys: pytest.CaptureFixture[str]) -> None:
    stored = Stored("" if unknown else "the secret has expired", unknown)
    assert 0 == explain(EXAMPLE, "agents", "api.corp-example.com", 443, "https", "GET", "/v1/x", stored=stored)
    printed = capsys.readouterr().out
    said = f"not checked ({unknown})" if unknown else "the secret has expired"
    assert f"  vault    api-token: {said}\n" in printed
    assert ("api-token", "api.corp-example.com", 443) in stored.asked


def test_what_is_known_without_the_vault_is_said_while_it_is_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    stored = Stored("add it to the settings", "the server does not run")
    assert 0 == check(EXAMPLE, stored)
    printed = capsys.readouterr().out
    assert "note: env://MODELS_API_KEY: add it to the settings" in printed
    assert "secrets: not checked: the server does not run" in printed


@pytest.mark.parametrize(
    ("kind", "secret"),
    [pytest.param(kind, secret, id=f"{kind.name}-{secret}") for kind in KINDS for secret in kind.names],
)
def test_check_and_explain_name_the_secret_of_each_kind(
    kind: Kind, secret: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text(document(kind.rule(secret)))
    stored = Stored("it is missing; add it")
    assert 0 == check(file, stored)
    assert f"note: {secret}: it is missing; add it\n" in capsys.readouterr().out
    database = "d" if kind.scheme is Scheme.POSTGRES else None
    explain(file, "p", HOST, kind.port, kind.scheme.value, database=database, stored=stored)
    assert f"  vault    {secret}: it is missing; add it\n" in capsys.readouterr().out
    assert {(secret, HOST, kind.port)} == stored.asked
