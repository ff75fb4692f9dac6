"""Messages, long steps, and concurrent work. The output of a long step is shown only if it fails."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import BinaryIO, NoReturn

_SHOWN_LINES = 40


class Failure(Exception):
    """A command cannot continue; the message says why, `status` is the exit status."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def say(message: str) -> None:
    """Print a message of `./run`."""
    print(f"run: {message}", file=sys.stderr, flush=True)


def step(title: str, *command: str, cwd: str | None = None, **environment: str) -> None:
    """Run a long command; print its title, then the time that it took.

    Raises:
        Failure: the command failed; the end of its output has been printed.
    """
    began = time.monotonic()
    say(f"{title} ...")
    with tempfile.TemporaryFile() as log:
        status = subprocess.run(
            command, stdout=log, stderr=log, cwd=cwd, env=os.environ | environment, check=False
        ).returncode
        if status != 0:
            log.seek(0)
            _show(b"".join(log.readlines()[-_SHOWN_LINES:]), sys.stderr.buffer)
            raise Failure(f"{title}: failed")
    say(f"{title}: done in {int(time.monotonic() - began)} s")


def call(*command: str, cwd: str | None = None, **environment: str) -> None:
    """Run a command whose output is shown.

    Raises:
        Failure: the command failed, with its exit status.
    """
    status = subprocess.run(command, cwd=cwd, env=os.environ | environment, check=False).returncode
    if status != 0:
        raise Failure(f"{command[0]}: exit status {status}", status if status > 0 else 128 - status)


def become(program: str, *arguments: str) -> NoReturn:
    """Replace this process. Signals reach the program itself, with the handling with which this process was started."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # CPython ignores them, and an executed program inherits that
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(program, (program, *arguments))  # noqa: S606 - no shell


class BackgroundStep:
    """Work in a separate process, concurrent with the rest; `wait` shows its output. Create none while threads run."""

    def __init__(self, name: str, work: Callable[[], int]) -> None:
        """Start `work`, which returns an exit status."""
        self._name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives until `wait`
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            os._exit(_run(work, self._log.fileno()))

    def wait(self) -> int:
        """Wait for the work, show its output, and return its exit status."""
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        say(f"{self._name}:")
        self._log.seek(0)
        _show(self._log.read(), sys.stdout.buffer)
        self._log.close()
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def end(self) -> None:
        """End work that is no longer needed; its output is dropped."""
        if self._pid:
            os.kill(self._pid, signal.SIGTERM)
            os.waitpid(self._pid, 0)
            self._pid = 0
            self._log.close()


def _run(work: Callable[[], int], log: int) -> int:
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        status = work()
    except Failure as failure:
        say(str(failure))
        status = failure.status
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except BaseException:  # noqa: BLE001 - this process ends here; its parent must not run twice
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _show(output: bytes, stream: BinaryIO) -> None:
    stream.write(output)
    stream.flush()
