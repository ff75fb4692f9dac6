"""Secrets in query parameters, in cookies and in place of placeholders, judged at the far end.

The API of the test internet answers with the request that it received, so each of its responses has the secrets.

The module tests `gateway/compose.py`, `gateway/substitute.py` and `gateway/engines/bodies.py` with real workers.
"""

import io
import json
import secrets
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import h2
import hpack
import hyperframe
import pytest
from opensandbox.sync.sandbox import SandboxSync

from testbed import h2_client
from testbed.internet import ADDRESSES, API, STATUS, Internet, received_field
from testbed.leaks import forms_of, leaks_in
from testbed.stack import Stack
from tests.conftest import ON_RUNC
from tests.system.test_create_and_delete import until

pytestmark = pytest.mark.system

PLACED = "__PLACED__"
BODIES = {
    "application/json": (json.dumps({"token": f"a {PLACED}", PLACED: 1}), json.dumps({"token": "a {}", "{}": 1})),
    "application/x-www-form-urlencoded": (f"a={PLACED}&b=1", "a={}&b=1"),
    "text/xml": (f"<a>{PLACED}</a>", "<a>{}</a>"),
}


@dataclass
class Placed:
    """A sandbox under the policy `placing`, and the value of the secret that it may use and never see."""

    sandbox: SandboxSync
    value: str
    internet: Internet
    stack: Stack

    def curl(self, arguments: str, mark: str, query: str = "") -> str:
        """Run a request to the API below `/v1/MARK/PLACEHOLDER`; return all that curl printed."""
        url = f"https://{API}/v1/{mark}/{PLACED}{query}"
        return self.sandbox.commands.run(f"curl -sS -i --max-time 30 {arguments} '{url}' 2>&1").text

    def arrived(self, mark: str) -> list[dict[str, Any]]:
        """Return the requests with a mark that servers received."""
        return [note for note in self.internet.notes() if mark in note.get("target", "")]

    def uses(self, mark: str) -> list[tuple[str, str]]:
        """Return verdict and secret of each record `secret.use` of a request with a mark."""
        return [
            (record["decision"], record["secret"])
            for record in self.stack.audit_records()
            if record["kind"] == "secret.use" and mark in record.get("path", "")
        ]


@pytest.fixture(scope="module", params=ON_RUNC, name="placed")
def _placed(request: pytest.FixtureRequest, stack: Stack, internet: Internet) -> Iterator[Placed]:
    value = f"placed+{secrets.token_hex(20)}=end"
    stack.sallyport("vault", "put", "placed-token", "--host", API, stdin=value)
    sandbox = stack.create(request.param, policy="placing")
    try:
        yield Placed(sandbox, value, internet, stack)
    finally:
        sandbox.kill()
        sandbox.close()
        stack.sallyport("vault", "delete", "placed-token")


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("framing", ["", "-H 'Transfer-Encoding: chunked'"])
def test_each_place_of_a_request_gets_the_secret_and_the_sandbox_does_not(
    placed: Placed, kind: str, framing: str
) -> None:
    """Path, query, headers, cookies and body, each in its encoding. The client's own parameter and cookies are gone."""
    mark, (body, expected) = secrets.token_hex(8), BODIES[kind]
    value, encoded = placed.value, quote(placed.value, safe="")
    shown = placed.curl(
        f"{framing} -H 'Content-Type: {kind}' -H 'X-Own: a {PLACED}' -H 'Cookie: a=1; sid=mine' --data-binary '{body}'",
        mark,
        f"?a={PLACED}&key=mine&%6Bey=mine",
    )
    (note,) = placed.arrived(mark)
    parts = urlsplit(note["target"])

    assert f"/v1/{mark}/{encoded}" == parts.path
    assert f"a={encoded}&key={encoded}" == parts.query
    assert f"a {value}" == received_field(note, "X-Own")
    assert f"sid={value}" == received_field(note, "Cookie")
    body_value = encoded if "form" in kind else value
    assert expected.replace("{}", body_value) == note["body"]
    assert (str(len(note["body"])), None) == (
        received_field(note, "Content-Length"),
        received_field(note, "Transfer-Encoding"),
    )
    assert "HTTP/1.1 200" in shown
    assert mark in shown  # the control: the sandbox sees the echo of its request
    assert 0 == leaks_in([shown.encode()], forms_of(value))
    assert {("allow", "placed-token"), ("allow", "api-token")} == set(placed.uses(mark))


def test_an_http2_request_gets_the_secrets_in_the_same_places(placed: Placed) -> None:
    mark, encoded = secrets.token_hex(8), quote(placed.value, safe="")
    body = json.dumps({"token": PLACED})
    fields = {
        ":method": "POST",
        ":scheme": "https",
        ":authority": API,
        ":path": f"/v1/{mark}/{PLACED}?a={PLACED}&key=mine",
        "x-own": PLACED,
        "cookie": "sid=mine",
        "content-type": "application/json",
    }
    requests = [(list(map(list, fields.items())), body)]
    cases = {"it": {"address": ADDRESSES[API], "port": 443, "sni": API, "requests": requests}}
    files = placed.sandbox.files
    files.write_file("/tmp/h2.zip", packed(h2, hpack, hyperframe))
    files.write_file("/tmp/h2_client.py", Path(str(h2_client.__file__)).read_text())
    files.write_file("/tmp/h2.json", json.dumps(cases))
    done = placed.sandbox.commands.run("PYTHONPATH=/tmp/h2.zip python3 /tmp/h2_client.py </tmp/h2.json")
    (note,) = placed.arrived(mark)

    assert {"it": ["200"]} == json.loads(done.text)
    assert f"/v1/{mark}/{encoded}?a={encoded}&key={encoded}" == note["target"]
    assert placed.value == received_field(note, "X-Own")
    assert f"sid={placed.value}" == received_field(note, "Cookie")
    assert {"token": placed.value} == json.loads(note["body"])


def packed(*packages: ModuleType) -> bytes:
    """Return a zip archive of Python packages, which an interpreter can import."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for package in packages:
            root = Path(str(package.__file__)).parent
            for path in root.rglob("*.py"):
                archive.write(path, path.relative_to(root.parent))
    return content.getvalue()


def test_another_host_receives_the_placeholder(placed: Placed) -> None:
    """The rule of that host has no substitution."""
    mark = secrets.token_hex(8)
    placed.sandbox.commands.run(f"curl -sS 'https://{STATUS}/{mark}/{PLACED}' -H 'X-Own: {PLACED}' -d '{PLACED}'")
    (note,) = placed.arrived(mark)

    assert (f"/{mark}/{PLACED}", PLACED, PLACED) == (note["target"], received_field(note, "X-Own"), note["body"])


def test_a_body_that_is_not_read_arrives_as_it_was_sent(placed: Placed) -> None:
    """Multipart. The other places get their secret. The body of any other size is not collected."""
    mark = secrets.token_hex(8)
    placed.curl(f"-F 'a={PLACED}' -H 'X-Own: {PLACED}'", mark)
    (note,) = placed.arrived(mark)

    assert PLACED in note["body"]
    assert placed.value not in note["body"]
    assert placed.value == received_field(note, "X-Own")


def test_a_request_without_the_placeholder_is_sent_and_the_miss_is_recorded(placed: Placed) -> None:
    mark = secrets.token_hex(8)
    done = placed.sandbox.commands.run(f"curl -sS 'https://{API}/v1/quiet/{mark}'")
    (note,) = placed.arrived(mark)

    assert "ok" in done.text
    assert [placed.value] == parse_qs(urlsplit(note["target"]).query)["key"]
    assert ("info", "placed-token") in placed.uses(mark)


@pytest.mark.parametrize("framing", ["", "-H 'Transfer-Encoding: chunked'"])
def test_a_body_above_the_limit_is_refused_and_nothing_of_it_is_sent(placed: Placed, framing: str) -> None:
    """The control is a body just below the limit, which arrives."""
    below, above = secrets.token_hex(8), secrets.token_hex(8)
    make = f"(printf {PLACED}; head -c {{}} /dev/zero | tr '\\0' a) >/tmp/body"
    placed.sandbox.commands.run(make.format((8 << 20) - 100))
    sent = f"{framing} -X POST -H Expect: -H 'Content-Type: text/plain' --data-binary @/tmp/body -o /tmp/answer"
    placed.curl(sent, below)
    placed.sandbox.commands.run(make.format(8 << 20))
    shown = placed.curl(f"{sent} -w '%{{http_code}}'", above)

    assert until(lambda: placed.arrived(below))
    assert shown.endswith("413")
    assert placed.arrived(below)[0]["body"].startswith(placed.value)
    assert [] == placed.arrived(above)
    assert [] == [note for note in placed.internet.notes() if above in note.get("heard", "")]
