"""The pools that the published SDK keeps itself: many creations at once, renewals to a shorter life, many removals.

It tests `lifecycle/sandboxes/transaction.py` and `lifecycle/sandboxes/orchestrator.py`.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from opensandbox import (
    AcquirePolicy,
    InMemoryAsyncPoolStateStore,
    InMemoryPoolStateStore,
    PoolCreationSpec,
    SandboxPoolAsync,
    SandboxPoolSync,
)
from opensandbox.config.connection import ConnectionConfig
from opensandbox.exceptions import PoolEmptyException
from opensandbox.models.sandboxes import SandboxFilter
from opensandbox.sync.manager import SandboxManagerSync

from testbed.census import take
from testbed.stack import EMPTY_IMAGE, Stack
from tests.conftest import ON_RUNC
from tests.system.test_create_and_delete import settled, until

pytestmark = [pytest.mark.system, pytest.mark.images]

IDLE = 6
TAG = {"pool": "client"}
LIFE = timedelta(minutes=30)


@pytest.fixture(scope="module", autouse=True)
def _warm(stack: Stack) -> None:
    """Docker and runsc keep some things of their first containers."""
    for runtime in ("runc", "runsc"):
        made = stack.create(runtime, EMPTY_IMAGE)
        made.kill()
        made.close()


def spec(runtime: str) -> PoolCreationSpec:
    limits = {"cpu": "1", "memory": "256Mi"}
    extensions = {"sallyport.runtime": runtime}
    return PoolCreationSpec(image=EMPTY_IMAGE, resource=limits, metadata=TAG, extensions=extensions)


def listed(stack: Stack) -> int:
    """Return the number of sandboxes with the tag of the pool."""
    manager = SandboxManagerSync.create(connection_config=stack.connection)
    try:
        return int(manager.list_sandbox_infos(SandboxFilter(metadata=TAG)).pagination.total_items)
    finally:
        manager.close()


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_pool_fills_up_at_once_hands_out_and_leaves_nothing(stack: Stack, runtime: str) -> None:
    """Its target is reached and not exceeded. A sandbox that is handed out lives for the requested time."""
    before = take(stack)
    pool = SandboxPoolSync(
        pool_name=f"sync-{runtime}",
        max_idle=IDLE,
        state_store=InMemoryPoolStateStore(),
        connection_config=stack.connection,
        creation_spec=spec(runtime),
    )
    pool.start()
    try:
        assert until(lambda: pool.snapshot().idle_count == IDLE)
        assert listed(stack) == IDLE
        pool.resize(0)
        with ThreadPoolExecutor(3) as threads:
            made = list(threads.map(lambda _: pool.acquire(LIFE, AcquirePolicy.FAIL_FAST), range(3)))
        assert 3 == len({one.id for one in made})
        for one in made:
            left = one.get_info().expires_at - datetime.now(UTC)
            assert timedelta(minutes=28) < left <= LIFE
            assert "x" == one.files.read_file(_written(one))
        assert until(lambda: pool.snapshot().idle_count == 0)
        with pytest.raises(PoolEmptyException):
            pool.acquire(LIFE, AcquirePolicy.FAIL_FAST)
        for one in made:
            one.destroy()
    finally:
        pool.release_all_idle_parallel(max_workers=8)
        pool.shutdown(graceful=True)
    assert until(lambda: listed(stack) == 0)
    assert {} == settled(stack, before)


def _written(sandbox: object) -> str:
    path = f"/tmp/{time.monotonic_ns()}"
    sandbox.files.write_file(path, "x")  # type: ignore[attr-defined]
    return path


async def test_an_asynchronous_pool_hands_out_and_leaves_nothing(stack: Stack) -> None:
    before = await asyncio.to_thread(take, stack)
    connection = ConnectionConfig(domain=f"127.0.0.1:{stack.port}", api_key=stack.api_key)
    pool = SandboxPoolAsync(
        pool_name="async",
        max_idle=2,
        state_store=InMemoryAsyncPoolStateStore(),
        connection_config=connection,
        creation_spec=spec("runc"),
    )
    await pool.start()
    try:
        async with asyncio.timeout(60):
            while (await pool.snapshot()).idle_count < 2:  # noqa: ASYNC110 - the SDK has no event for it
                await asyncio.sleep(0.1)
        await pool.resize(0)  # as the SDK's documentation says, so that nothing replaces what is released
        sandbox = await pool.acquire(LIFE, AcquirePolicy.FAIL_FAST)
        await sandbox.files.write_file("/tmp/a", "x")
        assert "x" == await sandbox.files.read_file("/tmp/a")
        await sandbox.destroy()
    finally:
        await pool.release_all_idle()
        await pool.shutdown(graceful=True)
        await asyncio.to_thread(until, lambda: listed(stack) == 0)
    assert 0 == await asyncio.to_thread(listed, stack)
    assert {} == await asyncio.to_thread(settled, stack, before)
