"""Which sandbox may have which secret, where and how: values and the decision over them. Pure.

A `SecretBinding` is what the owner of a secret allows; a `Grant` is what one sandbox was given; a release needs both.

- A secret's own binding names exact hosts. A wildcard is possible only in a grant of a secret that the API's caller
  brought along for his own sandbox, where the operator allowed that.
- A binding without hosts, ports or schemes cannot be made: an empty list never means "any".
- Hosts are compared in the one canonical form of `policy.names`.
- A path that two servers could read differently matches a binding that names paths only if each reading of it does.
- A denial is a `Refusal` value; nothing here raises but for values that cannot be made at all (`GrantError`).
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from policy.facts import Scheme
from policy.names import InvalidName, canonical_host, parse_pattern
from policy.paths import LENIENT, PathPattern, ambiguity, readings, strict_pattern
from vault import conditions
from vault.conditions import ANY_SANDBOX, UNLIMITED, ConditionError, Selectors, UseLimits
from wire.api.vaultd import MOST_GRANTS, BindingForm, GrantForm, Scope
from wire.errors import Code

MAX_GRANTS = MOST_GRANTS
MAX_LIST = 256
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
_METHOD = re.compile(r"[A-Za-z!#$%&'*+.^_`|~0-9-]{1,32}", re.ASCII)


class GrantError(ValueError):
    """A binding or grant that cannot exist; the message holds no value of a secret."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a secret stays where it is: a stable code and a sentence."""

    code: Code
    reason: str


def secret_name(text: object) -> str:
    """Return `text` if it can name a stored secret.

    Raises:
        GrantError: it cannot.
    """
    if not isinstance(text, str) or not _NAME.fullmatch(text):
        raise GrantError("a secret's name is 1 to 128 of A-Z a-z 0-9 . _ -")
    return text


def inline_name(text: object) -> str:
    """Return `text` if it can name a secret inside one sandbox: at most 256 bytes, printable."""
    if not isinstance(text, str) or not text.isprintable() or not 0 < len(text.encode("utf-8")) <= 256:
        raise GrantError("an inline secret's name is 1 to 256 printable bytes")
    return text


@dataclass(frozen=True, slots=True)
class RequestScope:
    """The methods and paths a secret is limited to; None is no limit. A path ending in `*` is a prefix."""

    methods: frozenset[str] | None = None
    paths: tuple[str, ...] | None = None

    @property
    def limited(self) -> bool:
        """Whether a request must be known before the secret may be used."""
        return self.methods is not None or self.paths is not None

    def check(self, method: str | None, path: str | None) -> Refusal | None:
        """Say why a request is outside, None if it is inside. A limit whose fact is missing refuses."""
        if self.methods is not None and (method is None or method not in self.methods):
            return Refusal(Code.NOT_BOUND, "the secret is not bound to this method")
        if self.paths is not None:
            if path is None or ambiguity(path, LENIENT) is not None:
                return Refusal(Code.NOT_BOUND, "the path is missing or could be read in two ways")
            patterns = [PathPattern(pattern) for pattern in self.paths]
            if not all(any(pattern.matches(reading) for pattern in patterns) for reading in readings(path)):
                return Refusal(Code.NOT_BOUND, "the secret is not bound to this path")
        return None

    @property
    def form(self) -> Scope:
        """The form in a message."""
        return Scope(None if self.methods is None else tuple(sorted(self.methods)), self.paths)

    @classmethod
    def of(cls, form: Scope) -> "RequestScope":
        """Return what `form` says.

        Raises:
            GrantError: some part of it cannot be.
        """
        return cls(
            None if form.methods is None else frozenset(_each(form.methods, "methods", _method)),
            None if form.paths is None else _each(form.paths, "paths", _path_pattern),
        )

    def to_json(self) -> dict[str, Any]:
        """The file form."""
        return {
            "methods": None if self.methods is None else sorted(self.methods),
            "paths": None if self.paths is None else list(self.paths),
        }


@dataclass(frozen=True, slots=True)
class SecretBinding:
    """Where a stored secret may go, for which sandboxes and how often; `hosts` are exact canonical names, `expires` is
    aware.
    """

    hosts: frozenset[str]
    ports: frozenset[int] = frozenset({443})
    schemes: frozenset[Scheme] = frozenset({Scheme.HTTPS})
    scope: RequestScope = RequestScope()
    expires: datetime | None = None
    selectors: Selectors = ANY_SANDBOX
    limits: UseLimits = UNLIMITED

    def __post_init__(self) -> None:
        if not self.hosts or not self.ports or not self.schemes:
            raise GrantError("a binding needs at least one host, port and scheme")
        if self.expires is not None and self.expires.tzinfo is None:
            raise GrantError("an expiry needs its time zone")

    @classmethod
    def make(
        cls,
        hosts: Iterable[str],
        ports: Iterable[int] = (443,),
        schemes: Iterable[str] = ("https",),
        methods: Iterable[str] | None = None,
        paths: Iterable[str] | None = None,
        expires: str | datetime | None = None,
        selectors: Selectors = ANY_SANDBOX,
        limits: UseLimits = UNLIMITED,
    ) -> "SecretBinding":
        """Build a binding from what a person wrote; every host is made canonical, wildcards are refused.

        Raises:
            GrantError: some part of it cannot be.
        """
        scope = RequestScope(
            None if methods is None else frozenset(_each(list(methods), "methods", _method)),
            None if paths is None else _each(list(paths), "paths", _path_pattern),
        )
        return cls(
            frozenset(_each(list(hosts), "hosts", exact_host)),
            frozenset(_each(list(ports), "ports", _port)),
            frozenset(_each(list(schemes), "schemes", _scheme)),
            scope,
            _moment(expires) if isinstance(expires, str) else expires,
            selectors,
            limits,
        )

    @property
    def form(self) -> BindingForm:
        """The form in a message."""
        expires = None if self.expires is None else self.expires.astimezone(UTC).isoformat()
        hosts, schemes = tuple(sorted(self.hosts)), tuple(sorted(map(str, self.schemes)))
        chosen = conditions.form_of(self.selectors, self.limits)
        return BindingForm(hosts, tuple(sorted(self.ports)), schemes, self.scope.form, expires, chosen)

    @classmethod
    def of(cls, form: BindingForm) -> "SecretBinding":
        """Return what `form` says.

        Raises:
            GrantError: some part of it cannot be.
        """
        try:
            selectors, limits = conditions.of_form(form.conditions)
        except ConditionError as error:
            raise GrantError(str(error)) from None
        scope = form.scope
        return cls.make(
            form.hosts, form.ports, form.schemes, scope.methods, scope.paths, form.expires, selectors, limits
        )

    def to_json(self) -> dict[str, Any]:
        """The file form."""
        return {
            "hosts": sorted(self.hosts),
            "ports": sorted(self.ports),
            "schemes": sorted(self.schemes),
            **self.scope.to_json(),
            "expires": None if self.expires is None else self.expires.astimezone(UTC).isoformat(),
            **conditions.to_json(self.selectors, self.limits),
        }

    @classmethod
    def from_json(cls, document: object) -> "SecretBinding":
        """Read `to_json`'s form; absent ports and schemes are 443 and https, absent conditions are none.

        Raises:
            GrantError: it is something else.
        """
        if not isinstance(document, Mapping):
            raise GrantError("a binding is an object")
        known = {"hosts", "ports", "schemes", "methods", "paths", "expires", *conditions.KEYS}
        if unknown := sorted(str(key) for key in document if key not in known):
            raise GrantError(f"unknown keys in a binding: {len(unknown)}")
        expires = document.get("expires")
        if expires is not None and not isinstance(expires, str):
            raise GrantError("an expiry is an RFC 3339 time")
        lists: dict[str, list[Any] | None] = {}
        for key in ("hosts", "ports", "schemes", "methods", "paths"):
            part = document.get(key)
            if part is not None and not isinstance(part, list):
                raise GrantError(f"{key} is a list")
            lists[key] = part
        try:
            selectors, limits = conditions.from_json(document)
        except ConditionError as error:
            raise GrantError(str(error)) from None
        ports, schemes = lists["ports"], lists["schemes"]
        return cls.make(
            lists["hosts"] or (),
            (443,) if ports is None else ports,
            ("https",) if schemes is None else schemes,
            lists["methods"],
            lists["paths"],
            expires,
            selectors,
            limits,
        )


@dataclass(frozen=True, slots=True)
class Grant:
    """One secret for one destination, as a sandbox was given it; `host` is canonical, or `*.suffix` (see above)."""

    secret: str
    host: str
    port: int
    scheme: Scheme

    @property
    def wildcard(self) -> bool:
        """Whether `host` is a pattern."""
        return self.host.startswith("*.")

    @classmethod
    def make(cls, secret: object, host: object, port: object, scheme: object) -> "Grant":
        """Build a grant from untyped parts.

        Raises:
            GrantError: some part of it cannot be.
        """
        return cls(inline_name(secret), host_pattern(host), _port(port), _scheme(scheme))

    def covers(self, wanted: "Grant") -> bool:
        """Whether a release for `wanted`, which names an exact host, is within this grant."""
        if (self.secret, self.port, self.scheme) != (wanted.secret, wanted.port, wanted.scheme) or wanted.wildcard:
            return False
        return parse_pattern(self.host).matches(wanted.host) if self.wildcard else self.host == wanted.host

    def includes(self, other: "Grant") -> bool:
        """Whether every release that `other` covers is within this grant."""
        if self == other or not other.wildcard:
            return self == other or self.covers(other)
        return self.wildcard and self.covers(Grant(other.secret, other.host[2:], other.port, other.scheme))

    @property
    def form(self) -> GrantForm:
        """The form in a message."""
        return GrantForm(self.secret, self.host, self.port, str(self.scheme))

    @classmethod
    def of(cls, form: GrantForm) -> "Grant":
        """Return what `form` says.

        Raises:
            GrantError: some part of it cannot be.
        """
        return cls.make(form.secret, form.host, form.port, form.scheme)

    def to_json(self) -> dict[str, Any]:
        """The file form."""
        return {"secret": self.secret, "host": self.host, "port": self.port, "scheme": self.scheme}

    @classmethod
    def from_json(cls, document: object) -> "Grant":
        """Read `to_json`'s form.

        Raises:
            GrantError: it is something else.
        """
        if not isinstance(document, Mapping) or set(document) != {"secret", "host", "port", "scheme"}:
            raise GrantError("a grant has secret, host, port and scheme")
        return cls.make(document["secret"], document["host"], document["port"], document["scheme"])


def check(binding: SecretBinding, grant: Grant, now: datetime) -> Refusal | None:
    """Say why `grant` is outside of what the secret's owner allows, None if it is within."""
    if binding.expires is not None and now >= binding.expires:
        return Refusal(Code.EXPIRED, "the secret has expired")
    if grant.wildcard or grant.host not in binding.hosts:
        return Refusal(Code.NOT_BOUND, "the secret is not bound to this host")
    if grant.port not in binding.ports:
        return Refusal(Code.NOT_BOUND, "the secret is not bound to this port")
    if grant.scheme not in binding.schemes:
        return Refusal(Code.NOT_BOUND, "the secret is not bound to this scheme")
    return None


def missing(wanted: Grant, others: Iterable[Grant] = ()) -> str:
    """Say which secret is not in the vault, and how it gets there.

    Args:
        others: more grants of the sandbox or policy. The command binds the secret to the hosts of all.
    """
    place = (wanted.secret, wanted.port, wanted.scheme)
    more = sorted(one.host for one in others if (one.secret, one.port, one.scheme) == place and not one.wildcard)
    add = f"sallyport vault put {wanted.secret}"
    add += "".join(f" --host {host}" for host in dict.fromkeys((wanted.host, *more)))
    add += "" if wanted.port == 443 else f" --port {wanted.port}"
    add += "" if wanted.scheme is Scheme.HTTPS else f" --scheme {wanted.scheme}"
    return f"the vault has no secret {wanted.secret}; the operator adds it: {add}"


def within(grants: Iterable[Grant], bounds: Iterable[Grant]) -> frozenset[Grant]:
    """Return those of `grants` that one of `bounds` includes."""
    exact = frozenset(bounds)
    patterns = [bound for bound in exact if bound.wildcard]
    return frozenset(grant for grant in grants if grant in exact or any(bound.includes(grant) for bound in patterns))


def exact_host(text: object) -> str:
    """Return `text` as a canonical exact host name.

    Raises:
        GrantError: it is a wildcard or no host name.
    """
    if not isinstance(text, str):
        raise GrantError("a host is a text")
    if "*" in text:
        raise GrantError("a secret is bound to exact host names, not to a wildcard")
    try:
        return canonical_host(text)
    except InvalidName:
        raise GrantError("a host that is no name") from None


def host_pattern(text: object) -> str:
    """Return `text` as a canonical host name, or `*.` and the canonical suffix.

    Raises:
        GrantError: it is neither.
    """
    if not isinstance(text, str) or not text.startswith("*."):
        return exact_host(text)
    try:
        return parse_pattern(text).text
    except InvalidName:
        raise GrantError("a host pattern that cannot be") from None


def _each[T](items: object, what: str, parse: Callable[[object], T]) -> tuple[T, ...]:
    if not isinstance(items, list | tuple) or not 0 < len(items) <= MAX_LIST:
        raise GrantError(f"{what} is a list of 1 to {MAX_LIST}")
    return tuple(parse(item) for item in items)


def _method(item: object) -> str:
    if not isinstance(item, str) or not _METHOD.fullmatch(item):
        raise GrantError("a method that is no token")
    return item


def _path_pattern(item: object) -> str:
    try:
        return strict_pattern(item if isinstance(item, str) else "").text
    except ValueError:
        raise GrantError("a path pattern begins with /, is unambiguous, and has * at its end only") from None


def _port(item: object) -> int:
    if not isinstance(item, int) or isinstance(item, bool) or not 1 <= item <= 65535:
        raise GrantError("a port is 1 to 65535")
    return item


def _scheme(item: object) -> Scheme:
    try:
        return Scheme(item if isinstance(item, str) else "")
    except ValueError:
        raise GrantError("a scheme is http, https or postgres") from None


def _moment(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise GrantError("an expiry is an RFC 3339 time") from None
