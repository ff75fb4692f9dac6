"""The compromised daemons of one server, shared by several tests."""

from tests.security.compromise.stack import CompromisedStack, Hostile


class Held:
    """A mapping from a name to its process, which stays the same until the process was restarted (`renewed`)."""

    def __init__(self, stack: CompromisedStack) -> None:
        self._stack = stack
        self._processes: dict[str, Hostile] = {}

    def __getitem__(self, name: str) -> Hostile:
        if name not in self._processes:
            self._processes[name] = self._stack.hostile(name)
        return self._processes[name]

    def renewed(self, name: str) -> Hostile:
        """Return the process that replaced the former one."""
        self._processes.pop(name).close()
        return self[name]

    def close(self) -> None:
        """Close the connections."""
        for process in self._processes.values():
            process.close()
