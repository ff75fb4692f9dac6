"""The first code of a new code-interpreter sandbox, through the official SDK.

Each round makes a sandbox and waits until the SDK reports its interpreter as ready. Then it runs the sandbox's first
code, in the default context, and the same code again.
"""

import time
from datetime import timedelta

from code_interpreter import CodeInterpreterSync

from bench.figures import Figure, Goal
from bench.fixture import BenchError, Fixture
from testbed.stack import CODE_ENTRYPOINT, CODE_IMAGE

RUNTIMES = ("runc", "runsc")
LIMIT = 1200.0
_POLLING = timedelta(milliseconds=20)
_CODE = "print(1)"


def measure(fixture: Fixture, rounds: int) -> list[Figure]:
    """Run the first code of `rounds` sandboxes on each runtime, in turn.

    Raises:
        BenchError: the code did not print the expected text.
    """
    samples: dict[str, list[tuple[float, float, float]]] = {runtime: [] for runtime in RUNTIMES}
    for _ in range(rounds):
        for runtime in RUNTIMES:
            samples[runtime].append(_once(fixture, runtime))
    figures = []
    for runtime in RUNTIMES:
        ready, first, later = zip(*samples[runtime], strict=True)
        figures += [
            Figure(f"code {runtime}: ready", "ms", ready),
            Figure(f"code {runtime}: first {_CODE}", "ms", first, None, Goal("median", LIMIT)),
            Figure(f"code {runtime}: a later {_CODE}", "ms", later),
        ]
    return figures


def _once(fixture: Fixture, runtime: str) -> tuple[float, float, float]:
    began = time.monotonic()
    sandbox = fixture.stack.create(runtime, image=CODE_IMAGE, policy=None, entrypoint=CODE_ENTRYPOINT)
    try:
        with CodeInterpreterSync.create(sandbox=sandbox, health_check_polling_interval=_POLLING) as interpreter:
            times = [time.monotonic()]
            for _ in range(2):
                execution = interpreter.codes.run(_CODE, language="python")
                times.append(time.monotonic())
                printed = "".join(message.text for message in execution.logs.stdout)
                if execution.error is not None or printed != "1\n":
                    raise BenchError(f"{_CODE} on {runtime}: {execution.error}")
    finally:
        sandbox.kill()
        sandbox.close()
    ready, first, later = times
    return 1000 * (ready - began), 1000 * (first - ready), 1000 * (later - first)
