"""Processes that do not outlive the one that started them, however that ends."""


def with_parent(*command: str, signal: str = "KILL") -> list[str]:
    """`command`, which the kernel sends `signal` when the thread that starts it ends."""
    return ["setpriv", "--pdeathsig", signal, *command]
