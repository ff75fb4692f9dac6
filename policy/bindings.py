"""Credential bindings of the API: parsing, defaults and conflicts.

- A binding names credentials; this module handles no secret values. In plans a credential is the secret
  `inline:<name>`.
- Unknown keys are refused at any depth.
- An absent list of `match` means its default. A null or an empty list is refused, so that neither means "all".
- Two bindings that can match one request are refused, except an exact host beside a wildcard host.

`compile_api` decides whether a host is allowed, and which operator switch it needs.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from policy.api import ApiPolicyError
from policy.facts import Scheme
from policy.injection import InjectionKind, InjectionPlan, SubstitutionPlan, Surface, header_name
from policy.names import HostPattern, InvalidName, canonical_host
from policy.paths import PathPattern, strict_pattern
from policy.rules import MAX_NAMES, Binding, is_token
from policy.strict import Path, StrictError, members

MAX_BINDINGS = 256
MAX_PLACES = 8192
"""The limit of hosts, methods and paths in all bindings together. It bounds the cost of the comparison."""
MAX_SUBSTITUTIONS = 32
"""The limit of substitutions of one binding."""
DEFAULT_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_SURFACES = {one.value: one for one in Surface if one is not Surface.BASIC}
"""The surfaces of the contract."""
_DEFAULTS = {"schemes": ("https",), "methods": DEFAULT_METHODS, "paths": ("/*",)}
INLINE = "inline:"


@dataclass(frozen=True, slots=True)
class ApiSubstitution:
    """One validated substitution: a credential in place of a placeholder, on these surfaces."""

    credential: str
    placeholder: str
    surfaces: tuple[Surface, ...]


@dataclass(frozen=True, slots=True)
class ApiBinding:
    """One validated binding with its defaults filled in. `headers` pairs a header name with a credential."""

    name: str
    hosts: tuple[str, ...]
    schemes: tuple[str, ...]
    methods: tuple[str, ...]
    paths: tuple[str, ...]
    auth_type: str
    headers: tuple[tuple[str, str], ...] = ()
    substitutions: tuple[ApiSubstitution, ...] = ()

    @property
    def credentials(self) -> tuple[str, ...]:
        """The names of the credentials that the binding uses, each once."""
        injected = (credential for _, credential in self.headers)
        return tuple(dict.fromkeys((*injected, *(item.credential for item in self.substitutions))))

    def renamed(self, name: Callable[[str], str]) -> "ApiBinding":
        """Return the binding with `name` of each credential."""
        return replace(
            self,
            headers=tuple((header, name(credential)) for header, credential in self.headers),
            substitutions=tuple(replace(item, credential=name(item.credential)) for item in self.substitutions),
        )

    def to_wire(self) -> dict[str, Any]:
        """Return `match` and `auth` in the JSON form of BindingMetadata."""
        auth = {"type": self.auth_type}
        if self.auth_type == "apiKey":
            auth["name"] = self.headers[0][0]
        match = {
            "hosts": list(self.hosts),
            "schemes": list(self.schemes),
            "methods": list(self.methods),
            "paths": list(self.paths),
        }
        return {"name": self.name, "match": match, "auth": auth}

    def to_json(self) -> dict[str, Any]:
        """Return the form that `parse_binding` reads: that of `to_wire`, and the credentials."""
        match self.auth_type:
            case "bearer" | "basic":
                auth: dict[str, Any] = {"credential": self.headers[0][1]}
            case "apiKey":
                auth = {"name": self.headers[0][0], "credential": self.headers[0][1]}
            case "customHeaders":
                auth = {"headers": [{"name": name, "credential": credential} for name, credential in self.headers]}
            case _:
                auth = {}
        if self.substitutions:
            auth["substitutions"] = [
                {
                    "credential": item.credential,
                    "placeholder": item.placeholder,
                    "in": [str(one) for one in item.surfaces],
                }
                for item in self.substitutions
            ]
        return self.to_wire() | {"auth": {"type": self.auth_type, **auth}}

    def compiled(self) -> Binding:
        """Return the compiled form, which decisions use."""
        kind = {"bearer": InjectionKind.BEARER, "basic": InjectionKind.BASIC_RAW}.get(
            self.auth_type, InjectionKind.API_KEY
        )
        binding = f"binding:{self.name}"
        return Binding(
            self.name,
            tuple(HostPattern(host) for host in self.hosts),
            tuple(Scheme(scheme) for scheme in self.schemes),
            self.methods,
            tuple(PathPattern(path) for path in self.paths),
            tuple(InjectionPlan(binding, f"{INLINE}{credential}", kind, header) for header, credential in self.headers),
            tuple(
                SubstitutionPlan(binding, f"{INLINE}{item.credential}", item.placeholder, item.surfaces)
                for item in self.substitutions
            ),
        )


def parse_bindings(values: object) -> tuple[ApiBinding, ...]:
    """Read a list of Binding objects and refuse conflicting ones.

    Raises:
        ApiPolicyError: with the contract's text.
    """
    if not isinstance(values, list):
        raise ApiPolicyError("bindings must be an array")
    if len(values) > MAX_BINDINGS:
        raise ApiPolicyError(f"more than {MAX_BINDINGS} bindings")
    bindings = tuple(parse_binding(value, ("bindings", position)) for position, value in enumerate(values))
    names: set[str] = set()
    for binding in bindings:
        if binding.name in names:
            raise ApiPolicyError(f'duplicate binding name "{binding.name}"')
        names.add(binding.name)
    check_conflicts(bindings)
    return bindings


def parse_binding(value: object, path: Path = ()) -> ApiBinding:
    """Read one Binding object; `path` says where it is, for errors.

    Raises:
        ApiPolicyError: with the contract's text.
    """
    fields = _members(value, ("name", "match", "auth"), path)
    name = binding_name(fields.get("name"), "binding")
    try:
        match = _members(fields.get("match"), ("hosts", *_DEFAULTS, "ports"), (*path, "match"))
        auth_type, headers, substitutions = _auth(fields.get("auth"), (*path, "auth"))
        hosts = tuple(dict.fromkeys(_host(host) for host in _strings(match.get("hosts", []), "hosts")))
        _check_ports(match.get("ports", [443]))
        lists = {key: _strings(match[key], key) if key in match else default for key, default in _DEFAULTS.items()}
        return ApiBinding(
            name,
            hosts,
            tuple(dict.fromkeys(_scheme(item) for item in lists["schemes"])),
            tuple(dict.fromkeys(_method(item) for item in lists["methods"])),
            tuple(dict.fromkeys(_path(item) for item in lists["paths"])),
            auth_type,
            headers,
            substitutions,
        )
    except ApiPolicyError as error:
        raise ApiPolicyError(f'binding "{name}": {error}') from None


def binding_name(value: object, what: str) -> str:
    """Return a trimmed credential or binding name (`what` says which).

    Raises:
        ApiPolicyError: blank, too long, or with control characters.
    """
    name = value.strip() if isinstance(value, str) else ""
    if not name:
        raise ApiPolicyError(f"{what} name cannot be blank")
    if len(name.encode("utf-8", "replace")) > 256 or not name.isprintable():
        raise ApiPolicyError(f"{what} name is too long or has a control character")
    return name


def number_of_places(bindings: tuple[ApiBinding, ...]) -> int:
    """Return the number of hosts, methods and paths of all bindings together."""
    return sum(len(item.hosts) + len(item.methods) + len(item.paths) for item in bindings)


def check_conflicts(bindings: tuple[ApiBinding, ...]) -> None:
    """Refuse two bindings that can match one request. An exact host beside a wildcard host is no conflict: the exact
    host wins.

    Raises:
        ApiPolicyError: naming the two in sorted order.
    """
    for first, second in conflicts(bindings):
        raise ApiPolicyError(f'bindings "{first}" and "{second}" can match the same request')


def conflicts(bindings: tuple[ApiBinding, ...]) -> Iterator[tuple[str, str]]:
    """Find each pair of bindings that can match one request. The names of a pair are sorted."""
    reaches = sorted((_Reach.of(binding) for binding in bindings), key=lambda reach: reach.name)
    for position, first in enumerate(reaches):
        for second in reaches[position + 1 :]:
            if first.meets(second):
                yield first.name, second.name


@dataclass(frozen=True, slots=True)
class _Reach:
    """The matches of a binding, indexed so that a comparison does not test each pair of names."""

    name: str
    methods: frozenset[str]
    schemes: frozenset[str]
    hosts: frozenset[str]
    suffixes: frozenset[str]
    """The suffixes of wildcards."""
    above: frozenset[str]
    """The suffixes of wildcards, and all parent domains of them."""
    paths: frozenset[str]
    stems: tuple[str, ...]
    """The path prefixes, sorted. None begins with another."""

    @classmethod
    def of(cls, binding: ApiBinding) -> "_Reach":
        suffixes = frozenset(host[2:] for host in binding.hosts if host.startswith("*."))
        labels = [suffix.split(".") for suffix in suffixes]
        stems: list[str] = []
        for stem in sorted(path[:-1] for path in binding.paths if path.endswith("*")):
            if not (stems and stem.startswith(stems[-1])):
                stems.append(stem)
        return cls(
            binding.name,
            frozenset(binding.methods),
            frozenset(binding.schemes),
            frozenset(host for host in binding.hosts if not host.startswith("*.")),
            suffixes,
            frozenset(".".join(parts[first:]) for parts in labels for first in range(len(parts))),
            frozenset(path for path in binding.paths if not path.endswith("*")),
            tuple(stems),
        )

    def meets(self, other: "_Reach") -> bool:
        """Whether one request can match both."""
        return (
            not self.methods.isdisjoint(other.methods)
            and not self.schemes.isdisjoint(other.schemes)
            and not (
                self.hosts.isdisjoint(other.hosts)
                and self.suffixes.isdisjoint(other.above)
                and other.suffixes.isdisjoint(self.above)
            )
            and (not self.paths.isdisjoint(other.paths) or self._covers(other) or other._covers(self))
        )

    def _covers(self, other: "_Reach") -> bool:
        """Whether a path or prefix of the other begins with a prefix of this one."""
        return bool(self.stems) and any(
            (place := bisect_right(self.stems, text)) > 0 and text.startswith(self.stems[place - 1])
            for texts in (other.paths, other.stems)
            for text in texts
        )


def _members(value: object, known: tuple[str, ...], path: Path) -> dict[str, object]:
    try:
        return members(value, known, path)
    except StrictError as error:
        raise ApiPolicyError(str(error)) from None


def _strings(value: object, key: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value) or len(value) > MAX_NAMES:
        raise ApiPolicyError(f"match.{key} must be an array of strings")
    if not value:
        raise ApiPolicyError(f"match.{key} cannot be empty")
    return value


def _host(text: str) -> str:
    host = text.strip().lower()
    shown = host[:300].encode("ascii", "backslashreplace").decode("ascii")
    if not host:
        raise ApiPolicyError("host cannot be blank")
    if "/" in host or "@" in host or "?" in host:
        raise ApiPolicyError(f'host "{shown}" must not include scheme or path')
    wildcard = host.startswith("*.")
    try:
        name = canonical_host(host.removeprefix("*."))
    except InvalidName as error:
        if wildcard or "*" in host:
            raise ApiPolicyError(f'invalid wildcard host "{shown}"') from None
        tail = ", not an IP address" if "address" in str(error) or ":" in host else ""
        raise ApiPolicyError(f'credential binding host "{shown}" must be an FQDN{tail}') from None
    if "." not in name or "_" in name:
        raise ApiPolicyError(
            f'invalid wildcard host "{shown}"' if wildcard else f'credential binding host "{shown}" must be an FQDN'
        )
    return f"*.{name}" if wildcard else name


def _scheme(text: str) -> str:
    scheme = text.strip().lower()
    if scheme not in ("https", "http"):
        raise ApiPolicyError(f"unsupported scheme {json.dumps(scheme[:100])}")
    return scheme


def _check_ports(value: object) -> None:
    if not isinstance(value, list) or len(value) > MAX_NAMES:
        raise ApiPolicyError("match.ports must be an array of integers")
    if not value:
        raise ApiPolicyError("match.ports cannot be empty")
    for port in value:
        if type(port) is not int:
            raise ApiPolicyError("match.ports must be an array of integers")
        if port not in (80, 443):
            raise ApiPolicyError(f"unsupported port {port}: only ports 80 and 443 are supported (derived from scheme)")


def _method(text: str) -> str:
    method = text.strip().upper()
    if not method:
        raise ApiPolicyError("method cannot be blank")
    if not is_token(method):
        raise ApiPolicyError(f"invalid method {json.dumps(method[:100])}")
    return method


def _path(text: str) -> str:
    path = text.strip()
    try:
        return strict_pattern(path).text
    except ValueError as error:
        raise ApiPolicyError(str(error)) from None


def _auth(value: object, path: Path) -> tuple[str, tuple[tuple[str, str], ...], tuple[ApiSubstitution, ...]]:
    auth = _members(value, ("type", "credential", "name", "headers", "substitutions"), path)
    kind = str(auth.get("type", ""))
    headers: tuple[tuple[str, str], ...] = ()
    match kind:
        case "bearer" | "basic":
            _refuse(auth, kind, "name", "headers")
            headers = (("Authorization", _credential(auth, f"{kind} auth requires credential")),)
        case "apiKey":
            _refuse(auth, kind, "headers")
            headers = ((_header(auth.get("name")), _credential(auth, "apiKey auth requires credential")),)
        case "customHeaders":
            _refuse(auth, kind, "credential", "name")
            headers = _custom_headers(auth.get("headers"), (*path, "headers"))
        case "passthrough":
            _refuse(auth, kind, "credential", "name", "headers")
        case _:
            raise ApiPolicyError(f"unsupported auth type {json.dumps(kind[:100])}")
    return kind, headers, _substitutions(auth.get("substitutions", []), (*path, "substitutions"))


def _substitutions(value: object, path: Path) -> tuple[ApiSubstitution, ...]:
    if not isinstance(value, list):
        raise ApiPolicyError("substitutions must be an array")
    if len(value) > MAX_SUBSTITUTIONS:
        raise ApiPolicyError(f"at most {MAX_SUBSTITUTIONS} substitutions")
    found: list[ApiSubstitution] = []
    seen: dict[tuple[str, Surface], int] = {}
    for position, item in enumerate(value):
        substitution = _substitution(item, position, (*path, position))
        for surface in substitution.surfaces:
            earlier = seen.setdefault((substitution.placeholder, surface), position)
            if earlier != position:
                raise ApiPolicyError(
                    f"substitution {position} duplicates placeholder {json.dumps(substitution.placeholder[:100])} "
                    f"on {surface} surface from substitution {earlier}"
                )
        found.append(substitution)
    return tuple(found)


def _substitution(value: object, position: int, path: Path) -> ApiSubstitution:
    fields = _members(value, ("credential", "placeholder", "in"), path)
    which = f"substitution {position}"
    credential = _credential(fields, f"{which} requires credential")
    placeholder = fields.get("placeholder")
    if not isinstance(placeholder, str) or not placeholder.strip():
        raise ApiPolicyError(f"{which} requires placeholder")
    written = fields.get("in")
    if not isinstance(written, list) or not written:
        raise ApiPolicyError(f"{which} requires at least one target surface")
    surfaces = tuple(dict.fromkeys(_surface(item, which) for item in written))
    try:
        plan = SubstitutionPlan("", "", placeholder, surfaces)
    except ValueError as error:
        raise ApiPolicyError(f"{which}: {error}") from None
    return ApiSubstitution(credential, plan.placeholder, plan.surfaces)


def _surface(value: object, which: str) -> Surface:
    text = value.strip().lower() if isinstance(value, str) else str(value)
    try:
        return _SURFACES[text]
    except KeyError:
        raise ApiPolicyError(f"{which} has unsupported target surface {json.dumps(text[:100])}") from None


def _custom_headers(value: object, path: Path) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list) or not value or len(value) > 32:
        raise ApiPolicyError("customHeaders auth requires headers")
    headers: dict[str, str] = {}
    for position, item in enumerate(value):
        entry = _members(item, ("name", "credential"), (*path, position))
        name = _header(entry.get("name"))
        if name in headers:
            raise ApiPolicyError(f'duplicate custom header name "{name}"')
        headers[name] = _credential(entry, f'customHeaders entry "{name}" requires credential')
    return tuple(headers.items())


def _refuse(auth: dict[str, object], kind: str, *names: str) -> None:
    for name in names:
        if name in auth:
            raise ApiPolicyError(f"{kind} auth does not accept {name}")


def _credential(fields: dict[str, object], missing: str) -> str:
    credential = fields.get("credential")
    if not isinstance(credential, str) or not credential.strip():
        raise ApiPolicyError(missing)
    return credential.strip()


def _header(value: object) -> str:
    try:
        return header_name(value.strip() if isinstance(value, str) else "")
    except ValueError as error:
        raise ApiPolicyError(str(error)) from None
