"""A private server on private directories with its sandboxes, used through its public API.

- It uses the programs, images and runtimes of the operator's settings. Directories, users, port, Docker and upstream
  are its own, so it shares nothing with a running server.
- The end of its context ends the server like Ctrl-C does, which removes all sandboxes.
"""

import base64
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx

import vault.keyring
from lifecycle import doctor
from lifecycle.config import launch
from lifecycle.config.settings import Settings
from lifecycle.posture import interrupts, ways_out
from lifecycle.posture.attempts import Report, report
from lifecycle.posture.network import ALLOWED, RESOLVER, targets
from wire.api.hostd import Inspect
from wire.blocking import BlockingClient
from wire.sockets import ROOT

HOSTD = "runtimes.hostd"
_TAKEN = (
    *("sallyport.python", "sallyport.runsc", "sallyport.runc", "sallyport.execd", "sallyport.images"),
    *("sallyport.allowed_runtimes", "sallyport.docker.binary", "sallyport.upstream_roots"),
)
_USERS = {
    "serve": 701000001,
    "vaultd": 701000002,
    "auditd": 701000003,
    "compiler": 701000004,
    "fetcher": 701000005,
    "worker_base": 701001000,
    "workers": 64,
}
_START_SECONDS, _STOP_SECONDS, _SANDBOX_SECONDS, _COMMAND_SECONDS = 180.0, 90.0, 120.0, 120.0
_SCRIPT = "/tmp/sallyport-ways-out.py"  # noqa: S108 - inside a sandbox that is ours alone


class ServerError(Exception):
    """A step failed. The message names it."""


def private(operator: Settings, directory: Path, upstream: str) -> Settings:
    """Return the settings of the private server below `directory`."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    taken = {key: operator.values[key] for key in _TAKEN if key in operator.values}
    runtimes = operator.get("sallyport.allowed_runtimes")
    own = {
        "server.port": port,
        "sallyport.run_dir": str(directory / "run"),
        "sallyport.state_dir": str(directory / "state"),
        "sallyport.upstream_netns": upstream,
        "sallyport.dns_upstreams": (f"{RESOLVER}:53",),
        "sallyport.default_runtime": runtimes[0],
        "sallyport.docker.managed": True,
        **{f"sallyport.uids.{name}": value for name, value in _USERS.items()},
    }
    return Settings({**taken, **own}, "(probe)", (), (f"slp_{secrets.token_urlsafe(32)}",))


class ProbeServer:
    """The running server, created by `running`."""

    def __init__(self, own: Settings) -> None:
        self.run_dir = own.run_dir
        self._key = own.api_keys[0]
        self._image = next((name for name, _, _ in own.get("sallyport.images")), "")
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{own.port}", timeout=_SANDBOX_SECONDS, trust_env=False)

    def answers(self) -> bool:
        """Return whether it listens."""
        with contextlib.suppress(httpx.HTTPError):
            return self._http.get("/health", timeout=2).status_code == httpx.codes.OK
        return False

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _call(self, method: str, path: str, **options: Any) -> Any:
        answer = self._http.request(method, f"/v1{path}", headers={"OPEN-SANDBOX-API-KEY": self._key}, **options)
        if answer.status_code >= 400:
            raise ServerError(f"{method} {path}: {answer.status_code}: {answer.text[:300]}")
        return answer.json() if answer.content else None

    def create(self, runtime: str) -> "ProbeSandbox":
        """Start a sandbox with access to one host.

        Raises:
            ServerError: it cannot be started, or cannot run the probes.
        """
        if not self._image:
            raise ServerError("sallyport.images names no image to try it with")
        request = {
            "image": {"uri": self._image},
            "entrypoint": ["tail", "-f", "/dev/null"],
            "resourceLimits": {"memory": "512Mi"},
            "timeout": 1800,
            "networkPolicy": {"defaultAction": "deny", "egress": [{"action": "allow", "target": ALLOWED}]},
            "extensions": {"sallyport.runtime": runtime},
        }
        name = str(self._call("POST", "/sandboxes", json=request)["id"])
        deadline = time.monotonic() + _SANDBOX_SECONDS
        while (state := self._call("GET", f"/sandboxes/{name}")["status"])["state"] != "Running":
            if state["state"] != "Pending" or time.monotonic() > deadline:
                raise ServerError(f"the sandbox is {state['state']}: {state.get('message', '')}"[:300])
            time.sleep(0.1)
        endpoint = self._call("GET", f"/sandboxes/{name}/endpoints/44772")
        sandbox = ProbeSandbox(
            name, runtime, self._http, str(endpoint["endpoint"]), dict(endpoint.get("headers") or {})
        )
        sandbox.prepare(deadline)
        return sandbox

    def netns(self, sandbox: str, side: str) -> str:
        """Return the namespace file of a sandbox's slot; `side` is `sandbox` or `gateway`."""
        with BlockingClient(self.run_dir / "hostd.sock", ROOT, timeout=30) as client:
            network = client.ask(Inspect(sandbox)).network
        if network is None:
            raise ServerError(f"sandbox {sandbox} has no slot: it was cut off or has ended")
        return network.sandbox_netns if side == "sandbox" else network.gateway_netns


class ProbeSandbox:
    """A sandbox and a way to run commands in it."""

    def __init__(self, name: str, runtime: str, http: httpx.Client, endpoint: str, headers: dict[str, str]) -> None:
        self.name, self.runtime = name, runtime
        self._http, self._url, self._headers = http, f"http://{endpoint}", headers

    def prepare(self, deadline: float) -> None:
        """Wait until commands can be run, and copy the probes into the sandbox.

        Raises:
            ServerError: it takes too long, or the image has no Python for them.
        """
        while not self._answers():
            if time.monotonic() > deadline:
                raise ServerError("no command can be run in the sandbox")
            time.sleep(0.1)
        program = base64.b64encode(Path(str(ways_out.__file__)).read_bytes()).decode()
        status, printed = self.run(f"printf %s {program} | base64 -d >{_SCRIPT} && python3 -c 'import ssl'")
        if status != 0:
            raise ServerError(f"the image cannot run the probes, which need python3: {printed.strip()[:200]}")

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return self._http.get(f"{self._url}/ping", headers=self._headers).status_code == httpx.codes.OK
        return False

    def attempt(self, probe: str) -> Report:
        """Try one way out. Return the sandbox's own report.

        Raises:
            ServerError: no command can be run in the sandbox.
            ProbeError: it was not tried to its end.
        """
        given = targets(
            resolver="192.0.2.1",
            gateway="192.0.2.1",
            inside="192.0.2.2",
            interface="eth0",
            gateway_mac="02:53:50:00:00:01",
        )
        return report(probe, *self.run(f"python3 {_SCRIPT} one {probe}", PROBE_TARGETS=json.dumps(given)))

    def run(self, command: str, **environment: str) -> tuple[int, str]:
        """Run a shell command. Return its exit status and its output.

        Raises:
            ServerError: it could not be run to its end.
        """
        printed, status = [], None
        body = {"command": command, "envs": environment}
        try:
            with self._http.stream(
                "POST", f"{self._url}/command", json=body, headers=self._headers, timeout=_COMMAND_SECONDS
            ) as answer:
                for line in answer.iter_lines():
                    event = json.loads(line.removeprefix("data:")) if line.strip() else {}
                    if event.get("type") in ("stdout", "stderr"):
                        printed.append(str(event.get("text", "")))
                    if event.get("type") == "execution_complete":
                        status = 0
                    elif event.get("type") == "error":
                        status = _status(event)
        except (httpx.HTTPError, ValueError) as error:
            raise ServerError(f"no command can be run in the sandbox: {type(error).__name__}") from None
        if status is None:
            raise ServerError("a command in the sandbox was broken off")
        return status, "\n".join(printed)


def _status(event: dict[str, Any]) -> int:
    """Return the exit status in an error event; -1 if it has none."""
    value = str((event.get("error") or {}).get("evalue"))
    return int(value) if value.isdecimal() else -1


@contextmanager
def running(own: Settings, directory: Path) -> Iterator[ProbeServer]:
    """Run the server of settings `own`. Its log is in `directory`.

    Raises:
        ServerError: it does not start, or does not end.
    """
    own.state_dir.mkdir(mode=0o711)
    launch_key = launch.uids(own)["vaultd"]
    own.master_key_file.parent.mkdir(mode=0o700, parents=True)
    vault.keyring.create(own.master_key_file, (launch_key, launch_key))
    host = launch.write_all(own, own.api_keys)
    log = directory / "server.log"
    python = str(own.get("sallyport.python") or sys.executable)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [python, "-m", HOSTD, str(host)],
            cwd=doctor.PROJECT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # This process handles Ctrl-C. It ends the server after everything else.
        )
    server = ProbeServer(own)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not server.answers():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerError(f"the server does not start: {_last(log)}")
            time.sleep(0.1)
        yield server
    finally:
        interrupts.ignore()
        server.close()
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, 9)
            process.wait()
            raise ServerError("the server did not end in time; `./run clean` removes what it left") from None


def _last(log: Path) -> str:
    """Return the last lines of the server's log. The end of a daemon is logged before that of the server."""
    return " / ".join(log.read_text(errors="replace").strip().splitlines()[-4:])[-800:] or "it said nothing"
