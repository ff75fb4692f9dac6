"""Keeps hostd running: `sallyport serve` becomes `python -m runtimes.process.watchdog HOST.json`. Standard library.

- It starts hostd again after a kill, or if hostd ended after it had been ready. The delay grows if hostd ends again
  soon. It does not restart a hostd that cannot run (that ended before it was ever ready); it exits with hostd's
  status.
- It kills a hostd that hangs: when hostd is ready, its event loop writes to the watchdog every second. Silence is
  judged by hostd's use of the processor meanwhile, as for every other process (`liveness`), and not during an orderly
  end.
- It passes SIGINT and SIGTERM on, and waits for hostd's orderly removal. Signals that arrive before hostd can handle
  them stay pending, so that none is lost.
- The kernel kills hostd when its watchdog ends (PR_SET_PDEATHSIG): no hostd runs without one. The hostd of the next
  watchdog adopts.
- Before each hostd, and after the last, it ends the workers of the former one. They have a second to write their last
  records, which is enough for every correct worker; then they are killed. (They can send nothing meanwhile: `guard`.)
- Orphaned descendants become its children, and it reaps them: no dead process remains in a group or namespace.
- It dumps no core, and neither does hostd: their environment can have secrets that a policy names (`supplies`).

It is small, so that there is little that can fail. The next hostd ends processes that the watchdog could not end.
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
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_BACKOFF = (0.0, 0.2, 0.5, 1.0)
_CALM_SECONDS = 10.0
_GRACE_SECONDS = 1.0
_TICK_SECONDS = 1.0
BEAT_SECONDS = 1.0
_ENDING = (signal.SIGINT, signal.SIGTERM)
_AWAITED = (*_ENDING, signal.SIGCHLD)
_USAGE, _CANNOT_START = 64, 71
_RANK = b"-5"  # in the scale of nice(1): three times the default weight

_libc = ctypes.CDLL(None, use_errno=True)


class Watchdog:
    """Runs one hostd after another. It calls `end_workers` while there is none.

    It looks at hostd every `tick` seconds. `hangs` are the seconds, and the seconds of processor time, after which a
    hostd without progress counts as hung (see `liveness`).
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
        """Run until hostd has ended permanently; return the exit status."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        dump_nothing()
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
        ready, given = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        pid = self._start(given)
        os.close(given)
        liveness, beats = Liveness(self._tick, *self._hangs), 0
        if self._stopping:  # the signal came while there was no hostd: this one adopts what is left, to remove it
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

    def _start(self, given: int) -> int:
        ours = os.getpid()
        pid = os.fork()
        if pid != 0:
            return pid
        try:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == ours:  # otherwise the watchdog ended before the prctl call
                os.setsid()  # a Ctrl-C in the terminal reaches only the watchdog, which passes it on
                outrank(os.getpid())
                os.set_inheritable(given, True)
                # SIGINT and SIGTERM stay blocked, and so pending, until hostd has its handlers.
                signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD,))
                environment = {**os.environ, READY_FD: str(given)}
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
        """Wait; a signal to end shortens the wait."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not self._stopping:
            received = signal.sigtimedwait(_AWAITED, left)
            self._stopping = received is not None and received.si_signo in _ENDING


def dump_nothing() -> None:
    """Have the kernel write no core of this process, whatever its limits and the pattern for cores are.

    Other processes of its user cannot read its memory.
    """
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def outrank(pid: int) -> None:
    """Give the session of process `pid` a higher CPU weight, if the kernel weighs sessions (autogroup).

    While a supervised process is not running, sandboxes are closed or the API is unavailable. So its start has
    precedence over other work. If the kernel weighs control groups instead, this has no effect; set the weight of the
    group there.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/autogroup", "wb", buffering=0) as file:
        file.write(_RANK)


def ending(host: Path) -> Callable[[], None]:
    """Return a function that ends the workers of the hostd whose configuration file is `host`."""

    def end() -> None:
        try:
            run = str(json.loads(host.read_bytes())["run_dir"])
            with contextlib.ExitStack() as stack:
                with contextlib.suppress(FileNotFoundError):  # without the directory no hostd can run there
                    stack.callback(os.close, lock(Path(run)))
                Cgroups(run).end_all(_GRACE_SECONDS)
        except BlockingIOError:  # another server runs there, and the workers belong to it
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
    """Return why hostd hangs, None if it does not. hostd must not have been reaped yet."""
    try:
        return liveness.look(observe(pid, time.monotonic(), beats))
    except (OSError, ValueError, IndexError):
        return None


def main(arguments: list[str]) -> int:
    """Keep a hostd with the configuration file in `arguments` running; return the exit status."""
    if len(arguments) != 1:
        print("usage: python -m runtimes.process.watchdog HOST.json", file=sys.stderr)
        return _USAGE
    return Watchdog([sys.executable, "-m", "runtimes.hostd", arguments[0]], ending(Path(arguments[0]))).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
