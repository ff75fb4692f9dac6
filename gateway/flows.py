"""The live flows of a worker, so that a change can reach them.

- A flow is in the registry from its accept to its end; the registry's size is the connection cap.
- Cutting a flow cancels its task, and the task resets its sockets: the sandbox sees a reset at once.
- After a new policy every flow is judged again with the facts it was allowed for; one that would now be denied, or
  treated otherwise, is cut.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class LiveFlow:
    """One connection of the sandbox.

    Attributes:
        still_allowed: judges the flow under the policy in force; None until it was decided.
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
        """Register the flow that `task` serves; it leaves by itself when the task ends."""
        flow = LiveFlow(secrets.token_hex(8), task)
        self._flows[flow.flow_id] = flow
        task.add_done_callback(lambda _done: self._flows.pop(flow.flow_id, None))
        return flow

    def recheck(self) -> int:
        """Cut the flows that the policy in force would not let begin; returns how many."""
        return self._cut([flow for flow in self._flows.values() if flow.still_allowed and not flow.still_allowed()])

    def cut_all(self) -> int:
        """Cut every flow; returns how many."""
        return self._cut(list(self._flows.values()))

    def _cut(self, flows: list[LiveFlow]) -> int:
        for flow in flows:
            flow.task.cancel()
        return len(flows)
