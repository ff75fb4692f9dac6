"""A spliced flow relays all bytes unchanged, ends when it must, and its record has the exact number of bytes.

The module tests `gateway/flows.py`.
"""

import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from opensandbox.exceptions import SandboxException
from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.sandboxes import CredentialProxyConfig, NetworkPolicy, NetworkRule

from demo.sandboxes import Secrets
from policy.compile import compile_named
from policy.compiled import CompiledPolicy
from policy.load import load
from policy.rules import HostPattern
from testbed import raw_stream
from testbed.internet import ADDRESSES, API, SILENT, SILENT_ADDRESS, SPLICED, STATUS, Internet
from testbed.raw_host import stream
from testbed.stack import POLICY
from tests.conftest import ON_RUNC
from tests.stacks import Governed

pytestmark = pytest.mark.system

MIB = 1 << 20
OFFERED = 200 * MIB
"""The number of bytes that are offered to a receiver that does not read."""
DOCUMENT = load(POLICY)
SPLICING = compile_named(DOCUMENT, "splicing")
RAW = {"address": ADDRESSES[SPLICED], "port": 443, "sni": SPLICED}

type Case = dict[str, Any]


def until[T](ask: Callable[[], T], seconds: float = 60.0) -> T:
    """Call `ask` until its answer is true or the time is over. Return the last answer."""
    deadline = time.monotonic() + seconds
    while not (answer := ask()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return answer


def mark() -> str:
    return f"w{secrets.token_hex(6)}"


def case(do: str = "exchange", *, down: int = 0, order: Case | None = None, **more: Any) -> Case:
    return {**RAW, "order": {"mark": mark(), "do": do, "down": down, **(order or {})}, **more}


class Splicer:
    """A sandbox under the policy `splicing`, with methods that run cases and read the results of its flows."""

    def __init__(self, stack: Governed, runtime: str, policy: str | None = "splicing", **options: Any) -> None:
        self.stack = stack
        self.sdk = stack.create(runtime, policy=policy, **options)
        self.id = str(self.sdk.id)
        self.sdk.files.write_file("/tmp/raw_stream.py", Path(str(raw_stream.__file__)).read_text())

    def close(self) -> None:
        self.sdk.kill()
        self.sdk.close()

    def shell(self, command: str) -> str:
        done = self.sdk.commands.run(command)
        return "".join(message.text for message in (*done.logs.stdout, *done.logs.stderr))

    def run(self, cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
        """Run the cases concurrently. Return the results of the clients."""
        place = self._start(cases)
        assert until(lambda: "done" in self.shell(f"cat {place}.done 2>/dev/null"), 180), self.shell(f"cat {place}.err")
        result: dict[str, dict[str, Any]] = json.loads(self.sdk.files.read_file(f"{place}.out"))
        return result

    def begin(self, cases: dict[str, Case]) -> None:
        """Start the cases. Return when the far end has a note of each."""
        place = self._start(cases)
        for one in cases.values():
            assert until(lambda one=one: self.far(one, "began")), self.shell(f"cat {place}.err {place}.out")

    def _start(self, cases: dict[str, Case]) -> str:
        place = f"/tmp/{mark()}"
        self.sdk.files.write_file(f"{place}.json", json.dumps(cases))
        command = (
            f"sh -c 'python3 /tmp/raw_stream.py <{place}.json >{place}.out 2>{place}.err; echo done >{place}.done'"
        )
        self.sdk.commands.run(command, opts=RunCommandOpts(background=True))
        return place

    def far(self, one: Case, event: str = "ended") -> dict[str, Any]:
        """Return the far end's note of a case, or an empty map."""
        mark, notes = one["order"]["mark"], self.stack.internet.notes()
        return next((note for note in notes if note.get("raw") == mark and note.get("event") == event), {})

    def records(self) -> list[dict[str, Any]]:
        return [record for record in self.stack.audit_records() if record.get("sandbox") == self.id]

    def flows(self, host: str | None = SPLICED) -> list[list[dict[str, Any]]]:
        """Return the records of each flow to `host`, in order."""
        found: dict[str, list[dict[str, Any]]] = {}
        for record in self.records():
            if record["kind"] == "flow" and record.get("flow") and (host is None or record.get("host") == host):
                found.setdefault(str(record["flow"]), []).append(record)
        return list(found.values())

    def worker(self) -> int:
        return self.stack.worker_pid(self.id)


@pytest.fixture(params=ON_RUNC, name="runtime")
def _runtime(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module", name="stack")
def _stack(governed: Governed) -> Governed:
    """Return the stack whose hostd accepts any policy."""
    return governed


@pytest.fixture(scope="module", name="internet")
def _internet(governed: Governed) -> Internet:
    return governed.internet


@pytest.fixture(scope="module", name="splicers")
def _splicers(stack: Governed, some_runtimes: tuple[str, ...]) -> Iterator[dict[str, Splicer]]:
    made: dict[str, Splicer] = {}
    try:
        for runtime in some_runtimes:
            made[runtime] = Splicer(stack, runtime)
        yield made
    finally:
        for one in made.values():
            one.close()


@pytest.fixture(name="splicer")
def _splicer(splicers: dict[str, Splicer], runtime: str) -> Iterator[Splicer]:
    """Yield the sandbox of the runtime, with its original policy and limits before and after the test."""
    splicers[runtime].stack.configure(splicers[runtime].id, SPLICING)
    yield splicers[runtime]
    splicers[runtime].stack.configure(splicers[runtime].id, SPLICING)


def digest(one: Case) -> str:
    """Return the digest of the bytes that the far end sends."""
    return hashlib.sha256(b"".join(stream(one["order"]["mark"], one["order"]["down"]))).hexdigest()


def sizes(records: list[dict[str, Any]]) -> tuple[int, int]:
    return records[-1]["bytes_up"], records[-1]["bytes_down"]


def test_every_byte_arrives_each_way_and_the_log_has_their_number(splicer: Splicer) -> None:
    """The cases have random chunks, both half-closes and fragmented ClientHellos. Each flow has two records.

    The second record has the same counts as the far end.
    """
    cases = {
        "both ways at once": case(down=24 * MIB + 17, up=24 * MIB + 5),
        "the client ends first": case(down=3 * MIB, up=2 * MIB, order={"wait": True}),
        "the host ends first": case(down=2 * MIB, up=3 * MIB, wait=True),
        "nothing but the hello": case(),
        "segments of a byte": case(segment=1, down=1000, up=1000),
        "records of a few bytes": case(record=11, down=1000, up=1000),
        "records of a byte, in segments of three": case(record=1, segment=3, down=10, up=10),
        "without a name": case(down=MIB, up=MIB) | {"sni": None},
    }
    before = len(splicer.flows(None))
    answers = splicer.run(cases)

    for name, one in cases.items():
        far, near = until(lambda one=one: splicer.far(one)), answers[name]
        assert ("eof", "eof") == (far["how"], near["how"]), (name, far, near)
        assert (near["sent"], near["digest_up"]) == (far["received"], far["digest"]), name
        assert (one["order"]["down"], digest(one)) == (near["received"], near["digest"]), name
    assert until(lambda: all(len(flow) == 2 for flow in splicer.flows(None)[before:]))
    flows = splicer.flows(None)[before:]
    expected = sorted((splicer.far(one)["received"], splicer.far(one)["sent"]) for one in cases.values())
    assert expected == sorted(map(sizes, flows))
    assert {("allow", "splice", "info", "closed")} == {
        (first["decision"], first["treatment"], last["decision"], last["reason"]) for first, last in flows
    }
    assert {SPLICED, ADDRESSES[SPLICED]} == {first["host"] for first, _ in flows}
    assert {ADDRESSES[SPLICED]} == {last["address"] for _, last in flows}


TLS_CLIENT = """
import json, socket, ssl, sys
host, roots = sys.argv[1:3]
context = ssl.create_default_context(cafile=roots)
context.set_alpn_protocols(["h2", "acme-tls/1", "http/1.1"])
session, out = None, []
for _ in range(2):
    raw = socket.create_connection((host, 443), timeout=20)
    with context.wrap_socket(raw, server_hostname=host, session=session) as sock:
        sock.sendall(b"GET / HTTP/1.1\\r\\nHost: " + host.encode() + b"\\r\\n\\r\\n")
        answer = sock.recv(65536).decode("latin-1")
        issuer = dict(pair[0] for pair in sock.getpeercert()["issuer"])["commonName"]
        out.append([issuer, sock.version(), sock.session_reused, answer.split("\\r\\n")[0]])
        session = sock.session
print(json.dumps(out))
"""


def test_tls_is_end_to_end(splicer: Splicer) -> None:
    """The client sees the server's own certificate, TLS version and session tickets.

    It would reject a gateway's certificate.
    """
    splicer.sdk.files.write_file("/tmp/tls_client.py", TLS_CLIENT)
    splicer.sdk.files.write_file("/tmp/upstream.pem", splicer.stack.internet.roots.read_text())
    seen = json.loads(splicer.shell(f"python3 /tmp/tls_client.py {STATUS} /tmp/upstream.pem"))

    assert [["Demo Internet Root", "TLSv1.3", reused, "HTTP/1.1 200 OK"] for reused in (False, True)] == seen
    refused = splicer.shell(f"python3 /tmp/tls_client.py {API} /tmp/upstream.pem")
    # the control: an inspected host has a certificate of the sandbox's CA
    assert "CERTIFICATE_VERIFY_FAILED" in refused


def test_a_reset_of_either_side_resets_the_other(splicer: Splicer) -> None:
    cases = {
        "by the host": case("reset", up=64 * MIB, order={"after": MIB}),
        "by the client": case(up=MIB, then="reset"),
    }
    before = len(splicer.flows())
    answers = splicer.run(cases)

    assert "eof" != answers["by the host"]["how"]
    assert "reset" == until(lambda: splicer.far(cases["by the client"]))["how"]
    assert until(lambda: all(len(flow) == 2 for flow in splicer.flows()[before:]))
    flows = splicer.flows()[before:]
    assert ["reset", "reset"] == [last["reason"] for _, last in flows]
    # After a reset the far end can have fewer bytes than were sent to it, but never more than the record says.
    received = [splicer.far(one)["received"] for one in cases.values()]
    assert all(got <= up for got, (up, _) in zip(sorted(received), sorted(map(sizes, flows)), strict=True))


def test_the_limits_end_a_flow_and_the_log_says_which(splicer: Splicer) -> None:
    """The idle limit ends flows in which no side sends, also inspected ones.

    The total limit ends a flow that sends a byte now and then. The connect limit ends a dial without an answer.
    """
    splicer.stack.configure(splicer.id, SPLICING, idle=2, total=5, connect=1)
    inspected = hang(splicer, API)
    cases = {
        "idle": case("silent", hold=10),
        "idle, half closed": case("exchange", hold=10),
        "total": case("drip", hold=10),
    }
    silent = {**case(), "address": SILENT_ADDRESS, "sni": SILENT}
    before = len(splicer.flows())
    splicer.run({**cases, "connect": silent})

    hows = {name: until(lambda one=one: splicer.far(one))["how"] for name, one in cases.items()}
    assert {"idle": "reset", "idle, half closed": "reset", "total": "reset"} == hows
    assert until(lambda: all(len(flow) == 2 for flow in splicer.flows()[before:]))
    ends = {last["bytes_down"] > 0: last["reason"] for _, last in splicer.flows()[before:]}
    assert {False: "idle", True: "total"} == ends
    assert until(lambda: _over(splicer, inspected), 15)  # the server's own timeout is twice as long
    ((first, last),) = splicer.flows(SILENT)[-1:]
    assert ("allow", "deny", "connect") == (first["decision"], last["decision"], last["rule"])


def test_a_client_that_does_not_read_stops_its_sender(splicer: Splicer) -> None:
    """Back-pressure works in both directions: the worker holds one chunk, not all the remaining bytes."""
    slow = case(down=6 * MIB, slow=0.02)
    deaf = case(down=OFFERED, deaf=60, hold=60)
    unheard = case("deaf", up=OFFERED)
    rss = resident(splicer.worker())
    splicer.begin({"slow": slow, "deaf": deaf, "unheard": unheard})
    grown = []

    def slow_ended() -> bool:
        grown.append(resident(splicer.worker()) - rss)
        return bool(splicer.far(slow))

    assert until(slow_ended)
    splicer.stack.configure(splicer.id, _without(SPLICING, "raw"))

    assert {"reset"} == {until(lambda one=one: splicer.far(one)).get("how") for one in (deaf, unheard)}
    assert ("eof", 6 * MIB) == (splicer.far(slow)["how"], splicer.far(slow)["sent"])
    assert splicer.far(deaf)["sent"] < OFFERED / 5  # the capacity of the kernels' buffers
    assert max(grown) < OFFERED / 25


def resident(pid: int) -> int:
    """Return the resident anonymous memory of the process in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError("no RssAnon")


def _without(policy: CompiledPolicy, rule: str) -> CompiledPolicy:
    (rules,) = policy.lists
    kept = tuple(one for one in rules.rules if one.id.rpartition("/")[2] != rule)
    return replace(policy, lists=(replace(rules, rules=kept),))


def _changed(**change: Any) -> CompiledPolicy:
    """Return the policy `splicing` with a changed rule for the raw host."""
    (rules,) = SPLICING.lists
    changed = tuple(replace(one, **change) if one.id == "splicing/raw" else one for one in rules.rules)
    return replace(SPLICING, lists=(replace(rules, rules=changed),))


WITHOUT = {
    "the host is removed": _without(SPLICING, "raw"),
    "the host is denied by the operator": replace(SPLICING, always_deny=(SPLICED,)),
    "the host is to be inspected": _changed(inspect=True),
    "its requests are to be judged": _changed(methods=("GET",)),
}
WITH = {
    "another host is allowed as well": _changed(
        hosts=tuple(map(HostPattern, (SPLICED, SILENT, STATUS, "more.example")))
    ),
    "the operator always allows it": replace(SPLICING, always_allow=(SPLICED,)),
    "the same policy again": SPLICING,
}


def test_a_change_of_policy_cuts_exactly_what_it_no_longer_permits(splicer: Splicer) -> None:
    """The far end sees the abort before the change is answered.

    A policy that still permits the flow does not affect it.
    """
    for reason, policy in WITHOUT.items():
        one = case("drip", hold=40)
        splicer.begin({"live": one})
        for harmless in WITH.values():
            splicer.stack.configure(splicer.id, harmless)
        assert {} == splicer.far(one), reason

        splicer.stack.configure(splicer.id, policy)

        assert "reset" == until(lambda one=one: splicer.far(one)).get("how"), reason
        assert until(lambda: splicer.flows()[-1][-1]["reason"] == "cut"), reason
        assert sizes(splicer.flows()[-1])[0] == splicer.far(one)["received"], reason
        splicer.stack.configure(splicer.id, SPLICING)


def test_names_that_are_not_spliced(splicer: Splicer) -> None:
    """The name decides, not the address. An inspected name is never spliced. Other protocols are denied."""
    elsewhere = case(down=1000) | {"address": ADDRESSES[STATUS]}
    answers = splicer.run({"another's address": elsewhere})
    assert (1000, digest(elsewhere)) == (
        answers["another's address"]["received"],
        answers["another's address"]["digest"],
    )

    before = len(splicer.records())
    refused = {
        "an inspected name": case(down=10) | {"sni": API},
        "a name nobody allows": case(down=10) | {"sni": "www.attacker.example"},
        "no name, another address": case(down=10) | {"sni": None, "address": ADDRESSES[STATUS]},
        "no name, another port": case(down=10) | {"sni": None, "port": 8443},
        "another port": case(down=10) | {"port": 8443},
    }
    splicer.run(refused)
    assert {} == {name: far for name, one in refused.items() if (far := splicer.far(one, "began"))}
    seen = [record for record in splicer.records()[before:] if record["kind"] == "flow"]
    assert [] == [record for record in seen if record.get("treatment") == "splice"]
    assert {"deny": 4, "allow": 1} == {
        word: sum(record["decision"] == word for record in seen) for word in ("deny", "allow")
    }


def test_plain_http_goes_through_the_worker_end_to_end(splicer: Splicer) -> None:
    assert f"this is {STATUS}" in splicer.shell(f"curl -sS --max-time 10 http://{STATUS}/plain")
    assert [("inspect", "http")] == [
        (flow[0]["treatment"], flow[0]["scheme"]) for flow in splicer.flows(STATUS) if flow[0].get("port") == 80
    ][-1:]
    answer = splicer.shell("curl -sS --max-time 10 http://www.attacker.example/ ; true")
    assert "this is" not in answer


def test_a_sandbox_has_only_so_many_flows_and_so_many_bytes(splicer: Splicer) -> None:
    limits = replace(SPLICING.limits, connections=10)
    splicer.stack.configure(splicer.id, replace(SPLICING, limits=limits))
    many = {str(number): case("silent", hold=10) for number in range(30)}
    splicer.run(many)
    began = [one for one in many.values() if splicer.far(one, "began")]
    assert 1 <= len(began) <= 10
    assert "connections" in {record.get("rule") for record in splicer.records() if record["decision"] == "deny"}

    used = sum(sizes(flow)[0] for flow in splicer.flows(None) if "bytes_up" in flow[-1])
    tight = replace(SPLICING, limits=replace(SPLICING.limits, bytes_out=used + 2 * MIB))
    splicer.stack.configure(splicer.id, tight)
    over = case(up=8 * MIB)
    splicer.run({"over": over})
    assert "reset" == until(lambda: splicer.far(over))["how"]
    assert splicer.far(over)["received"] <= 2 * MIB
    assert until(lambda: splicer.flows()[-1][-1]["reason"] in ("limits", "cut"))
    assert splicer.far(over)["received"] <= sizes(splicer.flows()[-1])[0] <= 2 * MIB
    again = case(down=10)
    splicer.run({"again": again})
    assert {} == splicer.far(again, "began")
    splicer.stack.configure(splicer.id, SPLICING)
    control = case(down=10)
    assert "eof" == splicer.run({"control": control})["control"]["how"]


@dataclass(frozen=True, slots=True)
class Speed:
    """Speeds in megabytes per second."""

    spliced: float
    direct: float


def test_a_large_download_is_whole(splicer: Splicer, internet: Internet) -> None:
    """The download has 200 MB. The test prints the speed with and without a gateway, and judges only the bytes."""
    big = case(down=200 * 1000 * 1000)
    through = splicer.run({"big": big})["big"]
    environment = {"PATH": os.environ["PATH"], "SSL_CERT_FILE": str(internet.roots)}
    outside = case(down=200 * 1000 * 1000)
    command = ["nsenter", f"--net={internet.path(internet.control)}", sys.executable, str(raw_stream.__file__)]
    done = subprocess.run(
        command, input=json.dumps({"big": outside}), capture_output=True, text=True, check=True, env=environment
    )
    direct = json.loads(done.stdout)["big"]
    speed = Speed(200 / through["seconds"], 200 / direct["seconds"])
    print(f"{splicer.id}: {speed}")

    assert (200_000_000, digest(big)) == (through["received"], through["digest"])
    assert (200_000_000, digest(outside)) == (direct["received"], direct["digest"])


def hang(splicer: Splicer, host: str) -> str:
    """Start a request whose body does not end. Return its mark when the secret was used for it."""
    name = mark()
    command = f"(printf x; sleep 300) | curl -sS -T - -X POST https://{host}/v1/{name}"
    splicer.sdk.commands.run(command, opts=RunCommandOpts(background=True))
    used = until(lambda: [one for one in splicer.records() if one["kind"] == "secret.use" and _on(splicer, one, name)])
    assert used
    assert not _over(splicer, name)
    return name


def _on(splicer: Splicer, use: dict[str, Any], name: str) -> bool:
    return use["flow"] in {one.get("flow") for one in splicer.records() if name in str(one.get("path"))}


def _over(splicer: Splicer, name: str) -> bool:
    """Return whether the server has seen the end of the connection with this mark."""
    return any(name in note.get("heard", "") for note in splicer.stack.internet.notes())


def test_a_revoked_secret_cuts_the_flow_that_used_it(splicer: Splicer, values: Secrets) -> None:
    """A revocation at vaultd aborts the inspected flow, and no spliced flow."""
    name = hang(splicer, API)
    spliced = case("drip", hold=40)
    splicer.begin({"live": spliced})

    splicer.stack.sallyport("vault", "rotate", "api-token", stdin=values.api)
    began = time.monotonic()

    assert until(lambda: _over(splicer, name), 15)  # the server's own timeout is twice as long
    print(f"cut {time.monotonic() - began:.3f} s after the answer")
    assert {} == splicer.far(spliced)


@pytest.fixture(name="caller")
def _caller(stack: Governed, runtime: str) -> Iterator[Splicer]:
    """Yield a sandbox whose creator allows the raw host and the status host, and can bind credentials."""
    rules = [NetworkRule(action="allow", target=host) for host in (SPLICED, STATUS)]
    policy = NetworkPolicy(defaultAction="deny", egress=rules)
    one = Splicer(stack, runtime, None, network_policy=policy, credential_proxy=CredentialProxyConfig(enabled=True))
    try:
        yield one
    finally:
        one.close()


def bind(caller: Splicer, host: str, value: str) -> None:
    caller.sdk.credential_vault.create(
        credentials=[{"name": "own", "source": {"type": "inline", "value": value}}],
        bindings=[{"name": "b", "match": {"hosts": [host]}, "auth": {"type": "bearer", "credential": "own"}}],
    )


def test_the_caller_changes_policy_and_secrets_and_live_flows_obey(caller: Splicer) -> None:
    """Through the API, a binding ends splicing, a deleted vault aborts its flows, and a denial aborts the others."""
    one, value = case("drip", hold=40), f"bound-{secrets.token_hex(20)}"
    caller.begin({"live": one})
    bind(caller, SPLICED, value)
    assert "reset" == until(lambda: caller.far(one)).get("how")
    inspected = case(down=10)
    caller.run({"inspected": inspected})
    assert {} == caller.far(inspected, "began")
    assert "inspect" == caller.flows()[-1][0]["treatment"]
    caller.sdk.credential_vault.delete()

    bind(caller, STATUS, value)
    name = hang(caller, STATUS)
    spliced = case("drip", hold=40)
    caller.begin({"live": spliced})
    caller.sdk.credential_vault.delete()
    began = time.monotonic()
    assert until(lambda: _over(caller, name), 15)
    print(f"cut {time.monotonic() - began:.3f} s after the answer")
    assert {} == caller.far(spliced)

    caller.sdk.patch_egress_rules([NetworkRule(action="deny", target=SPLICED)])
    assert "reset" == until(lambda: caller.far(spliced)).get("how")


def test_a_killed_worker_ends_its_flows_and_their_records_stand_open(caller: Splicer) -> None:
    """The log has the opening record of the flow. Its closing record is missing, because the worker ended."""
    one = case("drip", hold=40)
    caller.begin({"live": one})

    os.kill(caller.worker(), signal.SIGKILL)

    assert until(lambda: caller.far(one)).get("how") == "reset"
    again = case(down=10)

    def served() -> bool:
        try:
            return bool(caller.run({"again": again})["again"]["received"] == 10)
        except (SandboxException, httpx.HTTPError):  # connections into the sandbox ended with the worker, too
            return False

    assert until(served)
    assert ["allow"] == [record["decision"] for record in caller.flows()[0]]
    assert until(lambda: 2 == len(caller.flows()[-1]))
