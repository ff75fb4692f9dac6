"""HTTP attacks in exact bytes: only those requests arrive that policy allows, and the log has exactly these.

The module tests `gateway/exchange.py`, `gateway/engines/http1/flow.py` and `gateway/engines/http1/framing.py`.
"""

import json
import os
import re
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from urllib.parse import unquote_to_bytes

import brotli  # type: ignore[import-untyped]
import pytest
import zstandard

from demo.sandboxes import DemoSandbox, Secrets
from gateway.scrub.searched import MAX_PARTIAL
from testbed.attacks import Attack, Verdicts, from_outside, from_sandbox
from testbed.echoes import REDIRECTS, forms
from testbed.internet import ADDRESSES, API, ATTACKER, GIT, METADATA_ADDRESS, STATUS, Internet, received_field
from testbed.leaks import forms_of, leaks_in
from testbed.stack import Stack
from tests.conftest import ON_RUNC

pytestmark = pytest.mark.system

HOST = f"Host: {API}\r\n"
DENIED_PATH = "/admin/@@"
HIDDEN = f"GET {DENIED_PATH} HTTP/1.1\r\n{HOST}\r\n"


def _head(*lines: str, start: str = "GET /v1/@@ HTTP/1.1") -> str:
    return "\r\n".join((start, *lines)) + "\r\n\r\n"


def _get(*lines: str, path: str = "/v1/@@", method: str = "GET", host: str = API) -> str:
    return _head(f"Host: {host}", *lines, start=f"{method} {path} HTTP/1.1")


def _post(*lines: str, body: str = "") -> str:
    return _get(*lines, method="POST") + body


def _framing() -> Iterator[Attack]:
    chunks = f"0\r\n\r\n{HIDDEN}"
    yield Attack("CL.TE", (_post("Content-Length: 6", "Transfer-Encoding: chunked", body=chunks),))
    yield Attack("TE.CL", (_post("Transfer-Encoding: chunked", "Content-Length: 4", body=f"5c\r\n{chunks}"),))
    for coding in (
        "chunked, identity",
        "identity, chunked",
        "identity",
        "xchunked",
        "chunked;q=1",
        "\x0bchunked",
        '"chunked"',
        "chunked,",
        ",chunked",
        "Chunked",
        "chunked\xa0",
        "chunked chunked",
        "gzip, chunked",
        "",
    ):
        yield Attack(f"TE.TE {coding!a}", (_post(f"Transfer-Encoding: {coding}", "Content-Length: 4", body=chunks),))
        yield Attack(f"transfer coding {coding!a}", (_post(f"Transfer-Encoding: {coding}", body=chunks),))
    for line in (
        "Transfer-Encoding : chunked",
        "Transfer-Encoding\t: chunked",
        " Transfer-Encoding: chunked",
        "Transfer-Encoding:\r\n chunked",
        "Transfer_Encoding: chunked",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        "Transfer-Encoding: identity\r\ntransfer-encoding: chunked",
        "X: 1\rTransfer-Encoding: chunked",
        "X: 1\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\x00",
    ):
        yield Attack(f"hidden coding {line!a}", (_post("Content-Length: 4", line, body=chunks),))
    for length in (
        "5, 5",
        "+5",
        "0x5",
        "-1",
        "-0",
        "05",
        "9223372036854775808",
        "5_0",
        "5.0",
        "\xb2",
        "",
        "5 5",
        "5;",
        "5\r\nContent-Length: 5",
        "5\r\nContent-Length: 0",
        "5\r\ncontent-length: 6",
        "5\r\nContent_Length: 0",
        "5\x0b",
    ):
        yield Attack(f"content length {length!a}", (_post(f"Content-Length: {length}", body=f"12345{HIDDEN}"),))
    old = _head(f"Host: {API}", "Transfer-Encoding: chunked", start="POST /v1/@@ HTTP/1.0")
    yield Attack("transfer coding in HTTP/1.0", (old + chunks,))


def _hosts() -> Iterator[Attack]:
    for lines in (
        f"Host: {API}\r\nHost: {GIT}",
        f"Host: {GIT}\r\nHost: {API}",
        f"Host: {API}\r\nHost: {API}",
        f"Host: {API}\r\nhost: {API}",
        f"Host: {API}\r\nHost:",
        "Host:",
        "X: no host",
        f"Host: {API}, {GIT}",
        f"Host: {API},",
        f"Host : {API}",
        f"Host:\r\n {API}",
        f" Host: {API}",
        f"Host: {API}/",
        f"Host: {API}?x",
        f"Host: {API}#x",
        f"Host: {API}\\x",
        f"Host: {API} {GIT}",
        f"Host: {API}\t{GIT}",
        f"Host: {API}@{ATTACKER}",
        f"Host: {ATTACKER}@{API}",
        f"Host: {API}:443@{ATTACKER}",
        f"Host: {API}:",
        f"Host: {API}:8443",
        f"Host: {API}:80",
        f"Host: {API}:0",
        f"Host: {API}:65536",
        f"Host: {API}:+443",
        f"Host: {API}:0443",
        f"Host: {API}..",
        f"Host: .{API}",
        "Host: api..bank.example",
        "Host: api%2ebank.example",
        f"Host: {ATTACKER}%00.{API}",
        f"Host: {ATTACKER}\x00.{API}",
        f"Host: {API}\x00",
        f"Host: {API}\x7f",
        f"Host: {API}\r",
        "Host: \uff41pi.bank.example".encode().decode("latin-1"),
        "Host: api.ban\u212a.example".encode().decode("latin-1"),
        f"Host: {ATTACKER}",
        f"Host: {GIT}",
        f"Host: {STATUS}",
        f"Host: {ADDRESSES[API]}",
        f"Host: [{API}]",
        "Host: apixbank.example",
        f"Host: {API}.attacker.example",
        f"Host: {METADATA_ADDRESS}",
        "Host: 2852039166",
        "Host: localhost",
        "Host: bank.example",
        "Host: example",
    ):
        yield Attack(f"authority {lines!a}", (_head(lines),))
    yield Attack("no Host in HTTP/1.0", (_head("X: y", start="GET /v1/@@ HTTP/1.0"),))
    for target, host in (
        (f"https://{ATTACKER}/v1/@@", API),
        (f"https://{API}/v1/@@", ATTACKER),
        (f"https://{API}@{ATTACKER}/v1/@@", API),
        (f"https://{ATTACKER}@{API}/v1/@@", API),
        (f"https://{API}:8443/v1/@@", API),
        (f"https://{API}/v1/@@", GIT),
        (f"https://{GIT}/v1/@@", API),
        (f"http://{API}/v1/@@", API),
        (f"HTTPS://{API}/v1/@@", API),
        (f"ftp://{API}/v1/@@", API),
        ("file:///v1/@@", API),
        (f"gopher://{API}/v1/@@", API),
        (f"//{ATTACKER}/v1/@@", API),
        ("v1/@@", API),
        ("*", API),
        (f"https://{API}\\@{ATTACKER}/v1/@@", API),
        (f"https://{API}#@{ATTACKER}/v1/@@", API),
    ):
        yield Attack(f"target {target} for {host}", (_get(f"X-Mark: {'@@'}", path=target, host=host),))


def _lines() -> Iterator[Attack]:
    for name, text in {
        "a request of bare LF": _get().replace("\r\n", "\n"),
        "one header ended by LF": _get("A: b").replace("A: b\r\n", "A: b\n"),
        "CR inside a value": _get("A: b\rC: d"),
        "NUL inside a value": _get("A: b\0c"),
        "a folded header": _get("A: b\r\n c"),
        "a folded Authorization": _get("Authorization: Bearer\r\n x"),
        "a folded line first": f"GET /v1/@@ HTTP/1.1\r\n {HOST}{HOST}\r\n",
        "blank before the colon": _get("A : b"),
        "an empty name": _get(": b"),
        "NUL in a name": _get("A\0: b"),
        "a line without colon": _get("A"),
        "a name that is no token": _get("A(): b"),
        "an 8-bit name": _get("\xe4: b"),
        "two blanks in the request line": _get().replace("GET /", "GET  /"),
        "a tab in the request line": _get().replace("GET /", "GET\t/"),
        "a vertical tab in the request line": _get().replace("GET /", "GET\x0b/"),
        "four parts in the request line": _get(path="/v1/@@ /v1/x"),
        "blank before the method": " " + _get(),
        "CRLF before the method": "\r\n" + _get(),
        "LF before the method": "\n" + _get(),
        "NUL before the method": "\0" + _get(),
        "8-bit in the path": _get(path="/v1/@@\xfc"),
        "a bare CR after the version": _get().replace("HTTP/1.1\r\n", "HTTP/1.1\r\r\n"),
        "blank after the version": _get().replace("HTTP/1.1", "HTTP/1.1 "),
        "HTTP/0.9": "GET /v1/@@\r\n\r\n",
        "HTTP/1.2": _get().replace("HTTP/1.1", "HTTP/1.2"),
        "HTTP/2.0 as text": _get().replace("HTTP/1.1", "HTTP/2.0"),
        "HTTP/9.9": _get().replace("HTTP/1.1", "HTTP/9.9"),
        "HTTP/1.1abc": _get().replace("HTTP/1.1", "HTTP/1.1abc"),
        "http/1.1": _get().replace("HTTP/1.1", "http/1.1"),
        "a header of 70 KB": _get(f"A: {'b' * 70_000}"),
        "200 headers": _get(*(f"A{number}: b" for number in range(200))),
        "a target of 20 KB": _get(path=f"/v1/@@?{'q' * 20_000}"),
        "a path of 9 KB": _get(path=f"/v1/@@{'q' * 9_000}"),
        "a preface of HTTP/2": f"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n{HIDDEN}",
        "an unknown expectation": _get("Expect: xyz"),
        "two expectations": _get("Expect: 100-continue", "Expect: 100-continue"),
        "Connection names Host": _get("Connection: host"),
        "Connection names Content-Length": _post("Connection: content-length", "Content-Length: 3", body="abc"),
        "upgrade to h2c": _get("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"),
        "upgrade to TLS": _get("Connection: Upgrade", "Upgrade: TLS/1.0"),
        "upgrade to nothing": _get("Connection: Upgrade"),
        "upgrade of another version of WebSocket": _get(
            "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 99", "Sec-WebSocket-Key: " + "A" * 24
        )
        + HIDDEN,
        "two Authorization headers": _get("Authorization: Bearer a", "Authorization: Bearer b"),
        "Authorization with a blank before the colon": _get("Authorization : Bearer a"),
        "Authorization after a bare LF": _get("A: b\nAuthorization: Bearer a"),
    }.items():
        yield Attack(name, (text,))
    denied = "POST /admin/@@ HTTP/1.1\r\n" + HOST
    yield Attack(
        "Expect on a denied path", (denied + "Expect: 100-continue\r\nContent-Length: 5\r\n\r\n", 0.3, "12345")
    )


def _scopes() -> Iterator[Attack]:
    for method in (
        "get",
        "GeT",
        "HEAD",
        "PUT",
        "DELETE",
        "PATCH",
        "OPTIONS",
        "TRACE",
        "trace",
        "TRACK",
        "PROPFIND",
        "M-SEARCH",
        "PRI",
        "GET\0",
        "GETPOST",
        "X" * 8192,
    ):
        yield Attack(f"method {method[:40]!a}", (_get(method=method, path="/v1/@@"),))
    yield Attack("OPTIONS *", (_get("X-Mark: @@", method="OPTIONS", path="*"),))
    for authority in (
        f"{API}:443",
        f"{ATTACKER}:443",
        "127.0.0.1:22",
        f"{METADATA_ADDRESS}:80",
        "192.0.2.1:15001",
    ):
        for method in ("CONNECT", "connect"):
            yield Attack(f"{method} {authority}", (_get("X-Mark: @@", method=method, path=authority) + HIDDEN,))
    for path in (
        "/v1/../admin/@@",
        "/v1/./@@",
        "/v1//@@",
        "//v1/@@",
        "/v1/%2e%2e/admin/@@",
        "/v1/%2E%2E/admin/@@",
        "/v1/.%2e/admin/@@",
        "/v1/..%2fadmin/@@",
        "/v1/%2fadmin/@@",
        "/v1%2f@@",
        "/v1/..%5cadmin/@@",
        "/v1/..\\admin/@@",
        "/v1/%252e%252e/admin/@@",
        "/v1/%25%32%65/@@",
        "/v1/..;/admin/@@",
        "/v1/;x=1/../admin/@@",
        "/v1/@@;x=1",
        "/v1/@@.",
        "/v1/@@%20",
        "/v1/@@/...",
        "/v1/%00@@",
        "/v1/@@#x",
        "/v1/%c0%ae%c0%ae/admin/@@",
        "/v1/%ff@@",
        "/v1/%u002e%u002e/@@",
        "/v1/%0d%0aX:%20@@",
        "/v1/%",
        "/v1/%zz@@",
        "/V1/@@",
        "/v1x/@@",
        "/v1",
        "/@@",
        "/%76%31/@@",
        "/%761/@@",
        "/v1/@@|x",
        "/v1/{@@}",
        "/v1/..?/@@",
        "/admin/@@?/v1/",
    ):
        yield Attack(f"path {path}", (_get("X-Mark: @@", path=path),))
    yield Attack("the admin path", (HIDDEN,))
    yield Attack("the client's own authorization in a query", (_get(path="/v1/@@?authorization=stolen"),))
    yield Attack("clear text on 80 to a host with a secret", (_get(),), None, API, 80)
    yield Attack("clear text to the attacker with an honest Host", (_get(),), None, ATTACKER, 80)
    yield Attack("an https target on 80", (_get(path=f"https://{API}/v1/@@"),), None, API, 80)
    yield Attack("HTTP/2 in clear", ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0@@",), None, API, 80)
    yield Attack("another port of an allowed name", (_get(host=f"{STATUS}:8443"),), STATUS, STATUS, 8443)
    yield Attack("the proxy's own onboarding page", (_get("X-Mark: @@", host="mitm.it", path="/"),), None, ATTACKER, 80)


NOTHING_ARRIVES = (*_framing(), *_hosts(), *_lines(), *_scopes())

_BODY = HIDDEN.replace("@@", "aaaaaaaaaaaa")  # of the same length as with its mark
_CHUNKED = "Transfer-Encoding: chunked"
ONE = ("/v1/@@",)
SOME_ARRIVES = (
    Attack("an honest request", (_get(),), arrives=ONE),
    Attack("an honest upload", (_post("Content-Length: 3", body="abc"),), arrives=ONE),
    Attack("an honest upload in chunks", (_post(_CHUNKED, body="3\r\nabc\r\n0\r\n\r\n"),), arrives=ONE),
    Attack("a host in capitals", (_get(host=API.upper()),), arrives=ONE),
    Attack("a host with a dot at its end", (_get(host=f"{API}."),), arrives=ONE),
    Attack("a host with its port", (_get(host=f"{API}:443"),), arrives=ONE),
    Attack("an absolute target that agrees", (_get(path=f"https://{API}/v1/@@"),), arrives=ONE),
    Attack(
        "allowed, denied, allowed in one write", (_get() + HIDDEN + _get(path="/v1/@@/2"),), arrives=(*ONE, "/v1/@@/2")
    ),
    Attack("denied, allowed in one write", (HIDDEN + _get(),), arrives=ONE),
    Attack(
        "forty in one write, every other denied",
        ("".join(_get(path=f"/v1/@@/{number}") + HIDDEN for number in range(20)),),
        arrives=tuple(f"/v1/@@/{number}" for number in range(20)),
    ),
    Attack("a later request for another host", (_get() + _get(host=GIT, path="/v1/@@/2"),), arrives=ONE),
    Attack("a later request for the attacker", (_get(), 0.3, _get(host=ATTACKER, path="/v1/@@/2")), arrives=ONE),
    Attack("a later request for a spliced host", (_get(), 0.3, _get(host=STATUS, path="/v1/@@/2")), arrives=ONE),
    Attack("a later absolute target of another host", (_get(), 0.3, _get(path=f"https://{GIT}/v1/@@/2")), arrives=ONE),
    Attack("a body that is a request", (_post(f"Content-Length: {len(_BODY)}", body=_BODY),), arrives=ONE),
    Attack(
        "a body in chunks that is a request",
        (_post(_CHUNKED, body=f"{len(_BODY):x}\r\n{_BODY}\r\n0\r\n\r\n"),),
        arrives=ONE,
    ),
    Attack("a body of a GET that is a request", (_get(f"Content-Length: {len(_BODY)}") + _BODY,), arrives=ONE),
    Attack("a length one too small", (_post("Content-Length: 2", body=f"abc{HIDDEN}"),), arrives=ONE),
    Attack("a request after the end of chunks", (_post(_CHUNKED, body=f"0\r\n\r\n{HIDDEN}"),), arrives=ONE),
    Attack(
        "a denied upload that is a request, then an honest one",
        (f"POST {DENIED_PATH} HTTP/1.1\r\n{HOST}Content-Length: {len(_BODY)}\r\n\r\n{_BODY}" + _get(),),
        arrives=ONE,
    ),
    Attack(
        "an expectation with its body at once",
        (_post("Expect: 100-continue", "Content-Length: 3", body="abc"),),
        arrives=ONE,
    ),
    Attack(
        "trailers with credentials",
        (
            _post(
                _CHUNKED, "Trailer: Authorization", body="1\r\na\r\n0\r\nAuthorization: Bearer x@@\r\nHost: x\r\n\r\n"
            ),
        ),
        arrives=ONE,
    ),
    Attack("a chunk with an extension", (_post(_CHUNKED, body="3;a=b\r\nabc\r\n0\r\n\r\n"),), arrives=ONE),
    Attack("CRLF escaped in a query", (_get(path="/v1/@@?a=%0d%0aX:%20y"),), arrives=("/v1/@@?a=%0d%0aX:%20y",)),
    Attack("a rewriting path header", (_get(f"X-Original-URL: {DENIED_PATH}", "X-Rewrite-URL: /admin"),), arrives=ONE),
    Attack("a rewriting method header", (_get("X-HTTP-Method-Override: DELETE"),), arrives=ONE),
    Attack("an 8-bit value", (_get("A: \xfc\xff"),), arrives=ONE),
    Attack("the client's own Authorization", (_get("Authorization: Bearer stolen"),), arrives=ONE),
    Attack("the client's own authorization in odd case", (_get("aUTHORIZATION: Basic c3RvbGVu"),), arrives=ONE),
    Attack("Authorization named by Connection", (_get("Connection: authorization, x-api-key"),), arrives=ONE),
    Attack("Proxy-Authorization", (_get("Proxy-Authorization: Bearer stolen"),), arrives=ONE),
    Attack("hop-by-hop headers", (_get("Keep-Alive: 1", "TE: trailers", "Proxy-Connection: close"),), arrives=ONE),
    Attack("HTTP/1.0", (_head(f"Host: {API}", start="GET /v1/@@ HTTP/1.0"),), arrives=ONE),
)
"""Attacks of which some requests may arrive: exactly those in `arrives`."""

_CHUNK_GRAMMAR = {
    "3\r\nabc\r\n0\r\n\r\n": True,
    "0x3\r\nabc\r\n0\r\n\r\n": False,
    "3_0\r\nabc\r\n0\r\n\r\n": False,
    "+3\r\nabc\r\n0\r\n\r\n": False,
    "-3\r\nabc\r\n0\r\n\r\n": False,
    " 3\r\nabc\r\n0\r\n\r\n": False,
    "3\nabc\n0\n\n": False,
    "3\r\nabc0\r\n\r\n": False,
    "3\r\nabcXX0\r\n\r\n": False,
    "3\r\nabc\n0\r\n\r\n": False,
    "3\rabc\r\n0\r\n\r\n": False,
    "3;a\nb\r\nabc\r\n0\r\n\r\n": False,
    "3;a\rb\r\nabc\r\n0\r\n\r\n": False,
    "10000000000000003\r\nabc\r\n0\r\n\r\n": False,
    "ffffffffffffffff\r\nabc\r\n0\r\n\r\n": False,
    "\r\n\r\n0\r\n\r\n": False,
    "g\r\nabc\r\n0\r\n\r\n": False,
    "3;" + "a" * 200 + "\r\nabc\r\n0\r\n\r\n": True,
    "3;" + "a" * 200_000 + "\r\nabc\r\n0\r\n\r\n": False,
    "3\r\nabc\r\n00\r\n\r\n": True,
    "3\r\nabc\r\n0\r\nGET": False,
}
"""Bodies, and whether the gateway accepts their chunks. It then sends the body with its own framing.

Each refused body is refused in the write that brings the head, or fits in the gateway's buffer of 256 KiB. A body that
is refused later can be refused before or after the head is forwarded.
"""

CHUNKS = tuple(
    Attack(
        f"chunks {body[:40]!a} in {len(body)} bytes",
        (_post(_CHUNKED, body=body + HIDDEN),),
        arrives=ONE if read else (),
    )
    for body, read in _CHUNK_GRAMMAR.items()
)


@pytest.fixture(scope="module", name="denied")
def _denied(internet: Internet, stack: Stack, sandboxes: dict[str, DemoSandbox]) -> Verdicts:
    return from_sandbox(NOTHING_ARRIVES, internet, stack, sandboxes["runc"].id)


@pytest.fixture(scope="module", name="denied_control")
def _denied_control(internet: Internet) -> Verdicts:
    return from_outside(NOTHING_ARRIVES, internet)


@pytest.fixture(scope="module", name="mixed", params=ON_RUNC)
def _mixed(
    request: pytest.FixtureRequest, internet: Internet, stack: Stack, sandboxes: dict[str, DemoSandbox]
) -> Verdicts:
    return from_sandbox(SOME_ARRIVES, internet, stack, sandboxes[request.param].id)


@pytest.fixture(scope="module", name="chunks")
def _chunks(internet: Internet, stack: Stack, sandboxes: dict[str, DemoSandbox]) -> Verdicts:
    return from_sandbox(CHUNKS, internet, stack, sandboxes["runc"].id)


@pytest.mark.parametrize("attack", NOTHING_ARRIVES, ids=lambda attack: attack.name)
def test_nothing_arrives_of(attack: Attack, denied: Verdicts, denied_control: Verdicts, values: Secrets) -> None:
    """The control: without a gateway the same bytes do reach the server."""
    assert [] == denied.arrived(attack)
    assert not denied.heard(attack)
    assert denied_control.heard(attack)
    assert "HTTP/1.1 2" not in denied.answer(attack)
    assert "HTTP/1.1 100" not in denied.answer(attack)
    assert 0 == leaks_in([denied.answer(attack).encode("latin-1")], forms_of(values.api))


def test_of_requests_that_are_denied_not_one_frame_leaves(denied: Verdicts, denied_control: Verdicts) -> None:
    """The gateway opens no connection for such a request."""
    assert [] == denied.data_frames()
    assert [] != denied_control.data_frames()


def test_every_denied_request_is_in_the_log(denied: Verdicts) -> None:
    refused = [record for record in denied.records if record["decision"] == "deny"]

    assert {} == denied.logged_requests
    assert len(NOTHING_ARRIVES) <= len(refused)


@pytest.mark.parametrize("attack", SOME_ARRIVES, ids=lambda attack: attack.name)
def test_exactly_what_policy_allows_arrives_of(attack: Attack, mixed: Verdicts) -> None:
    assert mixed.expected(attack) == mixed.arrived(attack)


def test_the_log_says_what_the_servers_received(mixed: Verdicts) -> None:
    assert mixed.logged_requests == mixed.received_requests
    assert sum(len(attack.arrives) for attack in SOME_ARRIVES) == mixed.logged_requests.total()


def test_every_request_that_arrives_can_be_read_in_one_way_only(mixed: Verdicts, values: Secrets) -> None:
    """A request has one Host, one framing, one secret, and no header that another parser could read as one of them."""
    for note in mixed.noted:
        if "target" not in note:
            continue
        names = [name.lower().replace("_", "-") for name, _ in note["headers"]]
        fields = {name.lower(): received_field(note, name) for name, _ in note["headers"]}
        assert len({"content-length", "transfer-encoding"} & set(names)) <= 1
        assert len(names) == len(set(names))
        assert API == fields["host"]
        assert fields.get("transfer-encoding", "chunked") == "chunked"
        assert f"Bearer {values.api}" == fields["authorization"]
        assert not {"proxy-authorization", "te", "upgrade", "keep-alive", "x-original-url", "trailer"} & set(names)
        assert "stolen" not in json.dumps(note["headers"])
        assert not any(character in json.dumps(note["headers"]) for character in ("\\r", "\\n", "\\u0000"))


@pytest.mark.parametrize("attack", CHUNKS, ids=lambda attack: attack.name)
def test_what_stands_behind_odd_chunks_is_no_request(attack: Attack, chunks: Verdicts) -> None:
    """The upload arrives if it has only one reading. The request behind it never arrives."""
    assert chunks.expected(attack) == chunks.arrived(attack)


def test_no_odd_chunks_reach_a_server(chunks: Verdicts) -> None:
    assert [] == [note for note in chunks.noted if note.get("body", "abc") != "abc" or "refused" in note]
    assert not chunks.received_requests - chunks.logged_requests


ECHOES = tuple(
    Attack(
        f"{method} {form}",
        (_get(path=f"/v1/echo?form={form}&mark=@@", method=method),),
        arrives=(f"/v1/echo?form={form}&mark=@@",),
    )
    for form in forms("x" * 40)
    for method in ("GET",)
)


@pytest.fixture(scope="module", name="echoes")
def _echoes(internet: Internet, stack: Stack, sandboxes: dict[str, DemoSandbox]) -> Verdicts:
    return from_sandbox(ECHOES, internet, stack, sandboxes["runc"].id)


@pytest.fixture(scope="module", name="echoes_control")
def _echoes_control(internet: Internet, values: Secrets) -> Verdicts:
    authorised = tuple(
        Attack(
            attack.name,
            (str(attack.send[0]).replace("\r\n\r\n", f"\r\nAuthorization: Bearer {values.api}\r\n\r\n"),),
            arrives=attack.arrives,
        )
        for attack in ECHOES
    )
    return from_outside(authorised, internet)


@pytest.mark.parametrize("attack", ECHOES, ids=lambda attack: attack.name)
def test_no_byte_of_a_secret_comes_back(
    attack: Attack, echoes: Verdicts, echoes_control: Verdicts, values: Secrets
) -> None:
    """A revealed byte means twelve characters in a row.

    The control: a client that sends the secret itself gets it back.
    """
    assert echoes.expected(attack) == echoes.arrived(attack)
    assert [] == _revealed(echoes.answer(attack), values.api)
    assert [] != _revealed(echoes_control.answer(attack), values.api)


def test_after_all_responses_the_client_is_in_step(echoes: Verdicts) -> None:
    """Each request gets at most one final response, its own."""
    for attack in ECHOES:
        assert len(re.findall(r"HTTP/1\.1 [2-5]\d\d", echoes.answer(attack))) <= 1, attack.name


def _revealed(received: str, secret: str) -> list[str]:
    """Return the views of a response that contain a form of `secret`, or twelve of its characters in a row."""
    raw = received.encode("latin-1")
    _, _, body = raw.partition(b"\r\n\r\n")
    views = {
        "raw": raw,
        "body": body,
        "dechunked": re.sub(rb"(?:^|\r\n)[0-9a-f]+\r\n", b"", body),
        "unquoted": unquote_to_bytes(raw),
        "unescaped": re.sub(rb"\\u00([0-9a-f]{2})", lambda match: bytes.fromhex(match[1].decode()), raw),
    }
    decoders: dict[str, Callable[[bytes], bytes]] = {
        "gzip": lambda data: zlib.decompressobj(31).decompress(data),
        "zlib": lambda data: zlib.decompressobj().decompress(data),
        "deflate": lambda data: zlib.decompressobj(-15).decompress(data),
        "br": brotli.decompress,
        "zstd": lambda data: zstandard.ZstdDecompressor().decompress(data, max_output_size=1 << 20),
    }
    for _ in range(3):
        for name, view in list(views.items()):
            for coding, decoder in decoders.items():
                try:
                    views.setdefault(f"{name}, {coding}", decoder(view))
                except Exception:  # noqa: BLE001, S112 - not in this coding
                    continue
    parts = [secret[start : start + 12] for start in range(len(secret) - 11)]
    looked_for = [*forms_of(secret), *(part.encode() for part in parts)]
    return [name for name, view in views.items() if any(form in view for form in looked_for)]


def _mirror(name: str, body: str, first: int) -> Attack:
    request = _get(f"Content-Length: {len(body)}", path=f"/v1/mirror?first={first}&mark=@@", method="POST")
    return Attack(name, (request + body,), arrives=(f"/v1/mirror?first={first}&mark=@@",))


def test_no_client_can_ask_how_a_secret_begins(internet: Internet, stack: Stack, values: Secrets) -> None:
    """A server that mirrors its input does not reveal whether a guess of the secret is right.

    The timing of the chunks never reveals it. The end of a response reveals it only a few times; then the secret is no
    longer sent.
    """
    sandbox = stack.create("runc")
    try:
        lengths = (1, 2, 3, 7, 20, 40)
        timed = {
            (length, right): _mirror(
                f"{length} {right}", f"..{values.api[:length] if right else '~' * length}....\n", 2 + length
            )
            for length in lengths
            for right in (True, False)
        }
        verdicts = from_sandbox(tuple(timed.values()), internet, stack, str(sandbox.id))
        assert [] == [attack.name for attack in timed.values() if not verdicts.arrived(attack)]
        sizes = {key: _sizes(verdicts, attack) for key, attack in timed.items()}
        whole = {(length, right): (length + 7, 0) for length, right in timed}
        assert whole == sizes  # nothing of a line before its end, then the whole line

        guesses = "".join(
            str(_mirror(f"ends after {length}", values.api[:length], length).send[0]) for length in range(4, 34)
        )
        attack = Attack("guesses, one after the other", (guesses,), options={"quiet": 5})
        verdicts = from_sandbox((attack,), internet, stack, str(sandbox.id))
        honest = Attack("honest", (_get(),), arrives=())
        afterwards = from_sandbox((honest,), internet, stack, str(sandbox.id))

        assert MAX_PARTIAL == verdicts.answer(attack).count("HTTP/1.1 200")
        assert 30 - MAX_PARTIAL == verdicts.answer(attack).count("HTTP/1.1 403")
        assert "reflection" in {record.get("rule") for record in verdicts.records}
        assert [] == afterwards.arrived(honest)
        assert "HTTP/1.1 403" in afterwards.answer(honest)

        os.kill(stack.worker_pid(str(sandbox.id)), signal.SIGKILL)
        deadline = time.monotonic() + 30
        while (new := stack.inspect(str(sandbox.id))).generation == 1 or new.worker_pid is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        respawned = from_sandbox((honest,), internet, stack, str(sandbox.id))
        assert [] == respawned.arrived(honest)
        assert "HTTP/1.1 403" in respawned.answer(honest)
    finally:
        sandbox.kill()
        sandbox.close()


def _sizes(verdicts: Verdicts, attack: Attack) -> tuple[int, ...]:
    """Return the sizes of the chunks of the response."""
    rest = verdicts.answer(attack).partition("\r\n\r\n")[2]
    sizes = []
    while (line := rest.partition("\r\n"))[0]:
        size = int(line[0], 16)
        sizes.append(size)
        rest = line[2][size + 2 :]
    return tuple(sizes)


@pytest.mark.parametrize("to", REDIRECTS)
def test_a_redirect_takes_no_secret_along(to: str, internet: Internet, sandboxes: dict[str, DemoSandbox]) -> None:
    """The gateway follows no redirect; it judges the client's next request again."""
    before = len(internet.notes())
    urls = " ".join(f"'https://{API}/v1/redirect?to={to}&status={status}'" for status in (301, 302, 303, 307, 308))
    sandboxes["runc"].run(
        f"for url in {urls}; do curl -sSL --max-time 20 $url; curl -sSL -X POST -d a=b --max-time 20 $url; done"
    )
    noted = internet.notes()[before:]

    assert 10 == sum(note.get("target", "").startswith("/v1/redirect") for note in noted)
    assert {API} == {note["host"] for note in noted if "target" in note}
    assert {443} == {note["port"] for note in noted if "target" in note}


def test_after_all_of_this_an_honest_request_works(
    internet: Internet, sandboxes: dict[str, DemoSandbox], denied: Verdicts, chunks: Verdicts, echoes: Verdicts
) -> None:
    code, printed = sandboxes["runc"].run(f"curl -sS --max-time 20 https://{API}/v1/alive")

    assert (0, "/v1/alive") == (code, json.loads(printed)["target"])
