"""Each Python example in the README of the published SDK, as it is written there.

Replaced are the addresses of the server and of Redis, and the key. The image names are aliases that an operator adds. A
snippet that continues an earlier one finds that one's names. The examples of pools ask for a ready sandbox directly
after the start, when no server can have one ready. They wait here. The server is one of its own, because an example
kills every sandbox that it finds.

It tests `lifecycle/serve.py` and `lifecycle/sandboxes/orchestrator.py`.
"""

import ast
import asyncio
import contextlib
import gc
import inspect
import io
import re
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import redis
from opensandbox import AcquirePolicy, Sandbox
from opensandbox.config import ConnectionConfig
from opensandbox.models.sandboxes import NetworkPolicy, NetworkRule, SandboxFilter
from opensandbox.sync.manager import SandboxManagerSync

from testbed.ports import reserve_port
from testbed.stack import IMAGE, Stack
from tests.stacks import beside
from tests.system.test_create_and_delete import until

pytestmark = [
    pytest.mark.system,
    pytest.mark.extended,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # examples leave connections open
]

README = str(metadata.metadata("opensandbox").get_payload())
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
ALIASES = ("ubuntu", "ubuntu:22.04", "nginx:latest", "python:3.11")
REDIS = "/usr/bin/redis-check-rdb"
"""The program of Debian's redis-tools. Its name at the start decides what it is, and here it is the server."""


_WAIT = "while not pool.snapshot().idle_count:\n    time.sleep(0.1)\n"
_WAIT_ASYNC = "while not (await pool.snapshot()).idle_count:\n    await asyncio.sleep(0.1)\n"
RUNTIME = ("runsc", pytest.param("runc", marks=pytest.mark.extended))


@pytest.fixture(scope="module", name="server")
def _server() -> Iterator[Stack]:
    with beside(Stack, "readme") as server:
        for name in ALIASES:
            server.sallyport("image", "alias", IMAGE, name)
        yield server


@pytest.fixture(autouse=True, name="cleared")
def _cleared(server: Stack) -> Iterator[None]:
    """Remove what an example has left: sandboxes, and connections that it did not close."""
    yield
    gc.collect()  # pytest's warnings about them are ignored only in this module
    with SandboxManagerSync.create(connection_config=server.connection) as manager:
        for info in manager.list_sandbox_infos(SandboxFilter(page_size=200)).sandbox_infos:
            manager.kill_sandbox(info.id)


def example(part: str) -> str:
    """Return the only example that contains a text."""
    (found,) = [code for code in EXAMPLES if part in code]
    return found


class Notebook:
    """Runs snippets, one after the other. They share their names."""

    def __init__(self, server: Stack, **names: Any) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__", "asyncio": asyncio, "time": time, **names}
        self._replaced = {
            "api.opensandbox.io": f"127.0.0.1:{server.port}",
            "your-api-key": server.api_key,
            "your-key": server.api_key,
            "ConnectionConfigSync(domain=": f'ConnectionConfigSync(api_key="{server.api_key}", domain=',
            "ConnectionConfig(domain=": f'ConnectionConfig(api_key="{server.api_key}", domain=',
            "\nawait pool.start()\n": f"\nawait pool.start()\n{_WAIT_ASYNC}",
            "\npool.start()\n": f"\npool.start()\n{_WAIT}",
        }

    async def run(self, code: str, **replaced: str) -> str:
        """Run a snippet; return what it printed."""
        for old, new in {**self._replaced, **replaced}.items():
            code = code.replace(old, new)
        compiled = compile(code, "README", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if compiled.co_flags & inspect.CO_COROUTINE:
                await eval(compiled, self.names)  # noqa: S307 - a published example
            else:
                await asyncio.to_thread(exec, compiled, self.names)
        return printed.getvalue()


@contextlib.asynccontextmanager
async def notebook(server: Stack, runtime: str, **options: Any) -> AsyncIterator[Notebook]:
    """Make a sandbox, and a notebook that has it as `sandbox`."""
    config = ConnectionConfig(domain=f"127.0.0.1:{server.port}", api_key=server.api_key)
    extensions = {"sallyport.runtime": runtime, **options.pop("extensions", {})}
    sandbox = await Sandbox.create("ubuntu", connection_config=config, extensions=extensions, **options)
    made = Notebook(server, Sandbox=Sandbox, config=config, sandbox=sandbox, sandbox_id=sandbox.id)
    try:
        yield made
    finally:
        await made.names["sandbox"].destroy()


def states(server: Stack) -> int:
    """Return the number of sandboxes."""
    return len(server.sandboxes())


def test_the_examples_are_those_that_this_module_runs() -> None:
    assert 17 == len(EXAMPLES)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("# 1. Configure connection", "Hello Sandbox!\n"),
        ("sandbox = SandboxSync.create(", "Hello Sandbox!\n"),
        ("warmup_concurrency=128", "pool-ok\n"),
        ("InMemoryAsyncPoolStateStore(),", "pool-ok\n"),
    ],
)
async def test_a_quick_start_runs_as_written(server: Stack, part: str, said: str) -> None:
    assert said == (await Notebook(server).run(example(part))).replace("\n\n", "\n")
    if "pool" not in said:  # a pool that shuts down leaves its idle sandboxes to their expiry
        assert await asyncio.to_thread(until, lambda: states(server) == 0)


@pytest.fixture(name="address")
def _address(tmp_path: Path) -> Iterator[str]:
    """Run Redis with the user of the example; return its address."""
    port = reserve_port()
    settings = tmp_path / "redis.conf"
    settings.write_text(
        f'bind 127.0.0.1\nport {port}\ndir {tmp_path}\nsave ""\nuser default off\nuser user on >password ~* &* +@all\n'
    )
    command = ("redis-server", str(settings))
    process = subprocess.Popen(command, executable=REDIS, stdout=subprocess.DEVNULL)
    try:
        with redis.Redis.from_url(f"redis://user:password@127.0.0.1:{port}/0") as client:
            assert until(lambda: _answers(client))
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def _answers(client: "redis.Redis") -> bool:
    with contextlib.suppress(redis.ConnectionError):
        return bool(client.ping())
    return False


async def test_two_nodes_share_a_pool_on_redis(server: Stack, address: str) -> None:
    """The example makes the pool of one node. A second node acquires what the first one has made ready."""
    code = example("redis_client = ")
    nodes = [Notebook(server, timedelta=timedelta) for _ in range(2)]
    for number, node in enumerate(nodes, start=1):
        changes = {"redis.example.com:6379": address, "worker-1": f"worker-{number}", "max_idle=10": "max_idle=2"}
        await node.run(code, **changes)
    first, second = (node.names["pool"] for node in nodes)

    def journey() -> str:
        first.start()
        second.start()
        try:
            assert until(lambda: second.snapshot().idle_count == 2)
            ready = {state.sandbox for state in server.sandboxes()}
            sandbox = second.acquire(sandbox_timeout=timedelta(minutes=5), policy=AcquirePolicy.FAIL_FAST)
            try:
                assert sandbox.id in ready
                said = str(sandbox.commands.run("echo shared").text).strip()
            finally:
                sandbox.destroy()
            # The pool replaces what it handed out. It would keep a sandbox that it makes during a `resize`.
            assert until(lambda: first.snapshot().idle_count == 2)
            return said
        finally:
            first.resize(0)
            assert until(lambda: first.snapshot().idle_count == 0)
            for pool in (second, first):
                pool.shutdown(graceful=True)

    assert "shared" == await asyncio.to_thread(journey)
    for node in nodes:
        node.names["redis_client"].close()
    assert await asyncio.to_thread(until, lambda: states(server) == 0)


@pytest.mark.parametrize("runtime", RUNTIME)
async def test_the_usage_examples_work_on_one_sandbox(server: Stack, runtime: str) -> None:
    """Lifecycle, health check, commands, files, snapshots, and a policy that changes."""
    policy = NetworkPolicy(defaultAction="deny", egress=[NetworkRule(action="allow", target="pypi.org")])
    async with notebook(server, runtime, network_policy=policy) as book:
        assert "State: Running\nExpires: 2" in await book.run(example("await sandbox.pause()"))
        await book.run(example("manual = "))
        await book.names["manual"].destroy()
        kept = book.names["sandbox"]
        await book.run(example("custom_health_check"))
        assert await book.names["sandbox"].is_healthy()
        await book.names["sandbox"].destroy()
        book.names["sandbox"] = kept
        assert "STDOUT: Count 5" in await book.run(example("handle_stdout"))
        assert "Content: Hello World\nFound: /tmp/hello.txt\n" == await book.run(example("WriteEntry("))
        await kept.files.write_file("/root/kept", "kept")
        restore, marker, delete = example("create_snapshot(sandbox_id").partition("# Only delete")
        await book.run(restore)
        assert "kept" == await book.names["restored"].files.read_file("/root/kept")
        await book.names["restored"].destroy()  # a snapshot is in use as long as a sandbox from it exists
        await book.run(marker + delete)
        book.names["NetworkRule"] = NetworkRule
        await book.run(example("patch_egress_rules"))
        shown = await kept.get_egress_policy()
        assert {"www.github.com": "allow", "pypi.org": "deny"} == {rule.target: rule.action for rule in shown.egress}


async def test_the_examples_of_creation_and_of_the_vault_work(server: Stack) -> None:
    config = ConnectionConfig(domain=f"127.0.0.1:{server.port}", api_key=server.api_key)
    book = Notebook(server, Sandbox=Sandbox, config=config)
    await book.run(example('metadata={"project": "demo"}'))
    sandbox = book.names["sandbox"]
    info = await sandbox.get_info()
    assert ({"project": "demo"}, "/app") == (
        info.metadata,
        (await sandbox.commands.run("printenv PYTHONPATH")).text,
    )
    await sandbox.destroy()
    await book.run(example("credential_vault.create("), **{"<token>": "token-of-the-example"})
    vault = await book.names["sandbox"].credential_vault.get()
    assert ["api-token"] == [binding.name for binding in vault.bindings]
    await book.names["sandbox"].destroy()


async def test_the_example_of_isolated_sessions_works(server: Stack) -> None:
    """Only runsc has them. The example needs two directories, Python under a name, and a Makefile."""
    async with notebook(server, "runsc", extensions={"bootstrap.execd.isolation": "enable"}) as book:
        prepare = "mkdir -p /workspace /data && ln -sf $(command -v python3) /usr/local/bin/python"
        assert 0 == (await book.names["sandbox"].commands.run(prepare)).exit_code
        assert "2\n" == (await book.run(example("CreateIsolatedSessionRequest("))).replace("\n\n", "\n")


async def test_the_examples_of_administration_and_of_connections_work(server: Stack) -> None:
    """The first one kills the running sandboxes that it finds."""
    config = ConnectionConfig(domain=f"127.0.0.1:{server.port}", api_key=server.api_key)
    made = await Sandbox.create("ubuntu", connection_config=config)
    book = Notebook(server, config=config, ConnectionConfig=ConnectionConfig)
    assert f"Found sandbox: {made.id}\n" in await book.run(example("manager.kill_sandbox(info.id)"))
    assert await asyncio.to_thread(until, lambda: states(server) == 0)
    await made.close()
    await book.run(example("# 1. Basic configuration"))
    other = await Sandbox.create("ubuntu", connection_config=book.names["config"])
    assert await other.is_healthy()
    await other.destroy()
    await book.names["config"].transport.aclose()
