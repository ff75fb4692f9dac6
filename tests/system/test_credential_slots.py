"""Credentials that clients bring along, and encoded paths, with real clients. Judged at the far end.

The module tests `gateway/client_credentials.py` and `policy/paths.py` with real workers.
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from opensandbox.models.sandboxes import (
    Credential,
    CredentialAuth,
    CredentialBinding,
    CredentialMatch,
    CredentialProxyConfig,
    InlineCredentialSource,
    NetworkPolicy,
    NetworkRule,
)
from opensandbox.sync.sandbox import SandboxSync

from testbed.internet import API, GIT, INDEX, STATUS, Internet, received_field
from testbed.packages import SCOPED
from testbed.stack import Stack
from tests.conftest import ON_RUNC
from tests.system import boto

pytestmark = pytest.mark.system

_NPM = "npm install --no-audit --no-fund --no-update-notifier --fetch-retries 0 --prefix /tmp/packages"
_BOTO = """
import sys, boto3
from botocore import UNSIGNED
from botocore.config import Config

config = Config(signature_version=UNSIGNED, s3={"addressing_style": "path"}, retries={"max_attempts": 1})
client = boto3.client("s3", endpoint_url="https://" + sys.argv[1], region_name="eu-west-1", config=config)
print(client.put_object(Bucket="bucket", Key=sys.argv[2], Body=b"data")["ResponseMetadata"]["HTTPStatusCode"])
print(client.get_object(Bucket="bucket", Key=sys.argv[2])["Body"].read().decode())
"""


@dataclass
class Box:
    """A sandbox, and what the servers received of it."""

    sandbox: SandboxSync
    internet: Internet
    stack: Stack

    def run(self, command: str) -> str:
        """Run a command; return all that it printed."""
        return self.sandbox.commands.run(f"{command} 2>&1").text

    def curl(self, url: str, arguments: str = "") -> str:
        """Run a request; return the page and the status."""
        return self.run(f"curl -sS --path-as-is --max-time 30 -w ' %{{http_code}}' {arguments} 'https://{url}'").strip()

    def arrived(self, mark: str) -> list[dict[str, Any]]:
        """Return the requests with a mark in their target that servers received."""
        return [note for note in self.internet.notes() if mark in note.get("target", "")]

    def heard(self, text: str) -> bool:
        """Whether any server received a text in any byte."""
        return any(text in str(note) for note in self.internet.notes())

    def records(self, path: str) -> list[dict[str, Any]]:
        """Return the verdicts on this sandbox's requests to a path."""
        return [
            record
            for record in self.stack.audit_records()
            if record["kind"] == "request"
            and record.get("sandbox") == self.sandbox.id
            and path in record.get("path", "")
            if record["decision"] != "info"
        ]


@pytest.fixture(name="box")
def _box(stack: Stack, internet: Internet, runtime: str) -> Iterator[Box]:
    with stack.create(runtime, policy="slots") as made:
        yield Box(made, internet, stack)
        made.kill()


@pytest.fixture(name="chosen")
def _chosen(stack: Stack, internet: Internet, runtime: str) -> Iterator[Box]:
    with stack.create(runtime, policy="chosen-slots") as made:
        yield Box(made, internet, stack)
        made.kill()


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_credentials_of_a_client_do_not_reach_a_host_that_gets_a_secret(box: Box, values: Any) -> None:
    """Each refusal names its slot. The control is a host without secrets, which receives them."""
    own = f"own-{secrets.token_hex(8)}"
    ways = {
        "header:x-api-key": ("", f"-H 'X-Api-Key: {own}'"),
        "header:private-token": ("", f"-H 'private_token: {own}'"),
        "header:x-corp-session-token": ("", f"-H 'X-Corp-Session-Token: {own}'"),
        "query:*token": (f"?a=1&access%5Ftoken={own}", ""),
        "query:auth": (f"?auth[user]={own}", "-g"),
    }
    for slot, (query, arguments) in ways.items():
        answer = box.curl(f"{API}/v1/quiet/refused{query}", arguments)
        assert answer.endswith(" 403"), answer
        assert f"rule client-credentials: The request has credentials of its own ({slot})" in answer
    cookies = f"-b 'session={own}; theme=dark' -u user:{own}"
    assert box.curl(f"{API}/v1/quiet/stripped-{own[4:]}?a=1", cookies).endswith("ok\n 200")
    assert not box.heard(own)

    (note,) = box.arrived(f"stripped-{own[4:]}?a=1")
    assert received_field(note, "Cookie") is None
    assert f"Bearer {values.api}" == received_field(note, "Authorization")
    refused = box.records("/v1/quiet/refused")
    assert [("deny", "client-credentials")] * len(ways) == [(one["decision"], one["rule"]) for one in refused]
    assert [["cookie"]] == [one.get("stripped") for one in box.records(f"/v1/quiet/stripped-{own[4:]}")]
    assert own not in str(box.stack.audit_records())

    answer = box.curl(f"{STATUS}/bucket/{own}?access_token={own}", f"-H 'X-Api-Key: {own}' -b 'session={own}'")
    assert answer.endswith(" 200")
    (note,) = box.arrived(f"/bucket/{own}?access_token={own}")
    assert (own, f"session={own}") == (received_field(note, "X-Api-Key"), received_field(note, "Cookie"))


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_rule_chooses_for_each_slot(chosen: Box, values: Any) -> None:
    own = f"own-{secrets.token_hex(8)}"
    url = f"{API}/v1/quiet/chosen-{own}?b=%31&api_key=gone-{own}&c"
    cookie = "theme=dark"
    sent = f"-H 'X-Api-Key: gone-{own}' -H 'X-Own-Token: kept-{own}' -b {cookie}"
    assert chosen.curl(url, sent).endswith(" 200")
    for query, header in ((f"?sig={own}", "A: 1"), ("", f"Cookie: session={own}"), ("", f"Cookie: theme=1, s={own}")):
        assert chosen.curl(f"{API}/v1/quiet/refused{query}", f"-H '{header}'").endswith(" 403")

    (note,) = chosen.arrived(f"chosen-{own}")
    assert f"/v1/quiet/chosen-{own}?b=%31&c" == note["target"]
    assert (f"kept-{own}", cookie) == (received_field(note, "X-Own-Token"), received_field(note, "Cookie"))
    assert f"Bearer {values.api}" == received_field(note, "Authorization")
    assert not chosen.heard(f"gone-{own}")
    assert not chosen.heard(f"={own}")
    (record,) = chosen.records(f"/v1/quiet/chosen-{own}")
    assert ["header:x-api-key", "query:*apikey"] == sorted(record["stripped"])
    assert ["cookie:theme", "header:x-own-token"] == sorted(record["forwarded"])


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_published_clients_work_at_hosts_that_own_their_slots(box: Box) -> None:
    """git with a login of its own in the URL, pip, and npm with a token of its own for a scoped package."""
    cloned = box.run(f"cd /tmp && git clone -q https://me:mine@{GIT}/ledger.git mine && cat mine/ledger.txt")
    assert "the private ledger" in cloned, cloned
    pip = f"pip install -q --no-cache-dir --target /tmp/pip --index-url https://me:mine@{INDEX}/simple bank-tools"
    assert "42" in box.run(f"{pip} && cd /tmp/pip && python3 -c 'import bank_tools; print(bank_tools.ANSWER)'")
    npmrc = f"@bank:registry=https://{INDEX}/npm/\n//{INDEX}/npm/:_authToken=mine\n"
    box.sandbox.files.write_file("/root/.npmrc", npmrc)
    installed = box.run(f"{_NPM} {SCOPED} && cd /tmp/packages && node -p 'require(\"{SCOPED}\")'")
    assert "42" in installed, installed
    targets = [note["target"] for note in box.internet.notes() if SCOPED.partition("/")[0] in note.get("target", "")]
    assert "/npm/@bank%2ftools" in targets


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_an_encoded_slash_has_one_reading_or_is_refused(box: Box) -> None:
    """The server receives it as it was written. Without the permission, and outside of the rule, it is refused."""
    mark = secrets.token_hex(8)
    assert box.curl(f"{INDEX}/npm/@bank/{mark}%2fx").endswith(" 404")
    assert [f"/npm/@bank/{mark}%2fx"] == [note["target"] for note in box.arrived(mark)]
    refused = secrets.token_hex(8)
    for host, path in (
        (INDEX, f"/npm/@evil%2f{refused}"),
        (INDEX, f"/npm/@bank%2f..%2f..%2f{refused}"),
        (INDEX, f"/npm/@bank/..%2f{refused}"),
        (INDEX, f"/npm/@bank/%252f{refused}"),
        (INDEX, f"/npm/@bank//{refused}"),
        (API, f"/v1/a%2f{refused}"),
        (STATUS, f"/bucket/a%2f{refused}"),
        (STATUS, f"/bucket//../{refused}"),
        (STATUS, f"//bucket/{refused}"),
    ):
        answer = box.curl(f"{host}{path}")
        assert "rule ambiguous-path" in answer, (path, answer)
        assert answer.endswith(" 403"), (path, answer)
    assert [] == box.arrived(refused)


@pytest.mark.extended
@pytest.mark.parametrize("runtime", ON_RUNC)
def test_boto3_uses_keys_with_empty_segments(box: Box, chosen: Box) -> None:
    """Where a rule permits them. Under another policy the same program is refused."""
    key = f"a//{secrets.token_hex(8)}///b"
    for place in (box, chosen):
        place.sandbox.files.write_file("/tmp/boto.zip", boto.archive())
        place.sandbox.files.write_file("/tmp/program.py", _BOTO)
        place.run(f"python3 -m zipfile -e /tmp/boto.zip {boto.PLACE}")
    program = f"PYTHONPATH={boto.PLACE} python3 /tmp/program.py {STATUS} {key}"
    assert ["200", f"this is {STATUS}"] == box.run(program).split("\n")[:2]
    sent = [(note["method"], note["target"]) for note in box.arrived(key)]
    assert [("PUT", f"/bucket/{key}"), ("GET", f"/bucket/{key}")] == sent
    assert "403" in chosen.run(program)
    assert sent == [(note["method"], note["target"]) for note in chosen.arrived(key)]


def test_a_host_without_path_rules_gets_paths_as_they_are_written(stack: Stack, internet: Internet) -> None:
    """Under `agents` the index gets a secret, and no rule names a path."""
    mark = secrets.token_hex(8)
    with stack.create("runc", policy="agents") as made:
        box = Box(made, internet, stack)
        for path in (f"/group%2Fproject-{mark}", f"/a//{mark}", f"/a/../{mark}%2f.."):
            assert box.curl(f"{INDEX}{path}").endswith(" 404")
            assert path in [note["target"] for note in box.arrived(mark)]
        made.kill()


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_credential_binding_owns_the_slots_of_its_requests(stack: Stack, internet: Internet, runtime: str) -> None:
    """By the published SDK. What no binding matches, and what is `passthrough`, is forwarded as it is."""
    own, value = f"own-{secrets.token_hex(8)}", secrets.token_urlsafe(24)
    rules = [NetworkRule(action="allow", target=host) for host in (STATUS, API)]
    with stack.create(
        runtime,
        policy=None,
        network_policy=NetworkPolicy(default_action="deny", egress=rules),
        credential_proxy=CredentialProxyConfig(enabled=True),
    ) as made:
        box = Box(made, internet, stack)
        made.credential_vault.create(
            credentials=[Credential(name="key", source=InlineCredentialSource(value=value))],
            bindings=[
                CredentialBinding(
                    name="status",
                    match=CredentialMatch(hosts=[STATUS], paths=["/v1/*"]),
                    auth=CredentialAuth(type="apiKey", name="X-Api-Key", credential="key"),
                ),
                CredentialBinding(
                    name="api", match=CredentialMatch(hosts=[API]), auth=CredentialAuth(type="passthrough")
                ),
            ],
        )
        sent = f"-H 'x-api-key: {own}' -H 'Authorization: Bearer {own}' -b s={own}"
        assert box.curl(f"{STATUS}/v1/{own[4:]}%2fx", sent).endswith(" 200")
        (note,) = box.arrived(f"/v1/{own[4:]}%2fx")
        names = ("X-Api-Key", "Authorization", "Cookie")
        assert [value, None, None] == [received_field(note, name) for name in names]
        assert "query:key" in box.curl(f"{STATUS}/v1/x?key={own}")
        assert not box.heard(own)
        for host, path in ((STATUS, f"/v2/{own[4:]}"), (API, f"/v1/{own[4:]}-p")):
            box.curl(f"{host}{path}", sent)
            (note,) = box.arrived(path)
            assert [own, f"Bearer {own}", f"s={own}"] == [received_field(note, name) for name in names]
        made.kill()
