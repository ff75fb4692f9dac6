"""The whole life of a sandbox: each operation of the lifecycle API, one after another.

A life is also begun directly before a kill, so that the kill interrupts one of its operations. What such a life made is
deleted afterwards by what the server lists: an interrupted call can have made a sandbox that its client never heard of.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import httpx
from opensandbox.exceptions import SandboxException
from opensandbox.models.sandboxes import PVC, SandboxFilter, SnapshotFilter, Volume
from opensandbox.sync.manager import SandboxManagerSync
from opensandbox.sync.sandbox import SandboxSync

from testbed.stack import EMPTY_IMAGE, Stack, StackError

_MARK = {"chaos": "life"}
_RESOURCE = {"cpu": "1", "memory": "128Mi"}
_LIFETIME = timedelta(hours=1)
_PATIENCE = 120.0
"""Seconds for an interrupted life to end, for its removal, and for a pool to become full."""
_POLL = 0.1
_FILE, _CONTENT = "/kept", "written before the snapshot"


@contextmanager
def pools(stack: Stack) -> Iterator[None]:
    """Have a pool of one idle sandbox for each runtime.

    Raises:
        StackError: a pool was not made or not deleted.
    """
    headers = {"OPEN-SANDBOX-API-KEY": stack.api_key}
    with httpx.Client(base_url=f"{stack.base}/v1", headers=headers, timeout=60, trust_env=False) as client:
        try:
            for runtime in ("runc", "runsc"):
                container = {"image": EMPTY_IMAGE, "resources": {"limits": _RESOURCE}}
                body = {
                    "name": _pool(runtime),
                    "template": {"spec": {"containers": [container], "runtimeClassName": runtime}},
                    "capacitySpec": {"bufferMin": 1, "bufferMax": 1, "poolMin": 0, "poolMax": 4},
                }
                answer = client.post("/pools", json=body)
                if answer.status_code != httpx.codes.CREATED:
                    raise StackError(f"no pool: {answer.status_code} {answer.text[:200]}")
                _wait("a full pool", partial(_full, client, runtime))
            yield
        finally:
            for runtime in ("runc", "runsc"):
                client.delete(f"/pools/{_pool(runtime)}")


def whole_life(stack: Stack, runtime: str) -> float:
    """Create a sandbox with a volume, pause and resume it, snapshot it, restore that, claim one of a pool, delete all.

    Return the seconds that this took.

    Raises:
        StackError: a state or a file was not what it had to be.
        SandboxException: a call failed.
    """
    began = time.monotonic()
    with SandboxManagerSync.create(stack.connection) as manager:
        name = f"chaos-{secrets.token_hex(8)}"
        volume = Volume(name="v", pvc=PVC(claim_name=name, delete_on_sandbox_termination=True), mount_path="/volume")
        with _made(stack, EMPTY_IMAGE, {"sallyport.runtime": runtime}, volumes=[volume]) as source:
            source.files.write_file(f"/volume{_FILE}", _CONTENT)
            source.files.write_file(_FILE, _CONTENT)
            _pause_and_resume(stack, source)
            _expect("the volume", _CONTENT, source.files.read_file(f"/volume{_FILE}"))
            snapshot = source.create_snapshot()
            while snapshot.status.state == "Creating":
                time.sleep(_POLL)
                snapshot = manager.get_snapshot(snapshot.id)
            _expect("the snapshot", "Ready", snapshot.status.state)
            with _made(stack, None, {"sallyport.runtime": runtime}, snapshot_id=snapshot.id) as restored:
                _expect("the restored file", _CONTENT, restored.files.read_file(_FILE))
            manager.delete_snapshot(snapshot.id)
        with _made(stack, EMPTY_IMAGE, {"poolRef": _pool(runtime)}) as claimed:
            claimed.files.write_file(_FILE, _CONTENT)
            _expect("the claimed file", _CONTENT, claimed.files.read_file(_FILE))
    return time.monotonic() - began


class InterruptedLife:
    """A whole life beside a kill, whatever becomes of it. It begins at once."""

    def __init__(self, stack: Stack, runtime: str) -> None:
        self._stack, self._runtime = stack, runtime
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def _live(self) -> None:
        with suppress(Exception):
            whole_life(self._stack, self._runtime)

    def remove(self) -> None:
        """Wait for its end, and delete what the server lists of it.

        Raises:
            StackError: it did not end, or its sandboxes and snapshots could not be deleted.
        """
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            raise StackError("an interrupted life did not end")
        _wait("the removal of an interrupted life", lambda: _cleared(self._stack))


def _cleared(stack: Stack) -> bool:
    """Delete every sandbox and snapshot of a life. Return whether none was left."""
    try:
        with SandboxManagerSync.create(stack.connection) as manager:
            sandboxes = manager.list_sandbox_infos(SandboxFilter(metadata=_MARK)).sandbox_infos
            for sandbox in sandboxes:
                with suppress(SandboxException):
                    manager.kill_sandbox(sandbox.id)
            snapshots = manager.list_snapshots(SnapshotFilter()).snapshot_infos
            for snapshot in snapshots:
                with suppress(SandboxException):
                    manager.delete_snapshot(snapshot.id)
    except SandboxException:
        return False
    return not sandboxes and not snapshots


def _full(client: httpx.Client, runtime: str) -> bool:
    return bool(client.get(f"/pools/{_pool(runtime)}").json()["status"]["available"])


def _pool(runtime: str) -> str:
    return f"chaos-{runtime}"


@contextmanager
def _made(stack: Stack, image: str | None, extensions: dict[str, str], **options: Any) -> Iterator[SandboxSync]:
    sandbox = SandboxSync.create(
        image,
        connection_config=stack.connection,
        extensions=extensions,
        metadata=_MARK,
        resource=_RESOURCE,
        timeout=_LIFETIME,
        **options,
    )
    try:
        yield sandbox
        sandbox.kill()
    finally:
        sandbox.close()


def _pause_and_resume(stack: Stack, sandbox: SandboxSync) -> None:
    sandbox.pause()
    _expect("the state after a pause", "Paused", sandbox.get_info().status.state)
    SandboxSync.resume(str(sandbox.id), connection_config=stack.connection).close()
    _expect("the state after a resume", "Running", sandbox.get_info().status.state)


def _expect(what: str, wanted: str, found: str) -> None:
    if found != wanted:
        raise StackError(f"{what}: {found!r}, not {wanted!r}")


def _wait(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise StackError(f"{what} takes longer than {_PATIENCE:g} s")
        time.sleep(_POLL)
