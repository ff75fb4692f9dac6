"""The Jupyter server of the code-interpreter image: kernels and sessions, for execd on loopback, and nothing else.

- It listens on 127.0.0.1 only. Its token is a published constant: a client that reaches it is in the sandbox already
  and may run anything there.
- Of jupyter_server it serves the routes that execd calls: no pages, files, terminals, extensions or shutdown.
- An exception that Java code did not catch is named `EvalException`, as jshell names it and as clients expect. The
  kernel wraps it in a RuntimeException of its own and reports that name; the code's own exception is in the value.
- A kernel that died is never restarted under its old id: its client would not learn that the variables are lost.
- The first Python kernel starts with the server, and belongs to the first request for one in the default directory.
- Output that its reader cannot keep up with is dropped, and said to be, once `BACKLOG_BYTES` wait: no reader can make
  this process grow. So is a message of more than `MESSAGE_BYTES`, which would cost the reader its connection. Replies,
  states and errors are never dropped. The output of a kernel without a listener is not kept.
"""

import asyncio
import os
import sys
from typing import Any

sys.path.insert(0, "/opt/code-interpreter/lib")  # all there is: it runs isolated from what the sandbox installs

from jupyter_server.serverapp import ServerApp
from jupyter_server.services.kernels.connection.channels import ZMQChannelsWebsocketConnection
from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager
from traitlets.config import Config

TOKEN = "opensandboxcodeinterpreterjupyter"  # noqa: S105 - the same in every image, see above
PORT = 44771
FIRST_KERNEL = "python3"
BACKLOG_BYTES = 32 * 1024 * 1024
MESSAGE_BYTES = 20 * 1024 * 1024  # as JSON three times that at most, which is what execd takes
DEATH_SECONDS = 0.5
SHUTDOWN_SECONDS = 1.0
LATE_KERNELS = ("javascript", "typescript")
LATE_SECONDS = 0.05  # Deno says idle up to 7 ms before its last result (seen with twice as much to do as cores)
JAVA_KERNEL = "java"
JAVA_FAILURE, CLIENTS_FAILURE = "RuntimeException", "EvalException"
_DROPPABLE = frozenset({"stream", "display_data", "update_display_data", "execute_result"})


class Kernels(AsyncMappingKernelManager):
    """Kernels, one of them begun before anyone asks."""

    first: "asyncio.Task[str] | None" = None

    def begin(self) -> None:
        """Start the first kernel."""
        self.first = asyncio.ensure_future(super().start_kernel(kernel_name=FIRST_KERNEL, path=""))

    async def start_kernel(self, *, kernel_id: str | None = None, path: str | None = None, **options: Any) -> str:
        """Start a kernel, or hand out the first; returns its id."""
        usual = kernel_id is None and options.get("kernel_name") == FIRST_KERNEL
        if usual and self.first is not None and self.cwd_for_path(path or "") == self.cwd_for_path(""):
            first, self.first = self.first, None
            try:
                begun = await first
                if begun in self and await self.get_kernel(begun).is_alive():
                    return begun
            except Exception as error:  # noqa: BLE001 - whatever it was, another kernel may start
                self.log.warning("the first kernel did not start: %s", error)
        started: str = await super().start_kernel(kernel_id=kernel_id, path=path, **options)
        return started


class Connection(ZMQChannelsWebsocketConnection):
    """One reader of one kernel."""

    waiting = 0
    dropping = False

    def connect(self) -> Any:
        """Begin to pass messages on, each at once: small ones would wait for the acknowledgement of the last."""
        self.websocket_handler.set_nodelay(True)
        return super().connect()

    def handle_outgoing_message(self, stream: Any, outgoing_msg: Any) -> None:
        """Pass a message on; a malformed one is dropped alone, where Jupyter would stop listening."""
        try:
            super().handle_outgoing_message(stream, outgoing_msg)
        except Exception as error:  # noqa: BLE001 - what a kernel sends can be wrong in any way
            self.log.warning("a malformed message of a kernel was dropped: %s", type(error).__name__)

    def _limit_rate(self, channel: str, msg: dict[str, Any], msg_list: Any) -> bool:
        """Say whether a message is to be dropped."""
        if self.waiting == 0:
            self.dropping = False
        if channel != "iopub" or msg["header"]["msg_type"] not in _DROPPABLE:
            return False
        if self.waiting < BACKLOG_BYTES and sum(map(len, msg_list)) <= MESSAGE_BYTES:
            return False
        if not self.dropping:
            self.dropping = True
            self.write_stderr("Output was dropped here: more than could be passed on.", msg["parent_header"])
        return True

    def _on_zmq_reply(self, stream: Any, msg_list: Any) -> None:
        """Pass a message on; Deno's word that it is idle only when what it said before can have come."""
        content = msg_list["content"]
        java = self.kernel_manager.kernel_name == JAVA_KERNEL and isinstance(content, dict)
        if java and content.get("ename") == JAVA_FAILURE:
            content["ename"] = CLIENTS_FAILURE
        late = stream.channel == "iopub" and self.kernel_manager.kernel_name in LATE_KERNELS
        if late and msg_list["header"]["msg_type"] == "status" and msg_list["content"]["execution_state"] == "idle":
            asyncio.get_running_loop().call_later(LATE_SECONDS, super()._on_zmq_reply, stream, msg_list)
        else:
            super()._on_zmq_reply(stream, msg_list)

    def write_message(self, msg: Any, binary: bool = False) -> None:
        """Send a message, and count it until the socket has taken it."""
        sending = self.websocket_handler.write_message(msg, binary)
        if sending is None:
            return
        size = len(msg)
        self.waiting += size

        def taken(done: "asyncio.Future[None]") -> None:
            self.waiting -= size
            done.exception()

        sending.add_done_callback(taken)


class Server(ServerApp):
    """A server of kernels only."""

    default_services = ("api", "kernels", "kernelspecs", "sessions")


def configuration() -> Config:
    """What differs from Jupyter's defaults."""
    config = Config()
    config.ServerApp.update(
        ip="127.0.0.1",
        port=int(os.environ.get("JUPYTER_PORT") or PORT),
        port_retries=0,
        allow_root=True,
        open_browser=False,
        root_dir="/",
        tornado_settings={"ws_ping_interval": 0},  # on loopback a dead reader is a closed connection
        kernel_manager_class=Kernels,
        kernel_websocket_connection_class=Connection,
        log_level="WARN",
    )
    config.IdentityProvider.token = os.environ.get("JUPYTER_TOKEN") or TOKEN
    config.Kernels.buffer_offline_messages = False
    config.KernelManager.shutdown_wait_time = SHUTDOWN_SECONDS
    config.KernelRestarter.restart_limit = 0
    config.KernelRestarter.time_to_dead = DEATH_SECONDS
    return config


def main() -> None:
    """Serve until stopped."""
    server = Server.instance(config=configuration())
    server.initialize(argv=[], find_extensions=False)
    server.io_loop.add_callback(server.kernel_manager.begin)
    server.start()


if __name__ == "__main__":
    main()
