"""execd after a pause, a checkpoint and a restore elsewhere, on the real runsc.

One sandbox of the code-interpreter image has every kind of daemon activity in progress. It is checkpointed once and
restored into two other slots, each with another name and launch file. The product's code creates the containers. Only
the shim, which refuses a restore, is not used.
"""

import contextlib
import http.client
import json
import os
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from runtimes.engine.containers import LAUNCH, end_processes, plan_container, write_files
from runtimes.engine.profile import RUNSC
from runtimes.net import netns, slots
from runtimes.net.plan import PLAN
from testbed.stack import CODE_ENTRYPOINT, Stack
from tests.runtimes.test_spec import launch_of

pytestmark = [pytest.mark.system, pytest.mark.images]

PORT = 44772
JUPYTER = ("JUPYTER_HOST=http://127.0.0.1:44771", "JUPYTER_TOKEN=opensandboxcodeinterpreterjupyter")
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ROUTES = """
GET /ready | GET /metrics | GET /metrics/watch | POST /command | DELETE /command?id=ID | GET /command/status/ID
GET /command/ID/logs | POST /session | POST /session/SESSION/run | DELETE /session/SESSION | POST /code
DELETE /code?id=CONTEXT | POST /code/context | GET /code/contexts?language=python | GET /code/contexts/CONTEXT
DELETE /code/contexts?language=python | DELETE /code/contexts/CONTEXT | GET /files/info?path=/tmp
GET /files/search?path=/tmp | GET /files/download?path=/etc/hostname | POST /files/upload | POST /files/mv
POST /files/permissions | POST /files/replace | DELETE /files?path=/tmp/kept | GET /directories/list?path=/tmp
POST /directories | DELETE /directories?path=/tmp | GET /v1/filesystem/1000/1000/files/info?path=/tmp
GET /v1/isolated/capabilities | GET /v1/isolated/sessions | POST /v1/isolated/session
POST /v1/isolated/session/ISOLATED/run | DELETE /v1/isolated/session/ISOLATED | POST /pty | GET /pty/PTY
DELETE /pty/PTY | GET /pty/PTY/ws | GET /proxy/44771/api | GET /proxy/44772/metrics | GET /nothing
"""
BUSY = """
import os, random, ssl, time
random.seed(7)
ssl.RAND_bytes(8)
print("busy")
while not os.path.exists("/tmp/go"):
    time.sleep(0.05)
"""
COUNTER = "import itertools, time\nfor i in itertools.count(): print(i); time.sleep(0.05)"
WATCHER = f"""
import http.client, sys, threading, time
def launch():
    return open("{LAUNCH}").read()[:8]
def note(text):
    print(text, flush=True)
def stream():
    connection = http.client.HTTPConnection("127.0.0.1", {PORT})
    connection.request("GET", "/metrics/watch", headers={{"X-EXECD-ACCESS-TOKEN": sys.argv[1]}})
    answer = connection.getresponse()
    note("stream begun")
    try:
        while answer.read(1): pass
    except OSError: pass
    except http.client.HTTPException: pass
    note("stream ended " + launch())
threading.Thread(target=stream).start()
connection = http.client.HTTPConnection("127.0.0.1", {PORT})
while True:
    before = launch()
    try:
        connection.request("GET", "/metrics", headers={{"X-EXECD-ACCESS-TOKEN": sys.argv[1]}})
        answer = connection.getresponse()
        answer.read()
        note(f"{{before}} {{answer.status}}")
        if answer.status == 401: break  # initialised
    except (OSError, http.client.HTTPException):
        connection.close()
        note(f"{{before}} lost")
    time.sleep(0.02)
"""


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


@dataclass
class Box:
    """A container of plain runsc in its own slot."""

    name: str
    slot: slots.Slot
    bundle: Path
    secret: str
    token: str
    id: str = field(default_factory=lambda: secrets.token_hex(32))

    def runsc(self, *words: str) -> None:
        flags = [flag for flag in RUNSC.flags if not flag.startswith("--overlay2")]  # The image's files stay unchanged.
        command = [os.environ["SALLYPORT_RUNSC"], f"--root={self.bundle.parent / 'state'}", "--ignore-cgroups", *flags]
        with (self.bundle / "output").open("ab") as output:  # A sandbox keeps these open, so they are no pipe.
            done = subprocess.run(
                [*command, "--overlay2=root:memory", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                check=False,
                timeout=300,
            )
        assert 0 == done.returncode, f"runsc {words[0]}: {(self.bundle / 'output').read_text()[-2000:]}"

    def start(self) -> None:
        self.runsc("create", f"--bundle={self.bundle}", self.id)
        self.runsc("start", self.id)

    def restore(self, image: Path) -> None:
        self.runsc("restore", "--detach", f"--image-path={image}", f"--bundle={self.bundle}", self.id)

    def delete(self) -> None:
        with contextlib.suppress(AssertionError):  # It may never have started.
            self.runsc("delete", "--force", self.id)

    def dial(self, seconds: float) -> socket.socket:
        made = netns.inside(self.slot.gateway, socket.socket)
        try:
            made.settimeout(seconds)
            made.connect((str(PLAN.inside), PORT))
        except OSError:
            made.close()
            raise
        return made

    @contextlib.contextmanager
    def connection(self, seconds: float = 120) -> Iterator[http.client.HTTPConnection]:
        made = http.client.HTTPConnection(str(PLAN.inside), PORT)
        with contextlib.closing(made):
            made.sock = self.dial(seconds)
            yield made

    def call(
        self, method: str, path: str, body: Any = None, token: str | None = None, seconds: float = 120
    ) -> tuple[int, str]:
        with self.connection(seconds) as connection:
            return _request(connection, method, path, body, self.token if token is None else token)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        status, text = self.call(method, path, body)
        assert status in (200, 201), (status, text)
        return json.loads(text) if text.startswith("{") and "\n" not in text.strip() else text

    def output(self, path: str, body: Any) -> str:
        """Return the output of a run."""
        events = [json.loads(event) for event in str(self.ask("POST", path, body)).split("\n\n") if event]
        assert not [event for event in events if event["type"] == "error"], events
        return "".join(event["text"] for event in events if event["type"] == "stdout")

    def open_run(self, body: Any) -> None:
        """Start to run code, and return when it has printed something."""
        with self.connection() as connection:
            connection.request("POST", "/code", json.dumps(body), {"X-EXECD-ACCESS-TOKEN": self.token})
            answer = connection.getresponse()
            while b'"stdout"' not in answer.readline():
                pass

    def command(self, text: str) -> str:
        return self.output("/command", {"command": text})

    def begin(self, *argv: str) -> str:
        first, _, _ = str(self.ask("POST", "/command", {"argv": list(argv), "background": True})).partition("\n")
        return str(json.loads(first)["text"])

    def log(self, command: str, cursor: int = 0) -> str:
        return str(self.ask("GET", f"/command/{command}/logs?cursor={cursor}"))

    def terminal(self, session: str, line: str, expected: str) -> None:
        """Type a line, and wait until the terminal shows something."""
        shown = ""
        headers = {"X-EXECD-ACCESS-TOKEN": self.token}
        with connect(f"ws://execd/pty/{session}/ws", sock=self.dial(120), additional_headers=headers) as socket_:
            socket_.send(b"\0" + line.encode() + b"\n")
            while expected not in shown:
                frame = socket_.recv(timeout=120)
                shown += frame[1:].decode(errors="replace") if isinstance(frame, bytes) else ""

    def initialise(self, secret: str, **changed: Any) -> tuple[int, str]:
        body = {
            "sandboxId": self.name,
            "generation": 1,
            "accessTokenHash": f"sha256:{_digest(self.token)}",
            "envs": {"GIVEN": self.name},
            "preserveRuntimeState": True,
        }
        return self.call("POST", "/internal/init", body | changed, secret)


@dataclass
class Scene:
    """The original, its copies, and their activities."""

    source: Box
    copies: list[Box]
    refused: dict[str, dict[str, set[int]]] = field(default_factory=dict)
    inits: dict[str, list[int]] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    logged: int = 0


def until(happened: Callable[[], bool], said: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, said
        time.sleep(0.02)


@pytest.fixture(scope="module", name="scene")
def _scene(stack: Stack, code_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """All steps, in their order. The tests judge the results."""
    place = tmp_path_factory.mktemp("restore")
    layer = stack.docker("image", "inspect", "-f", "{{.GraphDriver.Data.UpperDir}}", code_image)
    assert 0 == layer.returncode, layer.stderr
    (place / "slots").mkdir()
    token = secrets.token_urlsafe()
    with contextlib.ExitStack() as stack_:
        stack_.callback(_leave_nothing, place / "state")
        source, *copies = (stack_.enter_context(_box(place, index, layer.stdout.strip(), token)) for index in range(3))
        scene = Scene(source, copies)
        source.start()
        until(lambda: _answers(source), "execd listens")
        _furnish(scene)
        source.runsc("pause", source.id)
        with pytest.raises(TimeoutError):
            source.call("GET", "/ping", seconds=0.3)
        source.runsc("resume", source.id)
        scene.logged = len(source.log(scene.ids["ID"]))
        source.runsc("checkpoint", f"--image-path={place / 'image'}", "--leave-running", source.id)
        for copy in copies:
            copy.restore(place / "image")
            scene.refused[copy.name] = _refused(scene, copy)
            scene.inits[copy.name] = [
                copy.initialise(secret)[0] for secret in ("", source.token, copy.token, source.secret, copy.secret)
            ]
        yield scene


@contextlib.contextmanager
def _box(place: Path, index: int, root: str, token: str) -> Iterator[Box]:
    """Prepare a sandbox. The command line is that of the first, as gVisor requires for a restore."""
    name, secret = f"box-{index}", secrets.token_urlsafe()
    spec = launch_of(
        sandbox=name,
        runtime="runsc",
        entrypoint=CODE_ENTRYPOINT,
        execd_token_sha256=_digest(token),
        isolation=True,
    )
    bundle = place / name
    bundle.mkdir()
    files = write_files(bundle / "files", spec, "pem")
    (files / "launch").write_text(f"{_digest(secret)}\n")
    plan = plan_container(spec, root, files, Path(os.environ["SALLYPORT_EXECD"]))
    slot = slots.make(place / "slots", index, PLAN)
    made = Box(name, slot, bundle, secret, secrets.token_urlsafe() if index else token)
    capabilities = [f"CAP_{capability}" for capability in plan.capabilities]
    config = {
        "ociVersion": "1.0.2",
        "hostname": plan.hostname,
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": list(plan.command),
            "env": [*JUPYTER, PATH, f"HOSTNAME={name}", *(f"{key}={value}" for key, value in plan.env.items())],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
        },
        "root": {"path": root},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            *(
                {
                    "destination": bind.destination,
                    "type": "bind",
                    "source": str(bind.source),
                    "options": ["rbind", "ro"],
                }
                for bind in plan.binds
            ),
        ],
        "linux": {
            "namespaces": [
                {"type": "network", "path": str(slot.sandbox)},
                *({"type": kind} for kind in ("pid", "ipc", "uts", "mount")),
            ]
        },
    }
    (bundle / "config.json").write_text(json.dumps(config))
    try:
        yield made
    finally:
        made.delete()
        left = (*end_processes(made.id), *slots.destroy(slot))
        assert () == left


def _leave_nothing(state: Path) -> None:
    """runsc keeps an empty network namespace mounted in its state."""
    subprocess.run(["umount", "-l", state / "null-netns"], check=False, stderr=subprocess.DEVNULL)


def _furnish(scene: Scene) -> None:
    """Start one of each activity that must continue."""
    box, ids = scene.source, scene.ids
    ids["ID"] = box.begin("python3", "-uc", COUNTER)
    ids["WATCHER"] = box.begin("python3", "-c", WATCHER, box.token)
    ids["SESSION"] = box.ask("POST", "/session", {"cwd": "/tmp"})["session_id"]
    box.output(f"/session/{ids['SESSION']}/run", {"command": "kept=yes; f() { echo $kept $PWD; }; touch kept"})
    ids["PTY"] = box.ask("POST", "/pty", {})["session_id"]
    box.terminal(ids["PTY"], "kept=yes; echo set-$?", "set-0")
    made = box.ask("POST", "/v1/isolated/session", {"workspace": {"path": "/srv"}})
    ids["ISOLATED"] = made["session_id"]
    box.output(f"/v1/isolated/session/{ids['ISOLATED']}/run", {"code": "kept=yes; echo inside >/srv/kept"})
    for language, name in (("python", "CONTEXT"), ("bash", "BASH"), ("python", "BUSY")):
        ids[name] = box.ask("POST", "/code/context", {"language": language})["id"]
    run = "import random, ssl, time; kept = [41]; random.seed(7); ssl.RAND_bytes(8)"
    box.output("/code", {"code": run, "context": {"id": ids["CONTEXT"]}})
    box.output("/code", {"code": "kept=yes; RANDOM=7", "context": {"id": ids["BASH"]}})
    box.open_run({"code": BUSY, "context": {"id": ids["BUSY"]}})
    assert "" == box.call("GET", "/v1/filesystem/1000/1000/files/search?path=/tmp&pattern=none")[1].strip("[]\n")


def _refused(scene: Scene, box: Box) -> dict[str, set[int]]:
    """Return the answer of each route to any caller."""
    answered: dict[str, set[int]] = {}
    until(lambda: _answers(box), "execd listens")
    with box.connection() as connection:
        for route in (route.strip() for line in ROUTES.splitlines() for route in line.split("|") if route.strip()):
            method, _, path = route.partition(" ")
            for name, value in scene.ids.items():
                path = re.sub(rf"\b{name}\b", value, path)
            for token in ("", scene.source.token, box.token, box.secret):
                connection.request(method, path, "{}", {"X-EXECD-ACCESS-TOKEN": token} if token else {})
                answer = connection.getresponse()
                answered.setdefault(route, set()).add(answer.status)
                if answer.status != 503:
                    return answered  # The answer may not end.
                answer.read()
    return answered


def _request(connection: http.client.HTTPConnection, method: str, path: str, body: Any, token: str) -> tuple[int, str]:
    headers = {"X-EXECD-ACCESS-TOKEN": token} if token else {}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def _answers(box: Box) -> bool:
    with contextlib.suppress(OSError):
        return 200 == box.call("GET", "/ping")[0]
    return False


def test_after_a_restore_no_request_is_served_before_the_init(scene: Scene) -> None:
    for copy in scene.copies:
        assert {503} == set().union(*scene.refused[copy.name].values()), scene.refused[copy.name]
        assert [401, 401, 401, 401, 200] == scene.inits[copy.name]
        assert {401} == {
            copy.call("GET", "/metrics", None, other)[0] for other in ("", scene.source.token, copy.secret)
        }
        assert 401 == copy.initialise(copy.secret)[0], "the secret works once"
        assert {"ready": True, "generation": 1} == copy.ask("GET", "/ready")


def test_a_connection_from_before_is_not_served_after_a_restore(scene: Scene) -> None:
    """Connections of a process inside. Those from outside do not survive."""
    for copy in scene.copies:
        launch = _digest(copy.secret)[:8]
        until(partial(_logged, copy, scene.ids["WATCHER"], f"stream ended {launch}"), "the stream ends")
        until(partial(_logged, copy, scene.ids["WATCHER"], f"{launch} 401"), "it is told that its token is none")
        lines = copy.log(scene.ids["WATCHER"]).splitlines()
        assert f"{launch} 200" not in lines
    source = scene.source.log(scene.ids["WATCHER"])
    assert "stream ended" not in source and "lost" not in source and "503" not in source


def _logged(box: Box, command: str, text: str, cursor: int = 0) -> bool:
    return text in box.log(command, cursor)


def test_what_was_under_way_works_on_after_a_restore_elsewhere(scene: Scene) -> None:
    ids = scene.ids
    for box in (scene.source, *scene.copies):
        assert "yes /tmp\n" == box.output(f"/session/{ids['SESSION']}/run", {"command": "f"}).rstrip("\n") + "\n"
        box.terminal(ids["PTY"], "echo it-$kept-$((40 + 2))", "it-yes-42")
        isolated = f"/v1/isolated/session/{ids['ISOLATED']}/run"
        assert "yes inside" == box.output(isolated, {"code": "echo $kept $(cat /srv/kept)"}).strip()
        begun = [int(line) for line in box.log(ids["ID"])[: scene.logged].split()]
        until(partial(_logged, box, ids["ID"], "\n", scene.logged + 20), "the command prints on")
        numbers = [int(line) for line in box.log(ids["ID"]).rpartition("\n")[0].split()]
        assert list(range(len(numbers))) == numbers and len(numbers) > len(begun)
        code = {"code": "kept.append(1); print(kept)", "context": {"id": ids["CONTEXT"]}}
        assert "[41, 1]" == box.output("/code", code).strip()
        assert "yes" == box.output("/code", {"code": "echo $kept", "context": {"id": ids["BASH"]}}).strip()
        made = box.ask("POST", "/v1/isolated/session", {"workspace": {"path": "/srv"}})
        assert "new" == box.output(f"/v1/isolated/session/{made['session_id']}/run", {"code": "echo new"}).strip()
        for user in (1000, 1002):  # The helper of the first one was started before the checkpoint.
            found = box.ask("GET", f"/v1/filesystem/{user}/1000/files/info?path=/tmp/kept")
            assert "/tmp/kept" in str(found)


def test_a_restored_sandbox_has_a_name_and_an_id_of_its_own(scene: Scene) -> None:
    seen = set()
    for box in (scene.source, *scene.copies):
        given = box.name if box is not scene.source else ""
        text = box.command("hostname; cat /etc/hostname; echo $HOSTNAME $OPENSANDBOX_ID $GIVEN; cat /etc/machine-id")
        *names, machine = text.split()
        assert [box.name] * (5 if given else 4) == names
        seen.add(machine)
    assert 3 == len(seen)


def test_two_restores_draw_different_random_numbers(scene: Scene) -> None:
    """In a kernel that was idle, in one that was in a run, and in execd itself."""
    ids, drawn = scene.ids, []
    for box in (scene.source, *scene.copies):
        run = {"code": "print(random.random(), ssl.RAND_bytes(8).hex())", "context": {"id": ids["BUSY"]}}
        assert "session is busy" in box.call("POST", "/code", run)[1]
        box.command("touch /tmp/go")
        until(partial(_is_idle, box, run), "the run ends")
        numbers = box.output("/code", run).split()
        numbers += box.output("/code", run | {"context": {"id": ids["CONTEXT"]}}).split()
        numbers += box.output("/code", {"code": "echo $RANDOM$RANDOM", "context": {"id": ids["BASH"]}}).split()
        drawn.append([*numbers, box.ask("POST", "/session")["session_id"]])
    for column in zip(*drawn, strict=True):
        assert 3 == len(set(column)), drawn


def _is_idle(box: Box, run: dict[str, Any]) -> bool:
    return "session is busy" not in box.call("POST", "/code", run | {"code": "0"})[1]


def test_an_init_that_preserves_nothing_leaves_nothing_of_the_former_owner(scene: Scene) -> None:
    """With a real Jupyter server, one of whose kernels is busy, and a client that still waits. It is the last test."""
    box, ids = scene.copies[-1], scene.ids
    kernels = "grep -lsE '[i]pykernel|[b]ash.py' /proc/[0-9]*/cmdline | wc -l"
    assert "3\n" == box.command(kernels)
    box.open_run({"code": "print(1)\nwhile True: pass", "context": {"id": ids["BUSY"]}})
    former, box.token = box.token, secrets.token_urlsafe()

    answer = box.initialise(former, generation=2, preserveRuntimeState=False)

    assert 200 == answer[0], answer
    assert [] == json.loads(box.ask("GET", "/code/contexts"))
    assert "0\n" == box.command(kernels)
    for path in (f"/command/status/{ids['ID']}", f"/command/{ids['ID']}/logs", f"/pty/{ids['PTY']}"):
        assert 404 == box.call("GET", path)[0]
    assert 404 == box.call("DELETE", f"/session/{ids['SESSION']}")[0]
    assert 404 == box.call("GET", f"/v1/isolated/session/{ids['ISOLATED']}")[0]
    assert 401 == box.call("GET", "/metrics", None, former)[0]
    assert "2" == box.output("/code", {"code": "print(1 + 1)", "context": {"language": "python"}}).strip()
