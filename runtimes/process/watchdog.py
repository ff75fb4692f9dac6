"""Keeps hostd running: `sallyport serve` becomes `python -m runtimes.process.watchdog HOST.json`. Standard library.

- hostd that was killed, or ended by itself after it had been ready, is started again, later each time it does not stay;
  one that cannot run (it ended before it was ever ready) is not: its status is ours.
- hostd that hangs is killed: once it is ready its event loop writes to us every second. A silence is judged by what it
  does with the processor meanwhile, as for every other process (`liveness`), and not while it ends in order.
- SIGINT and SIGTERM are passed on, and hostd's orderly removal is waited for. hostd finds them pending when they come
  before it can take them: none is lost, at no moment.
- hostd is killed with its watchdog (PR_SET_PDEATHSIG): none runs without one. The hostd of the next watchdog adopts.
- Before each hostd, and after the last, the workers of the former one are ended: they have a second to write what they
  still have to say, which ends every honest one, and are killed then. (Nothing of them leaves meanwhile: `guard`.)
- Orphans of everything below come to us and are reaped: a dead process never stays in a group or namespace.

It is small so that nothing can make it fail: what it cannot end the next hostd ends.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from runtimes.process.cgroups import Cgroups
from runtimes.process.liveness import CPU_SECONDS, IDLE_SECONDS, Liveness, observe
from runtimes.process.predecessor import lock

READY_FD = "SALLYPORT_HOSTD_READY_FD"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_BACKOFF = (0.0, 0.2, 0.5, 1.0)
_CALM_SECONDS = 10.0
_GRACE_SECONDS = 1.0
_TICK_SECONDS = 1.0
BEAT_SECONDS = 1.0
_ENDING = (signal.SIGINT, signal.SIGTERM)
_AWAITED = (*_ENDING, signal.SIGCHLD)
_USAGE, _CANNOT_START = 64, 71
_RANK = b"-5"  # as nice(1) counts: three times as much

_libc = ctypes.CDLL(None, use_errno=True)


class Watchdog:
    """One hostd after another. `end_workers` is called while there is none.

    It looks every `tick` seconds. `hangs` are the seconds, and the processor time, in which a hostd that does not hang
    makes progress (see `liveness`).
    """

    def __init__(
        self,
        command: list[str],
        end_workers: Callable[[], None],
        tick: float = _TICK_SECONDS,
        hangs: tuple[float, float] = (IDLE_SECONDS, CPU_SECONDS),
    ) -> None:
        self._tick = tick
        self._hangs = hangs
        self._command = command
        self._end_workers = end_workers
        self._stopping = False
        self._was_ready = False

    def run(self) -> int:
        """Run until hostd has ended for good; return the exit status."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        attempt = 0
        self._end_workers()
        while True:
            began = time.monotonic()
            status = self._one_life()
            self._end_workers()
            if self._stopping or status == 0 or (status > 0 and not self._was_ready):
                return status if status >= 0 else 128 - status
            attempt = 0 if time.monotonic() - began > _CALM_SECONDS else attempt
            print(f"sallyport: hostd ended with status {status}: starting it again", file=sys.stderr, flush=True)
            self._pause(_BACKOFF[min(attempt, len(_BACKOFF) - 1)])
            attempt += 1

    def _one_life(self) -> int:
        """Start hostd and wait for its end; return its status, negative for a signal."""
        ready, told = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        pid = self._start(told)
        os.close(told)
        liveness, beats = Liveness(self._tick, *self._hangs), 0
        if self._stopping:  # it came while there was no hostd: this one takes over what is left, to remove it
            os.kill(pid, signal.SIGTERM)
        try:
            while True:
                status = self._reap(pid)
                if status is not None:
                    return status
                if (beat := _read(ready)) and not beats:
                    self._was_ready = True
                beats += len(beat)
                if beats and not self._stopping and (why := _hangs(liveness, pid, beats)):
                    print(f"sallyport: hostd hangs: {why}", file=sys.stderr, flush=True)
                    os.kill(pid, signal.SIGKILL)
                received = signal.sigtimedwait(_AWAITED, self._tick)
                if received is not None and received.si_signo in _ENDING:
                    self._stopping = True
                    os.kill(pid, signal.SIGTERM)
        finally:
            self._was_ready = self._was_ready or _read(ready) != b""
            os.close(ready)

    def _start(self, told: int) -> int:
        ours = os.getpid()
        pid = os.fork()
        if pid != 0:
            return pid
        try:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == ours:  # else the watchdog died before the prctl call
                os.setsid()  # a Ctrl-C in our terminal is ours to pass on
                outrank(os.getpid())
                os.set_inheritable(told, True)
                # SIGINT and SIGTERM stay blocked, so pending, until hostd has its handlers.
                signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD,))
                environment = {**os.environ, READY_FD: str(told)}
                os.execve(self._command[0], self._command, environment)  # noqa: S606 - no shell is meant
        finally:
            os._exit(_CANNOT_START)

    def _reap(self, wanted: int) -> int | None:
        """Reap all processes that have ended; return the status of `wanted` if it is among them."""
        found = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return found
            if pid == 0:
                return found
            if pid == wanted:
                found = os.waitstatus_to_exitcode(status)

    def _pause(self, seconds: float) -> None:
        """Wait; a signal to end cuts it short."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not self._stopping:
            received = signal.sigtimedwait(_AWAITED, left)
            self._stopping = received is not None and received.si_signo in _ENDING


def outrank(pid: int) -> None:
    """Have the session of process `pid` weigh more than others, where the kernel weighs sessions (autogroup).

    While a guarding process is gone its sandboxes are closed or the API is away: its start has precedence over other
    work. Where control groups weigh instead this does nothing; give them the weight there.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/autogroup", "wb", buffering=0) as file:
        file.write(_RANK)


def ending(host: Path) -> Callable[[], None]:
    """Return what ends the workers of the hostd whose configuration file is `host`."""

    def end() -> None:
        try:
            run = str(json.loads(host.read_bytes())["run_dir"])
            with contextlib.ExitStack() as stack:
                with contextlib.suppress(FileNotFoundError):  # no directory: no hostd can work there
                    stack.callback(os.close, lock(Path(run)))
                Cgroups(run).end_all(_GRACE_SECONDS)
        except BlockingIOError:  # another server runs there, and the workers are its own
            return
        except (OSError, ValueError, LookupError, TypeError) as error:
            print(f"sallyport: workers could not be ended: {type(error).__name__}", file=sys.stderr, flush=True)

    return end


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 4096)
    except BlockingIOError:
        return b""


def _hangs(liveness: Liveness, pid: int, beats: int) -> str | None:
    """Say why hostd hangs, None if it does not; it cannot have been reaped yet."""
    try:
        return liveness.look(observe(pid, time.monotonic(), beats))
    except (OSError, ValueError, IndexError):
        return None


def main(arguments: list[str]) -> int:
    """Keep a hostd with the configuration file that `arguments` names; return the exit status."""
    if len(arguments) != 1:
        print("usage: python -m runtimes.process.watchdog HOST.json", file=sys.stderr)
        return _USAGE
    return Watchdog([sys.executable, "-m", "runtimes.hostd", arguments[0]], ending(Path(arguments[0]))).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
