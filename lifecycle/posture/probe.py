"""`sallyport doctor --probe`: starts sandboxes here and tries to get out of them.

- Each way is first tried from a place without a gate. A way whose control does not arrive proves nothing.
- Each try must report that it ran to its end. A try that crashed, was killed or does not exist proves nothing either.
- A way is held if nothing arrived at its far end. The sandbox's own view is no evidence, except for kernel interfaces.
- The allowed host is tried too, because every way would look held in a sandbox without any network.
- Server, namespaces and directory are removed in every case, also after Ctrl-C.
"""

import contextlib
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from lifecycle import doctor
from lifecycle.config.settings import Settings, SettingsError
from lifecycle.posture import interrupts, server
from lifecycle.posture.attempts import ATTEMPTS, Attempt, Evidence, FarEnd, ProbeError, Report, arrived
from lifecycle.posture.capture import Capture
from lifecycle.posture.network import ALLOWED, ALLOWED_ADDRESS, GATEWAY_PORTS, Counter, ProbeNetwork, ProbeNetworkError
from lifecycle.posture.server import ProbeSandbox, ProbeServer, ServerError

_SETTLE_SECONDS = 0.2
_HELLO = (
    "import socket, ssl; ssl.create_default_context().wrap_socket("
    f"socket.create_connection(('{ALLOWED}', 443), 5), server_hostname='{ALLOWED}')"
)


class ProbeOutcome(StrEnum):
    """The verdict about a way."""

    HELD = "held"
    ESCAPED = "ESCAPED"
    UNTRIED = "untried"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the report."""

    outcome: ProbeOutcome
    runtime: str
    title: str
    detail: str

    def text(self) -> str:
        """Return the printed text."""
        return f"{self.outcome.value:<8}{self.runtime:<6} {self.title}: {self.detail}"


def probe(operator: Settings, say: Callable[[str], None]) -> bool:
    """Try everything and print each line. Return whether all of it held."""
    logging.getLogger("httpx").setLevel(logging.WARNING)  # Its lines would mix with those of the report.
    with interrupts.unwinding(), tempfile.TemporaryDirectory(prefix="sallyport-probe-") as name:
        directory = Path(name)
        directory.chmod(0o711)  # Daemons with other users must be able to pass through the directory.
        try:
            return _probe(operator, directory, say)
        except (ProbeNetworkError, ServerError, SettingsError, OSError) as error:
            say(f"{ProbeOutcome.UNTRIED.value:<8}all    {error}")
            return False
        finally:
            interrupts.ignore()


def _probe(operator: Settings, directory: Path, say: Callable[[str], None]) -> bool:
    good = True
    with ProbeNetwork(directory.name, directory) as network:
        own = server.private(operator, directory, network.path(network.up))
        for finding in doctor.ask_process(own):
            good &= finding.ok
            say(finding.line())
        if not good:
            raise ServerError("no way was tried: a layer is missing")
        controls = {attempt.probe: _control(network, attempt) for attempt in ATTEMPTS}
        with server.running(own, directory) as private:
            for runtime in operator.get("sallyport.allowed_runtimes"):
                for line in _try_runtime(network, private, runtime, controls):
                    good &= line.outcome is ProbeOutcome.HELD
                    say(line.text())
    return good


@dataclass(frozen=True, slots=True)
class ControlResult:
    """The result of a way without a gate. `problem` is why it is no control."""

    arrived: int
    problem: str = ""


def _control(network: ProbeNetwork, attempt: Attempt) -> ControlResult:
    """Try a way without a gate, as the control."""
    net = network.path(network.net)
    with Capture(net, "net1") as wire, Counter(net, GATEWAY_PORTS) as gateway:
        host = network.host.hits
        try:
            report = network.try_ungated(attempt.probe)
        except ProbeError as error:
            return ControlResult(0, str(error))
        time.sleep(_SETTLE_SECONDS)
        frames = wire.since(0)
        near = frames if attempt.far_end is FarEnd.NEIGHBOUR else []
        count = arrived(attempt.far_end, Evidence(frames, near, network.host.hits - host, gateway.hits, report))
        return ControlResult(count, "" if count else "it did not arrive")


def _try_runtime(
    network: ProbeNetwork, private: ProbeServer, runtime: str, controls: dict[str, ControlResult]
) -> Iterator[Line]:
    try:
        sandbox, other = private.create(runtime), private.create(runtime)
    except ServerError as error:
        yield Line(ProbeOutcome.UNTRIED, runtime, "every way", str(error))
        return
    yield _allowed(network, sandbox)
    try:
        with ExitStack() as stack:
            near = stack.enter_context(Capture(private.netns(other.name, "sandbox"), "eth0"))
            gateway = stack.enter_context(Counter(private.netns(sandbox.name, "gateway"), GATEWAY_PORTS))
            for attempt in ATTEMPTS:
                yield _tried(network, near, gateway, sandbox, attempt, controls[attempt.probe])
        yield _allowed(network, sandbox)
    except (ServerError, OSError) as error:
        yield Line(ProbeOutcome.UNTRIED, runtime, "the ways after this", str(error))


def _tried(
    network: ProbeNetwork,
    near: Capture,
    gateway: Counter,
    sandbox: ProbeSandbox,
    attempt: Attempt,
    control: ControlResult,
) -> Line:
    if control.problem:
        return Line(
            ProbeOutcome.UNTRIED, sandbox.runtime, attempt.title, f"its control, without a gate: {control.problem}"
        )
    marks = network.wire.mark(), near.mark(), network.host.hits, gateway.hits
    report, problem = Report(), ""
    try:
        report = sandbox.attempt(attempt.probe)
    except (ServerError, ProbeError) as error:
        problem = str(error)
    time.sleep(_SETTLE_SECONDS)
    evidence = Evidence(
        network.wire.since(marks[0]),
        near.since(marks[1]),
        network.host.hits - marks[2],
        gateway.hits - marks[3],
        report,
    )
    count = arrived(attempt.far_end, evidence)
    said = problem or ", ".join(report.values())
    inside = "".join(character for character in said if character.isprintable())[:80]
    if count == 0 and problem:
        return Line(ProbeOutcome.UNTRIED, sandbox.runtime, attempt.title, inside)
    outcome = ProbeOutcome.ESCAPED if count else ProbeOutcome.HELD
    detail = f"{count} {attempt.far_end.value}; control: {control.arrived}; inside: {inside}"
    return Line(outcome, sandbox.runtime, attempt.title, detail)


def _allowed(network: ProbeNetwork, sandbox: ProbeSandbox) -> Line:
    """Try what policy allows, because a denial proves something only if allowed traffic works."""
    title, mark = f"the allowed host {ALLOWED} is reached", network.wire.mark()
    with contextlib.suppress(ServerError):
        sandbox.run(f'python3 -c "{_HELLO}"')
    time.sleep(_SETTLE_SECONDS)
    count = sum(1 for frame in network.wire.since(mark) if frame.destination == ALLOWED_ADDRESS)
    outcome = ProbeOutcome.HELD if count else ProbeOutcome.UNTRIED
    return Line(outcome, sandbox.runtime, title, f"{count} frames" if count else "the gate lets nothing through at all")
