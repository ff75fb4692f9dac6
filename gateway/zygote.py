"""The zygote: imports all modules of a worker once, and forks one worker per sandbox.

    python -m gateway.zygote CONFIG.json         root, in the upstream network namespace, SALLYPORT_CONTROL_FD set

The zygote is single-threaded and blocking: a fork would copy the locked locks of other threads or of an event loop.

- The zygote holds nothing of a sandbox. It closes the descriptors of a `fork` request after the fork. The child closes
  all other descriptors.
- A child shares the zygote's user and network namespace until it drops its privileges. It reads no byte of a sandbox
  before.
- The zygote shares one PID namespace with all workers: generators are reseeded by pid, so each pid must be unique.
- The zygote exits when hostd's channel ends. Workers then see the end of their own channels.

The zygote does not restart workers, and holds no policy or secret. It holds what all workers have in common.
"""

import gc
import json
import logging
import os
import select
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import wire.frames as frames
from gateway import spawn
from gateway.config import WorkerConstants
from gateway.rehearsal import rehearse
from gateway.tls.contexts import UpstreamContext
from wire.api.zygote import DESCRIPTORS, OPERATIONS, Exited, Fork, Forked, Identify, Identity, Prepare
from wire.errors import Code, ConfigError, RequestError
from wire.frames import FrameError, Message, close_all
from wire.operations import Done, operation, parameters

CONTROL_ENV = "SALLYPORT_CONTROL_FD"

_log = logging.getLogger("gateway.zygote")


def check_config(path: Path) -> None:
    """Check the configuration file: an empty object. What workers have in common comes with `Prepare`.

    Raises:
        ValueError: it is something else.
    """
    if json.loads(path.read_text()) != {}:
        raise ValueError("the zygote's configuration is not an empty object")


class Zygote:
    """The loop of the zygote: serves requests of hostd, and reports exits of children."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: set[int] = set()
        self._common: Common | None = None
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        """Serve until hostd's channel ends."""
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        while True:
            readable, _, _ = select.select([self._control.fileno(), self._wake], [], [])
            if self._wake in readable:
                self._drain()
                self._reap()
            if self._control.fileno() in readable:
                received = frames.receive(self._control)
                if received is None:
                    return
                self._answer(*received)

    def _drain(self) -> None:
        try:
            while os.read(self._wake, 512):
                pass
        except BlockingIOError:
            pass

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._children.clear()
                return
            if pid == 0:
                return
            self._children.discard(pid)
            exited = Exited(pid, os.waitstatus_to_exitcode(status))
            frames.send(self._control, {"op": operation(exited), **parameters(exited)})

    def _answer(self, message: Message, fds: list[int]) -> None:
        ident, op = message.pop("id", None), message.pop("op", None)
        try:
            answer: Message = {"id": ident, "ok": parameters(self._handle(OPERATIONS.read(str(op), message), fds))}
        except RequestError as error:
            answer = {"id": ident, "error": {"code": error.code, "message": error.message}}
        except OSError as error:
            answer = {"id": ident, "error": {"code": Code.INTERNAL, "message": type(error).__name__}}
        finally:
            close_all(fds)
        if ident is not None:
            frames.send(self._control, answer)

    def _handle(self, message: object, fds: list[int]) -> Done | Forked | Identity:
        match message:
            case Prepare():
                self._common = common(message)
                _share()
                return Done()
            case Fork():
                return Forked(self._fork(order(message, fds, self._common)))
            case Identify():
                return Identity(os.getpid())
            case _:
                return Done()  # a ping

    def _fork(self, made: spawn.Order) -> int:
        if len(os.listdir("/proc/self/task")) != 1:
            raise RequestError(Code.UNAVAILABLE, "the zygote has more than one thread and cannot fork: restart it")
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                code = spawn.become_worker(made)
            except BaseException as error:  # noqa: BLE001 - the child never returns into the zygote's loop
                _log.error("worker of sandbox %s failed to start: %s: %s", made.sandbox, type(error).__name__, error)
            finally:
                os._exit(code)
        self._children.add(pid)
        return pid


@dataclass(frozen=True, slots=True)
class Common:
    """What all workers have in common. `trusted` are the roots of `constants`, None if they cannot be read."""

    constants: WorkerConstants
    trusted: UpstreamContext | None


def common(given: Prepare) -> Common:
    """Return what all workers have in common, when the zygote has rehearsed a worker's start under it.

    Raises:
        RequestError: some part of it cannot be, or is out of range.
    """
    try:
        constants = WorkerConstants.of(given)
    except ConfigError as error:
        raise RequestError(Code.INVALID, str(error)) from None
    rehearse(constants)
    try:
        return Common(constants, UpstreamContext(constants.upstream_roots))
    except ValueError:  # each worker refuses its configuration and says why
        return Common(constants, None)


def _share() -> None:
    """Keep the collector from the objects that exist now, because it would write to pages that workers share."""
    gc.collect()
    gc.freeze()


def order(fork: Fork, fds: list[int], shared: Common | None) -> spawn.Order:
    """Return the order for a worker, from a request and its descriptors.

    Raises:
        RequestError: the number of descriptors is wrong, or there was no `Prepare`.
    """
    if shared is None:
        raise RequestError(Code.UNAVAILABLE, "fork comes after prepare")
    if len(fds) != DESCRIPTORS:
        raise RequestError(Code.INVALID, f"fork takes {DESCRIPTORS} descriptors")
    return spawn.Order(
        fork.sandbox,
        fork.generation,
        fork.uid,
        fork.gid,
        fork.cgroup,
        shared.constants,
        spawn.Descriptors(*fds),
        shared.trusted,
    )


def main(arguments: list[str]) -> int:
    """Entry point. `arguments` is the path of the configuration file."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(levelname)s: %(message)s")
    if len(arguments) != 1:
        _log.error("usage: python -m gateway.zygote CONFIG.json")
        return 64
    check_config(Path(arguments[0]))
    control = socket.socket(fileno=int(os.environ.pop(CONTROL_ENV)))
    control.set_inheritable(False)
    control.setblocking(True)
    spawn.preload()
    _share()
    try:
        Zygote(control).run()
    except (FrameError, OSError) as error:
        _log.error("control channel to hostd failed: %s", type(error).__name__)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
