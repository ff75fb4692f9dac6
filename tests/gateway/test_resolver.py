"""The resolver accepts one answer: from the server it asked, with its id and question, and only the needed records."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dns.message import MalformedMessage, parse_answer
from gateway.dns.queries import Outcome, Upstream
from gateway.dns.resolver import Resolution, Resolver
from policy.decision import Deny

HOST = "good.example.com"
type Reply = Callable[[bytes], list[bytes]]


def name(text: str) -> bytes:
    return b"".join(bytes((len(part),)) + part.encode() for part in text.split(".")) + b"\0"


def record(owner: str, rtype: int, data: bytes, ttl: int = 60) -> bytes:
    return name(owner) + struct.pack("!HHIH", rtype, 1, ttl, len(data)) + data


def a(owner: str, address: str, ttl: int = 60) -> bytes:
    return record(owner, 1, socket.inet_aton(address), ttl)


def reply(query: bytes, *records: bytes, flags: int = 0x8180, ident: int = 0, question: bytes | None = None) -> bytes:
    asked = query[12 : query.index(b"\0", 12) + 5] if question is None else question
    number = struct.unpack("!H", query[:2])[0] ^ ident
    return struct.pack("!HHHHHH", number, flags, 1, len(records), 0, 0) + asked + b"".join(records)


@asynccontextmanager
async def server(answer: Reply, port: int = 0) -> AsyncIterator[tuple[Resolver, list[bytes]]]:
    queries: list[bytes] = []

    class Protocol(asyncio.DatagramProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
            queries.append(data)
            for item in answer(data):
                self.transport.sendto(item, addr)  # type: ignore[attr-defined]

    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(Protocol, ("127.0.0.1", port))
    host, port = transport.get_extra_info("sockname")
    try:
        yield Resolver((Upstream(IPv4Address(host), port),), lambda: 0.0), queries
    finally:
        transport.close()


async def resolve(answer: Reply) -> Resolution:
    async with server(answer) as (resolver, _):
        return await resolver.resolve(HOST)


def addresses(*texts: str) -> tuple[IPv4Address, ...]:
    return tuple(IPv4Address(text) for text in texts)


async def test_addresses_come_with_a_clamped_ttl() -> None:
    found = await resolve(lambda query: [reply(query, a(HOST, "93.184.216.34", 10**6), a(HOST, "93.184.216.35"))])
    assert Resolution(Outcome.ADDRESSES, addresses("93.184.216.34", "93.184.216.35"), 60) == found
    assert 5 == (await resolve(lambda query: [reply(query, a(HOST, "93.184.216.34", 0))])).ttl


async def test_answers_with_another_id_or_question_are_ignored() -> None:
    other = name("evil.example.com") + b"\0\1\0\1"
    found = await resolve(
        lambda query: [
            reply(query, a(HOST, "6.6.6.6"), ident=1),
            reply(query, a(HOST, "6.6.6.6"), question=other),
            reply(query, a(HOST, "6.6.6.6"), flags=0x0100),
            b"junk",
            reply(query, a(HOST, "93.184.216.34")),
        ]
    )
    assert addresses("93.184.216.34") == found.addresses


async def test_records_of_other_names_are_never_believed() -> None:
    found = await resolve(lambda query: [reply(query, a("evil.example.com", "6.6.6.6"))])
    assert Outcome.NODATA == found.outcome


async def test_a_cname_chain_is_followed_from_the_question_and_loops_fail() -> None:
    chain = [record(HOST, 5, name("x.example.com")), record("x.example.com", 5, name("y.example.net"))]
    found = await resolve(lambda query: [reply(query, *chain, a("y.example.net", "93.184.216.9"))])
    assert addresses("93.184.216.9") == found.addresses
    loop = [record(HOST, 5, name("x.example.com")), record("x.example.com", 5, name(HOST))]
    assert Outcome.FAILED == (await resolve(lambda query: [reply(query, *loop)])).outcome


async def test_an_endless_chain_over_many_answers_is_cut() -> None:
    count = iter(range(1000))
    async with server(
        lambda query: [
            struct.pack("!HHHHHH", struct.unpack("!H", query[:2])[0], 0x8180, 1, 1, 0, 0)
            + query[12 : query.index(b"\0", 12) + 5]
            + b"\xc0\x0c"
            + struct.pack("!HHIH", 5, 1, 60, len(name(f"n{(n := next(count))}.example.com")))
            + name(f"n{n}.example.com")
        ]
    ) as (resolver, queries):
        assert Outcome.FAILED == (await resolver.resolve(HOST)).outcome
        assert 8 == len(queries)


async def test_nxdomain_is_remembered_and_servfail_is_a_failure() -> None:
    async with server(lambda query: [reply(query, flags=0x8183)]) as (resolver, queries):
        assert [Outcome.NXDOMAIN] * 2 == [(await resolver.resolve(HOST)).outcome for _ in range(2)]
        assert 1 == len(queries)
    assert Outcome.FAILED == (await resolve(lambda query: [reply(query, flags=0x8182)])).outcome


async def test_equal_questions_at_once_share_one_query() -> None:
    async with server(lambda query: [reply(query, a(HOST, "93.184.216.34"))]) as (resolver, queries):
        found = await asyncio.gather(*(resolver.resolve(HOST) for _ in range(20)))
        assert {addresses("93.184.216.34")} == {item.addresses for item in found}
        assert 1 == len(queries)


async def test_without_permission_nothing_is_asked() -> None:
    resolver = Resolver((Upstream(IPv4Address("127.0.0.1"), 9),), lambda: 0.0, lambda: False)
    assert Outcome.FAILED == (await resolver.resolve(HOST)).outcome


async def test_for_a_name_that_may_not_be_asked_no_query_leaves() -> None:
    async with server(lambda query: [reply(query, a(HOST, "93.184.216.34"))]) as (resolver, queries):
        denied = Deny("dns.entropy", "A label of this name looks like data.")
        resolver._may_ask = lambda host: None if host == HOST else denied

        assert Resolution(Outcome.FAILED, denied=denied) == await resolver.resolve("x.example.com")
        assert addresses("93.184.216.34") == (await resolver.resolve(HOST)).addresses
        assert 1 == len(queries)


class Held:
    """A server that answers when it is released, and reports that it was asked."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.release = asyncio.Event()


@asynccontextmanager
async def held(address: str) -> AsyncIterator[tuple[Upstream, Held]]:
    """Run an upstream resolver with one address that answers when it is released."""
    state = Held()
    answers: set[asyncio.Task[None]] = set()

    class Protocol(asyncio.DatagramProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
            state.asked.set()
            answers.add(asyncio.get_running_loop().create_task(self.answer(data, addr)))

        async def answer(self, data: bytes, addr: tuple[str, int]) -> None:
            await state.release.wait()
            self.transport.sendto(reply(data, a(HOST, address)), addr)  # type: ignore[attr-defined]

    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(Protocol, ("127.0.0.1", 0))
    place = Upstream(IPv4Address("127.0.0.1"), transport.get_extra_info("sockname")[1])
    try:
        yield place, state
    finally:
        transport.close()
        for task in answers:
            task.cancel()


@pytest.mark.parametrize("ipv6", [False, True])
async def test_what_a_former_upstream_is_about_to_say_is_neither_answered_nor_kept(ipv6: bool) -> None:
    async with held("6.6.6.6") as (former, slow), held("93.184.216.34") as (latter, fast):
        resolver = Resolver((former,), lambda: 0.0, ipv6=lambda: ipv6)
        waiting = asyncio.ensure_future(resolver.resolve(HOST))
        await slow.asked.wait()
        resolver.set_upstreams((latter,))
        slow.release.set()
        fast.release.set()
        assert addresses("93.184.216.34") == (await waiting).addresses
        assert addresses("93.184.216.34") == (await resolver.resolve(HOST)).addresses


@pytest.mark.parametrize("ipv6", [False, True])
async def test_a_lookup_under_way_when_policy_changes_is_asked_for_again_or_refused(ipv6: bool) -> None:
    denied = Deny("default", "No rule allows it.")
    async with held("93.184.216.34") as (upstream, state):
        resolver = Resolver((upstream,), lambda: 0.0, ipv6=lambda: ipv6)
        waiting = asyncio.ensure_future(resolver.resolve(HOST))
        await state.asked.wait()
        state.asked.clear()
        resolver.discard()
        await state.asked.wait()  # asked again: the name is still allowed
        resolver._may_ask = lambda _host: denied
        resolver.discard()
        state.release.set()
        assert Resolution(Outcome.FAILED, denied=denied) == await waiting
        resolver._may_ask = lambda _host: None
        assert addresses("93.184.216.34") == (await resolver.resolve(HOST)).addresses


async def test_a_name_that_is_not_known_takes_a_place_in_the_rate_of_names() -> None:
    """A known name, one counted by its DNS question, and one whose resolution is in progress take no place."""
    async with server(lambda query: [reply(query, a(HOST, "93.184.216.34"))]) as (resolver, queries):
        places = [0.0]
        resolver._turn = lambda: places.pop() if places else None
        found = await asyncio.gather(*(resolver.resolve(HOST) for _ in range(5)))
        assert {addresses("93.184.216.34")} == {one.addresses for one in found}
        refused = await resolver.resolve("x.example.com")
        assert "dns.query_rate" == (refused.denied.rule if refused.denied else None)
        await resolver.resolve("y.example.com", counted=True)
        assert {b"good", b"y"} == {query[13 : 13 + query[12]] for query in queries}


V4, V4_TOO, V6, V6_TOO = "93.184.216.34", "93.184.216.35", "2606:2800::1", "2606:2800::2"
OK, NONE, MISSING, BROKEN = 0x8180, 0x8180, 0x8183, 0x8182
SILENT: tuple[int, tuple[str, ...]] = (0, ())


def aaaa(owner: str, address: str, ttl: int = 30) -> bytes:
    return record(owner, 28, socket.inet_pton(socket.AF_INET6, address), ttl)


async def both(four: tuple[int, tuple[str, ...]], six: tuple[int, tuple[str, ...]]) -> tuple[Resolution, list[bytes]]:
    """Resolve with a server that has these flags and addresses for A and for AAAA; `SILENT` is no answer."""

    def answer(query: bytes) -> list[bytes]:
        is_six = query[12:].startswith(name(HOST) + b"\0\x1c")
        flags, addresses = six if is_six else four
        if not flags:
            return []
        return [reply(query, *((aaaa if is_six else a)(HOST, address) for address in addresses), flags=flags)]

    async with server(answer) as (resolver, queries):
        resolver._ipv6 = lambda: True
        async with asyncio.timeout(30):
            return await resolver.resolve(HOST), queries


async def test_the_addresses_of_both_families_alternate_and_ipv4_is_first() -> None:
    found, queries = await both((OK, (V4, V4_TOO)), (OK, (V6, V6_TOO)))
    assert Resolution(Outcome.ADDRESSES, tuple(map(ip_address, (V4, V6, V4_TOO, V6_TOO))), 30) == found
    assert [1, 28] == sorted(int.from_bytes(query[-15:-13]) for query in queries)


async def test_without_an_ipv6_route_no_aaaa_record_is_asked_for() -> None:
    async with server(lambda query: [reply(query)]) as (resolver, queries):
        assert Outcome.NODATA == (await resolver.resolve(HOST)).outcome
    assert [1] == [int.from_bytes(query[-15:-13]) for query in queries]


@pytest.mark.parametrize(
    ("four", "six", "expected"),
    [
        ((OK, (V4,)), (NONE, ()), (Outcome.ADDRESSES, (V4,), 60)),
        ((NONE, ()), (OK, (V6,)), (Outcome.ADDRESSES, (V6,), 30)),
        ((OK, (V4,)), (MISSING, ()), (Outcome.ADDRESSES, (V4,), 60)),
        ((OK, (V4,)), (BROKEN, ()), (Outcome.ADDRESSES, (V4,), 60)),
        ((BROKEN, ()), (OK, (V6,)), (Outcome.ADDRESSES, (V6,), 30)),
        ((OK, (V4,)), SILENT, (Outcome.ADDRESSES, (V4,), 60)),
        (SILENT, (OK, (V6,)), (Outcome.ADDRESSES, (V6,), 30)),
        ((MISSING, ()), SILENT, (Outcome.NXDOMAIN, (), 10)),
        ((MISSING, ()), (NONE, ()), (Outcome.NXDOMAIN, (), 10)),
        ((NONE, ()), (NONE, ()), (Outcome.NODATA, (), 10)),
        ((NONE, ()), (BROKEN, ()), (Outcome.FAILED, (), 2)),
        ((BROKEN, ()), (NONE, ()), (Outcome.FAILED, (), 2)),
        ((OK, (V4,)), (OK, (f"::ffff:{V4}", "::ffff:10.0.0.7")), (Outcome.ADDRESSES, (V4, "10.0.0.7"), 30)),
    ],
)
async def test_one_resolution_comes_of_two_answers(
    four: tuple[int, tuple[str, ...]],
    six: tuple[int, tuple[str, ...]],
    expected: tuple[Outcome, tuple[str, ...], int],
) -> None:
    outcome, found, ttl = expected
    assert Resolution(outcome, tuple(map(ip_address, found)), ttl) == (await both(four, six))[0]


async def test_an_answer_of_one_family_waits_a_bounded_time_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a time longer than the whole resolution may take, the addresses that were there are lost."""
    monkeypatch.setattr("gateway.dns.resolver._OTHER_SECONDS", 60)
    monkeypatch.setattr("gateway.dns.resolver._TOTAL_SECONDS", 1)
    assert Outcome.FAILED == (await both((OK, (V4,)), SILENT))[0].outcome
    monkeypatch.setattr("gateway.dns.resolver._OTHER_SECONDS", 0.1)
    monkeypatch.setattr("gateway.dns.resolver._TOTAL_SECONDS", 60)
    assert Outcome.ADDRESSES == (await both((OK, (V4,)), SILENT))[0].outcome


async def test_an_address_of_the_wrong_type_or_length_is_ignored() -> None:
    async with server(
        lambda query: [reply(query, aaaa(HOST, V6), record(HOST, 1, b"x" * 16), record(HOST, 28, b"x" * 4))]
    ) as (resolver, _):
        resolver._ipv6 = lambda: True
        assert (ip_address(V6),) == (await resolver.resolve(HOST)).addresses


async def test_an_upstream_may_have_an_ipv6_address() -> None:
    """Over UDP and, after a truncated answer, over TCP."""
    loop = asyncio.get_running_loop()

    class Truncates(asyncio.DatagramProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
            self.transport.sendto(reply(data, flags=0x8380), addr)  # type: ignore[attr-defined]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(framed(reply(await _question(reader), a(HOST, "93.184.216.34"))))
        writer.close()

    tcp = await asyncio.start_server(serve, "::1", 0)
    port = tcp.sockets[0].getsockname()[1]
    transport, _ = await loop.create_datagram_endpoint(Truncates, ("::1", port))
    resolver = Resolver((Upstream(IPv6Address("::1"), port),), lambda: 0.0)
    try:
        assert addresses("93.184.216.34") == (await resolver.resolve(HOST)).addresses
    finally:
        transport.close()
        tcp.close()


async def test_the_query_is_built_afresh() -> None:
    async with server(lambda query: [reply(query, a(HOST, "93.184.216.34"))]) as (resolver, queries):
        await resolver.resolve(HOST)
        opt = b"\0" + struct.pack("!HHIH", 41, 1232, 0, 0)
        assert [struct.pack("!HHHHH", 0x0100, 1, 0, 0, 1) + name(HOST) + b"\0\1\0\1" + opt] == [
            query[2:] for query in queries
        ]


@pytest.mark.parametrize("pointer", [b"\xc0\xff", b"\xc0\x00", b"\xc0\x22", b"\x80\x0c", b"\xc0"])
def test_pointers_that_do_not_point_back_are_malformed(pointer: bytes) -> None:
    query = struct.pack("!HHHHHH", 1, 0x0100, 1, 0, 0, 0) + name(HOST) + b"\0\1\0\1"
    with pytest.raises(MalformedMessage):
        parse_answer(reply(query, pointer + struct.pack("!HHIH", 1, 1, 60, 4) + b"\1\1\1\1"))


type Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def truncating(serve: Serve | None) -> AsyncIterator[tuple[Resolver, list[bytes]]]:
    """Run a server that truncates each answer over UDP, and runs `serve` over TCP; None: no TCP listener."""
    asked: list[bytes] = []

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(b"tcp")
        assert serve is not None
        with suppress(OSError, EOFError):
            await serve(reader, writer)
        writer.close()

    tcp = None
    port = 0
    if serve is not None:  # first, because few UDP ports are in use: the same number is free there
        tcp = await asyncio.start_server(connection, "127.0.0.1", 0)
        port = tcp.sockets[0].getsockname()[1]
    async with server(lambda query: [reply(query, flags=0x8380)], port) as (resolver, queries):
        try:
            yield resolver, asked
        finally:
            if tcp is not None:
                tcp.close()
        assert 0 < len(queries) <= 2


def framed(message: bytes) -> bytes:
    return struct.pack("!H", len(message)) + message


async def _question(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(2)))


async def test_a_truncated_answer_is_asked_for_again_over_tcp() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        query = await _question(reader)
        records = [a(HOST, f"93.184.{number}.34") for number in range(200)]
        writer.write(framed(reply(query, *records)))

    async with truncating(serve) as (resolver, asked):
        found = await resolver.resolve(HOST)
    assert [b"tcp"] == asked
    assert addresses(*(f"93.184.{number}.34" for number in range(16))) == found.addresses


async def _truncated_again(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(framed(reply(await _question(reader), flags=0x8380)))


async def _too_large(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    query = await _question(reader)
    writer.write(framed(reply(query, *[record(HOST, 16, b"x" * 250)] * 200, a(HOST, "93.184.216.34"))))


async def _too_many(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    query = await _question(reader)
    message = reply(query, *[a(HOST, "93.184.216.34")] * 300)
    writer.write(framed(message))


async def _another_question(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    other = name("evil.example.com") + b"\0\1\0\1"
    writer.write(framed(reply(await _question(reader), a(HOST, "6.6.6.6"), question=other)))


async def _half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(framed(reply(await _question(reader), a(HOST, "93.184.216.34")))[:-1])


async def _drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for byte in framed(reply(await _question(reader), a(HOST, "93.184.216.34"))):
        writer.write(bytes((byte,)))
        await asyncio.sleep(0.05)


async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


@pytest.mark.slow
@pytest.mark.parametrize(
    "serve", [_truncated_again, _too_large, _too_many, _another_question, _half, _drips, _silent, None]
)
async def test_a_hostile_server_over_tcp_is_a_failure_in_bounded_time(
    serve: Serve | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.dns.resolver._TRY_SECONDS", 1.5)
    async with truncating(serve) as (resolver, asked):
        async with asyncio.timeout(30):
            found = await resolver.resolve(HOST)
    assert Outcome.FAILED == found.outcome
    assert (0 if serve is None else 2) == len(asked)


async def test_a_server_that_is_silent_holds_a_bounded_number_of_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """One question above the limit fails at once. Later all fail, and another name is asked for again."""
    monkeypatch.setattr("gateway.dns.resolver._TRY_SECONDS", 0.2)
    silent = True
    async with server(lambda query: [] if silent else [reply(query, a("x.example.com", "93.184.216.34"))]) as (
        resolver,
        queries,
    ):
        under_way = [asyncio.create_task(resolver.resolve(f"n{number}.example.com")) for number in range(64)]
        await asyncio.sleep(0)
        async with asyncio.timeout(0.1):
            assert Outcome.FAILED == (await resolver.resolve("one-too-many.example.com")).outcome
        assert {Outcome.FAILED} == {found.outcome for found in await asyncio.gather(*under_way)}
        assert b"one-too-many" not in b"".join(queries)
        silent = False
        monkeypatch.setattr("gateway.dns.resolver._TRY_SECONDS", 30)
        assert addresses("93.184.216.34") == (await resolver.resolve("x.example.com")).addresses


@given(st.binary(max_size=600), st.integers(0, 6), st.booleans())
def test_whatever_an_answer_holds_it_is_read_or_malformed(tail: bytes, count: int, pointed: bool) -> None:
    """The records that are read are not longer than the input."""
    head = struct.pack("!HHHHHH", 1, 0x8180, 1, count, 0, 0) + name(HOST) + b"\0\1\0\1"
    body = (b"\xc0\x0c" + tail) if pointed else tail
    with suppress(MalformedMessage):
        answer = parse_answer(head + body)
        assert count == len(answer.records)
        assert sum(len(record.data) + 11 for record in answer.records) <= len(body)
