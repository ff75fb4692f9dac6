"""The defences, the paths that they protect, and the expected rows of the matrix. Pure; `matrix` runs the tests."""

from collections.abc import Iterable
from dataclasses import dataclass

from lifecycle.posture.attempts import FarEnd
from tests.security.layers.substitutes import TAKEN_OVER
from tests.security.layers.suite import (
    ABSOLUTE,
    AMBIGUOUS,
    FOREIGN_HOST,
    IMPOSTOR,
    OUTSIDE,
    PLANTED_ARRIVES,
    RETURNED,
    UNJUDGED_ARRIVES,
    UNPLANNED,
    UNRECORDED_ARRIVES,
)

HELD = "held"
REFUSED = "held: the shim refuses to start it"
CLOSED = "no honest request comes through"


@dataclass(frozen=True, slots=True)
class Defence:
    """One layer.

    Attributes:
        name: the name that the substitutes use.
        what: a description in one sentence.
        process: where the layer acts.
        check: what the layer's own check observes.
        behind: layers that act before this one. They are also off for its own check, because otherwise nothing reaches
            this layer.
        provoked: what is provoked while the layer is off.
        cell: the expected result at the far end without the layer, on each runtime.
    """

    name: str
    what: str
    process: str
    check: str
    behind: tuple[str, ...] = ()
    provoked: tuple[str, ...] = ()
    cell: str = HELD


@dataclass(frozen=True, slots=True)
class Path:
    """Layers that protect the same path one behind the other.

    With all of them off, all of `leaks` arrive from the runtimes in `fails`. A path of one layer states that no other
    layer stands behind it.
    """

    name: str
    layers: tuple[str, ...]
    leaks: tuple[str, ...]
    fails: tuple[str, ...] = ("runc", "runsc")
    provoked: tuple[str, ...] = ()

    def cell(self, runtime: str) -> str:
        """Return the expected result at the far end with all layers off."""
        verdict = "fails" if runtime in self.fails else HELD
        return f"{verdict}; {CLOSED}" if closed(self.layers) else verdict

    @property
    def title(self) -> str:
        """The first cell of the path's row."""
        alone = " (no layer stands behind it)" if len(self.layers) == 1 else ""
        return f"{self.name}: {', '.join(self.layers)}{alone}"


def closed(off: Iterable[str]) -> bool:
    """Return whether honest requests cannot arrive with these layers off."""
    return any(one.cell.endswith(CLOSED) for one in DEFENCES if one.name in off)


TAKEN = (TAKEN_OVER,)
ORDER, DIALS = "order of steps", "no connection without an allowed request"
LEASED_LENGTH = "length of a leased body"
DEFENCES = (
    Defence("no route", "the gateway namespace has no uplink, no route, no forwarding", "kernel", "a route exists"),
    Defence("gw0 rules", "the slot's filter drops what is neither proxy nor DNS", "kernel", "a datagram to port 9999"),
    Defence(
        "redirect",
        "TCP goes to the worker, whatever its destination",
        "kernel",
        "a connection to a stranger",
        cell=f"{HELD}; {CLOSED}",
    ),
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
    Defence("Host from the flow", "the Host that is sent is the flow's", "worker", "another spelling of the Host"),
    Defence(
        "certified name",
        "a request goes on a connection only with the certificate's name in the log",
        "worker",
        "a request at the server of another name",
        ("host, SNI and certificate agreement", "Host from the flow"),
    ),
    Defence("absolute-target check", "an absolute target names the Host", "worker", "a target of another host arrives"),
    Defence("origin form", "the target that is sent is a path", "worker", "an absolute target of the same host"),
    Defence("framing check", "one framing: a length or chunks", "worker", "why a request with both is refused"),
    Defence(
        "framing of what is sent",
        "no request is written with both framings",
        "worker",
        "a request with both arrives",
        ("framing check", LEASED_LENGTH),
    ),
    Defence(
        LEASED_LENGTH,
        "no more of a body is sent than its secret was leased for",
        "worker",
        "a request with both arrives",
        ("framing check", "framing of what is sent"),
    ),
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
    Defence("seccomp profile", "system calls of runc containers", "kernel", "the container's filter", cell=REFUSED),
    Defence(
        "shim's bundle check",
        "a bundle that is softer than planned, or shares a namespace, is refused",
        "shim",
        "a container without our profile",
        ("seccomp profile",),
    ),
    Defence(
        "sentinel",
        "a request without a verdict that allows it ends its flow before it is sent",
        "worker",
        "a request without a decision arrives",
        (ORDER, DIALS),
    ),
    Defence(
        ORDER,
        "an exchange refuses a step that does not follow its judgement",
        "worker",
        "a request without a decision arrives",
        ("sentinel", DIALS),
    ),
    Defence(
        DIALS,
        "the engine dials only while an allowed request waits",
        "worker",
        "a request without a decision arrives",
        ("sentinel", ORDER),
    ),
    Defence(
        "exception ends the flow",
        "an exception while judging ends the flow",
        "worker",
        "a request whose judge fails arrives",
        ("sentinel", ORDER, DIALS),
    ),
    Defence(
        "audit acceptance",
        "nothing is allowed that the log did not accept",
        "worker",
        "an unrecorded request",
        cell=f"fails: {UNRECORDED_ARRIVES}",
    ),
    Defence(
        "response scrub",
        "a secret that a server returns is masked",
        "worker",
        "the answers of a server that echoes",
        cell=f"fails: {RETURNED}",
    ),
    Defence("worker uid", "a worker runs under a uid of its own", "worker", "its uid", provoked=TAKEN),
    Defence("worker seccomp", "a worker starts no program", "worker", "its filter", provoked=TAKEN),
    Defence("empty root", "no path leads to a file from a worker", "worker", "its mounts", provoked=TAKEN),
)

PATHS = (
    Path("packets", ("no route", "gw0 rules", "redirect", "netdev pinning"), (FarEnd.ATTACKER.value,)),
    Path("names", ("DNS policy", "SNI check", "name check of resolver and dialler"), (FarEnd.ATTACKER.value,)),
    Path(
        "addresses",
        ("address classifier", "name-to-address check", "upstream-namespace table"),
        (FarEnd.METADATA.value,),
    ),
    Path(
        "the host that is asked",
        ("host, SNI and certificate agreement", "Host from the flow", "certified name"),
        (FOREIGN_HOST, IMPOSTOR),
    ),
    Path("the target that is asked for", ("absolute-target check", "origin form"), (ABSOLUTE,)),
    Path("the end of a request", ("framing check", "framing of what is sent", LEASED_LENGTH), (AMBIGUOUS,)),
    Path("secrets", ("per-request check", "vaultd's grant check", "scope check of a lease"), (OUTSIDE,)),
    Path("answers", ("response scrub",), (RETURNED,)),
    Path("judgement", ("sentinel", ORDER, DIALS, "exception ends the flow"), (UNJUDGED_ARRIVES,)),
    Path("the log", ("audit acceptance",), (UNRECORDED_ARRIVES,)),
    Path("an unplanned container", ("shim's plan check", "shim's bundle check"), (UNPLANNED,)),
    Path("start", ("seccomp profile", "shim's bundle check"), (FarEnd.KERNEL.value,), ("runc",)),
    Path(
        "a worker that is taken over",
        ("worker uid", "worker seccomp", "empty root"),
        (PLANTED_ARRIVES,),
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
    """Return the cells of a table row."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(document: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the rows between the markers, by their first cell: those of defences and those of paths."""
    rows = [cells(line) for line in document.partition(BEGIN)[2].partition(END)[0].splitlines() if line.startswith("|")]
    skipped = {cells(HEAD[0])[0], cells(PATH_HEAD[0])[0], "---"}
    rows = [row for row in rows if row[0] not in skipped]
    return {row[0]: row for row in rows if len(row) == 6}, {row[0]: row for row in rows if len(row) == 3}
