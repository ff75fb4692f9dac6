"""`sallyport policy check` and `sallyport policy explain`: they print a result and return an exit code.

- 0: the file is valid, or the request is allowed. 1: the request is denied. 2: the file or an argument is invalid.
- `explain` calls the same functions as the gateway, in the same order, and prints each answer (`policy.explain`). If
  the host is an address, it judges TLS without a server name. It resolves no name: `address` gives the address.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address, ip_network
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from policy import explain as explanation
from policy.addresses import IPNetwork
from policy.compile import UnknownPolicy, compile_named, secrets_of
from policy.compiled import CompiledPolicy, SecretUse
from policy.decision import AllowRequest, Deny
from policy.destination import decide_address
from policy.document import DENY_ALL_NAME, PRESET, PolicyDocument
from policy.explain import Bounds, Form
from policy.facts import AddressSource, Destination, RequestFacts, Scheme, SessionFacts
from policy.load import load
from policy.logins import AnyPlan
from policy.names import InvalidName, canonical_host
from policy.placeholders import provisions_of
from policy.problems import PolicyError, meant
from policy.rules import Rule
from policy.sessions import AllowSession

OK, DENIED, WRONG = 0, 1, 2


class KnownSecrets(Protocol):
    """What is known of secrets. `unknown` says why nothing is known of those in the vault, empty if they are known."""

    @property
    def unknown(self) -> str: ...

    def remark(self, use: SecretUse, uses: Iterable[SecretUse] = ()) -> str:
        """Say what keeps the vault from releasing a secret for a use; empty if nothing that is known here does.

        Args:
            uses: every use of the policy.
        """
        ...


def check(path: Path | str, stored: KnownSecrets | None = None) -> int:
    """Check a policy file, and print a summary or its problems.

    Args:
        stored: what is known of the secrets in the vault. What the vault lacks is no problem of the file.
    """
    document = _load(path)
    if document is None:
        return WRONG
    print(f"{document.origin}: good")
    ceiling = document.ceiling
    print(f"  ceiling: hosts {', '.join(ceiling.hosts)}; ports {', '.join(map(str, ceiling.ports))}")
    print(f"  default: {document.default}")
    for name in document.policies:
        policy = compile_named(document, name)
        print(f"  policy {name}: {len(policy.rules)} rules, {policy.mode}, {policy.digest[:16]}")
        for rule in policy.rules:
            if rule.id.startswith(PRESET):
                print(f"    rule {rule.id}: {_described(rule)}")
        uses = secrets_of(policy)
        for use in uses:
            print(f"    secret {use.secret} -> {use.scheme}://{use.host}:{use.port} as {use.kind} ({use.binding})")
            if stored is not None and (lack := stored.remark(use, uses)):
                print(f"      note: {use.secret}: {lack}")
        for rule in policy.rules:
            if rule.request_plans or rule.client_credentials is not None:
                print(f"    client credentials in {rule.id}: {rule.client_credentials or document.client_credentials}")
        for given in provisions_of(policy):
            print(f"    gives {given.kind} {given.name} with a placeholder of secret {given.secret}")
    if stored is not None and stored.unknown:
        print(f"  secrets: not checked: {stored.unknown}")
    for remark in document.remarks:
        print(f"{document.origin}:{remark.line}:{remark.column}: note: {remark.text}")
    return OK


def explain(
    file: Path | str,
    policy: str | None,
    host: str,
    port: int,
    scheme: str,
    method: str = "GET",
    path: str = "/",
    *,
    database: str | None = None,
    address: str | None = None,
    exceptions: Sequence[str] = (),
    mapped: Mapping[str, Sequence[str]] = MappingProxyType({}),
    form: Form | None = None,
    bounds: Bounds | None = None,
    stored: KnownSecrets | None = None,
) -> int:
    """Print the gateway's verdict on one request or database session under a policy of the file, with the reasons.

    Args:
        database: the name of the session's database; for the scheme postgres only.
        policy: the name of the policy; None means the file's default, or its only policy if the default is deny-all.
        address: the address of the host; it is judged, too.
        exceptions: networks that the operator permits in addition to public ones.
        mapped: the operator's fixed addresses of names.
        form: returns why the gateway refuses the form of a request. Without it the output says that the form was not
            checked.
        bounds: returns the limit that a resolved name exceeds.
        stored: what is known of the secrets in the vault.
    """
    document = _load(file)
    if document is None:
        return WRONG
    if policy is None:
        policy = document.default
        if policy == DENY_ALL_NAME and len(document.policies) == 1:
            (policy,) = document.policies
    try:
        compiled = compile_named(document, policy)
        opened = tuple(ip_network(network) for network in exceptions)
        literal = _literal(host, port, scheme)
        if literal is not None:
            print(f"TLS without a server name to {host}:{port} under {compiled.name} ({compiled.digest[:16]})")
            return _explain_addresses(compiled, [literal], opened)
        given = None if address is None else ip_address(address)
        asked: RequestFacts | SessionFacts = RequestFacts(
            canonical_host(host), port, Scheme(scheme), method, *_split(path)
        )
        if scheme == Scheme.POSTGRES:
            asked = SessionFacts(canonical_host(host), port, database or "")
    except UnknownPolicy as error:
        hint = meant(policy, (*document.policies, DENY_ALL_NAME))
        print(f"{error}{hint or '; there are ' + ', '.join((*document.policies, DENY_ALL_NAME))}", file=sys.stderr)
        return WRONG
    except InvalidName as error:
        print(str(error), file=sys.stderr)
        return WRONG
    except ValueError:
        print("scheme must be http, https or postgres, and an address an IP address", file=sys.stderr)
        return WRONG
    if isinstance(asked, SessionFacts):
        if database is None:
            print("a session needs --database", file=sys.stderr)
            return WRONG
        shown = f"session {scheme}://{asked.host}:{port}/{asked.database}"
    else:
        shown = f"{method} {scheme}://{asked.host}:{port}{asked.path}"
    print(f"{shown} under {compiled.name} ({compiled.digest[:16]})")
    fixed = [ip_address(text) for text in mapped.get(asked.host, ())]
    source = AddressSource.MAPPED if fixed else AddressSource.RESOLVED
    places = [
        Destination(asked.host, place, port, asked.flow.scheme, source)
        for place in fixed or ([] if given is None else [given])
    ]
    code = _explain(compiled, asked, form, None if fixed else bounds, stored)
    return _explain_addresses(compiled, places, opened) if code == OK and places else code


def _literal(host: str, port: int, scheme: str) -> Destination | None:
    try:
        address = ip_address(host)
    except ValueError:
        return None
    return Destination(None, address, port, Scheme(scheme), AddressSource.LITERAL)


def _explain_addresses(policy: CompiledPolicy, places: list[Destination], opened: tuple[IPNetwork, ...]) -> int:
    """Print the verdict on each address. One allowed address is enough for the flow."""
    answers = [decide_address(policy, place, opened) for place in places]
    for place, answer in zip(places, answers, strict=True):
        if isinstance(answer, Deny):
            _denied("address", answer)
        else:
            _allowed("address", answer.rule, f"{place.address} is dialled", answer.observed)
    return DENIED if all(isinstance(answer, Deny) for answer in answers) else OK


def _explain(
    policy: CompiledPolicy,
    asked: RequestFacts | SessionFacts,
    form: Form | None,
    bounds: Bounds | None,
    stored: KnownSecrets | None,
) -> int:
    if isinstance(asked, SessionFacts):
        explained, what = explanation.explain_session(policy, asked, bounds), "session"
    else:
        explained, what = explanation.explain(policy, asked, form, bounds), "request"
    if isinstance(explained.name, Deny):
        return _denied("name", explained.name)
    _allowed("name", explained.name.rule, "may be resolved", explained.name.observed)
    flow, decision = explained.flow, explained.request
    if isinstance(flow, Deny):
        return _denied("flow", flow)
    if flow is not None:
        _allowed("flow", flow.rule, str(flow.treatment), flow.observed)
    if isinstance(decision, Deny):
        return _denied(what, decision)
    if decision is None:
        print("  request  not seen: the flow is relayed unopened, if")
    elif isinstance(decision, AllowSession):
        _allowed("session", decision.rule, "begins, if", None)
    else:
        _allowed("request", decision.rule, "is sent, if", decision.observed)
    for condition in explained.conditions:
        print(f"           - {condition}")
    for plan in _plans(decision):
        print(f"  inject   {plan.place} from secret {plan.secret} as {plan.kind} ({plan.binding})")
        use = SecretUse(plan.secret, asked.host, asked.port, asked.flow.scheme, plan.kind, plan.slot, plan.binding)
        if stored is not None and (
            lack := stored.remark(use, secrets_of(policy)) or (stored.unknown and f"not checked ({stored.unknown})")
        ):
            print(f"  vault    {plan.secret}: {lack}")
    if isinstance(decision, AllowRequest) and decision.client_credentials is not None:
        print(f"  client   credentials of its own: {decision.client_credentials}")
    return OK if explained.sent else DENIED


def _plans(decision: AllowRequest | AllowSession | None) -> tuple[AnyPlan, ...]:
    match decision:
        case AllowRequest():
            return decision.plans
        case AllowSession():
            return (decision.login,)
        case None:
            return ()


def _allowed(what: str, rule: str, outcome: str, observed: Deny | None) -> None:
    print(f"  {what:<8} {'allow  ' if observed is None else 'observe'} {rule}: {outcome}")
    if observed is not None:
        print(f"           would be denied by {observed.rule}: {observed.reason}")


def _denied(what: str, deny: Deny) -> int:
    print(f"  {what:<8} DENY   {deny.rule}: {deny.reason}")
    return DENIED


def _split(path: str) -> tuple[str, str]:
    before, _, query = path.partition("?")
    return before, query


def _described(rule: Rule) -> str:
    """Return a rule for names in one line."""
    hosts = ", ".join(host.text for host in rule.hosts)
    ports = ", ".join(f"{endpoint.scheme}:{endpoint.port}" for endpoint in rule.endpoints)
    methods = ", ".join(rule.methods) or "any method"
    paths = ", ".join(path.text for path in rule.paths) or "any path"
    return f"{rule.action} {methods} on {ports} to {hosts}, {paths}"


def _load(path: Path | str) -> PolicyDocument | None:
    try:
        return load(path)
    except PolicyError as error:
        for problem in error.problems:
            print(str(problem), file=sys.stderr)
        return None
