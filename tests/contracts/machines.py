"""Common parts of the state machines against execd: the runner, hostile values, quoting.

`SALLYPORT_TEST_DEPTH` multiplies the number of examples, which are then random.
"""

import os
import sys

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

DEPTH = int(os.environ.get("SALLYPORT_TEST_DEPTH", "1"))
TRIPPED = "/tmp/tripped"  # a file that exists if a value was run as a command
MORE = (
    "\x01 \x02 \x7f \x1b[31m \x08 \x0b \x0c \xe9 \u2028 \U0001f600 EOF end __execd 251 %s | > ( ) ! * ~ [0] {a,b} a B 7"
)
FRAGMENTS = [
    *("'", '"', "\\", "\n", "\r", "\r\n", "\t", " ", "  ", "$", "$HOME", "${x}", "=", "#", "&", ";", "declare -x a=b"),
    *(f"$(touch {TRIPPED})", f"`touch {TRIPPED}`", f"'; touch {TRIPPED}; '", "\nend\n", 'data: {"type":"init"}'),
    *('{"type":"execution_complete"}\n\n', *MORE.split(" ")),
]
hostile = st.lists(st.sampled_from(FRAGMENTS), max_size=6).map(lambda parts: "".join(parts).encode())
values = st.one_of(hostile, hostile, st.binary(max_size=8).map(lambda raw: raw.replace(b"\0", b"")))


def explore(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    """Run a machine. The examples are always the same, unless `SALLYPORT_TEST_DEPTH` is set."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples * DEPTH,
            stateful_step_count=steps,
            deadline=None,
            derandomize=DEPTH == 1,
            database=None,
            print_blob=True,
            report_multiple_bugs=False,
            phases=[Phase.generate],  # shrinking with real sandboxes takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )


def failed() -> bool:
    """Return whether a machine's teardown runs because a step failed or was abandoned."""
    return sys.exc_info()[0] is not None


def quoted(value: bytes) -> str:
    """Return the value as a word of bash: unchanged if it is text, otherwise with escapes."""
    try:
        return "'" + value.decode().replace("'", r"'\''") + "'"
    except UnicodeDecodeError:
        return "$'" + "".join(f"\\{byte:03o}" for byte in value) + "'"
