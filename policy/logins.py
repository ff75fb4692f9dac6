"""How a secret becomes the login of a database session: the plan (no secret in it) and the rendering (pure).

- A plan names the secret. The value exists only in the arguments and the result of `login_of`.
- No error message contains the value or a part of it.
"""

import unicodedata
from dataclasses import dataclass

from policy.injection import SecretPlan

MAX_USER = 63
"""The limit of a user's name in bytes: the server truncates a longer one."""
MAX_PASSWORD = 1024
LOGIN_KIND = "postgres"


@dataclass(frozen=True, slots=True)
class LoginPlan:
    """One secret with which the gateway logs in to a PostgreSQL server, in place of its client.

    Attributes:
        binding: the id of the rule with this login.
        username: the user of the login, and the secret is the password. None: the secret is `user:password`.
    """

    binding: str
    secret: str
    username: str | None = None

    def __post_init__(self) -> None:
        if self.username is not None:
            check_user(self.username)

    @property
    def kind(self) -> str:
        """What the plan does, in one word."""
        return LOGIN_KIND

    @property
    def slot(self) -> str:
        """The place that the binding owns. A session has one login."""
        return "postgres:login"

    @property
    def place(self) -> str:
        """The place in words."""
        return "the login"

    def collides(self, other: "LoginPlan") -> bool:
        """Whether one session cannot have both plans."""
        return (self.secret, self.username) != (other.secret, other.username)


type AnyPlan = SecretPlan | LoginPlan
"""Any use of a secret: in a request, or for a database session."""


def check_user(text: str) -> None:
    """Raise ValueError unless the text can be the name of a database's user."""
    if not 0 < len(text.encode("utf-8", "replace")) <= MAX_USER or not text.isprintable():
        raise ValueError(f"the name of a database's user has at most {MAX_USER} bytes and is printable")


def login_of(plan: LoginPlan, value: str) -> tuple[str, str]:
    """Return user and password for the secret `value`.

    Raises:
        ValueError: the value is no login. The message does not contain it.
    """
    user, password = plan.username, value
    if user is None:
        user, colon, password = value.partition(":")
        if not colon:
            raise ValueError(f"the value of secret {plan.secret!a} is not user:password")
        try:
            check_user(user)
        except ValueError:
            raise ValueError(f"the value of secret {plan.secret!a} does not begin with the name of a user") from None
    clean = not any(unicodedata.category(character) in ("Cc", "Cs") for character in password)
    if not 0 < len(password) <= MAX_PASSWORD or not clean:
        raise ValueError(f"the password of secret {plan.secret!a} is empty, too long, or has a control character")
    return user, password
