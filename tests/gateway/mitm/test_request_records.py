"""The records name each place separately, and exist before the first byte of a request is sent upstream."""

import asyncio
from dataclasses import replace

import pytest
from cryptography import x509
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.admission import Admission
from gateway.tls.contexts import certified
from gateway.translate import Refused, RequestParts, translate
from policy.decision import AllowRequest
from policy.facts import FlowFacts, Scheme
from tests.gateway.mitm.conftest import Authority, Lab, Rig

HOST = "a.good.test"
DESTINATION = "203.0.113.9"  # the sandbox's original destination
ADDRESS = "127.0.0.1"


def wildcard(root: Authority) -> Authority:
    """Return a certificate that names the host by a wildcard, among other names."""
    return root.leaf("*.good.test")


def said(rig: Rig, upto: int) -> dict[str, set[tuple[object, ...]]]:
    """Return host, destination, address and verified name in the first records, by request."""
    found: dict[str, set[tuple[object, ...]]] = {}
    for kind, decision, fields in rig.audit.records[:upto]:
        if kind in ("request", "connect") and (kind, decision) != ("request", "info") and "address" in fields:
            where = tuple(fields.get(name) for name in ("host", "destination", "address", "peer_name"))
            found.setdefault(str(fields["request_id"]), set()).add(where)
    return found


@pytest.mark.parametrize("scheme", [Scheme.HTTPS, Scheme.HTTP])
@pytest.mark.parametrize("closing", [False, True], ids=["kept", "closed by the server"])
async def test_every_request_is_on_a_recorded_connection_before_its_first_byte(
    lab: Lab, scheme: Scheme, closing: bool
) -> None:
    """The first request of a connection, one on a reused connection, and one for which a new connection is made."""
    context = lab.tls(wildcard(lab.upstream_root)) if scheme is Scheme.HTTPS else None
    async with lab.running(context, scheme=scheme) as rig:
        rig.decide = lambda _facts: AllowRequest("open")
        known: list[int] = []

        async def reply(_head: bytes, _body: bytes, writer: asyncio.StreamWriter) -> None:
            known.append(len(rig.audit.records))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            if closing:
                writer.close()

        rig.upstream.reply = reply
        reader, writer = await rig.connect(HOST)
        for number in range(3):
            writer.write(b"GET /%d HTTP/1.1\r\nHost: %s\r\n\r\n" % (number, HOST.encode()))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            await reader.readexactly(2)
        writer.close()

    assert 3 == len(known)
    name = "*.good.test" if scheme is Scheme.HTTPS else None
    for number, upto in enumerate(known, 1):
        found = said(rig, upto)
        assert number == len(found)
        assert {(HOST, DESTINATION, ADDRESS, name)} == set().union(*found.values())
    allows = [fields for kind, decision, fields in rig.audit.records if (kind, decision) == ("request", "allow")]
    kept = [fields for fields in allows if fields.get("address") == ADDRESS]
    assert (3, 0 if closing else 2) == (len(allows), len(kept))


async def test_without_the_record_of_its_connection_no_byte_of_a_request_is_sent(rig: Rig) -> None:
    rig.audit.failing = frozenset({"connect"})
    assert b"" == await rig.exchange(b"GET /open HTTP/1.1\r\nHost: good.test\r\n\r\n")
    assert (1, b"") == (rig.dials, rig.upstream.data)


@pytest.mark.parametrize(
    ("names", "host", "matched"),
    [
        (["a.test", "b.test"], "b.test", "b.test"),
        (["*.b.test"], "a.b.test", "*.b.test"),
        (["*.b.test", "a.b.test"], "a.b.test", "a.b.test"),
        (["B.test"], "b.test", "b.test"),
        (["*.b.test"], "b.test", None),
        (["*.b.test"], "a.a.b.test", None),
        (["a.test"], "b.test", None),
    ],
)
def test_the_verified_name_is_the_one_that_matched(names: list[str], host: str, matched: str | None) -> None:
    altnames = x509.GeneralNames([x509.DNSName(name) for name in names])
    if matched is None:
        with pytest.raises(ValueError):
            certified(altnames, host)
    else:
        assert matched == certified(altnames, host)


CLEAN = st.from_regex(r"[a-z]{1,10}(\.[a-z]{1,10}){1,3}", fullmatch=True)


@given(CLEAN, st.none() | st.integers(1, 65535), st.sampled_from(["host", "absolute", "authority"]))
def test_the_host_that_was_asked_for_instead_is_recorded(name: str, port: int | None, where: str) -> None:
    """For each place of a request that can name a host."""
    flow = FlowFacts("good.test", 443, Scheme.HTTPS)
    authority = (name if port is None else f"{name}:{port}").encode()
    own = b"good.test"
    version, target, pseudo, headers = 11, b"/", b"", ((b"Host", authority),)
    if where == "absolute":
        target, headers = b"https://" + authority + b"/", ((b"Host", own),)
    elif where == "authority":
        version, pseudo, headers = 20, authority, ()
    scheme = b"https" if where == "authority" else b""
    refused = translate(RequestParts(version, b"GET", target, scheme, pseudo, headers), flow)
    if (name, port or 443) == ("good.test", 443):
        assert not isinstance(refused, Refused)
    else:
        assert isinstance(refused, Refused)
        assert (421, authority.decode()) == (refused.status, refused.asked_host)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=40))
def test_what_is_no_clean_host_name_is_never_recorded(raw: bytes) -> None:
    """It can be a credential: `user:password@host`."""
    flow = FlowFacts("good.test", 443, Scheme.HTTPS)
    refused = translate(RequestParts(11, b"GET", b"/", b"", b"", ((b"Host", b"user:" + raw + b"@good.test"),)), flow)
    assert isinstance(refused, Refused)
    assert refused.asked_host is None


async def test_a_mismatch_is_in_the_log_with_what_was_asked(rig: Rig) -> None:
    """On a connection that was allowed for another host, after a request that was allowed."""
    requests = b"GET /open HTTP/1.1\r\nHost: good.test\r\n\r\nGET /open HTTP/1.1\r\nHost: Other.test:444\r\n\r\n"
    assert b"HTTP/1.1 421 " in await rig.exchange(requests)
    denied = [fields for kind, decision, fields in rig.audit.records if (kind, decision) == ("request", "deny")]
    assert [("good.test", "other.test:444", DESTINATION)] == [
        (fields["host"], fields["asked_host"], fields["destination"]) for fields in denied
    ]


async def test_an_overloaded_worker_turns_new_requests_away_and_ends_those_it_has(rig: Rig) -> None:
    """Once the first request has waited too long for the log, new requests are refused with Retry-After."""
    now = 0.0
    rig.engine._effects = replace(rig.engine._effects, admission=Admission(lambda: now))
    release, waiting = asyncio.Event(), asyncio.Event()
    accept = rig.audit.accept

    async def slow(kind: str, decision: str, **fields: object) -> None:
        if (kind, decision, fields.get("path")) == ("request", "allow", "/open/first"):
            waiting.set()
            await release.wait()
        await accept(kind, decision, **fields)

    rig.audit.accept = slow  # type: ignore[method-assign]
    request = b"GET /open/%s HTTP/1.1\r\nHost: good.test\r\nConnection: close\r\n\r\n"
    reader, writer = await rig.connect()
    writer.write(request % b"first")
    await waiting.wait()
    assert b"HTTP/1.1 200 " in await rig.exchange(request % b"second")
    now = 30.0
    refused = await rig.exchange(request % b"third")
    assert (True, True) == (refused.startswith(b"HTTP/1.1 503 "), b"\r\nretry-after: 30\r\n" in refused)
    release.set()
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    writer.close()
    assert b"HTTP/1.1 200 " in await rig.exchange(request % b"fourth")
    assert [("overload", "/open/third")] == [
        (fields["rule"], fields["path"]) for kind, decision, fields in rig.audit.records if decision == "deny"
    ]


def test_admission_has_a_bound_and_forgets_what_has_ended() -> None:
    now = 0.0
    admission = Admission(lambda: now)
    first = admission.begin()
    now = 9.9
    assert admission.retry_after() is None
    second = admission.begin()
    now = 10.0
    assert 10 == admission.retry_after()
    now = 1e9
    assert 60 == admission.retry_after()
    admission.end(first)
    admission.end(second)
    assert admission.retry_after() is None
