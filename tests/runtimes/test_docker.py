"""hostd's requests to Docker, with a Docker whose answers the test determines."""

import asyncio
import json
import re
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import pytest

from runtimes.engine.docker import INSTANCE_LABEL, LABEL, Docker, DockerError

STATE = {"Status": "running", "ExitCode": 0, "OOMKilled": False, "Pid": 7, "StartedAt": "", "Error": ""}


class Daemon(socketserver.ThreadingUnixStreamServer):
    """A server that answers with its data. It answers nothing about the container `stuck`, and if it is `frozen`,
    nothing at all, before `release` is set.
    """

    daemon_threads = True

    def __init__(self, path: Path, containers: list[dict[str, Any]]) -> None:
        super().__init__(str(path), _Handler)
        self.containers = containers
        self.asked: Counter[str] = Counter()
        self.state = STATE
        self.events: dict[str, list[dict[str, Any]]] = {}
        self.reported = 0.0  # the time from which on it reports the events, in seconds of the epoch
        self.frozen = False
        self.release = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    def address_string(self) -> str:
        return "local"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        daemon = cast(Daemon, self.server)
        name = re.search(r"/containers/(.*?)/json", self.path)
        if name is not None:
            daemon.asked[name[1]] += 1
        if (name is not None and name[1] == "stuck") or daemon.frozen:
            daemon.release.wait()
        answers: dict[str, Any] = {"version": {"ApiVersion": "1.41"}, "containers/json": daemon.containers}
        found = next((value for key, value in answers.items() if key in self.path), {"State": daemon.state})
        body = json.dumps(found).encode()
        if "/events?" in self.path:
            query = parse_qs(urlsplit(self.path).query)
            [container], [action] = (json.loads(query["filters"][0])[key] for key in ("container", "event"))
            daemon.asked["events"] += 1
            body = b"".join(
                json.dumps(one).encode()
                for one in daemon.events.get(container, [])
                if one["Action"] == action and float(query["since"][0]) <= float(query["until"][0]) <= time.time()
                if daemon.reported <= time.time()
            )
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(name="daemon")
def _daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path / "docker.sock", [])
    thread = threading.Thread(target=daemon.serve_forever)
    thread.start()
    yield daemon
    daemon.release.set()
    daemon.shutdown()
    thread.join()
    daemon.server_close()


def ended(seconds: float, **changes: Any) -> dict[str, Any]:
    """Return the state of a container that was killed `seconds` ago."""
    finished = datetime.fromtimestamp(time.time() - seconds, UTC)
    return STATE | {"Status": "exited", "ExitCode": 137, "FinishedAt": f"{finished:%Y-%m-%dT%H:%M:%S.%f}123Z"} | changes


LIMIT = "runtimes.engine.docker._LOOK_SECONDS"
SHORT, AMPLE = 0.2, 60.0
"""Limits in seconds: one that a test waits for, and one within which a machine under load answers."""
OOM, DIE = {"Action": "oom"}, {"Action": "die"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "events", "oom", "asked"),
    [
        (ended(60), [DIE, OOM], True, 1),
        (ended(60), [DIE], False, 1),
        (ended(-3600), [DIE, OOM], True, 1),  # the clock was set back
        (ended(-3600), [DIE], False, 1),
        (ended(60, FinishedAt="2026-01-02T03:04:05Z"), [DIE, OOM], True, 1),
        (ended(60, Status="dead"), [OOM], True, 1),
        (ended(60, OOMKilled=True), [], True, 0),
        (ended(60, ExitCode=1), [OOM], False, 0),
        (ended(60, Status="running"), [OOM], False, 0),
    ],
)
async def test_the_memory_limit_is_known_though_it_is_reported_after_the_end(
    daemon: Daemon, state: dict[str, Any], events: list[dict[str, Any]], oom: bool, asked: int
) -> None:
    daemon.state, daemon.events = state, {"other": [OOM], "own": events}
    docker = Docker(str(daemon.server_address))
    try:
        found = await docker.state("own")
    finally:
        docker.close()

    assert found is not None
    assert (oom, asked) == (found.oom, daemon.asked["events"])


async def test_a_late_report_of_the_memory_limit_is_awaited(daemon: Daemon) -> None:
    docker = Docker(str(daemon.server_address))
    try:
        daemon.state, daemon.events, daemon.reported = ended(0), {"own": [DIE, OOM]}, time.time() + 0.9
        state = await docker.state("own")
        assert state is not None
        assert state.oom
    finally:
        docker.close()


async def test_a_wait_for_a_late_report_holds_no_thread_that_other_looks_need(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many containers end at once."""
    monkeypatch.setattr("runtimes.engine.docker._LATE_SECONDS", 600.0)
    docker = Docker(str(daemon.server_address))
    try:
        daemon.state = ended(0)
        looks = [asyncio.create_task(docker.state(f"ended-{number}")) for number in range(20)]
        async with asyncio.timeout(30):
            while daemon.asked.total() < len(looks):  # noqa: ASYNC110 - the daemon is in threads
                await asyncio.sleep(0.01)
            assert frozenset() == await docker.running()
        assert (0, [False] * 20) == (daemon.asked["events"], [look.done() for look in looks])
        for look in looks:
            look.cancel()
        await asyncio.wait(looks)
    finally:
        docker.close()


async def test_a_container_that_docker_cannot_inspect_delays_no_other(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Concurrent requests result in one request to Docker, and all of them get its answer."""
    monkeypatch.setattr(LIMIT, AMPLE)
    docker = Docker(str(daemon.server_address))
    try:
        first = asyncio.create_task(docker.state("stuck"))
        others = [await docker.state(f"other-{number}") for number in range(5)]
        assert {7} == {state.pid for state in others if state is not None}
        monkeypatch.setattr(LIMIT, SHORT)
        asks = [asyncio.create_task(docker.state("stuck")) for _ in range(50)]
        async with asyncio.timeout(AMPLE):
            answers = await asyncio.gather(*asks, return_exceptions=True)
        assert {DockerError} == {type(answer) for answer in answers}
        assert (1, False) == (daemon.asked["stuck"], first.done())
        monkeypatch.setattr(LIMIT, AMPLE)
        asking = asyncio.create_task(docker.state("stuck"))
        daemon.release.set()
        for state in (await first, await asking):
            assert state is not None and "running" == state.status
    finally:
        docker.close()


async def test_a_docker_that_hangs_is_waited_for_for_seconds_only(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMIT, SHORT)
    docker = Docker(str(daemon.server_address), "here")
    try:
        daemon.frozen = True
        async with asyncio.timeout(AMPLE):
            for _ in range(3):
                with pytest.raises(DockerError):
                    await docker.running()
        monkeypatch.setattr(LIMIT, AMPLE)
        daemon.release.set()
        assert frozenset() == await docker.running()
    finally:
        docker.close()


async def test_labels_alone_make_no_container_ours(daemon: Daemon) -> None:
    """The labels can come from the image. A container of another user with that image is not removed."""
    labels = {LABEL: "sbx-1", INSTANCE_LABEL: "here"}
    daemon.containers += [
        {"Id": "ours", "Names": ["/sallyport-sbx-1"], "Labels": labels},
        {"Id": "theirs", "Names": ["/somebody"], "Labels": labels},
        {"Id": "dying", "Names": [], "Labels": labels},
    ]
    docker = Docker(str(daemon.server_address), "here")
    try:
        assert (("ours", "sbx-1"), ("dying", "sbx-1")) == await docker.ours()
    finally:
        docker.close()
