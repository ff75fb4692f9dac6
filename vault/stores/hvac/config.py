"""What the operator says about his Vault server. Pure: no secret, no IO."""

from dataclasses import dataclass
from enum import StrEnum


class Auth(StrEnum):
    """How Sallyport logs in. The credential file has the token, the secret id, or the JWT."""

    TOKEN = "token"  # noqa: S105 - the name of a method
    APPROLE = "approle"
    JWT = "jwt"
    KUBERNETES = "kubernetes"


@dataclass(frozen=True, slots=True)
class HashicorpServer:
    """One server.

    Attributes:
        roots: the file with the authorities of its certificate. No other authority counts.
        mount: where the method of `auth` is mounted; empty: at its name.
        role: the role of the login, or the role id of AppRole.
        allowed: the paths that a policy may name, each exact or a prefix and `*`; empty: all.
    """

    address: str
    roots: str
    namespace: str
    auth: Auth
    mount: str
    role: str
    allowed: tuple[str, ...]

    def permits(self, path: str) -> bool:
        """Whether a policy may name this path."""
        if not self.allowed:
            return True
        return any(path.startswith(each[:-1]) if each.endswith("*") else path == each for each in self.allowed)
