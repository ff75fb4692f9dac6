"""Processes that end with the process that started them, whatever ended it."""


def with_parent(*command: str, signal: str = "KILL") -> list[str]:
    """Return the command that runs `command` and receives `signal` from the kernel when the starting thread ends."""
    return ["setpriv", "--pdeathsig", signal, *command]
