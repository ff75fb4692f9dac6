"""Programs that `docker exec` runs in a container, with their whole output."""

from collections.abc import Callable, Sequence

END = "end of the output"
_ATTEMPTS = 3
_MARKED = 'end=$1; shift; "$@"; status=$?; echo "$end"; exit $status'


class OutputLostError(Exception):
    """Docker has lost the output of a program each time."""


def execute(start: Callable[[Sequence[str]], tuple[int, str]], command: Sequence[str]) -> tuple[int, str]:
    """Run a program with `start`, which returns status and output; return both.

    On a busy host Docker can lose the output of a program that has ended with status 0. A mark at its end shows that
    nothing is lost. Without it the program is run again. The container must have `sh`.

    Raises:
        OutputLostError: the mark was missing three times.
    """
    for _ in range(_ATTEMPTS):
        status, output = start(["sh", "-c", _MARKED, "sh", END, *command])
        said, mark, more = output.rpartition(f"{END}\n")
        if mark:
            return status, said + more
    raise OutputLostError(f"{command[0]}: status {status}, output {output[-200:]!r}")
