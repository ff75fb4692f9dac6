"""Programs start with a placeholder, the server gets the secret, and nothing else gets either. Judged at the far end.

It tests `policy/placeholders.py`, `gateway/placeholders.py` and `lifecycle/sandboxes/transaction.py` with real clients.
"""

import base64
import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from opensandbox.sync.sandbox import SandboxSync

from demo.sandboxes import Secrets
from testbed.census import daemons
from testbed.internet import API, GIT, INDEX, STATUS, Internet, received_field
from testbed.stack import Stack, StackError
from tests.conftest import ON_RUNC
from tests.stacks import removed
from tests.system.test_create_and_delete import until
from tests.system.test_pools import Api, claimed, ended
from tests.system.test_snapshots import closing_manager, ready, restore

pytestmark = pytest.mark.system

_PIP = (
    "pip install -q --disable-pip-version-check --root-user-action ignore --no-cache-dir --retries 0 --target /tmp/lib"
)
_NPM = "npm install --no-audit --no-fund --no-update-notifier --fetch-retries 0"
CLIENTS = {
    "curl": (f'curl -sS --max-time 20 -H "Authorization: Bearer $API_TOKEN" https://{API}/v1/MARK', "/v1/MARK", API),
    "git": (
        f"rm -rf /tmp/x && git clone -q https://{GIT}/ledger.git /tmp/x && cat /tmp/x/ledger.txt",
        "/ledger.git/info/refs",
        GIT,
    ),
    "pip": (
        f"{_PIP} bank-tools && PYTHONPATH=/tmp/lib python3 -c 'import bank_tools; print(bank_tools.ANSWER)'",
        "/simple/bank-tools/",
        INDEX,
    ),
    "npm": (
        f"mkdir -p /tmp/n && cd /tmp/n && {_NPM} bank-tools && node -p 'require(\"bank-tools\")'",
        "/npm/bank-tools",
        INDEX,
    ),
}
PRINTED = {"curl": "***", "git": "ledger", "pip": "42", "npm": "42"}


@pytest.fixture(scope="module", autouse=True)
def _stored(stack: Stack, values: Secrets) -> None:
    for name, host, login in (("git-password", GIT, values.git), ("index-password", INDEX, values.index)):
        stack.sallyport("vault", "put", name, "--host", host, stdin=login.partition(":")[2])


@pytest.fixture(scope="module", name="tools")
def _tools(stack: Stack, some_runtimes: tuple[str, ...]) -> Iterator[dict[str, SandboxSync]]:
    """Return one sandbox on each runtime with the policy `tools`."""
    made = {runtime: stack.create(runtime, policy="tools") for runtime in some_runtimes}
    yield made
    for sandbox in made.values():
        ended(sandbox)


@contextmanager
def sandbox_of(stack: Stack, runtime: str, **options: Any) -> Iterator[SandboxSync]:
    with removed(stack.create(runtime, policy="tools", **options)) as made:
        yield made


def shell(sandbox: SandboxSync, command: str) -> str:
    done = sandbox.commands.run(f"{{ {command}; }} 2>&1")
    return (done.text or "").strip()


def token(sandbox: SandboxSync) -> str:
    """Return the placeholder of the sandbox's variable."""
    text = shell(sandbox, "printf %s $API_TOKEN")
    assert text.startswith("tok_") and len("tok_") + 36 == len(text)
    return text


def notes(internet: Internet, host: str, mark: str) -> list[dict[str, Any]]:
    """Return the requests to a host whose target has a mark."""
    return [note for note in internet.notes() if note["host"] == host and mark in note.get("target", "")]


def basic(login: str) -> str:
    return "Basic " + base64.b64encode(login.encode()).decode()


def denials(stack: Stack, sandbox: SandboxSync) -> list[dict[str, Any]]:
    """Return the records of refused placeholders of a sandbox."""
    return [
        one
        for one in stack.audit_records()
        if one.get("sandbox") == sandbox.id and one.get("rule") == "placeholder" and one["decision"] == "deny"
    ]


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_client_that_needs_a_credential_works_with_its_placeholder(
    internet: Internet, values: Secrets, tools: dict[str, SandboxSync], runtime: str, client: str
) -> None:
    """The server gets the secret. The sandbox has neither the secret nor the text that carried it."""
    mark = f"m{secrets.token_hex(8)}"
    command, path, host = (part.replace("MARK", mark) for part in CLIENTS[client])
    before = len(notes(internet, host, path))
    sandbox = tools[runtime]
    printed = shell(sandbox, command)
    assert PRINTED[client] in printed, printed
    expected = {
        "curl": f"Bearer {values.api}",
        "git": basic(values.git),
        "pip": basic(values.index),
        "npm": f"Bearer {values.index.partition(':')[2]}",
    }[client]
    received = [received_field(note, "authorization") for note in notes(internet, host, path)[before:]]
    assert expected == received[-1]  # git and pip ask first without a login
    assert {expected, None} >= set(received)
    found = shell(
        sandbox, "cat ~/.netrc ~/.npmrc ~/.config/pip/pip.conf; env; grep -r '' /tmp/x/.git/config; ls -l ~/.netrc"
    )
    for value in (*values.values, values.api):
        assert value not in found + printed
        assert base64.b64encode(value.encode()).decode() not in found + printed
    assert "-rw-------" in found


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_placeholder_is_replaced_at_each_bound_place(
    internet: Internet, values: Secrets, tools: dict[str, SandboxSync], runtime: str
) -> None:
    """Path, query, header and body of one request."""
    mark = f"m{secrets.token_hex(8)}"
    body = '{"token": "\'$API_TOKEN\'"}'
    printed = shell(
        tools[runtime],
        f"curl -sS --max-time 20 -H \"Authorization: Bearer $API_TOKEN\" -H 'Content-Type: application/json' "
        f"-d '{body}' \"$API_URL?{mark}=$API_TOKEN\"",
    )
    (note,) = notes(internet, API, mark)
    assert f"/v1/{values.api}?{mark}={values.api}" == note["target"]
    assert f"Bearer {values.api}" == received_field(note, "authorization")
    assert f'{{"token": "{values.api}"}}' == note["body"]
    assert str(len(note["body"])) == received_field(note, "content-length")
    assert values.api not in printed
    assert mark in printed


ELSEWHERE = {
    "a header of another host": f'-H "X-Key: $API_TOKEN" https://{STATUS}/MARK',
    "the query of another host": f'"https://{STATUS}/MARK?a=$API_TOKEN"',
    "the path of another host, encoded": f'https://{STATUS}/MARK/$(printf %s "$API_TOKEN" | sed s/_/%5f/)',
    "a Basic password for another host": f'-u "me:$API_TOKEN" https://{STATUS}/MARK',
    "a header name": f'-H "$API_TOKEN: 1" https://{STATUS}/MARK',
    "another place of a bound host": f"-H \"X-Key: $(awk '{{print $6}}' ~/.netrc)\" https://{GIT}/ledger.git/MARK",
    "another bound host": f'-H "Authorization: Bearer $API_TOKEN" https://{INDEX}/MARK',
    "plain HTTP": f'"http://{STATUS}/MARK?a=$API_TOKEN"',
}


@pytest.mark.parametrize("place", ELSEWHERE)
def test_a_placeholder_elsewhere_is_refused_and_recorded(
    stack: Stack, internet: Internet, tools: dict[str, SandboxSync], place: str
) -> None:
    """Not a byte of the request is sent. The same request without the placeholder arrives: the control."""
    sandbox = tools["runc"]
    mark = f"m{secrets.token_hex(8)}"
    before = len(denials(stack, sandbox))
    ask = "curl -sS --max-time 20 -o /dev/null -w '%{http_code}' "
    assert "403" == shell(sandbox, ask + ELSEWHERE[place].replace("MARK", mark))
    host = next(host for host in (STATUS, GIT, INDEX) if host in ELSEWHERE[place])
    assert [] == notes(internet, host, mark)
    (record,) = denials(stack, sandbox)[before:]
    assert ("git-password" if place == "another place of a bound host" else "api-token") == record["secret"]
    scheme = "http" if place == "plain HTTP" else "https"
    path = "/ledger.git" if host == GIT else ""
    shell(sandbox, f"{ask} {scheme}://{host}{path}/{mark}")
    assert 1 == len(notes(internet, host, mark))


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_body_with_a_placeholder_is_cut(
    stack: Stack, internet: Internet, tools: dict[str, SandboxSync], runtime: str
) -> None:
    """Over HTTP/1.1, after a megabyte of other bytes. The server gets no placeholder."""
    sandbox = tools[runtime]
    mark, text = f"m{secrets.token_hex(8)}", token(sandbox)
    before = len(denials(stack, sandbox))
    make = "{ head -c 1000000 /dev/zero | tr '\\0' a; printf %s \"$API_TOKEN\"; head -c 1000 /dev/zero; } >/tmp/body"
    printed = shell(sandbox, f"{make}; curl -sS --max-time 20 --data-binary @/tmp/body https://{STATUS}/{mark}")
    assert "curl: (" in printed, printed
    assert before + 1 == len(denials(stack, sandbox))
    assert not any(text in str(note) for note in internet.notes())


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_name_with_a_placeholder_is_not_resolved(
    stack: Stack, internet: Internet, tools: dict[str, SandboxSync], runtime: str
) -> None:
    """Neither by DNS nor by the server name of a flow."""
    sandbox = tools[runtime]
    text = shell(sandbox, "awk '{print $6}' ~/.netrc").lower()
    assert 36 == len(text)
    before = len(denials(stack, sandbox))
    ask = f"curl -sS --max-time 20 https://{text}.cdn.bank.example/"
    assert "Could not resolve host" in shell(sandbox, ask)
    assert "SSL" in shell(sandbox, f"{ask} --resolve {text}.cdn.bank.example:443:93.184.216.34")
    found = denials(stack, sandbox)[before:]
    assert {"dns", "flow"} == {record["kind"] for record in found}
    assert all("git-password" in record["reason"] for record in found)
    assert not any(text in str(note) for note in internet.notes())


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_the_placeholder_of_another_sandbox_is_a_text(
    internet: Internet, values: Secrets, stack: Stack, tools: dict[str, SandboxSync], runtime: str
) -> None:
    """The server gets it as it is."""
    theirs = token(tools[runtime])
    with sandbox_of(stack, runtime) as sandbox:
        assert theirs != token(sandbox)
        assert sent_as_it_is(internet, values, sandbox, theirs)


def sent_as_it_is(internet: Internet, values: Secrets, sandbox: SandboxSync, text: str) -> bool:
    """Return whether the server gets a text in a header. In `Authorization` it is refused, as the client's own."""
    mark = f"m{secrets.token_hex(8)}"
    ask = f"curl -sS --max-time 20 -H 'X-Note: {text}' https://{API}/v1/{mark}"
    shell(sandbox, f'{ask} -H "Authorization: Bearer $API_TOKEN"')
    (note,) = notes(internet, API, mark)
    assert f"Bearer {values.api}" == received_field(note, "authorization")
    assert "client-credentials" in shell(sandbox, f"{ask} -H 'Authorization: Bearer {text}'")
    assert 1 == len(notes(internet, API, mark))
    return text == received_field(note, "x-note")


def works(internet: Internet, values: Secrets, sandbox: SandboxSync) -> bool:
    """Return whether the sandbox's placeholder becomes the secret."""
    mark = f"m{secrets.token_hex(8)}"
    shell(sandbox, f'curl -sS --max-time 20 -H "Authorization: Bearer $API_TOKEN" https://{API}/v1/{mark}')
    found = notes(internet, API, mark)
    return [f"Bearer {values.api}"] == [received_field(note, "authorization") for note in found]


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_restored_sandbox_has_its_own_placeholder(
    stack: Stack, internet: Internet, values: Secrets, tools: dict[str, SandboxSync], runtime: str
) -> None:
    """In its variables and its files. That of the source is a text there."""
    source = tools[runtime]
    with closing_manager(stack) as manager:
        snapshot = ready(manager, source)
        with removed(restore(stack, snapshot, runtime, policy="tools")) as made:
            assert token(made) != token(source)
            assert shell(made, "cat ~/.netrc") != shell(source, "cat ~/.netrc")
            assert works(internet, values, made)
            assert sent_as_it_is(internet, values, made, token(source))
        manager.delete_snapshot(snapshot)


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_claimed_sandbox_has_its_own_placeholder(
    stack: Stack, internet: Internet, values: Secrets, tools: dict[str, SandboxSync], runtime: str
) -> None:
    """Its member was made without a policy."""
    api = Api(stack)
    try:
        api.make(runtime, 1)
        made = claimed(stack, extensions={"sallyport.policy": "tools"})
        try:
            assert token(made) != token(tools[runtime])
            assert "" != shell(made, "cat ~/.netrc")
            assert works(internet, values, made)
        finally:
            ended(made)
    finally:
        api.client.delete("/pools/p")
        api.client.close()


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_the_first_program_has_the_placeholders(stack: Stack, runtime: str) -> None:
    """Entrypoint and hooks too. Docker's description of the container has none."""
    entrypoint = ["sh", "-c", "{ printf %s $API_TOKEN; cat ~/.netrc; } >/tmp/first; exec tail -f /dev/null"]
    with sandbox_of(stack, runtime, entrypoint=entrypoint) as sandbox:
        assert until(lambda: "machine" in shell(sandbox, "cat /tmp/first"))
        assert shell(sandbox, "cat /tmp/first").startswith(token(sandbox))
        described = stack.docker("inspect", stack.container(str(sandbox.id))).stdout
        assert "OPENSANDBOX_ID" in described
        assert token(sandbox) not in described


def replaced(stack: Stack, sandbox: str, worker: int) -> bool:
    """Return whether a hostd answers, and the sandbox has another worker than before."""
    try:
        return stack.inspect(sandbox).worker_pid not in (worker, None)
    except (OSError, ConnectionError, StackError):
        return False


@pytest.mark.faults
@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_new_worker_and_a_new_hostd_know_the_placeholders(
    stack: Stack, internet: Internet, values: Secrets, runtime: str
) -> None:
    """The seed is in hostd's record of the sandbox."""
    with sandbox_of(stack, runtime) as sandbox:
        before, ident = token(sandbox), str(sandbox.id)
        worker = stack.worker_pid(ident)
        os.kill(worker, signal.SIGKILL)
        assert until(lambda: replaced(stack, ident, worker))
        assert until(lambda: works(internet, values, sandbox))
        worker = stack.worker_pid(ident)
        os.kill(daemons(stack)["runtimes.hostd"], signal.SIGKILL)
        assert until(lambda: replaced(stack, ident, worker))
        assert until(lambda: works(internet, values, sandbox))
        assert before == token(sandbox)
