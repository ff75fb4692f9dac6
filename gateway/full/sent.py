"""What was sent to which host, to be looked for in everything that host answers: also on other connections.

It is kept as long as the lease of its secret may be: until it is called back.
"""

MAX_HOSTS = 1024
"""Hosts; the one that was sent something the longest time ago is forgotten for one more."""


class Sent:
    """The texts that give away the secrets of one sandbox. Its repr shows none of them."""

    __slots__ = ("_hosts",)

    def __init__(self) -> None:
        self._hosts: dict[str, dict[str, frozenset[str]]] = {}

    def add(self, host: str, secret: str, texts: frozenset[str]) -> None:
        """Remember that `texts` of a secret go to `host`."""
        known = self._hosts.pop(host, {})
        known[secret] = known.get(secret, frozenset()) | texts
        self._hosts[host] = known
        if len(self._hosts) > MAX_HOSTS:
            del self._hosts[next(iter(self._hosts))]

    def of(self, host: str) -> dict[str, frozenset[str]]:
        """Return what went to `host`, by secret."""
        return dict(self._hosts.get(host, {}))

    def drop(self, secrets: frozenset[str] | None) -> None:
        """Forget these secrets, or all."""
        for known in self._hosts.values():
            for secret in known.keys() & (known.keys() if secrets is None else secrets):
                del known[secret]

    def __repr__(self) -> str:
        return f"Sent({len(self._hosts)} hosts)"
