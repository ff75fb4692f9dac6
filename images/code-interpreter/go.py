"""A kernel for Go: each piece of code is a whole program (`package main`), built and run in the context's directory.

Nothing goes from one run to the next but the compiler's cache. An interrupt ends the compiler or the program, and with
it whatever they started.
"""

import codecs
import os
import re
import selectors
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ipykernel.kernelapp import IPKernelApp
from ipykernel.kernelbase import Kernel

CHUNK = 65536


class GoKernel(Kernel):
    """Builds and runs programs, one at a time."""

    implementation = "go"
    implementation_version = "1"
    language_info = {"name": "go", "mimetype": "text/x-go", "file_extension": ".go"}  # noqa: RUF012 - Kernel's own trait
    banner = "Go, a whole program at a time"

    def do_execute(self, code: str, silent: bool, *_: Any, **__: Any) -> dict[str, Any]:
        """Run `code`; returns the content of an `execute_reply`."""
        with tempfile.TemporaryDirectory(prefix="go-") as place:
            source, program = Path(place, "main.go"), Path(place, "main")
            source.write_text(code)
            try:
                build = ["go", "build", "-o", str(program), str(source)]
                made = subprocess.run(build, capture_output=True, text=True, errors="replace", check=False)
                if made.returncode != 0:
                    said = re.sub(rf"\S*{re.escape(source.parent.name)}/", "", made.stderr)
                    return self._failed("CompileError", said.removeprefix("# command-line-arguments\n"))
                status = self._run(str(program), silent)
            except KeyboardInterrupt:
                return self._failed("KeyboardInterrupt", "")
            except OSError as error:
                return self._failed(type(error).__name__, str(error))
        if status != 0:
            ended = f"exit status {status}" if status > 0 else f"signal: {signal.Signals(-status).name}"
            return self._failed("ExitError", ended)
        return {"status": "ok", "execution_count": self.execution_count, "payload": [], "user_expressions": {}}

    def _run(self, program: str, silent: bool) -> int:
        pipe = subprocess.PIPE
        with subprocess.Popen([program], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, process_group=0) as child:
            try:
                with selectors.DefaultSelector() as selector:
                    for name, stream in (("stdout", child.stdout), ("stderr", child.stderr)):
                        decoder = codecs.getincrementaldecoder("utf-8")("replace")
                        selector.register(stream, selectors.EVENT_READ, (name, decoder))  # type: ignore[arg-type]
                    while selector.get_map():
                        for key, _ in selector.select():
                            name, decoder = key.data
                            data = os.read(key.fd, CHUNK)
                            if (text := decoder.decode(data, final=not data)) and not silent:
                                self.send_response(self.iopub_socket, "stream", {"name": name, "text": text})
                            if not data:
                                selector.unregister(key.fileobj)
                return child.wait()
            except BaseException:
                os.killpg(child.pid, signal.SIGKILL)
                raise

    def _failed(self, name: str, said: str) -> dict[str, Any]:
        lines = said.splitlines()
        error = {"ename": name, "evalue": lines[0] if lines else "", "traceback": lines}
        self.send_response(self.iopub_socket, "error", error)
        return {"status": "error", "execution_count": self.execution_count, **error}


if __name__ == "__main__":
    IPKernelApp.launch_instance(kernel_class=GoKernel)
