"""Limits of references: what an operator takes away from secrets of backends (`sallyport vault limit`).

A sealed secret has a binding. A reference is bound by the operator's policy file, which names it at exact hosts. A
limit says the rest of what a binding says: an end, sandboxes, numbers of uses, and once more hosts, ports and schemes.

- A limit has a pattern: a reference, or the beginning of references and `*`. Each limit whose pattern matches holds, so
  a limit can only take away. It is judged by the code that judges bindings (`binding`).
- Each reference is counted on its own, also under a pattern.

Pure. `vault.limit_record` stores the limits.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from policy.facts import Scheme
from policy.references import BackendKind, SecretReference
from vault.conditions import ANY_SANDBOX, UNLIMITED, ConditionError, Selectors, UseLimits, form_of, of_form
from vault.grants import Grant, GrantError, SecretBinding
from wire.api.vaultd import LimitForm

EVERY: Final = "*"
"""The pattern of every reference."""
_MOST_PATTERN: Final = 256
_BEGINNING = re.compile(r"[A-Za-z0-9._~@=+:#/-]*", re.ASCII)
_NOWHERE: Final = "any.invalid"


def limit_pattern(text: str) -> str:
    """Return `text` if it is a reference, or the beginning of references and `*`.

    Raises:
        GrantError: it is neither.
    """
    if text == EVERY:
        return text
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in set(BackendKind) or len(text) > _MOST_PATTERN:
        raise GrantError(f"a limit is for a reference ({', '.join(f'{each}://' for each in BackendKind)}), or `*`")
    if not text.endswith("*"):
        try:
            return str(SecretReference.parse(text))
        except ValueError as error:
            raise GrantError(f"{error}; or a beginning and `*` at the end") from None
    if not _BEGINNING.fullmatch(rest[:-1]):
        raise GrantError("a pattern is the beginning of references, and `*` at its end only")
    return text


@dataclass(frozen=True, slots=True)
class ReferenceLimit:
    """One limit. Of hosts, ports and schemes, None means any; `expires` is aware."""

    pattern: str
    hosts: frozenset[str] | None = None
    ports: frozenset[int] | None = None
    schemes: frozenset[Scheme] | None = None
    expires: datetime | None = None
    selectors: Selectors = ANY_SANDBOX
    limits: UseLimits = UNLIMITED

    @classmethod
    def make(
        cls,
        pattern: str,
        hosts: Iterable[str] | None = None,
        ports: Iterable[int] | None = None,
        schemes: Iterable[str] | None = None,
        expires: str | None = None,
        selectors: Selectors = ANY_SANDBOX,
        limits: UseLimits = UNLIMITED,
    ) -> "ReferenceLimit":
        """Build a limit from what a person wrote. None means any.

        Raises:
            GrantError: some part of it cannot be, or it limits nothing.
        """
        if (hosts, ports, schemes, expires, selectors, limits) == (None, None, None, None, ANY_SANDBOX, UNLIMITED):
            raise GrantError("a limit needs at least one of host, port, scheme, expiry, metadata, image, uses, bytes")
        read = SecretBinding.make(
            (_NOWHERE,) if hosts is None else hosts,
            (443,) if ports is None else ports,
            ("https",) if schemes is None else schemes,
            expires=expires,
        )
        return cls(
            limit_pattern(pattern),
            None if hosts is None else read.hosts,
            None if ports is None else read.ports,
            None if schemes is None else read.schemes,
            read.expires,
            selectors,
            limits,
        )

    def matches(self, reference: str) -> bool:
        """Whether the limit is one of this reference."""
        return reference.startswith(self.pattern[:-1]) if self.pattern.endswith("*") else reference == self.pattern

    def binding(self, wanted: Grant) -> SecretBinding:
        """Return a binding that says what the limit says. Where that is nothing, it permits `wanted`."""
        return SecretBinding(
            frozenset({wanted.host}) if self.hosts is None else self.hosts,
            frozenset({wanted.port}) if self.ports is None else self.ports,
            frozenset({wanted.scheme}) if self.schemes is None else self.schemes,
            expires=self.expires,
            selectors=self.selectors,
            limits=self.limits,
        )

    @property
    def form(self) -> LimitForm:
        """The form in messages and files."""
        return LimitForm(
            self.pattern,
            None if self.hosts is None else tuple(sorted(self.hosts)),
            None if self.ports is None else tuple(sorted(self.ports)),
            None if self.schemes is None else tuple(sorted(map(str, self.schemes))),
            None if self.expires is None else self.expires.astimezone(UTC).isoformat(),
            form_of(self.selectors, self.limits),
        )

    @classmethod
    def of(cls, form: LimitForm) -> "ReferenceLimit":
        """Return what `form` says.

        Raises:
            GrantError: some part of it cannot be.
        """
        try:
            conditions = of_form(form.conditions)
        except ConditionError as error:
            raise GrantError(str(error)) from None
        return cls.make(form.pattern, form.hosts, form.ports, form.schemes, form.expires, *conditions)
