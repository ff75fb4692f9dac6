"""The tools and the minimal workflow of the MCP server's README, over its HTTP transport, on both runtimes.

It tests `lifecycle/serve.py` and `lifecycle/api/routes/`.
"""

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from testbed.ports import reserve_port
from testbed.stack import IMAGE, Stack

pytestmark = pytest.mark.system

_START_SECONDS = 60
_VERSION = "2025-06-18"
_SERVER = """
import http.server
http.server.HTTPServer(("0.0.0.0", 8000), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


class Mcp:
    """A client of the HTTP transport. An answer is one JSON document or one event."""

    def __init__(self, port: int) -> None:
        self._client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            headers={"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": _VERSION},
            timeout=120,
            trust_env=False,
        )
        self._number = 0

    def __enter__(self) -> "Mcp":
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                client = {"name": "test", "version": "1"}
                self.ask("initialize", protocolVersion=_VERSION, capabilities={}, clientInfo=client)
                break
            except httpx.ConnectError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        self._post({"jsonrpc": "2.0", "method": "notifications/initialized"})
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(self, method: str, **parameters: Any) -> Any:
        """Return the result of a method."""
        self._number += 1
        answer = self._post({"jsonrpc": "2.0", "id": self._number, "method": method, "params": parameters})
        if answer.headers["content-type"].startswith("text/event-stream"):
            lines = [line[5:] for line in answer.text.splitlines() if line.startswith("data:") and line[5:].strip()]
            messages = [json.loads(line) for line in lines]
        else:
            messages = [answer.json()]
        (result,) = [message["result"] for message in messages if message.get("id") == self._number]
        return result

    def call(self, tool: str, **arguments: Any) -> Any:
        """Return the result of a tool, which must succeed."""
        result = self.ask("tools/call", name=tool, arguments=arguments)
        assert not result.get("isError"), result
        return result["structuredContent"]

    def _post(self, message: dict[str, Any]) -> httpx.Response:
        answer = self._client.post("/mcp", json=message)
        assert answer.status_code in (200, 202), answer.text
        if "mcp-session-id" in answer.headers:
            self._client.headers["mcp-session-id"] = answer.headers["mcp-session-id"]
        return answer


@pytest.fixture(scope="module", name="mcp")
def _mcp(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mcp]:
    """Start the server as the README does: the address and the key by options, HTTP at a port."""
    clients, port = Path(os.environ["SALLYPORT_CLIENTS"]), reserve_port()
    command = [str(clients / "mcp/bin/opensandbox-mcp"), "--transport", "streamable-http", "--port", str(port)]
    command += ["--api-key", stack.api_key, "--domain", f"127.0.0.1:{stack.port}", "--protocol", "http"]
    log = tmp_path_factory.mktemp("mcp") / "log"
    environment = {"PATH": os.environ["PATH"], "HOME": str(log.parent)}
    with log.open("wb") as file, subprocess.Popen(command, env=environment, stdout=file, stderr=file) as process:
        try:
            with Mcp(port) as mcp:
                yield mcp
        finally:
            process.terminate()


def test_the_tools_are_those_of_the_readme(mcp: Mcp) -> None:
    (found,) = Path(os.environ["SALLYPORT_CLIENTS"]).glob("mcp/lib/python*/site-packages/opensandbox_mcp-*/METADATA")
    written = set(re.findall(r"^- `(\w+)`: ", found.read_text().partition("## 4. Tools")[2], re.MULTILINE))
    assert 19 == len(written)
    assert written == {tool["name"] for tool in mcp.ask("tools/list")["tools"]}


def test_the_minimal_workflow_works(mcp: Mcp, stack: Stack, runtime: str) -> None:
    made = mcp.call("sandbox_create", image=IMAGE, extensions={"sallyport.runtime": runtime})
    name = made["sandbox_id"]
    mcp.call("file_write", sandbox_id=name, path="/tmp/served/hello.txt", content="hello")
    mcp.call("file_write", sandbox_id=name, path="/tmp/server.py", content=_SERVER)
    mcp.call(
        "command_run",
        sandbox_id=name,
        command="exec python3 /tmp/server.py",
        working_directory="/tmp/served",
        background=True,
    )
    endpoint = mcp.call("sandbox_get_endpoint", sandbox_id=name, port=8000)
    url, headers = f"http://{endpoint['endpoint']}/hello.txt", dict(endpoint.get("headers") or {})
    headers["OPEN-SANDBOX-API-KEY"] = stack.api_key
    deadline = time.monotonic() + _START_SECONDS
    while (answer := httpx.get(url, headers=headers, trust_env=False, timeout=30)).status_code != httpx.codes.OK:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.2)
    assert "hello" == answer.text
    mcp.call("sandbox_kill", sandbox_id=name)
    assert name not in {one.sandbox for one in stack.sandboxes()}
