"""References: the names of secrets that a backend holds, and not the sealed store. Pure.

    api-token, sealed://api-token        a secret of the sealed store; both have the name `api-token`
    vault://kv/agents/api#token          a field of a secret of HashiCorp Vault or OpenBao
    vault://database/creds/ro#username:password    two fields of one secret, joined by a colon
    env://API_TOKEN                      a variable of the server's environment
    file://api-token                     a file in a directory that the operator lists
    command://api-token                  the output of a command that the operator names
    token://api                          a token that Sallyport obtains as the operator says

- A reference has one spelling. Two references are the same secret if and only if their texts are equal.
- No part of a path is `.`, `..` or empty, so no reference leaves the place that its backend gives it.
- Only the operator's policy file has references. The name of an API caller's credential begins with `inline:`.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

MAX_REFERENCE: Final = 256
_SEPARATOR: Final = "://"
_SEALED: Final = "sealed"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
_SEGMENT = re.compile(r"[A-Za-z0-9._~@=+-]{1,128}", re.ASCII)
_FIELD = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_MOST_FIELDS: Final = 2


class BackendKind(StrEnum):
    """The backends, by the scheme of their references."""

    VAULT = "vault"
    ENV = "env"
    FILE = "file"
    COMMAND = "command"
    TOKEN = "token"  # noqa: S105 - a scheme


@dataclass(frozen=True, slots=True)
class SecretReference:
    """One secret of a backend. `path` has no leading slash; only references to Vault have `fields`."""

    backend: BackendKind
    path: str
    fields: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a reference.

        Raises:
            ValueError: the text is none. The message says what one looks like.
        """
        scheme, separator, rest = text.partition(_SEPARATOR)
        if not separator or scheme not in set(BackendKind) or len(text) > MAX_REFERENCE:
            raise ValueError(f"a reference begins with {', '.join(f'{each}://' for each in BackendKind)}")
        backend = BackendKind(scheme)
        if backend is BackendKind.VAULT:
            return cls(backend, *_vault(rest))
        if not (_VARIABLE if backend is BackendKind.ENV else _NAME).fullmatch(rest) or rest in (".", ".."):
            raise ValueError(f"{backend}:// is followed by one name")
        return cls(backend, rest)

    def __str__(self) -> str:
        suffix = f"#{':'.join(self.fields)}" if self.fields else ""
        return f"{self.backend}{_SEPARATOR}{self.path}{suffix}"


def _vault(text: str) -> tuple[str, tuple[str, ...]]:
    path, _, fragment = text.partition("#")
    segments, fields = path.split("/"), tuple(fragment.split(":"))
    if len(segments) < 2 or any(not _SEGMENT.fullmatch(each) or each in (".", "..") for each in segments):
        raise ValueError("vault:// is followed by the mount, /, and the path of a secret")
    if len(fields) > _MOST_FIELDS or not all(map(_FIELD.fullmatch, fields)):
        raise ValueError("a reference to Vault ends in # and a field, or two fields with a colon between them")
    return path, fields


def is_reference(secret: str) -> bool:
    """Whether the name of a secret is a reference to a backend: then the sealed store has no such secret."""
    scheme, separator, _ = secret.partition(_SEPARATOR)
    return bool(separator) and scheme in set(BackendKind)


def backend_of(text: str) -> BackendKind:
    """Return the backend of a reference. Raises ValueError like `SecretReference.parse`."""
    return SecretReference.parse(text).backend


def secret_text(text: str) -> str:
    """Return the name of the secret that the author of a policy file means.

    Raises:
        ValueError: it is neither the name of a sealed secret nor a reference.
    """
    if is_reference(text):
        return str(SecretReference.parse(text))
    name = text.removeprefix(_SEALED + _SEPARATOR)
    if not _NAME.fullmatch(name):
        raise ValueError("a secret's name is up to 128 of letters, digits, `.`, `_` and `-`, or a reference")
    return name
