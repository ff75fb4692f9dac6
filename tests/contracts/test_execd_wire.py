"""Requirements of execd's wire contract that no SDK shows: raw requests to a sandbox on each runtime."""

import base64
import hashlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from opensandbox.exceptions import SandboxApiException
from opensandbox.sync.sandbox import SandboxSync

from lifecycle.proxy.idle_pool import IDLE_LIMIT, IDLE_SECONDS

pytestmark = [pytest.mark.system, pytest.mark.images]

NULLS: dict[str, Any] = {"cwd": None, "background": False, "timeout": None, "uid": None, "gid": None, "envs": None}


@pytest.fixture(scope="module", name="http")
def _http(sandbox: SandboxSync) -> Iterator[httpx.Client]:
    endpoint = sandbox.get_endpoint(44772)
    with httpx.Client(base_url=f"http://{endpoint.endpoint}", headers=endpoint.headers, timeout=60) as http:
        yield http


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, after a check of its framing."""
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.content.isascii()
    *frames, end = answer.text.split("\n\n")
    assert "" == end
    return [json.loads(frame) for frame in frames]


def test_a_stream_is_framed_as_clients_parse_it(http: httpx.Client) -> None:
    """Nulls are sent for all optional fields. The stream has init first, a ping, one terminal event, and only ASCII.

    A stream that takes longer has more pings.
    """
    told = events(http.post("/command", json={"command": "printf 'é\\342\\200\\250\\n\\n\\377'; exit 7"} | NULLS))
    first, second, *others = [event["type"] for event in told]
    assert ("init", "ping") == (first, second)
    assert ["stdout", "stdout", "stdout", "error"] == [kind for kind in others if kind != "ping"]
    assert ["é\u2028\n", "\n", "\ufffd"] == [event["text"] for event in told if event["type"] == "stdout"]
    assert {"ename": "CommandExecError", "evalue": "7", "traceback": ["exit status 7"]} == told[-1]["error"]
    assert all(abs(event["timestamp"] / 1000 - time.time()) < 180 for event in told)
    status = http.get(f"/command/status/{told[0]['text']}").json()
    assert (False, 7) == (status["running"], status["exit_code"])


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/nothing", "", 404, None),
        ("HEAD", "/ping", "", 404, None),
        ("POST", "/command", "", 400, "INVALID_REQUEST_BODY"),
        ("POST", "/command", '{"command":5}', 400, "INVALID_REQUEST_BODY"),
        ("POST", "/command", '{"command":"true","argv":["true"]}', 400, "INVALID_REQUEST_BODY"),
        ("POST", "/command", '{"command":"true","gid":1}', 400, "INVALID_REQUEST_BODY"),
        ("POST", "/command", '{"command":"true","cwd":"/no/such"}', 400, "INVALID_REQUEST_BODY"),
        ("GET", "/command/status/none", "", 404, "INVALID_REQUEST_BODY"),
        ("GET", "/command/none/logs", "", 404, "INVALID_REQUEST_BODY"),
        ("DELETE", "/command", "", 400, "MISSING_QUERY"),
        ("DELETE", "/command?id=none", "", 500, "RUNTIME_ERROR"),
        ("POST", "/session/none/run", '{"command":"true"}', 500, "RUNTIME_ERROR"),
        ("DELETE", "/session/none", "", 404, "CONTEXT_NOT_FOUND"),
        ("GET", "/pty/none", "", 404, "CONTEXT_NOT_FOUND"),
        ("GET", "/files/download", "", 400, "MISSING_QUERY"),
        ("GET", "/files/download?path=/etc", "", 400, None),
        ("GET", "/files/info?path=/etc/passwd/x", "", 404, "FILE_NOT_FOUND"),
        ("DELETE", "/directories?path=/", "", 400, None),
        ("POST", "/files/upload", "x", 400, "INVALID_FILE"),
        ("GET", "/v1/filesystem/x/0/files/info", "", 400, None),
        ("GET", "/proxy/0/", "", 400, None),
        ("GET", "/proxy/1/", "", 502, None),
        ("POST", "/internal/init", "{}", 404, None),
    ],
)
def test_a_refusal_says_why(
    http: httpx.Client, method: str, path: str, body: str, status: int, code: str | None
) -> None:
    answer = http.request(method, path, content=body)
    assert status == answer.status_code, answer.text
    if code:
        assert code == answer.json()["code"]
    if status != 404 or code:
        assert answer.json()["message"]
    assert "location" not in answer.headers


def test_only_the_sandboxs_own_token_opens_its_execd(http: httpx.Client, sandbox: SandboxSync) -> None:
    """From outside, and from the workload, which is root in the sandbox and finds no token to try."""
    token = http.headers["X-EXECD-ACCESS-TOKEN"]
    egress = sandbox.get_endpoint(18080).headers["OPENSANDBOX-EGRESS-AUTH"]
    for wrong in ("", token[:-1], token.swapcase(), egress, hashlib.sha256(token.encode()).hexdigest()):
        assert 401 == http.get("/metrics", headers={"X-EXECD-ACCESS-TOKEN": wrong}).status_code, wrong
    assert 401 == httpx.get(f"{http.base_url}metrics", timeout=60).status_code
    ask = "curl -s -o /dev/null -w '%{http_code} ' --max-time 20 http://127.0.0.1:44772"
    told = sandbox.commands.run(
        f"{ask}/metrics; {ask}/ping; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | base64 -w0"
    )
    codes, read = told.text.rsplit(" ", 1)
    assert "401 200" == codes
    assert b"execd" in base64.b64decode(read)
    assert token.encode() not in base64.b64decode(read)


def test_metrics_are_watched_second_by_second(http: httpx.Client) -> None:
    with http.stream("GET", "/metrics/watch") as answer:
        assert "text/event-stream" == answer.headers["content-type"]
        lines = (json.loads(line) for line in answer.iter_lines() if line)
        first, *_, last = (next(lines) for _ in range(4))
    assert {"cpu_count", "cpu_used_pct", "mem_total_mib", "mem_used_mib", "timestamp"} == set(first)
    assert 1500 < last["timestamp"] - first["timestamp"] < 30_000
    assert first["mem_used_mib"] <= first["mem_total_mib"]


def test_the_number_of_sessions_has_a_limit(http: httpx.Client, sandbox: SandboxSync) -> None:
    """A session above the limit gets an answer to try again. The others continue; each that ends frees a place."""
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: http.post("/session", json={}), range(1030)))
    made = [answer.json()["session_id"] for answer in answers if answer.status_code == 200]
    assert 1024 == len(made)
    assert {(503, "1")} == {(a.status_code, a.headers["retry-after"]) for a in answers if a.status_code != 200}
    with pytest.raises(SandboxApiException, match="too many sessions") as refused:
        sandbox.commands.create_session()
    assert 503 == refused.value.status_code
    assert 0 == sandbox.commands.run_in_session(made[0], "true").exit_code
    sandbox.commands.delete_session(made[0])
    sandbox.commands.run_in_session(sandbox.commands.create_session(), "true")
    assert 503 == http.post("/session", json={}).status_code


def test_few_connections_to_execd_are_kept(http: httpx.Client) -> None:
    """After any number of concurrent ones. The test counts them in the sandbox before the idle time limit."""

    def told(command: str) -> list[str]:
        stream = events(http.post("/command", json={"command": command}))
        return [event["text"] for event in stream if event["type"] == "stdout"]

    count = "grep -c ':AEE4 .* 01 ' /proc/net/tcp"
    with ThreadPoolExecutor(20) as pool:
        at_once = list(pool.map(lambda _: told(f"sleep 1; {count}"), range(20)))
    assert max(int(text[-1]) for text in at_once) > IDLE_LIMIT
    deadline = time.monotonic() + IDLE_SECONDS * 0.8
    while (kept := int(told(count)[-1])) > IDLE_LIMIT and time.monotonic() < deadline:
        time.sleep(0.05)
    assert kept <= IDLE_LIMIT
