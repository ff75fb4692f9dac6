"""The runs of the matrix: a pair of sandboxes with some layers off, the far-end suite, and each layer's own check."""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lifecycle.posture.attempts import FarEnd
from lifecycle.posture.ways_out import query
from runtimes.engine import seccomp
from testbed.far_end import end
from testbed.internet import ADDRESSES, API, ATTACKER, UP_ADDRESS, Internet, in_namespace
from testbed.stack import IMAGE
from tests.security.layers import defences
from tests.security.layers.defences import CLOSED, HELD, REFUSED, Defence, closed
from tests.security.layers.defences import Path as Layers
from tests.security.layers.stack import LayeredStack, store_secret
from tests.security.layers.substitutes import FAILING, UNJUDGED, UNRECORDED
from tests.security.layers.suite import (
    AMBIGUOUS,
    DELETED,
    FIRST,
    IMPOSTOR,
    OWN_HOST,
    OWN_TARGET,
    RETURNED,
    RUNTIMES,
    UNPLANNED,
    Attempts,
    Pair,
    Seen,
)
from tests.stacks import scratch

GUARD = "upstream-namespace table"
WORKER_UID = 700001000
NOT_SOFTER = "sallyport: no seccomp allowlist"
"""The shim's message about a profile that allows every call."""
DENIED_NAME = "asked.attacker.example"
NOERROR, NXDOMAIN = 0, 3
DIAL = f"""
import encodings.idna, os, socket
os.setresgid({WORKER_UID}, {WORKER_UID}, {WORKER_UID}); os.setresuid({WORKER_UID}, {WORKER_UID}, {WORKER_UID})
socket.create_connection(("{UP_ADDRESS}", 80), timeout=10)
"""


@dataclass(frozen=True, slots=True)
class Observation:
    """The result of one pair. `acts` has, for each layer with a check, whether that check found the layer effective."""

    seen: dict[str, Seen]
    acts: dict[str, bool]


class Matrix:
    """The runs of the matrix, with the result of each combination of switches kept for reuse."""

    def __init__(self, internet: Internet, stack: LayeredStack, secret: str) -> None:
        self.internet, self._stack, self._secret = internet, stack, secret
        self._known: dict[tuple[tuple[str, ...], tuple[str, ...], bool], Observation] = {}
        self._closing = ThreadPoolExecutor(2)

    def observe(self, off: tuple[str, ...], provoked: tuple[str, ...] = (), *, whole: bool = True) -> Observation:
        """Run the suite with these layers off: all of it, or only the attempts that can show an arrival."""
        layers = tuple(sorted(off))
        known = self._known.get((layers, provoked, True)) or self._known.get((layers, provoked, whole))
        if known is None:
            attempts = Attempts(apart=_path_of(layers) is not None) if whole else shortened(layers)
            attempts = replace(attempts, answers=not closed(layers))
            known = self._known[layers, provoked, whole] = self._observe(layers, provoked, attempts)
        return known

    def _observe(self, off: tuple[str, ...], provoked: tuple[str, ...], attempts: Attempts) -> Observation:
        self._stack.switch(off, provoked)
        if GUARD in off:
            self._stack.new_guard()
        try:
            pair = Pair(self.internet, self._stack, self._secret, attempts)
            try:
                seen = pair.attack()
                return Observation(seen, acts(self.internet, self._stack, pair, checked(off)))
            finally:
                self._closing.submit(pair.close)
        finally:
            self._stack.switch()
            if GUARD in off:
                self._stack.new_guard()

    def finish(self) -> None:
        """Wait for the removal of all sandboxes."""
        self._closing.shutdown()

    def row(self, defence: Defence) -> list[str]:
        """Return the defence's row of the table."""
        off = (*defence.behind, defence.name)
        before = self.observe(defence.behind, whole=len(defence.behind) < 2)
        after = self.observe(off, defence.provoked, whole=not defence.behind)
        alone = self.observe((defence.name,), defence.provoked)
        check = f"{_word(before, defence.behind, defence)}, {_word(after, off, defence)}: {defence.check}"
        return [defence.name, defence.what, defence.process, check, *(told(alone.seen[one]) for one in RUNTIMES)]

    def path(self, path: Layers) -> list[str]:
        """Return the path's row of the table."""
        seen = self.observe(path.layers, path.provoked, whole=False).seen
        return [path.title, *(told_of(path, seen[one]) for one in RUNTIMES)]


def _path_of(off: tuple[str, ...]) -> Layers | None:
    return next((path for path in defences.PATHS if set(path.layers) == set(off)), None)


def shortened(off: tuple[str, ...]) -> Attempts:
    """Return the attempts that can show an arrival with these layers off. A leak by a request needs no ways out."""
    path = _path_of(off)
    ways = path is None or bool(set(path.leaks) & {one.value for one in FarEnd})
    return Attempts(ways, beside=False, unplanned=path is None or UNPLANNED in path.leaks, apart=True)


def checked(off: tuple[str, ...]) -> set[str]:
    """Return the names of the layers whose own checks run with these layers off.

    They are these layers, and each layer whose `behind` layers are all off. With no layer off, they are all layers.
    """
    behind = {one.name for one in defences.DEFENCES if one.behind and set(one.behind) <= set(off)}
    return {*off, *behind} if off else {one.name for one in defences.DEFENCES}


def _word(observation: Observation, off: tuple[str, ...], defence: Defence) -> str:
    """Return the result of the defence's own check. There is none for a sandbox that does not work."""
    cell = told(observation.seen["runc"])
    if defence.name not in observation.acts or cell.endswith(CLOSED) != closed(off):
        return f"not seen ({cell})"
    return "holds" if observation.acts[defence.name] else "fails"


def told(seen: Seen) -> str:
    """Return the result at the far end, and whether honest requests still arrive.

    A result without leaks proves nothing if the sandbox does not work.
    """
    if seen.refused:
        return REFUSED if NOT_SOFTER in seen.refused else f"not made: {seen.refused[:80]}"
    if not seen.alive:
        return "the worker died"
    verdict = f"fails: {'; '.join(sorted(seen.leaks))}" if seen.leaks else HELD
    return verdict if seen.honest else f"{verdict}; {CLOSED}"


def told_of(path: Layers, seen: Seen) -> str:
    """Return the result with all layers of a path off: it fails if all of the path's leaks arrive."""
    arrives = seen.alive and set(path.leaks) <= set(seen.leaks)
    return ("fails" if seen.honest else f"fails; {CLOSED}") if arrives else told(seen)


def acts(internet: Internet, stack: LayeredStack, pair: Pair, wanted: set[str]) -> dict[str, bool]:
    """Run each layer's own check on runc. If no sandbox was made, check only which layer refused it."""
    seen = pair.seen["runc"]
    if seen.refused:
        by_shim = NOT_SOFTER in seen.refused
        return {"seccomp profile": not by_shim, "shim's bundle check": by_shim}
    if not seen.alive:
        return {}
    name = pair.id("runc")
    records = stack.records_of(name)
    requested = {one.target: one for one in seen.requests}
    sandbox, gateway = stack.netns(name, "sbx"), stack.netns(name, "gw")
    status = stack.worker_status(name)
    denied = [record for record in records if record["kind"] == "flow" and record.get("host") == ATTACKER]
    paths = [record for record in records if record["kind"] == "request" and record.get("path") == "/admin/denied"]

    def refused_address() -> bool:
        return _dns(sandbox, "rebind.bank.example") == (NOERROR, 0)

    checks: dict[str, Callable[[], bool]] = {
        "no route": lambda: not _runs(gateway, "ip", "route", "get", ADDRESSES[ATTACKER]),
        "gw0 rules": lambda: not _delivered(sandbox, gateway),
        "redirect": lambda: _connects(sandbox),
        "netdev pinning": lambda: not _heard(sandbox, "02:53:50:00:00:77"),
        "DNS policy": lambda: _dns(sandbox, DENIED_NAME) == (NXDOMAIN, 0),
        "SNI check": lambda: bool(denied) and all(record["decision"] == "deny" for record in denied),
        "name check of resolver and dialler": lambda: "frames at the attacker" not in seen.leaks,
        "host, SNI and certificate agreement": lambda: seen.answers["another Host"].startswith("HTTP/1.1 421"),
        "Host from the flow": lambda: requested[OWN_HOST].hosts == (API,),
        "certified name": lambda: IMPOSTOR not in seen.leaks,
        "absolute-target check": lambda: not any(target.endswith("/v1/absolute") for target in requested),
        "origin form": lambda: OWN_TARGET in requested,
        "framing check": lambda: "both Content-Length" in seen.answers["two framings"],
        "framing of what is sent": lambda: AMBIGUOUS not in seen.leaks,
        "length of a leased body": lambda: AMBIGUOUS not in seen.leaks,
        "per-request check": lambda: bool(paths) and paths[0]["decision"] == "deny",
        "vaultd's grant check": lambda: FIRST not in seen.outside,
        "scope check of a lease": lambda: DELETED not in seen.outside,
        "address classifier": refused_address,
        "name-to-address check": refused_address,
        GUARD: lambda: not _runs(internet.path(internet.up), sys.executable, "-c", DIAL),
        "shim's plan check": lambda: _by_hand(stack) != 0,
        "seccomp profile": lambda: _filtered(stack, name),
        "shim's bundle check": lambda: False,
        "sentinel": lambda: UNJUDGED not in requested,
        "order of steps": lambda: UNJUDGED not in requested,
        "no connection without an allowed request": lambda: UNJUDGED not in requested,
        "exception ends the flow": lambda: FAILING not in requested,
        "audit acceptance": lambda: UNRECORDED not in requested,
        "response scrub": lambda: RETURNED not in seen.leaks,
        "worker uid": lambda: "0" not in status["Uid"].split("\t"),
        "worker seccomp": lambda: status["Seccomp"] == "2",
        "empty root": lambda: status["mounts"] == "1",
    }
    return {layer: check() for layer, check in checks.items() if layer in wanted}


def _runs(netns: str, *command: str) -> bool:
    done = subprocess.run(["nsenter", f"--net={netns}", *command], capture_output=True, check=False)
    return done.returncode == 0


def _delivered(sandbox: str, gateway: str) -> bool:
    """Return whether the gateway namespace's rules let through a datagram to a port without a service."""
    with in_namespace(gateway, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as listener:
        listener.bind(("192.0.2.1", 9999))
        listener.settimeout(1)
        with in_namespace(sandbox, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sender:
            sender.sendto(b"is anybody there", ("192.0.2.1", 9999))
        try:
            return listener.recv(100) != b""
        except TimeoutError:
            return False


def _connects(sandbox: str) -> bool:
    with in_namespace(sandbox, lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as sock:
        sock.settimeout(5)
        try:
            sock.connect((ADDRESSES[ATTACKER], 443))
        except OSError:
            return False
        return True


def _dns(sandbox: str, name: str) -> tuple[int, int] | None:
    """Return the response code and the number of addresses in the gateway's answer, or None without an answer."""
    with in_namespace(sandbox, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sock:
        sock.settimeout(20)
        sock.sendto(query(name), ("192.0.2.1", 53))
        try:
            answer = sock.recv(2000)
        except TimeoutError:
            return None
        return answer[3] & 15, int.from_bytes(answer[6:8])


def _heard(sandbox: str, mac: str) -> bool:
    """Return whether a query in a raw frame with that source MAC is answered before a later ordinary query."""
    with in_namespace(sandbox, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sock:
        sock.bind(("192.0.2.2", 0))
        sock.setblocking(False)
        _send_frame(sandbox, mac, sock.getsockname()[1], query(DENIED_NAME))
        _dns(sandbox, DENIED_NAME)
        try:
            return sock.recv(2000) != b""
        except BlockingIOError:
            return False


def _send_frame(sandbox: str, mac: str, port: int, message: bytes) -> None:
    length = 8 + len(message)
    udp = port.to_bytes(2) + (53).to_bytes(2) + length.to_bytes(2) + b"\0\0" + message
    head = bytearray.fromhex("4500") + (20 + length).to_bytes(2) + bytes.fromhex("00010000401100 00")
    head += socket.inet_aton("192.0.2.2") + socket.inet_aton("192.0.2.1")
    total = sum(int.from_bytes(head[at : at + 2]) for at in range(0, 20, 2))
    total = (total >> 16) + (total & 0xFFFF)
    head[10:12] = (~total & 0xFFFF).to_bytes(2)
    ethernet = bytes.fromhex("025350000001" + mac.replace(":", "") + "0800")
    with in_namespace(sandbox, lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)) as sock:
        sock.bind(("eth0", 0x0800))
        sock.send(ethernet + bytes(head) + udp)


def _by_hand(stack: LayeredStack) -> int:
    """Start a container on Sallyport's runtime without a plan. Return its exit status.

    Apart from the missing plan it is as restricted as a sandbox.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".json") as profile:
        profile.write(seccomp.profile_json())
        profile.flush()
        hard = ("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--security-opt", f"seccomp={profile.name}")
        start = ("run", "--rm", "--runtime", "sallyport-runc", "--network", "none", *hard, IMAGE, "/bin/true")
        return stack.docker(*start).returncode


def _filtered(stack: LayeredStack, sandbox: str) -> bool:
    """Return whether the container's first process has a seccomp filter."""
    container = stack.container(sandbox)
    pid = stack.docker("inspect", "--format", "{{.State.Pid}}", container).stdout.strip()
    return "Seccomp:\t2" in Path(f"/proc/{pid}/status").read_text()


@contextmanager
def running(prefix: str) -> Iterator[Matrix]:
    """Run an internet and a Sallyport for the matrix alone."""
    value = secrets.token_urlsafe(40)
    run = f"{os.environ['SALLYPORT_RUN_DIR']}-layers"
    former = {name: os.environ[name] for name in ("SALLYPORT_HOME", "SALLYPORT_RUN_DIR")}
    with scratch("layers") as place:
        os.environ |= {"SALLYPORT_HOME": str(place / "home"), "SALLYPORT_RUN_DIR": run}
        try:
            accounts = {"git": "a:b", "index": "a:b", "api": value}
            with Internet(f"{prefix}-layers", place / "internet", accounts) as internet:
                web: Any = internet.start_canary(internet.path(internet.up), "host-web", 80, 443)
                try:
                    with LayeredStack(internet, place / "stack") as stack:
                        store_secret(stack, value)
                        matrix = Matrix(internet, stack, value)
                        try:
                            yield matrix
                        finally:
                            matrix.finish()
                finally:
                    end(web)
        finally:
            os.environ |= former
            subprocess.run(["rm", "-rf", run, str(place / "home")], check=False)


def document(matrix: Matrix) -> str:
    """Run the matrix and return both tables."""
    lines = [*defences.HEAD, *(f"| {' | '.join(matrix.row(defence))} |" for defence in defences.DEFENCES), ""]
    lines += [*defences.PATH_HEAD, *(f"| {' | '.join(matrix.path(path))} |" for path in defences.PATHS)]
    return "\n".join(lines)
