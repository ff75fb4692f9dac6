"""The real `serve`, with a fault in a request that asks for one: `X-Request-ID: fault.<number>.<mode>`.

The answer has its steps in the header `X-Steps`. `X-Request-ID: lift` ends an outage.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

from lifecycle import serve
from lifecycle.api.edge import Edge

sys.path.append(str(Path(__file__).parents[1] / "lifecycle"))

from injection import Injection, Injector, current

_INJECTOR = Injector(really=True)
_call = Edge.__call__


async def _with_fault(edge: Edge, scope: Any, receive: Any, send: Any) -> None:
    wanted = dict(scope.get("headers") or []).get(b"x-request-id", b"").decode("latin-1").split(".")
    if wanted == ["lift"]:
        _INJECTOR.out.clear()
    if wanted[0] != "fault":
        await _call(edge, scope, receive, send)
        return
    injection = Injection(int(wanted[1]), wanted[2])
    task = asyncio.current_task()
    assert task is not None
    injection.leave = task.cancel

    async def told(message: Any) -> None:
        if message["type"] == "http.response.start":
            steps = ",".join([*injection.seen, "fired"] if injection.fired else injection.seen)
            message = {**message, "headers": [*message.get("headers", ()), (b"x-steps", steps.encode())]}
        await send(message)

    token = current.set(injection)
    try:
        await _call(edge, scope, receive, told)
    finally:
        current.reset(token)


if __name__ == "__main__":
    _INJECTOR.install()
    Edge.__call__ = _with_fault  # type: ignore[method-assign]
    raise SystemExit(serve.main(sys.argv[1:]))
