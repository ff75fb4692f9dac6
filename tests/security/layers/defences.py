"""The defences, the paths they stand on, and what each row of the matrix says. Pure; the runs are `matrix`'s."""

from dataclasses import dataclass

from tests.security.layers.substitutes import TAKEN_OVER


@dataclass(frozen=True, slots=True)
class Defence:
    """One layer.

    Attributes:
        name: as the substitutes know it.
        what: one sentence.
        process: where it acts.
        check: what its own check looks at.
        behind: layers that stand before it: its own check has those off too, else nothing would ever come to it.
    """

    name: str
    what: str
    process: str
    check: str
    behind: tuple[str, ...] = ()
    provoked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Path:
    """Layers that stand behind one another; with all of them off, the far-end suite fails on `fails`."""

    name: str
    layers: tuple[str, ...]
    leak: str
    fails: tuple[str, ...] = ("runc", "runsc")
    provoked: tuple[str, ...] = ()


TAKEN = (TAKEN_OVER,)
DEFENCES = (
    Defence("no route", "the gateway namespace has no uplink, no route, no forwarding", "kernel", "a route exists"),
    Defence("gw0 rules", "the slot's filter drops what is neither proxy nor DNS", "kernel", "a datagram to port 9999"),
    Defence("redirect", "TCP goes to the worker, whatever its destination", "kernel", "a connection to a stranger"),
    Defence("netdev pinning", "frames of another MAC or address end at gw0", "kernel", "a question in a foreign frame"),
    Defence("DNS policy", "a name that policy denies is answered locally", "worker", "the answer about a denied name"),
    Defence("SNI check", "a flow is decided by its server name or address", "worker", "the record of a denied flow"),
    Defence(
        "name check of resolver and dialler",
        "no question and no dial for a name or address that policy names nowhere",
        "worker",
        "frames at the attacker",
        ("SNI check",),
    ),
    Defence(
        "host, SNI and certificate agreement",
        "Host, server name and the server's certificate name one host",
        "worker",
        "another Host on a judged flow",
    ),
    Defence("absolute-target check", "an absolute target names the Host", "worker", "an absolute target arrives"),
    Defence("framing check", "one framing: a length or chunks", "worker", "why a request with both is refused"),
    Defence("per-request check", "each request is judged alone", "worker", "the record of a denied path"),
    Defence(
        "vaultd's grant check",
        "a secret is released for a request of its host, methods and paths only; off: for any",
        "vaultd",
        "the secret in a first request of another method",
        ("per-request check", "scope check of a lease"),
    ),
    Defence(
        "scope check of a lease",
        "a secret that was released goes only into methods and paths of its lease",
        "worker",
        "the secret in a later request of another method",
        ("per-request check",),
    ),
    Defence("address classifier", "no private, local or metadata address is dialled", "worker", "an address refused"),
    Defence("name-to-address check", "a name's addresses are judged before a dial", "worker", "an address refused"),
    Defence(
        "upstream-namespace table",
        "the guard's table binds the workers' uids",
        "kernel",
        "a dial to the host under a worker's uid",
    ),
    Defence("shim's plan check", "no container without its launch plan", "shim", "a container started by hand"),
    Defence("seccomp profile", "system calls of runc containers", "kernel", "the container's filter"),
    Defence(
        "shim's bundle check",
        "a bundle that is softer than planned is refused",
        "shim",
        "a container without our profile",
        ("seccomp profile",),
    ),
    Defence("sentinel", "a flow without a stamped decision is ended", "worker", "a request nobody judged"),
    Defence("hook wrapper", "an exception while judging ends the flow", "worker", "a judge that fails"),
    Defence(
        "no connection without an allowed request",
        "the engine dials only while an allowed request waits",
        "worker",
        "a request nobody judged arrives",
        ("sentinel",),
    ),
    Defence("audit acceptance", "nothing is allowed that the log did not accept", "worker", "an unrecorded request"),
    Defence("worker uid", "a worker runs under a uid of its own", "worker", "its uid", provoked=TAKEN),
    Defence("worker seccomp", "a worker starts no program", "worker", "its filter", provoked=TAKEN),
    Defence("empty root", "no path leads to a file from a worker", "worker", "its mounts", provoked=TAKEN),
)

PATHS = (
    Path("packets", ("no route", "gw0 rules", "redirect", "netdev pinning"), "frames at the attacker"),
    Path("names", ("DNS policy", "SNI check", "name check of resolver and dialler"), "frames at the attacker"),
    Path(
        "addresses",
        ("address classifier", "name-to-address check", "upstream-namespace table"),
        "frames at the metadata service",
    ),
    Path(
        "secrets",
        ("per-request check", "vaultd's grant check", "scope check of a lease"),
        "the secret outside of its binding",
    ),
    Path(
        "judgement",
        ("sentinel", "hook wrapper", "no connection without an allowed request"),
        "a request that nobody judged",
    ),
    Path("start", ("seccomp profile", "shim's bundle check"), "kernel interfaces opened", ("runc",)),
    Path(
        "a worker that is taken over",
        ("worker uid", "worker seccomp", "empty root"),
        "a file of the host at the attacker",
        provoked=TAKEN,
    ),
)

BEGIN, END = "<!-- layers: begin -->", "<!-- layers: end -->"
HEAD = (
    "| Off | What it is | Where | Its own check: on, off | Far end, runc | Far end, runsc |",
    "|---|---|---|---|---|---|",
)
PATH_HEAD = ("| All off | Far end, runc | Far end, runsc |", "|---|---|---|")


def cells(line: str) -> list[str]:
    """A table row's cells."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(document: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The rows between the markers, by their first cell: those of defences, those of paths."""
    rows = [cells(line) for line in document.partition(BEGIN)[2].partition(END)[0].splitlines() if line.startswith("|")]
    skipped = {cells(HEAD[0])[0], cells(PATH_HEAD[0])[0], "---"}
    rows = [row for row in rows if row[0] not in skipped]
    return {row[0]: row for row in rows if len(row) == 6}, {row[0]: row for row in rows if len(row) == 3}
