"""Reads the operator's YAML, version 1: from a tree of nodes to a `PolicyDocument`, or to problems with lines.

- Unknown keys, empty lists and missing references are refused. All problems are reported, in the order of the file.
  Conflicts between rules are checked only if each rule is valid by itself.
- An allow rule never spans names of different owners (`*.com`). A rule with a secret has exact hosts on https, or a
  pair that the operator has written into `plaintext_secrets`.
- Rules that provide one variable agree about it, and rules that provide one file for one secret about the form of its
  placeholder.
- Two injections that can have one place in one request are refused, if this is certain. The others are denied at the
  request.

`docs/policy-reference.md` describes this language.

The module is long because one reader reads the language in one pass: it checks each key next to the keys on which it
depends, and an error needs the node of its key.
"""

from collections.abc import Callable
from dataclasses import fields
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Never

from policy.client_credentials import CLASSES, DEFAULT, ClientCredentials, Handling, made, slot_name
from policy.compiled import is_network
from policy.document import DENY_ALL_NAME, NO_PRESETS, PolicyDocument, PolicySource, Presets, Remark
from policy.facts import Scheme
from policy.injection import (
    InjectionKind,
    InjectionPlan,
    SecretPlan,
    SubstitutionPlan,
    Surface,
    collide,
    header_name,
)
from policy.logins import LOGIN_KIND, LoginPlan
from policy.names import HostPattern, canonical_host, parse_any_pattern, parse_pattern
from policy.paths import Leniency, PathPattern, ambiguity, literal
from policy.problems import PolicyError, Problems, meant
from policy.provision import (
    HOLE,
    MARK,
    MAX_PROVISIONS,
    Provision,
    ProvisionKind,
    check_form,
    check_path,
    check_text,
    check_variable,
)
from policy.references import secret_text
from policy.rules import (
    ANY_PUBLIC,
    FORBIDDEN_METHODS,
    MAX_NAMES,
    MAX_RULES,
    Action,
    Ceiling,
    DnsSettings,
    Endpoint,
    Limits,
    Mode,
    Rule,
    check_database,
    check_port,
    is_token,
    network_text,
)
from policy.signing import AwsSigning, HmacDigest, HmacSigning, KeyForm, SignatureForm, TimestampForm
from policy.yaml_tree import Node

VERSION = 1
MAX_POLICIES = 256
MAX_SUBSTITUTIONS = 32
"""The limit of substitutions of one rule."""
_PORTS = {Scheme.HTTP: 80, Scheme.HTTPS: 443, Scheme.POSTGRES: 5432}

_NAME_FIRST = frozenset("abcdefghijklmnopqrstuvwxyz0123456789")
_NAME_REST = _NAME_FIRST | frozenset("._-")
_RULE_KEYS = (
    "id",
    "action",
    "host",
    "hosts",
    "address",
    "addresses",
    "ports",
    "schemes",
    "methods",
    "paths",
    "inspect",
    "inject",
    "substitutions",
    "encoded_slashes",
    "empty_segments",
    "client_credentials",
    "databases",
)
_LENIENCY = ("encoded_slashes", "empty_segments")
_OF_ALLOW_RULES = ("inject", "substitutions", "client_credentials", *_LENIENCY)

_NAMED_BY = {
    InjectionKind.API_KEY: "header",
    InjectionKind.HMAC: "header",
    InjectionKind.QUERY: "name",
    InjectionKind.COOKIE: "name",
}
"""The key that names the place of a kind. The others are sent in Authorization."""
_AWS_KEYS = ("region", "service")
_HMAC_KEYS = {
    "sign": "message",
    "algorithm": "algorithm",
    "key": "key",
    "output": "output",
    "value": "value",
    "timestamp": "timestamp",
    "timestamp_header": "timestamp_header",
}
"""Keys of an injection that is a signature; those of `as: hmac` with the fields that they set."""

_PROVIDING = ("env", "file", "template", "form")
"""The keys with which the sandbox gets a placeholder of its own."""

type Mapping = dict[str, tuple[Node, Node]]


def read_document(
    root: Node, origin: str, problems: Problems | None = None, presets: Presets = NO_PRESETS
) -> PolicyDocument:
    """Return the document of a tree.

    Args:
        problems: the problems that were found in the text.
        presets: what policies can extend in addition to each other.

    Raises:
        PolicyError: it has all problems, each with its line.
    """
    noted = Problems() if problems is None else problems
    document = noted.attempt(lambda: _Reader(origin, noted, presets).document(root), PolicyDocument(origin))
    noted.check()
    return document


class _Form(StrEnum):
    """Whether a rule permits a form of a path."""

    REFUSE = "refuse"
    ALLOW = "allow"


class _Reader:
    """Reads one document. Holds the file's name, the remarks, and the parts that rules are checked against."""

    def __init__(self, origin: str, problems: Problems, presets: Presets) -> None:
        self._origin = origin
        self._presets = presets
        self._problems = problems
        self._remarks: list[Remark] = []
        self._plaintext: tuple[str, ...] | None = ()  # None: the list is invalid, so nothing is compared with it
        self._rule_places: dict[str, Node] = {}
        self._credentials = DEFAULT

    def document(self, root: Node) -> PolicyDocument:
        top = self._mapping(
            root,
            "version",
            "ceiling",
            "default",
            "always_deny",
            "always_allow",
            "plaintext_secrets",
            "wildcard_bindings",
            "client_credentials",
            "guard_bindings",
            "policies",
        )
        attempt = self._problems.attempt
        attempt(lambda: self._version(root, top), None)
        nothing: tuple[str, ...] = ()
        no_policies: dict[str, PolicySource] = {}
        plaintext = attempt(lambda: self._list(top, "plaintext_secrets", self._exact_host, empty=True), None)
        self._plaintext = plaintext
        always_deny = attempt(lambda: self._list(top, "always_deny", self._deny_target, empty=True), nothing)
        always_allow = attempt(lambda: self._list(top, "always_allow", self._allow_target, empty=True), nothing)
        ceiling = attempt(lambda: self._ceiling(top["ceiling"][1]) if "ceiling" in top else Ceiling(), Ceiling())
        if "client_credentials" in top:
            written = top["client_credentials"][1]
            self._credentials = attempt(lambda: self._client_credentials(written), DEFAULT)
        policies = attempt(lambda: self._policies(top["policies"][1]) if "policies" in top else {}, no_policies)
        default = attempt(lambda: self._default(top), DENY_ALL_NAME)
        wildcards = attempt(lambda: self._flag(top, "wildcard_bindings"), False)
        guarded = attempt(lambda: self._flag(top, "guard_bindings"), False)
        return PolicyDocument(
            self._origin,
            ceiling,
            default,
            always_deny,
            always_allow,
            plaintext or (),
            wildcards,
            self._credentials,
            guarded,
            MappingProxyType(policies),
            tuple(self._remarks),
            self._presets,
        )

    # ---- parts of the document

    def _version(self, root: Node, top: Mapping) -> None:
        if "version" not in top:
            self._fail(root, f"`version: {VERSION}` is missing")
        node = top["version"][1]
        if type(node.value) is not int or node.value != VERSION:
            self._fail(node, f"version must be {VERSION}")

    def _default(self, top: Mapping) -> str:
        if "default" not in top:
            return DENY_ALL_NAME
        node = top["default"][1]
        name = self._text(node)
        written = top["policies"][1].value if "policies" in top else None
        known = (*(written if isinstance(written, dict) else ()), DENY_ALL_NAME)
        if name not in known:
            self._fail(node, f"there is no policy named {name[:100]!a}{meant(name, known)}")
        return name

    def _ceiling(self, node: Node) -> Ceiling:
        entries = self._mapping(node, "hosts", "ports")
        hosts: tuple[str, ...] = (ANY_PUBLIC,)
        if "hosts" in entries:
            written = entries["hosts"][1]
            hosts = (
                (self._ceiling_host(written),)
                if isinstance(written.value, str)
                else self._list(entries, "hosts", self._ceiling_host)
            )
        ports = self._list(entries, "ports", self._port) if "ports" in entries else (80, 443)
        return Ceiling(hosts, ports)

    def _policies(self, node: Node) -> dict[str, PolicySource]:
        if not isinstance(node.value, dict):
            self._fail(node, "expected a mapping of names to policies")
        entries = node.value
        if len(entries) > MAX_POLICIES:
            self._fail(node, f"more than {MAX_POLICIES} policies")
        policies: dict[str, PolicySource] = {}
        total = 0
        for name, (key, value) in entries.items():
            policies[name] = self._attempted_policy(name, key, value, entries)
            total += len(policies[name].rules)
            if total > MAX_RULES:
                self._fail(key, f"more than {MAX_RULES} rules in one file")
        if len(self._problems):
            return policies
        self._check_cycles(entries, policies)
        document = PolicyDocument(policies=MappingProxyType(policies), presets=self._presets)
        for name in policies:
            rules = [rule for source in document.lineage(name) for rule in source.rules]
            self._check_injections(entries[name][0], rules)
            self._check_provisions(rules)
        return policies

    def _attempted_policy(self, name: str, key: Node, node: Node, entries: Mapping) -> PolicySource:
        self._problems.attempt(lambda: self._check_policy_name(key, name), None)
        return self._problems.attempt(lambda: self._policy(name, node, entries), PolicySource(name))

    def _policy(self, name: str, node: Node, entries: Mapping) -> PolicySource:
        keys = self._mapping(node, "extends", "mode", "dns", "limits", "rules")

        def base(item: Node) -> str:
            text = self._text(item)
            if text not in entries and text not in self._presets:
                regional = next((name for name in self._presets if name.startswith(f"{text}/")), None)
                hint = meant(text, (*entries, *self._presets))
                if regional is not None:
                    hint = f"; there is one for each region: {regional!a}"
                self._fail(item, f"there is no policy named {text[:100]!a} to extend{hint}")
            return text

        rules: list[Rule] = []
        if "rules" in keys:
            written = keys["rules"][1]
            if not isinstance(written.value, tuple):
                self._fail(written, "expected a list of rules")
            if len(written.value) > MAX_RULES:
                self._fail(written, f"more than {MAX_RULES} rules")
            seen: set[str] = set()
            for position, item in enumerate(written.value, start=1):
                rule = self._attempted_rule(name, position, item)
                if rule is None:
                    continue
                if rule.id in seen:
                    self._note(item, f"a second rule with the id {rule.id.partition('/')[2]!a}")
                seen.add(rule.id)
                rules.append(rule)
        attempt = self._problems.attempt
        return PolicySource(
            name,
            attempt(lambda: self._list(keys, "extends", base) if "extends" in keys else (), ()),
            attempt(lambda: self._choice(keys["mode"][1], Mode) if "mode" in keys else Mode.ENFORCE, Mode.ENFORCE),
            tuple(rules),
            attempt(lambda: self._numbers(keys["dns"][1], DnsSettings) if "dns" in keys else None, None),
            attempt(lambda: self._numbers(keys["limits"][1], Limits) if "limits" in keys else None, None),
        )

    # ---- rules

    def _attempted_rule(self, policy: str, position: int, node: Node) -> Rule | None:
        try:
            return self._rule(policy, position, node)
        except PolicyError as error:
            self._problems.note(error)
            self._survey(node)
            return None

    def _survey(self, node: Node) -> None:
        """Note the other problems of an invalid rule: each key is read by itself."""
        if not isinstance(node.value, dict):
            return
        keys = {name: entry for name, entry in node.value.items() if name in _RULE_KEYS}
        denies = "action" in keys and keys["action"][1].value == Action.DENY.value
        pattern = self._deny_pattern if denies else self._allow_pattern
        readers: dict[str, Callable[[], object]] = {
            "action": lambda: self._choice(keys["action"][1], Action),
            "ports": lambda: self._list(keys, "ports", self._port),
            "schemes": lambda: self._list(keys, "schemes", lambda item: self._choice(item, Scheme)),
            "methods": lambda: self._list(keys, "methods", self._method),
            "paths": lambda: self._list(keys, "paths", self._path),
            "inspect": lambda: self._flag(keys, "inspect"),
            "inject": lambda: (self._secrets("", keys["inject"][1]), self._provided(keys, "inject")),
            "substitutions": lambda: self._substitutions("", keys["substitutions"][1]),
            "client_credentials": lambda: self._client_credentials(keys["client_credentials"][1]),
            "encoded_slashes": lambda: self._permits(keys, "encoded_slashes"),
            "empty_segments": lambda: self._permits(keys, "empty_segments"),
            "databases": lambda: self._list(keys, "databases", self._database),
            "host": lambda: pattern(keys["host"][1]),
            "hosts": lambda: self._list(keys, "hosts", pattern),
            "address": lambda: self._network(keys["address"][1]),
            "addresses": lambda: self._list(keys, "addresses", self._network),
        }
        remarks = len(self._remarks)
        for name, read in readers.items():
            if name in keys:
                self._problems.attempt(read, None)
        del self._remarks[remarks:]

    def _rule(self, policy: str, position: int, node: Node) -> Rule:
        keys = self._mapping(node, *_RULE_KEYS)
        action = self._choice(keys["action"][1], Action) if "action" in keys else Action.ALLOW
        name = f"rule-{position}"
        if "id" in keys:
            name = self._text(keys["id"][1])
            self._check_name(keys["id"][1], name)
        targets = [key for key in ("host", "hosts", "address", "addresses") if key in keys]
        if len(targets) != 1:
            self._fail(node, "a rule needs exactly one of host, hosts, address, addresses")
        pattern = self._allow_pattern if action is Action.ALLOW else self._deny_pattern
        hosts = self._one_or_many(keys, "host", "hosts", pattern)
        addresses = self._one_or_many(keys, "address", "addresses", self._network)
        if addresses:
            for key in ("schemes", "methods", "paths", "inspect", *_OF_ALLOW_RULES, "databases"):
                if key in keys:
                    self._fail(keys[key][0], f"{key} does not apply to addresses: their flows are not opened")
        if action is Action.DENY:
            for key in ("inject", "substitutions"):
                if key in keys:
                    self._fail(keys[key][0], "a deny rule injects nothing")
            for key in ("client_credentials", *_LENIENCY):
                if key in keys:
                    self._fail(keys[key][0], f"{key} belongs to allow rules")
        identity = f"{policy}/{name}"
        injections, login = self._secrets(identity, keys["inject"][1]) if "inject" in keys else ((), None)
        substitutions = self._substitutions(identity, keys["substitutions"][1]) if "substitutions" in keys else ()
        if action is Action.ALLOW:
            self._check_sessions(keys, login)
        sends = bool(injections or substitutions or login)
        if sends:
            for host, place in zip(hosts, self._items(keys, "host", "hosts"), strict=True):
                if host.wildcard:
                    self._fail(place, "a secret is bound to exact hosts, not to a wildcard")
        # A denial of a scheme covers every port, not only the standard port of the scheme.
        everywhere = action is Action.DENY and "ports" not in keys
        endpoints = () if everywhere else self._endpoints(keys, action, bool(addresses), sends)
        if sends and any(endpoint.scheme is Scheme.HTTP for endpoint in endpoints):
            if any(plan.handshake for plan in injections):
                self._fail(keys["inject"][0], "a client certificate needs https, and this rule allows http")
            self._check_plaintext(keys, hosts, endpoints)
        rule = self._made(
            node,
            lambda: Rule(
                identity,
                action,
                hosts,
                addresses,
                endpoints,
                self._list(keys, "methods", self._method) if "methods" in keys else (),
                self._list(keys, "paths", self._path) if "paths" in keys else (),
                self._flag(keys, "inspect"),
                injections,
                self._schemes(keys) if everywhere else (),
                substitutions,
                Leniency(*(self._permits(keys, key) for key in _LENIENCY)),
                self._client_credentials(keys["client_credentials"][1]) if "client_credentials" in keys else None,
                (*self._provided(keys, "inject"), *self._provided(keys, "substitutions")),
                login,
                self._list(keys, "databases", self._database),
            ),
        )
        self._rule_places[rule.id] = node
        return rule

    def _endpoints(self, keys: Mapping, action: Action, to_address: bool, injecting: bool) -> tuple[Endpoint, ...]:
        schemes = self._schemes(keys) or None
        if "ports" in keys:
            ports = self._list(keys, "ports", self._port)
        elif schemes is not None:
            ports = tuple(_PORTS[scheme] for scheme in schemes)
        else:
            ports = (443,) if injecting or to_address else (80, 443)
        endpoints: dict[Endpoint, None] = {}
        for port, node in zip(ports, self._port_places(keys, len(ports)), strict=True):
            if to_address and action is Action.ALLOW and port == 80:
                self._fail(node, "a bare address is reached by TLS only, never on port 80")
            spoken = self._schemes_on(port, schemes, action)
            if not spoken:
                self._fail(node, f"none of the rule's schemes is spoken on port {port}")
            endpoints.update(dict.fromkeys(Endpoint(port, scheme) for scheme in spoken))
        return tuple(endpoints)

    def _schemes(self, keys: Mapping) -> tuple[Scheme, ...]:
        return self._list(keys, "schemes", lambda node: self._choice(node, Scheme))

    def _schemes_on(self, port: int, schemes: tuple[Scheme, ...] | None, action: Action) -> tuple[Scheme, ...]:
        fixed = {80: Scheme.HTTP, 443: Scheme.HTTPS}.get(port)
        if fixed is not None:
            return (fixed,) if schemes is None or fixed in schemes else ()
        if schemes is not None:
            return schemes
        return (Scheme.HTTPS,) if action is Action.ALLOW else tuple(Scheme)

    def _check_sessions(self, keys: Mapping, login: LoginPlan | None) -> None:
        """Check an allow rule: database sessions have a rule of their own, with a login."""
        schemes = self._schemes(keys)
        if Scheme.POSTGRES not in schemes:
            if login is not None:
                self._fail(keys["inject"][0], f"as: {LOGIN_KIND} needs `schemes: [{Scheme.POSTGRES}]`")
            if "databases" in keys:
                self._fail(keys["databases"][0], f"databases needs `schemes: [{Scheme.POSTGRES}]`")
            return
        place = keys["schemes"][0]
        if len(schemes) > 1:
            self._fail(place, f"{Scheme.POSTGRES} needs a rule of its own")
        for key in ("methods", "paths", "inspect", *_OF_ALLOW_RULES[1:]):
            if key in keys:
                self._fail(keys[key][0], f"{key} does not apply to {Scheme.POSTGRES}")
        if login is None:
            self._fail(place, f"{Scheme.POSTGRES} needs inject with `as: {LOGIN_KIND}`: the gateway logs in itself")

    def _check_plaintext(self, keys: Mapping, hosts: tuple[HostPattern, ...], endpoints: tuple[Endpoint, ...]) -> None:
        place = keys["inject" if "inject" in keys else "substitutions"][0]
        if any(endpoint.scheme is Scheme.HTTP and endpoint.port != 80 for endpoint in endpoints):
            self._fail(place, "a secret is never sent over plain HTTP on a port other than 80")
        for host in hosts:
            if self._plaintext is not None and host.text not in self._plaintext:
                self._fail(place, f"a secret over plain HTTP needs {host.text} in plaintext_secrets")

    def _secrets(self, binding: str, node: Node) -> tuple[tuple[InjectionPlan, ...], LoginPlan | None]:
        """Read `inject`: injections into requests, or one login."""
        if _is_login(node):
            return (), self._login(binding, node)
        for item in node.value if isinstance(node.value, tuple) else ():
            if _is_login(item):
                self._fail(item, f"as: {LOGIN_KIND} is the only injection of its rule, and no list")
        return self._injections(binding, node), None

    def _login(self, binding: str, node: Node) -> LoginPlan:
        keys = self._mapping(node, "secret", "as", "username")
        if "secret" not in keys:
            self._fail(node, "inject needs `secret`")
        secret = self._secret(keys["secret"][1])
        username = self._text(keys["username"][1]) if "username" in keys else None
        place = keys["username"][1] if "username" in keys else node
        return self._made(place, lambda: LoginPlan(binding, secret, username))

    def _injections(self, binding: str, node: Node) -> tuple[InjectionPlan, ...]:
        items = node.value if isinstance(node.value, tuple) else (node,)
        if not items:
            self._fail(node, "inject is empty")
        plans: list[InjectionPlan] = []
        for item in items:
            plan = self._injection(binding, item)
            if any(not plan.claims.isdisjoint(other.claims) for other in plans):
                self._fail(item, f"a second injection into {plan.place}")
            plans.append(plan)
        return tuple(plans)

    def _injection(self, binding: str, node: Node) -> InjectionPlan:
        signing = (*_AWS_KEYS, *_HMAC_KEYS)
        keys = self._mapping(node, "secret", "as", "header", "name", "username", *signing, *_PROVIDING)
        for key in ("secret", "as"):
            if key not in keys:
                self._fail(node, f"inject needs `{key}`")
        secret = self._secret(keys["secret"][1])
        kind = self._choice(keys["as"][1], InjectionKind)
        for key in keys:
            signs = InjectionKind.AWS_SIGV4 if key in _AWS_KEYS else InjectionKind.HMAC if key in _HMAC_KEYS else kind
            if signs is not kind:
                self._fail(keys[key][0], f"{key} belongs to `as: {signs}`")
        named = _NAMED_BY.get(kind)
        for key in ("header", "name"):
            if key == named and key not in keys:
                self._fail(node, f"as: {kind} needs `{key}`")
            if key != named and key in keys:
                where = "in Authorization" if named is None else f"in the place that `{named}` names"
                where = "in the TLS handshake" if kind is InjectionKind.CLIENT_CERTIFICATE else where
                self._fail(keys[key][0], f"as: {kind} is sent {where} and takes no {key}")
        name = "" if kind is InjectionKind.CLIENT_CERTIFICATE else "Authorization"
        place = keys["username"][1] if "username" in keys else node
        if named is not None:
            written = keys[named][1]
            name = self._text(written)
            if kind in (InjectionKind.API_KEY, InjectionKind.HMAC):
                name = self._made(written, lambda: header_name(self._text(written)))
            elif "username" not in keys:
                place = written
        username = self._text(keys["username"][1]) if "username" in keys else None
        aws = self._aws_signing(keys, node) if kind is InjectionKind.AWS_SIGV4 else None
        hmac = self._hmac_signing(keys, node, name) if kind is InjectionKind.HMAC else None
        return self._made(place, lambda: InjectionPlan(binding, secret, kind, name, username, aws=aws, hmac=hmac))

    def _aws_signing(self, keys: Mapping, node: Node) -> AwsSigning:
        region, service = (self._text(keys[key][1]) if key in keys else None for key in _AWS_KEYS)
        return self._made(node, lambda: AwsSigning(region, service))

    def _hmac_signing(self, keys: Mapping, node: Node, header: str) -> HmacSigning:
        if "sign" not in keys:
            self._fail(node, "as: hmac needs `sign`, the text to sign")
        texts = {field: self._text(keys[key][1]) for key, field in _HMAC_KEYS.items() if key in keys}
        if "timestamp_header" in texts:
            texts["timestamp_header"] = self._made(
                keys["timestamp_header"][1], lambda: header_name(texts["timestamp_header"])
            )
        choices = {
            key: self._choice(keys[key][1], kind)
            for key, kind in (
                ("algorithm", HmacDigest),
                ("key", KeyForm),
                ("output", SignatureForm),
                ("timestamp", TimestampForm),
            )
            if key in keys
        }
        return self._made(node, lambda: HmacSigning(header, **{**texts, **choices}))  # type: ignore[arg-type]

    def _substitutions(self, binding: str, node: Node) -> tuple[SubstitutionPlan, ...]:
        items = node.value if isinstance(node.value, tuple) else (node,)
        if not items:
            self._fail(node, "substitutions is empty")
        if len(items) > MAX_SUBSTITUTIONS:
            self._fail(node, f"a rule has more than {MAX_SUBSTITUTIONS} substitutions")
        plans: list[SubstitutionPlan] = []
        for item in items:
            for plan in self._substitution(binding, item):
                for other in plans:
                    if other.slot == plan.slot and not set(other.surfaces).isdisjoint(plan.surfaces):
                        self._fail(item, f"a second substitution of {plan.place}")
                plans.append(plan)
        return tuple(plans)

    def _substitution(self, binding: str, node: Node) -> tuple[SubstitutionPlan, ...]:
        """Read one substitution: of a text that the policy names, or of each placeholder that the sandbox is given."""
        keys = self._mapping(node, "secret", "placeholder", "in", "username", *_PROVIDING)
        for key in ("secret", "in"):
            if key not in keys:
                self._fail(node, f"a substitution needs `{key}`")
        secret = self._secret(keys["secret"][1])
        surfaces = self._list(keys, "in", lambda item: self._choice(item, Surface))
        username = self._text(keys["username"][1]) if "username" in keys else ""
        if (Surface.BASIC in surfaces) is not bool(username):
            self._fail(node, "a substitution in `basic`, and no other, needs `username`")
        provisions = self._provisions(node)
        if ("placeholder" in keys) is bool(provisions):
            self._fail(node, "a substitution needs `placeholder`, or else `env` or `file`")
        if provisions:
            return tuple(
                self._made(
                    node,
                    lambda one=one: SubstitutionPlan(binding, secret, one.form, surfaces, username, one.identity),  # type: ignore[misc]
                )
                for one in provisions
            )
        placeholder = self._text(keys["placeholder"][1])
        plan = self._made(
            keys["placeholder"][1], lambda: SubstitutionPlan(binding, secret, placeholder, surfaces, username)
        )
        if Surface.PATH in surfaces and (problem := ambiguity(f"/x{placeholder}x")) is not None:
            self._fail(keys["placeholder"][1], f"this placeholder is in no path that is allowed: {problem}")
        return (plan,)

    def _secret(self, node: Node) -> str:
        return self._made(node, lambda: secret_text(self._text(node)))

    def _permits(self, keys: Mapping, form: str) -> bool:
        """Whether a rule permits a form of a path."""
        return form in keys and self._choice(keys[form][1], _Form) is _Form.ALLOW

    def _client_credentials(self, node: Node) -> ClientCredentials:
        """Read handlings of classes and slots. The document's default has the others."""
        if not isinstance(node.value, dict) or not node.value:
            self._fail(node, f"expected a mapping of {', '.join(CLASSES)} or slots to {', '.join(Handling)}")
        classes: dict[str, Handling] = {}
        slots: dict[str, Handling] = {}
        for name, (key, value) in node.value.items():
            if name not in CLASSES and ":" not in name:
                hint = meant(name, CLASSES)
                self._fail(
                    key,
                    f"unknown key {name[:100]!a}{hint or ';'} known here: {', '.join(CLASSES)}, and slots "
                    "such as header:NAME, query:NAME, cookie:NAME",
                )
            handling = self._choice(value, Handling)
            if name in CLASSES:
                classes[name] = handling
            else:
                slot = self._made(key, partial(slot_name, name))
                if slot in slots:
                    self._fail(key, f"a second handling of {slot}")
                slots[slot] = handling
        return self._made(node, lambda: made(classes, slots, self._credentials))

    # ---- what the sandbox is given

    def _provided(self, keys: Mapping, name: str) -> tuple[Provision, ...]:
        """Read what the items of `inject` or `substitutions` provide to the sandbox."""
        if name not in keys:
            return ()
        node = keys[name][1]
        items = node.value if isinstance(node.value, tuple) else (node,)
        return tuple(one for item in items for one in self._provisions(item))

    def _provisions(self, node: Node) -> tuple[Provision, ...]:
        keys = node.value
        if not isinstance(keys, dict) or "secret" not in keys:
            return ()  # the item itself is refused
        secret = self._secret(keys["secret"][1])
        for key, needs in (("form", ("env", "file")), ("template", ("file",))):
            if key in keys and not any(one in keys for one in needs):
                self._fail(keys[key][0], f"`{key}` needs {' or '.join(f'`{one}`' for one in needs)}")
        form = self._checked(keys["form"][1], check_form) if "form" in keys else HOLE
        variables = self._variables(keys["env"][1]) if "env" in keys else {}
        made = [Provision(secret, ProvisionKind.ENV, name, form, text) for name, text in variables.items()]
        if "file" in keys:
            if "template" not in keys:
                self._fail(node, f"`file` needs `template`, its content with {MARK}")
            path = self._checked(keys["file"][1], check_path)
            text = self._checked(keys["template"][1], lambda text: check_text(ProvisionKind.FILE, text))
            made.append(Provision(secret, ProvisionKind.FILE, path, form, text))
        return tuple(made)

    def _variables(self, node: Node) -> dict[str, str]:
        if not isinstance(node.value, dict):
            return {self._checked(node, check_variable): MARK}
        if not node.value:
            self._fail(node, "env is empty")
        variables: dict[str, str] = {}
        for name, (key, item) in node.value.items():
            self._made(key, lambda name=name: check_variable(name))  # type: ignore[misc]
            variables[name] = self._checked(item, lambda text: check_text(ProvisionKind.ENV, text))
        return variables

    def _checked(self, node: Node, check: Callable[[str], None]) -> str:
        text = self._text(node)
        self._made(node, lambda: check(text))
        return text

    # ---- checks across rules

    def _check_cycles(self, entries: Mapping, policies: dict[str, PolicySource]) -> None:
        done: set[str] = set()

        def visit(name: str, path: tuple[str, ...]) -> None:
            if name in path:
                self._fail(entries[path[-1]][0], f"extends runs in a circle: {' -> '.join((*path, name))}")
            if name not in done and name not in self._presets:
                if len(path) > 32:
                    self._fail(entries[name][0], "extends is more than 32 policies deep")
                for base in policies[name].extends:
                    visit(base, (*path, name))
                done.add(name)

        for name in policies:
            visit(name, ())

    def _check_injections(self, policy: Node, rules: list[Rule]) -> None:
        """Check the rules of a policy with its bases. `policy` is the place of what concerns rules of presets only."""
        by_host: dict[str, list[tuple[Rule, SecretPlan]]] = {}
        if len(rules) > MAX_RULES:
            last = self._rule_places.get(rules[-1].id, policy)
            self._fail(last, f"more than {MAX_RULES} rules in one policy with its bases")
        self._check_logins(policy, rules)
        for rule in rules:
            for plan in rule.request_plans:
                for host in rule.hosts:
                    rivals = by_host.setdefault(host.text, [])
                    for other, rival in rivals:
                        if collide(rival, plan) and _meet(rule, other):
                            places = [(self._rule_places.get(rule.id), other), (self._rule_places.get(other.id), rule)]
                            place, against = next((one for one in places if one[0] is not None), (None, other))
                            which = rule.id if place is None else "this rule"
                            self._fail(
                                place or policy,
                                f"{which} and {against.id} set {plan.place} of the same requests to {host.text}",
                            )
                    rivals.append((rule, plan))

    def _check_provisions(self, rules: list[Rule]) -> None:
        agreed: dict[tuple[str, ...], tuple[Rule, tuple[str, ...]]] = {}
        every: set[Provision] = set()
        for rule in rules:
            for one in rule.provisions:
                every.add(one)
                place: tuple[str, ...] = (one.name,)
                value: tuple[str, ...] = (one.secret, one.form, one.text)
                if one.kind is ProvisionKind.FILE:
                    place, value = (one.name, one.secret), (one.form,)
                other, agreed_value = agreed.setdefault(place, (rule, value))
                if agreed_value != value:
                    self._fail(
                        self._rule_places[rule.id], f"this rule and {other.id} provide {one.name} in different ways"
                    )
            if len(every) > MAX_PROVISIONS:
                self._fail(self._rule_places[rule.id], f"more than {MAX_PROVISIONS} variables and files in one policy")

    def _check_logins(self, policy: Node, rules: list[Rule]) -> None:
        by_host: dict[str, list[Rule]] = {}
        for rule in rules:
            for host in rule.hosts if rule.login is not None else ():
                rivals = by_host.setdefault(host.text, [])
                for other in rivals:
                    if rule.login and other.login and rule.login.collides(other.login) and _meet(rule, other):
                        self._fail(
                            self._rule_places.get(rule.id, policy),
                            f"this rule and {other.id} give the same sessions with {host.text} different logins",
                        )
                rivals.append(rule)

    # ---- values

    def _allow_pattern(self, node: Node) -> HostPattern:
        return self._pattern(node, parse_pattern)

    def _deny_pattern(self, node: Node) -> HostPattern:
        return self._pattern(node, parse_any_pattern)

    def _pattern(self, node: Node, parse: Callable[[str], HostPattern]) -> HostPattern:
        text = self._text(node)
        pattern = self._made(node, lambda: parse(text))
        if not text.isascii():
            self._remark(node, f"this name is stored, matched and logged as {pattern.text}")
        return pattern

    def _exact_host(self, node: Node) -> str:
        text = self._text(node)
        return self._made(node, lambda: canonical_host(text))

    def _ceiling_host(self, node: Node) -> str:
        return ANY_PUBLIC if node.value == ANY_PUBLIC else self._deny_pattern(node).text

    def _deny_target(self, node: Node) -> str:
        text = self._text(node)
        return network_text(text) if is_network(text) else self._deny_pattern(node).text

    def _allow_target(self, node: Node) -> str:
        text = self._text(node)
        return network_text(text) if is_network(text) else self._allow_pattern(node).text

    def _network(self, node: Node) -> str:
        text = self._text(node)
        return self._made(node, lambda: network_text(text))

    def _port(self, node: Node) -> int:
        value = node.value
        if type(value) is not int:
            self._fail(node, "expected a port number")
        self._made(node, lambda: check_port(value))
        return value

    def _database(self, node: Node) -> str:
        text = self._text(node)
        self._made(node, lambda: check_database(text))
        return text

    def _method(self, node: Node) -> str:
        text = self._text(node)
        if not is_token(text):
            self._fail(node, f"{text[:100]!a} is not an HTTP method")
        if text in FORBIDDEN_METHODS:
            self._fail(node, f"{text} is never relayed")
        if text != text.upper():
            self._remark(node, f"methods are case-sensitive: {text[:100]} matches only in this case")
        return text

    def _path(self, node: Node) -> PathPattern:
        text = literal(self._text(node))
        pattern = self._made(node, lambda: PathPattern(text))
        if pattern.splits_segment:
            self._remark(node, f"{text[:100]!a} also matches inside a segment; end it in `/*` for what is below it")
        return pattern

    def _numbers[T](self, node: Node, kind: Callable[..., T]) -> T:
        names = [item.name for item in fields(kind)]  # type: ignore[arg-type]
        keys = self._mapping(node, *names)
        values: dict[str, int] = {}
        for name, (_, item) in keys.items():
            if type(item.value) is int:
                values[name] = item.value
            elif name in names:
                self._note(item, "expected a whole number")
        values = {name: value for name, value in values.items() if name in names}
        return self._made(node, lambda: kind(**values))

    # ---- generic

    def _mapping(self, node: Node, *known: str) -> Mapping:
        if not isinstance(node.value, dict):
            self._fail(node, "expected a mapping")
        for name, (key, _) in node.value.items():
            if name not in known:
                hint = meant(name, known)
                self._note(key, f"unknown key {name[:100]!a}{hint or ';'} known here: {', '.join(known)}")
        return node.value

    def _list[T](self, keys: Mapping, name: str, read: Callable[[Node], T], *, empty: bool = False) -> tuple[T, ...]:
        if name not in keys:
            return ()
        node = keys[name][1]
        if not isinstance(node.value, tuple):
            self._fail(node, f"{name} must be a list")
        if not node.value and not empty:
            self._fail(node, f"{name} is empty: leave the key out, or say what it means")
        if len(node.value) > MAX_NAMES:
            self._fail(node, f"{name} has more than {MAX_NAMES} entries")
        values: dict[T, None] = {}
        wrong: PolicyError | None = None
        for item in node.value:
            try:
                value = read(item)
                if value in values:
                    self._fail(item, f"{name} has this entry twice")
                values[value] = None
            except PolicyError as error:
                self._problems.note(error)
                wrong = wrong or error
        if wrong is not None:  # noted already; an incomplete list is no result
            raise wrong
        return tuple(values)

    def _one_or_many[T](self, keys: Mapping, one: str, many: str, read: Callable[[Node], T]) -> tuple[T, ...]:
        return (read(keys[one][1]),) if one in keys else self._list(keys, many, read)

    def _items(self, keys: Mapping, one: str, many: str) -> tuple[Node, ...]:
        if one in keys:
            return (keys[one][1],)
        value = keys[many][1].value
        return value if isinstance(value, tuple) else ()

    def _port_places(self, keys: Mapping, count: int) -> tuple[Node, ...]:
        if "ports" in keys:
            return self._items(keys, "port", "ports")
        place = next(
            (keys[key][0] for key in ("schemes", "host", "hosts", "address", "addresses") if key in keys), None
        )
        return (place,) * count if place is not None else ()

    def _flag(self, keys: Mapping, name: str) -> bool:
        if name not in keys:
            return False
        node = keys[name][1]
        if not isinstance(node.value, bool):
            self._fail(node, f"{name} must be true or false")
        return node.value

    def _choice[T: StrEnum](self, node: Node, kind: type[T]) -> T:
        text = self._text(node)
        known = {member.value: member for member in kind}
        if text not in known:
            self._fail(node, f"expected one of {', '.join(known)}{meant(text, known)}")
        return known[text]

    def _text(self, node: Node) -> str:
        if not isinstance(node.value, str):
            self._fail(node, "expected text; quote it if it is one")
        return node.value

    def _check_policy_name(self, key: Node, name: str) -> None:
        self._check_name(key, name)
        if name == DENY_ALL_NAME:
            self._fail(key, f"{DENY_ALL_NAME} is built in and cannot be defined")

    def _check_name(self, node: Node, name: str) -> None:
        if not 0 < len(name) <= 63 or name[0] not in _NAME_FIRST or not _NAME_REST.issuperset(name):
            self._fail(node, "a name is up to 63 of a-z, 0-9, `.`, `_` and `-`, beginning with a letter or digit")

    def _made[T](self, node: Node, make: Callable[[], T]) -> T:
        """Return the result of `make`; its ValueError becomes an error at the node."""
        try:
            return make()
        except PolicyError:
            raise
        except ValueError as error:
            raise PolicyError(self._origin, node.line, node.column, str(error)) from None

    def _note(self, node: Node, problem: str) -> None:
        """Note a problem and continue."""
        self._problems.note(PolicyError(self._origin, node.line, node.column, problem))

    def _remark(self, node: Node, text: str) -> None:
        self._remarks.append(Remark(node.line, node.column, text))

    def _fail(self, node: Node, problem: str) -> Never:
        raise PolicyError(self._origin, node.line, node.column, problem) from None


def _is_login(node: Node) -> bool:
    """Whether an injection is a login at a database server."""
    return isinstance(node.value, dict) and "as" in node.value and node.value["as"][1].value == LOGIN_KIND


def _meet(first: Rule, second: Rule) -> bool:
    """Whether both rules match some request to a host of both."""
    methods = not (first.methods and second.methods) or not set(first.methods).isdisjoint(second.methods)
    paths = not (first.paths and second.paths) or any(
        mine.overlaps(theirs) for mine in first.paths for theirs in second.paths
    )
    databases = not (first.databases and second.databases) or not set(first.databases).isdisjoint(second.databases)
    return methods and paths and databases and not set(first.endpoints).isdisjoint(second.endpoints)
