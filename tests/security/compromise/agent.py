"""The agent inside a compromised process: it runs the Python code that the test sends, on its own thread.

A request is one line of JSON: the code. The answer is one line: `{"value": ...}` or `{"error": [type, errno, text]}`.
The code assigns `value`, which must be serializable as JSON. Its names remain for the next request. `process` is the
object that the process passes to the agent: the `Worker` in a gateway worker.
"""

import json
import socket
import threading
from pathlib import Path
from typing import Any

SOCKET = "agents.sock"


class Agent:
    """A connection to the test. It must be made before the process is confined; `obey` starts the thread."""

    def __init__(self, run: Path, name: str) -> None:
        """Connect to the test's socket in `run` and introduce the process as `name`."""
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.connect(str(run / SOCKET))
        self._sock.sendall(name.encode() + b"\n")

    def obey(self, **names: Any) -> None:
        """Start to run the code that the test sends; the code sees `names`."""
        threading.Thread(target=self._run, args=(names,), name="agent", daemon=True).start()

    def _run(self, names: dict[str, Any]) -> None:
        for line in self._sock.makefile("rb"):
            self._sock.sendall(json.dumps(self._answer(json.loads(line), names)).encode() + b"\n")

    def _answer(self, code: str, names: dict[str, Any]) -> dict[str, Any]:
        names.pop("value", None)
        try:
            exec(compile(code, "hostile", "exec"), names)  # noqa: S102 - it is what the agent is for
            json.dumps(value := names.get("value"))
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the test's to judge
            return {"error": [type(error).__name__, getattr(error, "errno", None), str(error)[:500]]}
        return {"value": value}
