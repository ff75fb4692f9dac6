"""What a rule provides to a sandbox: a variable or a file with a placeholder, so that a program starts without its
secret.

- A compiled policy has the form of a placeholder. The placeholder itself exists for one sandbox: `derived` makes it
  from the sandbox's seed and the identity of the provision. Other seeds, names or secrets give other placeholders.
- A placeholder has letters, digits and `._~-` only. No URL, header, JSON text or form encodes it differently.
- A placeholder has more than 128 random bits, so no program guesses one.

Pure. `placeholders` applies this to a whole policy.
"""

import hashlib
import hmac
import re
import string
from dataclasses import dataclass
from enum import StrEnum

MARK = "{placeholder}"
"""The place of the placeholder in a text."""
HOLE = "{}"
"""The place of the random characters in a form."""
MAX_PROVISIONS = 64
"""The limit of variables and files of one policy."""
LENGTH = 36
"""Random characters of a placeholder, as many as in common tokens: 214 bits."""
MAX_TEXT = 16 * 1024

RESERVED = frozenset(
    {"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO", "PIP_CERT"}
    | {"AWS_CA_BUNDLE", "CARGO_HTTP_CAINFO", "DENO_CERT", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", "CACERT_UPDATES"}
    | {"PATH", "HOME", "SHELL", "USER", "IFS"}
)
"""Variables on which every program or the trust anchors depend."""
_RESERVED_PREFIXES = ("LD_", "OPENSANDBOX_", "EXECD_", "JUPYTER_", "BOOTSTRAP_", "SALLYPORT_")

_ALPHABET = string.ascii_letters + string.digits
_SEED = re.compile(r"[0-9a-f]{64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_FORM = re.compile(r"[A-Za-z0-9._~-]{0,32}\{\}[A-Za-z0-9._~-]{0,32}")
_PATH = re.compile(r"(?:~|(?=/))(?:/[A-Za-z0-9._@+-]{1,255}){1,64}")


class ProvisionKind(StrEnum):
    """What the sandbox gets."""

    ENV = "env"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class Provision:
    """One variable or file with a placeholder.

    Attributes:
        secret: the secret that the placeholder stands for.
        name: of the variable; of the file, its absolute path, or one below the home directory (`~/`).
        form: of the placeholder, with `HOLE` once.
        text: the value or the content, with `MARK` in the places of the placeholder.
    """

    secret: str
    kind: ProvisionKind
    name: str
    form: str = HOLE
    text: str = MARK

    def __post_init__(self) -> None:
        check_form(self.form)
        if self.kind is ProvisionKind.ENV:
            check_variable(self.name)
        else:
            check_path(self.name)
        check_text(self.kind, self.text)

    @property
    def identity(self) -> str:
        """The text from which the placeholder is derived."""
        return f"{self.kind}:{self.name}:{self.secret}"

    def placeholder(self, seed: str) -> str:
        """Return the placeholder of the sandbox with this seed."""
        return derived(seed, self.identity, self.form)

    def content(self, seed: str) -> str:
        """Return the value of the variable, or the content of the file."""
        return self.text.replace(MARK, self.placeholder(seed))


def check_form(form: str) -> None:
    """Raise ValueError unless the text is a form of placeholders."""
    if not _FORM.fullmatch(form):
        raise ValueError("a form is `{}` with at most 32 of letters, digits, `.`, `_`, `~` and `-` on each side")


def check_variable(name: str) -> None:
    """Raise ValueError unless a policy can provide a variable of this name."""
    if not _VARIABLE.fullmatch(name):
        raise ValueError("a variable's name is up to 128 of letters, digits and `_`, and does not begin with a digit")
    if name in RESERVED or name.startswith(_RESERVED_PREFIXES):
        raise ValueError(f"the variable {name} is reserved")


def check_path(path: str) -> None:
    """Raise ValueError unless a policy can provide a file at this path."""
    if not _PATH.fullmatch(path) or {".", ".."} & set(path.split("/")) or len(path) > 1024:
        raise ValueError("a file's path is absolute or begins with `~/`, and has letters, digits, `/` and `._@+-` only")


def check_text(kind: ProvisionKind, text: str) -> None:
    """Raise ValueError unless the text can be a value or a content with a placeholder."""
    if MARK not in text:
        raise ValueError(f"the text has no {MARK}")
    if len(text) > MAX_TEXT or len(text.split(MARK)) > MAX_PROVISIONS:
        raise ValueError(f"the text has more than {MAX_TEXT} characters or {MAX_PROVISIONS - 1} placeholders")
    if not all(one.isprintable() or (one in "\n\t" and kind is ProvisionKind.FILE) for one in text):
        raise ValueError("the text has a control character")


def derived(seed: str, identity: str, form: str) -> str:
    """Return the placeholder of one sandbox: the same for the same three texts.

    Raises:
        ValueError: the seed is not 32 bytes in hexadecimal.
    """
    if not _SEED.fullmatch(seed):
        raise ValueError("the seed of placeholders is not 32 bytes in hexadecimal")
    made = hmac.digest(bytes.fromhex(seed), b"sallyport placeholder 1\0" + identity.encode(), hashlib.sha256)
    number, characters = int.from_bytes(made), ""  # 256 bits: the bias of 62 ** 36 in it is below 2 ** -41
    for _ in range(LENGTH):
        number, digit = divmod(number, len(_ALPHABET))
        characters += _ALPHABET[digit]
    return form.replace(HOLE, characters)
