"""The compromised daemons of one server, each for as many tests as want it."""

from tests.security.compromise.stack import CompromisedStack, Hostile


class Held:
    """Returns the same process for a name until that process is started again (`renewed`)."""

    def __init__(self, stack: CompromisedStack) -> None:
        self._stack = stack
        self._processes: dict[str, Hostile] = {}

    def __getitem__(self, name: str) -> Hostile:
        if name not in self._processes:
            self._processes[name] = self._stack.hostile(name)
        return self._processes[name]

    def renewed(self, name: str) -> Hostile:
        """Return the process that was started in place of the former one."""
        self._processes.pop(name).close()
        return self[name]

    def close(self) -> None:
        """End the connections."""
        for process in self._processes.values():
            process.close()
