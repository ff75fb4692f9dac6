"""An inspected flow, end to end: the bytes that the server and the sandbox receive.

It tests `gateway/engines/engine.py`, `gateway/engines/http1/flow.py` and `gateway/engines/mitm/layers.py`.
"""

import asyncio
import base64
import datetime
import gzip
import ipaddress
import json
import resource
import socket
import ssl
from pathlib import Path
from urllib.parse import quote

import brotli
import httpx
import pytest
import zstandard
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from OpenSSL import crypto

from gateway.budget import Over
from gateway.engines.port import EngineLimits
from policy.decision import AllowRequest, Deny
from policy.facts import Scheme
from policy.injection import InjectionKind, InjectionPlan

from .conftest import Authority, ended, read_all

GET = b"GET %s HTTP/1.1\r\nHost: good.test\r\n\r\n"
DAY = datetime.timedelta(days=1)


async def test_an_allowed_request_reaches_the_server_with_the_secret(rig):
    answer = await rig.exchange(GET % b"/v1/x")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\nok")
    assert b"Authorization: Bearer " + rig.secret.encode() + b"\r\n" in rig.upstream.data
    assert rig.secret.encode() not in answer
    assert [("request", "allow"), ("secret.use", "allow")] == rig.audit.kinds()


async def test_the_binding_owns_its_header(rig):
    await rig.exchange(
        b"GET /v1 HTTP/1.1\r\nHost: good.test\r\naUTHORIZATION: Bearer mine\r\nConnection: authorization\r\n"
        b"Proxy-Authorization: Basic eA==\r\nRange: bytes=0-3\r\nAccept-Encoding: gzip\r\n\r\n"
    )
    head = rig.upstream.data.lower()
    assert 1 == head.count(b"authorization:")
    assert b"mine" not in head
    assert b"range:" not in head
    assert b"accept-encoding: identity" in head


async def test_every_reflection_of_the_secret_is_taken_out(rig):
    secret = rig.secret.encode()
    encoded = [secret, base64.b64encode(b"Bearer " + secret), base64.b64encode(b"x" + secret), secret.hex().encode()]
    encoded += [quote(rig.secret, safe="").encode(), quote(rig.secret, safe="").lower().encode()]
    encoded += [json.dumps({"a": rig.secret}).encode().replace(b"/", b"\\/"), base64.urlsafe_b64encode(b"ab" + secret)]

    async def reflect(head, body, writer):
        text = b" ".join(encoded)
        lines = b"".join(b"X-%d: a %s b\r\n" % (number, form) for number, form in enumerate(encoded))
        writer.write(
            b'HTTP/1.1 200 %s\r\n%s%s: name\r\nSet-Cookie: k=%s\r\nAlt-Svc: h3=":443"\r\nContent-Length: %d\r\n\r\n'
            % (secret.replace(b"/", b""), lines, b"ok", secret, len(text))
        )
        # Byte by byte, so that every match is split.
        for index in range(len(text)):
            writer.write(text[index : index + 1])
            await writer.drain()

    rig.upstream.reply = reflect
    answer = await rig.exchange(GET % b"/v1")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert len(b" ".join(encoded)) == len(body)
    for core in (secret, secret[4:12], secret.hex().encode(), base64.b64encode(secret)[4:16]):
        assert core not in answer
    assert quote(rig.secret, safe="").encode() not in answer
    assert b"[REDACTED]" in head
    assert b"alt-svc" not in head.lower()


async def test_a_secret_that_is_called_back_before_it_is_used_is_not_kept(rig):
    """The secret is revoked during its lease: the flow is aborted, nothing is sent or stored."""
    leasing, go = asyncio.Event(), asyncio.Event()
    lease = rig.lease

    async def slow(plan, facts, size):
        leasing.set()
        await go.wait()
        return await lease(plan, facts, size)

    rig.lease = slow
    reader, writer = await rig.connect()
    writer.write(b"GET /v1/put HTTP/1.1\r\nHost: good.test\r\n\r\n")
    await leasing.wait()
    assert 1 == rig.engine.revoke(frozenset({rig.plan.secret}))
    go.set()
    assert await ended(reader)
    assert "KnownPatterns(0)" == repr(rig.engine._known)
    assert ("secret.use", "allow") not in rig.audit.kinds()
    assert b"" == rig.upstream.data
    writer.close()


async def test_what_a_host_can_be_sent_is_taken_out_of_each_of_its_answers(rig):
    """Also from answers on connections that sent no secret.

    It applies before and after another connection sends the secret, until the secret's revocation.
    """
    secret = rig.secret.encode()

    async def reply(head: bytes, _body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nX-Seen: %s\r\nContent-Length: %d\r\n\r\n%s" % (secret, len(secret), secret))

    rig.upstream.reply = reply
    reader, writer = await rig.connect()
    writer.write(b"GET /open/before HTTP/1.1\r\nHost: good.test\r\nRange: bytes=3-\r\n\r\n")
    before = await read_all(reader)
    used = await rig.exchange(b"GET /v1/put HTTP/1.1\r\nHost: good.test\r\nConnection: close\r\n\r\n")
    writer.write(b"GET /open/after HTTP/1.1\r\nHost: good.test\r\n\r\n")
    for answer in (before, used, await read_all(reader)):
        assert b"[REDACTED]" in answer and answer.endswith(b"*" * len(secret))
        assert secret not in answer
    assert b"range" not in rig.upstream.data.lower()
    assert 1 == rig.engine.revoke(frozenset({rig.plan.secret}))
    assert await ended(reader)
    assert "KnownPatterns(0)" == repr(rig.engine._known)
    writer.close()


async def test_the_values_before_a_rotation_are_taken_out_too(rig):
    rig.former = ("the-value-of-yesterday", "an-older-value")

    async def reply(_head: bytes, _body: bytes, writer: asyncio.StreamWriter) -> None:
        body = " ".join((*rig.former, rig.secret)).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    rig.upstream.reply = reply
    answer = await rig.exchange(GET % b"/open")
    assert answer.endswith(b" ".join(b"*" * len(value) for value in (*rig.former, rig.secret)))


@pytest.mark.parametrize(
    ("head", "shown"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"200 OK"),
        (b"HTTP/1.1 200 OK\r\nX-Seen: tok/en+3v4l-UE_9~x\r\n", b"[REDACTED]"),
        (b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 3-8/9\r\n", b"502 "),
        (b"HTTP/1.1 206 Partial Content\r\nContent-Type: multipart/byteranges; boundary=x\r\n", b"502 "),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-7\r\n", b"502 "),
    ],
)
async def test_what_to_look_for_is_decided_when_the_answer_begins(rig, head, shown):
    """The request was forwarded while no secret was bound to its host, and so with its `Range`."""
    asked, go = asyncio.Event(), asyncio.Event()
    secret = rig.secret.encode()
    parts = {b"206": secret[3:9]}
    body = parts.get(head[9:12], secret)

    async def reply(_head: bytes, _body: bytes, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await go.wait()
        writer.write(head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))

    rig.upstream.reply = reply
    rig.bound = False
    reader, writer = await rig.connect()
    writer.write(b"GET /open HTTP/1.1\r\nHost: good.test\r\nRange: bytes=3-8\r\n\r\n")
    await asked.wait()
    rig.bound = True
    go.set()
    answer = await read_all(reader)
    assert b"range: bytes=3-8" in rig.upstream.data.lower()
    assert shown in answer
    assert body not in answer
    writer.close()


@pytest.mark.parametrize("when", ["request", "answer"])
async def test_an_answer_of_which_it_is_not_known_what_to_keep_out_is_withheld(rig, when):
    rig.bound = when == "request"
    rig.broken_sought = True

    async def reply(_head: bytes, _body: bytes, writer: asyncio.StreamWriter) -> None:
        rig.bound = True
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(rig.secret), rig.secret.encode()))

    rig.upstream.reply = reply
    answer = await rig.exchange(GET % b"/open")
    assert answer.startswith(b"HTTP/1.1 503 " if when == "request" else b"HTTP/1.1 502 ")
    assert (0 if when == "request" else 1) == rig.dials
    assert rig.secret.encode() not in answer


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_an_answer_is_withheld_over_http2_too_and_its_connection_goes_on(rig, method):
    async def reply(head: bytes, _body: bytes, writer: asyncio.StreamWriter) -> None:
        charset = b"utf-7" if b"/v1" in head else b"utf-8"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=%s\r\nContent-Length: 4\r\n\r\n" % charset)
        if not head.startswith(b"HEAD"):
            writer.write(b"text")

    rig.upstream.reply = reply
    async with httpx.AsyncClient(http1=False, http2=True, verify=rig.only_h2()) as client:
        answers = [
            await client.request(
                method,
                f"https://127.0.0.1:{rig.port}{path}",
                headers={"host": "good.test"},
                extensions={"sni_hostname": "good.test"},
            )
            for path in ("/v1", "/open", "/v1", "/open")
        ]
    assert [502, 200, 502, 200] == [answer.status_code for answer in answers]
    texts = ["The answer was withheld: a response in this charset cannot be searched for secrets.\n", "text"]
    assert (
        ["", ""] * 2 == [answer.text for answer in answers]
        if method == "HEAD"
        else texts * 2 == [answer.text for answer in answers]
    )


async def test_a_host_without_a_binding_is_asked_nothing_about(rig):
    rig.bound = False
    rig.broken_sought = True
    assert (await rig.exchange(GET % b"/open")).startswith(b"HTTP/1.1 200 ")


async def test_an_answer_that_began_before_its_host_could_be_sent_a_secret_is_cut(rig):
    async def endless(_head, _body, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nhello\n\r\n")
        await writer.drain()
        await asyncio.Event().wait()

    rig.upstream.reply = endless
    rig.bound = False
    reader, writer = await rig.connect()
    writer.write(GET % b"/open")
    await reader.readuntil(b"hello")
    assert 0 == rig.engine.recheck()
    rig.bound = True
    assert 1 == rig.engine.recheck()
    assert b"" == (await rest(reader)).strip()
    writer.close()


@pytest.mark.parametrize(
    ("name", "encode"),
    [("gzip", gzip.compress), ("br", brotli.compress), ("zstd", zstandard.ZstdCompressor().compress)],
)
async def test_an_encoded_reflection_is_decoded_and_taken_out(rig, name, encode):
    body = encode(b"before " + rig.secret.encode() + b" after")

    async def reflect(_head, _body, writer):
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Encoding: %s\r\nContent-Length: %d\r\n\r\n" % (name.encode(), len(body))
        )
        writer.write(body)

    rig.upstream.reply = reflect
    answer = await rig.exchange(GET % b"/v1")
    assert answer.endswith(b"before " + b"*" * len(rig.secret) + b" after")
    assert b"content-encoding" not in answer.lower()


@pytest.mark.parametrize(
    ("encoding", "encode"),
    [
        (b"gzip", lambda: gzip.compress(bytes(64 * 1024 * 1024))),
        (b"gzip", lambda: gzip.compress(b"cut off")[:-4]),
        (b"br", lambda: brotli.compress(bytes(64 * 1024 * 1024))),
        (b"zstd", lambda: zstandard.ZstdCompressor().compress(bytes(64 * 1024 * 1024))),
        (b"zstd", lambda: zstandard.ZstdCompressor().compress(b"cut off")[:-4]),
        (b"rot13", lambda: b"frperg"),
        (b"gzip, gzip, gzip", lambda: b"x"),
    ],
    ids=["bomb", "truncated", "br-bomb", "zstd-bomb", "zstd-truncated", "unknown", "layers"],
)
async def test_what_cannot_be_decoded_is_a_502(rig, encoding, encode):
    body = encode()

    async def reflect(_head, _body, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: %s\r\nContent-Length: %d\r\n\r\n" % (encoding, len(body)))
        writer.write(body)

    rig.upstream.reply = reflect
    answer = await rig.exchange(GET % b"/v1")
    assert answer.startswith(b"HTTP/1.1 502 ")


async def test_a_response_cut_inside_the_secret_shows_no_part_of_it(rig):
    async def cut(_head, _body, writer):
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nvalue=" + rig.secret.encode()[:-2])
        writer.close()

    rig.upstream.reply = cut
    answer = await rig.exchange(GET % b"/v1")
    assert b"value=" in answer
    assert rig.secret.encode()[:6] not in answer


async def test_a_denied_path_is_a_403_and_the_server_hears_nothing(rig):
    answer = await rig.exchange(b"GET /denied/x?q=1 HTTP/1.1\r\nHost: good.test\r\nAccept: application/json\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 403 Forbidden\r\n")
    told = json.loads(body)
    assert ("no-denied", "this path is closed") == (told["rule"], told["reason"])
    assert "GET https://good.test/denied/x" == told["request"]
    assert (0, b"") == (rig.dials, rig.upstream.data)
    assert [("request", "deny")] == rig.audit.kinds()


async def test_a_denied_upload_is_answered_before_its_body_and_the_connection_lives_on(rig):
    reader, writer = await rig.connect()
    writer.write(b"POST /denied HTTP/1.1\r\nHost: good.test\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 403 ")
    body = await reader.readuntil(b"https://good.test/denied\n")
    assert b"no-denied" in body
    writer.write(b"12345" + GET % b"/v1")
    assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
    assert 1 == rig.upstream.requests
    writer.close()


@pytest.mark.parametrize("host", [b"other.test", b"evil.test", b"good.test:8443", b"good.test.evil.test"])
async def test_a_host_that_is_not_the_server_name_is_a_421(rig, host):
    answer = await rig.exchange(b"GET /v1 HTTP/1.1\r\nHost: %s\r\n\r\n" % host)
    assert answer.startswith(b"HTTP/1.1 421 ")
    assert (0, b"") == (rig.dials, rig.upstream.data)
    assert [("request", "deny")] == rig.audit.kinds()


async def test_a_later_request_for_another_host_is_refused(rig):
    reader, writer = await rig.connect()
    writer.write(GET % b"/v1")
    assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
    writer.write(b"GET /v1 HTTP/1.1\r\nHost: evil.test\r\n\r\n")
    assert (await read_to_end(reader)).startswith(b"HTTP/1.1 421 ")
    assert 1 == rig.upstream.requests
    writer.close()


async def read_to_end(reader):
    async with asyncio.timeout(30):
        return await reader.read()


POST = b"POST /v1 HTTP/1.1\r\nHost: good.test\r\n"
SMUGGLING = {
    "cl.te": POST + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG",
    "te.te": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n",
    "te-case": b"POST /v1 HTTP/1.1\r\nHost: good.test\r\nTransfer-Encoding: Chunked\r\n\r\n0\r\n\r\n",
    "te-tab": b"POST /v1 HTTP/1.1\r\nHost: good.test\r\nTransfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    "te-underscore": b"POST /v1 HTTP/1.1\r\nHost: good.test\r\nTransfer_Encoding: chunked\r\n\r\n",
    "te-10": b"POST /v1 HTTP/1.0\r\nHost: good.test\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "cl-twice": b"POST /v1 HTTP/1.1\r\nHost: good.test\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx",
    "cl-plus": b"POST /v1 HTTP/1.1\r\nHost: good.test\r\nContent-Length: +1\r\n\r\nx",
    "host-twice": b"GET /v1 HTTP/1.1\r\nHost: good.test\r\nHost: good.test\r\n\r\n",
    "no-host": b"GET /v1 HTTP/1.1\r\n\r\n",
    "fold": b"GET /v1 HTTP/1.1\r\nHost: good.test\r\nX: a\r\n b\r\n\r\n",
    "lf": b"GET /v1 HTTP/1.1\nHost: good.test\n\n",
    "cr": b"GET /v1 HTTP/1.1\r\nHost: good.test\r\nX: a\rb\r\n\r\n",
    "nul": b"GET /v1 HTTP/1.1\r\nHost: good.test\r\nX: a\0b\r\n\r\n",
    "name-space": b"GET /v1 HTTP/1.1\r\nHost : good.test\r\n\r\n",
    "blank-first": b"\r\nGET /v1 HTTP/1.1\r\nHost: good.test\r\n\r\n",
    "version": b"GET /v1 HTTP/1.2\r\nHost: good.test\r\n\r\n",
    "http09": b"GET /v1\r\n\r\n",
    "connect": b"CONNECT good.test:443 HTTP/1.1\r\nHost: good.test:443\r\n\r\n",
    "trace": b"TRACE /v1 HTTP/1.1\r\nHost: good.test\r\n\r\n",
    "asterisk": b"OPTIONS * HTTP/1.1\r\nHost: good.test\r\n\r\n",
    "absolute-evil": b"GET https://evil.test/ HTTP/1.1\r\nHost: good.test\r\n\r\n",
    "absolute-http": b"GET http://good.test/ HTTP/1.1\r\nHost: good.test\r\n\r\n",
    "h2c": b"GET /v1 HTTP/1.1\r\nHost: good.test\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
    "preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "expect": b"GET /v1 HTTP/1.1\r\nHost: good.test\r\nExpect: xyz\r\n\r\n",
    "huge": b"GET /v1 HTTP/1.1\r\nHost: good.test\r\nX: " + b"a" * 70000 + b"\r\n\r\n",
    "many": b"GET /v1 HTTP/1.1\r\nHost: good.test\r\n" + b"X: a\r\n" * 200 + b"\r\n",
}


@pytest.mark.parametrize("raw", SMUGGLING.values(), ids=SMUGGLING.keys())
async def test_a_request_that_can_be_read_in_two_ways_is_refused(rig, raw):
    answer = await rig.exchange(raw)
    assert answer.startswith((b"HTTP/1.1 4", b"")) and b" 200 " not in answer.split(b"\r\n")[0]
    assert (0, b"") == (rig.dials, rig.upstream.data)
    assert ("request", "deny") in rig.audit.kinds()


async def test_chunked_bodies_are_framed_again_without_trailers(rig):
    raw = (
        b"POST /v1 HTTP/1.1\r\nHost: good.test\r\nTransfer-Encoding: chunked\r\nTrailer: X-T\r\n\r\n"
        b"3;ext=1\r\nabc\r\n02\r\nde\r\n0\r\nX-T: 1\r\nAuthorization: evil\r\n\r\n"
    )
    answer = await rig.exchange(raw)
    assert answer.endswith(b"ok")
    sent = rig.upstream.data.partition(b"\r\n\r\n")[2]
    assert sent in (b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", b"5\r\nabcde\r\n0\r\n\r\n")
    assert b"evil" not in rig.upstream.data


async def test_pipelined_requests_are_judged_one_by_one(rig):
    answer = await rig.exchange(GET % b"/v1/1" + GET % b"/denied" + GET % b"/v1/2")
    assert [b"200", b"403", b"200"] == [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert 2 == rig.upstream.requests
    assert b"/denied" not in rig.upstream.data


@pytest.mark.parametrize("case", ["self-signed", "wrong-name", "expired", "future", "other-root", "wildcard", "plain"])
async def test_a_server_that_cannot_be_verified_gets_no_http(lab, case):
    leaves = {
        "wrong-name": lambda: lab.upstream_root.leaf("evil.test"),
        "expired": lambda: lab.upstream_root.leaf("good.test", since=-3 * DAY, until=-DAY),
        "future": lambda: lab.upstream_root.leaf("good.test", since=DAY, until=3 * DAY),
        "other-root": lambda: lab.stranger("Other").leaf("good.test"),
        "wildcard": lambda: lab.upstream_root.leaf("*.test"),
        "self-signed": lambda: lab.stranger("good.test"),
    }
    context = None if case == "plain" else lab.tls(leaves[case]())
    async with lab.running(context, EngineLimits(handshake_seconds=2 if case == "plain" else 30)) as rig:
        answer = await rig.exchange(GET % b"/v1")
    assert answer.startswith(b"HTTP/1.1 502 Bad Gateway\r\n")
    assert b"ertif" not in answer and b"mitm" not in answer.lower() and b"127.0.0.1" not in answer
    assert 1 == rig.dials
    assert b"" == rig.upstream.data


def certificate(issuer, *, names=(), common_name="good.test", usage=ExtendedKeyUsageOID.SERVER_AUTH, **other):
    """Return a certificate of `issuer` (None: self-signed) that `Authority.leaf` would not make."""
    key = other.get("key") or ec.generate_private_key(ec.SECP256R1())
    signer = issuer.key if issuer else key
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
        .issuer_name(issuer.certificate.subject if issuer else x509.Name([]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime.now(datetime.UTC) - DAY)
        .not_valid_after(datetime.datetime.now(datetime.UTC) + DAY)
        .add_extension(x509.BasicConstraints(ca=other.get("ca", False), path_length=None), critical=True)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if not other.get("ca"):
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    if other.get("only"):
        limits = x509.NameConstraints([x509.DNSName(other["only"])], None)
        builder = builder.add_extension(limits, critical=True)
    return Authority(builder.sign(signer, hashes.SHA256()), key)


def _below(lab, **of_the_middle):
    """Return the leaf and the intermediate of a chain below the trusted root."""
    middle = certificate(lab.upstream_root, common_name="Middle", **of_the_middle)
    return certificate(middle, names=[GOOD]), middle


def _over_sha1(lab):
    leaf = certificate(lab.upstream_root, names=[GOOD])
    again = crypto.X509.from_cryptography(leaf.certificate)
    again.sign(crypto.PKey.from_cryptography_key(lab.upstream_root.key), "sha1")
    return Authority(again.to_cryptography(), leaf.key)


GOOD = x509.DNSName("good.test")
BAD_CHAINS = {
    "only a common name": lambda lab: (certificate(lab.upstream_root),),
    "part of a label": lambda lab: (certificate(lab.upstream_root, names=[x509.DNSName("g*.test")]),),
    "NUL in the name": lambda lab: (certificate(lab.upstream_root, names=[x509.DNSName("good.test\0.evil.test")]),),
    "an address": lambda lab: (
        certificate(lab.upstream_root, names=[x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
    ),
    "for clients": lambda lab: (certificate(lab.upstream_root, names=[GOOD], usage=ExtendedKeyUsageOID.CLIENT_AUTH),),
    "below an authority for other names": lambda lab: _below(lab, ca=True, only="evil.test"),
    "below what is no authority": lambda lab: _below(lab, names=[x509.DNSName("evil.test")]),
    "without its intermediate": lambda lab: _below(lab, ca=True)[:1],
    "a key of 1024 bits": lambda lab: (
        certificate(lab.upstream_root, names=[GOOD], key=rsa.generate_private_key(65537, 1024)),  # noqa: S505
    ),
    "signed over SHA-1": lambda lab: (_over_sha1(lab),),
    "a chain of two megabytes": lambda lab: (
        certificate(lab.upstream_root, names=[GOOD]),
        *[certificate(lab.upstream_root, names=[x509.DNSName(f"{n}.{'a' * 50}.test") for n in range(9000)])] * 4,
    ),
}


@pytest.mark.parametrize("case", BAD_CHAINS)
async def test_a_chain_that_is_not_the_hosts_own_gets_no_http(case, lab):
    chain = BAD_CHAINS[case](lab)
    async with lab.running(served(lab, chain)) as rig:
        answer = await rig.exchange(GET % b"/v1")
    assert answer.startswith(b"HTTP/1.1 502 Bad Gateway\r\n")
    assert (1, b"") == (rig.dials, rig.upstream.data)


async def test_a_chain_over_an_intermediate_is_the_hosts_own(lab):
    """A control for the tests above."""
    async with lab.running(served(lab, _below(lab, ca=True, only="test"))) as rig:
        assert (await rig.exchange(GET % b"/v1")).startswith(b"HTTP/1.1 200 ")


def served(lab, chain):
    path = lab.directory / "chain.pem"
    path.write_text("".join(one.pem for one in chain) + chain[0].key_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.load_cert_chain(path)
    return context


async def test_a_server_without_forward_secrecy_is_refused(lab):
    key = rsa.generate_private_key(65537, 2048)
    context = served(lab, (certificate(lab.upstream_root, names=[GOOD], key=key),))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("AES256-GCM-SHA384")
    async with lab.running(context) as rig:
        assert (await rig.exchange(GET % b"/v1")).startswith(b"HTTP/1.1 502 ")
    assert b"" == rig.upstream.data


def handshake(rig, context, host, session=None):
    """Send one request on a new connection; return the answer, the session and whether it was resumed."""
    with (
        socket.create_connection(("127.0.0.1", rig.port), 10) as plain,
        context.wrap_socket(plain, server_hostname=host, session=session) as wrapped,
    ):
        wrapped.sendall(b"GET /open HTTP/1.1\r\nHost: %s\r\n\r\n" % host.encode())
        return wrapped.recv(100), wrapped.session, wrapped.session_reused


async def test_a_client_resumes_its_session_and_its_requests_are_judged_again(rig):
    context = rig.client_context("http/1.1")
    answer, session, reused = await asyncio.to_thread(handshake, rig, context, "good.test")
    assert (True, False) == (answer.startswith(b"HTTP/1.1 200 "), reused)

    answer, _, reused = await asyncio.to_thread(handshake, rig, context, "good.test", session)
    assert (True, True, 1) == (answer.startswith(b"HTTP/1.1 200 "), reused, rig.dials)

    rig.decide = lambda _facts: Deny("new", "closed")
    answer, _, reused = await asyncio.to_thread(handshake, rig, context, "good.test", session)
    assert (True, True, 1) == (answer.startswith(b"HTTP/1.1 403 "), reused, rig.dials)


async def test_a_session_is_not_resumed_for_another_host(rig):
    context = rig.client_context("http/1.1")
    context.check_hostname = False
    _, session, _ = await asyncio.to_thread(handshake, rig, context, "good.test")
    _, _, reused = await asyncio.to_thread(handshake, rig, context, "other.test", session)
    assert not reused


async def test_no_session_of_tls_1_2_is_resumed(rig):
    context = rig.client_context("http/1.1")
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    _, session, _ = await asyncio.to_thread(handshake, rig, context, "good.test")
    answer, _, reused = await asyncio.to_thread(handshake, rig, context, "good.test", session)
    assert (True, False) == (answer.startswith(b"HTTP/1.1 200 "), reused)


async def test_an_old_tls_version_upstream_is_refused(lab):
    context = lab.tls(lab.upstream_root.leaf("good.test"))
    with pytest.warns(DeprecationWarning):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
        context.minimum_version = ssl.TLSVersion.TLSv1
    context.set_ciphers("ALL:@SECLEVEL=0")
    async with lab.running(context) as rig:
        assert (await rig.exchange(GET % b"/v1")).startswith(b"HTTP/1.1 502 ")
    assert b"" == rig.upstream.data


async def test_a_decider_that_raises_closes_the_flow(rig):
    def broken(_facts):
        raise RuntimeError("no decision")

    rig.decide = broken
    assert b"" == await rig.exchange(GET % b"/v1")
    await asyncio.wait(rig.flows)
    assert (0, b"") == (rig.dials, rig.upstream.data)
    assert ("flow", "deny") in rig.audit.kinds()


async def test_a_decider_without_an_answer_closes_the_flow(rig):
    rig.decide = lambda _facts: None
    assert b"" == await rig.exchange(GET % b"/v1")
    assert (0, b"") == (rig.dials, rig.upstream.data)


@pytest.mark.parametrize("failing", ["request", "secret.use"])
async def test_without_the_log_nothing_leaves(rig, failing):
    rig.audit.failing = frozenset({failing})
    assert (await rig.exchange(GET % b"/v1")).startswith(b"HTTP/1.1 503 ")
    assert (0, b"") == (rig.dials, rig.upstream.data)


async def test_without_the_vault_nothing_leaves_but_other_requests_do(rig):
    rig.broken_lease = True
    answer = await rig.exchange(GET % b"/v1" + GET % b"/open")
    assert [b"503", b"200"] == [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert b"credential proxy unavailable" in answer
    assert 1 == rig.upstream.requests


async def test_each_request_asks_for_its_secret_with_its_own_method_and_path(rig):
    """Also on one connection: a secret that is bound to one path is denied to the next."""
    rig.refuse_lease = lambda facts: None if facts.path == "/v1/in" else "the secret is not bound to this path"
    post = b"POST /v1/out?q=1 HTTP/1.1\r\nHost: good.test\r\nContent-Length: 0\r\n\r\n"
    answer = await rig.exchange(GET % b"/v1/in" + post + GET % b"/v1/in")
    assert [b"200", b"403", b"200"] == [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert b"Denied by policy rule api: the secret is not bound to this path\n" in answer
    assert [("GET", "/v1/in"), ("POST", "/v1/out"), ("GET", "/v1/in")] == [
        (facts.method, facts.path) for facts in rig.leased
    ]
    assert 2 == rig.upstream.requests
    assert b"/v1/out" not in rig.upstream.data
    (denied,) = [fields for kind, decision, fields in rig.audit.records if (kind, decision) == ("request", "deny")]
    assert ("api", "the secret is not bound to this path", "api-token", "/v1/out") == tuple(
        denied[key] for key in ("rule", "reason", "secret", "path")
    )


@pytest.mark.parametrize(("secret", "status"), [("7-chars", b"403"), ("8-chars!", b"200")])
async def test_a_secret_too_short_to_be_scrubbed_is_not_sent_and_the_answer_says_why(rig, secret, status):
    rig.secret = secret
    answer = await rig.exchange(GET % b"/v1")
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert (status == b"403") == (b"the secret is shorter than 8 characters" in answer)
    assert (status == b"200") == (secret.encode() in rig.upstream.data)
    assert (status == b"403") == (("request", "deny") in rig.audit.kinds())


async def test_one_request_too_many_is_a_429_that_says_when_to_come_back(rig):
    rig.over = Over("more than 60 requests in a minute", 7)
    answer = await rig.exchange(GET % b"/open")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
    assert b"\r\nretry-after: 7" in head
    assert b"more than 60 requests in a minute" in body
    assert (0, b"") == (rig.dials, rig.upstream.data)
    (fields,) = [fields for kind, decision, fields in rig.audit.records if (kind, decision) == ("request", "deny")]
    assert ("limits", "more than 60 requests in a minute") == (fields["rule"], fields["reason"])
    rig.over = None
    assert (await rig.exchange(GET % b"/open")).startswith(b"HTTP/1.1 200 ")


async def test_where_waiting_is_no_use_the_answer_is_a_403(rig):
    rig.over = Over("the sandbox has sent as many bytes as its policy allows", None)
    answer = await rig.exchange(GET % b"/open")
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b"Denied by policy rule limits: the sandbox has sent as many bytes" in answer
    assert (0, [("request", "deny")]) == (rig.dials, rig.audit.kinds())


async def test_a_value_that_would_split_a_header_is_not_sent(rig):
    rig.secret = "good\r\nHost: evil.test"
    assert (await rig.exchange(GET % b"/v1")).startswith(b"HTTP/1.1 503 ")
    assert (0, b"") == (rig.dials, rig.upstream.data)


async def test_a_basic_login_is_taken_out_in_all_its_forms(rig):
    rig.plan = InjectionPlan("git", "git-login", InjectionKind.BASIC, "Authorization")
    rig.secret = "user:pass-word/123"

    async def reflect(head, _body, writer):
        sent = head.partition(b"Authorization: Basic ")[2].partition(b"\r\n")[0]
        text = sent + b" " + base64.b64decode(sent) + b" pass-word/123"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))

    rig.upstream.reply = reflect
    answer = await rig.exchange(GET % b"/v1")
    assert b"Basic " + base64.b64encode(rig.secret.encode()) in rig.upstream.data
    assert b"pass" not in answer and b"dXNlcjpwYXNz" not in answer


async def test_a_client_that_only_speaks_http2_is_served(rig):
    async with httpx.AsyncClient(http1=False, http2=True, verify=rig.only_h2()) as client:
        answers = [
            await client.request(
                method,
                f"https://127.0.0.1:{rig.port}{path}",
                headers={"host": "good.test", "te": "trailers"},
                content=body,
                extensions={"sni_hostname": "good.test"},
            )
            for method, path, body in [("GET", "/v1", b""), ("POST", "/v1", b"12345"), ("GET", "/denied", b"")]
        ]
    assert [("HTTP/2", 200), ("HTTP/2", 200), ("HTTP/2", 403)] == [
        (one.http_version, one.status_code) for one in answers
    ]
    assert 2 == rig.upstream.data.count(b"Authorization: Bearer " + rig.secret.encode())
    assert rig.upstream.data.endswith(b"12345")


async def test_an_http2_body_of_unknown_length_is_framed_for_the_server(rig):
    async def parts():
        yield b"abc"
        yield b"GET /smuggled HTTP/1.1\r\nHost: good.test\r\n\r\n"

    async with httpx.AsyncClient(http1=False, http2=True, verify=rig.only_h2()) as client:
        answer = await client.post(
            f"https://127.0.0.1:{rig.port}/v1",
            headers={"host": "good.test"},
            content=parts(),
            extensions={"sni_hostname": "good.test"},
        )
    assert 200 == answer.status_code
    assert {("POST", "/v1")} == {(facts.method, facts.path) for facts in rig.facts}
    assert b"Transfer-Encoding: chunked\r\n" in rig.upstream.data
    assert b"3\r\nabc\r\n" in rig.upstream.data


async def test_an_http2_authority_of_another_host_is_refused(rig):
    async with httpx.AsyncClient(http1=False, http2=True, verify=rig.only_h2()) as client:
        answer = await client.get(
            f"https://127.0.0.1:{rig.port}/v1",
            headers={"host": "evil.test"},
            extensions={"sni_hostname": "good.test"},
        )
    assert 421 == answer.status_code
    assert (0, b"") == (rig.dials, rig.upstream.data)


async def test_http_1_is_chosen_where_a_client_offers_both(rig):
    _, writer = await rig.connect(alpn=("h2", "http/1.1"))
    assert "http/1.1" == writer.get_extra_info("ssl_object").selected_alpn_protocol()
    writer.close()


async def test_a_client_that_offers_no_http_is_closed(rig):
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await rig.connect(alpn=("ftp",))
    assert 0 == rig.dials


async def test_curl_is_served(rig, tmp_path):
    bundle = tmp_path / "bundle.pem"
    bundle.write_text(rig.sandbox_root.pem)
    process = await asyncio.create_subprocess_exec(
        *("curl", "-sS", "-i", "--cacert", str(bundle), "--connect-to", f"good.test:443:127.0.0.1:{rig.port}"),
        *("-H", "Authorization: Bearer placeholder", "-d", "x=1", "https://good.test/v1"),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert 0 == process.returncode
    assert out.endswith(b"ok")
    assert b"placeholder" not in rig.upstream.data


async def test_informational_answers_do_not_take_the_place_of_the_final_one(rig):
    async def early(_head, _body, writer):
        writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    rig.upstream.reply = early
    answer = await rig.exchange(GET % b"/v1")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and answer.endswith(b"ok")


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\nraw",
        b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100,
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000,
        b"nonsense\r\n\r\n",
    ],
    ids=["cl-te", "coding", "101", "many-1xx", "huge", "nonsense"],
)
async def test_a_response_that_cannot_be_trusted_is_not_passed_on(rig, raw):
    async def reply(_head, _body, writer):
        writer.write(raw)

    rig.upstream.reply = reply
    answer = await rig.exchange(GET % b"/v1")
    assert answer.startswith(b"HTTP/1.1 502 ") or answer == b""


async def test_a_second_response_reaches_no_client(rig):
    async def twice(_head, _body, writer):
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
        )

    rig.upstream.reply = twice
    answer = await rig.exchange(GET % b"/v1/1" + GET % b"/v1/2")
    assert b"evil" not in answer
    assert 2 == len(rig.upstream.received)


async def test_redirects_are_passed_on_and_not_followed(rig):
    async def redirect(_head, _body, writer):
        writer.write(
            b"HTTP/1.1 302 Found\r\nLocation: https://evil.test/?t=%s\r\nContent-Length: 0\r\n\r\n"
            % rig.secret.encode()
        )

    rig.upstream.reply = redirect
    answer = await rig.exchange(GET % b"/v1")
    assert b"Location: https://evil.test/?t=[REDACTED]\r\n" in answer
    assert 1 == rig.dials


WEBSOCKET = (
    b"GET %s HTTP/1.1\r\nHost: good.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


async def accept_websocket(_head, _body, writer):
    writer.write(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\nserver-frame"
    )


async def test_a_websocket_is_relayed_where_no_secret_is_used(rig):
    rig.bound = False
    rig.upstream.reply = accept_websocket
    answer = await rig.exchange(WEBSOCKET % b"/open")
    assert answer.startswith(b"HTTP/1.1 101 ") and answer.endswith(b"server-frame")


async def test_a_wrong_accept_value_opens_no_tunnel(rig):
    rig.bound = False

    async def wrong(_head, _body, writer):
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: AAAAAAAAAAAAAAAAAAAAAAAAAAA=\r\n\r\ntunnel"
        )

    rig.upstream.reply = wrong
    assert b"" == await rig.exchange(WEBSOCKET % b"/open")


async def test_plain_http_is_inspected_too(lab):
    async with lab.running(None, scheme=Scheme.HTTP) as rig:
        rig.decide = lambda facts: Deny("r", "no") if facts.path == "/denied" else AllowRequest("r")
        answer = await rig.exchange(GET % b"/a" + GET % b"/denied" + b"GET / HTTP/1.1\r\nHost: mitm.it\r\n\r\n")
    assert [b"200", b"403", b"421"] == [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert 1 == rig.upstream.requests


H2C = (
    b"GET %s HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nHost: good.test\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n\r\n"
)


@pytest.mark.parametrize("agrees", [False, True])
async def test_an_offer_to_go_on_in_http2_opens_no_tunnel(agrees, lab):
    async def reply(_head, _body, writer):
        if agrees:
            writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\ntunnel")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with lab.running(None, scheme=Scheme.HTTP) as rig:
        rig.decide = lambda facts: Deny("r", "no") if facts.path == "/denied" else AllowRequest("r")
        rig.upstream.reply = reply
        answer = await rig.exchange(H2C % b"/open" + GET % b"/denied")
    assert ([] if agrees else [b"200", b"403"]) == [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert b"tunnel" not in answer
    assert b"GET /open HTTP/1.1\r\nHost: good.test\r\n\r\n" == rig.upstream.data


def resident() -> int:
    """Return the bytes of memory of this process: engine, server and client together."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def test_large_bodies_pass_in_both_directions_at_constant_memory(rig):
    size = 50 * 1024 * 1024
    chunk = bytes(65536)

    await rig.exchange(GET % b"/v1")

    async def big(_head, _body, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(size // len(chunk)):
            writer.write(chunk)
            await writer.drain()

    rig.upstream.reply = big
    rig.upstream.keep = False
    before = peak = resident()
    reader, writer = await rig.connect()
    writer.write(b"POST /v1 HTTP/1.1\r\nHost: good.test\r\nContent-Length: %d\r\n\r\n" % size)
    for _ in range(size // len(chunk)):
        writer.write(chunk)
        await writer.drain()
        peak = max(peak, resident())
    head = await reader.readuntil(b"\r\n\r\n")
    received = 0
    while received < size:
        received += len(await reader.read(1 << 20))
        peak = max(peak, resident())
    writer.close()
    assert head.startswith(b"HTTP/1.1 200 ")
    assert size == received
    assert size in rig.upstream.bodies
    assert peak - before < 16 * 1024 * 1024


async def test_revoking_a_secret_cuts_the_flows_that_used_it(rig):
    reader, writer = await rig.connect()
    writer.write(GET % b"/v1")
    await reader.readuntil(b"ok")
    assert 0 == rig.engine.revoke(frozenset({"other"}))
    assert 1 == rig.engine.revoke(frozenset({"api-token"}))
    assert b"" == await rest(reader)
    writer.close()


async def test_tightening_the_policy_cuts_requests_in_progress(rig):
    rig.bound = False
    started = asyncio.Event()

    async def endless(_head, _body, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await writer.drain()
        started.set()
        await asyncio.Event().wait()

    rig.upstream.reply = endless
    reader, writer = await rig.connect()
    writer.write(GET % b"/open")
    await reader.readuntil(b"hello")
    assert 0 == rig.engine.recheck()
    rig.decide = lambda _facts: Deny("new", "closed")
    assert 1 == rig.engine.recheck()
    assert b"" == (await rest(reader)).removeprefix(b"\r\n")
    writer.close()


async def rest(reader):
    try:
        async with asyncio.timeout(30):
            return await reader.read()
    except OSError:
        return b""


async def test_flows_over_the_limit_and_silent_handshakes_are_closed(lab):
    context = lab.tls(lab.upstream_root.leaf("good.test"))
    async with lab.running(context, EngineLimits(flows=1, handshake_seconds=0.3)) as rig:
        silent_reader, silent = await asyncio.open_connection("127.0.0.1", rig.port)
        silent.write(client_hello("good.test"))
        await silent_reader.readexactly(1)  # the engine now serves the flow
        with pytest.raises((OSError, ssl.SSLError)):
            await rig.connect()
        async with asyncio.timeout(30):
            try:
                while await silent_reader.read(65536):
                    pass
            except ConnectionError:
                pass
        silent.close()


def client_hello(host):
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname=host)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


async def test_events_arrive_one_by_one_and_a_secret_split_over_two_is_taken_out(rig):
    go_on = asyncio.Event()
    secret = rig.secret.encode()

    async def events(_head, _body, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for part in (b"data: one\n\n", b"data: " + secret[:7], secret[7:] + b"\n\n"):
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
            if part.startswith(b"data: one"):
                await go_on.wait()
        writer.write(b"0\r\n\r\n")

    rig.upstream.reply = events
    reader, writer = await rig.connect()
    writer.write(GET % b"/v1")
    async with asyncio.timeout(30):
        assert (await reader.readuntil(b"data: one\n\n")).startswith(b"HTTP/1.1 200 ")
        go_on.set()
        rest_of_it = await reader.readuntil(b"0\r\n\r\n")
    assert len(secret) == rest_of_it.count(b"*")
    assert secret[:7] not in rest_of_it and secret[7:] not in rest_of_it
    writer.close()


async def test_a_flood_of_resets_ends_the_connection(rig):
    reader, writer, client = await rig.speak_h2()
    fields = [(":method", "GET"), (":scheme", "https"), (":authority", "good.test"), (":path", "/v1")]
    for number in range(400):
        stream = 1 + 2 * number
        client.send_headers(stream, fields, end_stream=True)
        client.reset_stream(stream)
    writer.write(client.data_to_send())
    await rest(reader)
    assert reader.at_eof() or reader.exception() is not None
    await asyncio.wait(rig.flows)
    assert len(rig.facts) <= 220
    writer.close()


@pytest.mark.parametrize("scheme", ["http", "ftp"])
async def test_an_http2_scheme_that_is_not_the_connections_is_refused(rig, scheme):
    reader, writer, client = await rig.speak_h2()
    client.send_headers(
        1, [(":method", "GET"), (":scheme", scheme), (":authority", "good.test"), (":path", "/v1")], True
    )
    writer.write(client.data_to_send())
    await rest(reader)
    assert (0, b"") == (rig.dials, rig.upstream.data)
    assert [] == rig.facts
    denied = [fields["rule"] for kind, decision, fields in rig.audit.records if (kind, decision) == ("request", "deny")]
    assert ["protocol"] == denied
    writer.close()


async def test_a_denied_head_request_leaves_the_connection_in_step(rig):
    answer = await rig.exchange(b"HEAD /denied HTTP/1.1\r\nHost: good.test\r\n\r\n" + GET % b"/v1")
    first, second = answer.split(b"\r\n\r\n", 1)
    assert first.startswith(b"HTTP/1.1 403 ")
    assert second.startswith(b"HTTP/1.1 200 ")


async def test_a_decision_that_is_void_by_the_time_the_secret_is_there_is_not_carried_out(rig):
    answers = iter([AllowRequest("api", (rig.plan,)), Deny("new", "closed")])
    rig.decide = lambda _facts: next(answers)
    assert (await rig.exchange(GET % b"/v1")).startswith(b"HTTP/1.1 403 ")
    assert (0, b"") == (rig.dials, rig.upstream.data)
