"""Policies and secrets that change while sandboxes work, and a storm of calls: each request sees exactly one state.

The client inside records when each of its questions began and ended. The test records when each change began and was
answered. A question between an answer and the next change was under exactly the answered state.
It tests `runtimes/sandboxes.py`.
"""

import asyncio
import json
import random
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import httpx
import pytest
from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.sandboxes import NetworkPolicy, NetworkRule

from testbed.census import take
from testbed.internet import API, STATUS, Internet, received_field
from testbed.stack import Stack
from tests.conftest import RUNTIMES
from tests.stacks import VAULTD, Second, beside
from tests.system.test_create_and_delete import body, client, settled
from vault.client import AdminClient
from vault.grants import SecretBinding
from vault.secret import Secret

pytestmark = pytest.mark.system

CHANGES = 30
MARGIN = 0.02
"""The maximum difference of a sandbox's clock from the host's, in seconds."""
_ASK = """
import http.client, json, os, ssl, sys, threading, time
context = ssl.create_default_context()
out = open("/tmp/asked", "a", buffering=1)
def ask(name, hosts):
    kept = {}
    for number in range(1000000):
        if os.path.exists("/tmp/stop"):
            return
        host, ident = hosts[number % len(hosts)], f"{sys.argv[1]}-{name}-{number}"
        began = time.time()
        for connection in (kept.pop(host, None), http.client.HTTPSConnection(host, timeout=20, context=context)):
            if connection is None:
                continue
            try:
                connection.request("GET", "/" + ident)
                answer = connection.getresponse()
                said = str(answer.status)
                answer.read()
                if number % 5:
                    kept[host] = connection
                break
            except Exception as error:  # a kept connection may have been cut long before
                said = type(error).__name__
        out.write(json.dumps({"id": ident, "host": host, "began": began, "ended": time.time(), "said": said}) + chr(10))
        time.sleep(0.06)
threads = [threading.Thread(target=ask, args=(name, sys.argv[2:])) for name in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
open("/tmp/ended", "x").close()
"""


@dataclass(frozen=True, slots=True)
class Asked:
    """One question of the client inside. Times are the epoch's seconds, `said` is a status or the name of an error."""

    id: str
    host: str
    began: float
    ended: float
    said: str


@dataclass(frozen=True, slots=True)
class State:
    """A state that was in force from some time after `began`, and certainly from `answered` on."""

    value: str
    began: float
    answered: float


def possible(states: Sequence[State], asked: Asked) -> set[str]:
    """Return the states under which a question may have been."""
    ends = [after.answered for after in states[1:]] + [float("inf")]
    return {
        state.value
        for state, end in zip(states, ends, strict=True)
        if state.began - MARGIN <= asked.ended and asked.began <= end + MARGIN
    }


class Asker:
    """A sandbox with three threads that ask each host in turn."""

    def __init__(self, stack: Stack, runtime: str, hosts: Sequence[str], **options: Any) -> None:
        self.mark = secrets.token_hex(8)
        self.sandbox = stack.create(runtime, **options)
        self.id = str(self.sandbox.id)
        self.sandbox.files.write_file("/tmp/ask.py", _ASK)
        command = f"python3 /tmp/ask.py {self.mark} {' '.join(hosts)} >/tmp/said 2>&1"
        self.sandbox.commands.run(command, opts=RunCommandOpts(background=True))

    def finish(self) -> list[Asked]:
        """Stop the questions, and return those that were asked."""
        stop = "touch /tmp/stop; until [ -e /tmp/ended ]; do sleep 0.1; done"
        assert 0 == self.sandbox.commands.run(stop, opts=RunCommandOpts(timeout=timedelta(seconds=60))).exit_code
        return [Asked(**json.loads(line)) for line in self.sandbox.files.read_file("/tmp/asked").splitlines()]

    def close(self) -> None:
        self.sandbox.kill()
        self.sandbox.close()


@contextmanager
def askers(stack: Stack, hosts: Sequence[str], **options: Any) -> Iterator[list[Asker]]:
    """One sandbox on each runtime."""
    made: list[Asker] = []
    try:
        for runtime in RUNTIMES:
            made.append(Asker(stack, runtime, hosts, **options))
        yield made
    finally:
        for one in made:
            one.close()


def arrivals(internet: Internet, mark: str) -> dict[str, list[dict[str, Any]]]:
    """Return by id what servers recorded of each question. The client repeats a question after an abort."""
    found: dict[str, list[dict[str, Any]]] = {}
    for note in internet.notes():
        if mark in note.get("target", ""):
            found.setdefault(note["target"][1:], []).append(note)
    return found


def wait_for_questions(internet: Internet, mark: str, host: str) -> None:
    """Wait until a dozen more have arrived at `host`. Each thread asks both in turn, so the other was tried as well."""

    def count() -> int:
        return sum(note["host"] == host and mark in note.get("target", "") for note in internet.notes())

    wanted, deadline = count() + 12, time.monotonic() + 60
    while count() < wanted:
        assert time.monotonic() < deadline, f"nobody asks {host}"
        time.sleep(0.05)


def test_each_connection_is_under_one_policy(stack: Stack, internet: Internet) -> None:
    """The policy allows one host or the other, in turn. No request reaches a host that was not allowed at that time."""
    allowing = {
        host: {"defaultAction": "deny", "egress": [{"action": "allow", "target": host}]} for host in (API, STATUS)
    }
    first = NetworkPolicy(defaultAction="deny", egress=[NetworkRule(action="allow", target=API)])
    pauses = random.Random(8)
    with askers(stack, (API, STATUS), policy=None, network_policy=first) as made:
        headers = {"OPEN-SANDBOX-API-KEY": stack.api_key}
        states: dict[str, list[State]] = {one.id: [State(API, 0.0, 0.0)] for one in made}
        with httpx.Client(base_url=f"{stack.base}/v1", headers=headers, timeout=60, trust_env=False) as http:
            for number in range(CHANGES):
                host = (STATUS, API)[number % 2]
                for one in made:
                    began = time.time()
                    http.put(f"/sandboxes/{one.id}/networkpolicy", json=allowing[host]).raise_for_status()
                    states[one.id].append(State(host, began, time.time()))
                time.sleep(pauses.uniform(0.05, 0.35))
                if number >= CHANGES - 2:
                    for one in made:
                        wait_for_questions(internet, one.mark, host)
        asked = {one.id: one.finish() for one in made}
        for one in made:
            arrived = arrivals(internet, one.mark)
            judged: Counter[tuple[str, bool]] = Counter()
            for question in asked[one.id]:
                may = possible(states[one.id], question)
                if question.id in arrived:
                    assert question.host in may, (question, states[one.id])
                if len(may) == 1:
                    # The API's far end requires a token that none of these requests has, so it answers 401.
                    answered = question.said in ("200", "401")
                    assert answered == (question.host in may), (question, states[one.id])
                    judged[question.host, answered] += 1
            assert 4 == len(judged) and min(judged.values()) >= 3, judged

    for one in made:
        records = [
            record
            for record in stack.audit_records()
            if record.get("sandbox") == one.id and record["kind"] == "flow" and record["decision"] == "allow"
        ]
        policies = {host: {record["policy"] for record in records if record["host"] == host} for host in allowing}
        assert [1, 1] == [len(digests) for digests in policies.values()], policies
        assert not set.intersection(*policies.values())


async def test_each_request_holds_one_version_of_a_secret(stack: Stack, internet: Internet) -> None:
    """After a rotation is answered no request has the former value. No request has two values, or none."""
    values = [f"version-{number}-{secrets.token_hex(16)}" for number in range(CHANGES + 1)]
    pauses = random.Random(13)
    vault = await AdminClient.connect(stack.run / "vault.sock", VAULTD)
    try:
        await vault.put("rotating-token", Secret(values[0]), SecretBinding.make([STATUS]))
        states = [State(values[0], 0.0, 0.0)]
        with askers(stack, (STATUS,), policy="rotating") as made:
            for value in values[1:]:
                began = time.time()
                await vault.rotate("rotating-token", Secret(value))
                states.append(State(value, began, time.time()))
                await asyncio.sleep(pauses.uniform(0.05, 0.35))
            for one in made:
                asked = await asyncio.to_thread(one.finish)
                arrived = arrivals(internet, one.mark)
                seen = set()
                for question in asked:
                    if question.id in arrived:
                        for note in arrived[question.id]:
                            sent = str(received_field(note, "Authorization")).removeprefix("Bearer ")
                            assert sent in possible(states, question), (question, values.index(sent))
                            seen.add(sent)
                    elif len(possible(states, question)) == 1:
                        raise AssertionError(f"not cut by any rotation, and never arrived: {question}")
                assert len(seen) >= 3
    finally:
        await vault.delete("rotating-token")
        await vault.close()


class Narrow(Second):
    """A Sallyport with a small limit of concurrent creations."""

    @property
    def settings(self) -> str:
        return super().settings.replace("[sallyport]\n", "[sallyport]\nmax_pending = 12\n", 1)


async def created(stack: Stack, patience: float) -> tuple[int, str]:
    """Create a sandbox; return the status, 0 if none came, and the id.

    After `patience` seconds the client closes its direction of the connection. The server sends nothing after that, and
    all that it sent before arrives. So each sandbox without a known id is one that the server must remove.
    """
    address = httpx.URL(stack.base)
    content = json.dumps(body(extensions={"sallyport.runtime": "runc"}))
    head = (
        "POST /v1/sandboxes HTTP/1.1",
        f"Host: {address.netloc.decode()}",
        f"OPEN-SANDBOX-API-KEY: {stack.api_key}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        "Connection: close",
    )
    reader, writer = await asyncio.open_connection(address.host, address.port)
    with closing(writer):
        writer.write("\r\n".join((*head, "", content)).encode())
        reading = asyncio.create_task(reader.read())
        answered, _ = await asyncio.wait({reading}, timeout=patience)
        if not answered:
            writer.write_eof()
        async with asyncio.timeout(180):
            answer, _, text = (await reading).partition(b"\r\n\r\n")
    status = int(answer.split()[1]) if answer else 0
    return status, json.loads(text)["id"] if status == 202 else ""


@pytest.mark.extended
async def test_a_storm_of_calls_ends_in_refusals_and_leaves_nothing() -> None:
    """500 concurrent creates, two thirds of which the client abandons early. Each sandbox is deleted twice, while other
    clients ask and list.
    """
    with beside(Narrow, "narrow") as stack:
        before = take(stack)
        limits = httpx.Limits(max_connections=600)
        chance = random.Random(22)
        statuses: Counter[int] = Counter()
        over = asyncio.Event()

        async def create(http: httpx.AsyncClient) -> None:
            status, name = await created(stack, chance.choice((0.02, 0.5, 180.0)))
            statuses[status] += 1
            if name:
                ended = await asyncio.gather(http.delete(f"/sandboxes/{name}"), http.delete(f"/sandboxes/{name}"))
                assert {204, 404} >= {one.status_code for one in ended}
                assert 204 in {one.status_code for one in ended}

        async def poll(http: httpx.AsyncClient) -> int:
            answered = 0
            while not over.is_set():
                assert 200 == (await http.get("/sandboxes")).status_code
                answered += 1
            return answered

        async with client(stack) as http, httpx.AsyncClient(base_url=http.base_url, limits=limits, timeout=180) as many:
            many.headers.update(http.headers)
            polls = [asyncio.create_task(poll(http)) for _ in range(4)]
            await asyncio.gather(*(create(many) for _ in range(500)))
            over.set()
            answered = await asyncio.gather(*polls)

        assert {0, 202, 429} == set(statuses), statuses
        assert min(answered) >= 2, answered  # Each list is answered before the storm is over.
        assert {} == settled(stack, before, 120)
