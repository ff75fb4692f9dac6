"""`./run demo`: the main job on real input, attacked from inside, judged at the far end.

Prints a table with one row for each attempt, the audit records behind it, and the decisions by rule. The last line is
`demo: ok ...` or `demo: FAILED ...`, and the exit status agrees with it.
"""

import logging
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import FrameType

from demo.sandboxes import Controls, DemoSandbox, Secrets, empty_image_works
from demo.table import Row, print_table
from lifecycle.posture.attempts import ATTEMPTS
from testbed.control import run_controls
from testbed.far_end import FarEndWatch
from testbed.internet import API, ATTACKER, GIT, INDEX, PREFIX, Internet
from testbed.stack import Stack
from testbed.traces import left_by_server

RUNTIMES = ("runsc", "runc")
SHOWN_DENIALS = 40
WIDTH = 160


class Interrupted(BaseException):
    """SIGTERM arrived. It unwinds every context manager, like Ctrl-C."""


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise Interrupted


def make_secrets() -> Secrets:
    """Return three new secrets; only the upstreams and the vault get them."""
    return Secrets(
        git=f"ledger-bot:{secrets.token_hex(20)}",
        index=f"index-bot:{secrets.token_hex(20)}",
        api=secrets.token_urlsafe(40),
    )


_BEGAN = time.monotonic()


def say(text: str) -> None:
    """Print progress with the time since the start."""
    print(f"demo: {time.monotonic() - _BEGAN:5.1f} s  {text}", flush=True)


def demo(directory: Path, rows: list[Row]) -> str:
    """Run everything below `directory`. Each row is added at once, so that a failure does not hide earlier ones.

    Returns:
        The report of the audit log.
    """
    values = make_secrets()
    say("building an internet with an attacker in it")
    with Internet(PREFIX, directory / "internet", {"git": values.git, "index": values.index, "api": values.api}) as net:
        say("control runs: each attempt from a container without a gateway, on the kernel of each runtime")
        controls = {runtime: run_controls(net, runtime) for runtime in RUNTIMES}
        say("starting Sallyport")
        with Stack(net, directory / "sallyport") as stack:
            for name, host, value in (
                ("git-login", GIT, values.git),
                ("index-login", INDEX, values.index),
                ("api-token", API, values.api),
            ):
                stack.sallyport("vault", "put", name, "--host", host, stdin=value)
            sandboxes: list[DemoSandbox] = []
            try:
                for runtime in RUNTIMES:
                    began = time.monotonic()
                    sandboxes.append(DemoSandbox(stack, runtime, values))
                    say(f"sandbox on {runtime}: ready after {time.monotonic() - began:.2f} s")
                for sandbox in sandboxes:
                    say(f"the job, on {sandbox.runtime}")
                    rows += sandbox.work()
                for sandbox, other in zip(sandboxes, reversed(sandboxes), strict=True):
                    say(f"the attacks, from {sandbox.runtime}")
                    with FarEndWatch(net, stack, sandbox, other) as watch:
                        rows += [sandbox.attack(attempt, watch, controls) for attempt in ATTEMPTS]
                        say("the attacks again, from a privileged container in its network namespace")
                        rows += sandbox.privileged_attacks(ATTEMPTS, watch, controls)
                    say(f"searching {sandbox.runtime} for secrets")
                    rows += sandbox.leak_search()
                for sandbox in sandboxes:
                    say(f"killing the gateway worker of {sandbox.runtime}")
                    rows.append(sandbox.kill_worker(net))
                rows += [row for runtime in RUNTIMES for row in noticed_attacks(net, stack, runtime, values, controls)]
                rows += [empty_image_works(stack, runtime) for runtime in RUNTIMES]
            finally:
                for sandbox in sandboxes:
                    rows.append(sandbox.delete())
            report = audit_report(stack)
        left = left_by_server(stack.run, stack.state)
        rows.append(Row("server", "stop it", "nothing remains", "; ".join(left) or "nothing remains", not left))
    return report


def noticed_attacks(net: Internet, stack: Stack, runtime: str, values: Secrets, controls: Controls) -> list[Row]:
    """Run the attacks that cut their sandbox off, each from a privileged container beside a new sandbox."""
    rows = []
    for attempt in (attempt for attempt in ATTEMPTS if attempt.noticed):
        say(f"{attempt.title}: from a privileged container beside {runtime}")
        sandbox, other = DemoSandbox(stack, runtime, values), DemoSandbox(stack, runtime, values)
        try:
            with FarEndWatch(net, stack, sandbox, other) as watch:
                rows += sandbox.noticed_attack(attempt, watch, controls)
        finally:
            sandbox.close()
            other.close()
    return rows


def audit_report(stack: Stack) -> str:
    """Return the denials behind the table, the decisions by rule, and the result of the log's own verification."""
    records = stack.audit_records()
    denials = stack.sallyport("audit", "tail", "--denied").splitlines()
    shown = denials[-SHOWN_DENIALS:]
    lines = [f"audit: the last {len(shown)} of {len(denials)} denials", *(f"  {line[:WIDTH]}" for line in shown)]
    lines += ["", "audit: decisions by rule"]
    counts = Counter((str(r.get("decision")), str(r.get("kind")), str(r.get("rule", "-"))) for r in records)
    lines += [
        f"  {count:6d}  {decision:8} {kind:20} {rule}" for (decision, kind, rule), count in sorted(counts.items())
    ]
    return "\n".join([*lines, "", f"audit: {stack.sallyport('audit', 'verify').strip().splitlines()[-1]}"])


def main() -> int:
    """Run the demo; return 0 if every row is as expected."""
    signal.signal(signal.SIGTERM, _interrupt)
    logging.getLogger("opensandbox").setLevel(logging.CRITICAL)  # failures are rows, not lines of output
    rows: list[Row] = []
    failure = report = ""
    try:
        with tempfile.TemporaryDirectory(prefix="sallyport-demo-", ignore_cleanup_errors=False) as directory:
            Path(directory).chmod(0o711)
            report = demo(Path(directory), rows)
    except (KeyboardInterrupt, Interrupted):
        failure = "interrupted"
    except Exception as error:  # noqa: BLE001 - the demo's verdict: whatever failed, it says so and exits 1
        failure = f"{type(error).__name__}: {error}"
    print_table(rows)
    print(report, end="\n\n" if report else "")
    wrong = sum(1 for row in rows if not row.as_expected)
    elapsed = time.monotonic() - _BEGAN
    if failure or wrong or not rows:
        print(f"demo: FAILED ({failure or f'{wrong} of {len(rows)} rows not as expected'}) after {elapsed:.0f} s")
        return 1
    places = " and ".join(RUNTIMES)
    print(f"demo: ok, {len(rows)} rows as expected on {places}, nothing reached {ATTACKER}, {elapsed:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
