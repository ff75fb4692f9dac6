"""Attacks by a client that speaks only HTTP/2: exactly those requests arrive that policy allows.

The module tests `gateway/engines/mitm/http2.py` and `gateway/engines/mitm/layers.py`.
"""

import io
import json
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h2
import hpack
import hyperframe
import pytest

from demo.sandboxes import DemoSandbox, Secrets
from testbed import h2_client
from testbed.internet import ADDRESSES, API, ATTACKER, GIT, STATUS, Internet, received_field
from testbed.stack import Stack

pytestmark = pytest.mark.system

type Fields = list[list[str]]


def _fields(*more: tuple[str, str], **pseudo: str | None) -> Fields:
    """Return the fields of an honest request.

    `pseudo` replaces or removes (None) pseudo-headers; `more` adds fields.
    """
    given = {"method": "GET", "scheme": "https", "authority": API, "path": "/v1/@@", **pseudo}
    return [[f":{name}", value] for name, value in given.items() if value is not None] + [list(field) for field in more]


DENIED: dict[str, list[tuple[Fields, str | None]]] = {
    "an authority of another host": [(_fields(authority=GIT), None)],
    "an authority of the attacker": [(_fields(authority=ATTACKER), None)],
    "an authority of a spliced host": [(_fields(authority=STATUS), None)],
    "an authority with another port": [(_fields(authority=f"{API}:8443"), None)],
    "an authority with user info": [(_fields(authority=f"{ATTACKER}@{API}"), None)],
    "an empty authority": [(_fields(authority=""), None)],
    "no authority": [(_fields(authority=None), None)],
    "no authority but a host": [(_fields(("host", API), authority=None), None)],
    "an authority and another host": [(_fields(("host", GIT)), None)],
    "another authority and an honest host": [(_fields(("host", API), authority=GIT), None)],
    "two hosts": [(_fields(("host", API), ("host", GIT)), None)],
    "two authorities": [([*_fields(), [":authority", GIT]], None)],
    "two paths": [([*_fields(), [":path", "/admin/@@"]], None)],
    "two methods": [([*_fields(), [":method", "POST"]], None)],
    "a pseudo-header at the end": [([*_fields(authority=None), ["a", "b"], [":authority", API]], None)],
    "an unknown pseudo-header": [([[":other", "x"], *_fields()], None)],
    "scheme http": [(_fields(scheme="http"), None)],
    "an unknown scheme": [(_fields(scheme="ftp"), None)],
    "no scheme": [(_fields(scheme=None), None)],
    "no path": [(_fields(path=None), None)],
    "an empty path": [(_fields(path=""), None)],
    "path *": [(_fields(path="*"), None)],
    "an absolute path": [(_fields(path=f"https://{ATTACKER}/@@"), None)],
    "a path that climbs": [(_fields(path="/v1/../admin/@@"), None)],
    "a path no rule allows": [(_fields(path="/admin/@@"), None)],
    "a path with a request in it": [(_fields(path=f"/v1/@@ HTTP/1.1\r\nHost: {GIT}\r\n\r\nGET /admin"), None)],
    "a path with NUL": [(_fields(path="/v1/@@\0"), None)],
    "a method with a request line": [(_fields(method="GET /admin/@@ HTTP/1.1\r\n\r\nGET"), None)],
    "a method no rule allows": [(_fields(method="DELETE"), None)],
    "method get": [(_fields(method="get"), None)],
    "TRACE": [(_fields(method="TRACE"), None)],
    "CONNECT": [(_fields(method="CONNECT", scheme=None, path=None, authority=f"{API}:443"), None)],
    "CONNECT to the attacker": [(_fields(method="CONNECT", scheme=None, path=None, authority=f"{ATTACKER}:443"), None)],
    "extended CONNECT": [([*_fields(method="CONNECT"), [":protocol", "websocket"]], None)],
    "CRLF in a value": [(_fields(("a", "b\r\nhost: x")), None)],
    "LF in a value": [(_fields(("a", "b\nc: d")), None)],
    "NUL in a value": [(_fields(("a", "b\0")), None)],
    "CRLF in a name": [(_fields(("a\r\nb", "c")), None)],
    "a colon in a name": [(_fields(("a: b", "c")), None)],
    "an upper-case name": [(_fields(("Aaa", "b")), None)],
    "a blank in a name": [(_fields(("a b", "c")), None)],
    "transfer-encoding": [
        (_fields(("transfer-encoding", "chunked"), method="POST"), "0\r\n\r\nGET /admin/@@ HTTP/1.1\r\n\r\n")
    ],
    "connection": [(_fields(("connection", "close")), None)],
    "upgrade": [(_fields(("upgrade", "h2c")), None)],
    "two lengths": [(_fields(("content-length", "3"), ("content-length", "4"), method="POST"), "abc")],
    "a length that is no number": [(_fields(("content-length", "+3"), method="POST"), "abc")],
    "two authorizations": [(_fields(("authorization", "a"), ("authorization", "b")), None)],
    "header names that can be taken for others": [(_fields(("transfer_encoding", "chunked")), None)],
}
MALFORMED_BODY: dict[str, list[tuple[Fields, str | None]]] = {
    "a length too small": [(_fields(("content-length", "1"), method="POST"), "a" + "GET /admin/@@ HTTP/1.1\r\n\r\n")],
    "a length too large": [(_fields(("content-length", "500"), method="POST"), "abc")],
}
ALLOWED: dict[str, list[tuple[Fields, str | None]]] = {
    "an honest request": [(_fields(), None)],
    "an honest upload": [(_fields(method="POST"), "abc")],
    "an honest host beside the authority": [(_fields(("host", API)), None)],
    "the client's own authorization": [(_fields(("authorization", "Bearer stolen")), None)],
    "cookies": [(_fields(("cookie", "a=b"), ("cookie", "c=d")), None)],
    "a body that is a request": [(_fields(method="POST"), f"GET /admin/x HTTP/1.1\r\nHost: {API}\r\n\r\n")],
}
SECOND_STREAM = {
    "then the attacker": [(_fields(), None), (_fields(authority=ATTACKER, path="/v1/@@/2"), None)],
    "then another bound host": [(_fields(), None), (_fields(authority=GIT, path="/ledger.git/@@"), None)],
    "then a denied path": [(_fields(), None), (_fields(path="/admin/@@"), None)],
}
CASES = {**DENIED, **MALFORMED_BODY, **ALLOWED, **SECOND_STREAM}


def _libraries() -> bytes:
    """Return h2 and its dependencies as a zip file from which Python can import."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for package in (h2, hpack, hyperframe):
            root = Path(str(package.__file__)).parent
            for path in root.rglob("*.py"):
                archive.write(path, f"{root.name}/{path.relative_to(root)}")
    return buffer.getvalue()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of all cases."""

    statuses: dict[str, list[str]]
    arrived: dict[str, list[dict[str, Any]]]
    heard: list[str]
    records: list[dict[str, Any]]


@pytest.fixture(scope="module", name="outcome")
def _outcome(internet: Internet, stack: Stack, sandboxes: dict[str, DemoSandbox]) -> Iterator[Outcome]:
    sandbox = sandboxes["runc"].id
    marks = {name: f"h2mark{number:03d}z" for number, name in enumerate(CASES)}
    cases = {
        name: {"address": ADDRESSES[API], "port": 443, "sni": API, "requests": requests}
        for name, requests in CASES.items()
    }
    text = {name: json.loads(json.dumps(case).replace("@@", marks[name])) for name, case in cases.items()}
    before = len(internet.notes())
    logged = len(stack.audit_records())
    client = stack.connect(sandbox)
    try:
        client.files.write_file("/tmp/h2.zip", _libraries())
        client.files.write_file("/tmp/h2_client.py", Path(str(h2_client.__file__)).read_text())
        client.files.write_file("/tmp/h2.json", json.dumps(text))
        done = client.commands.run("PYTHONPATH=/tmp/h2.zip python3 /tmp/h2_client.py </tmp/h2.json >/tmp/h2.out")
        assert done.exit_code == 0, "".join(message.text for message in done.logs.stderr)
        statuses = json.loads(client.files.read_file("/tmp/h2.out"))
    finally:
        client.close()
    deadline = time.monotonic() + 20
    expected = sum(len(ALLOWED[name]) for name in ALLOWED) + len(SECOND_STREAM)
    noted: list[dict[str, Any]] = []
    while time.monotonic() < deadline and sum("target" in note for note in noted) < expected:
        noted = internet.notes()[before:]
    yield Outcome(
        statuses,
        {
            name: [note for note in noted if "target" in note and mark in json.dumps(note)]
            for name, mark in marks.items()
        },
        [note["heard"] for note in noted if "heard" in note],
        [record for record in stack.audit_records()[logged:] if record.get("sandbox") == sandbox],
    )


@pytest.mark.parametrize("name", DENIED)
def test_nothing_arrives_of(name: str, outcome: Outcome) -> None:
    assert [] == outcome.arrived[name]
    assert "200" not in outcome.statuses[name]


@pytest.mark.parametrize("name", ALLOWED)
def test_exactly_one_request_arrives_of(name: str, outcome: Outcome, values: Secrets) -> None:
    """An allowed request is the control of the others. It has one secret, one Host and one framing."""
    (note,) = outcome.arrived[name]
    names = [name.lower() for name, _ in note["headers"]]

    assert ["200"] == outcome.statuses[name]
    assert len(names) == len(set(names))
    assert len({"content-length", "transfer-encoding"} & set(names)) <= 1
    assert (API, f"Bearer {values.api}") == (received_field(note, "Host"), received_field(note, "Authorization"))


@pytest.mark.parametrize("name", SECOND_STREAM)
def test_of_two_streams_only_the_first_arrives(name: str, outcome: Outcome) -> None:
    assert 1 == len(outcome.arrived[name])
    assert "200" == outcome.statuses[name][0]
    assert "200" != outcome.statuses[name][1]


@pytest.mark.parametrize("name", MALFORMED_BODY)
def test_a_body_of_another_length_is_no_second_request(name: str, outcome: Outcome) -> None:
    assert [] == [note for note in outcome.arrived[name] if note["target"].startswith("/admin")]
    assert "200" not in outcome.statuses[name]


def test_the_log_says_what_the_server_received(outcome: Outcome) -> None:
    logged = sorted(
        (record["method"], record["path"])
        for record in outcome.records
        if record["kind"] == "request" and record["decision"] == "allow"
    )
    received = sorted((note["method"], note["target"]) for notes in outcome.arrived.values() for note in notes)
    begun = [entry for entry in logged if entry not in received]

    assert not [entry for entry in received if entry not in logged]
    assert len(begun) <= len(MALFORMED_BODY)
    flows = {
        record["flow"] for record in outcome.records if record["kind"] == "request" and record["decision"] == "deny"
    }
    assert len(DENIED) + len(SECOND_STREAM) <= len(flows)
