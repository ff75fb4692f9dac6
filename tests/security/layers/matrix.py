"""Runs the rows: a pair of sandboxes under some switches, the far-end suite, and each layer's own check."""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.far_end import end
from demo.internet import ADDRESSES, ATTACKER, UP_ADDRESS, Internet, in_namespace
from demo.stack import IMAGE
from lifecycle.posture.ways_out import query
from tests.security.layers import defences
from tests.security.layers.defences import Defence
from tests.security.layers.defences import Path as Layers
from tests.security.layers.stack import LayeredStack, store_secret
from tests.security.layers.substitutes import UNRECORDED
from tests.security.layers.suite import DELETED, FIRST, RUNTIMES, UNJUDGED_ARRIVES, Pair, Seen

GUARD = "upstream-namespace table"
WORKER_UID = 700001000
DENIED_NAME = "asked.attacker.example"
NOERROR, NXDOMAIN = 0, 3
DIAL = f"""
import encodings.idna, os, socket
os.setresgid({WORKER_UID}, {WORKER_UID}, {WORKER_UID}); os.setresuid({WORKER_UID}, {WORKER_UID}, {WORKER_UID})
socket.create_connection(("{UP_ADDRESS}", 80), timeout=10)
"""


@dataclass(frozen=True, slots=True)
class Observation:
    """What one pair brought to light; `acts` has, for each layer with a check, whether that check found it at work."""

    seen: dict[str, Seen]
    acts: dict[str, bool]


class Matrix:
    """Remembers each combination of switches it was asked for."""

    def __init__(self, internet: Internet, stack: LayeredStack, secret: str) -> None:
        self.internet, self._stack, self._secret = internet, stack, secret
        self._known: dict[tuple[tuple[str, ...], tuple[str, ...]], Observation] = {}
        self._closing = ThreadPoolExecutor(2)

    def observe(self, off: tuple[str, ...], provoked: tuple[str, ...] = ()) -> Observation:
        """Run the suite with these layers off: with several, where much arrives, from one runtime after another."""
        key = tuple(sorted(off)), provoked
        if key not in self._known:
            self._known[key] = self._observe(*key)
        return self._known[key]

    def _observe(self, off: tuple[str, ...], provoked: tuple[str, ...]) -> Observation:
        self._stack.switch(off, provoked)
        if GUARD in off:
            self._stack.new_guard()
        try:
            pair = Pair(self.internet, self._stack, self._secret)
            try:
                seen = pair.attack(apart=len(off) > 1)
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
        """The defence's row of the table."""
        before = self.observe(defence.behind)
        after = self.observe((*defence.behind, defence.name), defence.provoked)
        alone = self.observe((defence.name,), defence.provoked)
        check = f"{_word(before.acts[defence.name])}, {_word(after.acts[defence.name])}: {defence.check}"
        return [defence.name, defence.what, defence.process, check, *(told(alone.seen[one]) for one in RUNTIMES)]

    def path(self, path: Layers) -> list[str]:
        """The path's row of the table."""
        seen = self.observe(path.layers, path.provoked).seen
        verdicts = ["fails" if path.leak in seen[one].leaks else told(seen[one]) for one in RUNTIMES]
        return [f"{path.name}: {', '.join(path.layers)}", *verdicts]


def checked(off: tuple[str, ...]) -> set[str]:
    """Whose own check is worth a look with these off: theirs, and those they stood before; with all on, everybody's."""
    behind = {one.name for one in defences.DEFENCES if one.behind and set(one.behind) <= set(off)}
    return {*off, *behind} if off else {one.name for one in defences.DEFENCES}


def _word(acts: bool) -> str:
    return "holds" if acts else "fails"


def told(seen: Seen) -> str:
    """One cell."""
    if seen.refused:
        return "held: the shim refuses to start it" if "seccomp" in seen.refused else f"held: {seen.refused[:80]}"
    return "held" if seen.held else "FAILS: " + "; ".join(sorted(seen.leaks))


def acts(internet: Internet, stack: LayeredStack, pair: Pair, wanted: set[str]) -> dict[str, bool]:
    """Look at each layer itself, on runc; where there is no sandbox, only at what refused it."""
    seen = pair.seen["runc"]
    if seen.refused:
        return {"seccomp profile": "seccomp" not in seen.refused, "shim's bundle check": "seccomp" in seen.refused}
    name = pair.id("runc")
    records = stack.records_of(name)
    requested = {target for _, _, target in seen.requests}
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
        "netdev pinning": lambda: _dns(sandbox, DENIED_NAME, "02:53:50:00:00:77") is None,
        "DNS policy": lambda: _dns(sandbox, DENIED_NAME) == (NXDOMAIN, 0),
        "SNI check": lambda: bool(denied) and all(record["decision"] == "deny" for record in denied),
        "name check of resolver and dialler": lambda: "frames at the attacker" not in seen.leaks,
        "host, SNI and certificate agreement": lambda: seen.answers["another Host"].startswith("HTTP/1.1 421"),
        "absolute-target check": lambda: "/v1/absolute" not in requested,
        "framing check": lambda: "both Content-Length" in seen.answers["two framings"],
        "per-request check": lambda: bool(paths) and paths[0]["decision"] == "deny",
        "vaultd's grant check": lambda: FIRST not in seen.outside,
        "scope check of a lease": lambda: DELETED not in seen.outside,
        "address classifier": refused_address,
        "name-to-address check": refused_address,
        GUARD: lambda: not _runs(internet.path(internet.up), sys.executable, "-c", DIAL),
        "shim's plan check": lambda: _by_hand(stack) != 0,
        "seccomp profile": lambda: _filtered(stack, name),
        "shim's bundle check": lambda: False,
        "sentinel": lambda: seen.answers["/v1/unjudged"] == "",
        "hook wrapper": lambda: seen.answers["/v1/failing"] == "",
        "no connection without an allowed request": lambda: UNJUDGED_ARRIVES not in seen.leaks,
        "audit acceptance": lambda: UNRECORDED not in requested,
        "worker uid": lambda: "0" not in status["Uid"].split("\t"),
        "worker seccomp": lambda: status["Seccomp"] == "2",
        "empty root": lambda: status["mounts"] == "1",
    }
    return {layer: check() for layer, check in checks.items() if layer in wanted}


def _runs(netns: str, *command: str) -> bool:
    done = subprocess.run(["nsenter", f"--net={netns}", *command], capture_output=True, check=False)
    return done.returncode == 0


def _delivered(sandbox: str, gateway: str) -> bool:
    """Whether a datagram to no service of ours gets through the gateway namespace's rules."""
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


def _dns(sandbox: str, name: str, mac: str | None = None) -> tuple[int, int] | None:
    """Code and number of addresses of the gateway's answer; with `mac`, asked in a hand-made frame of that sender."""
    message = query(name)
    with in_namespace(sandbox, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sock:
        sock.bind(("192.0.2.2", 0))
        sock.settimeout(20 if mac is None else 5)  # of the latter no answer is the usual one
        if mac is None:
            sock.sendto(message, ("192.0.2.1", 53))
        else:
            _send_frame(sandbox, mac, sock.getsockname()[1], message)
        try:
            answer = sock.recv(2000)
            return answer[3] & 15, int.from_bytes(answer[6:8])
        except TimeoutError:
            return None


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
    """Start a container under our runtime without a plan, as root on the host may; its exit status."""
    return stack.docker(
        "run", "--rm", "--runtime", "sallyport-runc", "--network", "none", IMAGE, "/bin/true"
    ).returncode


def _filtered(stack: LayeredStack, sandbox: str) -> bool:
    """Whether the container's first process has a seccomp filter."""
    container = stack.host("inspect", sandbox=sandbox)["container"]
    pid = stack.docker("inspect", "--format", "{{.State.Pid}}", container).stdout.strip()
    return "Seccomp:\t2" in Path(f"/proc/{pid}/status").read_text()


@contextmanager
def running(prefix: str, port: int) -> Iterator[Matrix]:
    """An internet and a Sallyport for the matrix alone."""
    value = secrets.token_urlsafe(40)
    run = f"{os.environ['SALLYPORT_RUN_DIR']}-layers"
    former = {name: os.environ[name] for name in ("SALLYPORT_HOME", "SALLYPORT_RUN_DIR")}
    with tempfile.TemporaryDirectory(prefix="sallyport-layers-") as name:
        place = Path(name)
        place.chmod(0o711)
        os.environ |= {"SALLYPORT_HOME": str(place / "home"), "SALLYPORT_RUN_DIR": run}
        try:
            accounts = {"git": "a:b", "index": "a:b", "api": value}
            with Internet(f"{prefix}-layers", place / "internet", accounts) as internet:
                web: Any = internet.start_canary(internet.path(internet.up), "host-web", 80, 443)
                try:
                    with LayeredStack(internet, place / "stack", port=port) as stack:
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
    """Both tables, run now."""
    lines = [*defences.HEAD, *(f"| {' | '.join(matrix.row(defence))} |" for defence in defences.DEFENCES), ""]
    lines += [*defences.PATH_HEAD, *(f"| {' | '.join(matrix.path(path))} |" for path in defences.PATHS)]
    return "\n".join(lines)
