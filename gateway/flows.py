"""The registry of a worker's live flows.

- A flow is in the registry from its accept to its end. The acceptor limits the registry's size.
- To abort a flow, the registry cancels its task. The task resets its sockets, so the sandbox sees a reset at once.
- After a change of policy every flow is judged again with its original facts. A flow is aborted if it would now be
  denied or get another treatment.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class LiveFlow:
    """One connection of the sandbox.

    Attributes:
        still_allowed: judges the flow under the policy in force; None before the first decision.
    """

    flow_id: str
    task: asyncio.Task[None]
    still_allowed: Callable[[], bool] | None = field(default=None)


class FlowRegistry:
    """All flows of one worker."""

    def __init__(self) -> None:
        self._flows: dict[str, LiveFlow] = {}

    def __len__(self) -> int:
        return len(self._flows)

    def enter(self, task: asyncio.Task[None]) -> LiveFlow:
        """Register the flow that `task` serves. The end of the task removes it."""
        flow = LiveFlow(secrets.token_hex(8), task)
        self._flows[flow.flow_id] = flow
        task.add_done_callback(lambda _done: self._flows.pop(flow.flow_id, None))
        return flow

    def recheck(self) -> int:
        """Abort the flows that the policy in force does not allow; return their number."""
        return self._cut([flow for flow in self._flows.values() if flow.still_allowed and not flow.still_allowed()])

    def cut_all(self) -> int:
        """Abort every flow; return their number."""
        return self._cut(list(self._flows.values()))

    async def emptied(self) -> None:
        """Wait until every flow that is registered now has ended."""
        if tasks := [flow.task for flow in self._flows.values()]:
            await asyncio.wait(tasks)

    def _cut(self, flows: list[LiveFlow]) -> int:
        for flow in flows:
            flow.task.cancel()
        return len(flows)
